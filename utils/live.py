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
from torch import Tensor, nn

FOLDER = Path("/dev/shm") / f"imagenet-suite-{os.getuid()}"


class Pace:
    """Times a process's own part of a step: forward, and backward until its gradients are there.

    In synchronous training every process shows the same images/s, that of the slowest, since all
    wait for all gradients. What differs is how long each computes before it has to wait. The clock
    starts when the bare model is called (DDP has shared its buffers by then) and stops when the
    gradient of the model's first parameter, the last that backward reaches, has been computed, and
    before any all-reduce is waited for. On a GPU both are events in its stream, which no step waits
    for. (With --sync-bn the forward pass itself waits for the others.)
    """

    def __init__(self, model: nn.Module, device: torch.device):
        self.device = device
        self.due = True  # the next step is to be timed
        self.marks: list[Any] = []
        self.seconds: float | None = None
        first = next(one for one in model.parameters() if one.requires_grad)
        self.hooks = [
            model.register_forward_pre_hook(self._begin),
            first.register_post_accumulate_grad_hook(self._end),
        ]

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        if self.due and model.training:
            self.marks = [self._mark()]

    def _end(self, parameter: Tensor) -> None:
        if self.due and self.marks:
            self.marks = [self.marks[0], self._mark()]
            self.due = False

    def read(self) -> float | None:
        """Seconds of the step that was timed last, if there is one; lets the next be timed."""
        if len(self.marks) == 2:
            begin, end = self.marks
            if self.device.type != "cuda":
                self.seconds = end - begin
            elif end.query():
                self.seconds = begin.elapsed_time(end) / 1000
        self.marks, self.due = [], True
        return self.seconds

    def close(self) -> None:
        """Leave the model as it was."""
        for hook in self.hooks:
            hook.remove()


class Live:
    """The file of this process. What cannot be written is left out: it never ends a training."""

    def __init__(self, job: Any):
        self.job, world = job, job.world
        self.pace = Pace(job.state.model, world.device)
        self.path = FOLDER / f"{socket.gethostname()}-{os.getpid()}.json"
        self.last = (-1, 0.0, 0, 0.0)  # epoch; in it: seconds, steps, seconds waited for data
        self.facts = {
            "pid": os.getpid(),
            "started": Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19],
            "host": socket.gethostname(),
            "run": str(job.run.folder.resolve()),
            "mode": job.run.mode,
            "arch": job.args.arch,
            "rank": world.rank,
            "size": world.size,
            "local_rank": world.local_rank,
            "epochs": job.args.epochs,
            "gpu": None,
        }
        if world.device.type == "cuda":
            self.facts["gpu"] = f"GPU-{torch.cuda.get_device_properties(world.device).uuid}"
        self.show("starting")

    def show(self, phase: str, **values: Any) -> None:
        """Write what this process is at: its ``phase``, and figures, which stay until new ones."""
        state = self.job.state
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
        state, sampler, waited = self.job.state, self.job.train.sampler, self.job.train.waited
        before = self.last if self.last[0] == state.epoch else (state.epoch, 0.0, 0, 0.0)
        self.last = (state.epoch, seconds, steps, waited)
        new = steps - before[2]
        self.show(
            "training",
            steps=sampler.steps_per_epoch,
            images_per_s=new * sampler.global_batch / (seconds - before[1]),
            data_seconds=(waited - before[3]) / new,
            compute_seconds=self.pace.read(),
        )

    def close(self) -> None:
        """The run has ended."""
        self.pace.close()
        self.path.unlink(missing_ok=True)
