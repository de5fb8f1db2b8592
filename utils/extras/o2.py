"""Apex's amp in plain PyTorch: the opt levels O0 to O3 with the numerics of NVIDIA Apex 25.04.

    O0  float32
    O1  float32 weights, autocast decides per operation, dynamic loss scale
    O2  float16 weights except batch norm, float32 master weights, dynamic loss scale
    O3  float16 throughout, no master weights, loss scale 1

Apex removed amp in 2025 (its documentation: https://nvidia.github.io/apex/amp.html). `Amp` and
`DistributedDataParallel` have the calls and arguments of ``apex.amp`` and ``apex.parallel`` that
training scripts use; on the same gradients they compute the same weights, bit for bit
(tests/test_o2.py, and tests/test_real_apex.py against the original). Used by imagenet_ddp_apex.py
alone, which does not start without this file.
"""

import argparse
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import parallel
from torch.nn.modules.batchnorm import _BatchNorm

from utils.errors import UserError
from utils.world import World

# ---- the loss scale, on the device

log = logging.getLogger(__name__)

SMALLEST = 2.0**-14  # at this scale, only gradients above 10**9 overflow float16
ENDLESS = 40  # skipped steps in a row
ENDLESSLY = "gradients overflow without end (the loss scale is {:.3g})"


class LossScaler:
    """Apex's loss scale: 2**16 at first, halved on overflow, doubled after 2000 clean steps.

    Scale, counters and overflow flag stay on ``device``, so that no step waits for it. ``fixed``:
    a constant scale. ``reports``: log each skipped step as soon as the host sees its flag.
    ``failure`` is an error message once steps are skipped without end, else None.
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
        """Divide the optimiser's gradients by the scale, and move a dynamic scale.

        If a gradient is not finite, the optimiser's next step does nothing.
        """
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        weights = [weight for weight in weights if weight.grad is not None]
        self.overflow.zero_()
        for dtype in {weight.dtype for weight in weights}:
            gradients = [weight.grad for weight in weights if weight.dtype == dtype]
            inverse = self.value.reciprocal()
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.overflow, inverse)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf = self.overflow  # a fused optimiser reads it on the device
        elif bool(self.overflow):  # any other one costs a host-device sync
            for weight in weights:
                weight.grad = None
        self.skipped += self.overflow
        if self.dynamic:
            torch._amp_update_scale_(
                self.value, self.clean_steps, self.overflow, 2.0, 0.5, self.GROWTH_INTERVAL
            )
            self.value.clamp_(max=self.LARGEST)
        self._watch()

    def _watch(self) -> None:
        """Copy flag and scale to the host, and read those of earlier steps that have arrived."""
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
        """Scale, clean steps in a row, and skipped steps. Waits for the device."""
        scale, clean = self.value.item(), self.clean_steps.item()
        return {"scale": scale, "clean_steps": clean, "skipped": int(self.skipped.item())}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a `state_dict`; a fixed scale stays as it is."""
        self.skipped.fill_(state["skipped"])
        if self.dynamic:
            self.value.fill_(state["scale"])
            self.clean_steps.fill_(int(state["clean_steps"]))


# ---- the opt levels


@dataclass(frozen=True)
class OptLevel:
    """An opt level; ``loss_scale`` is a number or "dynamic"."""

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
    """An opt level with Apex's overrides; None keeps the level's own value.

    ``keep_batchnorm_fp32`` may be the text True or False. Raises: `UserError`.
    """
    level = LEVELS[opt_level]
    if keep_batchnorm_fp32 is not None:
        if opt_level == "O1":
            raise UserError("--keep-batchnorm-fp32 has no meaning with O1", on_every_rank=True)
        level = replace(level, keep_batchnorm_fp32=str(keep_batchnorm_fp32) == "True")
    return level if loss_scale is None else replace(level, loss_scale=loss_scale)


def from_args(args: argparse.Namespace) -> OptLevel:
    """The opt level that the command line asks for. Raises: `UserError`."""
    return choose(args.opt_level, args.keep_batchnorm_fp32, args.loss_scale)


