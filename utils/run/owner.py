"""One owner of a run directory at a time: who trains there now, in a small file beside the run.

The owner touches the file every few seconds and removes it at its end. One that was killed cannot:
on its own machine it is known to be dead by its process, from another machine by a file that is no
longer touched. No lock is held, as what outlives its process on an NFS server, or is granted twice
on a disk without locks, would lock out or let in the wrong one. A process that was held up until
another one took its place finds that out, and ends. Does not import torch.
"""

import contextlib
import fcntl
import json
import multiprocessing.util
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from utils.errors import BAD_INPUT, UserError, show

OWNER = "owner.json"
BEAT = 4.0  # seconds between two touches
# Seconds without a touch after which the owner on another machine is gone. Clocks may differ, and
# NFS shows a file late: whatever its age, it is watched for some touches.
SILENT, WATCHED = 60.0, 2.5 * BEAT
PATIENCE = 60.0  # seconds for the processes of an attempt before this one to end


class Claim:
    """This process's claim on the run directory ``folder``; for rank 0. Call `poll` until it holds.

    ``patient``: this is a restart, and an owner that is alive may be about to end. ``note`` says
    whose place was taken, if anybody's.
    """

    def __init__(self, folder: Path, patient: bool = False):
        self.folder, self.path = folder, folder / OWNER
        self.patience = PATIENCE if patient else 0.0
        self.note: str | None = None
        self.text = ""  # what our file holds
        self.began = time.monotonic()
        self.seen: tuple[str, int] | None = None  # content and mtime of another's file
        self.silent_since = 0.0  # by the monotonic clock
        self.beats = 0  # touches seen
        self.told = False
        self.over = threading.Event()
        self.keeper = threading.Thread(target=self._keep, name="owner", daemon=True)

    def poll(self) -> bool:
        """Whether the folder, made if need be, is ours now; else ask again a moment later.

        Nothing but the file is written. Raises: `UserError` when it belongs to a living process,
        or cannot be written.
        """
        try:
            ours = self._try()
        except OSError as fault:
            raise UserError(
                f"cannot write into the run directory {self.folder} ({fault.strerror})"
            ) from None
        if ours:
            # Also after an error: supervise.run_main ends a process this way.
            multiprocessing.util.Finalize(None, self.release, exitpriority=0)
            self.keeper.start()
        return ours

    def release(self) -> None:
        """Give the folder up."""
        self.over.set()
        if self.keeper.is_alive():
            self.keeper.join(2 * BEAT)  # not for ever: the disk may be gone
        with contextlib.suppress(OSError):
            if self.text and self.path.read_text() == self.text:
                self.path.unlink()

    def _try(self) -> bool:
        if not self.text:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.text = json.dumps(_this_process(self.folder)) + "\n"
        if self._create():
            return True
        try:
            text = self.path.read_text()
            seen = text, self.path.stat().st_mtime_ns
        except FileNotFoundError:  # given up just now
            return False
        if text == self.text:
            return True  # taken over in the last call
        record = _parsed(text)
        who = _name(record)
        alive = self._is_alive(record, seen)
        if alive and time.monotonic() - self.began >= self.patience:
            raise UserError(
                f"{self.folder} belongs to a training that is still under way ({who}): wait for "
                "its end, stop it, or choose another --name",
                alike=True,
            )
        if alive is False:
            self._take_over(text)
            self.note = f"note: {self.folder} was left by {who}, which was killed; going on there"
        elif not self.told:
            self.told = True
            wait = self.patience if alive else SILENT
            print(
                f"note: {self.folder} belongs to {who}: watching for up to {wait:.0f} s whether "
                + ("it ends" if alive else "it is alive"),
                flush=True,
            )
        return False

    def _create(self) -> bool:
        """Make the file. Of several that try, also from several machines, one gets True."""
        try:
            file = open(self.path, "x")  # O_EXCL
        except FileExistsError:
            return False
        try:
            with file:
                file.write(self.text)
        except OSError:  # the disk is full
            self.path.unlink()
            raise
        return True

    def _is_alive(self, record: dict[str, Any], seen: tuple[str, int]) -> bool | None:
        """Whether the owner lives; None: not known yet."""
        if record.get("machine") == _machine():
            here = record.get("folder") == os.stat(self.folder).st_ino  # else it is a copy
            return here and _lives(record.get("pid"), record.get("started"))
        now = time.monotonic()
        if self.seen is None:
            age = time.time() - seen[1] / 1e9
            self.silent_since = now - min(max(age, 0.0), SILENT - WATCHED)
        elif seen != self.seen:
            self.silent_since, self.beats = now, self.beats + 1
        self.seen = seen
        if now - self.silent_since >= SILENT:
            return False
        return True if self.beats else None

    def _take_over(self, dead: str) -> None:
        """Put our record in the place of a dead owner's, unless another process is faster.

        Without locks on this disk several may do it at once: the last one is who the next look
        finds.
        """
        with open(self.path, "r+") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return
            except OSError:  # no locks here
                pass
            if file.read() == dead:
                file.seek(0)
                file.write(self.text)
                file.truncate()

    def _keep(self) -> None:
        """Touch the file until the end; end this process if it is another's meanwhile."""
        while not self.over.wait(BEAT):
            try:
                text = self.path.read_text()
                if text == self.text:
                    os.utime(self.path)
                    continue
            except OSError:  # removed by hand, or the disk is in trouble: training goes on
                with contextlib.suppress(OSError):
                    self._create()
                continue
            if record := _parsed(text):
                show(
                    UserError(
                        f"this process was held up for so long that {_name(record)} has taken over "
                        f"{self.folder}: it ends here, so that only one writes there"
                    )
                )
                os._exit(BAD_INPUT)


def _this_process(folder: Path) -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "started": _started(os.getpid()),
        "machine": _machine(),
        "folder": os.stat(folder).st_ino,
    }


def _machine() -> str:
    """What processes that see each other's numbers have in common.

    Not the host name: cloned machines share it, and containers on one machine share its kernel.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; None if there is none, or a dead one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _lives(pid: Any, started: Any) -> bool:
    return isinstance(pid, int) and started is not None and _started(pid) == started


def _parsed(text: str) -> dict[str, Any]:
    """The record in an owner's file; {} if it is being written, or was by half."""
    try:
        record = json.loads(text)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _name(record: dict[str, Any]) -> str:
    if not record:
        return f"a process that {OWNER} does not name"
    return f"process {record.get('pid')} on {record.get('host')}, since {record.get('since')}"
