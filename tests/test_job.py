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
from joined import Forked
from running import Process, Running, descendants, eventually, everyone

sys.path.append(str(ROOT / "scripts/ssh"))
import guard
import hosts
from job import interrupted_code

BAD_INPUT, LOST_PEER, INTERRUPTED = 2, 69, 75
FAILED = "ssh to b failed: does `ssh b python3 -V` work here without asking anything "
FAILED += "(ssh-add unlocks a key)?"
# In place of an ssh, a guard; none while there is a file NAME_away. Waiting times are short. The
# clock of a node with a file NAME_late is a minute behind.
JOB = """
import argparse, json, os, signal, subprocess, sys
sys.path.insert(0, "scripts/ssh")
import guard, hosts, job

options = argparse.Namespace(**json.loads(sys.argv[1]))
for name in ("RETRY_SECONDS", "LOST_SECONDS", "END_SECONDS", "PAUSE_SECONDS"):
    setattr(job, name, 1.0)
guard.SILENCE_SECONDS = options.silence
kind = job.Job
if options.elastic:
    import elastic
    elastic.JOIN_SECONDS, elastic.QUICK_SECONDS = 1.0, options.quick
    kind = elastic.Elastic

class Local(kind):
    def open(self, node, program):
        for name, usual, now in (("SILENCE", 15, options.silence), ("HEARTBEAT", 2, 0.3)):
            usual, now = (f"{name}_SECONDS = {x:.1f}".encode() for x in (usual, now))
            assert program.count(usual) == 1
            program = program.replace(usual, now)
        name = node.host.name
        if os.path.exists(f"{options.dir}/{name}_late"):
            assert program.count(b"time.time()") == 1
            program = program.replace(b"time.time()", b"time.time() - 60")
        away = os.path.exists(f"{options.dir}/{name}_away")
        fails = "import sys; print('no route', file=sys.stderr); sys.exit(255)"
        words = ["bash", "-c", 'printf "a title"; exec "$@"', "login"]
        words += [sys.executable, "-uc", fails if away else hosts.BOOTSTRAP, name]
        how = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        how["preexec_fn"] = lambda: signal.signal(signal.SIGTSTP, signal.SIG_DFL)  # as of sshd
        env = {"NODE": name, "SSH_CONNECTION": "10.0.0.8 1 10.0.0.9 2"}  # not the ip= of its line
        guard = subprocess.Popen(words, env=os.environ | env, **how)
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
    if os.path.exists("bad_input"):  # the process has found it, and was about to end
        sys.exit(2)
    time.sleep(1.5)  # as a snapshot takes a while: longer than LOST_SECONDS
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
place = [os.environ.get(name) for name in ("NODE_RANK", "WORLD_SIZE", "MASTER_ADDR")]
print("rank {} of {} at {}".format(*place), flush=True)
text, node = "", os.environ["NODE"]
while not text:  # a file that has just been made may still be empty
    time.sleep(0.05)
    text = open(node).read() if os.path.exists(node) else ""
code = int(text)
os.unlink(node)
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
        names: str, elastic: tuple | None = None, silence=15, grace=60.0, env=(), quick=120.0
    ) -> Running:
        options = {"names": names.split(), "elastic": elastic, "silence": silence, "grace": grace}
        options |= {"dir": str(tmp_path), "ssh": "ssh", "env": env, "wait": 600, "quick": quick}
        options |= dict.fromkeys(("port", "python"))
        return Forked("imagenet_nd", json.dumps(options), BEFORE=JOB)  # JOB exits before the script

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
        ((0, None), 0, ""),  # the others get a moment to finish
        ((None, 1), 1, "b ended with exit code 1; stopping the rest"),
        ((-9, None), LOST_PEER, "a ended with exit code 137: killed by SIGKILL; stopping the rest"),
        ((None, INTERRUPTED), INTERRUPTED, "b ended with exit code 75; stopping the rest"),
    ],
)
def test_the_exit_code_of_a_job(start, tmp_path, codes, code, said):
    with start("a b") as run:
        for _ in "ab":
            run.until(r"^\[[ab]\] rank [01] of 2 at 10.0.0.1")
        assert len(run.meet_family()) >= 4
        for name, own in zip("ab", codes, strict=True):
            if own is not None:
                (tmp_path / name).write_text(str(own))
        own_code, messages = ended(run)
    assert own_code == code
    assert said in messages
    assert (tmp_path / "snapshot").exists() == (INTERRUPTED in codes), "there is time for it"


def test_bad_input_is_the_cause_though_a_node_that_lost_its_peer_ends_first(start, tmp_path):
    (tmp_path / "bad_input").touch()
    with start("a b") as run:
        run.until(r"^\[b\] rank 1 of 2")
        run.meet_family()
        (tmp_path / "a").write_text(str(LOST_PEER))
        code, messages = ended(run)
    assert (code, "a ended with exit code 69" in messages) == (BAD_INPUT, True)


@pytest.mark.parametrize(
    ("codes", "code"),  # in the order in which the nodes have ended
    [([0, 0], 0), ([LOST_PEER, INTERRUPTED], INTERRUPTED), ([0, BAD_INPUT], BAD_INPUT)],
)
def test_an_interrupted_job_with_a_snapshot_says_so(codes, code):
    assert interrupted_code(codes) == code


WAYS = ["launcher SIGSTOP", "launcher SIGKILL", "launcher SIGINT", "launcher SIGHUP"]
WAYS += ["guard SIGTERM", "guard SIGKILL"]


def test_a_process_whose_name_is_no_text_is_no_obstacle(tmp_path):
    """Another user's, say: Linux cuts names after 15 bytes, also within a letter."""
    program = os.fsencode(tmp_path / "sleep") + b"\xfc"
    os.symlink("/bin/sleep", program)
    with subprocess.Popen([program, "600"]) as other:  # nor are its words
        try:
            assert eventually(lambda: not guard.kill_all_below(other.pid))
            assert other.pid in [one.pid for one in everyone()]
        finally:
            other.kill()


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


