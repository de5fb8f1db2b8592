"""The instruments of a process: the parts of a step, readings of GPU and CPU, a trace.

A step is waiting for data, compute, and exposed communication. No step waits for the device: on a
GPU the marks are CUDA events, read when they have passed; on the CPU, readings of the clock. Two
marks stand inside backward, set by callbacks of autograd: when all local gradients are there, and
when DistributedDataParallel has seen the last bucket's all-reduce. The time between them is what
compute does not hide; it holds the waiting for slower processes, too. The reduction itself is not
touched, so that weights stay equal bit for bit. A sharded model waits all along, for weights and
gradients of each block: there this part is not measured, and belongs to compute.
"""

import contextlib
import logging
import math
import operator
import os
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import nn

from utils import addons
from utils.world import World, gather, is_sharded

log = logging.getLogger(__name__)

PARTS = ("Time/data", "Time/compute", "Time/communication")
Mark = Any  # a torch.cuda.Event, or seconds of the clock
Interval = tuple[str, Mark, Mark]  # what for, begin, end
Times = Counter  # of `StepTimer.total`

SECONDS = 1.0  # between samples of the hardware
ENOUGH = 30  # samples; a median of fewer says little
GIB = 2**30
# Tags, the functions of torch.cuda that say them, and what their values are multiplied by.
GPU = {
    "GPU/utilisation": ("utilization", 1.0),
    "GPU/memory_gb": ("device_memory_used", 1 / GIB),
    "GPU/power_w": ("power_draw", 1 / 1000),
    "GPU/temperature_c": ("temperature", 1.0),
}


# ---- the clock of a step


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


class StepTimer:
    """Times the micro-batches of one process.

    An epoch: `start`; for each micro-batch `begin`, the training step, `end`, and, when what came
    after it (printed lines) is to be no part of a step, `wait`; at last `stop`. ``total`` has the
    number of "steps" and the seconds of their parts: "data", "compute", "communication" and, under
    DDP, "own", the part of compute until this process's gradients are there.
    """

    def __init__(self, model: nn.Module, device: torch.device, distributed: bool):
        self.clock = Clock(device)
        self.total: Times = Counter()
        self.since: Times = Counter()  # the last call of `recent`
        self.pending: deque[tuple[list[Interval], bool]] = deque()
        self.now: list[Interval] | None = None  # of the micro-batch that computes
        self.last: Mark | None = None  # since then the device has waited for data
        self.began: Mark | None = None
        self.queued = False
        self.sharded = is_sharded(model)
        if distributed and not self.sharded:
            # DDP waits for every parameter's gradient, so that those of the last layer, which
            # come first, are as good as any.
            trained = [weight for weight in model.parameters() if weight.requires_grad]
            for weight in trained[-2:]:
                weight.register_post_accumulate_grad_hook(self._first_gradient)

    def start(self) -> None:
        """An epoch begins."""
        self.total, self.since = Counter(), Counter()
        self.wait()

    def begin(self) -> None:
        """The data of a micro-batch have arrived, and its computation begins."""
        if self.last is not None:
            self.began, self.queued = self.clock.mark(), False
            self.now = [("data", self.last, self.began)]

    def end(self, update: bool) -> None:
        """All work of a micro-batch has been started; with ``update`` it ended a step."""
        if self.now is None:
            return
        self.last = self.clock.mark()
        self.now.append(("compute", self.began, self.last))
        self.pending.append((self.now, update))
        self.now = None
        while self.pending and self.clock.passed(self.pending[0][0][-1][2]):
            self._add(*self.pending.popleft())

    def wait(self) -> None:
        """The next batch is requested; lines may have been printed since `end`."""
        self.last = self.clock.mark()

    def stop(self) -> Times:
        """The epoch has ended and the device is idle. Returns: all times."""
        while self.pending:
            self._add(*self.pending.popleft())
        self.now = self.last = None
        return self.total

    def recent(self) -> Times:
        """What has come since the last call. A GPU's last steps are not in it yet."""
        since, self.since = self.since, Counter()
        return since

    def _add(self, intervals: list[Interval], update: bool) -> None:
        found: Times = Counter(steps=int(update))
        for part, begin, end in intervals:
            found[part] += self.clock.seconds(begin, end)
        if not self.sharded:
            found["communication"] += 0.0  # measured, also where there was none
            found["compute"] -= found["communication"]  # which is within its interval
        self.total.update(found)
        self.since.update(found)

    def _first_gradient(self, weight: torch.Tensor) -> None:
        """Backward has reached the model: have its end marked."""
        if self.now is not None and not self.queued:
            self.queued = True
            _at_end_of_backward(self._local_gradients)

    def _local_gradients(self) -> None:
        """All local gradients are there. DDP's own callback, queued later, now waits for buckets;
        one that is queued here comes after it."""
        local = self.clock.mark()
        self.now.append(("own", self.began, local))
        _at_end_of_backward(lambda: self.now.append(("communication", local, self.clock.mark())))


