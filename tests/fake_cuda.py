"""A GPU that computes nothing: tensors on ``cuda`` with shapes, dtypes and devices, on any machine.

torch's FakeTensorMode gives tensors on ``cuda`` without storage; what mixes devices or dtypes
raises as on a GPU. What is on the CPU stays real, so that loaders, samplers and files run as they
are. On top of that, `Gpu` sees each operation and raises an AssertionError where

    the host waits for the device and should not: ``.item()``, a copy that blocks (also one from or
        to memory that is not pinned), ``synchronize``
    a stream uses what another one has written, or overwrites what another one reads, without
        having waited for it; or the host what is still on its way

Values that are read where waiting is allowed are made up: 1. Only the first GPU computes.
"""

import ctypes
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from traceback import extract_stack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default}
# What a tensor core would do; `Gpu.heavy` has the dtypes.
HEAVY = {"convolution", "convolution_backward", "mm", "addmm", "bmm", "baddbmm"}
# Kernels that change rows of tensors in place, which torch cannot do on fake ones.
FUSED = {
    aten._fused_sgd_,
    aten._fused_adamw_,
    aten._amp_foreach_non_finite_check_and_unscale_,
    aten._amp_update_scale_,
}


class Stream:
    """In place of torch.cuda.Stream: a counter of its work, and how far it knows that of others."""

    stream_id, device_index, device_type = 0, 0, 1  # FSDP2 of torch 2.15 hands them to an empty op

    def __init__(self, device: Any = None, priority: int = 0):
        self.count, self.seen = 0, {}

    def now(self) -> dict["Stream", int]:
        """How far all streams are known to be when what this one has now is done."""
        return self.seen | {self: self.count}

    def knows(self, other: "Stream", count: int) -> bool:
        """Whether what ``other`` did until ``count`` is done before what this stream does next."""
        return other is self or self.seen.get(other, 0) >= count

    def learn(self, seen: dict["Stream", int]) -> None:
        """Have waited until all streams were as far as ``seen``."""
        for stream, count in seen.items():
            self.seen[stream] = max(self.seen.get(stream, 0), count)

    def wait_stream(self, stream: "Stream") -> None:
        self.learn(stream.now())

    def wait_event(self, event: "Event") -> None:
        self.learn(event.at)

    def record_event(self) -> "Event":
        event = Event()
        event.record(self)
        return event


class Event:
    """In place of torch.cuda.Event. Asked for the first time, it has not passed yet."""

    def __init__(self, enable_timing: bool = False):
        self.enable_timing = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        self.stream, self.asked = stream or gpu().stream, False
        self.at = self.stream.now()

    def passed(self) -> bool:
        return gpu().host.knows(self.stream, self.at[self.stream])

    def query(self) -> bool:
        if self.asked:
            gpu().host.learn(self.at)
        self.asked = True
        return self.passed()

    def synchronize(self) -> None:
        if not self.passed():
            if self.stream is gpu().main:  # an upload waits for nothing that is computed
                gpu().wait("Event.synchronize()")
            gpu().host.learn(self.at)

    def elapsed_time(self, end_event: "Event") -> float:
        for event in (self, end_event):
            assert event.enable_timing, "an event without enable_timing has no time"
            assert event.passed(), "CUDA error: device not ready"
        return 1.0  # ms


@dataclass
class Memory:
    """What is known of a storage."""

    alive: StorageWeakRef  # which also keeps its address from being used again
    home: Stream | None = None  # where it was allocated
    written: tuple[Stream, int] | None = None
    read: dict[Stream, int] = field(default_factory=dict)
    users: set[Stream] = field(default_factory=set)
    recorded: set[Stream] = field(default_factory=set)  # by Tensor.record_stream
    pinned: bool = False


