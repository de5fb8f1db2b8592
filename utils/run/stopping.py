"""When to stop before the last epoch, and why; all ranks agree."""

import contextlib
import enum
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from utils.start import signals
from utils.start.errors import UserError
from utils.start.world import World


class Reason(str, enum.Enum):
    """Why a run ended: ``finished_because`` in summary.json."""

    EPOCHS = "epochs"
    DESIRED_ACC = "desired_acc"
    TRAIN_TIME = "train_time"
    INTERRUPTED = "interrupted"
    BAD_FILES = "bad_files"
    DIVERGED = "diverged"
    EVALUATED = "evaluated"  # -e
    UNSAVED = "unsaved"  # it has ended, but the same command has to save its last snapshot


# How the closing line of a run ends, if there is no error. The last two need advice appended.
WHY = {
    Reason.EPOCHS: "all epochs done",
    Reason.DESIRED_ACC: "target accuracy reached",
    Reason.UNSAVED: "the last snapshot could not be written",
    Reason.TRAIN_TIME: "time limit reached; to train on, raise --train-time (TRAIN_HOURS) and ",
    Reason.INTERRUPTED: "interrupted by a signal; to continue, ",
}
# Reasons that a single rank may notice, in rising priority: the maximum of the votes decides.
_VOTES = (None, Reason.TRAIN_TIME, Reason.INTERRUPTED, Reason.BAD_FILES, Reason.DIVERGED)
SLOW = 2.0  # seconds between votes; a vote takes milliseconds


class StopRequest:
    """Stops all ranks at the same step. Holds the reason and the error with which a run ends.

    SIGTERM, SIGHUP, SIGUSR1 (sent by Slurm before its time limit) and the first Ctrl-C end the run;
    a second Ctrl-C ends the process at once. Ignored signals stay ignored. ``hours`` is the limit
    on training time, of which ``elapsed`` seconds have passed already; rank 0's clock decides.
    """

    def __init__(
        self,
        world: World,
        hours: float | None,
        elapsed: float,
        minutes: float = math.inf,
        is_busy: Callable[[], bool] = lambda: False,
    ):
        """``minutes``: how often `snapshot_due` becomes True, in all ranks. No snapshot is due
        while rank 0 ``is_busy`` writing the last one, as on a slow disk."""
        self.world = world
        self.minutes, self.last_snapshot, self.is_busy = minutes, time.monotonic(), is_busy
        self.snapshot_due = False
        self.deadline = math.inf if hours is None else time.monotonic() + hours * 3600 - elapsed
        self.reason: Reason | None = None  # the same in all ranks
        self.error: UserError | None = None  # to raise at the end, in all ranks
        self.code = 0  # this process's own vote
        self.pending: tuple[Any, torch.Tensor] | None = None
        self.waits = False  # whether all ranks wait for each vote
        self.voted = time.monotonic()
        self.closed = threading.Event()
        signals.handle(self._on_signal)
        # Slurm sends it to all processes, so they are started with it ignored: see train.sbatch.
        signal.signal(signal.SIGUSR1, self._on_signal)
        signals.start_is_over()

    def _on_signal(self, signum: int, frame: Any) -> None:
        self.ask(Reason.INTERRUPTED)
        if self.world.local_rank == 0:  # os.write, as a signal may interrupt print or logging
            # A launcher passes each signal on as SIGTERM: the user may have pressed Ctrl-C.
            passed_on = signum == signal.SIGTERM and signals.has_launcher()
            name = "" if passed_on else f"{signal.Signals(signum).name}: "
            text = f"{name}stopping after this step, with a snapshot\n"
            with contextlib.suppress(OSError):  # on a terminal, below the bar and an echoed ^C
                os.write(1, ("\n" * os.isatty(1) + text).encode())
        if signum == signal.SIGINT:
            signal.signal(signum, lambda *_: os._exit(128 + signum))

    def ask(self, reason: Reason, error: UserError | None = None) -> None:
        """Request the end of the run. One rank alone votes for it; all ranks together decide it.

        With an ``error``, or for a reason on which the ranks do not vote, all ranks must ask: the
        first such reason is final at once.
        """
        if reason in _VOTES and error is None:
            self.code = max(self.code, _VOTES.index(reason))
        else:
            self.reason, self.error = self.reason or reason, error or self.error

    def begin_phase(self) -> None:
        """Training or evaluation begins, in all ranks: the first `poll` waits for its vote."""
        self._finish_vote()
        self.waits = True

    def poll(self) -> Reason | None:
        """Reason to stop, or None; all ranks must call it equally often and get the same answer.

        Updates `snapshot_due` as well. The ranks agree by an all-reduce of three numbers on the CPU
        that runs while the next step computes: the answer is one call old, and no rank waits. If
        steps take longer than `SLOW`, all ranks wait for the answer, as it would come one long step
        too late.
        """
        self.snapshot_due = False
        if self.world.size == 1:
            self.snapshot_due = self._look_at_clock()
            self.reason = self.reason or _VOTES[self.code]
            return self.reason
        self._finish_vote()
        if self.reason is None:
            due = self._look_at_clock()
            now = time.monotonic()
            is_slow = self.world.is_main and now - self.voted > SLOW  # by rank 0's clock
            self.voted = now
            vote = torch.tensor([self.code, int(due), int(is_slow)])
            work = dist.all_reduce(vote, dist.ReduceOp.MAX, group=self.world.control, async_op=True)
            self.pending = (work, vote)
            if self.waits:
                self._finish_vote()
        return self.reason

    def is_time_over(self) -> bool:
        """Whether the time limit has passed, by this process's clock; rank 0's decides."""
        return time.monotonic() >= self.deadline

    def _look_at_clock(self) -> bool:
        """Whether a snapshot is due by rank 0's clock. After the time limit, ask for the end."""
        now = time.monotonic()
        if self.world.is_main and self.is_time_over():
            self.ask(Reason.TRAIN_TIME)
        due = self.world.is_main and now - self.last_snapshot >= 60 * self.minutes
        due = due and not self.is_busy()
        if due:
            self.last_snapshot = now
        return due

    def _finish_vote(self) -> None:
        if self.pending is not None:
            work, vote = self.pending
            self.pending = None
            work.wait()
            code, due, self.waits = vote.tolist()
            self.reason, self.snapshot_due = self.reason or _VOTES[code], bool(due)

    def end_training(self) -> Reason:
        """End training. Returns: the reason. From now on, only signals can request an end.

        The handlers stay until the process exits, so that no signal interrupts a write.
        """
        self._finish_vote()
        reason, self.reason, self.deadline = self.reason or Reason.EPOCHS, None, math.inf
        if _VOTES[self.code] is Reason.TRAIN_TIME:
            self.code = 0
        return reason

    def close(self) -> None:
        """Finish the pending vote, and end threads that wait for a reason to stop."""
        self._finish_vote()
        self.closed.set()
