"""Print one error line, not a traceback, if packages, memory, disk space or workers are missing.

- Always on. Used by every script.
- Interface, through addons.py: `explain`, which `utils.launch` calls with an exception that would
  end the process.
- Without this file, such a process ends with Python's traceback.
"""

import contextlib
import errno
import os
import re
import sys
from pathlib import Path

from utils import errors
from utils.errors import UserError

# The packages in requirements.txt, by import name.
REQUIRED = {name: name for name in ("torch", "torchvision", "tensorboard", "numpy", "tqdm")}
REQUIRED |= {"matplotlib": "matplotlib", "PIL": "pillow", "google": "protobuf"}


def explain(error: BaseException) -> UserError | None:
    """Return an error that says what the user can do; None for errors that the user cannot fix."""
    text = " ".join(str(error).split())
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name in REQUIRED:
        environment = Path(__file__).resolve().parents[2] / ".venv"
        how = "`bash scripts/quickstart.sh` makes an environment with all packages"
        if environment.exists():
            how = f"`source {environment}/bin/activate` first"
        text = f"{REQUIRED[name]} is not installed for {sys.executable}: {how}, or "
        return UserError(text + "`pip install -r requirements.txt`", on_every_rank=True)
    if name and name.startswith("utils.extras."):
        file = f"{name.replace('.', '/')}.py"
        text = f"an option needs {file}, which is missing: leave that option out, or restore the "
        return UserError(text + f"file by `git checkout {file}`", on_every_rank=True)
    if isinstance(error, FileNotFoundError) and "temporary directory" in text:
        text = "no folder for temporary files, such as /tmp, can be written to: free disk space, "
        return UserError(text + "set TMPDIR, or raise `ulimit -f`", on_every_rank=True)
    if isinstance(error, MemoryError):
        return UserError(f"too little memory ({text}): close other programs, or raise `ulimit -v`")
    if getattr(error, "errno", None) == errno.EMFILE:
        return UserError("too many open files for this shell: raise the limit (`ulimit -n 4096`)")
    if getattr(error, "errno", None) == errno.ENOSPC:
        return _error_of_shm()
    if not isinstance(error, RuntimeError):
        return None
    worker = r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\) (is killed by [^.]*|exited)"
    if match := re.search(worker, text):
        return UserError(
            f"data loading worker {match[1]} {match[2]}: unless somebody killed it, the machine "
            "ran out of memory (dmesg shows it): use fewer workers (-j). To continue, "
            f"{errors.how_to_continue}"
        )
    attempt = re.search(r"ried to allocate ([\d.]+ \w+)", text)
    if attempt and re.search(r"out of memory|can't allocate memory", text):
        place = "the GPU" if "CUDA" in text else "this machine"
        return UserError(
            f"{place} is out of memory, at an attempt to allocate {attempt[1]}: use a smaller -b, "
            "with --accum-steps to keep the global batch"
        )
    return None


def _error_of_shm() -> UserError | None:
    """Return the error for a full /dev/shm, which data loading workers need; None if not full."""
    with contextlib.suppress(OSError):
        disk = os.statvfs("/dev/shm")
        if (free := disk.f_bavail * disk.f_frsize) < 2**20:
            text = f"/dev/shm has only {free / 2**20:.1f} MiB free, too little for data loading "
            text += "workers: remove files of killed programs there, or start the container with "
            return UserError(text + "--ipc=host (docker run), or a larger --shm-size")
    return None
