"""No orphans: when a launcher or a rank dies, nothing that the run has started lives on."""

import contextlib
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from conftest import ROOT, python, summary
from running import TORCHRUN, Process, Running, eventually, everyone, start

from utils import launch

INTERRUPTED = 75
SHORT = ("--dist-timeout", "60")
WAYS = {
    "nd": ("imagenet_nd.py", (), ()),
    "spawn": ("imagenet_ddp.py", ("-g", "2", *SHORT), ()),
    "torchrun": ("imagenet_fsdp.py", SHORT, (*TORCHRUN, "--nproc_per_node=2")),
}


def endless(way: str, folder: Path, runs: Path, step_seconds: float = 0.05, **more: str) -> Running:
    """A run with two loader workers that continues until something ends it."""
    script, options, launcher = WAYS[way]
    lasting = ("-a", "tiny_plain", "-b", "5", "--epochs", "10000", "-p", "1", "-j", "2")
    where = ("--output-dir", runs, "--name", "run", folder)
    more["STEP_SECONDS"] = str(step_seconds)
    return start(script, *options, *lasting, *where, launcher=launcher, **more)


def youngest(processes: Iterable[Process]) -> Process:
    return max(processes, key=lambda one: (one.started, one.pid))


def all_gone(run: Running) -> bool:
    """Whether, in the end, none of the processes met before is left."""
    return eventually(lambda: not any(one.lives() for one in run.family))


def marked(mark: str) -> list[Process]:
    """The living processes with ``mark`` in their environment, whoever is their parent now."""
    processes = []
    for one in everyone():
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{one.pid}/environ").read_bytes() and one.lives():
                processes.append(one)
    return processes


@pytest.mark.parametrize(
    ("way", "least", "training"),
    [
        ("nd", 2, True),
        ("spawn", 4, True),
        ("spawn", 4, False),
        ("torchrun", 4, True),
        ("torchrun", 4, False),
    ],
)
def test_nothing_outlives_the_process_that_was_typed(folder, tmp_path, way, least, training):
    """Ranks that still import torch, which takes seconds, have to notice that it is gone."""
    mark = f"{tmp_path}/{random.getrandbits(40):x}"
    with endless(way, folder, tmp_path, MARK=mark) as run:
        if training:
            run.until(r"step +3/")
        assert eventually(lambda: len(marked(mark)) >= (least if training else least - 1))
        time.sleep(0 if training else random.uniform(0, 0.7))
        run.send(signal.SIGKILL)
        run.process.wait()
        try:
            assert eventually(lambda: not marked(mark), seconds=15), marked(mark)
        finally:
            for one in marked(mark):
                os.kill(one.pid, signal.SIGKILL)


def test_a_killed_rank_ends_the_other_with_an_error(folder, tmp_path):
    with endless("spawn", folder, tmp_path) as run:
        run.until(r"step +3/")
        family = run.meet_family()
        parents = {one.parent for one in family}  # the ranks have loader workers
        pair = [one for one in family if one.parent == run.process.pid and one.pid in parents]
        assert len(pair) == 2, family
        os.kill(youngest(pair).pid, signal.SIGKILL)
        result = run.result()
        assert all_gone(run)
    assert result.code == 128 + signal.SIGKILL
    assert "Traceback" not in result.err
    of_rank, of_launcher = sorted(line for line in result.err.splitlines() if "error" in line)
    assert of_rank.startswith("error (rank 0)")
    for word in ("lost touch with rank 1 on", "has ended or was killed", "--resume"):
        assert word in of_rank
    assert "SIGKILL" in of_launcher


def test_a_killed_loader_worker_is_named(folder, tmp_path):
    """As the kernel kills one when memory runs out. A long path of temporary files is not used."""
    long = tmp_path / ("long_" * 20)  # too long for a socket: training would wait for ever
    long.mkdir()
    with endless("nd", folder, tmp_path, TMPDIR=str(long)) as run:
        run.until(r"step +3/")
        assert not list(long.glob("pymp-*"))
        workers = [one for one in run.meet_family() if "resource_tracker" not in one.command]
        victim = youngest(workers).pid
        os.kill(victim, signal.SIGKILL)
        result = run.result()
        assert result.code == 2, result.err
        message = rf"worker {victim} (is killed by signal: Killed|exited).* \(-j\)"
        assert re.search(message, result.sentence)
        assert all_gone(run)


def test_a_terminals_interrupt_ends_two_processes_with_a_snapshot(folder, tmp_path):
    """It reaches the launcher, the ranks and their loader workers, old and new, all at once."""
    # Short enough for the names of sockets, which would be left behind in it.
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as short,
        endless("spawn", folder, tmp_path, TMPDIR=short) as run,
    ):
        run.until(r"Epoch 1/10000 step 3/6")
        run.meet_family()
        run.send(signal.SIGINT, group=True)
        result = run.result()
        assert result.code == INTERRUPTED, result.err
        assert "Traceback" not in result.err
        assert summary(tmp_path / "run")["finished_because"] == "interrupted"
        assert (tmp_path / "run" / "snapshot.pt").is_file()
        assert all_gone(run)
        assert not list(Path(short).glob("pymp-*"))


