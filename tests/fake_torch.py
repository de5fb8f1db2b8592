"""What stands in for torch.cuda and its users in torch on the GPU of tests/fake_cuda.py.

The stand-ins take what the originals take: tests/test_fake_cuda_faults.py compares them.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fake_fsdp
import torch
import torch.distributed as dist
from fake_cuda import Event, Gpu, Stream, as_device, fake_gpus, gpu, stream_context
from fake_nccl import DISTRIBUTED, Future, ddp_forward, ddp_hook, ddp_init
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.nn.parallel import DistributedDataParallel, comm

dp_module = sys.modules["torch.nn.parallel.data_parallel"]

CUDA_0 = torch.device("cuda", 0)
NO_GRAPH = SimpleNamespace(is_capturing=lambda: False)  # a stream, as optimisers look at it

# ---- torch.cuda


def synchronize(device: Any = None) -> None:
    gpu().wait("synchronize()")
    gpu().synchronize()


def get_device_properties(device: Any = None) -> Any:
    uuid = "11111111-2222-3333-4444-555555555555"
    facts = {"name": "Fake", "total_memory": 2**34, "multi_processor_count": 40, "uuid": uuid}
    return SimpleNamespace(**facts, major=8, minor=0)


def set_device(device: Any) -> None:
    assert as_device(device).index < gpu().devices, f"there is no {device}"
    gpu().device = as_device(device).index


class Cudart:
    """What torch.cuda.cudart() gives: memory of the host may be page-locked where it lies."""

    def cudaHostRegister(self, place: int, size: int, flags: int) -> int:
        gpu().locked.append(range(place, place + size))
        return 0

    def cudaHostUnregister(self, place: int) -> int:
        return 0


CUDA: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: gpu().devices,
    "current_device": lambda: gpu().device,
    "set_device": set_device,
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "stream": stream_context,
    "current_stream": lambda device=None: gpu().stream(device),
    "default_stream": lambda device=None: gpu().main[as_device(device).index],
    "synchronize": synchronize,
    "get_device_properties": get_device_properties,
    "get_device_name": lambda device=None: "Fake",
    "get_device_capability": lambda device=None: (8, 0),
    "max_memory_allocated": lambda device=None: 2**30,
    "reset_peak_memory_stats": lambda device=None: None,
    "memory_reserved": lambda device=None: 2**30,
    "mem_get_info": lambda device=None: (2**33, 2**34),
    "empty_cache": lambda: None,
    "utilization": lambda device=None: 87,
    "device_memory_used": lambda device=None: 3 * 2**30,
    "power_draw": lambda device=None: 65_500,
    "temperature": lambda device=None: 71,
    "get_rng_state": lambda device=None: None,
    "set_rng_state": lambda new_state, device=None: None,
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_current_stream_capturing": lambda: False,
    "_lazy_init": lambda: None,
    "cudart": Cudart,
}


def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    copy = tensor.clone()
    gpu().known(copy).pinned = True
    return copy


def record_stream(tensor: Tensor, s: Stream) -> None:
    assert tensor.device.type == "cuda"
    gpu().known(tensor).recorded.add(s)


# torch.nn.Module.to exchanges the data of a parameter, which a fake tensor cannot.
def module_to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Module.to, with new parameters."""
    device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
    made: dict[int, nn.Parameter] = {}

    def moved(tensor: Tensor) -> Tensor:
        wanted = {"memory_format": layout} if layout is not None and tensor.dim() == 4 else {}
        kind = dtype if tensor.is_floating_point() else None
        return tensor.detach().to(device, kind, non_blocking, **wanted)

    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                if id(weight) not in made:
                    made[id(weight)] = nn.Parameter(moved(weight), weight.requires_grad)
                part._parameters[name] = made[id(weight)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = moved(buffer)
    return module


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention by a GPU's kernel; without one torch takes float32 products."""
    assert query.dtype == key.dtype == value.dtype
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


class Generator(torch.Generator):
    """torch.Generator; one of a GPU is on the CPU, as no random number is ever made."""

    def __new__(cls, device: Any = "cpu") -> "Generator":
        return super().__new__(cls, "cpu")


# ---- DataParallel: torch.nn.parallel.comm


def dp_scatter(tensor, devices=None, chunk_sizes=None, dim=0, streams=None, *, out=None):
    sizes = list(chunk_sizes) if chunk_sizes else None
    parts = tensor.split(sizes, dim) if sizes else tensor.chunk(len(devices), dim)
    moved = (p.to(as_device(d), non_blocking=True) for p, d in zip(parts, devices, strict=False))
    return tuple(moved)


def dp_gather(tensors, dim=0, destination=None, *, out=None):
    return torch.cat([t.to(as_device(destination), non_blocking=True) for t in tensors], dim)


def dp_broadcast(tensors, devices, buffer_size=10485760):
    devices = [as_device(d) for d in devices]
    return [[t if t.device == d else t.to(d, non_blocking=True) for t in tensors] for d in devices]


def dp_add(inputs, destination=None, buffer_size=10485760):
    to = as_device(destination)
    return tuple(
        sum(t.to(to, non_blocking=True) for t in same) for same in zip(*inputs, strict=True)
    )


def dp_apply(modules, inputs, kwargs_tup=None, devices=None):
    """torch.nn.parallel.parallel_apply, one after the other in this thread."""
    found = []
    for module, given, device in zip(modules, inputs, devices, strict=True):
        before = gpu().device
        set_device(device)
        found.append(module(*given))
        gpu().device = before
    return found


DATA_PARALLEL: dict[str, Callable[..., Any]] = {
    "scatter": dp_scatter,
    "gather": dp_gather,
    "broadcast_coalesced": dp_broadcast,
    "reduce_add_coalesced": dp_add,
}

# ---- all of it


def check(original: Callable[..., Any], stand_in: Callable[..., Any]) -> None:
    """Fail unless a stand-in's arguments are the first of the original's, by their names."""
    names = (list(inspect.signature(function).parameters) for function in (original, stand_in))
    wanted, found = ([name for name in each if name not in ("self", "cls")] for each in names)
    assert found == wanted[: len(found)], f"{original}: {found}, not {wanted}"


@contextmanager
def fake_cuda(devices: int = 1) -> Iterator[Gpu]:
    """A machine with that many GPUs, on which torch can do all that training asks of it."""
    with ExitStack() as stack:

        def patch(place: Any, name: str, value: Any, **options: Any) -> None:
            stack.enter_context(mock.patch.object(place, name, value, **options))

        for name, value in CUDA.items():
            patch(torch.cuda, name, value)
        for name, value in DISTRIBUTED.items():
            patch(dist, name, value)
        for one in fake_fsdp.PATCHES:
            patch(*one)
        patch(torch.accelerator, "is_available", lambda: True)
        patch(torch.accelerator, "current_accelerator", lambda check_available=False: CUDA_0)
        patch(torch.accelerator, "synchronize", synchronize)
        patch(torch.accelerator, "current_stream", lambda device=None: NO_GRAPH)
        patch(torch.cuda, "Stream", Stream)
        patch(torch.cuda, "Event", Event)
        patch(torch.cuda.nccl, "version", lambda: (2, 27, 3))
        patch(torch, "Generator", Generator)
        patch(torch.futures, "Future", Future)
        patch(fake_tensor, "init_gpu_context", lambda device: None)
        patch(fake_tensor.FakeTensorMode, "avoid_device_init", True)
        patch(Tensor, "pin_memory", pin_memory)
        patch(Tensor, "record_stream", record_stream)
        patch(nn.functional, "scaled_dot_product_attention", attention)
        patch(nn.Module, "to", module_to)
        patch(DistributedDataParallel, "__init__", ddp_init)
        patch(DistributedDataParallel, "forward", ddp_forward)
        patch(DistributedDataParallel, "register_comm_hook", ddp_hook)
        for name, value in DATA_PARALLEL.items():
            patch(comm, name, value)
        patch(dp_module, "parallel_apply", dp_apply)
        yield stack.enter_context(fake_gpus(devices))
