"""A job on several nodes over ssh, from the first connection to the exit code.

This process reaches the nodes, starts a program on each, shows their output, passes signals on and
ends all nodes together. The program on a node is torchrun (launcher.py) or the doctor. elastic.py
adds what a job needs that goes on when nodes are lost.

On each node a guard (guard.py) runs the program, and leaves nothing behind. This process talks to
it through ssh.
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
from typing import IO, Any

import guard
import hosts
from hosts import SSH_FAILED, Host, note

from utils.start import errors, signals
from utils.start.errors import BAD_INPUT, INTERRUPTED, LOST_PEER, UserError

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CALL_SECONDS = 30.0  # time for a node to answer
LOST_SECONDS = 6.0  # time for the others to end after a node failed: no snapshot is possible then
END_SECONDS = 30.0  # time for the other nodes to end when the first has finished
PAUSE_SECONDS = 5.0  # a longer pause of this process (SIGSTOP) says nothing about the nodes
RETRY_SECONDS = 10.0  # between attempts to reach a lost node
_HELLO, _HEARTBEAT = guard.HELLO.encode(), guard.HEARTBEAT.encode()
TORCHRUN = "scripts/torchrun.py"
AWAY, CALLED, READY, BUSY = range(4)  # READY: the guard waits for a job, BUSY: it has one


class Node:
    """A host and, while it is connected, its guard. Times are those of the monotonic clock."""

    def __init__(self, host: Host, job: "Job"):
        self.host, self.job = host, job
        self.colour = 36 - len(job.nodes) % 6  # cyan, magenta, blue, yellow, green, red
        self.failed = False  # whether it has failed since its last answer
        self.next_call = 0.0  # time of the next call; inf: the node is left out
        self.port = 0  # of its end of a tunnel to this machine
        self.is_new = False  # whether it has joined a job that had begun
        self.quick = 0  # how often in a row its program has ended soon
        self.enter(AWAY)

    def enter(self, state: int) -> None:
        """Set the state, and the time when it began."""
        self.state, self.since = state, time.monotonic()
        self.answered = self.since  # time of the guard's last heartbeat
        if state in (AWAY, CALLED):
            self.hello: dict[str, Any] = {}
            self.code: int | None = None

    def leave(self, failed: bool) -> None:
        """After the connection ended: call again at once; after a failure, later."""
        self.enter(AWAY)
        self.failed = failed
        self.next_call = self.since + (RETRY_SECONDS if failed else 0.0)

    def connect(self) -> None:
        """Start a guard. Events: (node, None) when it has started, (node, exit code) at its end."""
        program = hosts.program(guard.__file__, {})
        self.lock, self.pipe = threading.Lock(), self.job.open(self, program)
        self.enter(CALLED)
        threading.Thread(target=self._follow, args=(self.pipe,), daemon=True).start()

    def say(self, order: bytes) -> None:
        """Send an order, or answer a heartbeat, if the guard still exists."""
        if self.state != AWAY and self.code is None:
            with suppress(OSError), self.lock:
                stdin = _open(self.pipe.stdin)
                stdin.write(order)
                stdin.flush()

    def _follow(self, pipe: "subprocess.Popen[bytes]") -> None:
        words = (_open(pipe.stderr), sys.stderr)
        other = threading.Thread(target=self._read, args=words, daemon=True)
        other.start()
        self._read(_open(pipe.stdout), sys.stdout)
        other.join()
        self.job.events.put((self, pipe.wait()))

    def _read(self, source: Iterable[bytes], stream: Any) -> None:
        """Handle lines of output: those for this process, and those to show."""
        for line in source:
            # A heartbeat may follow a line of the program that is not complete yet.
            text, heartbeat, moment = line.partition(_HEARTBEAT)
            if heartbeat:
                self.answered = time.monotonic()
                self.say(heartbeat + moment)
            _, hello, facts = line.partition(_HELLO)  # the login shell may have set a title
            if hello and not self.hello:
                self.hello = json.loads(facts)
                self.hello["ahead"] = self.hello["time"] - time.time()  # of this clock
                self.job.events.put((self, None))
            elif text and (self.hello or not self.failed):  # show the reason of a failure once
                self.job.lines.put((self, text, stream))

    @property
    def lost(self) -> bool:
        """Whether the connection has ended before the guard reported an exit code."""
        return self.code == SSH_FAILED or (self.code or 0) < 0

    @property
    def signal(self) -> str:
        """The signal that ended the processes there."""
        with suppress(ValueError):
            return signal.Signals((self.code or 0) - 128).name
        return ""

    @property
    def result(self) -> int:
        """The exit code; LOST_PEER if the node or its processes were lost."""
        return LOST_PEER if self.lost or self.signal else self.code or 0


def _open(pipe: IO[bytes] | None) -> IO[bytes]:
    """``pipe``, which is one of those that `Job.open` has asked for."""
    assert pipe is not None
    return pipe


class Job:
    """Runs ``command`` on all ``machines``.

    If it begins with `TORCHRUN`, this adds torchrun's options for the place of the node in the job.
    Any other program gets its place from environment variables.

    ``options``: dir, env, grace, port, python, ssh. ``mark``: as in `hosts.remote_python`.
    """

    def __init__(
        self, options: argparse.Namespace, command: list[str], machines: list[Host], mark: str
    ):
        self.options, self.command, self.mark = options, command, mark
        self.events: queue.SimpleQueue[tuple[Node, int | None]] = queue.SimpleQueue()
        # The nodes' output. A thread prints it, so that heartbeats do not wait for a slow reader.
        self.lines: queue.Queue[tuple[Node, bytes, Any]] = queue.Queue()
        self.nodes: list[Node] = []
        for host in machines:
            self.nodes.append(Node(host, self))
        self.running: list[Node] = []  # nodes that have been given the program
        self.failed: Node | None = None  # the first node that failed
        self.ending = ""  # why the nodes were asked to end
        self.kill_at = math.inf
        self.signals: list[int] = []  # signals received
        self._handled = 0  # number of signals handled
        self._stepped = time.monotonic()

    @property
    def run_host(self) -> Host | None:
        """The host with the run directory; None if it was lost."""
        first = self.running[:1]
        return first[0].host if first and not first[0].lost else None

    def open(self, node: Node, program: bytes) -> "subprocess.Popen[bytes]":
        """Start an ssh that runs ``program``, the guard, on a node."""
        # ssh has its own session, so that Ctrl-C at the terminal reaches only this process.
        pipe = subprocess.PIPE
        command = hosts.remote_python(self.options.ssh, node.host, self.mark, self.tunnel(node))
        ssh = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        with suppress(OSError):  # it has ended already
            _open(ssh.stdin).write(program)
            _open(ssh.stdin).flush()
        return ssh

    def tunnel(self, node: Node) -> list[str]:
        """More options for ssh."""
        return []

    def run(self) -> int:
        """Run the program until the end. Returns the job's exit code."""
        signals.handle(lambda number, _: self.signals.append(number), STOPS)
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # a suspended launcher would lose its nodes
        threading.Thread(target=self._write, daemon=True).start()
        code = None
        try:
            while code is None:
                if node := self._step():
                    self.ended(node)
                self.admit()
                self._obey()
                code = self.exit_code()
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
        """Connect, then wait up to 0.5 s for an event. Returns a node whose program has ended."""
        if not (self.signals or self.ending):
            self._call()
        self._check_heartbeats()
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
        failed = hosts.ssh_failed(self.options.ssh, node.host)
        self.unreached(node, f"lost the connection to {node.host.name}" if node.hello else failed)
        return None

    def _call(self) -> None:
        """Connect to each host that is due. Close connections that have brought no answer."""
        now = time.monotonic()
        for node in self.nodes:
            if node.state == AWAY and now >= node.next_call:
                node.connect()
            elif node.state == CALLED and not node.hello and now - node.since > CALL_SECONDS:
                node.pipe.terminate()

    def _check_heartbeats(self) -> None:
        """End the connection to a node whose guard is silent; the guard then ends its program."""
        now = time.monotonic()
        is_late = now - self._stepped > PAUSE_SECONDS
        self._stepped = now
        for node in self.nodes:
            if is_late:
                node.answered = now
            if node.state == BUSY and now - node.answered > guard.SILENCE_SECONDS:
                node.pipe.kill()

    # ---- what an elastic job does in another way

    def unreached(self, node: Node, reason: str) -> None:
        """No guard answers on a node that has no program yet. Raises: `UserError`."""
        raise UserError(reason)

    def admit(self) -> None:
        """Start the program when all nodes have answered."""
        if self.running:
            return
        if self.signals:
            text = "interrupted while waiting for nodes"
            raise UserError(text, code=128 + self.signals[-1])
        if all(node.state == READY for node in self.nodes):
            self.start(self.nodes)

    def ended(self, node: Node) -> None:
        """When a node fails, end the others, too."""
        name = node.host.name
        if node.lost:
            text = f"lost the connection to {name}; its guard stops training there"
            errors.show(UserError(text))
        # A peer may notice a killed process and end before the killed process's own node does.
        elif node.code and (
            not self.ending or (node.signal == "SIGKILL" and time.monotonic() < self.kill_at)
        ):
            self.note_end(node, "" if self.ending else "; stopping the rest")
        if node.code and not self.ending:
            self.failed = node
            # After an interruption, the others will agree on a snapshot.
            self.end("failed", math.inf if node.code == INTERRUPTED else LOST_SECONDS)
        elif node is self.running[0] and node.code == 0:
            self.finish()

    def exit_code(self) -> int | None:
        """Return the job's exit code; None if it has not ended."""
        if not self.running or any(node.code is None for node in self.running):
            return None
        codes = [node.result for node in self.running]
        if self.signals:
            return interrupted_code(codes)
        code = self.failed.result if self.failed else 0
        if code == LOST_PEER and BAD_INPUT in codes:
            code = BAD_INPUT  # the cause: the process that lost its peer only exited first
        return code or codes[0]

    def rendezvous(self, node: Node, rank: int, nodes: int, master: tuple[str, int]) -> list[str]:
        """Return torchrun's options for the place of a node in the job."""
        place = [f"--nnodes={nodes}", f"--node_rank={rank}"]
        return [*place, f"--master_addr={master[0]}", f"--master_port={master[1]}"]

    def environment(self, rank: int, nodes: int, master: tuple[str, int]) -> dict[str, str]:
        """Return the variables that give the program its place in the job."""
        if self.command[0] == TORCHRUN:
            return {}
        place = {"MASTER_ADDR": master[0], "MASTER_PORT": str(master[1])}
        return place | {"WORLD_SIZE": str(nodes), "NODE_RANK": str(rank)}

    # ---- parts of the above

    def start(self, nodes: list[Node]) -> None:
        """Start the program on ``nodes``, and show each command. Raises: `UserError`."""
        master = (self.address(nodes[0]), self.options.port or nodes[0].hello["port"])
        given = dict(self.options.env or ())
        for rank, node in enumerate(nodes):
            environment = self.environment(rank, len(nodes), master)
            words, shown = self.command, ["python", *self.command]
            if words[0] == TORCHRUN:
                place = self.rendezvous(node, rank, len(nodes), master)
                place.append(f"--nproc_per_node={node.host.slots or 'gpu'}")
                words = [TORCHRUN, *place, *words[1:]]
                shown = ["torchrun", *words[1:]]
            variables = [f"{key}={shlex.quote(value)}" for key, value in environment.items()]
            variables += [f"{key}=***" for key in given]  # may be secrets, and logs keep this line
            line = " ".join([*variables, shlex.join(shown)])
            self.lines.put(
                (node, f"+ cd {shlex.quote(self.options.dir)}; {line}".encode(), sys.stdout)
            )
            # IMAGENET_ALL_UP: all nodes are running, so the pre-flight check need not wait long.
            place = f"{rank} {len(nodes)} {master[0]}:{master[1]}"
            environment |= {"IMAGENET_ALL_UP": place} | given
            job = {"command": words, "folder": self.options.dir, "python": self.options.python}
            job |= {"environment": environment, "grace": self.options.grace}
            node.enter(BUSY)
            node.say(json.dumps(job).encode() + b"\n")
        self.running = [*self.running, *nodes]

    def address(self, node: Node) -> str:
        """Return the address at which other nodes reach a node. Raises: `UserError`."""
        if len(self.nodes) == 1 and not node.host.ip:
            return "127.0.0.1"
        address = node.host.ip or node.hello["address"]
        if address is None or (len(self.nodes) > 1 and address.startswith("127.")):
            raise UserError(
                f"{node.host.name} was reached at {address}, where the other nodes cannot reach "
                "it: write ip=ADDRESS after it in the hosts file"
            )
        if ":" in address:  # gloo would look up the node's own name, often 127.0.1.1
            text = f"{node.host.name} has the IPv6 address {address}, but the nodes need IPv4: "
            raise UserError(text + "write ip=ADDRESS after it in the hosts file")
        return address

    def end(self, why: str, seconds: float) -> None:
        """Ask all nodes to end, and kill their processes after so many seconds."""
        self.ending, self.kill_at = why, min(self.kill_at, time.monotonic() + seconds)
        self.tell(b"TERM\n")

    def finish(self) -> None:
        """Give the other nodes some time to finish as well."""
        self.ending = self.ending or "done"
        self.kill_at = min(self.kill_at, time.monotonic() + END_SECONDS)

    def tell(self, order: bytes) -> None:
        """Send an order to all nodes."""
        for node in self.running:
            node.say(order)

    def note_end(self, node: Node, more: str) -> None:
        """Print a line about a program that has failed."""
        killed = f": killed by {node.signal}" if node.signal else ""
        note(f"{node.host.name} ended with exit code {node.code}{killed}{more}")

    def _obey(self) -> None:
        """Pass signals on; kill what has not ended in time."""
        if len(self.signals) > self._handled and self.running:
            self._handled += 1
            if self._handled > 1 and self.signals[-1] == signal.SIGINT:
                note("ending all nodes at once")
                self.ending, self.kill_at = "interrupted", time.monotonic()
            else:
                grace = self.options.grace
                note(f"asking all nodes to stop with a snapshot within {grace:g} s")
                self.end("interrupted", math.inf)
        if time.monotonic() >= self.kill_at:
            self.tell(b"KILL\n")


def interrupted_code(codes: list[int]) -> int:
    """The exit code of an interrupted job: INTERRUPTED if a node has written a snapshot."""
    failed = [code for code in codes if code]
    return INTERRUPTED if INTERRUPTED in failed else (failed or [0])[0]