@pytest.mark.parametrize("way", [pytest.param("spawn", marks=pytest.mark.long), "torchrun"])
def test_temporary_folders_of_a_killed_run_are_removed_by_the_next(folder, tmp_path, way):
    """Those of a run that still continues are not."""

    def left() -> set[str]:
        return {
            one.name for one in Path(short).iterdir() if one.name.startswith(("pymp", "torche"))
        }

    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        (Path(short) / "pymp-foreign").mkdir()
        with endless(way, folder, tmp_path / "a", TMPDIR=short) as lives:
            lives.until(r"step +3/")
            of_living = left()
            with endless(way, folder, tmp_path / "b", TMPDIR=short) as killed:
                killed.until(r"step +3/")
                killed.meet_family()
                killed.send(signal.SIGKILL)
                killed.process.wait()
                assert all_gone(killed)
            assert left() > of_living
            done = python("-c", "from utils import launch; launch.run_main(int)", TMPDIR=short)
            assert (done.code, left()) == (0, of_living), done.err


@pytest.mark.parametrize("way", ["nd", "spawn"])
def test_a_second_interrupt_ends_at_once(folder, tmp_path, way):
    with endless(way, folder, tmp_path, step_seconds=600) as run:
        for _ in range(2 if way == "spawn" else 1):
            run.until("a long step begins")
        run.meet_family()
        run.send(signal.SIGINT, group=True)
        time.sleep(1)
        assert run.process.poll() is None  # the first one waits for the step
        while run.process.poll() is None:
            run.send(signal.SIGINT, group=True)
            eventually(lambda: run.process.poll() is not None, seconds=5)
        result = run.result()
        assert result.code == 128 + signal.SIGINT
        assert "Traceback" not in result.err
        assert not (tmp_path / "run" / "snapshot.pt").exists()
        assert all_gone(run)


def end_as(code: int) -> int:
    """In the first process: fork one that lives on, and exit first; the other never exits."""
    if os.environ["NUMBER"] == "1":
        time.sleep(600)
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    Path(os.environ["FILE"]).write_text(f"{child} {os.environ['OMP_WAIT_POLICY']}")
    os._exit(code)


def test_the_first_failure_decides_and_ends_the_others(tmp_path, monkeypatch):
    """A child that lives on has inherited the pipe by which the end of its parent is seen."""
    monkeypatch.setattr(launch, "GRACE_SECONDS", 1.0)
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    file = tmp_path / "child"
    places = [{"NUMBER": number, "FILE": file} for number in range(2)]
    code = launch.supervise(end_as, 3, places)
    pid, policy = file.read_text().split()
    child = Process(int(pid))
    try:
        assert (code, policy) == (3, "passive")
        assert child.lives()
        assert not {"NUMBER", "FILE", launch.LAUNCHER} & os.environ.keys()
    finally:
        os.kill(child.pid, signal.SIGKILL)
        for signum, handler in before.items():
            signal.signal(signum, handler)


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([], 0),
        ([0, 0], 0),
        ([0, 3, 4], 3),
        ([75, 75], 75),
        ([69, -9], -9),  # who lost a killed process may be noticed before it
        ([69, -15, 75], 69),  # torchrun ended the others
    ],
)
def test_the_cause_decides_the_exit_code(codes, code):
    assert launch.job_exit_code(codes) == code


def test_sigterm_after_the_end_does_not_change_the_exit_code():
    """A launcher may send it before it has heard that the processes of this node have ended."""
    code = "import atexit, os; atexit.register(os.kill, os.getpid(), 15); "
    code += "from utils import launch; launch.run_main(lambda: 7)"
    assert python("-c", code).code == 7


STUCK_FORK = """
import os, time
from utils import loaders
from utils.extras import forks

forks.BEGIN_SECONDS = 1.0
count, last_stuck = 0, 2

def before():
    global count
    count += 1

os.register_at_fork(before=before)
os.register_at_fork(after_in_child=lambda: count <= last_stuck and time.sleep(600))
worker = loaders.WorkerContext().Process(target=print, args=("begun",))
worker.start()
worker.join()
print(count, flush=True)
forks.BEGIN_SECONDS, last_stuck = 0.1, count + 9
loaders.WorkerContext().Process(target=print).start()
"""


def test_a_worker_whose_fork_gets_stuck_is_forked_again():
    """At most four times: one that never begins is an error."""
    done = python("-c", STUCK_FORK, PYTHONPATH=str(ROOT))
    begun, count = done.out.split()
    assert begun == "begun", done.err
    assert int(count) >= 3  # a busy machine may take a slow fork for a stuck one
    assert done.code == 1
    assert "5 forks of a data loading worker hung" in done.err
