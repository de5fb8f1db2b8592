"""The ssh connection to one node of a training, and the screen on which all nodes print."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

import guard
import hosts
from hosts import Host, note

_HELLO = guard.HELLO.encode()
_GUARD = Path(guard.__file__)
_COLOURS = (36, 33, 35, 32, 34, 31)  # cyan, yellow, magenta, green, blue, red


class Screen:
    """Standard output and error of this process, shared by all nodes, one line at a time."""

    def __init__(self, names: list[str]):
        self.lock = threading.Lock()
        self.width = max(map(len, names)) + 2
        self.colour = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}

    def line(self, name: str, text: bytes, stream: Any = None) -> None:
        """Show a line from a node; it is dropped if nobody reads our output any more."""
        stream = stream or sys.stdout
        label = f"[{name}]".ljust(self.width)
        if stream.isatty() and "NO_COLOR" not in os.environ:
            label = f"\033[{self.colour[name]}m{label}\033[0m"
        try:
            with self.lock:
                stream.buffer.write(label.encode() + b" " + text.rstrip(b"\r\n") + b"\n")
                stream.flush()
        except OSError:
            pass


class Node:
    """A host, and the ssh whose other end is its guard.

    Its events go to ``events`` as (node, what, more): "hello" with a dict, then "ended" with the
    exit code.
    """

    def __init__(self, host: Host, ssh: str, screen: Screen, events: queue.SimpleQueue):
        self.host, self.screen, self.events = host, screen, events
        self.code: int | None = None
        self.hello: dict | None = None
        self.started = False
        self.showing = False  # whether a line waits for the screen, where somebody may read slowly
        self.unheard = 0  # heartbeats of the launcher since the guard's last sign of life
        # In a session of its own: Ctrl-C at the terminal is for this process, not for ssh.
        self.ssh = subprocess.Popen(
            hosts.remote_python(ssh, host, mark="guard"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.lock = threading.Lock()
        self.say(hosts.program(_GUARD, {}))
        threading.Thread(target=self._follow, daemon=True).start()

    def say(self, data: bytes) -> None:
        """Send to the guard; one that is gone will be reported as ended."""
        try:
            with self.lock:
                self.ssh.stdin.write(data)
                self.ssh.stdin.flush()
        except OSError:
            pass

    def _follow(self) -> None:
        other = threading.Thread(target=self._show, args=(self.ssh.stderr, sys.stderr), daemon=True)
        other.start()
        self._show(self.ssh.stdout, sys.stdout)
        other.join()
        self.events.put((self, "ended", self.ssh.wait()))

    def _show(self, source: BinaryIO, stream: Any) -> None:
        rest = b""
        while data := source.read1(1 << 16):
            *lines, rest = (rest + data.replace(guard.ALIVE, b"")).split(b"\n")
            if stream is sys.stdout:
                self.showing = True
            for line in lines:
                self._take(line, stream)
            if stream is sys.stdout:
                self.unheard, self.showing = 0, False
        if rest:
            self._take(rest, stream)

    def _take(self, line: bytes, stream: Any) -> None:
        if self.hello is None and line.startswith(_HELLO):
            self.hello = json.loads(line[len(_HELLO) :])
            self.events.put((self, "hello", self.hello))
        else:
            self.screen.line(self.host.name, line, stream)

    def count_silence(self) -> int:
        """To be called at each heartbeat: how many the guard has let pass without a sign of life.

        Counted, not timed, as this process may be stopped for a while itself.
        """
        if self.hello and not self.showing:
            self.unheard += 1
        return self.unheard

    def wake_to_end(self, ssh: str, seconds: float) -> None:
        """Wake a guard that is stopped, by an ssh of its own, so that it ends; see guard.py."""
        arguments = {"end": self.hello["process"]}
        try:
            subprocess.run(
                hosts.remote_python(ssh, self.host, mark="guard"),
                input=hosts.program(_GUARD, arguments),
                stdout=subprocess.DEVNULL,
                timeout=seconds,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            name = self.host.name
            note(f"{name} cannot be reached: what runs there is left; later, scripts/cleanup.sh")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.ssh.wait(2)
        self.ssh.kill()  # it may be what was stopped
