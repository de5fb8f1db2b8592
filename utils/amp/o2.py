"""Apex's amp in plain PyTorch: the opt levels O0 to O3 with the numerics of NVIDIA Apex 25.04.

    O0  float32
    O1  float32 weights, autocast decides per operation, dynamic loss scale
    O2  float16 weights except batch norm, float32 master weights, dynamic loss scale
    O3  float16 throughout, no master weights, loss scale 1

Apex removed amp in 2025 (its documentation: https://nvidia.github.io/apex/amp.html). `Amp` and
`DistributedDataParallel` have the calls and arguments of ``apex.amp`` and ``apex.parallel`` that
training scripts use; on the same gradients they compute the same weights, bit for bit
(tests/test_o2.py, and tests/test_real_apex.py against the original).
"""

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import parallel
from torch.nn.modules.batchnorm import _BatchNorm

from utils.amp.loss_scale import LossScaler
from utils.errors import UserError
from utils.launch.world import World


@dataclass(frozen=True)
class OptLevel:
    """An opt level. ``loss_scale`` None means dynamic."""

    name: str
    precision: str
    half_weights: bool = False
    keep_batchnorm_fp32: bool = True
    master_weights: bool = False
    autocast: bool = False
    loss_scale: float | None = None

    @property
    def input_dtype(self) -> torch.dtype:
        """The dtype in which the first layer computes."""
        return torch.float16 if self.half_weights or self.autocast else torch.float32

    @property
    def checks_overflow(self) -> bool:
        """Whether gradients are scaled and checked: not with a fixed scale of 1 and no masters."""
        return self.master_weights or self.loss_scale != 1.0

    def __str__(self) -> str:
        norm = f", batch norm {'float32' if self.keep_batchnorm_fp32 else 'float16'}"
        scale = "dynamic" if self.loss_scale is None else f"{self.loss_scale:g}"
        return f"{self.name} ({self.precision}{norm * self.half_weights}, loss scale {scale})"


LEVELS = {
    "O0": OptLevel("O0", "float32", loss_scale=1.0),
    "O1": OptLevel("O1", "autocast to float16", autocast=True),
    "O2": OptLevel("O2", "float16 weights, float32 masters", True, master_weights=True),
    "O3": OptLevel("O3", "float16", True, keep_batchnorm_fp32=False, loss_scale=1.0),
}


def choose(
    opt_level: str,
    keep_batchnorm_fp32: bool | str | None = None,
    loss_scale: float | str | None = None,
) -> OptLevel:
    """An opt level with Apex's overrides; None keeps the level's own value.

    ``keep_batchnorm_fp32`` may be the text True or False, ``loss_scale`` a number, also as text, or
    "dynamic". Raises: `UserError`.
    """
    level = LEVELS[opt_level]
    if keep_batchnorm_fp32 is not None:
        if opt_level == "O1":
            raise UserError("--keep-batchnorm-fp32 has no meaning with O1", alike=True)
        level = replace(level, keep_batchnorm_fp32=str(keep_batchnorm_fp32) == "True")
    if loss_scale == "dynamic":
        return replace(level, loss_scale=None)
    if loss_scale is not None:
        try:
            scale = float(loss_scale)
        except ValueError:
            scale = math.nan
        if not 0 < scale < math.inf:
            text = f"--loss-scale {loss_scale} is neither a positive number nor dynamic"
            raise UserError(text, alike=True)
        level = replace(level, loss_scale=scale)
    return level


def from_args(args: argparse.Namespace) -> OptLevel:
    """The opt level that the command line asks for. Raises: `UserError`."""
    return choose(args.opt_level, args.keep_batchnorm_fp32, args.loss_scale)


