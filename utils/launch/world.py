"""Where a process stands in the job, and how processes share values.

Facts about ranks are computed once, into a `World`; nothing else asks torch.distributed for them.
"""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.errors import UserError
from utils.launch import agreement


@dataclass(frozen=True)
class World:
    """The job as one of its processes sees it (``rank`` of ``size``, on ``nodes`` nodes)."""

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    nodes: int = 1
    control: Any = None  # a gloo group: small decisions travel on the CPU and never stall the GPU

    @property
    def is_main(self) -> bool:
        """True in the one process that writes files."""
        return self.rank == 0

    @property
    def device_ids(self) -> list[int] | None:
        """For DistributedDataParallel: this process's GPU, or None on the CPU."""
        return [self.local_rank] if self.device.type == "cuda" else None


def is_elastic() -> bool:
    """Whether a launcher restarts this job's processes when one of them fails."""
    by_torchrun = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
    return by_torchrun or "IMAGENET_ELASTIC" in os.environ  # scripts/train_on_nodes.sh --elastic


def from_main(compute: Callable[[], Any], world: World) -> Any:
    """Compute something in rank 0 alone and give its (picklable) result to every process.

    A `UserError` raised in rank 0 is raised in every process, so that all end together.
    """
    if world.size == 1:
        return compute()
    box: list[Any] = [None, None]
    if world.is_main:
        try:
            box[0] = compute()
        except UserError as error:
            box[1] = str(error)
    dist.broadcast_object_list(box, src=0, group=world.control)
    if box[1] is not None:
        raise UserError(box[1], alike=True)
    return box[0]


def gather(value: Any, world: World) -> list[Any]:
    """Every process's (picklable) ``value``, in the order of ranks, for every process."""
    if world.size == 1:
        return [value]
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, value, group=world.control)
    return found


def first_on_node(compute: Callable[[], Any], world: World) -> Any:
    """Compute something in the first process of each node, then in its other processes.

    A `UserError` raised in any of the first is raised in every process, so that all end together.
    """
    result, error = None, None
    if world.local_rank == 0:
        try:
            result = compute()
        except UserError as fault:
            error = str(fault)
    errors = [text for text in gather(error, world) if text]
    if errors:
        raise UserError(errors[0], alike=True)
    return result if world.local_rank == 0 else compute()


def check_alike(
    what: str, value: Any, world: World, parts: Callable[[], dict[str, str]] | None = None
) -> None:
    """Raise `UserError`, naming the nodes, unless ``value`` is the same in every process.

    ``parts()``, asked only when it is not, lets the sentence name the first part that differs.
    """
    found = gather((node_name(world), value), world)
    if any(other != found[0][1] for _, other in found):
        nodes = dict.fromkeys(f"{node} has {other}" for node, other in found)
        first = gather((node_name(world), parts()), world) if parts else []
        raise UserError(
            f"{what} differs between the nodes: "
            + "; ".join([*nodes, *([agreement.first_difference(first)] if first else [])]),
            alike=True,
        )


def node_name(world: World) -> str:
    """Host name and number of this process's node."""
    # Cloned machines often have one name: the node's number tells them apart.
    return f"{socket.gethostname()} (node {world.rank // world.local_size})"


@torch.no_grad()
def copy_from_main(model: nn.Module, world: World, parameters: bool = True) -> None:
    """Give every process rank 0's buffers and, by default, parameters."""
    if world.size > 1:
        tensors = list(model.buffers()) + (list(model.parameters()) if parameters else [])
        for tensor in tensors:
            here = tensor.device.type == world.device.type
            dist.broadcast(tensor, src=0, group=None if here else world.control)


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a sharded tensor (the same memory); of a plain one, all of it."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor


def reshard(model: nn.Module) -> None:
    """Free the whole weights that FSDP has gathered, as they are out of date or not needed."""
    for module in model.modules():
        if hasattr(module, "set_requires_gradient_sync"):  # an FSDPModule
            module.reshard()
