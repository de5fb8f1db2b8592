"""What stands in for NCCL and for DistributedDataParallel's reducer, which are in C++.

Calls are bound to the originals' signatures. A collective checks what NCCL demands, and has its
place in a stream, so that tests/fake_cuda.py sees who uses its result too early.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from fake_cuda import Stream, as_device, gpu, stream_context
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg


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
        stream = gpu().stream
        self.result, self.at, self.over = result, (stream, stream.count, dict(stream.seen)), True

    def set_exception(self, result: Any) -> None:
        raise result

    def done(self) -> bool:
        return self.over

    def value(self) -> Any:
        return self.result

    def wait(self) -> Any:
        assert self.over, "nobody will ever give this future a result"
        gpu().stream.learn(*self.at)
        return self.result

    def then(self, callback: Callable[[Any], Any]) -> "Future":
        after = Future(devices=self.devices or [as_device(0)])
        with stream_context(Stream()):
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
        gpu().stream.wait_stream(self.stream)
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
        work = Work([], gpu().main) if given["async_op"] else None
        if not tensors or on_host:
            assert all(t.device.type == "cpu" for t in tensors), f"gloo: {name} of the GPU's tensor"
            return work
        for tensor in tensors:
            assert tensor.device == as_device(0), f"NCCL: {tensor.device}"
            assert tensor.is_contiguous() or name in ("broadcast", "all_reduce"), "NCCL: not dense"
            assert tensor.dtype == tensors[0].dtype, f"NCCL: {name} of several dtypes"
            assert tensor.dtype in NCCL_DTYPES, f"NCCL: {tensor.dtype}"
        if name == "all_to_all_single":
            assert given["output"].numel() == given["input"].numel()
            size = getattr(given["group"], "size", dist.get_world_size)()
            assert len(given["input"]) % size == 0, "NCCL: parts of unequal size"
        gpu().collectives[name, tensors[0].dtype] += 1
        stream = Stream()
        stream.wait_stream(gpu().stream)
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


def all_gather_object(object_list, obj, group=None) -> None:
    """What this process has, from all."""
    object_list[:] = [obj] * len(object_list)


def gather_object(obj, object_gather_list=None, dst=None, group=None, group_dst=None):
    """What this process has, from all."""
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def broadcast_object_list(object_list, src=None, group=None, device=None, group_src=None):
    """This process is the one that has the objects."""


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


@functools.wraps(dist.new_group)
def new_group(*args: Any, **kwargs: Any) -> Group:
    """torch.distributed.new_group, as rank 0 sees it."""
    given = inspect.signature(ORIGINAL["new_group"]).bind(*args, **kwargs).arguments
    ranks = given.get("ranks")
    ranks = list(range(dist.get_world_size())) if ranks is None else list(ranks)
    return Group(ranks, given.get("backend") or "nccl")


@functools.wraps(dist.init_process_group)
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
    "reduce_scatter_tensor": (("input",), ("output",)),
    "reduce_scatter_single": (("input",), ("output",)),
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
    "broadcast_object_list": broadcast_object_list,
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
                weight.register_post_accumulate_grad_hook(functools.partial(self.ready, number))
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
    self.gradient_as_bucket_view = given["gradient_as_bucket_view"]
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


# What the originals, which are in C++, must have by these names.
PARTS = [(dist.GradBucket, Bucket), (dist.Work, Work)]
