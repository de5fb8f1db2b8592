"""Choose the torch that can use the GPUs of this machine. This needs no packages.

    python scripts/choose_torch.py choose  # print the constraints file that fits, and why
    python scripts/choose_torch.py check   # end with an error if this Python's torch cannot use the
                                           # GPUs; print how many processes a node has by default

Training (utils/world.py) runs these commands if torch cannot use GPUs, or may not use them:

    python scripts/choose_torch.py explain  # print why torch cannot use the GPUs, and what helps
    python scripts/choose_torch.py gpus     # print the GPUs' names and driver
"""

import contextlib
import os
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils import launch
from utils.errors import UserError, exit_with
from utils.provenance import DRIVER, driver, is_cpu_chosen

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
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        process = subprocess.Popen(command, text=True, errors="replace", **pipes)
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


def explain(hardware: Machine) -> str:
    """Say why torch cannot use these GPUs, and what helps. Returns "" if it can use them."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if available:
        problem = _missing_kernels()
    else:
        texts = [" ".join(str(one.message).split()) for one in caught]
        reasons = [text for text in texts if "CUDA" in text]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        reasons += [f"CUDA_VISIBLE_DEVICES={visible} selects none of them"] if visible else []
        reasons += ["a container needs `--gpus all`, a Slurm job `--gpus-per-node`"]
        problem = reasons[0]
    if not problem:
        return ""
    try:
        file, why = choose(hardware)
        remedy = f"`bash scripts/quickstart.sh` fills .venv with a torch for {why} (scripts/{file})"
        remedy += f"; then run .venv/bin/python; {HIDE}"
    except UserError as error:
        remedy = str(error)
    return (
        f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use the GPUs of this "
        f"machine: {problem}: {remedy}"
    )


def _missing_kernels() -> str:
    """Name the GPUs that torch sees but has no kernels for. Returns "" if there are none."""
    from torch import cuda

    from utils.extras.gpu_check import has_kernels

    capabilities = [cuda.get_device_capability(index) for index in range(cuda.device_count())]
    kernels = cuda.get_arch_list()
    lacks = [index for index, one in enumerate(capabilities) if not has_kernels(one, kernels)]
    if not lacks:
        return ""
    sms = ["sm_" + "".join(map(str, one)) for one in capabilities]
    names = (f"{cuda.get_device_name(i)} ({sms[i]})" for i in lacks)
    rest = ",".join(str(index) for index in range(len(capabilities)) if index not in lacks)
    others = ""
    if rest and "CUDA_VISIBLE_DEVICES" not in os.environ:
        others = f"; CUDA_VISIBLE_DEVICES={rest} uses the others"
    return (
        f"it has no kernels for {', '.join(dict.fromkeys(names))}, only for {', '.join(kernels)}"
        f"{others}"
    )


def main() -> int:
    question = sys.argv[1] if len(sys.argv) == 2 else ""
    launch.die_with_launcher()
    if question == "check":
        print(processes())
        return 0
    hardware = look()
    if question == "choose":
        print(*choose(hardware), sep="\n")
    elif question == "gpus" and hardware.gpus:
        print(hardware)
    elif question == "explain" and hardware.has_gpus:
        print(explain(hardware))
    return 0


def processes() -> int:
    """Return a node's default number of processes. Raises: `UserError` if torch cannot use GPUs."""
    if is_cpu_chosen() or not (look().has_gpus or Path("/dev/kfd").exists()):
        return 1  # without importing torch, which takes seconds
    import torch

    from utils.extras.gpu_check import check_gpus

    check_gpus()
    return max(1, torch.cuda.device_count())


if __name__ == "__main__":
    exit_with(main)
