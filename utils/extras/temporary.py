"""Give all data loading workers of a process one temporary folder, and remove those of killed runs.

- Always on. Used by every script of this suite when it starts.
- Interface: `make`, which `utils.launch.run_main` calls through addons.py.
- Without this file, each killed worker leaves a folder pymp-* behind, and training with workers
  hangs if TMPDIR is longer than 75 bytes.
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
    for pattern in ("pymp-*", "torchelastic_*"):
        for folder in Path(tempfile.gettempdir()).glob(pattern):
            # Remove only folders of this user: in /tmp, other users can create any name.
            if not folder.is_symlink() and folder.stat().st_uid == os.getuid():
                _remove_unused(folder)
    folders = []
    if "tempdir" not in multiprocessing.current_process()._config:  # else the parent has made it
        folders.append(Path(multiprocessing.util.get_temp_dir()))
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # in torchelastic_*/JOB/attempt_N/RANK/
        folders += [one for one in Path(path).parents if one.name.startswith("torchelastic_")]
    for folder in folders:
        file = folder / f"{IN_USE}{os.getpid()}"
        new = file.with_name(f".{file.name}")
        _locks.append(open(new, "w"))
        fcntl.flock(_locks[-1], fcntl.LOCK_EX)  # lasts until this process ends, even if killed
        new.rename(file)  # renamed after locking: other processes never see it unlocked


def _remove_unused(folder: Path) -> None:
    """Remove a temporary folder if this suite made it and all its processes have ended."""
    files = list(folder.glob(f"{IN_USE}*"))
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        for file in files:
            lock = stack.enter_context(open(file))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if files:
            shutil.rmtree(folder)
