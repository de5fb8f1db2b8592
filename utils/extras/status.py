"""The file in memory from which scripts/status.sh reads what each process is doing.

Interface: `Training.show_status`. Always on; without this file, status.sh finds no training.
"""

import contextlib
import json
import multiprocessing.util
import os
import socket
import stat
import time
from pathlib import Path

import torch

from utils.session import Session


class Status:
    """This process's file, in memory, as other nodes may have no run directory.

    Errors of writing are ignored. A reader compares process id and start time to detect a file that
    a killed process has left behind.
    """

    def __init__(self, session: Session):
        world, run, args = session.world, session.run, session.args
        self.state, self.figures = session.state, {}
        self.folder = Path(f"/dev/shm/imagenet-suite-{os.getuid()}")
        self.path = self.folder / f"{socket.gethostname()}-{os.getpid()}.json"
        gpu = None
        if world.device.type == "cuda":
            gpu = f"GPU-{torch.cuda.get_device_properties(world.device).uuid}"
        self.facts = {
            "pid": os.getpid(),
            "started": Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19],
            "run": str(run.folder.resolve()),
            "mode": run.mode,
            "arch": args.arch,
            "rank": world.rank,
            "size": world.size,
            "epochs": args.epochs,
            "gpu": gpu,
        }
        # Also after an error: `launch.run_main` ends a process this way.
        multiprocessing.util.Finalize(None, self.remove, exitpriority=0)

    def show(self, phase: str, parts: dict[str, float] | None = None, **figures: float) -> None:
        """Write what this process is doing; figures stay until new ones come.

        ``parts`` are the mean seconds per step by part. In synchronous training all steps take the
        same time; a process's own parts show whether it is the slow one.
        """
        if parts:
            figures["data_seconds"] = parts["data"]
            figures["compute_seconds"] = parts.get("own", parts["compute"])
        self.figures |= figures
        now = {"phase": phase, "epoch": self.state.epoch, "step": self.state.step}
        facts = self.facts | now | {"at": time.time()} | self.figures
        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, exist_ok=True)
            if not _is_private(self.folder):
                return
            # O_EXCL: never write through a file or link that exists already.
            temporary = self.path.with_name(f".{os.urandom(8).hex()}.tmp")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(temporary, flags, 0o600), "w") as file:
                file.write(json.dumps(facts))
            temporary.replace(self.path)

    def remove(self) -> None:
        """The process is about to end."""
        with contextlib.suppress(OSError):
            if _is_private(self.folder):
                self.path.unlink()


def _is_private(folder: Path) -> bool:
    """Whether this is a folder of this user, in which nobody else may write: /dev/shm is open to
    all, so another user may have made one of this name."""
    info = folder.lstat()
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o022
