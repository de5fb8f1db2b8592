"""Print one error line, not a traceback, if packages, memory, disk space or workers are missing.

- Used by every script.
- Interface: `explain`, which `utils.start.launch` calls with an exception that would end the
  process.
"""

import contextlib
import errno
import os
import re
import shlex
import socket
import sys

from utils.start import errors
from utils.start.errors import UserError, typed

# The packages in requirements.txt, by import name.
NAMED_ALIKE = ("torch", "torchvision", "tensorboard", "numpy", "tqdm", "plotly", "filelock")
REQUIRED = {name: name for name in (*NAMED_ALIKE, "matplotlib")}
REQUIRED |= {"PIL": "pillow", "google": "protobuf"}
# Of a disk or network mount that fails; the latter also of sockets, which have no file name.
DISK = (errno.EIO, errno.ESTALE, errno.EROFS)
MOUNT = (errno.EACCES, errno.EPERM, errno.ENOTCONN, errno.EHOSTDOWN, errno.ETIMEDOUT)


def explain(error: BaseException) -> UserError | None:
    """Return an error that says what the user can do; None for errors that the user cannot fix."""
    text = " ".join(str(error).split())
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name in REQUIRED:
        environment = errors.ROOT / ".venv"
        how = f"`bash {typed('scripts/quickstart.sh')}` makes an environment with all packages"
        if environment.exists():
            how = f"`source {shlex.quote(str(environment))}/bin/activate` first"
        text = f"{REQUIRED[name]} is not installed for {sys.executable}: {how}, or "
        return UserError(text + f"`pip install -r {typed('requirements.txt')}`", on_every_rank=True)
    if isinstance(error, FileNotFoundError) and "temporary directory" in text:
        text = "no folder for temporary files, such as /tmp, can be written to: free disk space, "
        return UserError(text + "set TMPDIR, or raise `ulimit -f`", on_every_rank=True)
    code = getattr(error, "errno", None)
    if isinstance(error, MemoryError) or code == errno.ENOMEM:
        return UserError(f"too little memory ({text}): close other programs, or raise `ulimit -v`")
    # torch reports a file that it could not pass on between processes by the last words.
    if code == errno.EMFILE or re.search("too many open files|items of ancdata", text.lower()):
        return UserError("too many open files for this shell: raise the limit (`ulimit -n 4096`)")
    # Python's words, and those of a thread in C++.
    if code == errno.EAGAIN or text in ("can't start new thread", os.strerror(errno.EAGAIN)):
        text = "no more processes or threads can be started: close other programs, use fewer "
        return UserError(text + "workers (-j), or raise `ulimit -u` or the container's limit")
    file = getattr(error, "filename", None)
    if code in (errno.ENOSPC, errno.EDQUOT):
        place = f" for {file}" if file else ""
        text = (
            f"no space is left on the disk{place}: free disk space, then {errors.how_to_continue}"
        )
        return _error_of_shm() or UserError(text)
    if code in DISK or (file and code in MOUNT):
        text = f"cannot use {file or 'a file'} ({os.strerror(code)}): check its disk, mount and "
        return UserError(f"{text}permissions, then {errors.how_to_continue}")
    if "more than 1 value per channel" in text:  # a ValueError of torch's batch norm
        return UserError(
            "this model's batch norm got a single value per channel, which it cannot train on: use "
            "-b 2 or more images per process, or a larger --image-size",
            on_every_rank=True,
        )
    if not isinstance(error, RuntimeError):
        return None
    if match := re.search(r"Unable to find address for: (\S+)", text):  # gloo
        names = ", ".join(name for _, name in socket.if_nameindex())
        return UserError(
            f"there is no network interface {match[1]} with an address, only {names}: unset "
            "GLOO_SOCKET_IFNAME, or set it to the interface that leads to node 0"
        )
    if "finished reduction in the prior iteration" in text:
        return UserError(
            "the model has weights that take no part in its output, such as a layer that it never "
            "uses: DistributedDataParallel waits for their gradients. Remove that layer, or train "
            "with imagenet_fsdp.py (one process: imagenet_nd.py)",
            on_every_rank=True,
        )
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
            f"{place} is out of memory, at an attempt to allocate {attempt[1]}: use a smaller -b; "
            "--global-batch keeps the number of images per step"
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
