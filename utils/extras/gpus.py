"""The GPUs of this machine, and the torch that can use them. Needs no packages.

python -m utils.extras.gpus choose  # which constraints file fits, and why
python -m utils.extras.gpus check   # whether this Python's torch can use the GPUs; prints how
                                    # many processes a node has by default
"""

import contextlib
import functools
import os
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from utils.errors import UserError, report

NEWEST, CUDA12 = "constraints.txt", "constraints-cuda12.txt"  # in scripts/
# Capabilities of old GPUs by name, without nvidia-smi (60: too old); others suit every torch.
OLD = {r"\b(G?V100|TITAN V)\b": 70, r"\b(P100|P40|P4|M60)\b": 60}
PROC = Path("/proc/driver/nvidia")
LIMIT = 20.0  # seconds; nvidia-smi takes less than 5 with 8 GPUs and no persistence daemon
HIDE = 'CUDA_VISIBLE_DEVICES="" trains on the CPU'
REMEDIES = {
    "version mismatch": "the driver was updated while it was loaded; reboot",
    "not a valid field": "the driver is older than 510, and torch needs 525 or newer: install that",
    "": "see whether `nvidia-smi` works in a shell; a reboot often helps",
}


@dataclass(frozen=True)
class Machine:
    """What the driver reports: name and capability of each GPU, as 75 for 7.5."""

    gpus: tuple[tuple[str, int], ...] = ()
    driver: str = ""
    trouble: str = ""  # why nvidia-smi has failed, and what to do

    @property
    def major(self) -> int:
        """The driver's version as 535; 0 if unknown."""
        return int(self.driver.partition(".")[0] or 0)

    @property
    def has_gpus(self) -> bool:
        """Whether there are GPUs, as far as is known."""
        return bool(self.gpus or self.trouble)

    def __str__(self) -> str:
        names = " and ".join(dict(self.gpus)) or "NVIDIA GPUs"
        return f"{names} (driver {self.driver or 'unknown'})"


def look(proc: Path = PROC, limit: float = LIMIT) -> Machine:
    """The GPUs of this machine by nvidia-smi, or, where it is missing or fails, by ``proc``."""
    found = loaded(proc)
    out, fault = _nvidia_smi(limit)
    if "No devices" in out and not found.gpus:
        return found
    if fault:
        remedy = next(remedy for words, remedy in REMEDIES.items() if words in out)
        return replace(found, trouble=f"nvidia-smi {fault}: {remedy}")
    rows = re.findall(r"^(.+), ([\d.]+), (\d+)\.(\d)$", out, re.MULTILINE)
    if not rows:  # there may be warnings
        return found
    return Machine(tuple((name, int(x + y)) for name, _, x, y in rows), rows[0][1])


def _nvidia_smi(limit: float) -> tuple[str, str]:
    """Lines of name, driver and capability, and what went wrong; both "" without nvidia-smi."""
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
    said = " ".join(out.split()).rstrip(".") or f"exit code {process.returncode}"
    return out, f"failed: {said}" if process.returncode else ""


def loaded(proc: Path = PROC) -> Machine:
    """The GPUs by the files of the loaded driver, which need no nvidia-smi."""
    found, driver = [], ""
    with contextlib.suppress(OSError):
        version = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", (proc / "version").read_text())
        driver = version[1] if version else ""
        for file in sorted(proc.glob("gpus/*/information")):
            model = re.search(r"^Model:\s*(.+)$", file.read_text(), re.MULTILINE)
            name = model[1].strip() if model else "NVIDIA GPU"
            found.append((name, next((OLD[old] for old in OLD if re.search(old, name)), 75)))
    return Machine(tuple(found), driver)


@functools.cache
def machine() -> Machine:
    """`look` at this machine once."""
    return look()


