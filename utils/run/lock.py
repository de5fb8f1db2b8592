"""One training at a time in a run directory: rank 0 holds the kernel's lock on a file there.

The kernel gives up the lock when its process ends, however it ends. The content of the file names
the process for error messages. flock works over NFSv4, and over NFSv3 with Linux 2.6.12 or newer.
An NFS server may keep the lock of a machine that has lost its power: NFSv4 until the lease of 90 s
is over, NFSv3 until that machine has started again. Does not import torch.
"""

import contextlib
import errno
import fcntl
import multiprocessing.util
import os
import socket
import time
from pathlib import Path
from typing import IO

from utils.errors import UserError

LOCK = "owner.txt"
PATIENCE = 2.0  # seconds for a killed process's data loading workers to exit: they hold it, too
RESTART_PATIENCE = 120.0  # for an earlier attempt's process, or the NFSv4 lease of a lost machine
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class Lock:
    """The lock of the run directory ``folder``, for rank 0: call `poll` until it is held.

    ``patient``: a launcher restarts this job, so the process that holds it may be about to exit.
    ``note`` says which process was killed in the directory, ``warning`` that there are no locks.
    """

    def __init__(self, folder: Path, patient: bool = False):
        self.path = folder / LOCK
        self.text = f"process {os.getpid()} on {socket.gethostname()}"
        self.text += f", since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        self.note: str | None = None
        self.warning: str | None = None
        self.file: IO[str] | None = None  # the kernel's lock lasts as long as this is open
        self.patience = RESTART_PATIENCE if patient else PATIENCE
        self.waits_until: float | None = None

    def poll(self) -> bool:
        """Whether the lock is held; if not, call again a moment later.

        Raises: OSError, and `UserError` when another process still holds it.
        """
        file = open(self.path, "a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(file)
            file.close()
            self._wait(owner or "another process")
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            self.warning = (
                f"the file system of {self.path.parent} has no locks: nothing prevents a second "
                "run from writing there"
            )
        if not self._is_at_path(file):  # its process removed it when it ended
            file.close()
            return False
        if (owner := _owner(file)) and not self.warning:
            where = self.path.parent
            self.note = f"note: {owner} was killed and left {where}; continuing there"
        file.truncate(0)
        file.write(self.text)
        file.flush()
        self.file = file
        # Also after an error: supervise.run_main ends a process this way.
        multiprocessing.util.Finalize(None, self.release, exitpriority=0)
        return True

    def release(self) -> None:
        """Remove the file, and give up the lock."""
        if self.file is not None:
            with contextlib.suppress(OSError):
                if self._is_at_path(self.file):
                    self.path.unlink()
            self.file.close()
            self.file = None

    def _is_at_path(self, file: IO[str]) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.path))
        return False

    def _wait(self, owner: str) -> None:
        """Note that another process holds the lock. Raises: `UserError` after some time."""
        now = time.monotonic()
        if self.waits_until is None:
            self.waits_until = now + self.patience
            if self.patience > PATIENCE:
                text = f"waiting up to {self.patience:.0f} s for its end"
                print(f"note: {self.path.parent} is in use by {owner}: {text}", flush=True)
        elif now >= self.waits_until:
            raise UserError(
                f"{self.path.parent} is in use by a run that is still active ({owner}): wait for "
                "its end, stop it, or choose another --name; if its machine is gone, remove "
                f"{self.path}",
                alike=True,
            )


def _owner(file: IO[str]) -> str:
    """The process that the file names; "" for none, or while it is being written."""
    file.seek(0)
    return file.read().strip()
