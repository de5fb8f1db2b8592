"""Apex's amp in plain PyTorch: the opt levels O0..O3 with the numerics of NVIDIA Apex 25.04.

Apex removed amp in 2025. `Amp` and `DistributedDataParallel` have the calls and arguments of
``apex.amp`` and ``apex.parallel`` that training scripts use; on the same gradients they compute the
same weights, bit for bit (tests/test_o2.py, and tests/test_real_apex.py against the original).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import parallel
from torch.nn.modules.batchnorm import _BatchNorm

from utils.amp import levels
from utils.amp.levels import OptLevel
from utils.amp.loss_scale import LossScaler
from utils.launch.world import World


class Amp:
    """In place of the module ``apex.amp``, for one model and one optimiser.

    From `initialize` on, ``scaler`` and ``weights`` are what a snapshot keeps: the loss scale, and
    the model in float32.
    """

    level: OptLevel
    scaler: LossScaler
    weights: "Weights"

    def __init__(self, world: World):
        self.world = world

    def initialize(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        opt_level: str = "O1",
        keep_batchnorm_fp32: bool | str | None = None,
        loss_scale: float | str | None = None,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Cast ``model`` and give ``optimizer`` (any number of groups) the masters, in place.

        From then on the model takes and gives float32; ``optimizer.step()`` does nothing after an
        overflow, and writes the masters into the model's weights. The overrides: see
        `levels.choose`. Raises: `UserError`.
        """
        level = self.level = levels.choose(opt_level, keep_batchnorm_fp32, loss_scale)
        world = self.world
        self.scaler = LossScaler(world.device, level.loss_scale, reports=world.is_main)
        if level.half_weights:
            _cast(model, level.keep_batchnorm_fp32)
            model.register_forward_pre_hook(_inputs_to_half)
        if level.autocast:
            model.forward = torch.autocast(world.device.type, torch.float16)(model.forward)
        if level.half_weights or level.autocast:
            model.register_forward_hook(_outputs_to_float)
        masters = _make_masters(optimizer) if level.master_weights else {}
        # Momentum that exists already takes the dtype of the weights that it is for.
        optimizer.load_state_dict(optimizer.state_dict())
        self.weights = Weights(model, masters)
        optimizer.register_step_post_hook(lambda *_: self.weights.round_masters())
        return model, optimizer

    @contextmanager
    def scale_loss(
        self, loss: Tensor, optimizer: torch.optim.Optimizer, delay_unscale: bool = False
    ) -> Iterator[Tensor]:
        """Give the scaled loss (float32 scalar), whose backward has to be run in this context.

        Then unscale the gradients into the masters, look for an overflow and move the scale, unless
        ``delay_unscale`` says that more gradients will be added. Nothing waits for the device.
        """
        if not self.level.checks_overflow:
            yield loss.float()
            return
        yield self.scaler.scale(loss.float())
        if delay_unscale:
            return
        self.weights.gradients_to_masters()
        parameters = master_params(optimizer)
        self.scaler.unscale([p.grad for p in parameters if p.grad is not None])
        self.scaler.prepare(optimizer)
        self.scaler.update()

    def master_params(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        """What the optimiser updates: masters where there are any, in order."""
        return master_params(optimizer)


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
        self.broadcast_buffers = False  # as in Apex; evaluation takes over rank 0's
        factor = gradient_predivide_factor
        if allreduce_always_fp32:
            self.register_comm_hook(factor, _sum_in_float)
        elif factor != dist.get_world_size() or factor == 1:
            self.register_comm_hook(factor, _sum_in_half)


def convert_syncbn_model(model: nn.Module) -> nn.Module:
    """The model with batch norm over the batches of all ranks. Call it before `Amp.initialize`."""
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def master_params(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All parameters of ``optimizer``, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Weights:
    """The weights of a model and the float32 masters of those that are float16.

    As a saved object (`state_dict`) it is the model in float32 under its plain names, with the
    masters in place of the rounded weights: a snapshot loses nothing, and fits any other script.
    """

    def __init__(self, model: nn.Module, masters: dict[nn.Parameter, nn.Parameter]):
        """``masters``: the master of each float16 parameter that is trained."""
        self.model, self.half, self.masters = model, list(masters), list(masters.values())

    @torch.no_grad()
    def gradients_to_masters(self) -> None:
        """Move the float16 gradients, still scaled, to the masters."""
        for weight, master in zip(self.half, self.masters, strict=True):
            master.grad = None if weight.grad is None else torch.empty_like(master)
        moved = [(m.grad, w.grad) for w, m in zip(self.half, self.masters, strict=True)]
        moved = [pair for pair in moved if pair[0] is not None]
        if moved:
            torch._foreach_copy_(*map(list, zip(*moved, strict=True)))
        for weight in self.half:
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
        return state | {name: master.detach() for name, master in self.named_masters().items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load float32 (or float16) weights into the model and the masters."""
        self.model.load_state_dict(state)
        for name, master in self.named_masters().items():
            master.copy_(state[name])

    def named_masters(self) -> dict[str, nn.Parameter]:
        """The masters under the names of their weights."""
        masters = dict(zip(self.half, self.masters, strict=True))
        # A parameter that two modules share stands in a state dict under both names.
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
        # Batch norm without affine parameters has nothing to lose in float16, says Apex's rule.
        if isinstance(module, _BatchNorm) and module.affine and keep_batchnorm_fp32:
            continue
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point():
                tensor.data = tensor.data.half()


def _inputs_to_half(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.half() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)


def _outputs_to_float(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    return output.float() if isinstance(output, Tensor) else output


def _sum_in_half(factor: float, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    # A tiny float16 gradient that is divided first can vanish: 6e-8 over two ranks does.
    rest, gradients = factor / dist.get_world_size(), bucket.buffer()
    if factor != 1:
        gradients.mul_(1 / factor)
    future = dist.all_reduce(gradients, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].mul_(rest))


def _sum_in_float(factor: float, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    rest, gradients = factor / dist.get_world_size(), bucket.buffer()
    future = dist.all_reduce(gradients.float().mul_(1 / factor), async_op=True).get_future()
    return future.then(lambda done: gradients.copy_(done.value()[0].mul_(rest)))
