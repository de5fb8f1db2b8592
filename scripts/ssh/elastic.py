"""A training whose nodes may fail, node 0 too, and come back: train_on_nodes.sh --elastic MIN:MAX.

This process decides who takes part, so that no node has to hold a meeting point. An attempt is an
ordinary start on the nodes that answer. When one of them is lost, the others end theirs, and the
next attempt continues from the run's latest snapshot, with a pre-flight check as at any start. A
node that answers again is asked in: the attempt ends with a snapshot, and the next one is
on one node more.
"""

import argparse
import queue
import secrets
import threading
import time
from typing import Any

import copying
import hosts
from connection import Node
from hosts import SSH_FAILED, Host, note
from job import HELLO_SECONDS, LOST_SECONDS, SILENT_BEATS, Job
from seats import Attempt, Seat, is_lost

from utils import errors
from utils.errors import UserError

WAIT_SECONDS = 600.0  # for as many nodes as training needs at least
CALL_SECONDS = 20.0  # for a node that was lost to answer
JOIN_SECONDS = 5.0  # others may come back at the same time
SETTLE_SECONDS = 30.0  # an attempt that has just begun is not interrupted for a node
QUICK_SECONDS, QUICK_FAILURES = 120.0, 5  # so many such short attempts in a row are no accident
END_SECONDS = 30.0  # for the other nodes once the first has finished the training


class _Nowhere:
    """A screen for what ssh says about a node that is known to be out of reach."""

    def line(self, *_: Any) -> None:
        pass