class Amp:
    """In place of the module ``apex.amp``, for one model and one optimiser.

    `initialize` sets ``level``, ``scaler`` (the loss scale) and ``weights`` (the model in float32);
    snapshots save the last two.
    """

    def __init__(self, world: World):
        self.world = world

    def initialize(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        opt_level: str = "O1",
        **overrides: Any,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Cast ``model`` and give ``optimizer`` (any number of groups) the masters, in place.

        The model then takes and returns float32; ``optimizer.step()`` does nothing after an
        overflow, and copies the masters into the model's weights. Overrides and errors: `choose`.
        """
        world, level = self.world, choose(opt_level, **overrides)
        self.level = level
        self.scaler = LossScaler(world.device, level.loss_scale, reports=world.is_main)
        if level.half_weights:
            _cast(model, level.keep_batchnorm_fp32)
            model.register_forward_pre_hook(_inputs_to_half)
        if level.autocast:
            model.forward = torch.autocast(world.device.type, torch.float16)(model.forward)
        if level.half_weights or level.autocast:
            model.register_forward_hook(_outputs_to_float)
        masters = _make_masters(optimizer) if level.master_weights else {}
        # Momentum that exists already takes the dtype of its weights.
        optimizer.load_state_dict(optimizer.state_dict())
        self.weights = Weights(model, masters)
        optimizer.register_step_post_hook(lambda *_: self.weights.round_masters())
        return model, optimizer

    @contextmanager
    def scale_loss(
        self, loss: Tensor, optimizer: torch.optim.Optimizer, delay_unscale: bool = False
    ) -> Iterator[Tensor]:
        """Give the scaled loss (float32 scalar); run its backward in this context.

        Then unscale the gradients into the masters, check for an overflow and adjust the scale,
        unless more gradients will be added (``delay_unscale``). Nothing waits for the device.
        """
        if not self.level.checks_overflow:
            yield loss.float()
            return
        yield self.scaler.scale(loss.float())
        if delay_unscale:
            return
        self.weights.gradients_to_masters()
        parameters = self.master_params(optimizer)
        self.scaler.unscale([p.grad for p in parameters if p.grad is not None])
        self.scaler.prepare(optimizer)
        self.scaler.update()

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


convert_syncbn_model = nn.SyncBatchNorm.convert_sync_batchnorm


class Weights:
    """The weights of a model and the float32 masters of those that are float16.

    Its `state_dict` is the model in float32 under its plain names, with the masters in place of the
    rounded weights: a snapshot loses nothing, and fits any other script.
    """

    def __init__(self, model: nn.Module, masters: dict[nn.Parameter, nn.Parameter]):
        """``masters``: the master of each float16 parameter that is trained."""
        self.model, self.half, self.masters = model, list(masters), list(masters.values())

    @torch.no_grad()
    def gradients_to_masters(self) -> None:
        """Move the float16 gradients, still scaled, to the masters."""
        both = zip(self.half, self.masters, strict=True)
        pairs = [(weight, master) for weight, master in both if weight.grad is not None]
        for _, master in pairs:
            master.grad = torch.empty_like(master)
        if pairs:
            torch._foreach_copy_([m.grad for _, m in pairs], [w.grad for w, _ in pairs])
        for weight, _ in pairs:
            weight.grad = None

    @torch.no_grad()
    def round_masters(self) -> None:
        """Copy the masters into the float16 weights."""
        if self.half:
            torch._foreach_copy_(self.half, self.masters)

    def state_dict(self) -> dict[str, Tensor]:
        """The model's state dict in float32, taken from the masters where there are any."""
        state = {
            name: value.float() if value.is_floating_point() else value
            for name, value in self.model.state_dict().items()
        }
        masters = self.named_masters().items()
        return state | {name: master.detach().float() for name, master in masters}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load float32 (or float16) weights into the model and the masters."""
        self.model.load_state_dict(state)
        for name, master in self.named_masters().items():
            master.copy_(state[name])

    def named_masters(self) -> dict[str, nn.Parameter]:
        """The masters under the names of their weights."""
        masters = dict(zip(self.half, self.masters, strict=True))
        # A parameter that two modules share has both names in a state dict.
        weights = self.model.named_parameters(remove_duplicate=False)
        return {name: masters[weight] for name, weight in weights if weight in masters}


@torch.no_grad()
def _make_masters(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, nn.Parameter]:
    """Replace each trained float16 parameter of ``optimizer`` by a float32 copy of it."""
    masters = {}
    for group in optimizer.param_groups:
        for i, weight in enumerate(group["params"]):
            if weight.dtype != torch.float16 or not weight.requires_grad:
                continue
            # From the rounded weight, as Apex does.
            master = masters[weight] = nn.Parameter(weight.detach().float())
            group["params"][i] = master
            if weight in optimizer.state:
                optimizer.state[master] = optimizer.state.pop(weight)
    return masters


def _cast(model: nn.Module, keep_batchnorm_fp32: bool) -> None:
    for module in model.modules():
        # Apex's rule: batch norm without affine parameters becomes float16.
        if isinstance(module, _BatchNorm) and module.affine and keep_batchnorm_fp32:
            continue
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point():
                tensor.data = tensor.data.half()


def _inputs_to_half(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.half() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)


def _outputs_to_float(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    return output.float() if isinstance(output, Tensor) else output


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
