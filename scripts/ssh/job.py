"""A job on several nodes: attempt after attempt, from the first connection to the exit code.

This process decides which nodes take part, so that no node has to hold a rendezvous. An attempt is
an ordinary start on the nodes that answer. With ``again`` (--elastic), when a node is lost, the
others end theirs, and the next attempt resumes from the run's latest snapshot; a node that answers
again is added: the attempt ends with a snapshot, and the next one is on one node more. Without, all
nodes have to answer, and there is one attempt.

How nodes are reached is up to a `Transport`: ssh in launcher.py, Ray in scripts/examples.
"""

import argparse
import json
import os
import queue
import shlex
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import guard
from hosts import SSH_FAILED, Host, note

from utils import errors
from utils.errors import UserError

CALL_SECONDS = 30.0  # for a node to answer
LOST_SECONDS = 6.0  # for the others to end once a node has failed: they cannot agree on a snapshot
END_SECONDS = 30.0  # for the other nodes once the first has finished
JOIN_SECONDS = 5.0  # other nodes may come back at the same time
SETTLE_SECONDS = 30.0  # an attempt that has just begun is not interrupted for a node
QUICK_SECONDS, QUICK_FAILURES = 120.0, 5  # so many such short attempts in a row are no accident
FIRST_PAUSE, LONGEST_PAUSE = 15.0, 60.0  # between attempts to reach a lost node
_HELLO = guard.HELLO.encode()
_COLOURS = (36, 33, 35, 32, 34, 31)  # cyan, yellow, magenta, green, blue, red


class Screen:
    """Standard output and error of this process, shared by all nodes, one line at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.names: list[str] = []

    def line(self, name: str, text: bytes, stream: Any = None) -> None:
        """Show a line from a node; it is dropped if nobody reads our output any more."""
        stream = stream or sys.stdout
        with self.lock, suppress(OSError):
            if name not in self.names:
                self.names.append(name)
            label = f"[{name}]".ljust(max(map(len, self.names)) + 2)
            if stream.isatty() and "NO_COLOR" not in os.environ:
                colour = _COLOURS[self.names.index(name) % len(_COLOURS)]
                label = f"\033[{colour}m{label}\033[0m"
            stream.buffer.write(label.encode() + b" " + text.rstrip(b"\r\n") + b"\n")
            stream.flush()


class Node:
    """A host and the guard on it. A transport's own kind adds how to `say` and `close`.

    Its events go to the job's queue: (node, "hello", None), then (node, "ended", exit code).
    """

    def __init__(self, host: Host, job: "Job", quiet: bool):
        self.host, self.job, self.quiet = host, job, quiet
        self.hello: dict | None = None
        self.started = False
        self.code: int | None = None

    def say(self, order: bytes) -> None:
        """Send an order to the guard; one that is gone will be reported as ended."""
        raise NotImplementedError

    def close(self) -> None:
        """End the connection, and with it the guard."""
        raise NotImplementedError

    def missing(self) -> str:
        """Why there is no guard, or no longer one, although no job was started."""
        return f"{self.host.name} does not answer"

    def take(self, line: bytes, stream: Any) -> None:
        """Show a line of output, or understand the guard's first one."""
        if self.hello is None and line.startswith(_HELLO):
            self.hello, self.quiet = json.loads(line[len(_HELLO) :]), False
            self.job.events.put((self, "hello", None))
        elif not self.quiet:
            self.job.screen.line(self.host.name, line, stream)

    @property
    def lost(self) -> bool:
        """Whether the connection has ended without an exit code of the guard's."""
        return self.code == SSH_FAILED or (self.code or 0) < 0

    @property
    def signal(self) -> str | None:
        """The signal that ended the processes there; as shells and as Python's exit report it."""
        with suppress(ValueError, TypeError):
            return signal.Signals(self.code - 128 if self.code < 192 else 256 - self.code).name
        return None

    @property
    def outcome(self) -> int:
        """Its exit code, as the job reports it."""
        return errors.LOST_PEER if self.lost or self.signal else self.code


class Transport(Protocol):
    """How nodes are found and reached."""

    wait_seconds: float  # for as many nodes as the job needs at least

    def hosts(self) -> list[Host]:
        """All that there are now."""

    def connect(self, host: Host, job: "Job", quiet: bool) -> Node:
        """Start a guard on a host; ``quiet``: do not show why that fails."""

    def prepare(self, host: Host) -> None:
        """Make ready for an attempt. Raises: `UserError`."""


