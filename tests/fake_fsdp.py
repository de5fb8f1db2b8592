"""What stands in for parts of FSDP2 on the GPU of tests/fake_cuda.py."""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fully_shard as fsdp
from torch.distributed.tensor import DTensor

# The first step of fully_shard that sees the modules; torch before 2.11 has the second one alone.
STEP = next(
    name for name in ("_get_modules_and_states", "_get_managed_modules") if hasattr(fsdp, name)
)
original = getattr(fsdp, STEP)


def _moved(module: Any, *rest: Any) -> Any:
    """FSDP's own, on modules that have been moved: a fake tensor's data cannot be exchanged."""
    device = torch.device("cuda", torch.cuda.current_device())
    made: dict[int, nn.Parameter] = {}
    for top in [module] if isinstance(module, nn.Module) else module:
        for part in top.modules():
            for name, weight in part._parameters.items():
                if weight is not None and not isinstance(weight, DTensor):
                    if id(weight) not in made:
                        moved = weight.detach().to(device)
                        made[id(weight)] = nn.Parameter(moved, weight.requires_grad)
                    part._parameters[name] = made[id(weight)]
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = buffer.to(device)
    return original(module, *rest)


PATCHES = [(fsdp, STEP, _moved)]
