"""No orphans: when a launcher or a rank dies, nothing that the run has started lives on."""

import contextlib
import os
import random
import re
import signal
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest
from conftest import ROOT, python, summary
from running import TORCHRUN, Process, Running, eventually, everyone, start, tiny

from utils.launch import supervise

INTERRUPTED = 75
WAYS = {
    "nd": ("imagenet_nd.py", (), ()),
    "spawn": ("imagenet_ddp.py", ("-g", "2"), ()),
    "torchrun": ("imagenet_ddp.py", (), (*TORCHRUN, "--nproc_per_node=2")),
}


def endless(way: str, folder: Path, runs: Path, step_seconds: float = 0.05, **more: str) -> Running:
    """A run with two loader workers that goes on until something ends it."""
    script, options, launcher = WAYS[way]
    model, env = tiny(step_seconds=step_seconds)
    lasting = ("-b", "5", "--epochs", "10000", "-p", "1", "-j", "2", "--dist-timeout", "60")
    if way == "nd":
        lasting = lasting[:-2]
    where = ("--output-dir", runs, "--name", "run", folder)
    return start(script, *options, *model, *lasting, *where, launcher=launcher, **env, **more)


def ranks(run: Running) -> list[Process]:
    """The training processes: children of the launcher with children of their own, by age."""
    family = run.meet_family()
    parents = {member.parent for member in family}
    found = [one for one in family if one.parent == run.process.pid and one.pid in parents]
    return sorted(found, key=lambda one: (one.started, one.pid))


def all_gone(run: Running) -> bool:
    """Whether, in the end, none of the processes met before is left."""
    family = run.family
    return eventually(lambda: not any(one.lives() for one in family))


@pytest.mark.parametrize(
    ("way", "signum", "least"),
    [
        ("nd", signal.SIGKILL, 2),
        ("spawn", signal.SIGKILL, 4),
        ("torchrun", signal.SIGKILL, 4),
        pytest.param("spawn", signal.SIGHUP, 4, marks=pytest.mark.long),
        pytest.param("torchrun", signal.SIGHUP, 4, marks=pytest.mark.long),
    ],
)
def test_nothing_outlives_the_process_that_was_typed(folder, tmp_path, way, signum, least):
    with endless(way, folder, tmp_path) as run:
        run.until(r"step +3/")
        family = run.meet_family()
        assert len(family) >= least, family
        run.send(signum)
        run.process.wait()
        assert all_gone(run), [one for one in family if one.lives()]


def marked(mark: str) -> list[Process]:
    """The living processes with ``mark`` in their environment, whoever is their parent now."""
    found = []
    for one in everyone():
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{one.pid}/environ").read_bytes() and one.lives():
                found.append(one)
    return found


FSDP = ("imagenet_fsdp.py", *WAYS["torchrun"][1:])


@pytest.mark.parametrize("way", [*WAYS, "fsdp"])
@pytest.mark.parametrize(
    "moment", ["ranks start", *(pytest.param(s, marks=pytest.mark.long) for s in range(12))]
)
def test_nothing_outlives_a_launcher_killed_during_start_up(folder, tmp_path, way, moment):
    """Killed at a random instant: just after its ranks were started, or within 12 s.

    The ranks, which import torch for seconds, have to notice that their parent is gone.
    """
    mark = f"MARK={tmp_path}/{random.getrandbits(40):x}"
    with mock.patch.dict(WAYS, {"fsdp": FSDP}):
        run = endless(way, folder, tmp_path, **dict([mark.split("=")]))
    with run:
        if moment == "ranks start":
            least = 1 if way == "nd" else 3
            assert eventually(lambda: len(marked(mark)) >= least)
            time.sleep(random.uniform(0, 0.7))
        else:
            time.sleep(moment + random.random())
        run.send(signal.SIGKILL)
        run.process.wait()
        try:
            assert eventually(lambda: not marked(mark), seconds=15), marked(mark)
        finally:
            for one in marked(mark):
                os.kill(one.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("way", "victim"),
    [pytest.param("spawn", 0, marks=pytest.mark.long), ("spawn", 1), ("torchrun", 1)],
)
def test_a_killed_rank_ends_the_other_with_a_sentence(folder, tmp_path, way, victim):
    """torchrun may end the other one before it has said so."""
    with endless(way, folder, tmp_path) as run:
        run.until(r"step +3/")
        pair = ranks(run)
        assert len(pair) == 2, run.family
        os.kill(pair[victim].pid, signal.SIGKILL)
        result = run.result()
        assert all_gone(run)
    if way == "torchrun":
        assert result.code not in (0, INTERRUPTED)
        return
    assert result.code == 128 + signal.SIGKILL
    assert "Traceback" not in result.err
    of_rank, of_launcher = sorted(line for line in result.err.splitlines() if "error" in line)
    assert of_rank.startswith(f"error (rank {1 - victim})")
    for word in (f"lost touch with rank {victim} on", "has ended or was killed", "--resume"):
        assert word in of_rank
    assert "SIGKILL" in of_launcher


