"""Measure the parts of a step (``Time/...``), GPU and CPU utilisation, and memory.

Interface: `Monitor`, which `utils.epoch.Meter` calls; scripts/bench/time_step.py uses `StepTimer`.

A step has three parts: waiting for data, compute, and exposed communication. No step waits for the
device because of these measurements: on a GPU they are CUDA events, read once they are done; on the
CPU they are readings of the clock. During backward, callbacks of autograd set two marks: when all
local gradients are ready, and when the all-reduce of DistributedDataParallel's last bucket is done.
The time between them is communication not overlapped by compute, including the wait for slower
processes. The reduction is not changed, so weights stay bit-identical. A sharded model communicates
throughout the step: this part is then not measured, and counts as compute.
"""

import contextlib
import logging
import math
import operator
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol

import torch
from torch import nn

from utils.data.batches import MicroBatch
from utils.run.ledger import EnergyMeter
from utils.start.world import World, is_sharded, local

log = logging.getLogger(__name__)

PARTS = ("data", "compute", "communication")  # of a step
SECONDS = 1.0  # seconds between samples of the hardware
ENOUGH = 30  # samples needed for a meaningful median
GIB = 2**30
# Tags, the torch.cuda functions (based on NVML) that measure them, and factors for the values.
GPU = {
    "GPU/utilisation": ("utilization", 1.0),  # per cent
    "GPU/memory_gb": ("device_memory_used", 1 / GIB),
    "GPU/power_w": ("power_draw", 1 / 1000),
    "GPU/temperature_c": ("temperature", 1.0),
}


# ---- the clock of a step


class Mark(Protocol):
    """A position in the device's work: a CUDA event, or a `Reading`."""

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from this mark to another one of its kind."""
        ...


class Reading(float):
    """A reading of the clock with the methods of a CUDA event, for training on a CPU.

    There, calls return only when their work is done.
    """

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: float) -> float:
        return 1000 * (end - self)


Interval = tuple[str, Mark, Mark]  # part of a step, begin, end


@dataclass
class StepTimes:
    """Steps of one process, and the seconds of their parts.

    The parts are `PARTS` and, under DDP, "own": the share of "compute" until this process's
    gradients are ready. With a sharded model there is no "communication".
    """

    steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, steps: int, seconds: dict[str, float]) -> None:
        """Add a micro-batch, which ends ``steps`` steps: 0 or 1."""
        self.steps += steps
        for part, value in seconds.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + value

    def per_step(self) -> dict[str, float]:
        """The mean seconds of the measured parts; empty if there was no step."""
        return {part: x / self.steps for part, x in self.seconds.items()} if self.steps else {}


def after_backward(call: Callable[[], None]) -> None:
    """Have autograd call ``call`` once the current backward pass and earlier calls have ended.

    torch's own DDP and FSDP mark their end in this way, which has no public name. If the order of
    calls changes, `test_the_marks_stand_around_the_wait_for_buckets` fails.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


