"""Give all data loading workers of a process one temporary folder, and remove those of killed runs.

- Used by every script of this suite when it starts.
- Interface: `make`, which `utils.start.launch.run_main` calls.
"""

import contextlib
import fcntl
import multiprocessing
import multiprocessing.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

IN_USE = "imagenet_in_use_"  # with a process id: the name of a file that marks a folder as used
_locks: list[Any] = []  # these files; they stay open, and so locked, until this process ends


def make() -> None:
    """Make one folder for the sockets of data loading workers; remove those of killed runs.

    Otherwise each worker would make its own folder and leave it behind, because workers end by
    being killed. Socket paths have at most 107 bytes (unix(7)); if TMPDIR is too long, use /tmp.
    """
    if len(os.fsencode(tempfile.gettempdir())) > 107 - len("/pymp-01234567/listener-01234567"):
        tempfile.tempdir = "/tmp"
    folders = []
    # Not if the parent has made it. Only this private attribute tells.
    config = multiprocessing.current_process()._config  # pyright: ignore[reportAttributeAccessIssue]
    if "tempdir" not in config:
        folders.append(Path(multiprocessing.util.get_temp_dir()))
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # in torchelastic_*/JOB/attempt_N/RANK/
        folders += [one for one in Path(path).parents if one.name.startswith("torchelastic_")]
    for folder in folders:
        file = folder / f"{IN_USE}{os.getpid()}"
        new = file.with_name(f".{file.name}")
        _locks.append(open(new, "w"))
        fcntl.flock(_locks[-1], fcntl.LOCK_EX)  # lasts until this process ends, even if killed
        if folder.name.startswith("torchelastic_"):  # torchrun reads errors there after our end
            print(os.getppid(), file=_locks[-1], flush=True)
        new.rename(file)  # renamed after locking: other processes never see it unlocked
    # After marking ours: torchrun's folder looks unused while this process alone is left to begin.
    for pattern in ("pymp-*", "torchelastic_*"):
        for folder in Path(tempfile.gettempdir()).glob(pattern):
            # Another process that starts at the same time may remove it first.
            with contextlib.suppress(OSError):
                # Remove only folders of this user: in /tmp, other users can create any name.
                if not folder.is_symlink() and folder.stat().st_uid == os.getuid():
                    _remove_unused(folder)


def _remove_unused(folder: Path) -> None:
    """Remove a temporary folder if this suite made it and all its processes have ended, torchrun
    included.

    Raises: OSError if a process uses it, or if another process removes it at the same time.
    """
    files = list(folder.glob(f"{IN_USE}*"))
    with contextlib.ExitStack() as stack:
        for file in files:
            lock = stack.enter_context(open(file))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            torchrun = lock.read().strip()  # its process id; empty in other folders
            if torchrun and os.path.exists(f"/proc/{torchrun}"):
                return
        if files:
            shutil.rmtree(folder)
