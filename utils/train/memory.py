"""What tensors take of a device's memory: counted one by one, or as CUDA's allocator says.

A CPU has no allocator that could be asked, and the resident size of a process says nothing about
its tensors. So there the results of each operation are counted as they come and go. What an
operation takes for itself while it runs, and what other libraries take, is not seen so.
"""

import math
import re
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

GIB = 2**30
BLOCK = 512  # bytes; CUDA's allocator gives multiples of it


class Full(RuntimeError):
    """Tensors would take more memory than they may."""


class Gauge(Protocol):
    """Measures what runs in its ``with`` block, any number of times, until it is closed.

    ``peak``: bytes, of the last block; ``limit``: bytes that a peak may have. With ``strict`` what
    goes past it ends by an exception that `is_shortage` knows.
    """

    limit: float
    peak: float

    def __enter__(self) -> Any: ...
    def __exit__(self, *fault: Any) -> Any: ...
    def add_buckets(self, replica: DistributedDataParallel, hold_gradients: bool) -> None: ...
    def close(self) -> None: ...


class Counter(TorchDispatchMode):
    """A `Gauge` for any device, also for tensors without values: it adds up their storages."""

    def __init__(
        self, limit: float = math.inf, strict: bool = True, existing: Iterable[Tensor] = ()
    ):
        """``existing``: tensors that are there already; what else there is, is not counted."""
        super().__init__()
        self.limit, self.strict = limit, strict
        self.now = self.peak = 0.0
        self._sizes: dict[int, float] = {}
        self._hooks: list[RemovableHandle] = []
        for tensor in existing:
            self._count(tensor)

    def __enter__(self) -> "Counter":
        self.peak, sizes, resize = self.now, self._sizes, torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            # In this way FSDP empties and fills tensors, without an operator.
            done = resize(storage, size)
            if id(storage) in sizes:
                self._set(id(storage), _rounded(storage.nbytes()))
            return done

        self._resize = resize
        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *fault: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*fault)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._count, results)
        return results

    def add_bytes(self, size: float) -> None:
        """Count memory that stays taken and is no tensor's."""
        self.now += size
        self._look()

    def leave_out(self, tensor: Tensor) -> None:
        """Count a tensor no longer: it lies in memory that is counted elsewhere."""
        key = id(local(tensor).untyped_storage())
        if key in self._sizes:
            self._set(key, 0.0)

    def add_buckets(self, replica: DistributedDataParallel, hold_gradients: bool) -> None:
        """Count the buckets of a replica. ``hold_gradients``: gradients take no other memory.

        (In a step without the exchange they do, and are left out.)
        """
        with _disable_current_modes():  # it makes its last buckets anew when it next computes
            replica.reducer._rebuild_buckets()
        trained = [p for p in replica.module.parameters() if p.requires_grad]
        self.add_bytes(bytes_of(trained))
        if hold_gradients:
            for parameter in trained:
                hook = parameter.register_post_accumulate_grad_hook(
                    lambda p: self.leave_out(p.grad)
                )
                self._hooks.append(hook)

    def close(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def _count(self, tensor: Tensor) -> None:
        try:
            storage = local(tensor).untyped_storage()
        except (NotImplementedError, RuntimeError):  # a layout without a storage
            return
        key = id(storage)
        if key not in self._sizes:
            self._sizes[key] = 0.0
            weakref.finalize(storage, self._forget, key).atexit = False
            self._set(key, _rounded(storage.nbytes()))

    def _set(self, key: int, size: float) -> None:
        self.now += size - self._sizes[key]
        self._sizes[key] = size
        self._look()

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def _look(self) -> None:
        self.peak = max(self.peak, self.now)
        if self.strict and self.now > self.limit:
            raise Full(f"tensors take {self.now / GIB:.3f} of {self.limit / GIB:.3f} GiB")


class Allocator:
    """A `Gauge` of GPUs: the peak of torch's allocator in the fullest of them.

    ``strict``: the allocator gets no more than the limit. Buckets are in it already, beside the
    gradients of a step without the exchange: that is more than a training takes, by those.
    """

    def __init__(self, devices: Iterable[int], limit: float = math.inf, strict: bool = True):
        """``limit``: bytes; never more than is free now, or ours."""
        self.devices, self.strict, self.peak = list(devices), strict, 0.0
        torch.cuda.empty_cache()
        rooms = [
            torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
            for device in self.devices
        ]
        self.limit = min(limit, *rooms)

    def __enter__(self) -> "Allocator":
        torch.cuda.empty_cache()
        for device in self.devices:
            torch.cuda.reset_peak_memory_stats(device)
            if self.strict:
                share = self.limit / torch.cuda.mem_get_info(device)[1]
                torch.cuda.set_per_process_memory_fraction(min(share, 1.0), device)
        return self

    def __exit__(self, *fault: Any) -> None:
        for device in self.devices:
            torch.cuda.synchronize(device)
            if self.strict:
                torch.cuda.set_per_process_memory_fraction(1.0, device)
        self.peak = max(float(torch.cuda.max_memory_allocated(d)) for d in self.devices)

    def add_buckets(self, replica: DistributedDataParallel, hold_gradients: bool) -> None:
        """Nothing to be done."""

    def close(self) -> None:
        """Give back what is not used."""
        torch.cuda.empty_cache()


# cuDNN and cuBLAS say so in their own ways when they find no memory for what they need.
_SHORTAGE = re.compile(
    "out of memory|can't allocate memory|ALLOC_FAILED|CUDNN_STATUS_NOT_SUPPORTED|"
    "CUDNN_STATUS_EXECUTION_FAILED|CUDNN_STATUS_INTERNAL_ERROR|[Uu]nable to find an engine|"
    "canUse32BitIndexMath|not enough memory"
)


def is_shortage(fault: BaseException) -> bool:
    """Whether an exception says that memory was too small."""
    if isinstance(fault, (Full, torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(fault, RuntimeError) and bool(_SHORTAGE.search(str(fault)))


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: of one that is sharded (a DTensor), its shard."""
    return getattr(tensor, "_local_tensor", tensor)


def bytes_of(tensors: Iterable[Tensor]) -> float:
    """Bytes that this process holds of ``tensors``, each counted once."""
    mine = {id(tensor): local(tensor) for tensor in tensors}
    return float(sum(tensor.numel() * tensor.element_size() for tensor in mine.values()))


def of_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Bytes that this process holds: parameters (with buffers), gradients in a step, optimizer.

    The optimiser's are its state and, where it has them, the float32 masters of the parameters.
    """
    parameters = list(model.parameters())
    own = {id(parameter) for parameter in parameters}
    masters = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    state = [x for entry in optimizer.state.values() for x in entry.values() if torch.is_tensor(x)]
    return {
        "parameters": bytes_of([*parameters, *model.buffers()]),
        "gradients": bytes_of(p for p in parameters if p.requires_grad),
        "optimizer": bytes_of([*masters, *state]),
    }


def _rounded(size: int) -> float:
    return float(-(-size // BLOCK) * BLOCK)
