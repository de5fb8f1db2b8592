"""scripts/ssh/job.py with guards on this machine in place of nodes: how a job goes on, and ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import ROOT
from running import Process, Running, descendants, eventually

sys.path.append(str(ROOT / "scripts/ssh"))
import guard
import hosts

INTERRUPTED, LOST_PEER = 75, 69
# In place of an ssh, a guard; none while there is a file NAME_away. Waiting times are short.
JOB = """
import argparse, json, os, signal, subprocess, sys
sys.path.insert(0, "scripts/ssh")
import guard, hosts, job

for name in ("RETRY_SECONDS", "JOIN_SECONDS", "LOST_SECONDS", "END_SECONDS"):
    setattr(job, name, 1.0)
options = argparse.Namespace(**json.loads(sys.argv[1]))
guard.LEASE_SECONDS = options.lease

class Local(job.Job):
    def open(self, host, program):
        for name, usual, now in (("SILENCE", 15, options.silence), ("HEARTBEAT", 2, 0.3)):
            usual, now = (f"{name}_SECONDS = {x:.1f}".encode() for x in (usual, now))
            assert program.count(usual) == 1
            program = program.replace(usual, now)
        away = os.path.exists(f"{options.dir}/{host.name}_away")
        words = [sys.executable, "-uc", "exit(255)" if away else hosts.BOOTSTRAP, host.name]
        how = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        how["preexec_fn"] = lambda: signal.signal(signal.SIGTSTP, signal.SIG_DFL)  # as of sshd
        guard = subprocess.Popen(words, env=os.environ | {"NODE": host.name}, **how)
        guard.stdin.write(program)
        guard.stdin.flush()
        return guard

machines = [hosts.Host(name, 2, "10.0.0.1") for name in options.names]
hosts.exit_with(Local(options, ["script.py"], machines, "").run)
"""
# It ends as the file of its node says: with an exit code, or below 0 by a signal. The file "mode"
# gives it a worker that ignores SIGTERM, and "stubborn" lets it do so itself.
SCRIPT = """
import os, signal, subprocess, sys, time
def end(*_):
    open("snapshot", "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
mode = open("mode").read()
if mode:
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    subprocess.Popen(["sleep", "600"], **quiet)
if mode != "stubborn":
    signal.signal(signal.SIGTERM, end)
if mode == "loud":
    print("x" * 1_000_000, flush=True)
print("rank", os.environ["NODE_RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:],
      os.environ["MASTER_ADDR"], "attempt", os.environ.get("IMAGENET_ELASTIC"), flush=True)
while not os.path.exists(os.environ["NODE"]):
    time.sleep(0.05)
code = int(open(os.environ["NODE"]).read())
os.unlink(os.environ["NODE"])
sys.exit(code) if code >= 0 else os.kill(os.getpid(), -code)
"""


@pytest.fixture
def start(tmp_path):
    """A function that starts a job on nodes of these names."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mode").touch()
    # A guard finds the interpreter as on a node: in the folder of the code.
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)

    def start(
        names: str, elastic: tuple | None = None, silence=15, grace=60.0, lease=600.0
    ) -> Running:
        options = {"names": names.split(), "elastic": elastic, "silence": silence, "grace": grace}
        options |= {"dir": str(tmp_path), "ssh": "ssh", "lease": lease}
        options |= dict.fromkeys(("env", "port", "python"))
        return Running("-c", JOB, json.dumps(options))

    return start


def guard_of(run: Running, name: str) -> Process:
    (guard,) = [one for one in run.meet_family() if one.command.endswith(f" {name} ")]
    return guard


def ended(run: Running) -> tuple[int, str]:
    """Exit code and messages; nothing is left behind."""
    result = run.result()
    assert "Traceback" not in result.err
    assert eventually(lambda: not any(one.lives() for one in run.family))
    return result.code, result.err


