"""One temporary folder for the sockets of a process's loader workers; no folders of killed runs.

- Always on. Used by every script of this suite, at its start.
- Interface: `make`, which `utils.launch.run_main` calls through addons.py.
- Without this file, each killed loader worker leaves a folder pymp-* behind. With a TMPDIR of more
  than 75 bytes, training with workers hangs.
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

IN_USE = "imagenet_in_use_"  # and a process id: a file that this process locks in a folder
_locks: list[Any] = []  # these files, open until this process ends


def make() -> None:
    """Make one folder for the sockets of loader workers; remove those of runs that were killed.

    Each worker would make its own and, as it is killed in the end, leave it behind. A socket's path
    has at most 107 bytes (unix(7)): with a longer TMPDIR, workers fail and training hangs.
    """
    if len(os.fsencode(tempfile.gettempdir())) > 107 - len("/pymp-01234567/listener-01234567"):
        tempfile.tempdir = "/tmp"
    for pattern in ("pymp-*", "torchelastic_*"):
        for folder in Path(tempfile.gettempdir()).glob(pattern):
            # Of this user alone: in /tmp, others may put anything in our way.
            if not folder.is_symlink() and folder.stat().st_uid == os.getuid():
                _remove_unused(folder)
    folders = []
    if "tempdir" not in multiprocessing.current_process()._config:  # else of a parent that forked
        folders.append(Path(multiprocessing.util.get_temp_dir()))
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # in torchelastic_*/JOB/attempt_N/RANK/
        folders += [one for one in Path(path).parents if one.name.startswith("torchelastic_")]
    for folder in folders:
        file = folder / f"{IN_USE}{os.getpid()}"
        new = file.with_name(f".{file.name}")
        _locks.append(open(new, "w"))
        fcntl.flock(_locks[-1], fcntl.LOCK_EX)  # until this process ends, however that may be
        new.rename(file)  # another process that starts now finds it locked


def _remove_unused(folder: Path) -> None:
    """Remove a temporary folder if it is of this suite and its processes have all ended."""
    files = list(folder.glob(f"{IN_USE}*"))
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        for file in files:
            lock = stack.enter_context(open(file))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if files:
            shutil.rmtree(folder)
