"""A job on several nodes: attempt after attempt, from the first connection to the exit code.

This process decides which nodes take part, so no node has to hold a rendezvous. An attempt starts
the script on the nodes that answer. With --elastic (``again``), when a node is lost, the others
are stopped, and the next attempt resumes from the run's latest snapshot. When a node answers again,
the attempt ends with a snapshot, and the next one includes that node. Without --elastic all nodes
have to answer, and there is one attempt.

How a host is reached is up to subclasses of `Job` and `Node`: ssh in launcher.py, Ray in
scripts/examples.
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
from utils.errors import BAD_INPUT, INTERRUPTED, LOST_PEER, UserError
from utils.launch.network import Clock

CALL_SECONDS = 30.0  # for a node to answer
LOST_SECONDS = 6.0  # for the others to end once a node has failed: they cannot agree on a snapshot
END_SECONDS = 30.0  # for the other nodes once the first has finished
JOIN_SECONDS = 5.0  # other nodes may come back at the same time
SETTLE_SECONDS = 30.0  # an attempt that has just begun is not interrupted for a node
QUICK_SECONDS, QUICK_FAILURES = 120.0, 5  # after so many short attempts in a row the job fails
FIRST_PAUSE, LONGEST_PAUSE = 15.0, 60.0  # between attempts to reach a lost node
_HELLO = guard.HELLO.encode()
AWAY, CALLED, READY, BUSY = range(4)  # READY: the guard waits for a job, BUSY: it has one


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
        self.enter(AWAY)

    def enter(self, state: int) -> None:
        """Note a new state, and since when."""
        self.state, self.since = state, time.monotonic()
        if state in (AWAY, CALLED):
            self.hello: dict | None = None
            self.code: int | None = None

    def leave(self, failed: bool) -> None:
        """The connection has ended: call again, at once or, after a failure, later."""
        self.enter(AWAY)
        self.failures = self.failures + 1 if failed else 0
        pause = min(FIRST_PAUSE * 2 ** (self.failures - 1), LONGEST_PAUSE) if failed else 0.0
        self.next_call = self.since + pause

    def prepare(self) -> None:
        """Prepare the node for an attempt. Raises: `UserError`."""

    def missing(self) -> str:
        """Why there is no guard, or no longer one, although no job was started."""
        return f"no answer from {self.host.name}"

    def take(self, line: bytes, stream: Any) -> None:
        """Handle a line of output: the guard's first one, or one to show."""
        if self.hello is None and line.startswith(_HELLO):
            self.hello = json.loads(line[len(_HELLO) :])
            try:
                self.prepare()
                self.job.events.put((self, "ready", None))
            except UserError as fault:
                self.job.events.put((self, "unready", fault))
        elif self.hello or not self.failures:  # the reason of a failure is shown once
            self.job.show(self, line, stream)

    @property
    def lost(self) -> bool:
        """Whether the connection has ended without an exit code of the guard's."""
        return self.code == SSH_FAILED or (self.code or 0) < 0

    @property
    def signal(self) -> str:
        """The signal that ended the processes there; as shells and as Python's exit report it."""
        with suppress(ValueError, TypeError):
            return signal.Signals(self.code - 128 if self.code < 192 else 256 - self.code).name
        return ""


