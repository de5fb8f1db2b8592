"""What stands in for CUDA, NCCL and their wrappers in torch on the GPU of tests/fake_cuda.py.

Each stand-in takes what the original takes: calls are bound to the original's signature, and
tests/test_fake_cuda.py compares the signatures of the classes.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fake_cuda import Event, FakeTensor, Gpu, Stream, as_device, fake_gpus, gpu
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.nn.parallel import DistributedDataParallel, comm
from torch.testing._internal.distributed import fake_pg

dp_module = sys.modules["torch.nn.parallel.data_parallel"]

CUDA_0 = torch.device("cuda", 0)

# ---- torch.cuda


@contextmanager
def stream_context(stream: Stream | None) -> Iterator[None]:
    """torch.cuda.stream."""
    if stream is None:
        yield
        return
    current, index = gpu().current, stream.device.index
    before, current[index] = current[index], stream
    try:
        yield
    finally:
        current[index] = before


def synchronize(device: Any = None) -> None:
    """torch.cuda.synchronize."""
    gpu().wait("synchronize()")
    gpu().synchronize()


def get_device_properties(device: Any = None) -> Any:
    """A small GPU."""
    uuid = "11111111-2222-3333-4444-555555555555"
    facts = {"name": "Fake", "total_memory": 2**34, "multi_processor_count": 40, "uuid": uuid}
    return SimpleNamespace(**facts, major=8, minor=0)


def set_device(device: Any) -> None:
    """torch.cuda.set_device."""
    assert as_device(device).index < gpu().devices, f"there is no {device}"
    gpu().device = as_device(device).index


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
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_current_stream_capturing": lambda: False,
    "_lazy_init": lambda: None,
}


def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    """Tensor.pin_memory."""
    copy = tensor.clone()
    gpu().known(copy).pinned = True
    return copy


def record_stream(tensor: Tensor, s: Stream) -> None:
    """Tensor.record_stream."""
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


# ---- NCCL


class Future:
    """torch.futures.Future; what waits for it goes on in the stream, not on the host."""

    def __init__(self, *, devices: list | None = None):
        self.devices, self.result, self.at = [as_device(d) for d in devices or []], None, None
        self.over = False

    def set_result(self, result: Any) -> None:
        for tensor in [result] if isinstance(result, Tensor) else []:
            assert tensor.device.type == "cpu" or tensor.device in self.devices, (
                "a future has to know the devices of its tensors"
            )
        stream = gpu().stream()
        self.result, self.at, self.over = result, (stream, stream.count, dict(stream.seen)), True

    def set_exception(self, result: Any) -> None:
        raise result

    def done(self) -> bool:
        return self.over

    def value(self) -> Any:
        return self.result

    def wait(self) -> Any:
        assert self.over, "nobody will ever give this future a result"
        gpu().stream().learn(*self.at)
        return self.result

    def then(self, callback: Callable[[Any], Any]) -> "Future":
        after = Future(devices=self.devices or [torch.device("cuda", gpu().device)])
        with stream_context(Stream(gpu().stream().device)):
            self.wait()
            after.set_result(callback(self))
        return after

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.then(callback)


class Work:
    """torch.distributed.Work of a collective on the GPU."""

    def __init__(self, tensors: list[Tensor], stream: Stream):
        self.tensors, self.stream = tensors, stream

    def wait(self, timeout: Any = None) -> bool:
        gpu().stream().wait_stream(self.stream)
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Future:
        future = Future(devices=[tensor.device for tensor in self.tensors])
        with stream_context(self.stream):
            future.set_result(self.tensors)
        return future


NCCL_DTYPES = {
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
}


def collective(name: str, read: Sequence[str], written: Sequence[str]) -> Callable[..., Any]:
    """A collective that checks what it gets; ``read`` and ``written`` are names of arguments."""
    original = getattr(dist, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        on_host = getattr(given["group"], "backend", "nccl") == "gloo"
        flat = {
            key: list(value) if isinstance(value := given[key], (list, tuple)) else [value]
            for key in {*read, *written}
        }
        tensors = [tensor for values in flat.values() for tensor in values]
        work = Work([], gpu().main[0]) if given["async_op"] else None
        if not tensors or on_host:
            assert all(t.device.type == "cpu" for t in tensors), f"gloo: {name} of the GPU's tensor"
            return work
        for tensor in tensors:
            assert tensor.device == torch.device("cuda", gpu().device), f"NCCL: {tensor.device}"
            assert tensor.is_contiguous() or name in ("broadcast", "all_reduce"), "NCCL: not dense"
            assert tensor.dtype == tensors[0].dtype, f"NCCL: {name} of several dtypes"
            assert tensor.dtype in NCCL_DTYPES, f"NCCL: {tensor.dtype}"
        if name == "all_to_all_single":
            assert given["output"].numel() == given["input"].numel()
            size = getattr(given["group"], "size", dist.get_world_size)()
            assert len(given["input"]) % size == 0, "NCCL: parts of unequal size"
        gpu().collectives[name, tensors[0].dtype] += 1
        stream = Stream(tensors[0].device)
        stream.wait_stream(gpu().stream())
        with stream_context(stream):
            stream.count += 1
            for key, values in flat.items():
                for tensor in values:
                    gpu().use(tensor, key in written)
        work = Work(flat[written[0]], stream)
        if given["async_op"]:
            return work
        work.wait()
        return None

    return call


def all_gather_object(object_list, obj, group=None, weights_only=False) -> None:  # noqa: ANN001
    """What this process has, from all."""
    object_list[:] = [obj] * len(object_list)


def gather_object(  # noqa: ANN201
    obj, object_gather_list=None, dst=None, group=None, group_dst=None, weights_only=False  # noqa: ANN001
):
    """What this process has, from all."""
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


class Group:
    """A process group made by new_group."""

    def __init__(self, ranks: list[int], backend: str):
        self.ranks, self.backend = ranks, backend

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(0)

    def _get_backend_name(self) -> str:
        return self.backend


def new_group(*args: Any, **kwargs: Any) -> Group:
    """torch.distributed.new_group, as rank 0 sees it."""
    given = inspect.signature(ORIGINAL["new_group"]).bind(*args, **kwargs).arguments
    ranks = given.get("ranks")
    ranks = list(range(dist.get_world_size())) if ranks is None else list(ranks)
    return Group(ranks, given.get("backend") or "nccl")


def init_process_group(*args: Any, **kwargs: Any) -> None:
    """torch's own fake group in place of NCCL's."""
    given = inspect.signature(ORIGINAL["init_process_group"]).bind(*args, **kwargs).arguments
    assert given["backend"] == "nccl"
    store = fake_pg.FakeStore()
    rank, size = given["rank"], given["world_size"]
    ORIGINAL["init_process_group"]("fake", rank=rank, world_size=size, store=store)


ORIGINAL = {name: getattr(dist, name) for name in ("new_group", "init_process_group")}
ARGUMENTS = {  # of each collective: read, written
    "all_reduce": ((), ("tensor",)),
    "reduce": ((), ("tensor",)),
    "broadcast": ((), ("tensor",)),
    "all_gather": (("tensor",), ("tensor_list",)),
    "all_gather_into_tensor": (("input_tensor",), ("output_tensor",)),
    "all_gather_single": (("input_tensor",), ("output_tensor",)),
    "all_to_all_single": (("input",), ("output",)),
    "barrier": ((), ()),
}
DISTRIBUTED = {
    name: collective(name, *arguments)
    for name, arguments in ARGUMENTS.items()
    if hasattr(dist, name)  # the newest is of torch 2.14
} | {
    "new_group": new_group,
    "init_process_group": init_process_group,
    "all_gather_object": all_gather_object,
    "gather_object": gather_object,
    "broadcast_object_list": lambda *args, **kwargs: None,
}


# ---- DistributedDataParallel: its reducer, which is in C++


class Bucket:
    """torch.distributed.GradBucket."""

    def __init__(self, number: int, last: bool, weights: list[nn.Parameter]):
        self.number, self.last, self.weights = number, last, weights
        self.missing = len(weights)
        self.flat = torch.cat([weight.grad.reshape(-1) for weight in weights]) if weights else None

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.last

    def parameters(self) -> list[Tensor]:
        return self.weights

    def buffer(self) -> Tensor:
        return self.flat

    def set_buffer(self, buffer: Tensor) -> None:
        self.flat = buffer

    def gradients(self) -> list[Tensor]:
        parts = self.flat.split([weight.numel() for weight in self.weights])
        return [part.view(weight.shape) for part, weight in zip(parts, self.weights, strict=True)]


class Reducer:
    """Buckets of gradients, the last layer's first, each handed on when it is full."""

    def __init__(self, wrapper: DistributedDataParallel, given: dict[str, Any]):
        self.wrapper = wrapper
        self.groups: list[list[nn.Parameter]] = []
        weights = [weight for weight in wrapper.module.parameters() if weight.requires_grad]
        limit, room = given["bucket_cap_mb"] or 25, 0.0
        for weight in reversed(weights):
            size = weight.numel() * weight.element_size()
            if not self.groups or room < size or weight.dtype != self.groups[-1][0].dtype:
                self.groups.append([])
                room = 2**20 * (1 if len(self.groups) == 1 else limit)
            self.groups[-1].append(weight)
            room -= size
        for number, group in enumerate(self.groups):
            for weight in group:
                weight.register_post_accumulate_grad_hook(
                    functools.partial(self.ready, number)
                )
        self.hook: Callable[..., Any] | None = None
        self.state: Any = None
        self.missing: list[int] = []

    def prepare(self) -> None:
        """A forward pass whose backward pass exchanges."""
        if any(self.missing):
            raise RuntimeError("Expected to have finished reduction in the prior iteration")
        self.missing, self.next = [len(group) for group in self.groups], 0
        self.futures: list[tuple[Bucket, Any]] = []

    def ready(self, number: int, weight: nn.Parameter) -> None:
        """A gradient is there."""
        if not self.wrapper.require_backward_grad_sync:
            return
        self.missing[number] -= 1
        while self.next < len(self.groups) and not self.missing[self.next]:
            self.begin(self.next)
            self.next += 1
        if self.next == len(self.groups):
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    @torch.no_grad()
    def begin(self, number: int) -> None:
        """A bucket is full."""
        bucket = Bucket(number, number + 1 == len(self.groups), self.groups[number])
        if self.hook is None:
            bucket.flat.div_(dist.get_world_size())
            future = dist.all_reduce(bucket.flat, async_op=True).get_future()
            future = future.then(lambda done: done.value()[0])
        else:
            future = self.hook(self.state, bucket)
        self.futures.append((bucket, future))

    @torch.no_grad()
    def finish(self) -> None:
        """Backward ends: it waits for all means."""
        for bucket, future in self.futures:
            mean = future.wait()
            assert isinstance(mean, Tensor)
            assert mean.device == bucket.flat.device
            assert mean.dtype == bucket.flat.dtype, f"a hook made {mean.dtype} of its gradients"
            assert mean.shape == bucket.flat.shape
            bucket.set_buffer(mean)
            for weight, gradient in zip(bucket.weights, bucket.gradients(), strict=True):
                weight.grad.copy_(gradient)
        self.futures = []


