"""The parts of a step (``Time/...``), readings of GPU and CPU, memory. Always on.

Interface: `Watch`, which `utils.epoch.Meter` calls; ``--dummy`` uses `StepTimer`, too.
Without this file, these curves and the notes about them are missing; a step's whole time stays.

A step has three parts: waiting for data, compute, and exposed communication. Measuring makes no
step wait for the device: on a GPU the marks are CUDA events, read when they have passed; on the CPU
they are readings of the clock. Two marks are set within backward by callbacks of autograd: when all
local gradients are there, and when DistributedDataParallel has seen the last bucket's all-reduce.
The time between them is the communication that compute does not overlap, with the wait for slower
processes. The reduction itself is not changed, so weights stay equal bit for bit. A sharded model
communicates throughout the step: there this part is not measured, and counts as compute.
"""

import contextlib
import logging
import math
import operator
import os
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import nn

from utils.loaders import MicroBatch
from utils.report import PARTS, tensor_peak
from utils.session import Session
from utils.world import gather, is_sharded, local

log = logging.getLogger(__name__)

SECONDS = 1.0  # between samples of the hardware
ENOUGH = 30  # samples; a median of fewer says little
GIB = 2**30
# Tags, the functions of torch.cuda that measure them (by NVML), and factors for their values.
GPU = {
    "GPU/utilisation": ("utilization", 1.0),  # per cent
    "GPU/memory_gb": ("device_memory_used", 1 / GIB),
    "GPU/power_w": ("power_draw", 1 / 1000),
    "GPU/temperature_c": ("temperature", 1.0),
}


# ---- the clock of a step


class Reading(float):
    """A reading of the clock, with the methods of a CUDA event.

    It marks a time on the CPU, where calls return when their work is done.
    """

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: float) -> float:
        return 1000 * (end - self)


Mark = Any  # a torch.cuda.Event, or a Reading
Interval = tuple[str, Mark, Mark]  # part of a step, begin, end