def test_a_second_interrupt_ends_a_job_at_once(start, tmp_path):
    """A second SIGTERM, as of a scheduler, does not."""
    (tmp_path / "mode").write_text("stubborn")
    with start("a", grace=600.0) as run:
        run.until("rank 0 of 1")
        asking, at_once = "asking all nodes to stop", "ending all nodes at once"
        says = [(signal.SIGTERM, asking), (signal.SIGTERM, asking), (signal.SIGINT, at_once)]
        for number, (signum, words) in enumerate(says):
            run.meet_family()
            run.send(signum)
            assert eventually(lambda number=number: len(run.said().splitlines()) > number)
            assert words in run.said().splitlines()[number]
        assert ended(run)[0] == LOST_PEER


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
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to("/bin/false")  # --python is another one
    program = hosts.program(guard.__file__, {}).replace(b"= 15.0", b"= 3.0")
    words = [sys.executable, "-uc", hosts.BOOTSTRAP]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    pipes["env"] = os.environ | {"HOME": str(tmp_path)}
    (tmp_path / "other").symlink_to(sys.executable)
    job = {"command": ["script.py"], "folder": str(tmp_path), "python": "~/other"}
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
            assert eventually(has_ended)
        finally:
            ran.kill()
            with suppress(OSError):
                ran.stdin.close()
    assert ran.returncode == 128 + signal.SIGTERM


def test_a_node_without_an_answer(start, tmp_path):
    """All have to answer, or, with --elastic, enough; test_train_on_nodes.py has too few."""
    (tmp_path / "b_away").touch()
    with start("a b") as run:
        assert ended(run) == (2, f"[b] no route\nerror: {FAILED}\n"), "with ssh's own reason"
    with start("a b", (1, 2)) as run:
        run.until(r"^\[a\] rank")
        (tmp_path / "a").write_text("0")
        code, said = ended(run)
    assert code == 0
    assert f"[b] no route\nlauncher: {FAILED}; will keep" in said
    assert said.count("no route") == 1, "also of several attempts"
    assert "starting on 1 of 2 nodes: a" in said
    with start("a b", (2, 2)) as run:  # nothing has begun: no code that promises a snapshot
        assert eventually(lambda: "will keep trying" in run.said())
        run.meet_family()
        run.send(signal.SIGINT)
        code, said = ended(run)
    assert code == 128 + signal.SIGINT
    assert said.splitlines()[-1] == "error: interrupted while waiting for nodes"


@pytest.mark.parametrize("back", ["well", "broken"])
def test_a_lost_node_is_taken_in_again_unless_it_is_broken(start, tmp_path, back):
    with start("a b", (1, 2)) as run:
        run.until(r"^\[b\] rank")
        (tmp_path / "b_away").touch()
        os.kill(guard_of(run, "b").pid, signal.SIGKILL)
        assert eventually(lambda: "lost the connection to b; will keep trying" in run.said())
        (tmp_path / "b_away").unlink()
        run.until(r"^\[b\] rank")
        (tmp_path / "b").write_text("2" if back == "broken" else "0")
        if back == "broken":
            assert eventually(lambda: "continuing without b" in run.said())
        (tmp_path / "a").write_text("0")
        code, said = ended(run)
    assert code == 0
    notes = ["starting on 2 of 2 nodes: a, b", "lost the connection to b; will keep trying"]
    notes += ["b is back", "starting again on b"]
    notes += ["continuing without b (the reason is above)"] if back == "broken" else []
    assert said.splitlines() == [f"launcher: {note}" for note in notes]


