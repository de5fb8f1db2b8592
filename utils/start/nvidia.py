"""NVIDIA's GPUs and driver on this machine, and the torch that can use them. Without torch."""

import contextlib
import os
import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from utils.start.errors import UserError

DRIVER = Path("/proc/driver/nvidia")
NEWEST, CUDA12 = "constraints.txt", "constraints-cuda12.txt"  # in scripts/
# Compute capability by name, for use without nvidia-smi. 60: too old. All other GPUs count as 75.
OLD = {r"\b(G?V100|TITAN V)\b": 70, r"\b(P100|P40|P4|M60)\b": 60}
LIMIT = 20.0  # seconds for nvidia-smi: with 8 GPUs and no persistence daemon it takes less than 5
HIDE = 'CUDA_VISIBLE_DEVICES="" trains on the CPU'
REMEDIES = {
    "version mismatch": "the driver was updated while it was loaded: reboot",
    "not a valid field": "the driver is older than 510, and torch needs 525 or newer: install that",
    "": "check whether `nvidia-smi` works in a shell; a reboot often helps",
}


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


@dataclass(frozen=True)
class Machine:
    """The driver's report. ``gpus``: name and compute capability of each GPU (75 means 7.5)."""

    gpus: tuple[tuple[str, int], ...] = ()
    driver: str = ""
    trouble: str = ""  # why nvidia-smi has failed, and what to do

    @property
    def major(self) -> int:
        """The driver's major version, such as 535; 0 if unknown."""
        return int(self.driver.partition(".")[0] or 0)

    @property
    def has_gpus(self) -> bool:
        """Whether there are GPUs; also True if nvidia-smi has failed."""
        return bool(self.gpus or self.trouble)

    def __str__(self) -> str:
        names = " and ".join(dict(self.gpus)) or "NVIDIA GPUs"
        return f"{names} (driver {self.driver or 'unknown'})"


def look(proc: Path = DRIVER, limit: float = LIMIT) -> Machine:
    """Ask nvidia-smi for the GPUs. If that fails, read the files of the driver in ``proc``."""
    hardware = loaded(proc)
    out, problem = _nvidia_smi(limit)
    if "No devices" in out and not hardware.gpus:
        return hardware
    if problem:
        remedy = next(remedy for words, remedy in REMEDIES.items() if words in out)
        return replace(hardware, trouble=f"nvidia-smi {problem}: {remedy}")
    rows = re.findall(r"^(.+), ([\d.]+), (\d+)\.(\d)$", out, re.MULTILINE)
    if not rows:  # there may be warnings
        return hardware
    return Machine(tuple((name, int(x + y)) for name, _, x, y in rows), rows[0][1])


def _nvidia_smi(limit: float) -> tuple[str, str]:
    """Return nvidia-smi's output, and its problem, if any; both are "" without nvidia-smi."""
    query = "--query-gpu=name,driver_version,compute_cap"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    try:
        process = subprocess.Popen(command, stdout=pipe, stderr=both, text=True, errors="replace")
    except OSError:
        return "", ""
    try:
        out, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()  # and do not wait: a process that hangs in the driver cannot be killed
        return "", f"did not answer within {limit:g} s"
    reason = " ".join(out.split()).rstrip(".") or f"exit code {process.returncode}"
    return out, f"failed: {reason}" if process.returncode else ""


def loaded(proc: Path = DRIVER) -> Machine:
    """Return the GPUs that the files of the loaded driver list; this needs no nvidia-smi."""
    gpus = []
    with contextlib.suppress(OSError):
        for file in sorted(proc.glob("gpus/*/information")):
            model = re.search(r"^Model:\s*(.+)$", file.read_text(), re.MULTILINE)
            name = model[1].strip() if model else "NVIDIA GPU"
            gpus.append((name, next((OLD[old] for old in OLD if re.search(old, name)), 75)))
    return Machine(tuple(gpus), driver(proc))


def choose(hardware: Machine) -> tuple[str, str]:
    """Return the constraints file whose torch can use the GPUs, and why. Raises: `UserError`.

    GPUs that are too old for all versions are ignored if there are others.
    """
    if not hardware.has_gpus:
        return NEWEST, "no NVIDIA GPU here"
    usable = [capability for _, capability in hardware.gpus if capability >= 70]
    if hardware.trouble:
        problem = hardware.trouble
    elif hardware.major < 525:
        problem = f"{hardware}: torch needs driver 525 or newer, its newest versions driver 580"
        problem += ": install a newer driver"
    elif not usable:
        problem = f"{hardware}: torch has kernels for sm_70 (V100) and newer GPUs, not for these"
    elif hardware.major < 580:
        return CUDA12, f"{hardware}; newer versions of torch need driver 580 or newer"
    elif min(usable) < 75:
        return CUDA12, f"{hardware}; newer versions of torch need GPUs from sm_75 on"
    else:
        return NEWEST, str(hardware)
    if is_cpu_chosen():
        return NEWEST, "CUDA_VISIBLE_DEVICES hides the GPUs"
    raise UserError(f"{problem}; {HIDE}", on_every_rank=True)