class Amp:
    """In place of the module ``apex.amp``, for one model and one optimiser.

    `initialize` sets ``scaler`` (the loss scale) and ``weights`` (the model in float32), which
    snapshots save.
    """

    def __init__(self, world: World):
        self.world = world

    def initialize(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, opt_level: str, **overrides: Any
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Cast ``model`` and give ``optimizer`` (any number of groups) the masters, in place.

        The model then takes and returns float32; ``optimizer.step()`` does nothing after an
        overflow, and copies the masters into the model's weights. Overrides and errors: `choose`.
        """
        level = self.level = choose(opt_level, **overrides)
        fixed = None if level.loss_scale == "dynamic" else level.loss_scale
        self.scaler = LossScaler(self.world.device, fixed, reports=self.world.is_main)
        if level.half_weights:
            _cast(model, level.keep_batchnorm_fp32)
            model.register_forward_pre_hook(lambda _, inputs: tuple(x.half() for x in inputs))
        if level.autocast:
            model.forward = torch.autocast(self.world.device.type, torch.float16)(model.forward)
        model.register_forward_hook(lambda _, inputs, logits: logits.float())
        self.masters = _make_masters(optimizer) if level.master_weights else {}
        # Momentum that exists already takes the dtype of its weights.
        optimizer.load_state_dict(optimizer.state_dict())

        def named_masters() -> dict[str, nn.Parameter]:
            # A parameter that two modules share has both names in a state dict.
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
        """Give the scaled loss (float32 scalar); run its backward in this context.

        Then unscale the gradients into the masters, check for an overflow and adjust the scale,
        unless more gradients will be added (``delay_unscale``). Nothing waits for the device.
        """
        if self.level.loss_scale == 1.0 and not self.masters:
            yield loss.float()
            return
        yield loss.float() * self.scaler.value
        if delay_unscale:
            return
        weights = [weight for weight in self.masters if weight.grad is not None]
        for weight in weights:
            self.masters[weight].grad = torch.empty_like(self.masters[weight])
        to_masters = [self.masters[weight].grad for weight in weights]
        _copy(to_masters, [weight.grad for weight in weights])
        for weight in weights:
            weight.grad = None
        self.scaler.unscale(optimizer)

    @staticmethod
    def master_params(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        """The parameters that the optimiser updates, in order: masters where there are any."""
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class DistributedDataParallel(parallel.DistributedDataParallel):
    """torch's, with the arguments of ``apex.parallel.DistributedDataParallel``.

    Apex sums float16 gradients over the ranks, then divides; torch divides first, as a
    ``gradient_predivide_factor`` equal to the world size asks for. ``allreduce_always_fp32`` sums
    them in float32; ``delay_allreduce`` waits until backward has ended.
    """

    def __init__(
        self,
        module: nn.Module,
        delay_allreduce: bool = False,
        allreduce_always_fp32: bool = False,
        gradient_predivide_factor: float = 1.0,
    ):
        device = next(module.parameters()).device
        super().__init__(
            module,
            device_ids=[device] if device.type == "cuda" else None,
            # A bucket that holds all gradients of a type is full when backward ends.
            bucket_cap_mb=2**20 if delay_allreduce else None,
        )
        self.broadcast_buffers = False  # as in Apex; evaluation copies rank 0's
        if allreduce_always_fp32 or gradient_predivide_factor != dist.get_world_size():
            how = gradient_predivide_factor, allreduce_always_fp32
            self.register_comm_hook(how, _sum_and_divide)


@torch.no_grad()
def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    if to:  # torch takes no empty lists
        torch._foreach_copy_(to, source)


convert_syncbn_model = nn.SyncBatchNorm.convert_sync_batchnorm


def _sum_and_divide(
    how: tuple[float, bool], bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Divide by a factor, sum, and divide by the rest of the world size.

    A tiny float16 gradient that is divided first can vanish: 6e-8 over two ranks does.
    """
    (factor, in_float), gradients = how, bucket.buffer()
    parts = gradients.float() if in_float else gradients
    future = dist.all_reduce(parts.mul_(1 / factor), async_op=True).get_future()
    rest = factor / dist.get_world_size()
    return future.then(lambda done: gradients.copy_(done.value()[0].mul_(rest)))


class Weights:
    """A model whose float16 weights have float32 masters.

    Its `state_dict` is the model in float32 under its plain names, with the masters in place of the
    rounded weights: a snapshot loses nothing, and fits any other script.
    """

    def __init__(self, model: nn.Module, named_masters: Callable[[], dict[str, nn.Parameter]]):
        """``named_masters()``: the masters under the names of their weights."""
        self.model, self.named_masters = model, named_masters

    def state_dict(self) -> dict[str, Tensor]:
        """The model's state dict in float32, taken from the masters where there are any."""
        own, masters = self.model.state_dict(), self.named_masters()
        state = {name: masters.get(name, value).detach() for name, value in own.items()}
        return {n: x.float() if x.is_floating_point() else x for n, x in state.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load float32 (or float16) weights into the model and the masters."""
        self.model.load_state_dict(state)
        for name, master in self.named_masters().items():
            master.copy_(state[name])


@torch.no_grad()
def _make_masters(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, nn.Parameter]:
    """Replace each trained float16 parameter of ``optimizer`` by a float32 copy of it."""
    masters = {}
    for group in optimizer.param_groups:
        for i, weight in enumerate(group["params"]):
            if weight.dtype == torch.float16 and weight.requires_grad:
                # From the rounded weight, as Apex does.
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
