"""When to stop before the last epoch: time limit and signals, agreed on by all ranks."""

import enum
import math
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from utils.processes.distributed import World


class Reason(str, enum.Enum):
    """Why a training ended; the values stand in summary.json as ``finished_because``."""

    EPOCHS = "epochs"
    DESIRED_ACC = "desired_acc"
    TRAIN_TIME = "train_time"
    INTERRUPTED = "interrupted"
    BAD_FILES = "bad_files"
    DIVERGED = "diverged"
    EVALUATED = "evaluated"  # -e
    DUMMY = "dummy"  # --dummy


# Those on which the ranks vote, by rising weight: the maximum counts.
_VOTES = (None, Reason.TRAIN_TIME, Reason.INTERRUPTED, Reason.BAD_FILES, Reason.DIVERGED)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Tells all ranks, at the same step, that the run should end, and why.

    SIGTERM, SIGUSR1 (sent by Slurm before its time limit) and the first Ctrl-C ask for the end; a
    second Ctrl-C ends the process at once. ``hours`` is the limit on training time, of which
    ``elapsed`` seconds are used up already; rank 0's clock counts.
    """

    def __init__(
        self, world: World, hours: float | None, elapsed: float, minutes: float = math.inf
    ):
        """``minutes``: how often `snapshot_due` comes true, in all ranks at the same step."""
        self.world = world
        self.minutes, self.last_snapshot = minutes, time.monotonic()
        self.snapshot_due = False
        self.deadline = time.monotonic() + hours * 3600 - elapsed if hours is not None else None
        self.reason: Reason | None = None  # what the last poll said
        self.code = 0  # this process's own wish
        self.interrupts = 0
        self.pending: tuple[Any, torch.Tensor] | None = None
        for signum in _SIGNALS:
            signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: Any) -> None:
        self.ask(Reason.INTERRUPTED)
        if signum == signal.SIGINT:
            self.interrupts += 1
            if self.interrupts > 1:
                os._exit(128 + signum)

    def ask(self, reason: Reason) -> None:
        """Wish for the end of the run, as far as this rank is concerned."""
        self.code = max(self.code, _VOTES.index(reason))

    def poll(self) -> Reason | None:
        """Reason to stop, or None; all ranks must call it equally often and get the same answer.

        Moves `snapshot_due` on as well. The ranks agree by an all-reduce of two numbers on the CPU
        which runs while the next step computes, so the answer is one call old and nobody waits.
        """
        if self.deadline is not None and self.world.is_main and time.monotonic() >= self.deadline:
            self.ask(Reason.TRAIN_TIME)
        due = self.world.is_main and time.monotonic() - self.last_snapshot >= 60 * self.minutes
        if due:
            self.last_snapshot = time.monotonic()
        if self.world.size == 1:
            self.reason, self.snapshot_due = _VOTES[self.code], due
            return self.reason
        agreed, self.snapshot_due = self._finish_pending()
        vote = torch.tensor([self.code, int(due)])
        work = dist.all_reduce(vote, dist.ReduceOp.MAX, group=self.world.control, async_op=True)
        self.pending = (work, vote)
        self.reason = _VOTES[agreed]
        return self.reason

    def _finish_pending(self) -> tuple[int, bool]:
        if self.pending is None:
            return 0, False
        work, vote = self.pending
        self.pending = None
        work.wait()
        code, due = vote.tolist()
        return code, bool(due)

    def close(self) -> None:
        """Finish what is under way between the ranks; put the default signal handlers back."""
        self._finish_pending()
        for signum in _SIGNALS:
            default = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
            signal.signal(signum, default)