ddp_signature = inspect.signature(DistributedDataParallel.__init__)


def ddp_init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
    """DistributedDataParallel.__init__."""
    bound = ddp_signature.bind(self, *args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    nn.Module.__init__(self)
    self.module, self.device_ids = given["module"], given["device_ids"]
    self.require_backward_grad_sync = True
    self.broadcast_buffers = given["broadcast_buffers"] is not False
    places = {tensor.device for tensor in self.module.state_dict().values()}
    assert places == {as_device(self.device_ids[0])}, f"DDP: the model is on {places}"
    for tensor in self.module.state_dict().values():
        dist.broadcast(tensor, 0)
    self.fake_reducer = Reducer(self, given)


def ddp_forward(self: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
    """DistributedDataParallel.forward."""
    for tensor in inputs:
        assert tensor.device == as_device(self.device_ids[0]), f"DDP: images on {tensor.device}"
    if torch.is_grad_enabled() and self.require_backward_grad_sync:
        self.fake_reducer.prepare()
        if self.broadcast_buffers:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, 0)
    return self.module(*inputs, **kwargs)


def ddp_hook(self: DistributedDataParallel, state: object, hook: Callable) -> None:
    """DistributedDataParallel.register_comm_hook."""
    assert self.fake_reducer.hook is None, "a second hook"
    self.fake_reducer.state, self.fake_reducer.hook = state, hook


# ---- DataParallel


def dp_scatter(tensor, devices=None, chunk_sizes=None, dim=0, streams=None, *, out=None):  # noqa: ANN001, ANN201
    """torch.nn.parallel.comm.scatter, which copies the parts beside each other."""
    if chunk_sizes:
        parts = tensor.split(list(chunk_sizes), dim)
    else:
        parts = tensor.chunk(len(devices), dim)
    moved = (p.to(as_device(d), non_blocking=True) for p, d in zip(parts, devices, strict=False))
    return tuple(moved)


def dp_gather(tensors, dim=0, destination=None, *, out=None):  # noqa: ANN001, ANN201
    """torch.nn.parallel.comm.gather."""
    return torch.cat([t.to(as_device(destination), non_blocking=True) for t in tensors], dim)


def dp_broadcast(tensors, devices, buffer_size=10485760):  # noqa: ANN001, ANN201
    """torch.nn.parallel.comm.broadcast_coalesced."""
    devices = [as_device(d) for d in devices]
    return [[t if t.device == d else t.to(d, non_blocking=True) for t in tensors] for d in devices]


def dp_add(inputs, destination=None, buffer_size=10485760):  # noqa: ANN001, ANN201
    """torch.nn.parallel.comm.reduce_add_coalesced."""
    to = as_device(destination)
    return tuple(sum(t.to(to, non_blocking=True) for t in same) for same in zip(*inputs))


def dp_apply(modules, inputs, kwargs_tup=None, devices=None):  # noqa: ANN001, ANN201
    """torch.nn.parallel.parallel_apply, one after the other in this thread."""
    found = []
    for module, given, device in zip(modules, inputs, devices, strict=True):
        before = gpu().device
        set_device(device)
        found.append(module(*given))
        gpu().device = before
    return found


# ---- all of it


def check(original: Callable[..., Any], stand_in: Callable[..., Any]) -> None:
    """Fail unless a stand-in takes the arguments of the original, in order, by name."""
    wanted, found = (list(inspect.signature(f).parameters) for f in (original, stand_in))
    assert found == wanted, f"{original}: {found}, not {wanted}"


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
        patch(torch.accelerator, "is_available", lambda: True)
        patch(torch.accelerator, "current_accelerator", lambda check_available=False: CUDA_0)
        patch(torch.accelerator, "synchronize", synchronize)
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
        patch(comm, "scatter", dp_scatter)
        patch(comm, "gather", dp_gather)
        patch(comm, "broadcast_coalesced", dp_broadcast)
        patch(comm, "reduce_add_coalesced", dp_add)
        patch(dp_module, "parallel_apply", dp_apply)
        yield stack.enter_context(fake_gpus(devices))
