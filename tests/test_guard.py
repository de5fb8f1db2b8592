"""scripts/ssh/guard.py without ssh: whoever is stopped for longer than its limit counts as gone."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from conftest import ROOT
from running import descendants, eventually

GUARD = (ROOT / "scripts" / "ssh" / "guard.py").read_text()
LIMITS = {"SILENCE_SECONDS = 15.0": "SILENCE_SECONDS = 2.0", "LOST = 6.0": "LOST = 2.0"}
# A training with a loader worker; asked to end, it takes its time, or does not care.
JOB = """
import pathlib, signal, subprocess, sys, time
def end(*_):
    pathlib.Path(sys.argv[1]).write_text("snapshot")
    sys.exit(75)
signal.signal(signal.SIGTERM, end if sys.argv[2] == "willing" else signal.SIG_IGN)
ignores = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", ignores])
print("up", flush=True)
time.sleep(600)
"""


def source(arguments: dict) -> str:
    """The guard as it is sent to a node, with short limits."""
    text = GUARD
    for usual, short in LIMITS.items():
        assert text.count(usual) == 1
        text = text.replace(usual, short)
    return text.replace('globals().get("ARGUMENTS")', repr(arguments))


class Guard:
    """A guard whose launcher is this process, with a job that has started."""

    def __init__(self, folder, job: str):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, "-uc", source({})], **pipes)
        hello = self.process.stdout.readline().decode().lstrip("\0")
        self.identity = json.loads(hello.removeprefix("@@guard "))["process"]
        self.snapshot = folder / "snapshot"
        command = ["-c", JOB, str(self.snapshot), job]
        self.say({"command": command, "folder": "/", "python": sys.executable})
        assert self.process.stdout.readline().lstrip(b"\0") == b"up\n"
        assert eventually(lambda: len(descendants(self.process.pid)) == 3)
        self.family = descendants(self.process.pid)  # what watches it, the job and its worker
        self.quiet = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def say(self, job: dict) -> None:
        line = json.dumps(job | {"environment": {}, "grace": 20}) + "\n"
        self.process.stdin.write(line.encode())
        self.process.stdin.flush()

    def _beat(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while not self.quiet.wait(0.3):
                self.process.stdin.write(b"\n")
                self.process.stdin.flush()

    def alone(self) -> bool:
        """Whether all that it has started has ended."""
        return not any(one.lives() for one in self.family)

    def all_stopped(self) -> bool:
        everyone = [self.process.pid, *(one.pid for one in self.family)]
        return all(") T " in open(f"/proc/{pid}/stat").read() for pid in everyone)


@pytest.fixture
def guard(tmp_path, request):
    started = Guard(tmp_path, getattr(request, "param", "willing"))
    yield started
    started.quiet.set()
    started.process.kill()
    for one in started.family:
        if one.lives():
            os.kill(one.pid, signal.SIGKILL)
    started.process.wait()
    for pipe in (started.process.stdin, started.process.stdout, started.process.stderr):
        with contextlib.suppress(OSError):
            pipe.close()


@pytest.mark.parametrize("launcher", ["beats", "is gone"])
def test_a_guard_that_is_stopped_wakes_up_to_end(guard, launcher):
    guard.process.send_signal(signal.SIGSTOP)
    if launcher == "is gone":
        guard.quiet.set()
        guard.process.stdin.close()
    assert guard.process.wait(60) == 75
    assert guard.snapshot.read_text() == "snapshot"
    assert guard.alone()
    assert b"guard: stopped for 2 s: ending the training" in guard.process.stderr.read()


@pytest.mark.parametrize("guard", ["stubborn"], indirect=True)
def test_a_job_that_does_not_end_is_killed_with_its_guard(guard):
    guard.process.send_signal(signal.SIGSTOP)
    assert guard.process.wait(60) in (128 + signal.SIGKILL, -signal.SIGKILL)
    assert eventually(guard.alone)


def test_a_launcher_that_is_stopped_counts_as_gone(guard):
    guard.quiet.set()
    assert guard.process.wait(60) == 75
    assert guard.snapshot.read_text() == "snapshot"
    assert guard.alone()


@pytest.mark.parametrize("started", ["then", "at another time"])
def test_all_of_a_node_is_stopped(guard, started):
    """What the launcher then sends over another ssh ends it, but no other process of that id."""
    for one in guard.family:
        os.kill(one.pid, signal.SIGSTOP)
    guard.process.send_signal(signal.SIGSTOP)
    assert eventually(guard.all_stopped)
    pid, began = guard.identity
    end = {"end": [pid, began if started == "then" else "0"]}
    done = subprocess.run([sys.executable, "-c", source(end)], timeout=60, check=False)
    assert done.returncode == 0
    if started == "then":
        assert guard.process.wait(60) == 75
        assert guard.snapshot.read_text() == "snapshot"
        assert eventually(guard.alone)
    else:
        assert guard.all_stopped()