def _at_end_of_backward(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)


def per_step(times: Times, prefix: str, suffix: str = "") -> dict[str, float]:
    """Seconds per step of the parts that were measured; empty if there was no step."""
    names = ("data", "compute", "communication") if times["steps"] else ()
    return {f"{prefix}{n}{suffix}": times[n] / times["steps"] for n in names if n in times}


def shares(record: Mapping[str, float]) -> dict[str, float]:
    """The shares that the parts of a step have in it; 0 where they were not measured."""
    parts = {part: record.get(part, 0.0) for part in PARTS}
    return {part: seconds / (sum(parts.values()) or 1.0) for part, seconds in parts.items()}


# ---- all instruments


def read_gpu(device: torch.device) -> dict[str, float]:
    """Utilisation in per cent, memory in GiB, power in watts, temperature in Celsius, by NVML."""
    found = {}
    for tag, (name, factor) in GPU.items():
        # Errors of many kinds: not every GPU has every sensor.
        with contextlib.suppress(Exception):
            found[tag] = factor * getattr(torch.cuda, name)(device)
    return found


def cpu_ticks() -> tuple[int, int]:
    """Clock ticks so far of the cores that this process may use: idle ones, and all."""
    lines = map(str.split, Path("/proc/stat").read_text().splitlines())
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user.
    found = [[int(text) for text in ticks[:8]] for name, *ticks in lines if name in cores]
    return sum(ticks[3] + ticks[4] for ticks in found), sum(map(sum, found))


class Watch:
    """One process's instruments. A thread samples GPU and CPU every second; `close` ends it."""

    def __init__(self, args: Any, world: World, folder: Path, model: nn.Module):
        self.world, self.device = world, world.device
        self.timer = StepTimer(model, world.device, distributed=world.size > 1)
        self.samples: dict[str, list[float]] = defaultdict(list)
        self.epochs = 0  # begun in this process
        self.epoch_began = 0.0  # time.monotonic()
        self.ticks = cpu_ticks()
        if self.device.type == "cuda" and not read_gpu(self.device):
            log.info("GPU utilisation is not recorded: pip install nvidia-ml-py")
        self.profiler = addons.profiler(args, folder) if world.is_main else None
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.ended.wait(SECONDS):
            self.sample()

    def sample(self) -> dict[str, list[float]]:
        """Read GPU and CPU. Returns all samples since the epoch began."""
        with self.lock:
            resident = int(Path("/proc/self/statm").read_text().split()[1])
            found = {"CPU/memory_gb": resident * os.sysconf("SC_PAGE_SIZE") / GIB}
            ticks = cpu_ticks()
            idle, total = map(operator.sub, ticks, self.ticks)
            if total > 0:  # else no tick has passed
                self.ticks = ticks
                found["CPU/utilisation"] = 100 * (1 - idle / total)
            if self.device.type == "cuda":
                found |= read_gpu(self.device)
            for tag, value in found.items():
                self.samples[tag].append(value)
            return self.samples

    def start_epoch(self) -> None:
        """Count from here."""
        self.epochs, self.epoch_began = self.epochs + 1, time.monotonic()
        self.sample()  # the CPU's is a difference: it starts here
        self.samples = defaultdict(list)
        self.timer.start()

    def end_step(self, update: bool) -> None:
        """A micro-batch has been started; with ``update`` it ended a step."""
        self.timer.end(update)
        if update and self.profiler is not None:
            self.profiler.step()

    def end_epoch(self) -> dict[str, float]:
        """The epoch's values of all processes, for all of them. The device must be idle.

        Times are means over the processes, so that they add up to a step; of the samples it is the
        mean of each process, of memory the most. "busy" is the idlest GPU's median utilisation.
        """
        samples, self.samples = self.sample(), defaultdict(list)
        means = {
            f"{tag}_rank{self.world.rank}": max(found) if "memory" in tag else fmean(found)
            for tag, found in sorted(samples.items())
        }
        busy = samples.get("GPU/utilisation", [])
        busy_median = median(busy) if len(busy) >= ENOUGH else math.inf
        mine = (per_step(self.timer.stop(), "Time/"), means, busy_median)
        times, hardware, medians = zip(*gather(mine, self.world), strict=True)
        timed = [one for one in times if one]
        values = {part: fmean(one[part] for one in timed) for part in timed[0]} if timed else {}
        for figures in hardware:
            values |= figures
        return values | {"busy": min(medians)}

    def close(self) -> None:
        """Stop the instruments."""
        self.ended.set()
        self.thread.join()
        if self.profiler is not None:
            self.profiler.stop()