def hidden() -> bool:
    """Whether the environment asks for the CPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")  # the last: Slurm's


def choose(found: Machine) -> tuple[str, str]:
    """The constraints file whose torch can use the GPUs, and why. Raises: `UserError`.

    GPUs that no torch of this suite can use do not count as long as others are there.
    """
    if not found.has_gpus:
        return NEWEST, "no NVIDIA GPU here"
    usable = [capability for _, capability in found.gpus if capability >= 70]
    if found.trouble:
        fault = found.trouble
    elif found.major < 525:
        fault = f"{found}: torch needs driver 525 or newer, its newest versions driver 580: install"
        fault += " a newer driver"
    elif not usable:
        fault = f"{found}: torch has kernels for sm_70 (V100) and newer GPUs, not for these"
    elif found.major < 580:
        return CUDA12, f"{found}; newer versions of torch need driver 580 or newer"
    elif min(usable) < 75:
        return CUDA12, f"{found}; newer versions of torch need GPUs from sm_75 on"
    else:
        return NEWEST, str(found)
    if hidden():
        return NEWEST, "CUDA_VISIBLE_DEVICES asks for the CPU"
    raise UserError(f"{fault}; {HIDE}", alike=True)


def has_kernels(capability: tuple[int, int], built_for: list[str]) -> bool:
    """Whether a torch built for (sm_80, compute_90, ...) computes on a GPU of ``capability``.

    sm_XY runs on X.Y and later minor versions of X; compute_XY (PTX) on X.Y and all later ones.
    """
    for name in built_for:
        kind, x, y = re.match(r"(sm|compute)_(\d+)(\d)", name).groups()
        code = int(x), int(y)
        if code <= capability and (kind == "compute" or code[0] == capability[0]):
            return True
    return False


def check() -> None:
    """Raise `UserError` when there are GPUs that should be used and that torch cannot use."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if available:
        fault = _missing_kernels()
    elif hidden() or not machine().has_gpus:
        fault = ""
    else:
        told = [" ".join(str(one.message).split()) for one in said if "CUDA" in str(one.message)]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        told += [f"CUDA_VISIBLE_DEVICES={visible} names none of them"] if visible else []
        told += ["a container needs `--gpus all`, a Slurm job `--gpus-per-node`"]
        fault = told[0]
    if not fault:
        return
    try:
        file, why = choose(machine())
        remedy = f"`bash scripts/quickstart.sh` fills .venv with a torch for {why} (scripts/{file})"
        remedy += f"; then run .venv/bin/python; {HIDE}"
    except UserError as error:
        remedy = str(error)
    raise UserError(
        f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use the GPUs of this "
        f"machine: {fault}: {remedy}",
        alike=True,
    )


def _missing_kernels() -> str:
    """The GPUs that torch sees, but has no kernels for; "" when there are none."""
    from torch import cuda, version

    found = [cuda.get_device_capability(index) for index in range(cuda.device_count())]
    kernels = cuda.get_arch_list()
    lacks = [index for index, one in enumerate(found) if not has_kernels(one, kernels)]
    if not lacks or not version.cuda:  # ROCm
        return ""
    names = (f"{cuda.get_device_name(i)} (sm_{found[i][0]}{found[i][1]})" for i in lacks)
    rest = ",".join(str(index) for index in range(len(found)) if index not in lacks)
    others = ""
    if rest and "CUDA_VISIBLE_DEVICES" not in os.environ:
        others = f"; CUDA_VISIBLE_DEVICES={rest} uses the others"
    return (
        f"it has no kernels for {', '.join(dict.fromkeys(names))}, but for {', '.join(kernels)}"
        f"{others}"
    )


def unused() -> str | None:
    """A note that GPUs are there, but the environment has asked for the CPU; else None."""
    if hidden() and machine().gpus:
        return f"note: CUDA_VISIBLE_DEVICES asks for the CPU; {machine()} not used"
    return None


def main() -> int:
    try:
        if sys.argv[1:] == ["choose"]:
            print(*choose(machine()), sep="\n")
            return 0
        if hidden() or not (machine().has_gpus or Path("/dev/kfd").exists()):
            print(1)  # without torch, whose import takes seconds
            return 0
        check()
    except UserError as error:
        return report(error)
    import torch

    print(max(1, torch.cuda.device_count()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
