"""Files in /dev/shm that tell scripts/status.sh what each process is doing.

Interface: `Status`, whose `show` the loop calls.
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

from utils.run.snapshots import TrainState
from utils.start.option_types import Options
from utils.start.world import World


class Status:
    """The file of this process. It is in memory, because some nodes may have no run directory.

    Write errors are ignored. Readers compare process id and start time to detect the file of a
    killed process.
    """

    def __init__(self, state: TrainState, args: Options, world: World, mode: str, folder: Path):
        self.state, self.figures = state, {}
        self.folder = Path(f"/dev/shm/imagenet-suite-{os.getuid()}")
        self.path = self.folder / f"{socket.gethostname()}-{os.getpid()}.json"
        gpu = None
        if world.device.type == "cuda":
            gpu = f"GPU-{torch.cuda.get_device_properties(world.device).uuid}"
        self.facts = {
            "pid": os.getpid(),
            "started": Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19],
            "run": str(folder.resolve()),
            "mode": mode,
            "arch": args.arch,
            "rank": world.rank,
            "size": world.size,
            "epochs": args.epochs,
            "gpu": gpu,
        }
        # Remove it after errors as well: `launch.run_main` calls finalizers.
        multiprocessing.util.Finalize(None, self.remove, exitpriority=0)

    def show(self, phase: str, parts: dict[str, float] | None = None, **figures: float) -> None:
        """Write what this process is doing. Earlier figures stay until they are replaced.

        ``parts``: the mean seconds per step of each part. In synchronous training, a step takes
        equally long in all processes; its parts show which process is slow.
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
        """Remove the file; call this when the process is about to end."""
        with contextlib.suppress(OSError):
            if _is_private(self.folder):
                self.path.unlink()


def _is_private(folder: Path) -> bool:
    """Return whether the folder belongs to this user and nobody else can write to it. In /dev/shm,
    another user may have created a folder with this name."""
    info = folder.lstat()
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o022