@dataclass
class Seat:
    """A host, whether it takes part or not; times by the monotonic clock."""

    host: Host
    node: Node | None = None
    ready: bool = False  # the guard waits for a job
    since: float = 0.0  # ... or for an answer
    next_call: float = 0.0
    failures: int = 0  # since it last answered
    trusted: bool = False  # it was in an attempt that began well, and has not been lost since
    barred: bool = False

    def leave(self, failed: bool) -> None:
        """The connection has ended: call again, at once or, after a failure, later."""
        self.node, self.ready = None, False
        self.failures = self.failures + 1 if failed else 0
        pause = min(FIRST_PAUSE * 2 ** (self.failures - 1), LONGEST_PAUSE) if failed else 0.0
        self.next_call = time.monotonic() + pause


@dataclass
class Attempt:
    """A start of the script on ``nodes`` (by rank)."""

    nodes: list[Node]
    began: float = field(default_factory=time.monotonic)
    ending: bool = False  # its nodes have been told to end
    joining: bool = False  # ... to add a node that is back
    first: Node | None = None  # the first that failed


class Job:
    """Runs ``command`` on from MIN to MAX (``limits``) nodes; see the top of this file."""

    def __init__(
        self,
        options: argparse.Namespace,  # dir, env, grace, port, python
        command: list[str],
        transport: Transport,
        limits: tuple[int, int],
        again: bool,
    ):
        self.options, self.command, self.transport = options, command, transport
        (self.least, self.most), self.again = limits, again
        self.screen = Screen()
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.seats: list[Seat] = []
        self.number = 0  # of attempts so far
        self.attempt: Attempt | None = None
        self.nodes: list[Node] = []  # of the latest attempt
        self.interrupts = 0
        self.quick = 0  # attempts in a row that failed soon
        self.code: int | None = None  # of the job, once it is over
        self._wait()

    def run(self) -> int:
        """Train until the end. Returns the job's exit code."""
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, lambda number, _: self.events.put((None, "signal", number)))
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # nodes end when this process is silent
        threading.Thread(target=self._beat, daemon=True).start()
        while self.code is None:
            self._call()
            with suppress(queue.Empty):
                self._take(*self.events.get(timeout=0.5))
            if self.code is None:
                self._gather() if self.attempt is None else self._add()
        for node in self._connected():  # a guard without a job ends with its connection
            node.close()
        return self.code

    def _connected(self) -> list[Node]:
        """All guards: those with a job, and those that wait."""
        nodes = [seat.node for seat in list(self.seats)]
        return [node for node in nodes if node is not None and node.code is None]

    def _beat(self) -> None:
        """Send heartbeats, for ever."""
        while True:
            time.sleep(guard.HEARTBEAT_SECONDS)
            for node in self._connected():
                node.say(b"\n")

    def _wait(self, pause: float = 0.0) -> None:
        """From now on, wait for nodes; begin no sooner than in ``pause`` seconds."""
        self.since = time.monotonic()
        self.not_before, self.next_line = self.since + pause, 2.0

    def _call(self) -> None:
        """Connect to each host that is not connected, if it is time to; give up those in vain."""
        if self.interrupts:
            return
        now, hosts = time.monotonic(), self.transport.hosts()
        self.seats = [seat for seat in self.seats if seat.node or seat.host in hosts]
        known = [seat.host for seat in self.seats]
        self.seats += [Seat(host) for host in hosts if host not in known]
        for seat in self.seats:
            if seat.node is None and not seat.barred and now >= seat.next_call:
                seat.node = self.transport.connect(seat.host, self, quiet=seat.failures > 0)
                seat.since = now
            elif seat.node and not seat.node.hello and now - seat.since > CALL_SECONDS:
                seat.node.close()

    def _take(self, node: Node | None, what: str, more: Any) -> None:
        """Handle an event."""
        seat = next((seat for seat in self.seats if node and seat.node is node), None)
        if what == "signal":
            self._interrupt(more)
        elif seat is None:
            pass  # of a node that has left
        elif what == "hello":
            threading.Thread(target=self._prepare, args=(node,), daemon=True).start()
        elif what == "ready":
            if seat.failures:
                note(f"{seat.host.name} is back")
            seat.ready, seat.failures, seat.since = True, 0, time.monotonic()
        elif what == "unready":
            if self.again:
                errors.show(UserError(more))
                node.close()
            else:
                self._finish(errors.BAD_INPUT, more)
        elif what == "ended":
            node.code = more
            self._ended(node) if node.started else self._never_began(seat)

    def _prepare(self, node: Node) -> None:
        try:
            self.transport.prepare(node.host)
        except UserError as fault:
            self.events.put((node, "unready", str(fault)))
        else:
            self.events.put((node, "ready", None))

    def _never_began(self, seat: Seat) -> None:
        """The connection to a node without a job has ended."""
        if not self.again:
            self._finish(errors.BAD_INPUT, seat.node.missing())
        elif not seat.failures and not self.interrupts:
            note(f"{seat.node.missing()}; will keep trying")
        seat.leave(failed=True)

    def _gather(self) -> None:
        """Begin an attempt when all nodes that can be expected are here, or say which are not."""
        now, limit = time.monotonic(), self.transport.wait_seconds
        ready = [seat for seat in self.seats if seat.ready]
        expected = [seat for seat in self.seats if not seat.failures and not seat.barred]
        here = len(ready) >= self.most or len(ready) == len(expected)
        if now >= self.not_before and here and len(ready) >= self.least:
            self._begin(ready[: self.most])
            return
        waited = now - self.since
        missing = [seat.host.name for seat in self.seats if not seat.ready and not seat.barred]
        names = ", ".join(missing) or "more nodes than there are"
        if waited > limit and len(ready) < self.least:
            code = errors.LOST_PEER if self.number else errors.BAD_INPUT
            why = f"the job needs {self.least} nodes and has waited {limit:g} s for {names}"
            self._finish(code, why)
        elif waited > self.next_line and len(ready) < self.most:
            self.next_line = waited + (5 if waited < 60 else 15)
            note(
                f"waiting for {names}: {len(ready)} of at least {self.least} nodes are here "
                f"({waited:.0f} s, at most {limit:g})"
            )

    def _begin(self, seats: list[Seat]) -> None:
        self.attempt = Attempt([seat.node for seat in seats])
        self.nodes = self.attempt.nodes
        self.number += 1
        environment = {}
        if self.again:
            names = ", ".join(seat.host.name for seat in seats)
            again = "again " if self.number > 1 else ""
            note(f"training begins {again}on {len(seats)} of {len(self.seats)} nodes: {names}")
            environment["IMAGENET_ELASTIC"] = str(self.number)
        first, several = self.nodes[0], len(seats) > 1
        address = first.host.ip or (first.hello["address"] if several else "127.0.0.1")
        if several and (address is None or address.startswith("127.")):
            self._finish(
                errors.BAD_INPUT,
                f"{first.host.name} was reached at {address}, where the other nodes cannot reach "
                "it: write ip=ADDRESS behind it in the hosts file",
            )
            return
        port = str(self.options.port or first.hello["port"])
        meeting = {"MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": str(len(seats))}
        for rank, node in enumerate(self.nodes):
            self._start(node, meeting | {"NODE_RANK": str(rank)} | environment)

    def _start(self, node: Node, environment: dict[str, str]) -> None:
        """Start the script on a node, and show the command."""
        given = dict(self.options.env or ())
        slots = [] if node.host.slots is None else ["-g", str(node.host.slots)]
        command = [*self.command[:1], *slots, *self.command[1:]]
        shown = [f"{key}={shlex.quote(value)}" for key, value in environment.items()]
        shown += [f"{key}=***" for key in given]  # it may be a secret, and this is kept in logs
        line = f"+ cd {self.options.dir}; {' '.join(shown)} python {shlex.join(command)}"
        self.screen.line(node.host.name, line.encode())
        job = {
            "command": command,
            "folder": self.options.dir,
            "environment": environment | given,
            "python": self.options.python,
            "grace": self.options.grace,
        }
        node.say(json.dumps(job).encode() + b"\n")
        node.started = True

    def _add(self) -> None:
        """End an attempt for a node that is back, so that the next one is on more nodes."""
        now, attempt = time.monotonic(), self.attempt
        waiting = [seat for seat in self.seats if seat.ready and not seat.node.started]
        if attempt.ending or not waiting or len(attempt.nodes) >= self.most:
            return
        came = max(seat.since for seat in waiting)
        if now - attempt.began > SETTLE_SECONDS and now - came > JOIN_SECONDS:
            names = ", ".join(seat.host.name for seat in waiting)
            note(f"stopping with a snapshot, to go on with {names}")
            attempt.joining = True
            self._end()

    def _end(self, kill_after: float | None = None, ask: bool = True) -> None:
        """Ask the nodes of this attempt to end; their guards see to that, or KILL does."""
        self.attempt.ending = True
        if ask:
            self._say(b"TERM\n")
        if kill_after is not None:
            timer = threading.Timer(kill_after, self._say, (b"KILL\n", self.nodes))
            timer.daemon = True
            timer.start()

    def _say(self, order: bytes, nodes: list[Node] | None = None) -> None:
        for node in nodes or self.nodes:
            if node.code is None:
                node.say(order)

    def _ended(self, node: Node) -> None:
        """A node of this attempt has ended."""
        attempt, name = self.attempt, node.host.name
        if node.lost and self.again:
            note(f"lost the connection to {name}; will keep trying")
        elif node.lost:
            errors.show(UserError(f"lost the connection to {name}; its guard ends what runs there"))
        if node.code and not attempt.ending:
            attempt.first = node
            if not node.lost:
                cause = f": killed by {node.signal}" if node.signal else ""
                note(f"{name} ended with exit code {node.code}{cause}; stopping the rest")
            stopped = node.code == errors.INTERRUPTED  # the others will agree on a snapshot
            self._end(None if stopped else LOST_SECONDS)
        elif attempt.first and attempt.first.code == errors.LOST_PEER and node.signal == "SIGKILL":
            # Its peer noticed the loss, and ended, before the launcher heard of the cause.
            note(f"{name} ended with exit code {node.code}: killed by {node.signal}")
        elif node is attempt.nodes[0] and node.code == 0:
            self._end(END_SECONDS, ask=False)
        if all(one.code is not None for one in attempt.nodes):
            self._close(attempt)

    def _close(self, attempt: Attempt) -> None:
        """Decide how to go on after an attempt."""
        self.attempt = None
        lost = [node for node in attempt.nodes if node.lost]
        seats = [seat for seat in self.seats if seat.node in attempt.nodes]
        for seat in seats:
            seat.leave(failed=seat.node.lost)
        self._wait()
        codes = [node.outcome for node in attempt.nodes]
        failed = attempt.first.outcome if attempt.first else 0
        if self.interrupts:
            rest = [code for code in codes if code]
            self._finish(errors.INTERRUPTED if errors.INTERRUPTED in rest else (rest or [0])[0])
        elif not self.again or codes[0] == 0:
            self._finish(0 if self.again else failed or codes[0])
        elif failed == errors.BAD_INPUT and not lost:
            self._leave_out(seats)
        elif lost or attempt.joining:
            for seat in seats:
                seat.trusted = not seat.failures  # what was lost may come back as another machine
            self.quick = 0
        else:
            self._retry(attempt, failed)

    def _leave_out(self, seats: list[Seat]) -> None:
        """Bad input ends the job, unless it came with a node that the attempt before had not."""
        new = [seat for seat in seats if not seat.trusted]
        if not new or len(new) == len(seats):
            self._finish(errors.BAD_INPUT)
            return
        for seat in new:
            seat.barred = True
        note(f"going on without {', '.join(seat.host.name for seat in new)} (the reason is above)")

    def _retry(self, attempt: Attempt, code: int) -> None:
        """A process has failed, or was stopped on its node: try again, but not for ever."""
        soon = time.monotonic() - attempt.began < QUICK_SECONDS
        self.quick = self.quick + 1 if soon else 1
        if self.quick >= QUICK_FAILURES:
            self._finish(code, f"training has failed {self.quick} times in a row soon after start")
            return
        pause = 5.0 * 2 ** (self.quick - 1)
        note(f"going on in {pause:g} s")
        self._wait(pause)

    def _finish(self, code: int, why: str = "") -> None:
        if why and self.code is None:
            errors.show(UserError(why))
        self.code = code

    def _interrupt(self, signum: int) -> None:
        self.interrupts += 1
        if self.attempt is None:
            code = errors.INTERRUPTED if self.number else 128 + signum
            self._finish(code, "interrupted while waiting for nodes")
        elif self.interrupts > 1 and signum == signal.SIGINT:
            note("ending all nodes at once")
            self._say(b"KILL\n")
        else:
            note(f"asking all nodes to stop with a snapshot within {self.options.grace:g} s")
            self._end()
