"""A job on several nodes: attempt after attempt, from the first connection to the exit code.

This process decides which nodes take part, so no node has to hold a rendezvous. An attempt starts
the script on the nodes that answer. With ``again`` (--elastic), when a node is lost, the others
are stopped, and the next attempt resumes from the run's latest snapshot. When a node answers again,
the attempt ends with a snapshot, and the next one includes that node. Without ``again`` all nodes
have to answer, and there is one attempt.

How a host is reached is up to a subclass of `Node`: ssh in launcher.py, Ray in scripts/examples.
"""

import argparse
import json
import math
import os
import queue
import shlex
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import guard
from hosts import SSH_FAILED, Host, note

from utils import errors
from utils.errors import UserError

CALL_SECONDS = 30.0  # for a node to answer
LOST_SECONDS = 6.0  # for the others to end once a node has failed: they cannot agree on a snapshot
END_SECONDS = 30.0  # for the other nodes once the first has finished
DISMISS_SECONDS = 3.0  # for guards without a job
JOIN_SECONDS = 5.0  # other nodes may come back at the same time
SETTLE_SECONDS = 30.0  # an attempt that has just begun is not interrupted for a node
QUICK_SECONDS, QUICK_FAILURES = 120.0, 5  # after so many short attempts in a row the job fails
FIRST_PAUSE, LONGEST_PAUSE = 15.0, 60.0  # between attempts to reach a lost node
_HELLO = guard.HELLO.encode()


class Node:
    """A host and, while it is connected, the guard on it; times by the monotonic clock.

    A subclass defines `connect`, which starts a guard, `say`, which sends it an order and ignores
    that it may be gone, and `close`, which ends the connection and with it the guard. It passes
    lines of output to `take`, and in the end puts (node, "ended", exit code) into ``job.events``.
    """

    def __init__(self, host: Host, job: "Job"):
        self.host, self.job = host, job
        self.colour = 36 - len(job.nodes) % 6  # cyan, magenta, blue, yellow, green, red
        self.failures = 0  # since it last answered
        self.next_call = 0.0
        self.trusted = False  # it was in an attempt that began well, and has not been lost since
        self.barred = False
        self.reset()

    def reset(self) -> None:
        """Not connected."""
        self.connected = self.ready = self.started = False  # ready: the guard waits for a job
        self.since = time.monotonic()  # when it was called, or became ready
        self.hello: dict | None = None
        self.code: int | None = None

    def leave(self, failed: bool) -> None:
        """The connection has ended: call again, at once or, after a failure, later."""
        self.reset()
        self.failures = self.failures + 1 if failed else 0
        pause = min(FIRST_PAUSE * 2 ** (self.failures - 1), LONGEST_PAUSE) if failed else 0.0
        self.next_call = time.monotonic() + pause

    def prepare(self) -> None:
        """What has to be done on the node before an attempt. Raises: `UserError`."""

    def missing(self) -> str:
        """Why there is no guard, or no longer one, although no job was started."""
        return f"{self.host.name} does not answer"

    def take(self, line: bytes, stream: Any) -> None:
        """Handle a line of output: the guard's first one, or one to show."""
        if self.hello is None and line.startswith(_HELLO):
            self.hello = json.loads(line[len(_HELLO) :])
            try:
                self.prepare()
            except UserError as fault:
                self.job.events.put((self, "unready", str(fault)))
            else:
                self.job.events.put((self, "ready", None))
        elif self.hello or not self.failures:  # the reason of a failure is shown once
            self.job.show(self, line, stream)

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