class Job:
    """Runs ``command`` on ``machines``, if there is no --elastic on all of them.

    A subclass defines `node`, the class of its nodes, and may have other `hosts` at each call.
    """

    node = Node
    wait_seconds = 600.0  # for as many nodes as the job needs at least

    def __init__(
        self,
        options: argparse.Namespace,  # dir, elastic, env, grace, port, python
        command: list[str],
        machines: list[Host],
        mark: str,  # of the processes on the nodes, for cleanup.sh
    ):
        self.options, self.command, self.machines, self.mark = options, command, machines, mark
        self.again = options.elastic is not None
        self.least, self.most = options.elastic or (len(machines), len(machines))
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.screen = threading.Lock()
        self.nodes: list[Node] = []
        self.number = 0  # of attempts so far
        self.quick = 0  # attempts in a row that failed soon
        self.pause = 0.0  # seconds before the next attempt
        self.signals: list[int] = []  # that have asked for the end
        self.run_host: Host | None = None  # it has the run directory, unless it was lost

    def hosts(self) -> list[Host]:
        """All that there are now."""
        return self.machines

    def run(self) -> int:
        """Train until the end. Returns the job's exit code."""
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, lambda number, _: self.signals.append(number))
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # nodes end when this process is silent
        threading.Thread(target=self._beat, daemon=True).start()
        code = None
        try:
            while code is None:
                code = self._attempt(self._gather())
        except UserError as error:
            code = errors.report(error)
        for node in self.nodes:
            if node.state != AWAY:  # its guard has no job, and ends
                node.close()
        return code

    def show(self, node: Node, text: bytes, stream: Any = None) -> None:
        """Print a line of a node; it is dropped if nobody reads our output any more."""
        stream = stream or sys.stdout
        label = f"[{node.host.name}]".ljust(max(len(one.host.name) for one in self.nodes) + 2)
        if stream.isatty() and "NO_COLOR" not in os.environ:
            label = f"\033[{node.colour}m{label}\033[0m"
        with self.screen, suppress(OSError):
            stream.buffer.write(label.encode() + b" " + text.rstrip(b"\r\n") + b"\n")
            stream.flush()

    def _beat(self) -> None:
        """Send heartbeats, for ever."""
        while True:
            time.sleep(guard.HEARTBEAT_SECONDS)
            self._say(b"\n", list(self.nodes))

    def _say(self, order: bytes, nodes: list[Node]) -> None:
        for node in nodes:
            if node.state != AWAY and node.code is None:
                node.say(order)

    def _step(self) -> Node | None:
        """Connect, and wait for an event, half a second at most; a node whose job has ended."""
        if not self.signals:
            self._call()
        try:
            node, what, more = self.events.get(timeout=0.5)
        except queue.Empty:
            return None
        if what == "ended":
            node.code = more
            if node.state == BUSY:
                return node
            if not self.again:
                raise UserError(node.missing())
            if not node.failures and not self.signals:
                note(f"{node.missing()}; will keep trying")
            node.leave(failed=True)
        elif what == "ready":
            if node.failures:
                note(f"{node.host.name} is back")
            node.failures = 0
            node.enter(READY)
        elif self.again:
            errors.show(more)
            node.close()
        else:
            raise more
        return None

    def _call(self) -> None:
        """Connect to each host that is not connected, if it is time to; give up those in vain."""
        now, hosts = time.monotonic(), self.hosts()
        self.nodes = [node for node in self.nodes if node.state != AWAY or node.host in hosts]
        known = [node.host for node in self.nodes]
        self.nodes += [self.node(host, self) for host in hosts if host not in known]
        for node in self.nodes:
            if node.state == AWAY and not node.barred and now >= node.next_call:
                node.enter(CALLED)
                node.connect()
            elif node.state == CALLED and not node.hello and now - node.since > CALL_SECONDS:
                node.close()

    def _gather(self) -> list[Node]:
        """The nodes of the next attempt, when all that can be expected are here.

        Raises: `UserError` if there are too few.
        """
        clock = Clock(self.wait_seconds)
        while True:
            self._step()
            if self.signals:
                code = INTERRUPTED if self.number else 128 + self.signals[-1]
                raise UserError("interrupted while waiting for nodes", code=code)
            ready = [node for node in self.nodes if node.state == READY]
            expected = [node for node in self.nodes if not node.failures and not node.barred]
            complete = len(ready) >= self.most or len(ready) == len(expected)
            if complete and len(ready) >= self.least and clock.seconds >= self.pause:
                return ready[: self.most]
            away = [n.host.name for n in self.nodes if n.state != READY and not n.barred]
            names = ", ".join(away) or "more nodes than there are"
            if clock.seconds > clock.limit and len(ready) < self.least:
                why = f"the job needs {self.least} nodes and has waited {clock.limit:g} s for "
                raise UserError(why + names, code=LOST_PEER if self.number else BAD_INPUT)
            here = f"{len(ready)} of at least {self.least} nodes are here"
            line = clock.line(f"waiting for {names}: {here}") if len(ready) < self.most else None
            if line:
                note(line)

    def _start(self, nodes: list[Node]) -> None:
        """Start the script on ``nodes``, and show each command. Raises: `UserError`."""
        first, options = nodes[0], self.options
        address = first.host.ip
        address = address or (first.hello["address"] if len(nodes) > 1 else "127.0.0.1")
        if address is None or (len(nodes) > 1 and address.startswith("127.")):
            raise UserError(
                f"{first.host.name} was reached at {address}, where the other nodes cannot reach "
                "it: write ip=ADDRESS behind it in the hosts file"
            )
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
            node.enter(BUSY)

    def _attempt(self, nodes: list[Node]) -> int | None:
        """Train on ``nodes`` until all have ended. Returns the job's exit code, if it is over."""
        self._start(nodes)
        began, kill_at = time.monotonic(), math.inf
        ending = ""  # why the nodes have been told to end
        failed: Node | None = None  # the first one that did so by itself
        handled = 0  # signals
        while any(node.code is None for node in nodes):
            node, now = self._step(), time.monotonic()
            if node:
                # Its peer may have noticed the loss of a killed process, and ended, before it.
                killed = node.signal == "SIGKILL" and now < kill_at
                more = "" if ending else "; stopping the rest"
                self._report(node, bool(ending) and not killed, more)
            if node and node.code and not ending:
                failed, ending = node, "failed"
                self._say(b"TERM\n", nodes)
                if node.code != INTERRUPTED:  # otherwise the others will agree on a snapshot
                    kill_at = now + LOST_SECONDS
            elif node is nodes[0] and node.code == 0:
                ending, kill_at = ending or "done", min(kill_at, now + END_SECONDS)
            if len(self.signals) > handled:
                handled, ending = handled + 1, "interrupted"
                if handled > 1 and self.signals[-1] == signal.SIGINT:
                    note("ending all nodes at once")
                    kill_at = now
                else:
                    grace = self.options.grace
                    note(f"asking all nodes to stop with a snapshot within {grace:g} s")
                    self._say(b"TERM\n", nodes)
            if not ending and (joining := self._joining(nodes, began)):
                note(f"stopping with a snapshot, to go on with {joining}")
                ending = "joining"
                self._say(b"TERM\n", nodes)
            if now >= kill_at:
                self._say(b"KILL\n", nodes)
        return self._decide(nodes, failed, ending == "joining", time.monotonic() - began)

    def _report(self, node: Node, told: bool, more: str) -> None:
        """Say how a node of an attempt has ended, unless it was ``told`` to."""
        lost = f"lost the connection to {node.host.name}"
        if node.lost and self.again:
            note(f"{lost}; will keep trying")
        elif node.lost:
            errors.show(UserError(f"{lost}; its guard ends what runs there"))
        elif node.code and not told:
            killed = f": killed by {node.signal}" if node.signal else ""
            note(f"{node.host.name} ended with exit code {node.code}{killed}{more}")

    def _joining(self, nodes: list[Node], began: float) -> str:
        """Names of nodes for which the attempt is to be interrupted now."""
        now, waiting = time.monotonic(), [node for node in self.nodes if node.state == READY]
        if not waiting or len(nodes) >= self.most or now - began <= SETTLE_SECONDS:
            return ""
        settled = now - max(node.since for node in waiting) > JOIN_SECONDS
        return ", ".join(node.host.name for node in waiting) if settled else ""

    def _decide(
        self, nodes: list[Node], failed: Node | None, joining: bool, seconds: float
    ) -> int | None:
        """After an attempt: the job's exit code, or None if another one follows."""
        codes = [LOST_PEER if node.lost or node.signal else node.code for node in nodes]
        code = codes[nodes.index(failed)] if failed else 0
        if code == LOST_PEER and BAD_INPUT in codes:
            code = BAD_INPUT  # its peer ended first
        lost = any(node.lost for node in nodes)
        self.run_host = None if nodes[0].lost else nodes[0].host
        for node in nodes:
            node.leave(failed=node.lost)
        self.pause = 0.0
        if self.signals:
            rest = [one for one in codes if one]
            return INTERRUPTED if INTERRUPTED in rest else (rest or [0])[0]
        if not self.again or codes[0] == 0:
            return 0 if self.again else code or codes[0]
        if code == BAD_INPUT and not lost:
            # It ends the job, unless it came with a node that the attempt before had not.
            new = [node for node in nodes if not node.trusted]
            if not new or len(new) == len(nodes):
                return BAD_INPUT
            for node in new:
                node.barred = True
            names = ", ".join(node.host.name for node in new)
            note(f"going on without {names} (the reason is above)")
        elif lost or joining:
            for node in nodes:
                node.trusted = not node.failures  # a lost node may come back as another machine
            self.quick = 0
        else:  # a process has failed, or was stopped on its node: try again, but not for ever
            self.quick = self.quick + 1 if seconds < QUICK_SECONDS else 1
            if self.quick >= QUICK_FAILURES:
                why = f"training has failed {self.quick} times in a row soon after start"
                raise UserError(why, code=code)
            self.pause = 5.0 * 2 ** (self.quick - 1)
            note(f"going on in {self.pause:g} s")
        return None
