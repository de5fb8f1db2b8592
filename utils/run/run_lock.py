"""A lock that lets only one training at a time use a run directory. It ends with its process.

- Used by every training, but not by measurements and evaluations.
- Interface: `Lock`, which `utils.run.run_directory.Run` uses.
- The package filelock holds `LOCK` by flock. `OWNER`, beside it, is a text for messages: who it is.
"""

import contextlib
import errno
import multiprocessing.util
import os
import socket
import time
from pathlib import Path

from filelock import FileLock, Timeout

from utils.start.errors import UserError, printable
from utils.start.world import World, broadcast_from_rank0

LOCK, OWNER = "run.lock", "owner.txt"
PATIENCE = 2.0  # seconds; a process that is being killed holds the lock until it has exited
RESTART_PATIENCE = 120.0  # seconds for the previous attempt to end, or a lost machine's NFSv4 lease
VISIBLE_SECONDS = 10.0  # seconds until a new file must be visible on all nodes
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class Lock:
    """The lock of the run directory ``folder``. Rank 0 calls `poll` until it holds the lock.

    ``patient``: wait longer, because a launcher restarts this job and the previous attempt may
    still be exiting. ``note`` names a killed previous owner, or says that locks are not supported.
    """

    def __init__(self, folder: Path, patient: bool = False):
        self.folder, self.note = folder, ""
        self.path, self.owner = folder / LOCK, folder / OWNER
        self.text = f"process {os.getpid()} on {socket.gethostname()}"
        self.text += f", since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        # Its fallback without flock is a file that would outlive a killed process.
        self.lock = FileLock(self.path, fallback_to_soft=False)
        self.patience = RESTART_PATIENCE if patient else PATIENCE
        self.waits_until: float | None = None

    def poll(self) -> bool:
        """Try to take the lock and return whether it is held. If not, call again a moment later.

        Raises: OSError; `UserError` if another process has held it for too long.
        """
        for path in (self.path, self.owner):
            if path.is_symlink():  # never write through another user's link
                raise UserError(f"{path} is a symbolic link, not the lock of a run: remove it")
        try:
            self.lock.acquire(blocking=False)
            if owner := self._read_owner():
                self.note = f"note: {owner} was killed and left {self.folder}; continuing there"
        except Timeout:
            self._wait(self._read_owner() or "another process")
            return False
        except OSError as error:
            if error.errno == errno.ESTALE:  # NFS: the previous owner removed the file meanwhile
                return False
            if error.errno not in NO_LOCKS:
                raise
            self.note = f"warning: the file system of {self.folder} has no locks: nothing prevents "
            self.note += "a second run from writing there"
        self.owner.write_text(self.text)
        # Release it after errors as well: launch.run_main calls finalizers.
        multiprocessing.util.Finalize(None, self.release, exitpriority=0)
        return True

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lock."""
        return self.lock.is_locked

    def _read_owner(self) -> str:
        """The text about the owner, or ""."""
        try:
            with open(self.owner, errors="replace") as file:
                return file.read(500).strip()
        except FileNotFoundError:
            return ""

    def _wait(self, owner: str) -> None:
        """Print that ``owner`` holds the lock. Raises: `UserError` once the patience is over."""
        now = time.monotonic()
        if self.waits_until is None:
            self.waits_until = now + self.patience
            if self.patience > PATIENCE:
                text = f"note: {self.folder} is in use by {owner}: "
                text += f"waiting up to {self.patience:.0f} s for its end"
                print(printable(text), flush=True)
        elif now >= self.waits_until:
            raise UserError(
                f"{self.folder} is in use by a run that is still active ({owner}): wait for its "
                "end, stop it, or choose another --name; if its machine is gone, remove "
                f"{self.path}",
                on_every_rank=True,
            )

    def check_shared(self, world: World) -> None:
        """Raise `UserError` unless all nodes see the lock: any may run rank 0 after a restart."""
        text = broadcast_from_rank0(lambda: self.text, world)
        deadline, is_seen = time.monotonic() + VISIBLE_SECONDS, False
        while not is_seen and time.monotonic() < deadline:
            time.sleep(0.2)
            with contextlib.suppress(OSError):
                is_seen = self.owner.read_text() == text
        nodes = world.gather((world.node_name, is_seen))
        if blind := [name for name, sees in nodes if not sees]:
            raise UserError(
                f"{blind[0]} does not see what {nodes[0][0]} writes into {self.folder}: a job "
                "that continues when nodes fail needs an --output-dir that they share",
                on_every_rank=True,
            )

    def release(self) -> None:
        """Remove both files and release the lock; those of another owner stay."""
        with contextlib.suppress(OSError):
            if self._read_owner() == self.text:
                self.owner.unlink()
                self.path.unlink()  # while it is held: who has opened it meanwhile tries again
        self.lock.release()
