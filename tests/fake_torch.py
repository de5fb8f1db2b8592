"""What stands in for torch.cuda and its users in torch on the GPU of tests/fake_cuda.py."""

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
from torch.nn.parallel import DistributedDataParallel

UUID = "11111111-2222-3333-4444-555555555555"
PROPERTIES = SimpleNamespace(total_memory=2**34, multi_processor_count=40, uuid=UUID)
NO_GRAPH = SimpleNamespace(is_capturing=lambda: False)  # a stream, as optimisers look at it


def synchronize(device: Any = None) -> None:
    gpu().wait("synchronize()")
    gpu().synchronize()


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
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "manual_seed_all": lambda seed: None,
    "stream": stream_context,
    "current_stream": lambda device=None: gpu().stream,
    "synchronize": synchronize,
    "get_device_properties": lambda device=None: PROPERTIES,
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
    "cudart": Cudart,
    "Stream": Stream,
    "Event": Event,
}


def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    copy = tensor.clone()
    gpu().known(copy).pinned = True
    return copy


def record_stream(tensor: Tensor, s: Stream) -> None:
    assert tensor.device.type == "cuda"
    gpu().known(tensor).recorded.add(s)


def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **more: Any) -> Tensor:
    """scaled_dot_product_attention; torch, without its kernels, takes float32 products."""
    return query @ key.transpose(-2, -1) @ value


class Generator(torch.Generator):
    """torch.Generator; one of a GPU is on the CPU, as no random number is ever made."""

    def __new__(cls, device: Any = "cpu") -> "Generator":
        return super().__new__(cls, "cpu")


def dp_forward(self: nn.DataParallel, images: Tensor) -> Tensor:
    """DataParallel.forward, one part after the other, on one GPU."""
    return torch.cat([self.module(part) for part in images.chunk(gpu().devices)])


@contextmanager
def fake_cuda(devices: int = 1) -> Iterator[Gpu]:
    """A machine with that many GPUs, on which torch can do all that training asks of it."""
    with ExitStack() as stack:

        def patch(place: Any, **values: Any) -> None:
            stack.enter_context(mock.patch.multiple(place, **values))

        patch(torch.cuda, **CUDA)
        patch(dist, **DISTRIBUTED)
        for place, name, value in fake_fsdp.PATCHES:
            patch(place, **{name: value})
        patch(
            torch.accelerator,
            is_available=lambda: True,
            current_accelerator=lambda check_available=False: as_device(0),
            synchronize=synchronize,
            current_stream=lambda device=None: NO_GRAPH,
        )
        patch(torch.cuda.nccl, version=lambda: (2, 27, 3))
        patch(torch, Generator=Generator)
        patch(torch.futures, Future=Future)
        patch(fake_tensor, init_gpu_context=lambda device: None)
        patch(fake_tensor.FakeTensorMode, avoid_device_init=True)
        patch(Tensor, pin_memory=pin_memory, record_stream=record_stream)
        patch(nn.functional, scaled_dot_product_attention=attention)
        patch(nn.DataParallel, forward=dp_forward)
        patch(
            DistributedDataParallel,
            __init__=ddp_init,
            forward=ddp_forward,
            register_comm_hook=ddp_hook,
        )
        yield stack.enter_context(fake_gpus(devices))
