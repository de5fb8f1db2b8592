"""What each process of a run is doing now, in a small file that scripts/status.sh reads.

The file lies in memory (/dev/shm) of the node that the process runs on, as only the node of rank 0
has the run directory. It is written when a step line is due, and removed at the end; a reader tells
by process number and start time whether a file was left by a process that was killed.
"""

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch

FOLDER = Path("/dev/shm") / f"imagenet-suite-{os.getuid()}"


class StatusFile:
    """The file of this process. What cannot be written is left out: it never ends a training."""

    def __init__(self, session: Any):
        self.session, world = session, session.world
        self.path = FOLDER / f"{socket.gethostname()}-{os.getpid()}.json"
        self.facts = {
            "pid": os.getpid(),
            "started": Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19],
            "host": socket.gethostname(),
            "run": str(session.run.folder.resolve()),
            "mode": session.run.mode,
            "arch": session.args.arch,
            "rank": world.rank,
            "size": world.size,
            "local_rank": world.local_rank,
            "epochs": session.args.epochs,
            "gpu": None,
        }
        if world.device.type == "cuda":
            self.facts["gpu"] = f"GPU-{torch.cuda.get_device_properties(world.device).uuid}"
        self.show("starting")

    def show(self, phase: str, **values: Any) -> None:
        """Write what this process is at: its ``phase``, and figures, which stay until new ones."""
        state = self.session.state
        self.facts |= values
        place = {"phase": phase, "epoch": state.epoch, "step": state.step, "at": time.time()}
        text = json.dumps(self.facts | place)
        with contextlib.suppress(OSError):
            FOLDER.mkdir(mode=0o700, exist_ok=True)
            new = self.path.with_suffix(".tmp")
            new.write_text(text)
            os.replace(new, self.path)

    def close(self) -> None:
        """The run has ended."""
        self.path.unlink(missing_ok=True)
