"""Where the time of a step goes: waiting for data, compute, exposed communication.

No step waits for the device: on a GPU the marks are CUDA events, read when they have passed; on the
CPU, readings of the clock. Two marks stand inside backward, set by callbacks of autograd: when all
local gradients are there, and when DistributedDataParallel has seen the last bucket's all-reduce.
The time between them is what compute does not hide. It holds the waiting for slower processes, too.
The reduction itself is not touched, so that weights stay equal bit for bit. A sharded model waits
all along, for weights and gradients of each block: there all of these waits are added up.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from utils.launch.world import is_sharded

PARTS = ("Time/data", "Time/compute", "Time/communication")
Mark = Any  # a torch.cuda.Event, or seconds of the clock


class Clock:
    """Marks in the current stream of a GPU; on the CPU, where calls return when their work is done,
    readings of the clock."""

    def __init__(self, device: torch.device):
        self.device, self.cuda = device, device.type == "cuda"

    def mark(self) -> Mark:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, begin: Mark, end: Mark) -> float:
        return begin.elapsed_time(end) / 1000 if self.cuda else end - begin

    def passed(self, mark: Mark) -> bool:
        return not self.cuda or mark.query()


@dataclass
class StepTimes:
    """Sums in seconds over ``steps`` optimiser steps of one process.

    ``own`` is the part of ``compute`` until its own gradients are there: it waits for no process.
    """

    steps: int = 0
    data: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    own: float = 0.0

    @property
    def seconds(self) -> float:
        """All of the time."""
        return self.data + self.compute + self.communication

    def __sub__(self, other: "StepTimes") -> "StepTimes":
        return StepTimes(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def per_step(self, prefix: str, suffix: str = "") -> dict[str, float]:
        """Seconds per step under three tags; empty if there was no step."""
        names = ("data", "compute", "communication") if self.steps else ()
        return {f"{prefix}{name}{suffix}": getattr(self, name) / self.steps for name in names}


@dataclass
class _Micro:
    """The marks of one micro-batch."""

    asked: Mark  # from here on the device waits for data
    began: Mark
    local: Mark | None = None  # DDP: backward has this process's gradients
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)  # for other processes
    ended: Mark | None = None
    update: bool = True


class StepTimer:
    """Times the micro-batches of one process, and adds them up in ``total``.

    An epoch: `start`; for each micro-batch `begin`, the training step, `end`, and, when what came
    after it (printed lines) is to be no part of a step, `wait`; at last `stop`.
    """

    def __init__(self, model: nn.Module, device: torch.device, distributed: bool):
        self.clock = Clock(device)
        self.total = StepTimes()
        self.pending: deque[_Micro] = deque()
        self.now: _Micro | None = None
        self.last: Mark | None = None
        self.reported = StepTimes()
        self.queued = False
        if distributed and is_sharded(model):
            from utils.comm import fsdp

            fsdp.time_waits(model, self.clock.mark, self._waited)
        elif distributed:
            # DDP waits for every parameter's gradient, so that those of the last layer, which
            # come first, are as good as any.
            trained = [weight for weight in model.parameters() if weight.requires_grad]
            for weight in trained[-2:]:
                weight.register_post_accumulate_grad_hook(self._first_gradient)

    def start(self) -> None:
        """An epoch begins."""
        self.total, self.reported = StepTimes(), StepTimes()
        self.pending.clear()
        self.now, self.last = None, self.clock.mark()

    def begin(self) -> None:
        """The data of a micro-batch have arrived, and its computation begins."""
        if self.last is not None:
            self.now, self.queued = _Micro(self.last, self.clock.mark()), False

    def end(self, update: bool) -> None:
        """All work of a micro-batch has been started; with ``update`` it ended a step."""
        if self.now is None:
            return
        self.now.ended, self.now.update = self.clock.mark(), update
        self.last = self.now.ended
        self.pending.append(self.now)
        self.now = None
        while self.pending and self.clock.passed(self.pending[0].ended):
            self._add(self.pending.popleft())

    def wait(self) -> None:
        """The next batch is requested; lines may have been printed since `end`."""
        self.last = self.clock.mark()

    def stop(self) -> StepTimes:
        """The epoch has ended and the device is idle. Returns: all times."""
        while self.pending:
            self._add(self.pending.popleft())
        self.now = self.last = None
        return self.total

    def recent(self) -> StepTimes:
        """What has come since the last call. A GPU's last steps are not in it yet."""
        total = replace(self.total)
        since, self.reported = total - self.reported, total
        return since

    def _add(self, micro: _Micro) -> None:
        between, total = self.clock.seconds, self.total
        computing = between(micro.began, micro.ended)
        communication = sum(between(*wait) for wait in micro.waits)
        total.data += between(micro.asked, micro.began)
        total.communication += communication
        total.compute += computing - communication
        own = between(micro.began, micro.local) if micro.local else computing - communication
        total.own += own
        total.steps += micro.update

    def _waited(self, began: Mark, ended: Mark) -> None:
        """Forward or backward has waited for other processes."""
        if self.now is not None:
            self.now.waits.append((began, ended))

    def _first_gradient(self, weight: torch.Tensor) -> None:
        """Backward has reached the model: have its end marked."""
        if self.now is not None and not self.queued:
            self.queued = True
            _at_end_of_backward(self._local_gradients)

    def _local_gradients(self) -> None:
        """All local gradients are there. DDP's own callback, queued later, now waits for buckets;
        one that is queued here comes after it."""
        self.now.local = self.clock.mark()
        _at_end_of_backward(lambda: self._waited(self.now.local, self.clock.mark()))


def _at_end_of_backward(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)


def mean_times(times: Sequence[StepTimes]) -> dict[str, float]:
    """Means over processes, in seconds per step, under the epoch's tags."""
    each = [found.per_step("Time/") for found in times if found.steps]
    return {part: statistics.fmean(one[part] for one in each) for part in PARTS} if each else {}


def shares(record: dict[str, float]) -> dict[str, float]:
    """The shares that the parts of a step have in it; 0 where they were not measured."""
    parts = {part: record.get(part, 0.0) for part in PARTS}
    return {part: seconds / (sum(parts.values()) or 1.0) for part, seconds in parts.items()}
