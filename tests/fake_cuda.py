"""A GPU that computes nothing: tensors on ``cuda`` with shapes, dtypes and devices, on any machine.

torch's FakeTensorMode gives tensors on ``cuda`` without storage; what mixes devices raises as on a
GPU. What is on the CPU stays real, so that loaders, samplers and files run as they are. `Gpu` sees
each operation, and raises an AssertionError where the host waits for the device and should not:
``.item()``, ``synchronize``, a copy that blocks (also one from or to memory that is not pinned).

Values that are read where waiting is allowed are made up: 1. Streams have no order, and gradients
are not exchanged: `pytest -m cuda` runs them, on a GPU.
"""

import ctypes
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from traceback import extract_stack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from utils.start import meeting

aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default}
# Kernels that change rows of tensors in place, which torch cannot do on fake ones.
FUSED = {
    aten._fused_sgd_,
    aten._fused_adamw_,
    aten._amp_foreach_non_finite_check_and_unscale_,
    aten._amp_update_scale_,
}


class Stream:
    """In place of torch.cuda.Stream."""

    stream_id, device_index, device_type = 0, 0, 1  # FSDP2 of torch 2.15 hands them to an empty op

    def __init__(self, device: Any = None, priority: int = 0):
        self.wait_stream = self.wait_event = lambda other: None

    def record_event(self) -> "Event":
        return Event()


class Event:
    """In place of torch.cuda.Event, of a stream that is not the main one: it never waits long."""

    def __init__(self, enable_timing: bool = False):
        self.record = lambda stream=None: None
        self.query = lambda: True
        self.synchronize = lambda: None
        self.elapsed_time = lambda end: 1.0  # ms


class Gpu(TorchDispatchMode):
    """Sees each operation; see the module."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: dict[int, StorageWeakRef] = {}  # page-locked; the value keeps the address
        self.locked: list[range] = []  # addresses that were page-locked where they lie
        self.gloo: set[str] = set()  # names of process groups
        self.quiet: Callable[[], bool] = lambda: False  # whether the host must not wait

    def wait(self, what: str) -> None:
        """The host waits for the device."""
        if self.quiet():
            calls = [call for call in extract_stack() if "site-packages" not in call.filename]
            place = [call for call in calls if "fake_" not in call.filename][-1]
            raise AssertionError(f"{what} waits for the device in {place.name}")

    def pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.pinned[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.pinned or any(
            tensor.data_ptr() in one for one in self.locked
        )

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
            work = FakeWork().boxed()
            return (args[0], work) if len(func._schema.returns) == 2 else work
        device, pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
        on_gpu = device is not None and torch.device(device).type == "cuda"
        if not (on_gpu or pinned or any(isinstance(tensor, FakeTensor) for tensor in tensors)):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            if tensors[0].device.type == "cuda":
                self.wait("reading a value")
            return 1.0 if tensors[0].is_floating_point() else 1
        if func.overloadpacket in FUSED:
            assert len({tensor.device for tensor in tensors}) == 1, f"{func} on several devices"
            return None
        try:
            out = func(*args, **kwargs)
        except fake_tensor.DynamicOutputShapeException:
            raise AssertionError(f"{func} waits for the device") from None
        if pinned:
            self.pin(out)
        if func in COPIES:
            self._copy(func, args, kwargs, out)
        return out

    def _on_host(self, args: tuple, tensors: list[Tensor]) -> bool:
        """Whether a collective is of a group of gloo's. NCCL and gloo want tensors of their own."""
        group = next(value for value in args if isinstance(value, torch.ScriptObject))
        on_host = dist.ProcessGroup.unbox(group).group_name in self.gloo
        kinds = {tensor.device.type for tensor in tensors}
        assert kinds == {"cpu" if on_host else "cuda"}, f"a collective of tensors on {kinds}"
        return on_host

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
            if to.device == source.device:
                continue
            to_host = to.device.type == "cpu"
            if made and to_host:
                self.pin(to)  # if need be, by Tensor.to
            if not (asynchronous and self.is_pinned(to if to_host else source)):
                self.wait(f"a copy to the {'host' if to_host else 'device'}")


