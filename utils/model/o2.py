"""Apex's amp in plain PyTorch: opt levels O0 to O3 with the numerics of NVIDIA Apex 25.04.

    O0  float32
    O1  float32 weights, autocast chooses the dtype per operation, dynamic loss scale
    O2  float16 weights except batch norm, float32 master weights, dynamic loss scale
    O3  float16 throughout, no master weights, loss scale 1

Apex removed amp in 2025 (documentation: https://nvidia.github.io/apex/amp.html). Interface: `Amp`
and `DistributedDataParallel` replace the parts of ``apex.amp`` and ``apex.parallel`` that training
scripts call. From the same gradients they compute bit-identical weights (tests/test_o2.py;
tests/test_real_apex.py compares with the original). Used only by imagenet_ddp_apex.py, which does
not start without this file.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn import parallel
from torch.nn.modules.batchnorm import _BatchNorm

from utils.model import kernels
from utils.start.errors import UserError
from utils.start.option_types import Options
from utils.start.world import World, as_state_dict

# ---- the loss scale, on the device

log = logging.getLogger(__name__)

SMALLEST = 2.0**-14  # at this scale, only gradients above 10**9 overflow float16
ENDLESS = 40  # consecutive skipped steps after which training stops
ENDLESSLY = "gradients overflow without end (the loss scale is {:.3g})"


class LossScaler:
    """Apex's loss scale: starts at 2**16, halves on overflow, doubles after 2000 clean steps.

    Scale, counters and overflow flag stay on ``device``, so that no step waits for it. ``fixed``:
    a constant scale. ``reports``: log each skipped step as soon as the host sees its flag.
    ``failure`` is None, or an error message if overflows do not end.
    """

    FIRST, LARGEST, GROWTH_INTERVAL = 2.0**16, 2.0**24, 2000

    def __init__(self, device: torch.device, fixed: float | None = None, reports: bool = True):
        self.dynamic, self.reports = fixed is None, reports
        self.value = torch.tensor(self.FIRST if fixed is None else fixed, device=device)
        self.clean_steps = torch.tensor(0, dtype=torch.int32, device=device)
        self.overflow = torch.tensor(0.0, device=device)
        self.skipped = torch.tensor(0.0, dtype=torch.float64, device=device)
        self.failure: str | None = None
        self.in_a_row = 0
        self.pending: deque[tuple[Tensor, Any]] = deque()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimiser's gradients by the scale, then adjust a dynamic scale.

        If a gradient is not finite, the optimiser's next step has no effect.
        """
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        weights = [weight for weight in weights if weight.grad is not None]
        self.overflow.zero_()
        for dtype in {weight.dtype for weight in weights}:
            gradients = [weight.grad for weight in weights if weight.dtype == dtype]
            inverse = self.value.reciprocal()
            kernels.check_and_unscale_all(gradients, self.overflow, inverse)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            vars(optimizer)["found_inf"] = self.overflow  # a fused optimiser reads it on the device
        elif bool(self.overflow):  # other optimisers need a host-device sync
            for weight in weights:
                weight.grad = None
        self.skipped += self.overflow
        if self.dynamic:
            kernels.update_scale(
                self.value, self.clean_steps, self.overflow, 2.0, 0.5, self.GROWTH_INTERVAL
            )
            self.value.clamp_(max=self.LARGEST)
        self._watch()

    def _watch(self) -> None:
        """Start copying flag and scale to the host, and read copies that have arrived."""
        seen, event = torch.stack((self.overflow, self.value)).to("cpu", non_blocking=True), None
        if self.value.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self.pending.append((seen, event))
        while self.pending:
            seen, event = self.pending[0]
            if event is not None and not event.query():
                return
            self.pending.popleft()
            overflow, scale = seen.tolist()
            self.in_a_row = self.in_a_row + 1 if overflow else 0
            is_lost = scale < SMALLEST if self.dynamic else self.in_a_row >= ENDLESS
            self.failure = ENDLESSLY.format(scale) if is_lost else None
            if overflow and self.reports:
                change = f"reducing loss scale to {scale}" if self.dynamic else f"scale {scale}"
                log.info(f"Gradient overflow.  Skipping step, loss scaler 0 {change}")

    def state_dict(self) -> dict[str, float]:
        """Return scale, consecutive clean steps and skipped steps. Waits for the device."""
        scale, clean = self.value.item(), self.clean_steps.item()
        return {"scale": scale, "clean_steps": clean, "skipped": int(self.skipped.item())}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a `state_dict`. A fixed scale does not change."""
        self.skipped.fill_(state["skipped"])
        if self.dynamic:
            self.value.fill_(state["scale"])
            self.clean_steps.fill_(int(state["clean_steps"]))


# ---- the opt levels


@dataclass(frozen=True)
class OptLevel:
    """The properties of an opt level. ``loss_scale`` is a number or "dynamic"."""

    half_weights: bool = False
    keep_batchnorm_fp32: bool = True
    master_weights: bool = False
    autocast: bool = False
    loss_scale: float | str = "dynamic"

    @property
    def input_dtype(self) -> torch.dtype:
        """The dtype in which the first layer computes."""
        return torch.float16 if self.half_weights or self.autocast else torch.float32


LEVELS = {
    "O0": OptLevel(loss_scale=1.0),
    "O1": OptLevel(autocast=True),
    "O2": OptLevel(half_weights=True, master_weights=True),
    "O3": OptLevel(half_weights=True, keep_batchnorm_fp32=False, loss_scale=1.0),
}


def choose(
    opt_level: str,
    keep_batchnorm_fp32: bool | str | None = None,
    loss_scale: float | str | None = None,
) -> OptLevel:
    """Return an opt level with overrides as in Apex; None keeps the level's own value.

    ``keep_batchnorm_fp32`` may also be the string "True" or "False". Raises: `UserError`.
    """
    level = LEVELS[opt_level]
    if keep_batchnorm_fp32 is not None:
        if opt_level == "O1":
            raise UserError("--keep-batchnorm-fp32 has no meaning with O1", on_every_rank=True)
        level = replace(level, keep_batchnorm_fp32=str(keep_batchnorm_fp32) == "True")
    return level if loss_scale is None else replace(level, loss_scale=loss_scale)


def from_args(args: Options) -> OptLevel:
    """Return the opt level requested on the command line. Raises: `UserError`."""
    return choose(args.opt_level, args.keep_batchnorm_fp32, args.loss_scale)


class Amp:
    """A replacement for the module ``apex.amp``, for one model and one optimiser.

    `initialize` sets ``scaler`` (the loss scale) and ``weights`` (the model in float32); snapshots
    contain both.
    """

    def __init__(self, world: World):
        self.world = world

    def initialize(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, opt_level: str, **overrides: Any
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Cast ``model`` and put the masters into ``optimizer`` (any number of groups), in place.

        The model still takes and returns float32. ``optimizer.step()`` copies the masters into the
        model's weights; after an overflow it does nothing. For overrides and errors see `choose`.
        """
        level = self.level = choose(opt_level, **overrides)
        fixed = None if isinstance(level.loss_scale, str) else level.loss_scale
        self.scaler = LossScaler(self.world.device, fixed, reports=self.world.is_main)
        if level.half_weights:
            _cast(model, level.keep_batchnorm_fp32)
            model.register_forward_pre_hook(lambda _, inputs: tuple(x.half() for x in inputs))
        if level.autocast:
            model.forward = torch.autocast(self.world.device.type, torch.float16)(model.forward)
        model.register_forward_hook(lambda _, inputs, logits: logits.float())
        self.masters = _make_masters(optimizer) if level.master_weights else {}
        # Cast existing momentum to the dtype of its weights.
        optimizer.load_state_dict(optimizer.state_dict())

        def named_masters() -> dict[str, nn.Parameter]:
            # In a state dict, a parameter shared by two modules has two names.
            named = model.named_parameters(remove_duplicate=False)
            return {name: self.masters[p] for name, p in named if p in self.masters}

        self.weights = Weights(model, named_masters)
        masters = self.masters
        optimizer.register_step_post_hook(lambda *_: _copy([*masters], [*masters.values()]))
        return model, optimizer

    @contextmanager
    def scale_loss(
        self, loss: Tensor, optimizer: torch.optim.Optimizer, delay_unscale: bool = False
    ) -> Iterator[Tensor]:
        """Yield the scaled loss (float32 scalar); call its backward within this context.

        Leaving the context unscales the gradients into the masters, checks for an overflow and
        adjusts the scale; ``delay_unscale`` skips this. Nothing waits for the device.
        """
        if self.level.loss_scale == 1.0 and not self.masters:
            yield loss.float()
            return
        yield loss.float() * self.scaler.value
        if delay_unscale:
            return
        gradients = {weight: weight.grad for weight in self.masters if weight.grad is not None}
        to_masters = {weight: torch.empty_like(self.masters[weight]) for weight in gradients}
        _copy([*to_masters.values()], [*gradients.values()])
        for weight, gradient in to_masters.items():
            self.masters[weight].grad, weight.grad = gradient, None
        self.scaler.unscale(optimizer)

    @staticmethod
    def master_params(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        """Return the parameters that the optimiser updates, in order: masters, if there are any."""
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class DistributedDataParallel(parallel.DistributedDataParallel):
    """torch's class, which averages gradients as ``apex.parallel.DistributedDataParallel`` does:
    it sums float16 gradients over the ranks, then divides. torch's own divides first."""

    def __init__(self, module: nn.Module):
        device = next(module.parameters()).device
        super().__init__(module, device_ids=[device] if device.type == "cuda" else None)
        self.broadcast_buffers = False  # as in Apex; evaluation copies rank 0's buffers
        if dist.get_world_size() > 1:
            self.register_comm_hook(None, _sum_and_divide)


@torch.no_grad()
def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    if to:  # torch rejects empty lists
        kernels.copy_all(to, source)


convert_syncbn_model = nn.SyncBatchNorm.convert_sync_batchnorm


def _sum_and_divide(_: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Sum over the ranks, then divide by the world size.

    Dividing first can underflow: a float16 gradient of 6e-8 becomes 0 with two ranks.
    """
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0].mul_(1 / dist.get_world_size()))


class Weights:
    """A model whose float16 weights have float32 masters.

    Its `state_dict` is the model in float32 under its usual names. It contains the masters, not the
    rounded weights, so that snapshots are exact and any other script can load them.
    """

    def __init__(self, model: nn.Module, named_masters: Callable[[], dict[str, nn.Parameter]]):
        """``named_masters`` returns the masters under the names of their weights."""
        self.model, self.named_masters = model, named_masters

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's state dict in float32, with masters in place of their weights."""
        own: dict[str, Tensor] = self.model.state_dict()
        masters = self.named_masters()
        state = {name: masters.get(name, value).detach() for name, value in own.items()}
        state = {n: x.float() if x.is_floating_point() else x for n, x in state.items()}
        return as_state_dict(state, own)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load float32 (or float16) weights into the model and the masters."""
        self.model.load_state_dict(as_state_dict(state, self.model.state_dict()))
        for name, master in self.named_masters().items():
            master.copy_(state[name])


@torch.no_grad()
def _make_masters(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, nn.Parameter]:
    """Replace each trained float16 parameter in ``optimizer`` with a float32 copy."""
    masters = {}
    for group in optimizer.param_groups:
        for i, weight in enumerate(group["params"]):
            if weight.dtype == torch.float16 and weight.requires_grad:
                # Copy the rounded weight, as Apex does.
                master = masters[weight] = nn.Parameter(weight.detach().float())
                group["params"][i] = master
                if weight in optimizer.state:
                    optimizer.state[master] = optimizer.state.pop(weight)
    return masters


def _cast(model: nn.Module, keep_batchnorm_fp32: bool) -> None:
    for module in model.modules():
        # Apex's rule: batch norm without affine parameters becomes float16.
        if keep_batchnorm_fp32 and isinstance(module, _BatchNorm) and module.affine:
            continue
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point():
                tensor.data = tensor.data.half()
