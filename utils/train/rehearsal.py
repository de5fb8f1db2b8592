"""Steps before a training that leave no trace: afterwards all is what it was, bit for bit.

What a step may change is copied to the CPU's memory before, and back afterwards: weights, running
statistics, the optimiser's state, the loss scale, random states. Meanwhile the processes do not
wait for each other, so that one whose memory is too small holds up nobody.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from utils.run.checkpoint import TrainState
from utils.train.memory import local


@contextmanager
def rehearsal(
    state: TrainState, found: Callable[[DistributedDataParallel], Any], compiled: bool = False
) -> Iterator[None]:
    """Within, steps change nothing for good, and replicas exchange nothing.

    ``found`` is called with each replica at its first step. ``compiled`` steps are not compiled:
    that would take longer than all the rest. A sharded model cannot compute without the other
    processes: there all must take the same steps.
    """
    if state.weights is not None:
        state.weights.state_dict()  # NVIDIA's Apex makes its masters when they are first needed
    with ExitStack() as stack:
        stack.callback(_back, _copies(state))
        stack.callback(_forget_gradients, state)
        _keep_optimizer(state, stack)
        _keep_scale(state, stack)
        _keep_random_states(stack)
        if compiled:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if is_sharded(state.model):
            stack.callback(_reshard, state.model)
        else:
            _mute(state.model, found, stack)
        yield


def is_sharded(model: nn.Module) -> bool:
    """Whether each process holds a part of the model alone (FSDP)."""
    return any(local(parameter) is not parameter for parameter in model.parameters())


def recover(state: TrainState) -> None:
    """After a step that was broken off half-way: be ready for another one."""
    _forget_gradients(state)
    # What torch's scaler has noted of an optimiser's half step, which it has no method to forget.
    getattr(state.scaler, "_per_optimizer_states", {}).clear()


def existing(state: TrainState) -> list[Tensor]:
    """The tensors of a training that are there before its first step."""
    return [*_places(state), *_state_tensors(state.optimizer)]


def _reshard(model: nn.Module) -> None:
    """Let go of what the last forward pass has gathered and no backward pass has let go."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def _places(state: TrainState) -> list[Tensor]:
    """Weights, buffers, and what the optimiser has in place of weights."""
    optimised = [p for group in state.optimizer.param_groups for p in group["params"]]
    found = [*state.model.parameters(), *state.model.buffers(), *optimised]
    return list({id(tensor): tensor for tensor in found}.values())


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [x for entry in optimizer.state.values() for x in entry.values() if torch.is_tensor(x)]


Copies = list[tuple[Tensor, Tensor]]


def _copies(state: TrainState) -> Copies:
    return [(place, _copy(place)) for place in _places(state)]


def _copy(tensor: Tensor) -> Tensor:
    mine = local(tensor.detach())
    return mine.clone() if mine.device.type == "cpu" else mine.cpu()


@torch.no_grad()
def _back(copies: Copies) -> None:
    for place, copy in copies:
        local(place.detach()).copy_(copy)


def _forget_gradients(state: TrainState) -> None:
    for tensor in _places(state):
        tensor.grad = None


def _keep_optimizer(state: TrainState, stack: ExitStack) -> None:
    optimizer = state.optimizer
    before = {
        parameter: {name: _copy(x) if torch.is_tensor(x) else x for name, x in entry.items()}
        for parameter, entry in optimizer.state.items()
    }
    rates = [group["lr"] for group in optimizer.param_groups]

    @torch.no_grad()
    def restore() -> None:
        for parameter in list(optimizer.state):
            entry, old = optimizer.state[parameter], before.get(parameter)
            if old is None:  # made by the first step
                del optimizer.state[parameter]
                continue
            for name in list(entry):
                if name not in old:
                    del entry[name]
                elif torch.is_tensor(old[name]):
                    local(entry[name]).copy_(old[name])
                else:
                    entry[name] = old[name]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    stack.callback(restore)
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # whatever the images: weights that overflow would be another step


def _keep_scale(state: TrainState, stack: ExitStack) -> None:
    """Keep the loss scale, and let no step be skipped for it: it would leave out the optimiser."""
    scale = state.scaler.state_dict()
    if not scale:
        return
    stack.callback(state.scaler.load_state_dict, scale)
    state.scaler.load_state_dict({**scale, "scale": 1.0})


def _keep_random_states(stack: ExitStack) -> None:
    stack.callback(random.setstate, random.getstate())
    stack.callback(np.random.set_state, np.random.get_state())
    stack.callback(torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        stack.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())


def _mute(
    model: nn.Module, found: Callable[[DistributedDataParallel], Any], stack: ExitStack
) -> None:
    """Let replicas of ``model`` exchange no gradients, and batch norm no statistics."""

    def mute(module: nn.Module, _: Any) -> None:
        if isinstance(module, DistributedDataParallel):
            if module.require_backward_grad_sync:
                module.require_backward_grad_sync = False
                stack.callback(setattr, module, "require_backward_grad_sync", True)
                found(module)
        elif hasattr(module, "disable_allreduce"):  # NVIDIA Apex's
            module.disable_allreduce()
            stack.callback(module.enable_allreduce)

    stack.callback(register_module_forward_pre_hook(mute).remove)
    norms = [m for m in model.modules() if type(m).__name__ == "SyncBatchNorm"]
    if norms and dist.is_initialized() and dist.get_world_size() > 1:
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        for norm in norms:
            stack.callback(setattr, norm, "process_group", norm.process_group)
            norm.process_group = alone
