"""scripts/ssh/job.py with guards on this machine in place of nodes: how a job goes on, and ends."""

import json
import os
import re
import signal
import sys

import pytest
from running import Running, descendants

INTERRUPTED, LOST_PEER = 75, 69
# In place of an ssh, a guard; none while there is a file NAME_away. Waiting times are short.
JOB = """
import argparse, json, os, subprocess, sys
sys.path.insert(0, "scripts/ssh")
import hosts, job

for name in ("RETRY_SECONDS", "JOIN_SECONDS", "LOST_SECONDS", "END_SECONDS"):
    setattr(job, name, 1.0)
options = argparse.Namespace(**json.loads(sys.argv[1]))

class Local(job.Job):
    wait_seconds = options.wait

    def open(self, host, program):
        away = os.path.exists(f"{options.dir}/{host.name}_away")
        words = [sys.executable, "-uc", "exit(255)" if away else hosts.BOOTSTRAP, host.name]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        guard = subprocess.Popen(words, env=os.environ | {"NODE": host.name}, **pipes)
        guard.stdin.write(program)
        guard.stdin.flush()
        return guard

machines = [hosts.Host(name, 2, "10.0.0.1") for name in options.names]
hosts.end_with(Local(options, ["script.py"], machines, "").run)
"""
# It ends as the file of its node says: with an exit code, or below 0 by a signal.
SCRIPT = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
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

    def start(names: str, elastic: tuple[int, int] | None = None, wait: float = 60.0) -> Running:
        (tmp_path / "script.py").write_text(SCRIPT)
        options = {"names": names.split(), "elastic": elastic, "wait": wait, "env": None}
        options |= {"dir": str(tmp_path), "python": sys.executable, "ssh": "ssh", "port": None}
        options["grace"] = 5.0
        return Running("-c", JOB, json.dumps(options))

    return start


def ended(run: Running) -> tuple[int, str]:
    """Exit code and messages; nothing is left behind."""
    result = run.result()
    assert "Traceback" not in result.err
    assert not descendants(run.process.pid)
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
        for name, own in zip("ab", codes, strict=True):
            if own is not None:
                (tmp_path / name).write_text(str(own))
        assert ended(run)[0] == code
        assert said in run.result().err


def test_ctrl_c_asks_for_a_snapshot(start):
    with start("a b") as run:
        run.until("rank 1 of 2")
        run.send(signal.SIGINT)
        code, said = ended(run)
    assert code == INTERRUPTED
    assert "asking all nodes to stop with a snapshot within 5 s" in said


def test_a_node_without_an_answer(start, tmp_path):
    """All have to answer, or, with --elastic, enough."""
    (tmp_path / "b_away").touch()
    with start("a b") as run:
        assert ended(run) == (2, "error: ssh to b failed: does `ssh b python3 -V` work here?\n")
    with start("a b", (2, 2), wait=3.0) as run:
        code, said = ended(run)
    assert code == 2
    assert re.search("error: the job needs 2 nodes and has waited 3 s for (a, )?b", said)
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
        (guard,) = [one for one in descendants(run.process.pid) if one.command.endswith(" b ")]
        os.kill(guard.pid, signal.SIGKILL)
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
    again = ["launcher: lost the connection to b; will keep trying"]
    again += ["launcher: training begins again on 1 of 2 nodes: a", "launcher: b is back"]
    again += ["launcher: stopping with a snapshot, to go on with b"]
    again += ["launcher: training begins again on 2 of 2 nodes: a, b"]
    if back == "broken":
        again += ["launcher: going on without b (the reason is above)"]
        again += ["launcher: training begins again on 1 of 2 nodes: a"]
    assert [line for line in said.splitlines() if line in again] == again


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
