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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from utils.train.step_time import StepTimes

FOLDER = Path("/dev/shm") / f"imagenet-suite-{os.getuid()}"


class StatusFile:
    """The file of this process. What cannot be written is left out: it never ends a training."""

    def __init__(self, session: Any):
        self.session, world = session, session.world
        self.path = FOLDER / f"{socket.gethostname()}-{os.getpid()}.json"
        self.last = (-1, 0.0, 0)  # epoch; in it: seconds, steps
        self.times = StepTimes()  # of this epoch
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

    def training(self, seconds: float, steps: int) -> None:
        """A line is due, ``steps`` steps and ``seconds`` into this epoch: write what is new."""
        state, sampler = self.session.state, self.session.train.sampler
        if self.last[0] != state.epoch:
            self.last, self.times = (state.epoch, 0.0, 0), StepTimes()
        total = replace(self.session.watch.timer.total)
        since, self.times = total - self.times, total
        new, spent = steps - self.last[2], seconds - self.last[1]
        self.last = (state.epoch, seconds, steps)
        self.show(
            "training",
            steps=sampler.steps_per_epoch,
            images_per_s=new * self.session.global_batch / spent,
            # A process's own part: in synchronous training all show the images/s of the slowest.
            **({"data_seconds": since.data / since.steps} if since.steps else {}),
            **({"compute_seconds": since.own / since.steps} if since.steps else {}),
        )

    def close(self) -> None:
        """The run has ended."""
        self.path.unlink(missing_ok=True)
