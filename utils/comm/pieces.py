"""Tensors of which each process has a piece (torch's DTensor): whole ones from them, and back.

Plain tensors pass through all of it, so that nobody has to ask. torch.distributed.tensor takes a
second to import: only what uses it pays.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` has been called with the model."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def is_piece(tensor: Any) -> bool:
    """Whether each process may have another part of the tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This process's own part, which shares its memory; of a plain tensor, all of it."""
    return tensor.detach().to_local() if is_piece(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, on its device. Collective: all processes that have a piece call it."""
    return tensor.detach().full_tensor() if is_piece(tensor) else tensor


def piece_like(full: Tensor, like: Tensor) -> Tensor:
    """The piece of ``full``, which every process has, that ``like`` has of its own whole tensor.

    On the device of ``like``. No communication. Plain if ``like`` is plain, or of another shape:
    whoever loads it then says so.
    """
    if not is_piece(like) or is_piece(full) or full.shape != like.shape:
        return full
    from torch.distributed.tensor import Shard

    part, mesh = full, like.device_mesh
    for dim, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            parts = part.chunk(mesh.size(dim), placement.dim)
            number = mesh.get_local_rank(dim)
            empty = part.narrow(placement.dim, 0, 0)  # fewer rows than processes
            part = parts[number] if number < len(parts) else empty
    return as_piece(part.detach().to(like.device, copy=True).contiguous(), like)


def as_piece(part: Tensor, like: Tensor) -> Tensor:
    """``part``, made from `local` of ``like``, as a piece of a whole tensor of that shape: so that
    snapshots get the whole one. Plain if ``like`` is plain."""
    if not is_piece(like):
        return part
    from torch.distributed.tensor import DTensor

    shape = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, **shape)


def laid_out_like(value: Tensor, weight: Tensor) -> Tensor:
    """``value``, of the shape of ``weight``, in its memory layout, which fused optimisers want; of
    a sharded weight, this process's piece."""
    if is_piece(weight):
        return piece_like(value, weight)
    return torch.empty_like(weight, dtype=value.dtype, device=value.device).copy_(value)


def let_go(model: nn.Module) -> None:
    """Free what a sharded model has gathered: an evaluation leaves weights as they were then."""
    if is_sharded(model):
        for module in model.modules():
            if is_sharded(module):
                module.reshard()


def pieces_like(full: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """`piece_like` for each entry of a state dict."""
    return {name: piece_like(value, like.get(name, value)) for name, value in full.items()}


def take_part(tree: Any) -> None:
    """In every process but the first: do what is needed of it while that one makes a copy of
    ``tree`` on the host (`utils.run.snapshots`), one tensor after the other.

    A tree of the same form in all processes, of dictionaries, lists and tensors.
    """
    _take_part(tree, set())


def _take_part(tree: Any, done: set[int]) -> None:
    if isinstance(tree, Tensor):
        if id(tree) not in done:
            done.add(id(tree))
            whole(tree)
    elif isinstance(tree, (dict, list, tuple)):
        for entry in tree.values() if isinstance(tree, dict) else tree:
            _take_part(entry, done)


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Bytes that this process holds of ``tensors``."""
    held = (local(tensor) for tensor in tensors if tensor is not None)
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def bytes_held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes that this process holds between two steps, of parameters, gradients (as many as there
    are) and optimiser state."""
    let_go(model)
    state = (value for entry in optimizer.state.values() for value in entry.values())
    trained = (weight for group in optimizer.param_groups for weight in group["params"])
    return {
        "parameters": bytes_of(model.parameters()),
        "gradients": bytes_of(weight.grad for weight in trained),
        "optimizer": bytes_of(value for value in state if isinstance(value, Tensor)),
    }
