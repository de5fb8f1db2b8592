"""One process's part in a run, from its start or resume to its end."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils import samplers
from utils.loaders import Batches, Loaders
from utils.run_directory import Run
from utils.snapshots import SnapshotWriter, TrainState
from utils.stopping import StopRequest
from utils.watch import Watch
from utils.world import World

# train_step(images, targets, weight, update) -> (loss, logits), documented in each script.
TrainStep = Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
Predict = Callable[[Tensor], Tensor]  # images to logits, with the mode's precision


@dataclass
class Session:
    """A script's options and what it has built with them.

    The fields after ``resumed`` are set from `loop.begin` to `loop.end`.
    """

    args: Any
    world: World
    run: Run
    loaders: Loaders
    state: TrainState
    resumed: bool = False  # from a full snapshot
    stop: StopRequest | None = None
    watch: Watch | None = None
    figures: dict[str, float] = field(default_factory=dict)  # of `show_status`
    snapshots: SnapshotWriter | None = None  # in rank 0 alone
    print_freq: int = 0  # steps between printed lines, the same in all ranks
    epochs: int = 0  # finished in this session
    epoch_began: float = 0.0  # time.monotonic()

    @property
    def train(self) -> Batches:
        """The training batches."""
        assert self.loaders.train is not None
        return self.loaders.train

    @property
    def global_batch(self) -> int:
        """Images per optimiser step over all processes; without training data, what -b asks for."""
        if self.loaders.train is not None:
            return self.train.sampler.global_batch
        args = self.args
        return samplers.global_batch(args.batch_size, self.world.size, args.accum_steps)


def status_file() -> Path:
    """This process's file for scripts/ssh/status.py, in memory, as other nodes may have no run
    directory."""
    return Path(f"/dev/shm/imagenet-suite-{os.getuid()}/{socket.gethostname()}-{os.getpid()}.json")


def show_status(session: Session, phase: str, **figures: Any) -> None:
    """Write what this process is doing, in ``phase``; figures stay until new ones come.

    A reader tells by process number and start time whether a killed process has left the file. What
    cannot be written is left out.
    """
    world, state, device = session.world, session.state, session.world.device
    session.figures |= figures
    gpu = torch.cuda.get_device_properties(device).uuid if device.type == "cuda" else None
    facts = {
        "pid": os.getpid(),
        "started": Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19],
        "run": str(session.run.folder.resolve()),
        "mode": session.run.mode,
        "arch": session.args.arch,
        "rank": world.rank,
        "size": world.size,
        "epochs": session.args.epochs,
        "gpu": f"GPU-{gpu}" if gpu else None,
        "phase": phase,
        "epoch": state.epoch,
        "step": state.step,
        "at": time.time(),
        **session.figures,
    }
    with contextlib.suppress(OSError):
        path = status_file()
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.with_suffix(".tmp").write_text(json.dumps(facts))
        path.with_suffix(".tmp").replace(path)
