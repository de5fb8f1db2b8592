"""A training on several nodes: from the first ssh connection to the last exit code."""

import argparse
import json
import os
import queue
import shlex
import signal
import sys
import threading
import time

import hosts
from connection import Node, Screen
from guard import HEARTBEAT_SECONDS, SILENCE_SECONDS
from hosts import SSH_FAILED, Host, note

from utils import errors

SILENT_BEATS = 10  # without a sign of life; 30 s, as a node ends a guard that is stopped in 22 s
HELLO_SECONDS = 30.0
LOST_SECONDS = 6.0  # for the others to end once a node is out of reach


class Job:
    """All nodes of one training, from the first connection to the last exit code."""

    def __init__(self, options: argparse.Namespace, machines: list[Host], command: list[str]):
        self.options, self.machines, self.command = options, machines, command
        self.screen = Screen([host.name for host in machines])
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.interrupts = 0
        self.code: int | None = None  # of the job: the first that is not 0
        self.nodes: list[Node] = []

    def run(self) -> int:
        """Start everywhere, wait for all. Returns the job's exit code."""
        self.catch_signals()
        for host in self.machines:
            self.nodes.append(Node(host, self.options.ssh, self.screen, self.events))
        late = threading.Timer(HELLO_SECONDS, self.events.put, ((None, "late", None),))
        for thread in (late, threading.Thread(target=self.beat)):
            thread.daemon = True
            thread.start()
        while any(node.code is None for node in self.nodes):
            node, what, more = self.events.get()
            if what == "signal":
                self._interrupt(more)
            elif what == "hello" and all(node.hello for node in self.nodes):
                self._start()
            elif what == "stop":
                self.sleep()
            elif what == "silent":
                self._give_up_on_stopped(node)
            elif what == "late":
                self._give_up_on_silent()
            elif what == "ended":
                node.code = more
                self._ended(node)
        return self.code or 0

    def catch_signals(self) -> None:
        """Make events of Ctrl-C, Ctrl-Z and the like."""
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, lambda number, _: self.events.put((None, "signal", number)))
        signal.signal(signal.SIGTSTP, lambda *_: self.events.put((None, "stop", None)))

    def connected(self) -> list[Node]:
        """All guards that are to hear from this process."""
        return [node for node in self.nodes if node.code is None]

    def beat(self) -> None:
        """Send heartbeats, and miss the guards' own, for ever."""
        pause = threading.Event()
        while not pause.wait(HEARTBEAT_SECONDS):
            for node in self.connected():
                node.say(b"\n")
                if node.count_silence() == SILENT_BEATS:
                    self.events.put((node, "silent", None))

    @property
    def fetch_from(self) -> Host | None:
        """A host that can give the run directory; None if none can be reached."""
        first = self.nodes[0]
        return first.host if first.hello and first.code != SSH_FAILED else None

    def _start(self) -> None:
        if self.code is None and not self.nodes[0].started:
            wrong = self.start_on(self.nodes)
            if wrong:
                self._stop(wrong)

    def start_on(self, nodes: list[Node], more: dict[str, str] | None = None) -> str | None:
        """Start the training on ``nodes``, in the order of ranks; ``more`` is for its environment.

        Returns: why that is impossible.
        """
        first, several = nodes[0], len(nodes) > 1
        address = first.host.ip or (first.hello["address"] if several else "127.0.0.1")
        if several and (address is None or address.startswith("127.")):
            return (
                f"{first.host.name} was reached at {address}, where the other nodes cannot reach "
                "it: write ip=ADDRESS behind it in the hosts file"
            )
        meeting = {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(self.options.port or first.hello["port"]),
            "WORLD_SIZE": str(len(nodes)),
        }
        for rank, node in enumerate(nodes):
            given = dict(self.options.env or ())
            environment = meeting | {"NODE_RANK": str(rank)} | (more or {}) | given
            slots = [] if node.host.slots is None else ["-g", str(node.host.slots)]
            command = [*self.command[:1], *slots, *self.command[1:]]
            shown = " ".join(  # what was given may be a secret, and this is kept in logs
                f"{name}=***" if name in given else f"{name}={shlex.quote(value)}"
                for name, value in environment.items()
            )
            line = f"+ cd {self.options.dir}; {shown} python {shlex.join(command)}"
            self.screen.line(node.host.name, line.encode())
            job = {
                "command": command,
                "folder": self.options.dir,
                "environment": environment,
                "python": self.options.python,
                "grace": self.options.grace,
            }
            node.say(json.dumps(job).encode() + b"\n")
            node.started = True
        return None

    def _interrupt(self, signum: int) -> None:
        self.interrupts += 1
        if self.interrupts > 1 and signum == signal.SIGINT:
            note("ending all nodes at once")
            self.say_all(b"KILL\n")
        elif not any(node.started for node in self.nodes):
            self._stop("interrupted before the training began", 128 + signum)
        else:
            note(f"asking all nodes to stop with a snapshot within {self.options.grace:g} s")
            self.say_all(b"TERM\n")

    def sleep(self) -> None:
        """Ctrl-Z: the nodes cannot tell a launcher that is stopped from one that is gone."""
        note(
            f"stopped; {SILENCE_SECONDS:g} s from now the nodes end the training, with a snapshot, "
            "unless `fg` or `bg` continues this before"
        )
        before = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)
        note(f"continued after {time.monotonic() - before:.0f} s")

    def _give_up_on_stopped(self, node: Node) -> None:
        """End the job when a guard that is connected gives no sign of life: it is stopped."""
        if node.code is not None:
            return
        limit = SILENT_BEATS * HEARTBEAT_SECONDS
        name = node.host.name
        sentence = f"no sign of life from {name} for {limit:g} s: ending what runs there"
        if self.code is None:
            self._stop(sentence, 1)
        else:
            note(sentence)
        self._kill_later()
        wake = (self.options.ssh, HELLO_SECONDS)
        threading.Thread(target=node.wake_to_end, args=wake, daemon=True).start()

    def _kill_later(self) -> None:
        """Without one node's ranks the others cannot agree on a snapshot, and may hang."""
        timer = threading.Timer(LOST_SECONDS, self.say_all, (b"KILL\n",))
        timer.daemon = True
        timer.start()

    def _give_up_on_silent(self) -> None:
        silent = [n.host.name for n in self.nodes if n.hello is None and n.code is None]
        if silent:
            self._stop(
                f"no answer from {', '.join(silent)} within {HELLO_SECONDS:g} s: does "
                f"`{self.options.ssh} {silent[0]} python3 -V` work?"
            )

    def _ended(self, node: Node) -> None:
        name = node.host.name
        if node.hello is None and self.code is None:
            if node.code == SSH_FAILED:
                why = hosts.ssh_failed(self.options.ssh, node.host)
            else:
                why = f"{name} has no working python3 (exit code {node.code})"
            self._stop(why)
        elif node.code == SSH_FAILED and self.code is None:
            self._stop(f"lost the connection to {name}; its guard will end what runs there", 1)
            self._kill_later()
        elif node.code and self.code is None:
            self.code = node.code
            if node.code != errors.INTERRUPTED:
                rest = any(other.code is None for other in self.nodes)
                note(f"{name} ended with exit code {node.code}{'; stopping the rest' * rest}")
            self.say_all(b"TERM\n")

    def _stop(self, sentence: str, code: int = errors.BAD_INPUT) -> None:
        """Report why the job cannot continue, and end it."""
        print(f"error: {sentence}", file=sys.stderr, flush=True)
        self.code = code
        self.say_all(b"TERM\n")
        for node in self.nodes:  # a guard without a job ends with its ssh
            if node.code is None and not node.started:
                node.ssh.terminate()

    def say_all(self, order: bytes) -> None:
        """Send an order to all guards."""
        for node in self.connected():
            node.say(order)
