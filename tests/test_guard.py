"""scripts/ssh/guard.py without ssh: how a guard and its job end."""

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


def source() -> str:
    """The guard as it is sent to a node, with short limits."""
    text = GUARD
    for usual, short in LIMITS.items():
        assert text.count(usual) == 1
        text = text.replace(usual, short)
    return text


class Guard:
    """A guard whose launcher is this process, with a job that has started."""

    def __init__(self, folder, job: str):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, "-uc", source()], **pipes)
        hello = self.process.stdout.readline().decode().removeprefix("@@guard ")
        assert json.loads(hello)["port"]
        command = ["-c", JOB, str(folder / "snapshot"), job]
        start = {"command": command, "folder": "/", "python": sys.executable}
        line = json.dumps(start | {"environment": {}, "grace": 2}) + "\n"
        self.process.stdin.write(line.encode())
        self.process.stdin.flush()
        assert self.process.stdout.readline() == b"up\n"
        assert eventually(lambda: len(descendants(self.process.pid)) == 2)
        self.family = descendants(self.process.pid)  # the job and its worker
        self.snapshot = folder / "snapshot"
        self.quiet = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while not self.quiet.wait(0.3):
                self.process.stdin.write(b"\n")
                self.process.stdin.flush()

    def alone(self) -> bool:
        """Whether all that it has started has ended."""
        return not any(one.lives() for one in self.family)


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


def test_a_launcher_that_is_silent_counts_as_gone(guard):
    guard.quiet.set()
    assert guard.process.wait(60) == 75
    assert guard.snapshot.read_text() == "snapshot"
    assert guard.alone()


@pytest.mark.parametrize("guard", ["stubborn"], indirect=True)
@pytest.mark.parametrize("way", ["silence", "closed"])
def test_a_job_that_does_not_end_is_killed(guard, way):
    guard.quiet.set()
    if way == "closed":
        guard.process.stdin.close()
    assert guard.process.wait(60) == 128 + signal.SIGKILL
    assert eventually(guard.alone)


def test_a_guard_that_is_killed_takes_its_job_along(guard):
    """The job's own children are those of the suite, which die with their parents."""
    (job,) = [one for one in guard.family if one.parent == guard.process.pid]
    guard.process.kill()
    assert eventually(lambda: not job.lives())


def test_ctrl_z_is_ignored_and_sigterm_asks_for_the_end(guard):
    guard.process.send_signal(signal.SIGTSTP)
    guard.process.send_signal(signal.SIGTERM)
    assert guard.process.wait(60) == 75
    assert guard.alone()