@pytest.mark.parametrize(
    ("codes", "code", "said"),
    [
        ((0, 0), 0, ""),
        ((None, 1), 1, "b ended with exit code 1; stopping the rest"),
        ((-9, None), LOST_PEER, "a ended with exit code 137: killed by SIGKILL; stopping the rest"),
        ((None, INTERRUPTED), INTERRUPTED, "b ended with exit code 75; stopping the rest"),
    ],
)
def test_the_exit_code_of_a_job(start, tmp_path, codes, code, said):
    with start("a b") as run:
        run.until(r"^\[b\] rank 1 of 2 -g 2 10.0.0.1 attempt None")
        assert eventually(lambda: len(run.meet_family()) >= 4)
        for name, own in zip("ab", codes, strict=True):
            if own is not None:
                (tmp_path / name).write_text(str(own))
        own_code, messages = ended(run)
    assert own_code == code
    assert said in messages


WAYS = ["launcher SIGSTOP", "launcher SIGKILL", "launcher SIGINT", "launcher SIGHUP"]
WAYS += ["guard SIGTERM", "guard SIGKILL"]


@pytest.mark.parametrize("job", ["willing", "stubborn"])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_outlives_a_job(start, tmp_path, way, job):
    """Its launcher hangs or dies, or a signal comes. Ctrl-Z stops neither launcher nor guard."""
    (tmp_path / "mode").write_text(job)
    silent = way == "launcher SIGSTOP"  # its time for a snapshot is not that of --grace
    grace = 1.0 if job == "stubborn" and not silent else 600.0
    with start("a", silence=2 if silent else 600, grace=grace) as run:
        run.until("rank 0 of 1")
        guard = guard_of(run, "a")
        for one in (run, guard):
            (ignored,) = re.findall(r"SigIgn:\s+(\w+)", Path(f"/proc/{one.pid}/status").read_text())
            assert int(ignored, 16) & 1 << (signal.SIGTSTP - 1)
        family = descendants(guard.pid)  # the script and its worker
        assert len(family) == 2
        who, name = way.split()
        os.kill(guard.pid if who == "guard" else run.pid, getattr(signal, name))
        # The script's own children are those of the suite, which die with their parents.
        own = [one for one in family if one.parent == guard.pid or way != "guard SIGKILL"]
        assert eventually(lambda: not any(one.lives() for one in own))
        saved = job == "willing" and way != "guard SIGKILL"
        assert (tmp_path / "snapshot").exists() == saved
        run.send(signal.SIGCONT)
        result = run.result()
    assert "Traceback" not in result.err
    assert ("asking all nodes to stop" in result.err) == (name in ("SIGINT", "SIGHUP"))
    died = way == "launcher SIGKILL"
    assert result.code == (-signal.SIGKILL if died else INTERRUPTED if saved else LOST_PEER)


def test_a_launcher_whose_output_nobody_reads_still_answers(start, tmp_path):
    """As with `| less`: the job must not end because its lines are not shown."""
    (tmp_path / "mode").write_text("loud")
    with start("a", silence=2) as run:
        assert eventually(lambda: len(descendants(run.pid)) == 3)  # a guard, the script, its worker
        time.sleep(5)
        (tmp_path / "a").write_text("0")
        run.until("rank 0 of 1")
        assert ended(run) == (0, "")


def test_answers_that_were_held_up_extend_no_lease(tmp_path):
    """Each line that the guard gets here answers its first heartbeat."""
    (tmp_path / "script.py").write_text("import time; time.sleep(600)")
    program = hosts.program(guard.__file__, {}).replace(b"= 15.0", b"= 3.0")
    words = [sys.executable, "-uc", hosts.BOOTSTRAP]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    job = {"command": ["script.py"], "folder": str(tmp_path), "python": sys.executable}
    job |= {"environment": {}, "grace": 1.0}
    with subprocess.Popen(words, **pipes) as ran:
        ran.stdin.write(program)
        ran.stdin.flush()
        first = next(line for line in ran.stdout if line.startswith(guard.HEARTBEAT.encode()))
        ran.stdin.write(json.dumps(job).encode() + b"\n")

        def has_ended() -> bool:
            with suppress(OSError):
                ran.stdin.write(first)
                ran.stdin.flush()
            return ran.poll() is not None

        try:
            assert eventually(has_ended, 30)
        finally:
            ran.kill()
            with suppress(OSError):
                ran.stdin.close()
    assert ran.returncode == 128 + signal.SIGTERM


