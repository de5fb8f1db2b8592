"""The GPUs of this machine, and the torch that can use them. Needs no packages.

python -m utils.launch.gpus choose  # which constraints file fits, and why
python -m utils.launch.gpus check   # whether this Python's torch can use the GPUs; prints how
                                    # many processes a node has by default
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from utils.errors import UserError, report

NEWEST, CUDA12 = "constraints.txt", "constraints-cuda12.txt"  # in scripts/
NEEDED_DRIVER = {11: 450, 12: 525, 13: 580}  # by CUDA version
# Of old GPUs by name, where the driver does not tell; others are new enough for every torch.
OLD = {"V100": 70, "GV100": 70, "TITAN V": 70, "P100": 60, "P40": 61, "P4": 61, "M60": 52}
PROC = Path("/proc/driver/nvidia")
LIMIT = 20.0  # seconds; nvidia-smi takes less than 5 with 8 GPUs and no persistence daemon
HIDE = 'CUDA_VISIBLE_DEVICES="" trains on the CPU'


class Silent(Exception):
    """nvidia-smi has failed; the text says how."""


@dataclass(frozen=True)
class Machine:
    """What the driver reports: names of the GPUs, capabilities as 75 for 7.5 (0: unknown)."""

    gpus: tuple[str, ...] = ()
    capabilities: tuple[int, ...] = ()
    driver: str = ""
    trouble: str = ""  # why nvidia-smi has failed, and what to do

    @property
    def major(self) -> int:
        """The driver's version as 535; 0 if unknown."""
        return int(self.driver.partition(".")[0] or 0)

    def __str__(self) -> str:
        found = Counter(self.gpus)
        names = [name if count == 1 else f"{count} x {name}" for name, count in found.items()]
        return f"{' and '.join(names) or 'NVIDIA GPUs'} (driver {self.driver or 'unknown'})"