class Gpu(TorchDispatchMode):
    """Sees each operation; see the module."""

    def __init__(self) -> None:
        super().__init__()
        self.host, self.main, self.nccl = Stream(), Stream(), Stream()
        self.stream = self.main  # the current one
        self.memory: dict[int, Memory] = {}
        self.locked: list[range] = []  # addresses that were page-locked where they lie
        self.heavy: set[torch.dtype] = set()
        self.collectives: Counter[tuple[str, torch.dtype]] = Counter()
        self.gloo: set[str] = set()  # names of process groups
        self.sent: list[Tensor] = []  # the result of the last collective
        self.lost: list[Memory] = []  # what was `unrecorded` after a step
        self.quiet: Callable[[], bool] = lambda: False  # whether they are not
        self.optimised: set[torch.dtype] = set()  # of what the fused optimiser has updated

    def synchronize(self) -> None:
        """torch.cuda.synchronize."""
        self.wait("synchronize()")
        known = {memory.home for memory in self.memory.values() if memory.home}
        for stream in {self.main, self.stream, *known}:
            self.host.wait_stream(stream)

    def wait(self, what: str) -> None:
        """The host waits for the device."""
        if not self.quiet():
            return
        calls = [call for call in extract_stack() if "site-packages" not in call.filename]
        place = [call for call in calls if "fake_" not in call.filename][-1]
        raise AssertionError(f"{what} waits for the device in {place.name}")

    # ---- memory

    def known(self, tensor: Tensor, stream: Stream | None = None) -> Memory:
        """What is known of the storage of ``tensor``; if nothing, ``stream`` has just made it."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.memory:
            written = (stream, stream.count) if stream else None
            self.memory[storage._cdata] = Memory(StorageWeakRef(storage), stream, written)
        return self.memory[storage._cdata]

    def ordered(self, stream: Stream, other: Stream, count: int) -> bool:
        """Whether what ``other`` did until ``count`` ends before what ``stream`` begins now."""
        return other is self.host or stream.knows(other, count) or self.host.knows(other, count)

    def use(self, tensor: Tensor, writes: bool, stream: Stream | None = None) -> None:
        """A stream (by default the current one), or the host, reads or writes a tensor."""
        stream = stream or self.stream
        memory = self.known(tensor, stream if tensor.device.type == "cuda" else None)
        if memory.written and not self.ordered(stream, *memory.written):
            raise AssertionError("used while it is written elsewhere: nobody has waited")
        memory.users.add(stream)
        if not writes:
            memory.read[stream] = stream.count
            return
        if any(not self.ordered(stream, *reader) for reader in memory.read.items()):
            raise AssertionError("overwritten while it is read elsewhere: nobody has waited")
        memory.written, memory.read = (stream, stream.count), {}

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor on the CPU is page-locked."""
        return self.known(tensor).pinned or any(tensor.data_ptr() in one for one in self.locked)

    def unrecorded(self) -> list[Memory]:
        """Memory that a stream has used on which it was not allocated, without record_stream."""
        strangers = [m for m in self.memory.values() if m.home and m.users - m.recorded - {m.home}]
        return [m for m in strangers if m.alive.expired()]

    # ---- operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it does the same with its own part
        if func is torch.ops.prim.device.default:  # C++ asks, and nothing is done
            return args[0].device
        kwargs = dict(kwargs or {})
        tensors = list(tensors_in((*args, *kwargs.values())))
        if func.namespace == "c10d" and not self._on_host(args, tensors):
            return self._collective(func, args, tensors)
        device = kwargs.get("device")
        on_gpu = device is not None and torch.device(device).type == "cuda"
        pinned = bool(kwargs.get("pin_memory"))
        if not (on_gpu or pinned or any(isinstance(tensor, FakeTensor) for tensor in tensors)):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if pinned:
            kwargs["pin_memory"] = False
        self.stream.count += 1
        if func is aten._local_scalar_dense.default:
            return self._read(tensors[0])
        try:
            fused = func.overloadpacket in FUSED
            out = self._fused(func, args, tensors) if fused else func(*args, **kwargs)
        except DynamicOutputShapeException:
            raise AssertionError(f"{func} waits for the device") from None
        name = func.overloadpacket.__name__
        if name in HEAVY and tensors[0].device.type == "cuda":
            dtypes = {tensor.dtype for tensor in tensors}
            assert len(dtypes) == 1, f"{name} of {' and '.join(map(str, dtypes))}"
            self.heavy |= dtypes
        written = mutated(func, args)
        for tensor in tensors:
            if tensor.device.type == "cuda":
                self.use(tensor, id(tensor) in written)
            elif func not in COPIES:
                self.use(tensor, id(tensor) in written, self.host)
        for tensor in tensors_in((out,)):
            if tensor.device.type == "cuda":
                self.known(tensor, self.stream)
            elif pinned:
                self.known(tensor).pinned = True
        if func in COPIES:
            self._copy(func, args, kwargs, out)
        return out

    def _fused(self, func: Any, args: tuple, tensors: list[Tensor]) -> None:
        """Check what a fused kernel demands: one device, and one dtype for what goes together."""
        assert len({tensor.device for tensor in tensors}) == 1, f"{func} on several devices"
        lists = [value for value in args if isinstance(value, list) and value]
        for row in zip(*lists, strict=True):
            (dtype,) = {tensor.dtype for tensor in row}
            if len(row) > 1:  # an optimiser's
                self.optimised.add(dtype)

    def _on_host(self, args: tuple, tensors: list[Tensor]) -> bool:
        """Whether a collective is of a group of gloo's. NCCL and gloo want tensors of their own."""
        group = next(value for value in args if isinstance(value, torch.ScriptObject))
        on_host = dist.ProcessGroup.unbox(group).group_name in self.gloo
        kinds = {tensor.device.type for tensor in tensors}
        assert kinds == {"cpu" if on_host else "cuda"}, f"a collective of tensors on {kinds}"
        return on_host

    def _collective(self, func: Any, args: tuple, tensors: list[Tensor]) -> Any:
        """A collective of NCCL's, in a stream of its own."""
        (dtype,) = {tensor.dtype for tensor in tensors}
        self.collectives[func.__name__, dtype] += 1
        self.nccl.wait_stream(self.stream)
        self.nccl.count += 1
        self.sent = list(tensors_in(args[:1]))
        for tensor in tensors:
            self.use(tensor, any(tensor is one for one in self.sent), self.nccl)
        work = FakeWork().boxed()
        return (args[0], work) if len(func._schema.returns) == 2 else work

    def _read(self, tensor: Tensor) -> Any:
        if tensor.device.type == "cuda":
            self.wait("reading a value")
        else:
            self.use(tensor, False, self.host)
        return 1.0 if tensor.is_floating_point() else 1

    def _copy(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """A copy between host and device, which may be of several tensors."""
        made = func is aten._to_copy.default
        if func is aten._foreach_copy_.default:
            moves = list(zip(args[0], args[1], strict=True))
        else:
            moves = [(out, args[0]) if made else args[:2]]
        place = 1 if made else 2
        asynchronous = kwargs.get("non_blocking", args[place] if len(args) > place else False)
        for to, source in moves:
            stream = self.host if to.device == source.device else self.stream
            for tensor, writes in ((source, False), (to, True)):
                if tensor.device.type == "cpu":
                    self.use(tensor, writes, stream)
            if to.device == source.device:
                continue
            to_host = to.device.type == "cpu"
            if made and to_host:
                self.known(to).pinned = True  # if need be, by Tensor.to
            if not (asynchronous and self.is_pinned(to if to_host else source)):
                name = "host" if to_host else "device"
                self.wait(f"a copy to the {name}" + " of pageable memory" * asynchronous)
                self.host.wait_stream(stream)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """All tensors among values and lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def mutated(func: Any, args: tuple) -> set[int]:
    """The ids of those tensors among ``args`` that ``func`` changes in place."""
    writes = [a.alias_info and a.alias_info.is_write for a in func._schema.arguments]
    values = (value for value, written in zip(args, writes, strict=False) if written)
    return {id(tensor) for tensor in tensors_in(values)}


# ---- the GPU that is on

_on: list[Gpu] = []


def gpu() -> Gpu:
    """The simulated GPU."""
    return _on[-1]


def in_stream(stream: Stream) -> AbstractContextManager:
    """torch.cuda.stream."""
    return mock.patch.object(gpu(), "stream", stream)


@contextmanager
def fake_gpus() -> Iterator[Gpu]:
    """Tensors on ``cuda`` are fake. Nothing else is stood in for."""
    with ExitStack() as stack:
        stack.enter_context(autograd_without_accelerator())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        _on.append(stack.enter_context(Gpu()))
        stack.callback(_on.pop)
        yield _on[-1]


NOTHING = {"x86_64": b"\x31\xc0\xc3", "aarch64": b"\x00\x00\x80\x52\xc0\x03\x5f\xd6"}  # return 0
ASKED = (
    "_ZN2at11accelerator14getAcceleratorEb",  # at::accelerator::getAccelerator(bool)
    "_ZN2at11accelerator13isAcceleratorEN3c1010DeviceTypeE",  # isAccelerator(c10::DeviceType)
)
PAGE = 65536  # the largest there is


def can_simulate() -> bool:
    """Whether this machine's processor is one for which `autograd_without_accelerator` works."""
    return sys.platform == "linux" and platform.machine() in NOTHING


@contextmanager
def autograd_without_accelerator() -> Iterator[None]:
    """Autograd asks torch which accelerator it is built for, and starts it: it hears "none".

    The two functions that answer are in C++, and no switch reaches them: they are replaced in
    memory by ones that return 0, and put back.
    """
    torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    libc, code = ctypes.CDLL(None), NOTHING[platform.machine()]
    places = [ctypes.cast(getattr(torch_cpu, name), ctypes.c_void_p).value for name in ASKED]
    before = [ctypes.string_at(place, len(code)) for place in places]

    def write(texts: list[bytes]) -> None:
        for place, text in zip(places, texts, strict=True):
            first = ctypes.c_void_p(place - place % PAGE)
            # Read, write, execute.
            assert not libc.mprotect(first, ctypes.c_size_t(2 * PAGE), 7)
            ctypes.memmove(place, text, len(text))

    write([code] * len(places))
    try:
        yield
    finally:
        write(before)
