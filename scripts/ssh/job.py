"""A job on several nodes, from the first connection to the exit code.

This process decides which nodes take part, so there is no rendezvous. An attempt starts the script
on the nodes that answer. With --elastic (``again``), when a node is lost, the job stops the others,
and the next attempt resumes from the run's latest snapshot. When a node answers again, the attempt
ends with a snapshot, and the next one includes that node. Without --elastic all nodes have to
answer, and there is one attempt.

On each node a guard (guard.py) runs the script. This process talks to it through ssh. A subclass
may use something else (scripts/examples/ray_train.py).
"""

import argparse
import json
import math
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import guard
import hosts
from hosts import SSH_FAILED, Host, note

from utils import errors
from utils.errors import BAD_INPUT, INTERRUPTED, LOST_PEER, UserError

CALL_SECONDS = 30.0  # time for a node to answer
LOST_SECONDS = 6.0  # time for the others to end after a node failed: no snapshot is possible then
END_SECONDS = 30.0  # time for the other nodes to end when the first has finished
JOIN_SECONDS = 20.0  # wait before a restart that includes a node: more may come back
QUICK_SECONDS, QUICK_FAILURES = 120.0, 5  # this many short attempts in a row end the job
RETRY_SECONDS = 15.0  # between attempts to reach a lost node
NOTE_SECONDS = 15.0  # between lines about missing nodes
_HELLO, _HEARTBEAT = guard.HELLO.encode(), guard.HEARTBEAT.encode()
AWAY, CALLED, READY, BUSY = range(4)  # READY: the guard waits for a job, BUSY: it has one


class Node:
    """A host and, while it is connected, its guard. Times are those of the monotonic clock."""

    def __init__(self, host: Host, job: "Job"):
        self.host, self.job = host, job
        self.colour = 36 - len(job.nodes) % 6  # cyan, magenta, blue, yellow, green, red
        self.failed = False  # whether it has failed since its last answer
        self.next_call = 0.0  # time of the next call; inf: the node is left out
        self.trusted = False  # it took part in a good attempt, and has not been lost since
        self.enter(AWAY)

    def enter(self, state: int) -> None:
        """Set the state, and the time when it began."""
        self.state, self.since = state, time.monotonic()
        if state in (AWAY, CALLED):
            self.hello: dict | None = None
            self.code: int | None = None
            self.answered = self.since  # time of the guard's last heartbeat

    def leave(self, failed: bool) -> None:
        """After the connection ended: call again at once; after a failure, later."""
        self.enter(AWAY)
        self.failed = failed
        self.next_call = self.since + (RETRY_SECONDS if failed else 0.0)

    def connect(self) -> None:
        """Start a guard. Events: (node, None) when it has started, (node, exit code) at its end."""
        program = hosts.program(guard.__file__, {})
        self.lock, self.pipe = threading.Lock(), self.job.open(self.host, program)
        self.enter(CALLED)
        threading.Thread(target=self._follow, args=(self.pipe,), daemon=True).start()

    def say(self, order: bytes) -> None:
        """Send an order, or answer a heartbeat, if the guard still exists."""
        if self.state != AWAY and self.code is None:
            with suppress(OSError), self.lock:
                self.pipe.stdin.write(order)
                self.pipe.stdin.flush()

    def _follow(self, pipe: subprocess.Popen) -> None:
        other = threading.Thread(target=self._read, args=(pipe.stderr, sys.stderr), daemon=True)
        other.start()
        self._read(pipe.stdout, sys.stdout)
        other.join()
        self.job.events.put((self, pipe.wait()))

    def _read(self, source: Iterable[bytes], stream: Any) -> None:
        """Handle lines of output: those for this process, and those to show."""
        for line in source:
            # A heartbeat may follow a line of the script that is not complete yet.
            text, heartbeat, moment = line.partition(_HEARTBEAT)
            if heartbeat:
                self.answered = time.monotonic()
                self.say(heartbeat + moment)
            if self.hello is None and line.startswith(_HELLO):
                self.hello = json.loads(line[len(_HELLO) :])
                self.job.events.put((self, None))
            elif text and (self.hello or not self.failed):  # show the reason of a failure once
                self.job.lines.put((self, text, stream))

    @property
    def lost(self) -> bool:
        """Whether the connection has ended before the guard reported an exit code."""
        return self.code == SSH_FAILED or self.code < 0

    @property
    def signal(self) -> str:
        """The signal that ended the processes there."""
        with suppress(ValueError):
            return signal.Signals(self.code - 128).name
        return ""


