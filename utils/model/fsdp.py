"""Sharded models (FSDP2): what is sharded together; ``--reshard``.

Used by imagenet_fsdp.py, which does not start without this file. Interface: the arguments of
`fully_shard`. All functions also accept plain tensors and models. FSDP and DTensor
take a second to import, so only the functions that need them do.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from utils.model import blocks
from utils.start.option_types import Options
from utils.start.world import World, is_sharded, local

SMALL = 100_000  # weights; a block with fewer is not sharded separately
LARGE = 1_000_000  # weights; a layer outside all blocks with at least as many is


# ---- the arguments of `fully_shard`


def mesh(args: Options, world: World) -> DeviceMesh:
    """Return the mesh of processes that share one copy of the model: all processes, or with
    ``--reshard node`` [nodes, processes per node]. All processes must call it."""
    kind = world.device.type
    if args.reshard != "node" or world.nodes == 1:
        everyone = dist.group.WORLD
        assert everyone is not None  # the process group exists
        return DeviceMesh.from_group(everyone, kind)
    ranks = torch.arange(world.size).view(world.nodes, world.local_size)
    limit = timedelta(seconds=args.dist_timeout)
    within, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=limit)
    across, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=limit)
    names = ("replicate", "shard")
    assert isinstance(within, dist.ProcessGroup) and isinstance(across, dist.ProcessGroup)
    return DeviceMesh.from_group([across, within], kind, mesh=ranks, mesh_dim_names=names)


def parts(model: nn.Module, dtype: torch.dtype | None) -> list[tuple[Any, Any]]:
    """Return the modules to shard and their precision, in order: the `units`, then the model.

    The weights of a part are gathered together, in ``dtype`` (None: float32); their gradients are
    reduced in float32. torch.autocast casts the inputs, as in the other scripts. Batch norm needs
    weights in float32, like its running statistics, so a unit's batch norms are a separate part.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    result: list[tuple[Any, Any]] = []
    done: set[nn.Module] = set()
    for part in (*units(model), model):
        norms = [m for m in part.modules() if isinstance(m, _BatchNorm) and m.affine]
        norms = [norm for norm in norms if norm not in done]
        if dtype is not None and norms and norms != [part]:
            result.append((norms, exact))
            done |= set(norms)
        result.append((part, policy))
    return result


def units(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are sharded separately: the model's repeated blocks, and large layers
    outside of them (as in a VGG). All other modules are small, not recognised, or have weights in
    common with others, as blocks of timm's CoaT: FSDP shards each weight with one module."""
    whole = [b for b in blocks.repeated(model) if size(b) >= SMALL]
    whole += [layer for layer in _layers(model) if size(layer) >= LARGE]
    places = Counter(id(w) for _, w in model.named_parameters(remove_duplicate=False))
    return [unit for unit in whole if all(places[id(w)] == 1 for w in unit.parameters())]


def _layers(parent: nn.Module) -> Iterator[nn.Module]:
    """Yield linear and convolution layers of the model itself and of its sequences. Weights of
    other modules may be used without a call of the module, and then FSDP would not gather them."""
    for child in parent.children():
        if type(child) in (nn.Linear, nn.Conv2d):
            yield child
        elif isinstance(child, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            yield from _layers(child)


def size(module: nn.Module) -> int:
    """Return the number of weights in a module, including those of other processes."""
    return sum(weight.numel() for weight in module.parameters())


def describe(model: nn.Module, reshard: str) -> str:
    """Return a line for the log: the blocks that are sharded separately, the number of processes,
    and how many weights this process keeps."""
    from torch.distributed.tensor import DTensor

    sharded = [module for module in model.modules() if is_sharded(module) and module is not model]
    kinds = Counter(type(unit).__name__.removeprefix("FSDP") for unit in sharded)
    names = ", ".join(f"{number} x {kind}" for kind, number in kinds.items()) or "no block"
    shard = next(model.parameters())
    assert isinstance(shard, DTensor)
    shape = " x ".join(map(str, shard.device_mesh.shape))
    mine = sum(local(weight).numel() for weight in model.parameters())
    return (
        f"--reshard {reshard}, {shape} processes: {names} sharded separately, the rest together; "
        f"rank 0 keeps {mine / 1e6:.3g} of {size(model) / 1e6:.4g} M weights"
    )


def sent_bytes(
    weights: Sequence[Tensor], args: Options, world: World, dtype: torch.dtype, accum: int
) -> float:
    """Return the bytes sent per step by a process: weights in ``dtype``, gradients in float32.

    Each of the ``accum`` micro-batches gathers weights; gradients are scattered once. Backward
    gathers only the weights that are trained, unless they are still there.
    """
    among = world.local_size if args.reshard == "node" else world.size
    values = sum(weight.numel() for weight in weights)
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    gathered = accum * (values + (trained if args.reshard != "none" else 0))
    sent = (dtype.itemsize * gathered + 4 * trained) * (among - 1) / among
    groups = world.size // among  # processes that hold the same shard all-reduce its gradients
    return sent + 2 * (groups - 1) / groups * 4 * trained / among


def let_fused_sgd_take_shards() -> bool:
    """Let SGD's fused kernel work on shards (DTensors). torch supports this only for Adam.

    The kernel works element by element, so shards can be updated separately. torch has no public
    way to declare this. Returns: False without its private table; loss scalers then sync each step.
    """
    from torch.distributed.tensor import DTensor

    def step(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args, kwargs = tree_map_only(DTensor, DTensor.to_local, (args, kwargs))
        op(*args, **kwargs)

    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    if handlers is None:
        return False
    handlers.setdefault(torch.ops.aten._fused_sgd_.default, step)
    return True