class Job:
    """Runs ``command`` on from MIN to MAX (``limits``) nodes; see the top of this file.

    ``transport`` has ``hosts()``, all that there are now, ``node(host, job)``, and ``wait_seconds``
    for as many nodes as the job needs at least.
    """

    def __init__(
        self,
        options: argparse.Namespace,  # dir, env, grace, port, python
        command: list[str],
        transport: Any,
        limits: tuple[int, int],
        again: bool,
    ):
        self.options, self.command, self.transport = options, command, transport
        (self.least, self.most), self.again = limits, again
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.screen = threading.Lock()
        self.nodes: list[Node] = []
        self.attempt: list[Node] = []  # nodes of the present attempt, by rank; none between two
        self.number = 0  # of attempts so far
        self.interrupts = 0
        self.quick = 0  # attempts in a row that failed soon
        self.run_host: Host | None = None  # it has the run directory, unless it was lost
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
            if self.attempt:
                self._watch()
            elif self.code is None:
                self._gather()
        self._dismiss([node for node in self.nodes if node.connected])
        return self.code

    def show(self, node: Node, text: bytes, stream: Any = None) -> None:
        """Print a line of a node; it is dropped if nobody reads our output any more."""
        stream = stream or sys.stdout
        label = f"[{node.host.name}]".ljust(max(len(one.host.name) for one in self.nodes) + 2)
        if stream.isatty() and "NO_COLOR" not in os.environ:
            label = f"\033[{node.colour}m{label}\033[0m"
        with self.screen, suppress(OSError):
            stream.buffer.write(label.encode() + b" " + text.rstrip(b"\r\n") + b"\n")
            stream.flush()

    def _dismiss(self, nodes: list[Node]) -> None:
        """End guards that have no job, and wait a moment until they have ended."""
        for node in nodes:
            if node.hello:
                node.say(b"KILL\n")
            else:
                node.close()
        deadline = time.monotonic() + DISMISS_SECONDS
        while nodes and time.monotonic() < deadline:
            with suppress(queue.Empty):
                node, what, _ = self.events.get(timeout=0.1)
                if what == "ended" and node in nodes:
                    nodes.remove(node)
        for node in nodes:
            node.close()

    def _beat(self) -> None:
        """Send heartbeats, for ever."""
        while True:
            time.sleep(guard.HEARTBEAT_SECONDS)
            self._say(b"\n", list(self.nodes))

    def _say(self, order: bytes, nodes: list[Node]) -> None:
        for node in nodes:
            if node.connected and node.code is None:
                node.say(order)

    def _wait(self, pause: float = 0.0) -> None:
        """From now on, wait for nodes; begin no sooner than in ``pause`` seconds."""
        self.since = time.monotonic()
        self.not_before, self.next_line = self.since + pause, 2.0

    def _call(self) -> None:
        """Connect to each host that is not connected, if it is time to; give up those in vain."""
        if self.interrupts:
            return
        now, hosts = time.monotonic(), self.transport.hosts()
        self.nodes = [node for node in self.nodes if node.connected or node.host in hosts]
        known = [node.host for node in self.nodes]
        for host in hosts:
            if host not in known:
                self.nodes.append(self.transport.node(host, self))
        for node in self.nodes:
            if not node.connected and not node.barred and now >= node.next_call:
                node.reset()
                node.connected = True
                node.connect()
            elif node.connected and not node.hello and now - node.since > CALL_SECONDS:
                node.close()

    def _take(self, node: Node | None, what: str, more: Any) -> None:
        """Handle an event."""
        if what == "signal":
            self._interrupt(more)
        elif what == "ready":
            if node.failures:
                note(f"{node.host.name} is back")
            node.ready, node.failures, node.since = True, 0, time.monotonic()
        elif what == "unready" and self.again:
            errors.show(UserError(more))
            node.close()
        elif what == "unready":
            self._finish(errors.BAD_INPUT, more)
        elif node.started:
            node.code = more
            self._ended(node)
        else:
            node.code = more
            if not self.again:
                self._finish(errors.BAD_INPUT, node.missing())
            elif not node.failures and not self.interrupts:
                note(f"{node.missing()}; will keep trying")
            node.leave(failed=True)

    def _gather(self) -> None:
        """Begin an attempt when all nodes that can be expected are here, or say which are not."""
        now, limit = time.monotonic(), self.transport.wait_seconds
        ready = [node for node in self.nodes if node.ready]
        expected = [node for node in self.nodes if not node.failures and not node.barred]
        here = len(ready) >= self.most or len(ready) == len(expected)
        if now >= self.not_before and here and len(ready) >= self.least:
            self._begin(ready[: self.most])
            return
        waited = now - self.since
        missing = [node.host.name for node in self.nodes if not node.ready and not node.barred]
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

    def _begin(self, nodes: list[Node]) -> None:
        """Start the script on ``nodes``, and show each command."""
        first, options = nodes[0], self.options
        address = first.host.ip
        address = address or (first.hello["address"] if len(nodes) > 1 else "127.0.0.1")
        if address is None or (len(nodes) > 1 and address.startswith("127.")):
            self._finish(
                errors.BAD_INPUT,
                f"{first.host.name} was reached at {address}, where the other nodes cannot reach "
                "it: write ip=ADDRESS behind it in the hosts file",
            )
            return
        self.attempt, self.began = nodes, time.monotonic()
        self.ending = False  # the nodes have been told to end
        self.joining = False  # ... to add a node that is back
        self.kill_at = math.inf
        self.failed: Node | None = None  # the first one that failed
        self.number += 1
        port = str(options.port or first.hello["port"])
        place = {"MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": str(len(nodes))}
        if self.again:
            names = ", ".join(node.host.name for node in nodes)
            again = "again " if self.number > 1 else ""
            note(f"training begins {again}on {len(nodes)} of {len(self.nodes)} nodes: {names}")
            place["IMAGENET_ELASTIC"] = str(self.number)
        given = dict(options.env or ())
        for rank, node in enumerate(nodes):
            environment = place | {"NODE_RANK": str(rank)}
            slots = [] if node.host.slots is None else ["-g", str(node.host.slots)]
            command = [*self.command[:1], *slots, *self.command[1:]]
            shown = [f"{key}={shlex.quote(value)}" for key, value in environment.items()]
            shown += [f"{key}=***" for key in given]  # it may be a secret, and this is kept in logs
            line = f"+ cd {options.dir}; {' '.join(shown)} python {shlex.join(command)}"
            self.show(node, line.encode())
            job = {"command": command, "folder": options.dir, "python": options.python}
            job |= {"environment": environment | given, "grace": options.grace}
            node.say(json.dumps(job).encode() + b"\n")
            node.started = True

    def _watch(self) -> None:
        """End an attempt that takes too long to end, or that a node which is back can join."""
        now = time.monotonic()
        if now > self.kill_at:
            self._say(b"KILL\n", self.attempt)
        waiting = [node for node in self.nodes if node.ready and not node.started]
        if self.ending or not waiting or len(self.attempt) >= self.most:
            return
        came = max(node.since for node in waiting)
        if now - self.began > SETTLE_SECONDS and now - came > JOIN_SECONDS:
            names = ", ".join(node.host.name for node in waiting)
            note(f"stopping with a snapshot, to go on with {names}")
            self.joining = True
            self._end()

    def _end(self, kill_after: float = math.inf, ask: bool = True) -> None:
        """Ask the nodes of this attempt to end; their guards see to that, or KILL does."""
        self.ending = True
        self.kill_at = min(self.kill_at, time.monotonic() + kill_after)
        if ask:
            self._say(b"TERM\n", self.attempt)

    def _ended(self, node: Node) -> None:
        """A node of this attempt has ended."""
        name = node.host.name
        killed = f": killed by {node.signal}" if node.signal else ""
        if node.lost and self.again:
            note(f"lost the connection to {name}; will keep trying")
        elif node.lost:
            errors.show(UserError(f"lost the connection to {name}; its guard ends what runs there"))
        if node.code and not self.ending:
            self.failed = node
            if not node.lost:
                note(f"{name} ended with exit code {node.code}{killed}; stopping the rest")
            stopped = node.code == errors.INTERRUPTED  # the others will agree on a snapshot
            self._end(math.inf if stopped else LOST_SECONDS)
        elif self.failed and self.failed.code == errors.LOST_PEER and node.signal == "SIGKILL":
            # Its peer noticed the loss, and ended, before the launcher heard of the cause.
            note(f"{name} ended with exit code {node.code}{killed}")
        elif node is self.attempt[0] and node.code == 0:
            self._end(END_SECONDS, ask=False)
        if all(one.code is not None for one in self.attempt):
            self._close()

    def _close(self) -> None:
        """Decide how to go on after an attempt."""
        nodes, self.attempt = self.attempt, []
        codes = [node.outcome for node in nodes]
        failed = self.failed.outcome if self.failed else 0
        if failed == errors.LOST_PEER and errors.BAD_INPUT in codes:
            failed = errors.BAD_INPUT  # its peer ended first
        lost = any(node.lost for node in nodes)
        self.run_host = None if nodes[0].lost else nodes[0].host
        for node in nodes:
            node.leave(failed=node.lost)
        self._wait()
        if self.interrupts:
            rest = [code for code in codes if code]
            self._finish(errors.INTERRUPTED if errors.INTERRUPTED in rest else (rest or [0])[0])
        elif not self.again or codes[0] == 0:
            self._finish(0 if self.again else failed or codes[0])
        elif failed == errors.BAD_INPUT and not lost:
            self._leave_out(nodes)
        elif lost or self.joining:
            for node in nodes:
                node.trusted = not node.failures  # a lost node may come back as another machine
            self.quick = 0
        else:
            self._retry(failed)

    def _leave_out(self, nodes: list[Node]) -> None:
        """Bad input ends the job, unless it came with a node that the attempt before had not."""
        new = [node for node in nodes if not node.trusted]
        if not new or len(new) == len(nodes):
            self._finish(errors.BAD_INPUT)
            return
        for node in new:
            node.barred = True
        note(f"going on without {', '.join(node.host.name for node in new)} (the reason is above)")

    def _retry(self, code: int) -> None:
        """A process has failed, or was stopped on its node: try again, but not for ever."""
        soon = time.monotonic() - self.began < QUICK_SECONDS
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
        if not self.attempt:
            code = errors.INTERRUPTED if self.number else 128 + signum
            self._finish(code, "interrupted while waiting for nodes")
        elif self.interrupts > 1 and signum == signal.SIGINT:
            note("ending all nodes at once")
            self._say(b"KILL\n", self.attempt)
        else:
            note(f"asking all nodes to stop with a snapshot within {self.options.grace:g} s")
            self._end()
