"""When to stop before the last epoch: time limit, signals, spot notices, agreed on by all ranks."""

import contextlib
import enum
import logging
import math
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import torch
import torch.distributed as dist

from utils.launch.world import World


class Reason(str, enum.Enum):
    """Why a run ended: ``finished_because`` in summary.json."""

    EPOCHS = "epochs"
    DESIRED_ACC = "desired_acc"
    TRAIN_TIME = "train_time"
    INTERRUPTED = "interrupted"
    BAD_FILES = "bad_files"
    DIVERGED = "diverged"
    EVALUATED = "evaluated"  # -e
    DUMMY = "dummy"  # --dummy


# The reasons on which ranks vote, by rising weight: the maximum decides.
_VOTES = (None, Reason.TRAIN_TIME, Reason.INTERRUPTED, Reason.BAD_FILES, Reason.DIVERGED)
PROMPT = 0.5  # seconds; the ranks ask each other at least so often, where a step is shorter
FARTHEST = 8  # calls of `StopRequest.poll` from one vote to the next, at most
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# EC2's metadata service (IMDSv2).
SPOT_SERVICE = "http://169.254.169.254"
SPOT_INTERVAL = 5.0  # seconds between two questions; AWS advises this
_SPOT_NOTICE = "/latest/meta-data/spot/instance-action"
_SPOT_ADVICE = "/latest/meta-data/events/recommendations/rebalance"
# The service is never behind the proxy that the environment may name.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

log = logging.getLogger(__name__)


class StopRequest:
    """Stops all ranks at the same step.

    SIGTERM, SIGUSR1 (sent by Slurm before its time limit) and the first Ctrl-C request the end; a
    second Ctrl-C ends the process at once. ``hours`` is the limit on training time, of which
    ``elapsed`` seconds are used up already; rank 0's clock decides.
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
        self.code = 0  # this process's own vote
        self.interrupts = 0
        self.pending: tuple[Any, torch.Tensor] | None = None
        self.every = 1  # calls of `poll` from one vote to the next, the same in all ranks
        self.fresh = True  # a phase has begun: its calls may be further apart than those before
        self.calls, self.voted = 0, time.monotonic()  # since the last vote, and when that was
        self.closed = threading.Event()
        for signum in _SIGNALS:
            signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: Any) -> None:
        self.ask(Reason.INTERRUPTED)
        if signum == signal.SIGINT:
            self.interrupts += 1
            if self.interrupts > 1:
                os._exit(128 + signum)

    def ask(self, reason: Reason) -> None:
        """Vote, in this rank, for the end of the run."""
        self.code = max(self.code, _VOTES.index(reason))

    def begin_phase(self) -> None:
        """Training or evaluation begins, in all ranks: vote at each call of `poll`, at first."""
        self.every, self.fresh = 1, True

    def poll(self) -> Reason | None:
        """Reason to stop, or None; all ranks must call it equally often and get the same answer.

        Moves `snapshot_due` on as well. The ranks agree by an all-reduce of three numbers on the
        CPU which runs while the next step computes, so the answer is one call old and nobody
        waits. Where calls follow each other in less than half of `PROMPT` they do so at every
        second to eighth call.
        """
        self.calls += 1
        if self.world.size == 1:
            due = self._look_at_clock()
            self.reason, self.snapshot_due = _VOTES[self.code], due
            return self.reason
        agreed, self.snapshot_due = self._finish_pending()
        self.reason = _VOTES[agreed]
        if self.calls < self.every and self.reason is None:
            return None
        due = self._look_at_clock()
        vote = torch.tensor([self.code, int(due), self._wanted_distance()])
        self.calls, self.voted = 0, time.monotonic()
        work = dist.all_reduce(vote, dist.ReduceOp.MAX, group=self.world.control, async_op=True)
        self.pending = (work, vote)
        return self.reason

    def _look_at_clock(self) -> bool:
        """Whether a snapshot is due, by rank 0's clock; requests the end when the time is up."""
        now = time.monotonic()
        if self.deadline is not None and self.world.is_main and now >= self.deadline:
            self.ask(Reason.TRAIN_TIME)
        due = self.world.is_main and now - self.last_snapshot >= 60 * self.minutes
        if due:
            self.last_snapshot = now
        return due

    def _wanted_distance(self) -> int:
        """Calls until the next vote but one, as rank 0 sees it; nothing in the others."""
        if not self.world.is_main:
            return 0
        seconds = (time.monotonic() - self.voted) / self.calls
        return max(1, min(FARTHEST, 2 * self.every, int(PROMPT / max(seconds, 1e-6))))

    def _finish_pending(self) -> tuple[int, bool]:
        if self.pending is None:
            return 0, False
        work, vote = self.pending
        self.pending = None
        work.wait()
        code, due, every = vote.tolist()
        if not self.fresh:
            self.every = every
        self.fresh = False
        return code, bool(due)

    def end_training(self) -> None:
        """Training has ended: from now on only signals request the end.

        The handlers stay until the process exits, so that no signal interrupts what is written.
        """
        self._finish_pending()
        self.deadline, self.reason = None, None
        interrupted = _VOTES.index(Reason.INTERRUPTED)
        self.code = interrupted if self.code >= interrupted else 0

    def close(self) -> None:
        """Finish the vote that is under way, and stop watching the spot service."""
        self._finish_pending()
        self.closed.set()

    def watch_spot(self, url: str) -> None:
        """In a thread, ask the metadata service at ``url`` and stop when EC2 reclaims this node.

        A service that does not answer is reported once, and polled on silently.
        """
        arguments = (url.rstrip("/"),)
        threading.Thread(target=self._watch_spot, args=arguments, daemon=True).start()

    def _watch_spot(self, url: str) -> None:
        reported = advised = False
        while not self.closed.is_set():
            try:
                notice, advice = _ask_spot(url)
                if notice is not None:
                    log.info(f"spot notice: {notice[:100]}: stopping with a snapshot")
                    self.ask(Reason.INTERRUPTED)
                    return
                if advice and not advised:
                    advised = True
                    log.info(
                        "note: EC2 reports an elevated risk of a spot interruption of this node"
                    )
            except Exception as fault:  # OSError, HTTPException, nonsense: none may end the thread
                if not reported:
                    reported = True
                    reason = getattr(fault, "reason", None) or fault
                    log.warning(f"{url} did not answer ({reason}): will keep polling silently")
            self.closed.wait(SPOT_INTERVAL)


def _ask_spot(url: str) -> tuple[str | None, str | None]:
    """The notice of an interruption and the advice to leave the node; None for what is not there.

    Raises: OSError when the service does not answer as it must.
    """

    def ask(path: str, method: str, name: str, value: str | None) -> str | None:
        headers = {f"X-aws-ec2-metadata-{name}": value}
        request = urllib.request.Request(url + path, method=method, headers=headers)
        try:
            with _open(request, timeout=2.0) as answer:  # the service is on the same host
                return answer.read().decode()
        except urllib.error.HTTPError as fault:
            with contextlib.closing(fault):
                if fault.code != 404:
                    raise
        return None

    token = ask("/latest/api/token", "PUT", "token-ttl-seconds", "60")
    return ask(_SPOT_NOTICE, "GET", "token", token), ask(_SPOT_ADVICE, "GET", "token", token)