class StepTimer:
    """Times the micro-batches of one process.

    Call order in an epoch: `start`; for each micro-batch `begin`, the training step and `end`; then
    `stop`. Call `wait` after printing, so that this time does not count. ``total`` counts since
    `start`, ``since`` since the last `recent`.
    """

    def __init__(self, model: nn.Module, device: torch.device, distributed: bool):
        self.device, self.sharded = device, is_sharded(model)
        self.total, self.since = StepTimes(), StepTimes()
        self.pending: deque[tuple[list[Interval], bool]] = deque()
        self.now: list[Interval] | None = None  # of the current micro-batch
        self.last: Mark | None = None  # since then, the device has waited for data
        self.queued = False
        if distributed and not self.sharded:
            # Backward reaches the last layer first. Any layer would do: DDP waits for all of them.
            trained = [weight for weight in model.parameters() if weight.requires_grad]
            for weight in trained[-2:]:
                weight.register_post_accumulate_grad_hook(self._first_gradient)

    def mark(self) -> Mark:
        """Mark the current position in the device's work."""
        if self.device.type == "cpu":
            return Reading(time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def start(self) -> None:
        """Call this when an epoch begins."""
        self.total, self.since = StepTimes(), StepTimes()
        self.wait()

    def begin(self) -> None:
        """Call this when the data of a micro-batch have arrived and its computation begins."""
        if self.last is not None:
            self.now, self.queued = [("data", self.last, self.mark())], False

    def end(self, update: bool) -> None:
        """Call this when a micro-batch's work has been launched. ``update``: it ends a step."""
        if self.now is None:
            return
        self.last = self.mark()
        self.now.append(("compute", self.now[0][2], self.last))
        self.pending.append((self.now, update))
        self.now = None
        while self.pending and self.pending[0][0][-1][2].query():
            self._add(*self.pending.popleft())

    def wait(self) -> None:
        """Call this when the next batch is requested. The time since `end` does not count."""
        self.last = self.mark()

    def stop(self) -> dict[str, float]:
        """End the epoch; the device must be idle. Returns: mean seconds per step of each part."""
        while self.pending:
            self._add(*self.pending.popleft())
        self.now = self.last = None
        return self.total.per_step()

    def recent(self) -> dict[str, float]:
        """Return the mean parts since the last call, without steps that a GPU has not finished."""
        since, self.since = self.since, StepTimes()
        return since.per_step()

    def _add(self, intervals: list[Interval], update: bool) -> None:
        seconds: dict[str, float] = {} if self.sharded else {"communication": 0.0}
        for part, begin, end in intervals:
            seconds[part] = seconds.get(part, 0.0) + begin.elapsed_time(end) / 1000
        seconds["compute"] -= seconds.get("communication", 0.0)  # it is part of that interval
        for times in (self.total, self.since):
            times.add(int(update), seconds)

    def _first_gradient(self, weight: torch.Tensor) -> None:
        """Backward has begun: queue callbacks that mark its end and the end of communication.

        DDP's own callback waits for the buckets. It is queued after the first one here, and before
        the second, which the first one queues when it runs.
        """
        if self.now is None or self.queued:
            return
        self.queued, now = True, self.now

        def local_gradients() -> None:
            local = self.mark()
            now.append(("own", now[0][2], local))
            after_backward(lambda: now.append(("communication", local, self.mark())))

        after_backward(local_gradients)


# ---- GPU, CPU and memory


def read_gpu(device: torch.device) -> dict[str, float]:
    """Return the values of this GPU's sensors, by the tags of `GPU`."""
    values = {}
    for tag, (name, factor) in GPU.items():
        with contextlib.suppress(Exception):  # a missing sensor causes many types of error
            values[tag] = factor * getattr(torch.cuda, name)(device)
    return values


def cpu_ticks() -> tuple[int, int]:
    """Return the idle and total clock ticks so far of the cores that this process may use."""
    lines = map(str.split, Path("/proc/stat").read_text().splitlines())
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    # user, nice, system, idle, iowait, irq, softirq, steal; user includes guests.
    ticks = [[int(text) for text in counts[:8]] for name, *counts in lines if name in cores]
    return sum(one[3] + one[4] for one in ticks), sum(map(sum, ticks))


def tensor_peak(device: torch.device) -> float | None:
    """Peak bytes of this process's tensors on its GPU; None on a CPU."""
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None


def tensor_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> dict[str, float]:
    """Return the bytes of this process's tensors by purpose. Each tensor is counted once.

    "optimizer" is the optimiser's state and, if it has any, the float32 masters of the parameters.
    "activations" (GPU only) is the rest of the peak memory.
    """
    weights = list(model.parameters())
    known = {id(weight) for weight in weights}
    masters = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    entries = optimizer.state.values()
    kept = [x for entry in entries for x in entry.values() if torch.is_tensor(x)]
    tensors = {
        "parameters": [*weights, *model.buffers()],
        "gradients": [weight for weight in weights if weight.requires_grad],
        "optimizer": [*masters, *kept],
    }
    sizes = {
        part: float(sum({id(tensor): local(tensor).nbytes for tensor in some}.values()))
        for part, some in tensors.items()
    }
    if (peak := tensor_peak(device)) is not None:
        sizes["activations"] = max(0.0, peak - sum(sizes.values()))
    return sizes


def over_processes(tags_of_ranks: Iterable[dict[str, float]]) -> dict[str, float]:
    """TAG_min, TAG_mean and TAG_max of each tag that a process has; TAG alone of one process.

    Curves of single processes would be hundreds. scripts/status.sh shows each process.
    """
    values: dict[str, list[float]] = defaultdict(list)
    ranks = list(tags_of_ranks)
    for of_rank in ranks:
        for tag, value in of_rank.items():
            values[tag].append(value)
    if len(ranks) == 1:
        return {tag: one for tag, (one,) in values.items()}
    joins = {"min": min, "mean": fmean, "max": max}
    return {f"{tag}_{name}": join(x) for tag, x in values.items() for name, join in joins.items()}


class Monitor(StepTimer):
    """The measurements of one process. A thread samples GPU and CPU every second until `close`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World):
        super().__init__(model, world.device, world.size > 1)
        self.model, self.optimizer, self.world = model, optimizer, world
        self.ticks = cpu_ticks()
        self.samples: dict[str, list[float]] = defaultdict(list)
        self.of_ranks: list[dict[str, float]] = []  # mean seconds of the parts of a step
        self.energy = EnergyMeter()
        self.joules_of_all: list[float | None] = []  # of each rank, at the end of an epoch
        self.joules_then: float | None = None  # of this one
        if self.device.type == "cuda" and not read_gpu(self.device):
            log.info("GPU utilisation is not recorded: pip install nvidia-ml-py")
        self.lock, self.closing = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.closing.wait(SECONDS):
            self.sample()

    def sample(self) -> dict[str, list[float]]:
        """Read GPU and CPU. Returns: all samples since the epoch began."""
        with self.lock:
            resident = int(Path("/proc/self/statm").read_text().split()[1])
            values = {"CPU/memory_gb": resident * os.sysconf("SC_PAGE_SIZE") / GIB}
            ticks = cpu_ticks()
            idle, total = map(operator.sub, ticks, self.ticks)
            if total > 0:  # else keep the old ticks
                self.ticks = ticks
                values["CPU/utilisation"] = 100 * (1 - idle / total)
            if self.device.type == "cuda":
                values |= read_gpu(self.device)
            for tag, value in values.items():
                self.samples[tag].append(value)
            if "GPU/power_w" in values:
                self.energy.add(values["GPU/power_w"])
            return self.samples

    def joules(self) -> float | None:
        """The energy of the GPUs of all ranks since the start of this process; None if a sensor is
        missing. Since the last epoch, the others count as this one."""
        if (own := self.energy.joules) is None or None in self.joules_of_all:
            return None
        known = sum(one for one in self.joules_of_all if one is not None)
        return known + (own - (self.joules_then or 0.0)) * self.world.size

    def timed(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the remaining batches of an epoch and time the steps."""
        self.sample()  # CPU utilisation is a difference; this is its start
        self.samples = defaultdict(list)
        self.start()
        for batch in batches:
            self.begin()
            yield batch
            if batch.ends_step:  # leave out the time after the step, such as printing
                self.wait()

    def end_epoch(self) -> dict[str, float]:
        """Return the epoch's tags of all processes. Collective; the device must be idle.

        Times are means over the processes, so that the parts add up to a step. Each process's
        samples are averaged (memory: maximum), and shown by `over_processes`. "busy" is the idlest
        GPU's median utilisation.
        """
        samples, self.samples = self.sample(), defaultdict(list)
        tags = {tag: max(x) if "memory" in tag else fmean(x) for tag, x in sorted(samples.items())}
        for part, size in tensor_bytes(self.model, self.optimizer, self.device).items():
            tags[f"Memory/{part}_mb"] = size / 2**20
        busy = samples.get("GPU/utilisation", [])
        self.joules_then = self.energy.joules
        own = (self.stop(), tags, median(busy) if len(busy) >= ENOUGH else math.inf)
        mine = (*own, self.joules_then)
        times, tags_of_ranks, medians, joules = zip(*self.world.gather(mine), strict=True)
        self.joules_of_all = list(joules)
        timed = self.of_ranks = [one for one in times if one]
        parts = [part for part in PARTS if timed and part in timed[0]]
        values = {f"Time/{part}": fmean(one[part] for one in timed) for part in parts}
        return values | over_processes(tags_of_ranks) | {"busy": min(medians)}

    def close(self) -> None:
        """Stop the thread."""
        self.closing.set()
        self.thread.join()
