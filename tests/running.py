"""Scripts in the background: wait for a line, send a signal, see which processes live."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, SMALL, TIMEOUT, Result, environment, scalars

# A model of tests/stand_in without dropout, for a command line.
TINY_LINE = "-a tiny_plain --image-size 32 -b 5 -j 1"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
# Never the same twice: of an epoch, and of a step.
SPEED = ("Throughput/", "Time/", "IO/", "CPU/", "GPU/")
MEASURED = (*SPEED, "Step/throughput", "Step/data_s", "Step/compute_s", "Step/communication_s")


def free_port() -> int:
    """A TCP port that is free, and none of those that the kernel gives to connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def alone() -> dict[str, str]:
    """The environment of a job's only process, as torchrun sets it."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    place = dict(zip(names, "0011", strict=True))
    return place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A disk of a megabyte, at a folder."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(ballast: Path) -> None:
    """Write this file until its disk is full."""
    with open(ballast, "wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(b"x" * 4096)


class Running:
    """A command of this interpreter, in its own session, as if in its own terminal.

    As a context manager it ends, on exit, all processes that the command has started.
    """

    def __init__(self, *arguments: object, **env: str):
        self.errors = tempfile.TemporaryFile("w+")
        self.process = self.launch(*arguments, **env)
        self.pid = self.process.pid
        self.seen: list[str] = []
        self.family: set[Process] = set()
        self.limit = threading.Timer(TIMEOUT, lambda: self.send(signal.SIGKILL))
        self.limit.start()

    def launch(self, *arguments: object, **env: str) -> Any:
        """Start the command, with its errors in the file ``errors``."""
        return subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=ROOT,
            env=environment(**env),
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.limit.cancel()
        self.meet_family()
        self.process.kill()
        self.process.wait()
        for member in self.family:
            if member.lives():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGKILL)
        self.process.stdout.close()
        self.errors.close()

    def allow(self, seconds: float) -> None:
        """From now on, let the command run for so long, not `TIMEOUT`."""
        self.limit.cancel()
        self.limit = threading.Timer(seconds, self.limit.function)
        self.limit.start()

    def until(self, pattern: str) -> str:
        """Read lines until one matches ``pattern``; fail if the command ends first."""
        for line in self.process.stdout:
            self.seen.append(line)
            if re.search(pattern, line):
                return line
        self.process.wait()
        raise AssertionError(f"no line {pattern!r} in\n{''.join(self.seen)}{self._error_text()}")

    def send(self, signum: int, group: bool = False) -> None:
        """Send a signal to the command, or, as a terminal does, to its whole process group."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, signum)

    def result(self) -> Result:
        """Wait for the end of the command."""
        self.seen.append(self.process.stdout.read())
        code = self.process.wait()
        self.limit.cancel()
        return Result(code, "".join(self.seen), self._error_text())

    def said(self) -> str:
        """The error output so far. The command's own position in the file stays."""
        return os.pread(self.errors.fileno(), 2**20, 0).decode()

    def meet_family(self) -> "set[Process]":
        """The living processes that the command has started, directly or not."""
        # Those of now come first: a process that was met between fork and exec has another command.
        self.family = descendants(self.process.pid) | self.family
        return self.family

    def _error_text(self) -> str:
        self.errors.seek(0)
        return self.errors.read()


def start(script: str, *arguments: object, launcher: tuple = (), **env: str) -> Running:
    """Start a script on a `SMALL` model, with ``launcher`` and its options before its name."""
    return Running(*launcher, script, *SMALL, *arguments, **env)


@dataclass(init=False, unsafe_hash=True)
class Process:
    """A process; its start time distinguishes it from a later one with the same id."""

    pid: int
    started: int
    command: str = field(compare=False)

    def __init__(self, pid: int):
        self.pid = pid
        _, self.parent, self.group, self.started = _stat(pid)
        self.command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")

    def lives(self) -> bool:
        """Whether it still runs; a dead one whose exit code nobody has collected does not."""
        try:
            state, *_, started = _stat(self.pid)
        except OSError:
            return False
        return started == self.started and state not in "ZX"


def _stat(pid: int) -> tuple[str, int, int, int]:
    """State, parent, group and start time of a process. Raises OSError when it is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[1]), int(fields[2]), int(fields[19])


def everyone() -> list[Process]:
    """All processes on the machine, including dead ones whose exit code nobody has collected."""
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                processes.append(Process(int(entry.name)))
    return processes


def descendants(pid: int) -> set[Process]:
    """All living processes below ``pid``."""
    others = everyone()
    family, parents = set(), {pid}
    while parents:
        children = {one for one in others if one.parent in parents} - family
        family |= children
        parents = {child.pid for child in children}
    return {one for one in family if one.lives()}


def eventually(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Whether ``condition`` becomes true within a generous limit."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def wait_for_group(group: int, seconds: float = 60.0) -> list[Process]:
    """Wait until a process group has ended. Returns those that still live after ``seconds``."""

    def living() -> list[Process]:
        return [one for one in everyone() if one.group == group and one.lives()]

    eventually(lambda: not living(), seconds)
    return living()


def snapshot(run: Path, name: str = "snapshot.pt") -> dict:
    """The content of a run's snapshot."""
    import torch  # here, as processes that start with this file shall not load it

    return torch.load(run / name, weights_only=True)


def same(one: Any, other: Any) -> bool:
    """Whether two dictionaries or sequences hold the same tensors, bit for bit."""
    import torch

    a, b = (x if isinstance(x, dict) else dict(enumerate(x)) for x in (one, other))
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


def assert_same_weights(one: Path, other: Path, tolerance: float = 0.0) -> None:
    """The snapshots of two runs hold the same weights, buffers, momentum and averages.

    Bit for bit unless there is a ``tolerance``, relative and absolute.
    """
    import torch

    ours, theirs = (
        {"model": x["model"], "ema": x["ema"], "moments": x["optimizer"]["state"]}
        for x in (snapshot(one), snapshot(other))
    )
    assert ours["moments"]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def assert_same_curves(run: Path, other: Path, tolerance: float = 0.0) -> None:
    """The same points, each once."""
    # A run that was on two processes for a while has curves of the second one's hardware.
    of_ranks = ("CPU/", "GPU/", "Memory/")
    ours, theirs = (
        {
            tag: tuple(zip(*points, strict=True))
            for tag, points in scalars(one).items()
            if not tag.startswith(of_ranks)
        }
        for one in (run, other)
    )
    assert ours.keys() == theirs.keys() >= {"Step/loss", "Top1/val"}
    for tag, (x, y) in ours.items():
        assert list(x) == sorted(set(x)), f"{tag} runs backward"
        if tag.startswith(SPEED):
            continue  # an epoch that was resumed after its last step has no speed
        assert x == theirs[tag][0], tag
        if not tag.startswith(MEASURED):
            near = {"rel": tolerance, "abs": tolerance / 100}  # a step's loss is ~0
            assert y == pytest.approx(theirs[tag][1], **near), tag
