"""``--optimizer muon``: orthogonalised momentum for a model's inner matrices, AdamW for the rest.

Interface: `Muon`, an optimiser, and `hidden_matrices`. Without this file, only the other optimisers
can be used.

K. Jordan 2024, kellerjordan.github.io/posts/muon, with the scale of Liu et al. 2025
(arXiv:2502.16982), so that AdamW's learning rate and weight decay can be used. torch.optim.Muon
supports only matrices; here a convolution counts as a matrix [out, in x height x width]. For wide
matrices, "Gram Newton-Schulz" with a restart (dao-lab.ai/blog/2026/gram-newton-schulz) iterates on
the Gram matrix, which takes half the time.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from utils.amp import has_amx
from utils.world import local, whole

ITERATIONS, EPSILON = 5, 1e-7
WIDE = 2  # ratio of columns to rows above which Gram matrices are faster
# Iterations per Gram matrix. It is recomputed before rounding errors, which act as negative
# eigenvalues, grow too large. In bfloat16, 3 and 2 came closest to the exact iteration.
STAGES = (3, 2)
A, B, C = 3.4445, -4.7750, 2.0315  # Jordan's quintic polynomial, with a steep slope at zero


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
        """``groups``: each has its own weight decay. ``fused``: let a loss scaler skip steps on the
        device, as with AdamW's fused kernel."""
        rest = [group for group in groups if not group.get("muon")]
        self.adamw = torch.optim.AdamW(rest, lr, betas=betas, fused=fused)
        groups = [group for group in groups if group.get("muon")] + self.adamw.param_groups
        super().__init__(groups, {"lr": lr})
        self.momentum = momentum
        self._step_supports_amp_scaling = fused  # loss scalers then set grad_scale and found_inf
        on_gpu = groups[0]["params"][0].is_cuda
        fast = torch.cuda.is_bf16_supported(including_emulation=False) if on_gpu else has_amx()
        self.dtype = torch.bfloat16 if fast else torch.float32  # of the orthogonalisation

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update all weights that have gradients. ``closure`` is not supported."""
        # load_state_dict replaces the groups and the state, so AdamW gets them again in each step.
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
        """Update one weight. ``skip``: a bool on the device; if true, nothing changes."""
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        mean, gradient, own = state["momentum_buffer"], local(weight.grad), local(weight)
        if self.adamw.grad_scale is not None:
            gradient.div_(self.adamw.grad_scale)
        if skip is not None:
            before = own.clone()
            gradient.copy_(torch.where(skip, local(mean), gradient))  # so lerp_ keeps the mean
        mean.lerp_(weight.grad, 1 - self.momentum)
        update = weight.grad.lerp(mean, self.momentum)  # Nesterov's
        rows, columns = len(weight), weight.numel() // len(weight)
        weight.mul_(1 - lr * decay)
        scale = 0.2 * math.sqrt(max(rows, columns))  # AdamW's updates have an RMS of 0.2
        change = orthogonal(whole(update).reshape(rows, columns), self.dtype).reshape(weight.shape)
        if hasattr(update, "placements"):
            from torch.distributed.tensor import distribute_tensor  # half a second to import

            mesh, placements = update.device_mesh, update.placements
            change = distribute_tensor(change, mesh, placements, src_data_rank=None)
        weight.add_(change, alpha=-lr * scale)
        if skip is not None:
            own.copy_(torch.where(skip, before, own))


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Approximate U V^T, where U S V^T is the singular value decomposition of ``matrix``, with
    Newton-Schulz iterations in ``dtype``. The result's singular values are from 0.5 to 1.5."""
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
    """Return the left factor that applies ``iterations`` to a matrix with Gram matrix ``gram``."""
    factor = None
    for left in reversed(range(iterations)):
        step = torch.addmm(gram, gram, gram, beta=B, alpha=C)
        step.diagonal().add_(A)
        factor = step if factor is None else step @ factor
        if left:
            gram = step @ gram @ step  # polynomials of one symmetric matrix commute
    return factor


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that Muon trains: those of linear layers, attention and convolutions.

    As Muon's author recommends, the first layer (pixels) and the last (classes) are left out. So
    are grouped convolutions, whose filters see different channels.
    """
    layers = (nn.Linear, nn.Conv2d, nn.MultiheadAttention)
    inside = [module for module in model.modules() if isinstance(module, layers)][1:-1]
    inside = [layer for layer in inside if getattr(layer, "groups", 1) == 1]
    attention = nn.MultiheadAttention
    weights = [x.in_proj_weight if isinstance(x, attention) else x.weight for x in inside]
    return [weight for weight in weights if weight is not None and weight.requires_grad]
