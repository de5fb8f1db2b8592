"""What stands in for torch.cuda and its users in torch on the GPU of tests/fake_cuda.py.

Among them DistributedDataParallel's reducer, which is in C++.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fake_cuda import Event, Gpu, Stream, fake_gpus, gpu, in_stream, tensors_in
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from utils.start import world

ORIGINAL = SimpleNamespace(
    init=dist.init_process_group,
    new_group=dist.new_group,
    numpy=Tensor.numpy,
    shard=torch.distributed.fsdp.fully_shard,
)
PROPERTIES = SimpleNamespace(total_memory=2**34, multi_processor_count=40, uuid="")
NO_GRAPH = SimpleNamespace(is_capturing=lambda: False)  # a stream, as optimisers look at it
ANSWERS = {  # of functions of torch.cuda
    "is_available": True,
    "current_device": 0,
    "set_device": None,
    "set_sync_debug_mode": None,
    "get_device_properties": PROPERTIES,
    "get_device_name": "Fake",
    "get_device_capability": (8, 0),
    "max_memory_allocated": 2**30,
    "reset_peak_memory_stats": None,
    "memory_reserved": 2**30,
    "mem_get_info": (2**33, 2**34),
    "utilization": 87,
    "device_memory_used": 3 * 2**30,
    "power_draw": 65_500,
    "temperature": 71,
    "get_rng_state": None,
    "set_rng_state": None,
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
}


def lock_pages(place: int, size: int, flags: int) -> int:
    """cudaHostRegister: memory of the host is page-locked where it lies."""
    gpu().locked.append(range(place, place + size))
    return 0


CUDART = SimpleNamespace(cudaHostRegister=lock_pages, cudaHostUnregister=lambda place: 0)


def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    copy = tensor.clone()
    gpu().known(copy).pinned = True
    return copy


def record_stream(tensor: Tensor, s: Stream) -> None:
    gpu().known(tensor).recorded.add(s)


def numpy(tensor: Tensor) -> Any:
    """Tensor.numpy; the values of one that was on the device are made up."""
    if isinstance(tensor, fake_tensor.FakeTensor):
        assert tensor.device.type == "cpu", "numpy reads what is on the device"
        gpu().use(tensor, False, gpu().host)
        with unset_fake_temporarily():
            tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return ORIGINAL.numpy(tensor)


class Generator(torch.Generator):
    """torch.Generator; one of a GPU is on the CPU, as no random number is ever made."""

    def __new__(cls, device: Any = "cpu") -> "Generator":
        return super().__new__(cls, "cpu")


def dp_forward(self: nn.DataParallel, images: Tensor) -> Tensor:
    """DataParallel.forward, one part after the other, on one GPU."""
    return torch.cat([self.module(part) for part in images.chunk(torch.cuda.device_count())])


# ---- torch.distributed: torch's own fake group in place of NCCL's and gloo's


def init_process_group(backend: str, rank: int, world_size: int, **_: Any) -> None:
    assert backend == "nccl"
    ORIGINAL.init("fake", rank=rank, world_size=world_size, store=FakeStore())


def new_group(ranks: list[int] | None = None, backend: str = "", **_: Any) -> dist.ProcessGroup:
    group = ORIGINAL.new_group(ranks)
    if backend == "gloo":
        gpu().gloo.add(group.group_name)
    return group


def all_gather_object(values: list[Any] | None, value: Any, group: Any = None) -> None:
    """What this process has, from all."""
    if values is not None:
        values[:] = [value] * len(values)


# torch.futures.Future; what waits for it goes on in the stream, not on the host.


def future_init(self: Future, *, devices: Sequence[Any] = ()) -> None:
    torch._C.Future.__init__(self, [])
    self.devices = [torch.device(device) for device in devices]


def future_set_result(self: Future, result: Any) -> None:
    for tensor in tensors_in([result]):
        assert tensor.device in self.devices, "a future has to know its tensors' devices"
    self.result, self.at = result, gpu().stream.now()


def future_wait(self: Future) -> Any:
    gpu().stream.learn(self.at)
    return self.result


def future_then(self: Future, callback: Callable[[Future], Any]) -> Future:
    after = Future(devices=self.devices)
    with in_stream(Stream()):
        self.wait()
        after.set_result(callback(self))
    return after


def work_wait(work: FakeWork, timeout: Any = None) -> bool:
    gpu().stream.wait_stream(gpu().nccl)
    return True


def work_future(work: FakeWork) -> Future:
    future = Future(devices=[gpu().sent[0].device])
    with in_stream(gpu().nccl):
        future.set_result(gpu().sent)
    return future


def sync_bn_forward(self: nn.SyncBatchNorm, images: Tensor) -> Tensor:
    """SyncBatchNorm.forward, without the exchange of statistics, which is noted."""
    gpu().collectives["batch_norm", torch.float32] += 1
    return nn.BatchNorm2d.forward(self, images)


def ddp_init(self: DistributedDataParallel, module: nn.Module, **_: Any) -> None:
    """DistributedDataParallel.__init__: each gradient is exchanged as soon as it is there."""
    nn.Module.__init__(self)
    self.module, self.require_backward_grad_sync = module, True
    self.hook = dist.group.WORLD, allreduce_hook
    means: list[tuple[nn.Parameter, Future]] = []

    @torch.no_grad()
    def exchange(weight: nn.Parameter) -> None:
        if self.require_backward_grad_sync:
            if not means:
                torch.autograd.Variable._execution_engine.queue_callback(finish)
            flat = weight.grad.reshape(-1).clone()
            bucket = SimpleNamespace(  # torch.distributed.GradBucket, of one gradient
                parameters=lambda: [weight],
                buffer=lambda: flat,
                gradients=lambda: [flat.view(weight.shape)],
                is_last=lambda: len(means) + 1 == sum(p.requires_grad for p in module.parameters()),
            )
            state, hook = self.hook
            means.append((weight, hook(state, bucket)))

    @torch.no_grad()
    def finish() -> None:
        """Backward ends: it waits for all means."""
        for weight, future in means:
            mean = future.wait()
            assert mean.dtype == weight.dtype, f"a hook made {mean.dtype} of its gradients"
            weight.grad.copy_(mean.view(weight.shape))
        means.clear()

    for weight in module.parameters():
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(exchange)


def ddp_forward(self: DistributedDataParallel, images: Tensor) -> Tensor:
    return self.module(images)


def ddp_hook(self: DistributedDataParallel, state: object, hook: Callable) -> None:
    self.hook = state, hook


def fully_shard(parts: nn.Module | list[nn.Module], **options: Any) -> Any:
    """FSDP cannot exchange the data of fake tensors: it gets modules that have been moved."""
    for part in parts if isinstance(parts, list) else [parts]:
        for module in part.modules():
            if not isinstance(module, FSDPModule):
                module._apply(lambda tensor: tensor.to("cuda"), recurse=False)
    return ORIGINAL.shard(parts, **options)


@contextmanager
def fake_cuda(devices: int = 1) -> Iterator[Gpu]:
    """A machine with that many GPUs, on which torch can do all that training asks of it."""
    answers = {name: mock.Mock(return_value=value) for name, value in ANSWERS.items()}
    with ExitStack() as stack:

        def patch(place: Any, **values: Any) -> None:
            stack.enter_context(mock.patch.multiple(place, **values))

        patch(
            torch.cuda,
            device_count=lambda: devices,
            stream=in_stream,
            current_stream=lambda device=None: gpu().stream,
            synchronize=lambda device=None: gpu().synchronize(),
            cudart=lambda: CUDART,
            Stream=Stream,
            Event=Event,
            **answers,
        )
        patch(
            torch.accelerator,
            is_available=lambda: True,
            current_accelerator=lambda check_available=False: torch.device("cuda", 0),
            current_stream=lambda device=None: NO_GRAPH,
        )
        patch(torch.cuda.nccl, version=lambda: (2, 27, 3))
        patch(torch, Generator=Generator)
        patch(fake_tensor, init_gpu_context=lambda device: None)
        patch(fake_tensor.FakeTensorMode, avoid_device_init=True)
        patch(Tensor, numpy=numpy, pin_memory=pin_memory, record_stream=record_stream)
        patch(nn.DataParallel, forward=dp_forward)
        patch(nn.SyncBatchNorm, forward=sync_bn_forward)
        patch(
            dist,
            init_process_group=init_process_group,
            new_group=new_group,
            all_gather_object=all_gather_object,
            gather_object=lambda value, values, group: all_gather_object(values, value),
            broadcast_object_list=lambda objects, src, group: None,
        )
        patch(world, meet_all=lambda address, rank, size, seconds: None)
        patch(FakeWork, wait=work_wait, get_future=work_future)
        patch(
            Future,
            __init__=future_init,
            set_result=future_set_result,
            wait=future_wait,
            value=lambda future: future.result,
            then=future_then,
        )
        patch(torch.distributed.fsdp, fully_shard=fully_shard)
        patch(
            DistributedDataParallel,
            __init__=ddp_init,
            forward=ddp_forward,
            register_comm_hook=ddp_hook,
        )
        yield stack.enter_context(fake_gpus())
