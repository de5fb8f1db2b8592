"""How busy the hardware is: one sample per second of this process's GPU and CPU, in the background.

The GPU's figures come from NVML (package nvidia-ml-py, optional), else from nvidia-smi; the CPU's
from /proc. What is not available is left out.
"""

import contextlib
import os
import shutil
import statistics
import subprocess
import threading
from pathlib import Path
from typing import Protocol

import torch

from utils.launch.supervise import usable_cores

SECONDS = 1.0  # between samples
BUSY = 95.0  # per cent; below, the GPU could do more
ENOUGH = 30  # samples; a median of fewer says little
GIB = 2**30
NOTHING = "GPU utilisation is not recorded: pip install nvidia-ml-py, or put nvidia-smi on the PATH"


class Source(Protocol):
    """Something that can be sampled: tags without the rank to values."""

    def read(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class Nvml:
    """A GPU by NVML. ``gpu`` is its UUID (GPU-...) or its number on this machine."""

    def __init__(self, gpu: str):
        """Raises: ImportError without nvidia-ml-py, and NVML's own errors."""
        import pynvml

        self.nvml = pynvml
        pynvml.nvmlInit()
        by_name = pynvml.nvmlDeviceGetHandleByUUID
        by_number = pynvml.nvmlDeviceGetHandleByIndex
        self.gpu = by_number(int(gpu)) if gpu.isdecimal() else by_name(gpu)

    def read(self) -> dict[str, float]:
        """Utilisation in per cent, memory in GiB, power in watts, temperature in Celsius."""
        nvml, found = self.nvml, {}
        asked = {
            "GPU/utilisation": lambda: nvml.nvmlDeviceGetUtilizationRates(self.gpu).gpu,
            "GPU/memory_gb": lambda: nvml.nvmlDeviceGetMemoryInfo(self.gpu).used / GIB,
            "GPU/power_w": lambda: nvml.nvmlDeviceGetPowerUsage(self.gpu) / 1000,
            "GPU/temperature_c": lambda: nvml.nvmlDeviceGetTemperature(
                self.gpu, nvml.NVML_TEMPERATURE_GPU
            ),
        }
        for tag, ask in asked.items():
            with contextlib.suppress(nvml.NVMLError):  # not every GPU has every sensor
                found[tag] = float(ask())
        return found

    def close(self) -> None:
        with contextlib.suppress(self.nvml.NVMLError):
            self.nvml.nvmlShutdown()


# nvidia-smi's names and units.
SMI_FIELDS = {
    "utilization.gpu": ("GPU/utilisation", 1.0),
    "memory.used": ("GPU/memory_gb", 2**20 / GIB),
    "power.draw": ("GPU/power_w", 1.0),
    "temperature.gpu": ("GPU/temperature_c", 1.0),
}


class NvidiaSmi:
    """A GPU by an nvidia-smi that keeps printing; it ends when nobody reads it any more."""

    def __init__(self, gpu: str):
        """Raises: OSError without nvidia-smi, or when it has nothing to say about ``gpu``."""
        self.process = subprocess.Popen(
            [
                *("nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", f"--id={gpu}"),
                *("--format=csv,noheader,nounits", f"--loop={max(1, round(SECONDS))}"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.newest: dict[str, float] = {}
        if not self._take():
            self.close()
            raise OSError("nvidia-smi does not know this GPU")
        threading.Thread(target=self._follow, daemon=True).start()

    def _take(self) -> bool:
        """Read a line; False at the end of the output, or when it has no number in it."""
        found = {}
        line = self.process.stdout.readline().split(",")
        for (tag, factor), text in zip(SMI_FIELDS.values(), line, strict=False):
            with contextlib.suppress(ValueError):  # "[N/A]"
                found[tag] = float(text) * factor
        self.newest = found
        return bool(found)

    def _follow(self) -> None:
        with contextlib.suppress(ValueError):  # closed
            while self._take():
                pass

    def read(self) -> dict[str, float]:
        """The newest line that was printed."""
        return self.newest

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Cpu:
    """The cores that this process may use, and its own memory; by /proc."""

    def __init__(self) -> None:
        self.cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        self.before = self._ticks()

    def _ticks(self) -> tuple[int, int]:
        """Clock ticks so far: idle ones, and all, of these cores."""
        idle = total = 0
        for line in Path("/proc/stat").read_text().splitlines():
            name, *ticks = line.split()
            if name in self.cores:
                # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user.
                idle += int(ticks[3]) + int(ticks[4])
                total += sum(map(int, ticks[:8]))
        return idle, total

    def read(self) -> dict[str, float]:
        """Utilisation since the last reading in per cent of the cores, resident memory in GiB."""
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        found = {"CPU/memory_gb": resident * os.sysconf("SC_PAGE_SIZE") / GIB}
        (idle, total), before = self._ticks(), self.before
        if total > before[1]:
            self.before = idle, total
            found["CPU/utilisation"] = 100 * (1 - (idle - before[0]) / (total - before[1]))
        return found

    def close(self) -> None:
        pass


def gpu_name(device: torch.device) -> str:
    """What NVML and nvidia-smi call ``device``: CUDA_VISIBLE_DEVICES renumbers it for torch."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return f"GPU-{uuid}" if uuid else str(device.index or 0)


def gpu_source(gpu: str) -> Source | None:
    """NVML, else nvidia-smi, else None."""
    # Whatever fails in a driver's library: a training must not end for its instruments.
    with contextlib.suppress(Exception):
        return Nvml(gpu)
    if shutil.which("nvidia-smi"):
        with contextlib.suppress(OSError):
            return NvidiaSmi(gpu)
    return None


class Monitor:
    """Samples ``sources`` every second between `begin` and `end`, in a thread."""

    def __init__(self, sources: list[Source]):
        self.sources = sources
        self.samples: dict[str, list[float]] = {}
        self.busy: list[float] = []  # the GPU's utilisation over all epochs
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.ended.wait(SECONDS):
            self._sample()

    def _sample(self) -> None:
        with self.lock:
            for source in self.sources:
                with contextlib.suppress(Exception):  # as above: a sample less
                    for tag, value in source.read().items():
                        self.samples.setdefault(tag, []).append(value)

    def begin(self) -> None:
        """Forget what was before."""
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

    def median(self) -> float | None:
        """Of the GPU's utilisation over all epochs; None before there are enough samples."""
        return statistics.median(self.busy) if len(self.busy) >= ENOUGH else None

    def close(self) -> None:
        """Stop sampling."""
        self.ended.set()
        self.thread.join()
        for source in self.sources:
            source.close()


def likely_cause(data: float, communication: float) -> str:
    """Why a GPU is not busy, given the shares of the time that it waits for data and for others."""
    if max(data, communication) < 0.05:
        return (
            "neither data nor network hold it up, so its kernels are probably too short for the "
            "host that starts them, a small batch: raise -b as far as memory goes, try --amp"
        )
    if data >= communication:
        return (
            f"the input: {data:.0%} of the time goes by waiting for data; more workers "
            f"(-j; {usable_cores()} cores here), smaller files or a faster disk"
        )
    return (
        f"the network: {communication:.0%} of the time is communication that compute does not "
        "hide; a larger -b, --accum-steps, or a faster link between the nodes "
        "(scripts/forecast_scaling.py says what that would bring)"
    )