@pytest.mark.parametrize("way", ["nd", pytest.param("spawn", marks=pytest.mark.long)])
def test_a_killed_loader_worker_is_named(folder, tmp_path, way):
    """As the kernel kills one when memory runs out."""
    with endless(way, folder, tmp_path) as run:
        run.until(r"step +3/")
        family = run.meet_family()
        parents = {member.parent for member in family}
        workers = [
            one
            for one in family
            if one.pid not in parents and "resource_tracker" not in one.command
        ]
        victim = max(workers, key=lambda one: (one.started, one.pid))
        os.kill(victim.pid, signal.SIGKILL)
        result = run.result()
        assert result.code == 2, result.err
        assert "Traceback" not in result.err
        (told,) = [line for line in result.err.splitlines() if "data loading worker" in line]
        assert told.startswith("error")
        assert re.search(rf"worker {victim.pid} (is killed by signal: Killed|exited)", told)
        assert "-j" in told
        assert all_gone(run)


@pytest.fixture
def short_folder():
    """A folder for temporary files whose path leaves room for names of sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(3, id="training"),
        pytest.param(6, id="evaluation", marks=pytest.mark.long),
    ],
)
def test_a_terminals_interrupt_ends_two_processes_with_a_snapshot(
    folder, tmp_path, short_folder, step
):
    """It reaches the launcher, the ranks and their loader workers, old and new, all at once."""
    with endless("spawn", folder, tmp_path, TMPDIR=str(short_folder)) as run:
        run.until(rf"Epoch 1/10000 step {step}/6")
        run.meet_family()
        run.send(signal.SIGINT, group=True)
        result = run.result()
        assert result.code == INTERRUPTED, result.err
        assert "Traceback" not in result.err
        assert summary(tmp_path / "run")["finished_because"] == "interrupted"
        assert (tmp_path / "run" / "snapshot.pt").is_file()
        assert all_gone(run)
    assert not list(short_folder.glob("pymp-*"))  # where the processes had their sockets


def test_a_long_path_of_temporary_files_is_not_used(folder, tmp_path):
    """No socket fits there: workers could hand nothing over, and training would wait for ever."""
    long = tmp_path / ("long_" * 20)
    long.mkdir()
    with endless("nd", folder, tmp_path, TMPDIR=str(long)) as run:
        run.until(r"step +3/")
    assert not list(long.glob("pymp-*"))


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
        assert result.code not in (0, INTERRUPTED)
        assert "Traceback" not in result.err
        assert not (tmp_path / "run" / "snapshot.pt").exists()
        assert all_gone(run)


def leave_a_child(path: str) -> int:
    """Fork a process that lives on, and write down its number."""
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    Path(path).write_text(str(child))
    os._exit(3)


def test_the_end_of_a_process_is_seen_though_its_child_lives_on(tmp_path):
    """The child has inherited the pipe by which multiprocessing tells the end of its parent."""
    file = tmp_path / "child"
    before = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
    code = supervise.supervise(leave_a_child, str(file), [{}])
    child = Process(int(file.read_text()))
    try:
        assert code == 3
        assert child.lives()
    finally:
        os.kill(child.pid, signal.SIGKILL)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(signum, before[signum])


def test_sigterm_after_the_end_does_not_change_the_exit_code():
    """A launcher may send it before it has heard that the processes of this node have ended."""
    code = "import atexit, os; atexit.register(os.kill, os.getpid(), 15); "
    code += "from utils.launch import supervise; supervise.run_main(lambda: 7)"
    assert python("-c", code).code == 7


STUCK_FORK = """
import os, sys, time
import torch
from torch.utils.data import DataLoader
from utils.data import ring

ring.BEGIN_SECONDS = 1.0
parent, forks = os.getpid(), []
os.register_at_fork(before=lambda: forks.append(1))
stuck = {number for number in range(1, 10) if number in map(int, sys.argv[1:])}
os.register_at_fork(after_in_child=lambda: len(forks) in stuck and time.sleep(600))
context = ring.WorkerContext()
loader = DataLoader(range(20), batch_size=4, num_workers=2, multiprocessing_context=context)
print(torch.cat(list(loader)).tolist() == list(range(20)), len(forks), flush=True)
"""


@pytest.mark.parametrize(("stuck", "forks"), [((), 2), ((1, 3), 4)])
def test_a_worker_whose_fork_gets_stuck_is_forked_again(stuck, forks):
    done = python("-c", STUCK_FORK, *stuck, PYTHONPATH=str(ROOT))
    complete, found = done.out.split()
    assert complete == "True", done.err
    assert int(found) >= forks  # a busy machine may take a slow fork for a stuck one


def test_a_worker_that_never_begins_is_an_error():
    done = python("-c", STUCK_FORK, *range(1, 6), PYTHONPATH=str(ROOT))
    assert done.code == 1
    assert "5 forks of a data loading worker hung" in done.err
