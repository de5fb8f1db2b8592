"""What of a model is sharded together, over which processes, and in which precision it travels."""

import argparse
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.modules.batchnorm import _BatchNorm

from utils.comm import fused
from utils.comm.pieces import local
from utils.launch.world import World

SMALL = 100_000  # weights; a smaller block is not worth a collective of its own
LARGE = 1_000_000  # weights; a single layer outside of all blocks that is

Part = nn.Module | list[nn.Module]


def add_options(parser: argparse.ArgumentParser) -> None:
    """``--reshard``."""
    group = parser.add_argument_group("sharding")
    group.add_argument(
        "--reshard",
        choices=("none", "full", "node"),
        default="full",
        help="how long gathered weights stay. full (ZeRO-3): until a block has computed; none "
        "(ZeRO-2): until backward has, which gathers half as often and takes the memory of a whole "
        "model; node: as full, but each node has all parts, so that only gradients leave it",
    )


def mesh(args: Any, world: World) -> DeviceMesh:
    """The processes that divide the model among them: all, or with ``--reshard node`` those of each
    node, [nodes, processes of a node]. All processes must call it."""
    fused.allow_sharded_sgd()
    kind = world.device.type
    if args.reshard != "node" or world.nodes == 1:
        return DeviceMesh.from_group(dist.group.WORLD, kind)
    ranks = torch.arange(world.size).view(world.nodes, world.local_size)
    limit = timedelta(seconds=args.dist_timeout)
    within, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=limit)
    across, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=limit)
    names = ("replicate", "shard")
    return DeviceMesh.from_group([across, within], kind, mesh=ranks, mesh_dim_names=names)


def parts(model: nn.Module, dtype: torch.dtype | None) -> list[tuple[Part, MixedPrecisionPolicy]]:
    """What `fully_shard` is to be called with, in this order: the `blocks`, then the model itself.

    The weights of a part travel together, as ``dtype`` (None: float32) to where they compute; their
    gradients in float32. Inputs are left to torch.autocast, as in the other scripts. Batch norms
    have running statistics in float32 and want their weights like them: they are parts of their
    own, all of a block together.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    found: list[tuple[Part, MixedPrecisionPolicy]] = []
    done: set[nn.Module] = set()
    for part in (*blocks(model), model):
        norms = [one for one in part.modules() if _is_norm(one) and one not in done]
        if dtype is not None and norms and norms != [part]:
            found.append((norms, exact))
            done |= set(norms)
        found.append((part, policy))
    return found


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.affine


def blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that a model repeats (of a ViT or Swin, of the stages of a ResNet), and large
    layers outside of them (those of a VGG). What is left is small, or is not found."""
    return [one for one in _search(model) if weights(one) >= SMALL]


def _search(parent: nn.Module) -> Iterator[nn.Module]:
    kinds = Counter(type(child) for child in parent.children())
    for child in parent.children():
        if isinstance(child, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            yield from _search(child)
        elif kinds[type(child)] > 1 and any(child.children()) and not _holds_a_row(child):
            yield child
        elif type(child) in (nn.Linear, nn.Conv2d):
            # Others may be read without being called, and then nobody would gather their weights.
            if weights(child) >= LARGE:
                yield child
        else:
            yield from (one for one in _search(child) if any(one.children()))


def _holds_a_row(module: nn.Module) -> bool:
    """Whether the module, a stage say, consists of blocks itself."""
    rows = (m for m in module.modules() if isinstance(m, (nn.Sequential, nn.ModuleList)))
    return any(
        len(row) > 1 and len({type(m) for m in row}) == 1 and any(row[0].children()) for row in rows
    )


def weights(module: nn.Module) -> int:
    """How many numbers the parameters of a module have, on all processes together."""
    return sum(weight.numel() for weight in module.parameters())


def describe(model: nn.Module, reshard: str) -> str:
    """One line, before the first step: what has been sharded by itself, over how many processes,
    and how much of it this one keeps."""
    units = [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]
    norms = any(isinstance(unit, _BatchNorm) for unit in units)
    units = [unit for unit in units if not isinstance(unit, _BatchNorm)]
    kinds = Counter(type(unit).__name__.removeprefix("FSDP") for unit in units)
    names = ", ".join(f"{number} x {kind}" for kind, number in kinds.items()) or "no block"
    whole, first = weights(model), next(model.parameters())
    rest, mine = whole - sum(map(weights, units)), sum(local(w).numel() for w in model.parameters())
    shape = " x ".join(map(str, first.device_mesh.shape))
    return (
        f"--reshard {reshard}, {shape} process{'es' * (shape != '1')}: {names} each by itself, the "
        f"rest ({rest / 1e6:.3g} of {whole / 1e6:.4g} M weights) together"
        f"{'; batch norms in float32' * norms}; rank 0 keeps {mine / 1e6:.3g} M"
    )
