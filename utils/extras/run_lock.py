"""A lock that lets only one training at a time use a run directory. It ends with its process.

- Always on. Used by every training, but not by measurements and evaluations.
- Interface: `Lock`, which `utils.run_directory.Run` gets from addons.py.
- Without this file, nothing prevents a second training from writing into the same directory, and a
  job that restarts (``--elastic``) does not check that all nodes share the directory.
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

from utils.errors import UserError, printable
from utils.world import World, broadcast_from_rank0, gather, node_name

LOCK = "owner.txt"
PATIENCE = 2.0  # seconds; a killed process's data loading workers hold the lock until they exit
RESTART_PATIENCE = 120.0  # seconds for the previous attempt to end, or a lost machine's NFSv4 lease
VISIBLE_SECONDS = 10.0  # seconds until a new file must be visible on all nodes
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class Lock:
    """The lock of the run directory ``folder``. Rank 0 calls `poll` until it holds the lock.

    ``patient``: wait longer, because a launcher restarts this job and the previous attempt may
    still be exiting. ``note`` names a killed previous owner, or says that locks are not supported.
    """

    def __init__(self, folder: Path, patient: bool = False):
        self.path, self.note = folder / LOCK, ""
        self.text = f"process {os.getpid()} on {socket.gethostname()}"
        self.text += f", since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        self.file: IO[str] | None = None  # the kernel's lock lasts as long as this is open
        self.patience = RESTART_PATIENCE if patient else PATIENCE
        self.waits_until: float | None = None

    def poll(self) -> bool:
        """Try to take the lock and return whether it is held. If not, call again a moment later.

        Raises: OSError; `UserError` if another process has held it for too long.
        """
        folder = self.path.parent
        if self.path.is_symlink():  # never write through another user's link
            raise UserError(f"{self.path} is a symbolic link, not the lock of a run: remove it")
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open(self.path, "a+", errors="replace"))
            file.seek(0)
            owner = file.read(500).strip()
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if owner:
                    self.note = f"note: {owner} was killed and left {folder}; continuing there"
            except BlockingIOError:
                self._wait(folder, owner or "another process")
                return False
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                self.note = f"warning: the file system of {folder} has no locks: nothing prevents "
                self.note += "a second run from writing there"
            if not self._is_at_path(file):  # the previous owner removed this file when it ended
                return False
            stack.pop_all()
        file.truncate(0)
        file.write(self.text)
        file.flush()
        self.file = file
        # Release it after errors as well: launch.run_main calls finalizers.
        multiprocessing.util.Finalize(None, self.release, exitpriority=0)
        return True

    def _wait(self, folder: Path, owner: str) -> None:
        """Print that ``owner`` holds the lock. Raises: `UserError` once the patience is over."""
        now = time.monotonic()
        if self.waits_until is None:
            self.waits_until = now + self.patience
            if self.patience > PATIENCE:
                text = f"note: {folder} is in use by {owner}: waiting up to {self.patience:.0f} s"
                print(printable(f"{text} for its end"), flush=True)
        elif now >= self.waits_until:
            raise UserError(
                f"{folder} is in use by a run that is still active ({owner}): wait for its end, "
                f"stop it, or choose another --name; if its machine is gone, remove {self.path}",
                on_every_rank=True,
            )

    def check_shared(self, world: World) -> None:
        """Raise `UserError` unless all nodes see the lock: any may run rank 0 after a restart."""
        text = broadcast_from_rank0(lambda: self.text, world)
        deadline, is_seen = time.monotonic() + VISIBLE_SECONDS, False
        while not is_seen and time.monotonic() < deadline:
            time.sleep(0.2)
            with contextlib.suppress(OSError):
                is_seen = self.path.read_text() == text
        nodes = gather((node_name(world), is_seen), world)
        if blind := [name for name, sees in nodes if not sees]:
            raise UserError(
                f"{blind[0]} does not see what {nodes[0][0]} writes into {self.path.parent}: a job "
                "that continues when nodes fail needs an --output-dir that they share",
                on_every_rank=True,
            )

    def release(self) -> None:
        """Remove the file and release the lock."""
        if self.file is not None:
            if self._is_at_path(self.file):
                with contextlib.suppress(OSError):
                    self.path.unlink()
            self.file.close()
            self.file = None

    def _is_at_path(self, file: IO[str]) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.path))
        return False
