"""What a run was made with (machine, versions, commit), and its figures as they are quoted.

torch is imported only where it is described: scripts ask for the commit and figures without it.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
DRIVER = Path("/proc/driver/nvidia")


def describe(device: torch.device) -> dict[str, str]:
    """Names and versions: cpu, gpu and driver where ``device`` is a GPU, torch, commit."""
    import torch

    model = re.search(r"^model name\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    found = {
        "cpu": model[1].strip() if model else "",
        "torch": torch.__version__,
        "commit": commit(),
    }
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "driver": driver()}
    return {key: text for key, text in found.items() if text}


def driver(folder: Path = DRIVER) -> str:
    """The version of NVIDIA's driver if it is loaded, else "". Needs no nvidia-smi."""
    with contextlib.suppress(OSError):
        text = (folder / "version").read_text()
        if version := re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", text):
            return version[1]
    return ""


def is_cpu_chosen() -> bool:
    """Whether the environment hides the GPUs."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")  # the last: Slurm's


def commit() -> str:
    """This code's commit, with "+" behind it if files differ from it; empty if unknown."""
    if not (ROOT / ".git").exists():  # do not take the commit of a repository around this copy
        return ""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


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
