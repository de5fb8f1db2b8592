"""Runs the commands of an arm side by side, shows and keeps what they print, ends them together."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

GRACE_SECONDS = 20.0  # for the others to end, once one has failed
POLL_SECONDS = 0.1
_PROGRESS = re.compile(r"Epoch \d+/\d+")
# Becomes the command argv[2:], and dies with its parent argv[1], however that dies (prctl(2)); a
# preexec_fn would run Python between fork and exec, where our threads may hold locks.
_TIED = (
    "import ctypes,os,sys;ctypes.CDLL(None).prctl(1,9);"
    "os.getppid()==int(sys.argv[1]) or os._exit(1);os.execvp(sys.argv[2],sys.argv[2:])"
)
STEADY_LINES = 3  # lines about steps; then caches are warm and the GPUs at work


@dataclass(frozen=True)
class Command:
    """Something to run. ``name`` goes before its lines ("" for none); ``environment`` adds to ours.

    ``signals``: what the first and the second Ctrl-C become.
    """

    words: list[str]
    name: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    signals: tuple[int, int] = (signal.SIGTERM, signal.SIGKILL)


class Runner:
    """Runs commands, one list after the other; Ctrl-C (SIGTERM, SIGHUP) stops what runs."""

    def __init__(self) -> None:
        self.stops = 0  # how often the end was asked for
        self.started: list[tuple[Command, subprocess.Popen]] = []
        self.lock = threading.Lock()
        self.error = ""  # the last sentence about a fault that was printed
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, self._stop)

    def _stop(self, signum: int, frame: object) -> None:
        self.stops += 1
        for command, process in self.started:
            if process.poll() is None:
                process.send_signal(command.signals[min(self.stops, 2) - 1])

    def run(
        self, commands: list[Command], log: Path | None, steady: Callable[[], None] | None = None
    ) -> int:
        """Run ``commands`` until all have ended; when one fails, the others are stopped.

        What they print is shown and added to the file ``log``; ``steady`` is called once, when
        training is well under way. Returns: the first exit code that is not 0, else 0.
        """
        self.error, file = "", None
        if log:
            log.parent.mkdir(parents=True, exist_ok=True)
            file = open(log, "ab")
        watch = Steady(steady)
        readers = []
        self.started = []
        for number, command in enumerate(commands):
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", _TIED, str(os.getpid()), *command.words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | command.environment,
                start_new_session=True,  # Ctrl-C is for this process, which passes it on
            )
            self.started.append((command, process))
            first = watch if number == 0 else None
            reader = threading.Thread(
                target=self._show, args=(process.stdout, command.name, file, first), daemon=True
            )
            reader.start()
            readers.append(reader)
        code = self._wait()
        for reader in readers:
            reader.join(GRACE_SECONDS)
        watch.join()
        if file:
            with self.lock:
                file.close()
        return code

    def _wait(self) -> int:
        code, deadline = 0, float("inf")
        while living := [process for _, process in self.started if process.poll() is None]:
            time.sleep(POLL_SECONDS)
            ended = [p.poll() for _, p in self.started if p.poll()]
            if ended and not code:
                code, deadline = ended[0], time.monotonic() + GRACE_SECONDS
                for process in living:
                    process.terminate()
            if time.monotonic() > deadline:
                for process in living:
                    process.kill()
        code = code or next((p.returncode for _, p in self.started if p.returncode), 0)
        return 128 - code if code < 0 else code

    def _show(
        self, source: BinaryIO, name: str, log: BinaryIO | None, watch: "Steady | None"
    ) -> None:
        for line in source:
            self.show(line, name, log, watch)

    def show(self, line: bytes, name: str, log: BinaryIO | None, watch: "Steady | None") -> None:
        """Show a line, behind ``name``, and add it to ``log``; remember a fault that it names."""
        label = f"[{name}] ".encode() if name else b""
        text = line.decode(errors="replace").strip()
        if (place := text.find("error")) >= 0 and ": " in text[place:]:
            self.error = text[place:].partition(": ")[2]
        if watch:
            watch.see(text)
        with self.lock:
            if log and not log.closed:
                log.write(label + line)
                log.flush()
            sys.stdout.buffer.write(label + line)
            sys.stdout.flush()


class Steady:
    """Calls a function, in a thread of its own, when enough lines about steps were seen."""

    def __init__(self, call: Callable[[], None] | None):
        self.call, self.seen = call, 0
        self.thread: threading.Thread | None = None

    def see(self, text: str) -> None:
        """Count a line if it is about steps."""
        self.seen += bool(_PROGRESS.search(text))
        if self.call and self.seen >= STEADY_LINES and self.thread is None:
            self.thread = threading.Thread(target=self.call, daemon=True)
            self.thread.start()

    def join(self) -> None:
        """Wait until the function has returned, if it was called."""
        if self.thread:
            self.thread.join(2 * GRACE_SECONDS)
