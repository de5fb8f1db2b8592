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
from utils.errors import UserError, report

LOCK = "owner.json"
BEAT = 4.0  # seconds between two touches
SILENT = 40.0  # seconds without one, while watched, after which another machine's process is dead
PATIENCE = 60.0  # seconds for the processes of an earlier attempt to exit


class Lock:
    """The lock of the run directory ``folder``, for rank 0: call `poll` until it is held.

    ``patient``: a launcher restarts this job, so a living holder may be about to exit. ``note``
    says which dead process held it before, if any.
    """

    def __init__(self, folder: Path, patient: bool = False):
        self.folder, self.path = folder, folder / LOCK
        self.note: str | None = None
        self.text = ""  # the content of our file
        self.patient_until = time.monotonic() + PATIENCE * patient
        self.seen: tuple[str, int] | None = None  # content and mtime of another process's file
        self.seen_at = 0.0  # since when
        self.touched = False  # since this process watches it
        self.over = threading.Event()

    def poll(self) -> bool:
        """Whether the lock is held; if not, call again a moment later.

        Raises: OSError, and `UserError` when a living process holds it.
        """
        held = self._create() or self._take_over()
        if held:
            # Also after an error: supervise.run_main ends a process this way.
            multiprocessing.util.Finalize(None, self.release, exitpriority=0)
            threading.Thread(target=self._keep, name="lock", daemon=True).start()
        return held

    def release(self) -> None:
        self.over.set()
        with contextlib.suppress(OSError):
            if self.text and self.path.read_text() == self.text:
                self.path.unlink()

    def _create(self) -> bool:
        """Make the file. Of several that try, also from several machines, one gets True."""
        self.text = self.text or _this_process(self.folder)
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

    def _take_over(self) -> bool:
        """Put our file in the place of a dead process's. Returns whether an earlier call did."""
        try:
            text, mtime = self.path.read_text(), self.path.stat().st_mtime_ns
        except FileNotFoundError:  # just released
            return False
        if text == self.text:
            return True
        record, now, first_look = _parsed(text), time.monotonic(), self.seen is None
        if (text, mtime) != self.seen:
            self.touched = not first_look
            self.seen, self.seen_at = (text, mtime), now
        if record.get("machine") == _machine():
            here = record["folder"] == os.stat(self.folder).st_ino  # else it is a copy
            dead = not here or _started(record["pid"]) != record["started"]
            alive = not dead
        else:
            dead = now - self.seen_at >= SILENT
            alive = self.touched and not dead
        if dead:
            # Of several that do this at once, the last one is found by the next look of each.
            save_atomically(lambda file: file.write(self.text.encode()), self.path, durable=False)
            self.note = f"note: {_name(record)} was killed and left {self.folder}; continuing there"
        elif alive and now >= self.patient_until:
            raise UserError(
                f"{self.folder} is in use by a run that is still active ({_name(record)}): wait "
                "for its end, stop it, or choose another --name",
                alike=True,
            )
        elif first_look:
            print(
                f"note: {self.folder} is in use by {_name(record)}: watching for up to "
                f"{PATIENCE if alive else SILENT:.0f} s whether it is alive",
                flush=True,
            )
        return False

    def _keep(self) -> None:
        """Touch the file until the end; exit if another process has taken the lock meanwhile."""
        while not self.over.wait(BEAT):
            with contextlib.suppress(OSError):  # the disk is in trouble: training goes on
                text = self.path.read_text()
                if text == self.text:
                    os.utime(self.path)
                elif (record := _parsed(text)) and not self.over.is_set():
                    fault = UserError(
                        f"this process was suspended for so long that {_name(record)} has taken "
                        f"over {self.folder}: it exits, so that only one writes there"
                    )
                    os._exit(report(fault))


def _this_process(folder: Path) -> str:
    """The content of this process's lock file."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    record = {
        "name": f"process {os.getpid()} on {socket.gethostname()}, since {since}",
        "machine": _machine(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "folder": os.stat(folder).st_ino,
    }
    return json.dumps(record) + "\n"


def _machine() -> str:
    """Equal for processes that see each other's numbers: kernel boot and PID namespace.

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


def _parsed(text: str) -> dict[str, Any]:
    """The record in a lock file; {} if it is being written, or was written by half."""
    with contextlib.suppress(TypeError, ValueError):
        return dict(json.loads(text))
    return {}


def _name(record: dict[str, Any]) -> str:
    return record.get("name", f"a process that {LOCK} does not name")