class Job:
    """Runs ``command`` on ``machines``; without --elastic, on all of them.

    In a subclass, `hosts` may return other hosts at each call, and `open` may replace ssh.
    ``options``: dir, elastic, env, grace, port, python, ssh. ``mark``: as in `hosts.remote_python`.
    """

    wait_seconds = 600.0  # time for the smallest number of nodes to answer

    def __init__(
        self, options: argparse.Namespace, command: list[str], machines: list[Host], mark: str
    ):
        self.options, self.command, self.machines, self.mark = options, command, machines, mark
        self.again = options.elastic is not None
        self.least, self.most = options.elastic or (len(machines), len(machines))
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        # The nodes' output. A thread prints it, so that heartbeats do not wait for a slow reader.
        self.lines: queue.Queue = queue.Queue()
        self.nodes: list[Node] = []
        self.number = 0  # of the current attempt
        self.quick = 0  # attempts in a row that failed soon
        self.signals: list[int] = []  # signals received
        self.lease_end = 0.0  # until then, a lost node may still write into the run directory
        self.run_host: Host | None = None  # the host with the run directory; None if it was lost

    def hosts(self) -> list[Host]:
        """The hosts that exist now."""
        return self.machines

    def open(self, host: Host, program: bytes) -> subprocess.Popen:
        """Start an ssh that runs ``program``, the guard, on a host."""
        # ssh has its own session, so that Ctrl-C at the terminal reaches only this process.
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = hosts.remote_python(self.options.ssh, host, self.mark)
        ssh = subprocess.Popen(command, **pipes, start_new_session=True)
        with suppress(OSError):  # it has ended already
            ssh.stdin.write(program)
            ssh.stdin.flush()
        return ssh

    def unreachable(self, host: Host) -> str:
        """Return the error message for a host on which no guard has answered."""
        return hosts.ssh_failed(self.options.ssh, host)

    def run(self) -> int:
        """Train until the end. Returns the job's exit code."""
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, lambda number, _: self.signals.append(number))
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # a suspended launcher would lose its nodes
        threading.Thread(target=self._write, daemon=True).start()
        code = None
        try:
            while code is None:
                code = self._attempt(self._gather())
        except UserError as error:
            code = errors.report(error)
        for node in self.nodes:
            if node.state != AWAY:  # its guard has no job
                node.pipe.terminate()
        return code

    def _write(self) -> None:
        """Print the nodes' lines, for ever. Drop them if nothing reads this process's output."""
        while True:
            node, text, stream = self.lines.get()
            label = f"[{node.host.name}]".ljust(max(len(one.host.name) for one in self.nodes) + 2)
            if stream.isatty() and "NO_COLOR" not in os.environ:
                label = f"\033[{node.colour}m{label}\033[0m"
            with suppress(OSError):
                stream.buffer.write(label.encode() + b" " + text.rstrip(b"\r\n") + b"\n")
                stream.flush()
            self.lines.task_done()

    def _step(self) -> Node | None:
        """Connect, then wait up to 0.5 s for an event. Returns a node whose script has ended."""
        if not self.signals:
            self._call()
        try:
            node, code = self.events.get(timeout=0.5)
        except queue.Empty:
            return None
        if code is None:
            if node.failed:
                note(f"{node.host.name} is back")
            node.failed = False
            node.enter(READY)
            return None
        self.lines.join()  # print its output before the message about its end
        node.code = code
        if node.state == BUSY:
            return node
        reason = f"lost the connection to {node.host.name}"
        reason = reason if node.hello else self.unreachable(node.host)
        if not self.again:
            raise UserError(reason)
        if not node.failed and not self.signals:
            note(f"{reason}; will keep trying")
        node.leave(failed=True)
        return None

    def _call(self) -> None:
        """Connect to each host that is due. Close connections that have brought no answer."""
        now, there = time.monotonic(), self.hosts()
        self.nodes = [node for node in self.nodes if node.state != AWAY or node.host in there]
        known = [node.host for node in self.nodes]
        self.nodes += [Node(host, self) for host in there if host not in known]
        for node in self.nodes:
            if node.state == AWAY and now >= node.next_call:
                node.connect()
            elif node.state == CALLED and not node.hello and now - node.since > CALL_SECONDS:
                node.pipe.terminate()

    def _gather(self) -> list[Node]:
        """Wait for the nodes of the next attempt. Raises: `UserError` if too few answer."""
        began, noted = time.monotonic(), time.monotonic() + 1 - NOTE_SECONDS
        while True:
            self._step()
            if self.signals:
                code = INTERRUPTED if self.number else 128 + self.signals[-1]
                raise UserError("interrupted while waiting for nodes", code=code)
            now = time.monotonic()
            ready = [node for node in self.nodes if node.state == READY]
            complete = len(ready) == sum(not node.failed for node in self.nodes)
            if len(ready) >= (self.least if complete else self.most) and now >= self.lease_end:
                return ready[: self.most]
            away = [n.host.name for n in self.nodes if n.state != READY and n.next_call < math.inf]
            names = ", ".join(away) or "more nodes than there are"
            if now - began > self.wait_seconds and len(ready) < self.least:
                why = (
                    f"the job needs {self.least} nodes and has waited {self.wait_seconds:g} s for "
                )
                raise UserError(why + names, code=LOST_PEER if self.number else BAD_INPUT)
            if now - noted > NOTE_SECONDS and len(ready) < self.most:
                noted, there = now, f"{len(ready)} of at least {self.least} nodes are here"
                limit = f"{now - began:.0f} s, at most {self.wait_seconds:g}"
                note(f"waiting for {names}: {there} ({limit})")

    def _start(self, nodes: list[Node]) -> None:
        """Start the script on ``nodes``, and show each command. Raises: `UserError`."""
        first, options = nodes[0], self.options
        address = first.host.ip
        address = address or (first.hello["address"] if len(nodes) > 1 else "127.0.0.1")
        if address is None or (len(nodes) > 1 and address.startswith("127.")):
            raise UserError(
                f"{first.host.name} was reached at {address}, where the other nodes cannot reach "
                "it: write ip=ADDRESS after it in the hosts file"
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
            shown += [f"{key}=***" for key in given]  # values may be secrets; logs keep this line
            line = f"+ cd {options.dir}; {' '.join(shown)} python {shlex.join(command)}"
            self.lines.put((node, line.encode(), sys.stdout))
            # IMAGENET_ALL_UP: node 0 is running, so the pre-flight check need not wait long for it.
            environment |= {"IMAGENET_ALL_UP": "1"} | given
            job = {"command": command, "folder": options.dir, "python": options.python}
            job |= {"environment": environment, "grace": options.grace}
            node.enter(BUSY)
            node.answered = node.since
            node.say(json.dumps(job).encode() + b"\n")

    def _attempt(self, nodes: list[Node]) -> int | None:
        """Train on ``nodes`` until all have ended. Returns the job's exit code, if it has ended."""
        self._start(nodes)
        began, kill_at = time.monotonic(), math.inf
        ending = ""  # why the nodes were asked to end
        failed: Node | None = None  # the first node that failed
        handled = 0  # number of signals
        while any(node.code is None for node in nodes):
            node, now, orders = self._step(), time.monotonic(), []
            name = node.host.name if node else ""
            if node and node.lost and self.again:
                note(f"lost the connection to {name}; will keep trying")
            elif node and node.lost:
                errors.show(
                    UserError(f"lost the connection to {name}; its guard stops training there")
                )
            # A peer may notice a killed process and end before the killed process's own node does.
            elif (
                node and node.code and (not ending or (node.signal == "SIGKILL" and now < kill_at))
            ):
                killed = f": killed by {node.signal}" if node.signal else ""
                more = "" if ending else "; stopping the rest"
                note(f"{name} ended with exit code {node.code}{killed}{more}")
            if node and node.code and not ending:
                failed, ending = node, "failed"
                orders = [b"TERM\n"]
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
                    orders = [b"TERM\n"]
            ready = [node for node in self.nodes if node.state == READY]
            patient = [node for node in ready if now - node.since > JOIN_SECONDS]
            if patient and not ending and len(nodes) < self.most:
                names = ", ".join(node.host.name for node in ready)
                note(f"stopping with a snapshot, to continue with {names}")
                ending, orders = "joining", [b"TERM\n"]
            orders += [b"KILL\n"] if now >= kill_at else []
            for node in nodes:
                for order in orders:
                    node.say(order)
        return self._decide(nodes, failed, ending == "joining", time.monotonic() - began)

    def _decide(
        self, nodes: list[Node], failed: Node | None, joining: bool, seconds: float
    ) -> int | None:
        """After an attempt, return the job's exit code, or None if another attempt follows."""
        codes = [LOST_PEER if node.lost or node.signal else node.code for node in nodes]
        code = codes[nodes.index(failed)] if failed else 0
        if code == LOST_PEER and BAD_INPUT in codes:
            code = BAD_INPUT  # the cause: the process that lost its peer only exited first
        lost = any(node.lost for node in nodes)
        self.run_host = None if nodes[0].lost else nodes[0].host
        if nodes[0].lost and self.again and not self.signals:
            self.lease_end = nodes[0].answered + guard.LEASE_SECONDS
            if (left := self.lease_end - time.monotonic()) > 0:
                name = nodes[0].host.name
                note(f"waiting {left:.0f} s, until nothing runs on {name} any more")
        for node in nodes:
            node.leave(failed=node.lost)
        if self.signals:
            rest = [one for one in codes if one]
            return INTERRUPTED if INTERRUPTED in rest else (rest or [0])[0]
        if not self.again or codes[0] == 0:
            return 0 if self.again else code or codes[0]
        if code == BAD_INPUT and not lost:
            # Bad input ends the job, unless it came from a node that is new in this attempt.
            new = [node for node in nodes if not node.trusted]
            if not new or len(new) == len(nodes):
                return BAD_INPUT
            for node in new:
                node.failed, node.next_call = True, math.inf
            names = ", ".join(node.host.name for node in new)
            note(f"continuing without {names} (the reason is above)")
        elif lost or joining:
            for node in nodes:
                node.trusted = not node.failed  # a lost node may come back as another machine
            self.quick = 0
        else:  # a process failed, or was stopped on its node: try again, but not for ever
            self.quick = self.quick + 1 if seconds < QUICK_SECONDS else 1
            if self.quick >= QUICK_FAILURES:
                why = f"training has failed {self.quick} times in a row soon after start"
                raise UserError(why, code=code)
        return None
