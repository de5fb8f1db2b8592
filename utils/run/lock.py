"""One training at a time in a run directory: a small lock file that its process keeps touching.

A process that was killed cannot remove its file: on its own machine its process number shows that
it is dead, on another machine a file that is no longer touched. Kernel locks would not do: on NFS
they may outlive their process, or be granted twice. A process that was suspended until another one
took the lock notices that, and exits. Does not import torch.
"""

import contextlib
import json
import multiprocessing.util
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from utils.atomic import save_atomically
from utils.errors import BAD_INPUT, UserError, show

LOCK = "owner.json"
BEAT = 4.0  # seconds between two touches
# Seconds without a touch after which a process on another machine counts as dead. Clocks may
# differ, and NFS shows a file late: whatever its age, it is watched for some touches.
SILENT, WATCHED = 60.0, 2.5 * BEAT
PATIENCE = 60.0  # seconds for the processes of an earlier attempt to exit


class Lock:
    """The lock of the run directory ``folder``, for rank 0: call `poll` until it is held.

    ``patient``: a launcher restarts this job, so a living holder may be about to exit. ``note``
    says which dead process held it before, if any.
    """

    def __init__(self, folder: Path, patient: bool = False):
        self.folder, self.path = folder, folder / LOCK
        self.patience = PATIENCE if patient else 0.0
        self.note: str | None = None
        self.text = ""  # the content of our file
        self.began = time.monotonic()
        self.seen: tuple[str, int] | None = None  # content and mtime of another process's file
        self.silent_since = 0.0  # by the monotonic clock
        self.touched = False  # since this process watches it
        self.over = threading.Event()
        self.keeper = threading.Thread(target=self._keep, name="lock", daemon=True)

    def poll(self) -> bool:
        """Whether the lock is held; if not, call again a moment later. Makes the folder.

        Raises: `UserError` when a living process holds it, or the folder cannot be written.
        """
        try:
            held = self._try()
        except OSError as fault:
            raise UserError(
                f"cannot write into the run directory {self.folder} ({fault.strerror})"
            ) from None
        if held:
            # Also after an error: supervise.run_main ends a process this way.
            multiprocessing.util.Finalize(None, self.release, exitpriority=0)
            self.keeper.start()
        return held

    def release(self) -> None:
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
            seen = self.path.read_text(), self.path.stat().st_mtime_ns
        except FileNotFoundError:  # just released
            return False
        if seen[0] == self.text:
            return True  # taken over in the last call
        record, first_look = _parsed(seen[0]), self.seen is None
        alive = self._is_alive(record, seen)
        if alive is False:
            # Of several that do this at once, the last one is found by the next look of each.
            save_atomically(lambda file: file.write(self.text.encode()), self.path, durable=False)
            self.note = f"note: {_name(record)} was killed and left {self.folder}; continuing there"
        elif alive and time.monotonic() - self.began >= self.patience:
            raise UserError(
                f"{self.folder} is in use by a run that is still active ({_name(record)}): wait "
                "for its end, stop it, or choose another --name",
                alike=True,
            )
        elif first_look:
            print(
                f"note: {self.folder} is in use by {_name(record)}: watching for up to "
                f"{self.patience if alive else SILENT:.0f} s whether it is alive",
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
        """Whether the holder is alive; None: not known yet."""
        before, self.seen = self.seen, seen
        if record.get("machine") == _machine():
            here = record.get("folder") == os.stat(self.folder).st_ino  # else it is a copy
            started = record.get("started")
            return here and started is not None and _started(record.get("pid")) == started
        now = time.monotonic()
        if before is None:
            age = time.time() - seen[1] / 1e9
            self.silent_since = now - min(max(age, 0.0), SILENT - WATCHED)
        elif seen != before:
            self.silent_since, self.touched = now, True
        if now - self.silent_since >= SILENT:
            return False
        return True if self.touched else None

    def _keep(self) -> None:
        """Touch the file until the end; exit if another process has taken the lock meanwhile."""
        while not self.over.wait(BEAT):
            try:
                text = self.path.read_text()
                if text == self.text:
                    os.utime(self.path)
                elif record := _parsed(text):
                    show(
                        UserError(
                            f"this process was suspended for so long that {_name(record)} has "
                            f"taken over {self.folder}: it exits, so that only one writes there"
                        )
                    )
                    os._exit(BAD_INPUT)
            except OSError:  # removed by hand, or the disk is in trouble: training goes on
                with contextlib.suppress(OSError):
                    self._create()


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
    """Equal for processes that see each other's numbers: kernel boot and PID namespace.

    Not the host name: cloned machines share it, and containers on one machine share its kernel.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: Any) -> str | None:
    """When a process started, in clock ticks since boot; None if there is none, or a dead one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _parsed(text: str) -> dict[str, Any]:
    """The record in a lock file; {} if it is being written, or was written by half."""
    with contextlib.suppress(TypeError, ValueError):
        return dict(json.loads(text))
    return {}


def _name(record: dict[str, Any]) -> str:
    if not record:
        return f"a process that {LOCK} does not name"
    return f"process {record.get('pid')} on {record.get('host')}, since {record.get('since')}"