@pytest.mark.parametrize("elastic", [None, (1, 2)])
def test_a_node_whose_guard_is_silent_is_lost(start, tmp_path, elastic):
    """As when it is frozen. ssh notices only a machine that does not answer."""
    with start("a b", elastic, silence=2) as run:
        run.until(r"^\[b\] rank")
        (tmp_path / "b_away").touch()
        frozen = guard_of(run, "b")
        os.kill(frozen.pid, signal.SIGSTOP)
        assert eventually(lambda: "lost the connection to b" in run.said())
        if elastic:
            (tmp_path / "a").write_text("0")
        assert run.process.wait(30) == (0 if elastic else LOST_PEER)
        with suppress(ProcessLookupError):
            os.kill(frozen.pid, signal.SIGCONT)
        assert eventually(lambda: not any(one.lives() for one in run.family))


def test_values_of_variables_are_not_shown(start, tmp_path):
    (tmp_path / "a").write_text("0")
    own = tmp_path / ".venv/bin/python"
    own.unlink()
    own.write_text(f'#!/bin/sh\necho its own Python; exec {sys.executable} "$@"')
    own.chmod(0o755)
    with start("a", env=[("TOKEN", "a-secret")]) as run:
        line = run.until(r"^\[a\] \+ cd ")
        run.until(r"^\[a\] its own Python")
        code, said = ended(run)
    assert code == 0
    assert "TOKEN=*** python script.py" in line
    assert "a-secret" not in line + said


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
        run.until(r"^\[b\] rank")
        (tmp_path / "b").write_text("2")
        code, said = ended(run)
    assert code == 2
    assert "b ended with exit code 2; stopping the rest" in said
    with start("a", (1, 1)) as run:
        for _ in range(5):
            run.until(r"^\[a\] rank")
            (tmp_path / "a").write_text("-9")
        code, said = ended(run)
    assert code == LOST_PEER
    assert said.count("a ended with exit code 137: killed by SIGKILL; will keep trying") == 4
    assert said.count("starting again on a") == 4
    with start("a", (1, 1), quick=0.0) as run:  # none of them soon after its start
        for code in (-9, -9, -9, -9, -9, 0):
            run.until(r"^\[a\] rank")
            (tmp_path / "a").write_text(str(code))
        assert ended(run)[0] == 0


def test_a_spare_node_takes_the_place_of_a_lost_one_and_the_job_is_interrupted(start, tmp_path):
    with start("a b c", (1, 2)) as run:
        # The two that were ready first.
        begun = sorted(run.until(r"^\[.\] rank")[1] for _ in range(2))
        (spare,), lost = set("abc") - {*begun}, begun[1]
        again = f"starting again on {spare}"
        assert not eventually(lambda: again in run.said(), 3.0), "two are the most"
        (tmp_path / f"{lost}_away").touch()
        os.kill(guard_of(run, lost).pid, signal.SIGKILL)
        run.until(rf"^\[{spare}\] rank")
        run.send(signal.SIGINT)
        code, said = ended(run)
    assert code == INTERRUPTED
    notes = [f"starting on 2 of 3 nodes: {', '.join(begun)}"]
    notes += [f"lost the connection to {lost}; will keep trying", again]
    notes += ["asking all nodes to stop with a snapshot within 60 s"]
    assert said.splitlines() == [f"launcher: {note}" for note in notes]


def test_nodes_whose_clocks_differ_are_no_elastic_job(start, tmp_path):
    """torchrun would take one of them for lost. If one comes later, the job goes on without it."""
    (tmp_path / "b_late").touch()
    (tmp_path / "b_away").touch()
    with start("a b", (1, 2), silence=2) as run:
        run.until(r"^\[a\] rank")
        (tmp_path / "b_away").unlink()
        assert eventually(lambda: "continuing without b (the clock of b is 60 s" in run.said())
        assert not eventually(lambda: run.said().count("continuing") > 1, 5.0), "it was called"
        (tmp_path / "a").write_text("0")
        assert ended(run)[0] == 0
    for name in "ab":  # if they began, they would end well
        (tmp_path / name).write_text("0")
    with start("a b", (1, 2)) as run:
        code, said = ended(run)
    assert (code, said.split(":")[:2]) == (2, ["error", " the clock of a is 60 s off that of b"])