class Elastic(Job):
    """`Job`, but the nodes in ``nodes`` change with each attempt. ``limits``: MIN and MAX nodes."""

    def __init__(
        self,
        options: argparse.Namespace,
        machines: list[Host],
        command: list[str],
        limits: tuple[int, int],
    ):
        super().__init__(options, machines, command)
        self.seats = [Seat(host) for host in machines]
        self.least, self.most = limits[0], min(limits[1], len(machines))
        self.name, self.number = secrets.token_hex(4), 0
        self.attempt: Attempt | None = None
        self.over = False
        self.quick = 0  # attempts in a row that failed soon
        self._wait()

    def run(self) -> int:
        """Train until the end, whoever takes part. Returns the job's exit code."""
        self.catch_signals()
        threading.Thread(target=self.beat, daemon=True).start()
        while not self.over:
            self._call()
            try:
                node, what, more = self.events.get(timeout=0.5)
            except queue.Empty:
                pass
            else:
                self._take(node, what, more)
            if not self.over:
                self._gather() if self.attempt is None else self._ask_in()
        for node in self.connected():  # a guard without a job ends with its ssh
            node.ssh.terminate()
        return self.code or 0

    def connected(self) -> list[Node]:
        """All guards: those that train, and those that wait."""
        nodes = [seat.node for seat in self.seats]
        return [node for node in nodes if node is not None and node.code is None]

    @property
    def fetch_from(self) -> Host | None:
        """The host that had rank 0 last; all have the same files."""
        return self.nodes[0].host if self.nodes and self.nodes[0].code != SSH_FAILED else None

    def _wait(self, pause: float = 0.0) -> None:
        """From now on, wait for nodes; begin no sooner than in ``pause`` seconds."""
        self.since = time.monotonic()
        self.not_before, self.next_line = self.since + pause, 2.0

    def _call(self) -> None:
        """Start an ssh to each host that has none, if it is time to, and end those in vain."""
        if self.interrupts:
            return
        now = time.monotonic()
        for seat in self.seats:
            if seat.node is None and not seat.barred and now >= seat.next_call:
                screen = _Nowhere() if seat.failures else self.screen
                seat.node = Node(seat.host, self.options.ssh, screen, self.events)
                seat.called = now
            elif seat.node and not seat.node.hello:
                limit = CALL_SECONDS if seat.failures else HELLO_SECONDS
                if now - seat.called > limit:
                    seat.node.ssh.kill()

    def _take(self, node: Node | None, what: str, more: Any) -> None:
        seat = next((seat for seat in self.seats if node and seat.node is node), None)
        if what == "signal":
            self._interrupt(more)
        elif what == "stop":
            self.sleep()
        elif seat is None:
            pass  # of a node that has left
        elif what == "hello":
            node.screen = self.screen
            if self.options.sync:
                threading.Thread(target=self._sync, args=(node,), daemon=True).start()
            else:
                self._welcome(seat)
        elif what == "copied":
            self._welcome(seat) if more else node.ssh.terminate()
        elif what == "silent":
            self._end_stopped(node)
        elif what == "ended":
            node.code = more
            self._ended(node) if node.started else self._never_began(seat)

    def _sync(self, node: Node) -> None:
        """Copy the code to a node that may have been away for long."""
        try:
            copying.sync(self.options, [node.host])
        except UserError as error:
            errors.show(error)
            self.events.put((node, "copied", False))
        else:
            self.events.put((node, "copied", True))

    def _welcome(self, seat: Seat) -> None:
        if seat.failures:
            note(f"{seat.host.name} is back")
        seat.ready, seat.failures, seat.came = True, 0, time.monotonic()

    def _never_began(self, seat: Seat) -> None:
        """The ssh of a node that does not train has ended."""
        if not seat.failures and not self.interrupts:
            if seat.node.hello:
                why = f"lost the connection to {seat.host.name}"
            elif seat.node.code == SSH_FAILED:
                why = hosts.ssh_failed(self.options.ssh, seat.host)
            else:
                why = f"{seat.host.name} has no working python3, or does not answer"
            note(f"{why}; will keep trying")
        seat.leave(failed=True)

    def _gather(self) -> None:
        """Begin an attempt when all nodes that can be expected are here, or say who is not."""
        now = time.monotonic()
        ready = [seat for seat in self.seats if seat.ready]
        expected = [seat for seat in self.seats if not seat.failures and not seat.barred]
        here = len(ready) >= self.most or len(ready) == len(expected)
        if now >= self.not_before and here and len(ready) >= self.least:
            self._begin(ready[: self.most])
            return
        waited = now - self.since
        missing = [seat.host.name for seat in self.seats if not seat.ready and not seat.barred]
        names = ", ".join(missing) or "more nodes than are left"
        if waited > WAIT_SECONDS and len(ready) < self.least:
            self._finish(
                errors.BAD_INPUT if self.number == 0 else 1,
                f"training needs {self.least} nodes and has waited {WAIT_SECONDS:g} s for {names}",
            )
        elif waited > self.next_line and missing:
            self.next_line = waited + (5 if waited < 60 else 15)
            note(
                f"waiting for {names}: {len(ready)} of at least {self.least} nodes are here "
                f"({waited:.0f} s, at most {WAIT_SECONDS:g})"
            )

    def _begin(self, seats: list[Seat]) -> None:
        self.attempt = Attempt([seat.node for seat in seats])
        self.nodes = self.attempt.nodes
        count = f"{len(seats)} of {len(self.seats)} node{'s' * (len(self.seats) > 1)}"
        again = "again " if self.number else ""
        note(f"training begins {again}on {count}: {self.attempt.names}")
        self.number += 1
        wrong = self.start_on(self.nodes, {"IMAGENET_ELASTIC": f"{self.name}:{self.number}"})
        if wrong:
            self._finish(errors.BAD_INPUT, wrong)

    def _ask_in(self) -> None:
        """End an attempt for a node that is back, so that the next one is on more nodes."""
        now = time.monotonic()
        attempt = self.attempt
        waiting = [seat for seat in self.seats if seat.ready and not seat.node.started]
        if attempt.ending or not waiting or len(attempt.nodes) >= self.most:
            return
        settled = now - attempt.began > SETTLE_SECONDS
        if settled and now - max(seat.came for seat in waiting) > JOIN_SECONDS:
            names = ", ".join(seat.host.name for seat in waiting)
            note(f"stopping with a snapshot, to go on with {names}")
            attempt.joining = True
            self._end()

    def _end(self, kill_after: float | None = None) -> None:
        """Ask the nodes of this attempt to end; their guards see to that, or KILL does."""
        attempt = self.attempt
        attempt.ending = True

        def say(order: bytes) -> None:
            for node in attempt.nodes:
                if node.code is None:
                    node.say(order)

        say(b"TERM\n")
        if kill_after is not None:
            timer = threading.Timer(kill_after, say, (b"KILL\n",))
            timer.daemon = True
            timer.start()

    def _ended(self, node: Node) -> None:
        """A node of this attempt has ended."""
        attempt, name = self.attempt, node.host.name
        if is_lost(node):
            note(f"lost {name}" + ("" if self.interrupts else "; will keep trying to reach it"))
            self._end(LOST_SECONDS)
        elif node.code and not attempt.ending:
            attempt.first = node
            note(f"{name} ended with exit code {node.code}; stopping the rest")
            self._end(LOST_SECONDS)
        elif node is attempt.nodes[0] and node.code == 0:
            self._end(END_SECONDS)
        if all(one.code is not None for one in attempt.nodes):
            self._close(attempt)

    def _close(self, attempt: Attempt) -> None:
        """Decide how to go on after an attempt."""
        self.attempt = None
        lost = [node for node in attempt.nodes if is_lost(node)]
        seats = [seat for seat in self.seats if seat.node in attempt.nodes]
        for seat in seats:
            seat.leave(failed=is_lost(seat.node))
        self._wait()
        codes = [node.code for node in attempt.nodes]
        failed = attempt.first.code if attempt.first else None
        if self.interrupts:
            rest = [code for code in codes if code]
            self._finish(errors.INTERRUPTED if errors.INTERRUPTED in rest else (rest or [0])[0])
        elif codes[0] == 0:
            self._finish(0)
        elif failed == errors.BAD_INPUT and not lost:
            self._leave_out(seats)
        elif lost or attempt.joining:
            for seat in seats:
                seat.trusted = not seat.failures  # what was lost may come back as another machine
            self.quick = 0
        else:
            self._again(attempt, failed)

    def _leave_out(self, seats: list[Seat]) -> None:
        """Bad input ends the job, unless it came with a node that the attempt before had not."""
        new = [seat for seat in seats if not seat.trusted]
        if not new or len(new) == len(seats):
            self._finish(errors.BAD_INPUT)
            return
        for seat in new:
            seat.barred = True
        note(f"going on without {', '.join(seat.host.name for seat in new)} (the reason is above)")

    def _again(self, attempt: Attempt, code: int) -> None:
        """A process has failed, or was stopped on its node: try again, but not for ever."""
        soon = time.monotonic() - attempt.began < QUICK_SECONDS
        self.quick = self.quick + 1 if soon else 1
        if self.quick >= QUICK_FAILURES:
            self._finish(code, f"training has failed {self.quick} times in a row soon after start")
            return
        pause = 5.0 * 2 ** (self.quick - 1)
        note(f"going on in {pause:g} s")
        self._wait(pause)

    def _finish(self, code: int, sentence: str = "") -> None:
        if sentence:
            errors.show(UserError(sentence))
        self.code, self.over = code, True

    def _interrupt(self, signum: int) -> None:
        if self.attempt is None:
            code = errors.INTERRUPTED if self.number else 128 + signum
            self._finish(code, "interrupted while waiting for nodes")
            return
        self.attempt.ending = True
        super()._interrupt(signum)

    def _end_stopped(self, node: Node) -> None:
        """A guard is connected but gives no sign of life."""
        if not node.started:
            node.ssh.kill()
            return
        note(f"no sign of life from {node.host.name}, {SILENT_BEATS} times: ending what runs there")
        self._end(LOST_SECONDS)
        wake = (self.options.ssh, HELLO_SECONDS)
        threading.Thread(target=node.wake_to_end, args=wake, daemon=True).start()
