"""Measurements of a run: the parts of a step, utilisation of GPU and CPU, a trace.

A thread samples this process's GPU (by torch.cuda's functions for NVML, which need nvidia-ml-py)
and CPU (by /proc) once a second. What is not available is left out.
"""

import contextlib
import logging
import math
import os
import statistics
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import profile, schedule

from utils.launch.world import World, gather
from utils.train.step_time import StepTimer, mean_times, shares

log = logging.getLogger(__name__)

SECONDS = 1.0  # between samples
BUSY = 95.0  # per cent; below, the GPU could do more
ENOUGH = 30  # samples; a median of fewer says little
GIB = 2**30
# Tags, the functions of torch.cuda that say them, and what their values are multiplied by.
GPU = {
    "GPU/utilisation": ("utilization", 1.0),
    "GPU/memory_gb": ("device_memory_used", 1 / GIB),
    "GPU/power_w": ("power_draw", 1 / 1000),
    "GPU/temperature_c": ("temperature", 1.0),
}
BEFORE, TRACED = 4, 4  # steps before a trace, and in it
TRACE = "rank0.pt.trace.json"  # TensorBoard's profiler plugin looks for this ending


def read_gpu(device: torch.device) -> dict[str, float]:
    """Utilisation in per cent, memory in GiB, power in watts, temperature in Celsius."""
    found = {}
    for tag, (name, factor) in GPU.items():
        # Errors of many kinds: not every GPU has every sensor.
        with contextlib.suppress(Exception):
            found[tag] = factor * getattr(torch.cuda, name)(device)
    return found


class Cpu:
    """The cores that this process may use, and its own memory; by /proc."""

    def __init__(self) -> None:
        self.before = self._ticks()

    def _ticks(self) -> tuple[int, int]:
        """Clock ticks so far: idle ones, and all, of these cores."""
        lines = map(str.split, Path("/proc/stat").read_text().splitlines())
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user.
        found = [[int(text) for text in ticks[:8]] for name, *ticks in lines if name in cores]
        return sum(ticks[3] + ticks[4] for ticks in found), sum(map(sum, found))

    def read(self) -> dict[str, float]:
        """Utilisation since the last reading in per cent of the cores, resident memory in GiB."""
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        found = {"CPU/memory_gb": resident * os.sysconf("SC_PAGE_SIZE") / GIB}
        (idle, total), before = self._ticks(), self.before
        if total > before[1]:
            self.before = idle, total
            found["CPU/utilisation"] = 100 * (1 - (idle - before[0]) / (total - before[1]))
        return found


class Monitor:
    """Samples the hardware every second, in a thread."""

    def __init__(self, device: torch.device):
        self.device, self.cpu = device, Cpu()
        self.samples: dict[str, list[float]] = {}
        self.busy: list[float] = []  # the GPU's utilisation over all epochs
        self.lock, self.ended = threading.Lock(), threading.Event()
        if device.type == "cuda" and not read_gpu(device):
            log.info("GPU utilisation is not recorded: pip install nvidia-ml-py")
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.ended.wait(SECONDS):
            self._sample()

    def _sample(self) -> None:
        with self.lock:
            found = self.cpu.read()
            if self.device.type == "cuda":
                found |= read_gpu(self.device)
            for tag, value in found.items():
                self.samples.setdefault(tag, []).append(value)

    def begin(self) -> None:
        """Discard earlier samples."""
        self._sample()  # the CPU's is a difference: it starts here
        with self.lock:
            self.samples = {}

    def end(self) -> dict[str, float]:
        """Means since `begin`, of memory the most. One sample at least is taken."""
        self._sample()
        with self.lock:
            samples, self.samples = self.samples, {}
        self.busy += samples.get("GPU/utilisation", [])
        return {
            tag: max(values) if "memory" in tag else statistics.fmean(values)
            for tag, values in samples.items()
        }

    def median(self) -> float:
        """Of the GPU's utilisation over all epochs; infinite before there are enough samples."""
        return statistics.median(self.busy) if len(self.busy) >= ENOUGH else math.inf

    def close(self) -> None:
        """Stop sampling."""
        self.ended.set()
        self.thread.join()


def start_profiler(folder: Path) -> profile:
    """``--profile``: begin a trace of steps 5 to 8 of this process, to be written to ``folder``."""

    def write(done: profile) -> None:
        done.export_chrome_trace(str(folder / TRACE))
        log.info(f"trace of {done.step_num - BEFORE} steps: {folder / TRACE}")

    # The profiler's library calls a machine without a GPU an error, and its start news.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    steps = schedule(wait=BEFORE - 1, warmup=1, active=TRACED, repeat=1)
    profiler = profile(schedule=steps, on_trace_ready=write)
    profiler.start()
    return profiler


class Watch:
    """The instruments of one process. `close` ends them."""

    def __init__(self, args: Any, world: World, folder: Path, model: nn.Module):
        self.world = world
        self.timer = StepTimer(model, world.device, distributed=world.size > 1)
        self.monitor = Monitor(world.device)
        self.warned = False
        self.profiler = start_profiler(folder) if args.profile and world.is_main else None

    def start_epoch(self) -> None:
        """Count from here."""
        self.monitor.begin()
        self.timer.start()

    def end_step(self, update: bool) -> None:
        """A micro-batch has been started; with ``update`` it ended a step."""
        self.timer.end(update)
        if update and self.profiler is not None:
            self.profiler.step()

    def end_epoch(self) -> dict[str, float]:
        """The epoch's values of all processes, for all of them. The device must be idle.

        Times are means over the processes, so that they add up to a step.
        """
        mine = (self.timer.stop(), self.monitor.end(), self.monitor.median())
        times, hardware, medians = zip(*gather(mine, self.world), strict=True)
        values = mean_times(times)
        for rank, figures in enumerate(hardware):
            values |= {f"{tag}_rank{rank}": value for tag, value in sorted(figures.items())}
        idlest, rank = min((median, rank) for rank, median in enumerate(medians))
        if idlest < BUSY and not self.warned:
            self.warned = True
            self._warn(rank, idlest, shares(values))
        return values

    def _warn(self, rank: int, median: float, parts: dict[str, float]) -> None:
        data, communication = parts["Time/data"], parts["Time/communication"]
        if max(data, communication) < 0.05:
            cause = "kernels too short for the host that starts them: raise -b, try --amp"
        elif data >= communication:
            cause = f"the input: {data:.0%} of the time goes by waiting for data"
        else:
            cause = f"the network: {communication:.0%} of the time is exposed communication"
        log.info(
            f"note: the GPU of rank {rank} is {median:.0f} % busy (median), not {BUSY:.0f} % or "
            f"more; likely cause: {cause}"
        )

    def close(self) -> None:
        """Stop the instruments."""
        self.monitor.close()
        if self.profiler is not None:
            self.profiler.stop()
            if self.profiler.step_num <= BEFORE:
                log.info(f"--profile: no trace, as it needs more than {BEFORE} steps")