def test_a_node_without_an_answer(start, tmp_path):
    """All have to answer, or, with --elastic, enough; test_train_on_nodes.py has too few."""
    (tmp_path / "b_away").touch()
    with start("a b") as run:
        assert ended(run) == (2, "error: ssh to b failed: does `ssh b python3 -V` work here?\n")
    with start("a b", (1, 2)) as run:
        run.until("rank 0 of 1")
        (tmp_path / "a").write_text("0")
        code, said = ended(run)
    assert code == 0
    assert "launcher: ssh to b failed: does `ssh b python3 -V` work here?; will keep" in said
    assert "training begins on 1 of 2 nodes: a" in said


@pytest.mark.parametrize("back", ["well", "broken"])
def test_a_lost_node_is_taken_in_again_unless_it_is_broken(start, tmp_path, back):
    with start("a b", (1, 2)) as run:
        run.until("rank 1 of 2")
        (tmp_path / "b_away").touch()
        os.kill(guard_of(run, "b").pid, signal.SIGKILL)
        run.until(r"^\[a\] rank 0 of 1 .* attempt 2")
        (tmp_path / "b_away").unlink()
        if back == "broken":
            (tmp_path / "b").write_text("2")
            run.until(r"^\[a\] rank 0 of 2")
            run.until(r"^\[a\] rank 0 of 1")
        else:
            run.until(r"^\[b\] rank 1 of 2")
            (tmp_path / "b").write_text("0")
        (tmp_path / "a").write_text("0")
        code, said = ended(run)
    assert code == 0
    alone = "training begins again on 1 of 2 nodes: a"
    again = ["lost the connection to b; will keep trying", alone, "b is back"]
    again += ["stopping with a snapshot, to continue with b"]
    again += ["training begins again on 2 of 2 nodes: a, b"]
    again += ["continuing without b (the reason is above)", alone] if back == "broken" else []
    lines = [line.removeprefix("launcher: ") for line in said.splitlines()]
    assert [line for line in lines if line in again] == again


@pytest.mark.parametrize("lease", [600.0, 0.5])
def test_after_the_loss_of_node_0_nothing_begins_before_it_must_be_empty(start, tmp_path, lease):
    """It may not know of its loss, and may still write into the run directory."""
    with start("a b", (1, 2), lease=lease) as run:
        run.until("rank 1 of 2")
        (tmp_path / "a_away").touch()
        old = guard_of(run, "a")
        os.kill(old.pid, signal.SIGKILL)
        if lease < 1:
            run.until(r"^\[b\] rank 0 of 1 .* attempt 2")
            (tmp_path / "b").write_text("0")
        else:
            assert eventually(lambda: not old.lives())
            (tmp_path / "a_away").unlink()  # that it answers again says nothing of its processes
            assert eventually(
                lambda: any(one.command.endswith(" a ") for one in descendants(run.pid))
            )
            run.send(signal.SIGINT)
        code, said = ended(run)
    assert code == (0 if lease < 1 else INTERRUPTED)
    assert ("begins again" in said) == (lease < 1)


def test_a_script_that_ends_before_its_guard_goes_on(start, tmp_path, monkeypatch):
    """As on a busy node: Popen returns late."""
    slow = "import subprocess as s, time; init = s.Popen.__init__\n"
    slow += "s.Popen.__init__ = lambda *a, **k: (init(*a, **k), time.sleep(1))[0]"
    (tmp_path / "sitecustomize.py").write_text(slow)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "a").write_text("3")
    with start("a") as run:
        assert ended(run)[0] == 3


def test_bad_input_and_repeated_failures_end_an_elastic_job(start, tmp_path):
    with start("a b", (1, 2)) as run:
        run.until("rank 1 of 2")
        (tmp_path / "b").write_text("2")
        code, said = ended(run)
    assert code == 2
    assert "begins again" not in said
    with start("a", (1, 1)) as run:
        for _ in range(5):
            run.until("rank 0 of 1")
            (tmp_path / "a").write_text("-9")
        code, said = ended(run)
    assert code == LOST_PEER
    assert said.count("begins again on 1 of 1 nodes: a") == 4
    assert "error: training has failed 5 times in a row soon after start" in said