def nvidia_smi(*arguments: str, limit: float = LIMIT) -> str:
    """What nvidia-smi prints; "" without one. Raises: `Silent`."""
    try:
        process = subprocess.Popen(
            ["nvidia-smi", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError:
        return ""
    try:
        out, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()  # and do not wait: a process that hangs in the driver cannot be killed
        raise Silent(f"nvidia-smi did not answer within {limit:g} s") from None
    if process.returncode:
        said = " ".join(out.split()) or f"exit code {process.returncode}"
        raise Silent(f"nvidia-smi failed: {said.rstrip('.')}")
    return out


def look(proc: Path = PROC, limit: float = LIMIT) -> Machine:
    """The GPUs of this machine by nvidia-smi, or, where it is missing or fails, by ``proc``."""
    found, query = loaded(proc), "--query-gpu=name,driver_version,"
    try:
        try:
            out = nvidia_smi(f"{query}compute_cap", "--format=csv,noheader", limit=limit)
        except Silent as fault:
            if "not a valid field" not in str(fault):
                raise
            out = nvidia_smi(f"{query}name", "--format=csv,noheader", limit=limit)  # before 510
    except Silent as fault:
        if "No devices" in str(fault) and not found.gpus:
            return found
        remedy = "see whether `nvidia-smi` works in a shell; a reboot often helps"
        if "version mismatch" in str(fault):
            remedy = "the driver was updated while it was loaded; reboot"
        return replace(found, trouble=f"{fault}: {remedy}")
    rows = [[cell.strip() for cell in line.split(",")] for line in out.splitlines() if "," in line]
    if not rows:
        return found
    names, drivers, capabilities = zip(*rows, strict=True)
    return Machine(names, tuple(map(_capability, names, capabilities)), drivers[0])


def _capability(name: str, said: str = "") -> int:
    if re.fullmatch(r"\d+\.\d", said):
        return int(said.replace(".", ""))
    return next((old for word, old in OLD.items() if re.search(rf"\b{word}\b", name)), 0)


def loaded(proc: Path = PROC) -> Machine:
    """The GPUs by the files of the loaded driver, which need no nvidia-smi."""
    names, driver = [], ""
    with contextlib.suppress(OSError):
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", (proc / "version").read_text())
        driver = found[1] if found else ""
        for file in sorted(proc.glob("gpus/*/information")):
            model = re.search(r"^Model:\s*(.+)$", file.read_text(), re.MULTILINE)
            names.append(model[1].strip() if model else "NVIDIA GPU")
    return Machine(tuple(names), tuple(map(_capability, names)), driver)


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
    if not found.gpus and not found.trouble:
        return NEWEST, "no NVIDIA GPU here"
    usable = [one or 75 for one in found.capabilities if one >= 70 or not one]
    if not found.trouble and usable:
        if found.major >= 580 and min(usable) >= 75:
            return NEWEST, str(found)
        if found.major >= 525:
            needs = "driver 580 or newer" if found.major < 580 else "GPUs from sm_75 on"
            return CUDA12, f"{found}; newer versions of torch need {needs}"
    if hidden():
        return NEWEST, "CUDA_VISIBLE_DEVICES asks for the CPU"
    if found.trouble:
        raise UserError(f"{found.trouble}; {HIDE}", alike=True)
    if found.major < 525:
        raise UserError(
            f"{found}: torch needs driver 525 or newer, its newest versions driver 580: install a "
            f"newer driver; {HIDE}",
            alike=True,
        )
    raise UserError(
        f"{found}: torch has kernels for sm_70 (V100) and newer GPUs, not for these; {HIDE}",
        alike=True,
    )


def has_kernels(capability: tuple[int, int], built_for: list[str]) -> bool:
    """Whether a torch built for (sm_80, compute_90, ...) computes on a GPU of ``capability``.

    sm_XY runs on X.Y and later minor versions of X; compute_XY (PTX) on X.Y and all later ones;
    with a letter behind it (sm_90a), on X.Y alone.
    """
    for name in built_for:
        kind, x, y, letter = re.fullmatch(r"(sm|compute)_(\d+)(\d)(\D*)", name).groups()
        code = int(x), int(y)
        same = kind == "compute" or code[0] == capability[0]
        if code == capability or (not letter and same and code < capability):
            return True
    return False


def check() -> None:
    """Raise `UserError` when there are GPUs that should be used and that torch cannot use."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if available:
        why = _missing_kernels()
    elif hidden() or not (machine().gpus or machine().trouble):
        why = ""
    else:
        why = _why_unusable([str(one.message) for one in said])
    if why:
        raise UserError(f"torch {torch.__version__} (CUDA {torch.version.cuda}) {why}", alike=True)


def _missing_kernels() -> str:
    """Which GPUs torch sees, but has no kernels for, and what to do; "" when there are none."""
    import torch

    if not torch.version.cuda:  # ROCm
        return ""
    kernels = torch.cuda.get_arch_list()
    found = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    lacks = [index for index, one in enumerate(found) if not has_kernels(one, kernels)]
    if not lacks:
        return ""
    names = (f"{torch.cuda.get_device_name(i)} (sm_{found[i][0]}{found[i][1]})" for i in lacks)
    rest = ",".join(str(index) for index in range(len(found)) if index not in lacks)
    others = ""
    if rest and "CUDA_VISIBLE_DEVICES" not in os.environ:
        others = f"CUDA_VISIBLE_DEVICES={rest} uses the others; "
    return (
        f"has no kernels for {', '.join(dict.fromkeys(names))}, driver {machine().driver}; it has "
        f"those for {', '.join(kernels)}: {others}{_remedy()}"
    )


def _why_unusable(said: list[str]) -> str:
    """Why torch sees none of the GPUs that the driver shows, and what to do."""
    import torch

    found, text = machine(), f"cannot use the GPUs of this machine, {machine()}"
    if found.trouble:
        return f"{text}: {found.trouble}; {HIDE}"
    if not torch.version.cuda:
        return f"{text}: it is built without CUDA: {_remedy()}"
    needed = NEEDED_DRIVER.get(int(torch.version.cuda.partition(".")[0]), 0)
    if found.major < needed:
        return f"{text}: it needs driver {needed} or newer: {_remedy()}"
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return f"{text}: CUDA_VISIBLE_DEVICES={visible} names none of them; {HIDE}"
    told = [" ".join(one.split()) for one in said if "CUDA" in one]
    told = told or ["a container needs `--gpus all`, a Slurm job `--gpus-per-node`"]
    return f"{text}: {told[0]}; {HIDE}"


def _remedy() -> str:
    """What to do about a torch that does not fit the GPUs."""
    try:
        file, _ = choose(machine())
    except UserError as error:
        return str(error)
    return (
        f"`bash scripts/quickstart.sh` fills .venv with a torch that can (scripts/{file}); then "
        f"run .venv/bin/python; {HIDE}"
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
        if hidden() or not (machine().gpus or machine().trouble or Path("/dev/kfd").exists()):
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
