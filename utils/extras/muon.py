"""Muon: orthogonalised momentum for the matrices inside a model, AdamW for the rest.

K. Jordan 2024, kellerjordan.github.io/posts/muon, with the scale of Liu et al. 2025
(arXiv:2502.16982), which makes AdamW's learning rate and decay fit. torch.optim.Muon takes only
matrices: here a convolution is the matrix of its filters, [out, in x height x width]. Wide matrices
are orthogonalised by their Gram matrices, in half the time: "Gram Newton-Schulz", with a restart
(dao-lab.ai/blog/2026/gram-newton-schulz).

Used with ``--optimizer muon``. Interface: `Muon`, an optimiser, and `hidden_matrices`. Without this
file, the other optimisers remain.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from utils.amp import has_amx
from utils.world import local, whole

ITERATIONS, EPSILON = 5, 1e-7
WIDE = 2  # columns : rows, from which on Gram matrices are faster
# Iterations per Gram matrix. It is recomputed before rounding errors, which act as negative
# eigenvalues, have grown. In bfloat16, 3 and 2 end closest to the exact iteration.
STAGES = (3, 2)
A, B, C = 3.4445, -4.7750, 2.0315  # of the quintic polynomial: the steepest at zero


class Muon(torch.optim.Optimizer):
    """Muon for the groups with ``"muon": True``, AdamW for the others."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        momentum: float,
        betas: tuple[float, ...],
        fused: bool = False,
    ):
        """``groups`` have their own weight decay. ``fused``: let a loss scaler skip steps on the
        device, as AdamW's fused kernel does."""
        rest = [group for group in groups if not group.get("muon")]
        self.adamw = torch.optim.AdamW(rest, lr, betas=betas, fused=fused)
        groups = [group for group in groups if group.get("muon")] + self.adamw.param_groups
        super().__init__(groups, {"lr": lr})
        self.momentum = momentum
        self._step_supports_amp_scaling = fused  # asks scalers for grad_scale and found_inf
        on_gpu = groups[0]["params"][0].is_cuda
        fast = torch.cuda.is_bf16_supported(including_emulation=False) if on_gpu else has_amx()
        self.dtype = torch.bfloat16 if fast else torch.float32  # of the orthogonalisation

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update all weights that have gradients. ``closure`` is not supported."""
        # Loading a state replaces both.
        self.adamw.param_groups = [g for g in self.param_groups if not g.get("muon")]
        self.adamw.state = self.state
        found_inf = getattr(self, "found_inf", None)
        self.adamw.grad_scale, self.adamw.found_inf = getattr(self, "grad_scale", None), found_inf
        self.adamw.step()
        skip = None if found_inf is None else whole(found_inf) > 0
        for group in self.param_groups:
            for weight in group["params"] if group.get("muon") else ():
                if weight.grad is not None:
                    self._update(weight, group["lr"], group["weight_decay"], skip)

    def _update(self, weight: nn.Parameter, lr: float, decay: float, skip: Tensor | None) -> None:
        """``skip``: a bool on the device that leaves weight and momentum as they are."""
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        mean, gradient, own = state["momentum_buffer"], local(weight.grad), local(weight)
        if self.adamw.grad_scale is not None:
            gradient.div_(self.adamw.grad_scale)
        if skip is not None:
            before = own.clone()
            gradient.copy_(torch.where(skip, local(mean), gradient))  # lerp_ of equals is exact
        mean.lerp_(weight.grad, 1 - self.momentum)
        update = weight.grad.lerp(mean, self.momentum)  # Nesterov's
        rows, columns = len(weight), weight.numel() // len(weight)
        weight.mul_(1 - lr * decay)
        scale = 0.2 * math.sqrt(max(rows, columns))  # AdamW's updates have a mean square of 0.2^2
        change = orthogonal(whole(update).reshape(rows, columns), self.dtype).reshape(weight.shape)
        if hasattr(update, "placements"):
            from torch.distributed.tensor import distribute_tensor  # half a second to import

            mesh, placements = update.device_mesh, update.placements
            change = distribute_tensor(change, mesh, placements, src_data_rank=None)
        weight.add_(change, alpha=-lr * scale)
        if skip is not None:
            own.copy_(torch.where(skip, before, own))


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """About U V^T of the singular value decomposition U S V^T of a matrix, by Newton-Schulz
    iteration in ``dtype``; singular values end between 0.5 and 1.5."""
    x = matrix.to(dtype, copy=True)
    if len(x) > x.shape[1]:
        x = x.T
    x.div_(x.norm().clamp(min=EPSILON))  # largest singular value at most 1
    if x.shape[1] >= WIDE * len(x):
        for iterations in STAGES:
            x = _factor(x @ x.T, iterations) @ x
    else:
        for _ in range(ITERATIONS):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T if len(matrix) > matrix.shape[1] else x


def _factor(gram: Tensor, iterations: int) -> Tensor:
    """The matrix by which some iterations multiply another from the left, given its Gram matrix."""
    factor = None
    for left in reversed(range(iterations)):
        step = torch.addmm(gram, gram, gram, beta=B, alpha=C)
        step.diagonal().add_(A)
        factor = step if factor is None else step @ factor
        if left:
            gram = step @ gram @ step  # polynomials of one symmetric matrix commute
    return factor


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trained weights for Muon: of linear layers, attention and convolutions.

    As by Muon's author, not of the first layer, which sees pixels, nor the last, whose rows are
    classes; nor of grouped convolutions, whose filters see different channels.
    """
    layers = (nn.Linear, nn.Conv2d, nn.MultiheadAttention)
    inside = [module for module in model.modules() if isinstance(module, layers)][1:-1]
    inside = [layer for layer in inside if getattr(layer, "groups", 1) == 1]
    attention = nn.MultiheadAttention
    weights = [x.in_proj_weight if isinstance(x, attention) else x.weight for x in inside]
    return [weight for weight in weights if weight is not None and weight.requires_grad]