class StepTimer:
    """Times the micro-batches of one process.

    Calls in an epoch: `start`; for each micro-batch `begin`, the training step, `end`, and `wait`
    after printed lines, which are no part of a step; finally `stop`. ``total`` has the
    number of "steps" and the seconds of their parts: "data", "compute", "communication" and, under
    DDP, "own", the part of compute until this process's gradients are there.
    """

    def __init__(self, model: nn.Module, device: torch.device, distributed: bool):
        self.device, self.sharded = device, is_sharded(model)
        self.total, self.since = Counter(), Counter()  # since the start; since the last `recent`
        self.pending: deque[tuple[list[Interval], bool]] = deque()
        self.now: list[Interval] | None = None  # of the micro-batch that computes
        self.last: Mark | None = None  # the device waits for data since then
        self.queued = False
        if distributed and not self.sharded:
            # The gradients of the last layer come first. Any would do: DDP waits for all of them.
            trained = [weight for weight in model.parameters() if weight.requires_grad]
            for weight in trained[-2:]:
                weight.register_post_accumulate_grad_hook(self._first_gradient)

    def mark(self) -> Mark:
        """Mark the current place in the device's work."""
        if self.device.type == "cpu":
            return Reading(time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def start(self) -> None:
        """An epoch begins."""
        self.total, self.since = Counter(), Counter()
        self.wait()

    def begin(self) -> None:
        """The data of a micro-batch have arrived, and its computation begins."""
        if self.last is not None:
            self.now, self.queued = [("data", self.last, self.mark())], False

    def end(self, update: bool) -> None:
        """All work of a micro-batch has been started; with ``update`` it ended a step."""
        if self.now is None:
            return
        self.last = self.mark()
        self.now.append(("compute", self.now[0][2], self.last))
        self.pending.append((self.now, update))
        self.now = None
        while self.pending and self.pending[0][0][-1][2].query():
            self._add(*self.pending.popleft())

    def wait(self) -> None:
        """The next batch is requested; lines may have been printed since `end`."""
        self.last = self.mark()

    def stop(self) -> dict[str, float]:
        """The epoch has ended and the device is idle. Returns: mean seconds per step by part."""
        while self.pending:
            self._add(*self.pending.popleft())
        self.now = self.last = None
        return _per_step(self.total)

    def recent(self) -> dict[str, float]:
        """The same since the last call. A GPU's last steps are not in it yet."""
        since, self.since = self.since, Counter()
        return _per_step(since)

    def _add(self, intervals: list[Interval], update: bool) -> None:
        times = Counter(steps=int(update))
        for part, begin, end in intervals:
            times[part] += begin.elapsed_time(end) / 1000
        if not self.sharded:
            times["communication"] += 0.0  # measured, also where there was none
            times["compute"] -= times["communication"]  # which is within its interval
        self.total.update(times)
        self.since.update(times)

    def _first_gradient(self, weight: torch.Tensor) -> None:
        """Backward has reached the model: have its end marked.

        DDP queues its own callback later; that one waits for the buckets. What a callback queues
        comes last.
        """
        if self.now is None or self.queued:
            return
        self.queued, now = True, self.now
        queue = torch.autograd.Variable._execution_engine.queue_callback

        def local_gradients() -> None:
            local = self.mark()
            now.append(("own", now[0][2], local))
            queue(lambda: now.append(("communication", local, self.mark())))

        queue(local_gradients)


def _per_step(times: Counter) -> dict[str, float]:
    """Mean seconds of the measured parts; empty if there was no step."""
    steps = times["steps"]
    return {part: times[part] / steps for part in times if part != "steps" and steps}


# ---- GPU, CPU and memory


def read_gpu(device: torch.device) -> dict[str, float]:
    """The values of the sensors that this GPU has, by the tags of `GPU`."""
    values = {}
    for tag, (name, factor) in GPU.items():
        with contextlib.suppress(Exception):  # a missing sensor raises errors of many kinds
            values[tag] = factor * getattr(torch.cuda, name)(device)
    return values


def cpu_ticks() -> tuple[int, int]:
    """Clock ticks so far of the cores that this process may use: idle ones, and all."""
    lines = map(str.split, Path("/proc/stat").read_text().splitlines())
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user.
    ticks = [[int(text) for text in counts[:8]] for name, *counts in lines if name in cores]
    return sum(one[3] + one[4] for one in ticks), sum(map(sum, ticks))


def tensor_bytes(session: Session) -> dict[str, float]:
    """Bytes of this process's tensors, each counted once, by what they are for.

    "optimizer" is its state and, where it has them, the float32 masters of the parameters;
    "activations", on a GPU, are the rest of the peak.
    """
    model, optimizer = session.state.model, session.state.optimizer
    weights = list(model.parameters())
    known = {id(weight) for weight in weights}
    masters = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    entries = filter(None, optimizer.state.values())  # ZeRO's are None in other processes
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
    if (peak := tensor_peak(session)) is not None:
        sizes["activations"] = max(0.0, peak - sum(sizes.values()))
    return sizes


class Watch(StepTimer):
    """The measurements of one process. A thread samples GPU and CPU every second until `close`."""

    def __init__(self, session: Session):
        super().__init__(session.state.model, session.world.device, session.world.size > 1)
        self.session, self.ticks = session, cpu_ticks()
        self.samples: dict[str, list[float]] = defaultdict(list)
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
            if total > 0:  # else no tick has passed
                self.ticks = ticks
                values["CPU/utilisation"] = 100 * (1 - idle / total)
            if self.device.type == "cuda":
                values |= read_gpu(self.device)
            for tag, value in values.items():
                self.samples[tag].append(value)
            return self.samples

    def timed(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """The batches that are left of an epoch, with the clock of a step around each."""
        self.sample()  # the CPU's is a difference: it starts here
        self.samples = defaultdict(list)
        self.start()
        for batch in batches:
            self.begin()
            yield batch
            if batch.ends_step:  # what came after the step itself is no part of it
                self.wait()

    def end_epoch(self) -> dict[str, float]:
        """The epoch's tags of all processes. Collective; the device must be idle.

        Times are means over the processes, so that they add up to a step. Samples are the mean of
        each process; of memory, the largest. "busy" is the idlest GPU's median utilisation.
        """
        samples, self.samples = self.sample(), defaultdict(list)
        tags = {tag: max(x) if "memory" in tag else fmean(x) for tag, x in sorted(samples.items())}
        for part, size in tensor_bytes(self.session).items():
            tags[f"Memory/{part}_mb"] = size / 2**20
        busy = samples.get("GPU/utilisation", [])
        mine = (self.stop(), tags, median(busy) if len(busy) >= ENOUGH else math.inf)
        times, tags_of_ranks, medians = zip(*gather(mine, self.session.world), strict=True)
        timed = [one for one in times if one]
        parts = [part for part in PARTS if timed and part in timed[0]]
        values = {f"Time/{part}": fmean(one[part] for one in timed) for part in parts}
        for rank, of_rank in enumerate(tags_of_ranks):
            values |= {f"{tag}_rank{rank}": value for tag, value in of_rank.items()}
        return values | {"busy": min(medians)}

    def close(self) -> None:
        """End the thread."""
        self.closing.set()
        self.thread.join()
