"""The version of the GPU driver, and the typical figures of a run. Without torch."""

import contextlib
import math
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia")


def driver(folder: Path = DRIVER) -> str:
    """The version of NVIDIA's driver if it is loaded, else "". Needs no nvidia-smi."""
    with contextlib.suppress(OSError):
        text = (folder / "version").read_text()
        if version := re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", text):
            return version[1]
    return ""


def is_cpu_chosen() -> bool:
    """Whether the environment hides the GPUs."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")  # the last by Slurm


def typical(points: Mapping[float, float]) -> float | None:
    """The median of ``points`` (epochs finished: value) over the epochs after the first.

    Caches, processes and compilers warm up in the first epoch: it counts only if there is no other.
    NaN (not measured) is left out. None if nothing remains.
    """
    measured = {x: value for x, value in points.items() if not math.isnan(value)}
    values = [value for x, value in measured.items() if x > 1] or list(measured.values())
    return statistics.median(values) if values else None


def over_epochs(history: Sequence[Mapping[str, float]], tag: str) -> float | None:
    """`typical` of ``tag`` over a run's epoch records (see `TrainState.history`)."""
    return typical({record["epoch"]: record[tag] for record in history if tag in record})