def tensors_in(values: Any) -> Iterator[Tensor]:
    """All tensors among values and lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


# ---- what stands in for torch.cuda and its users in torch

PROPERTIES = SimpleNamespace(total_memory=2**34, multi_processor_count=40, uuid="")
NO_GRAPH = SimpleNamespace(is_capturing=lambda: False)  # a stream, as optimisers look at it
ANSWERS = {  # of functions of torch.cuda
    "is_available": True,
    "current_device": 0,
    "set_device": None,
    "get_device_properties": PROPERTIES,
    "get_device_name": "Tesla T4",
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


class Generator(torch.Generator):
    """torch.Generator; one of a GPU is on the CPU, as no random number is ever made."""

    def __new__(cls, device: Any = "cpu") -> "Generator":
        return super().__new__(cls, "cpu")


def ddp_init(self: DistributedDataParallel, module: nn.Module, **_: Any) -> None:
    """DistributedDataParallel.__init__, without its reducer, which is in C++."""
    nn.Module.__init__(self)
    self.module, self.require_backward_grad_sync = module, True


@contextmanager
def fake_cuda(devices: int = 1) -> Iterator[Gpu]:
    """A machine with that many GPUs, on which torch can do all that training asks of it."""
    gpu, to_numpy, shard = Gpu(), Tensor.numpy, torch.distributed.fsdp.fully_shard
    begin, new_group = dist.init_process_group, dist.new_group

    def lock_pages(place: int, size: int, flags: int) -> int:
        gpu.locked.append(range(place, place + size))
        return 0

    def numpy(tensor: Tensor) -> Any:
        """The values of a tensor that was on the device are made up."""
        if isinstance(tensor, FakeTensor):
            assert tensor.device.type == "cpu", "numpy reads what is on the device"
            with unset_fake_temporarily():
                tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
        return to_numpy(tensor)

    def dp_forward(model: nn.DataParallel, images: Tensor) -> Tensor:
        return torch.cat([model.module(part) for part in images.chunk(devices)])

    def init_process_group(backend: str, rank: int, world_size: int, **_: Any) -> None:
        assert backend == "nccl"
        begin("fake", rank=rank, world_size=world_size, store=FakeStore())

    def make_group(ranks: list[int] | None = None, backend: str = "", **_: Any) -> Any:
        group = new_group(ranks)
        gpu.gloo |= {group.group_name} if backend == "gloo" else set()
        return group

    def gather(values: list[Any] | None, value: Any, group: Any = None) -> None:
        if values is not None:
            values[:] = [value] * len(values)  # what this process has, from all

    def fully_shard(parts: Any, **options: Any) -> Any:
        """FSDP cannot exchange the data of fake tensors: it gets modules that have been moved."""
        for part in parts if isinstance(parts, list) else [parts]:
            for module in part.modules():
                if not isinstance(module, FSDPModule):
                    module._apply(lambda tensor: tensor.to("cuda"), recurse=False)
        return shard(parts, **options)

    cudart = SimpleNamespace(cudaHostRegister=lock_pages, cudaHostUnregister=lambda place: 0)
    main, nothing = Stream(), lambda *_, **__: None
    answers = {name: mock.Mock(return_value=value) for name, value in ANSWERS.items()}
    with ExitStack() as stack:
        for place, values in (
            (torch.cuda, answers),
            (torch.cuda, {"device_count": lambda: devices, "cudart": lambda: cudart}),
            (torch.cuda, {"Stream": Stream, "Event": Event, "current_stream": lambda _=None: main}),
            (torch.cuda, {"stream": lambda stream: ExitStack()}),
            (torch.cuda, {"synchronize": lambda _=None: gpu.wait("synchronize()")}),
            (torch.cuda.nccl, {"version": lambda: (2, 27, 3)}),
            (torch.accelerator, {"is_available": lambda: True}),
            (torch.accelerator, {"current_accelerator": lambda **_: torch.device("cuda", 0)}),
            (torch.accelerator, {"current_stream": lambda _=None: NO_GRAPH}),
            (torch, {"Generator": Generator}),
            (fake_tensor, {"init_gpu_context": nothing}),
            (FakeTensorMode, {"avoid_device_init": True}),
            (Tensor, {"numpy": numpy, "record_stream": nothing}),
            (Tensor, {"pin_memory": lambda tensor, device=None: gpu.pin(tensor.clone())}),
            (nn.DataParallel, {"forward": dp_forward}),
            (nn.SyncBatchNorm, {"forward": nn.BatchNorm2d.forward}),
            (dist, {"init_process_group": init_process_group, "new_group": make_group}),
            (dist, {"all_gather_object": gather, "broadcast_object_list": nothing}),
            (dist, {"gather_object": lambda value, values, group: gather(values, value)}),
            (meeting, {"meet_all": nothing}),
            (torch.distributed.fsdp, {"fully_shard": fully_shard}),
            (DistributedDataParallel, {"__init__": ddp_init, "register_comm_hook": nothing}),
            (DistributedDataParallel, {"forward": lambda self, images: self.module(images)}),
        ):
            stack.enter_context(mock.patch.multiple(place, **values))
        stack.enter_context(autograd_without_accelerator())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield stack.enter_context(gpu)


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
