"""A hang explains itself: one line names the process that all others wait for, and what it does.

Two threads of each process share signs of life through the store of the process group. A sign says
where the process is, and how many collectives it has started. When nothing has moved for the time
limit, a process without signs is frozen or lost; one that has started fewer collectives than the
others is the one that they wait for.

- Interface: `Watchdog`, which `utils.start.world.process_group` starts and asks.
- No thread waits for the main thread, and the main thread does nothing but `utils.start.progress`.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from utils.start import errors
from utils.start.errors import LOST_PEER, ROOT, UserError
from utils.start.progress import main
from utils.start.signals import is_stopped

SIGNS = 12  # in the time limit
LONGEST = 10.0  # seconds between two signs
MISSED = 3  # signs in a row: then a process is silent
MOST_NAMED = 8  # ranks in a message


class Store(Protocol):
    """A store of torch.distributed, of which these threads are the only users."""

    def set(self, key: str, value: str) -> None: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...


@dataclass(frozen=True)
class Sign:
    """A sign of life of a process."""

    number: int
    node: str
    pid: int
    where: str  # in the training
    doing: str = ""  # what its main thread does; empty while it makes progress
    still: float = 0.0  # seconds without progress
    started: tuple[int, ...] = ()  # collectives so far, in each process group

    @classmethod
    def read(cls, text: bytes) -> "Sign":
        values = json.loads(text)
        return cls(**values | {"started": tuple(values["started"])})


@dataclass(frozen=True)
class Place:
    """A process in its job: ``rank`` of ``size``, on the node of this name."""

    rank: int
    size: int
    node: str
    pid: int
    store_in_rank0: bool  # otherwise it is in the launcher, torchrun


class Watchdog:
    """The threads of one process, from its construction to `close`.

    ``started`` counts the collectives of this process, in each process group. ``limit`` is the
    value of ``--dist-timeout``, seconds. When the main thread does not return from a collective
    after that time, ``give_up`` is called with the error; it ends the process.
    """

    def __init__(
        self,
        store: Store,
        place: Place,
        started: Callable[[], tuple[int, ...]],
        limit: float,
        give_up: Callable[[UserError], None],
    ):
        self.store, self.place, self.started = store, place, started
        self.limit, self.give_up = limit, give_up
        self.period = min(LONGEST, limit / SIGNS)
        self.keys = [f"sign_of_life/{rank}" for rank in range(place.size)]
        self.number, self.closing, self.lock = 0, threading.Event(), threading.Lock()
        self.signs: dict[int, Sign] = {}  # the last ones known, by rank
        self._forget()
        self._show(self._sign())  # before any other process can ask for it
        threads = (self._judge_often, self._share_often)
        self.threads = [threading.Thread(target=one, daemon=True) for one in threads]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """End the threads. One may wait for a store that is gone; that one is left behind."""
        self.closing.set()
        for thread in self.threads:
            thread.join(1.0)

    def explain(self) -> str | None:
        """Why the collective has failed in which the main thread waits; None if not by a hang."""
        with self.lock:
            if time.monotonic() - self.moved_at < self.limit / 2:
                return None
            return self._explain()

    # ---- one thread decides

    def _judge_often(self) -> None:
        while not self.closing.wait(self.period):
            with self.lock:
                error = self.judge()
            if error is not None and not self.closing.is_set():
                self.give_up(error)
                return

    def judge(self) -> UserError | None:
        """The error with which to end this process now, or None."""
        now = time.monotonic()
        was_stopped = now - self.judged_at > MISSED * self.period  # or the machine was suspended
        if was_stopped or self.moved != self._position():
            self._forget()
        self.judged_at = now
        # The collective itself may fail first, and `explain` is asked.
        if now - self.moved_at < self.limit + self.period:
            return None
        if self.place.rank in self._behind() and self._longest_wait() < self.limit:
            return None  # slow, but nobody has waited for too long
        if (text := self._explain()) is None:
            return None  # each collective has a time limit of its own
        return UserError(text, on_every_rank=True, code=LOST_PEER)

    def _forget(self) -> None:
        """Progress has been made: what the others have done before does not count."""
        self.moved_at = self.judged_at = self.shared_at = time.monotonic()
        self.moved = self._position()
        self.came: dict[int, float] = {}  # since then: when each rank's last sign was new

    def _position(self) -> tuple[int, str, tuple[int, ...]]:
        """Changes whenever the process makes progress."""
        return main.count, main.where(), self.started()

    # ---- the other one shares; it may wait for the store

    def _share_often(self) -> None:
        while not self.closing.wait(self.period):
            self.share()

    def share(self) -> None:
        """Show a sign of life and, if nothing has moved for long, read those of the others."""
        try:
            self._show(self._sign())
            if not self.signs or time.monotonic() - self.moved_at > 2 * self.period:
                self._note([Sign.read(text) for text in self.store.multi_get(self.keys)])
        except (OSError, RuntimeError):  # the store is gone, or does not answer in time
            return
        self.shared_at = time.monotonic()

    def _sign(self) -> Sign:
        self.number += 1
        still = time.monotonic() - self.moved_at if self.moved == self._position() else 0.0
        doing = what_main_does() if still > self.limit / 3 else ""
        place, where, started = self.place, main.where(), self.started()
        return Sign(self.number, place.node, place.pid, where, doing, still, started)

    def _show(self, sign: Sign) -> None:
        self.store.set(self.keys[self.place.rank], json.dumps(asdict(sign)))

    def _note(self, signs: list[Sign]) -> None:
        now = time.monotonic()
        with self.lock:
            for rank, sign in enumerate(signs):
                if rank not in self.came or self.signs[rank].number != sign.number:
                    self.signs[rank], self.came[rank] = sign, now

    # ---- what follows from the signs

    def _explain(self) -> str | None:
        if not self.signs:
            return None
        silent, behind = self._silent(), self._behind()
        if not (awaited := silent or behind):
            return None
        first, more = awaited[0], awaited[1:]
        sign, age = self.signs[first], time.monotonic() - self.came.get(first, self.shared_at)
        who = f"rank {first} of {self.place.size} on {sign.node}"
        if more:
            who += f" (and {_ranks(more)})"
        waiting = [rank for rank in range(self.place.size) if rank not in awaited]
        rest = f"; {_ranks(waiting)} wait{'s' * (len(waiting) == 1)} for it"
        if silent:
            text = f"{who} has shown no sign of life for {age:.0f} s: {self._why_silent(sign)}"
        else:
            text = f"{who} has made no progress for {sign.still + age:.0f} s {sign.where}"
            text += f": {sign.doing}" if sign.doing else ""
        if self.place.rank in waiting and (silent or main.where() != sign.where):
            rest += f" {main.where()}"
        advice = f"look at that process, then {errors.how_to_continue}"
        return f"{text}{rest} (--dist-timeout {self.limit:g} s); {advice}"

    def _silent(self) -> list[int]:
        """Ranks without a recent sign of life."""
        now, long = time.monotonic(), MISSED * self.period
        if now - self.shared_at > long:  # the store does not answer
            is_elsewhere = self.place.rank != 0 and self.place.store_in_rank0
            # The process that all wait for, if it is known, has ended before the store did.
            return [0] if is_elsewhere and not self._behind() else []
        return [rank for rank in sorted(self.came) if now - self.came[rank] > long]

    def _behind(self) -> list[int]:
        """Ranks that have started fewer collectives than others, though in the same order."""
        if len(self.came) < self.place.size:
            return []
        started = {rank: self.signs[rank].started for rank in sorted(self.signs)}
        started[self.place.rank] = self.started()
        fewest, most = (tuple(map(f, zip(*started.values(), strict=True))) for f in (min, max))
        return [rank for rank, counts in started.items() if counts == fewest != most]

    def _longest_wait(self) -> float:
        """Seconds for which one of the others has made no progress."""
        now, others = time.monotonic(), self.came.keys() - {self.place.rank}
        return max((self.signs[rank].still + now - self.came[rank] for rank in others), default=0.0)

    def _why_silent(self, sign: Sign) -> str:
        if sign.node == self.place.node and is_stopped(sign.pid):
            return f"its process {sign.pid} is stopped, by SIGSTOP or a debugger"
        return "its process is frozen, or its machine or the link to it is down"


# ---- what a process does


def what_main_does() -> str:
    """What the main thread of this process does: who makes the batch that it waits for, or the
    functions in which it is."""
    awaited, frames = main.awaited, frames_of_main()
    in_functions = f"it is in {', called from '.join(frames)}"
    return f"it waits for images; {awaited()}" if awaited is not None else in_functions


def frames_of_main() -> list[str]:
    """The innermost function of the main thread, and the innermost one of this suite."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    if frame is None:
        return []
    described = [_describe(frame)]
    while frame is not None and not _is_ours(Path(frame.f_code.co_filename)):
        frame = frame.f_back
    return list(dict.fromkeys([*described, *([_describe(frame)] if frame else [])]))


def _describe(frame: FrameType) -> str:
    """FUNCTION (FILE:LINE)."""
    path = Path(frame.f_code.co_filename)
    file = path.relative_to(ROOT) if _is_ours(path) else path
    return f"{frame.f_code.co_name} ({file}:{frame.f_lineno})"


def _is_ours(path: Path) -> bool:
    """Whether a file is one of this suite, not of a virtual environment in its folder."""
    return path.is_relative_to(ROOT) and "site-packages" not in path.parts


def _ranks(ranks: Sequence[int]) -> str:
    """ "rank 2", "ranks 0, 2", or their number if there are many."""
    if len(ranks) > MOST_NAMED:
        return f"{len(ranks)} ranks"
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
