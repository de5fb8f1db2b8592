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

# A run with a loader worker; asked to end, it takes its time, or ignores it.
JOB = """
import pathlib, signal, subprocess, sys, time
def end(*_):
    pathlib.Path("snapshot").write_text("whole")
    sys.exit(75)
signal.signal(signal.SIGTERM, end if sys.argv[1] == "willing" else signal.SIG_IGN)
ignores = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", ignores])
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("way", "job", "code"),
    [
        ("silence", "willing", 75),
        ("silence", "stubborn", 128 + signal.SIGKILL),
        ("closed", "stubborn", 128 + signal.SIGKILL),
        ("SIGTERM", "willing", 75),
        ("SIGKILL", "stubborn", -signal.SIGKILL),
    ],
)
def test_nothing_outlives_a_guard(tmp_path, way, job, code):
    """This process is its launcher. Ctrl-Z does not stop it."""
    source = (ROOT / "scripts/ssh/guard.py").read_text()
    for usual in ("SILENCE_SECONDS = 15.0", "LOST = 6.0"):
        assert source.count(usual) == 1
        source = source.replace(usual, f"{usual.split(' = ')[0]} = 2.0")
    # It finds the interpreter as on a node: in the folder of the code.
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    start = {"command": ["-c", JOB, job], "folder": str(tmp_path), "python": None}
    start |= {"environment": {}, "grace": 2}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    quiet, family = threading.Event(), set()

    def beat() -> None:
        while not quiet.wait(0.3):
            with contextlib.suppress(BrokenPipeError):
                os.write(guard.stdin.fileno(), b"\n")

    beating = threading.Thread(target=beat)
    with subprocess.Popen([sys.executable, "-uc", source], **pipes) as guard:
        beating.start()
        try:
            hello = guard.stdout.readline().decode().removeprefix("@@guard ")
            assert json.loads(hello)["port"]
            os.write(guard.stdin.fileno(), json.dumps(start).encode() + b"\n")
            assert guard.stdout.readline() == b"up\n"
            assert eventually(lambda: len(descendants(guard.pid)) == 2)
            family = descendants(guard.pid)  # the job and its worker
            if way in ("silence", "closed"):
                quiet.set()
                beating.join()
            if way == "closed":
                guard.stdin.close()
            if way.startswith("SIG"):
                guard.send_signal(signal.SIGTSTP)
                guard.send_signal(getattr(signal, way))
            assert guard.wait(60) == code
            # The job's own children are those of the suite, which die with their parents.
            own = [one for one in family if one.parent == guard.pid or way != "SIGKILL"]
            assert eventually(lambda: not any(one.lives() for one in own))
            assert (tmp_path / "snapshot").exists() == (job == "willing")
        finally:
            quiet.set()
            beating.join()
            guard.kill()
            for one in family:
                if one.lives():
                    os.kill(one.pid, signal.SIGKILL)
