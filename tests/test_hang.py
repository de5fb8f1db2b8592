"""A job that hangs ends with one line, which names the process that all others wait for."""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from joined import start
from running import Process, Running, free_port

from utils.data.being_read import BeingRead
from utils.start import hang, progress
from utils.start.errors import LOST_PEER, UserError

LIMIT = 6  # seconds, --dist-timeout
SLOW_LIMIT = 15  # of ranks that import torch, which under load do not end that together
WRAPPER = ("scripts/torchrun.py", "--standalone", "--nproc_per_node=2")
STOPPED = "is stopped, by SIGSTOP or a debugger"


@contextlib.contextmanager
def job(
    folder: Path, runs: Path, *options: object, launcher: tuple = (), **env: str
) -> Iterator[Running]:
    """Two processes that train until something ends them."""
    lasting = ("-a", "tiny_plain", "-b", "5", "--epochs", "10000", "-p", "1", "-j", "2")
    limit = SLOW_LIMIT if launcher else LIMIT
    where = ("--dist-timeout", limit, "--output-dir", runs, "--name", "run", folder)
    processes = () if launcher or options else ("-g", "2")
    words = (*processes, *options, *lasting, *where)
    with start("imagenet_ddp.py", *words, launcher=launcher, **env) as run:
        yield run


def process_of_rank(run: Running, rank: int) -> Process:
    """The training process: they have loader workers, and started in the order of their ranks."""
    family = run.meet_family()
    parents = {one.parent for one in family}
    ranks = [one for one in family if one.parent == run.pid and one.pid in parents]
    return sorted(ranks, key=lambda one: (one.started, one.pid))[rank]


def the_line(text: str) -> str:
    """The only error line of a job's output."""
    (line,) = [line for line in text.splitlines() if "error" in line]
    assert "Traceback" not in text
    return line


@pytest.mark.parametrize(
    ("way", "rank"),
    [("spawn", 0), ("spawn", 1), pytest.param("torchrun", 1, marks=pytest.mark.long)],
)
def test_a_frozen_rank_is_named_when_the_time_is_over(folder, tmp_path, way, rank):
    launcher = WRAPPER if way == "torchrun" else ()
    with job(folder, tmp_path, launcher=launcher, STEP_SECONDS="0.05") as run:
        run.until(r"Epoch 2/10000 step +3/")
        victim = process_of_rank(run, rank).pid
        os.kill(victim, signal.SIGSTOP)
        result = run.result()  # torchrun waits 30 s for the process that is stopped
    assert result.code == LOST_PEER
    line = the_line(result.err)
    assert line.startswith(f"error: rank {rank} of 2 on ")
    for words in (
        "has shown no sign of life for ",
        f"its process {victim} {STOPPED}; rank {1 - rank} waits for it ",
        f"(--dist-timeout {SLOW_LIMIT if launcher else LIMIT} s)",
        "--resume auto",
    ):
        assert words in line
    assert re.search(r" waits for it (in step \d+ of epoch|while evaluating \(epoch) \d", line)


# A disk of rank 1 does not answer.
HANGS = """
import os, time
scan = os.scandir
def wait_or_scan(path):
    if os.environ.get("RANK") == "1" and str(path).endswith("train"):
        time.sleep(600)
    return scan(path)
os.scandir = wait_or_scan
"""


@pytest.mark.parametrize(
    ("hold", "where"),
    [
        ({"HOLD_AFTER": "3"}, "in step 4 of epoch 1: it is in wait_for_a_signal (tests/stand_in/"),
        ({"HOLD_AFTER": "6"}, "while evaluating (epoch 1): it is in wait_for_a_signal (tests/"),
        ({"BEFORE": HANGS}, "while starting: it is in wait_or_scan ("),
    ],
)
def test_a_rank_that_hangs_in_a_function_is_named_with_it(folder, tmp_path, hold, where):
    """Each node has a launcher of its own: the process that hangs has to end by itself."""
    with contextlib.ExitStack() as stack:
        port, env = free_port(), {"HOLD_RANK": "1"} | hold
        address = ("-g", "1", "-n", "2", "--dist-url", f"tcp://127.0.0.1:{port}")
        runs = [
            stack.enter_context(job(folder, tmp_path, *address, "-nr", rank, **env))
            for rank in range(2)
        ]
        results = [run.result() for run in runs]
    for result in results:
        assert result.code == LOST_PEER, result.err
        line = the_line(result.err)
        assert re.search(r"rank 1 of 2 on \S+ \(node 1\) has made no progress for \d+ s ", line)
        assert f" s {where}" in line
        assert "; rank 0 waits for it" in line


@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_that_cannot_join_ends_the_others_with_its_error(folder, tmp_path, rank):
    """Without waiting for the time limit, which is longer than that of the test."""
    with contextlib.ExitStack() as stack:
        port, words = free_port(), ("-n", 2, "-g", 1, "--output-dir", tmp_path, folder)
        runs = []
        for node in range(2):
            env = {"GLOO_SOCKET_IFNAME": "absent"} if node == rank else {}
            where = ("-nr", node, "--dist-url", f"tcp://127.0.0.1:{port}")
            run = start("imagenet_ddp.py", *where, "--dist-timeout", 600, *words, **env)
            runs.append(stack.enter_context(run))
        results = [run.result() for run in runs]
    text = r"there is no network interface absent with an address, only .*unset GLOO_SOCKET_IFNAME"
    assert re.match(rf"error \(rank {rank}\): {text}", the_line(results[rank].err))
    assert re.match(rf"error: on \S+ \(node {rank}\): {text}", the_line(results[1 - rank].err))
    assert (results[rank].code, results[1 - rank].code) == (2, LOST_PEER)


# The launcher forks its ranks, one after the other; this one stops itself at once.
FREEZES = """
import os, signal
forks = []
freeze = lambda: len(forks) == RANK + 1 and os.kill(os.getpid(), signal.SIGSTOP)
os.register_at_fork(before=lambda: forks.append(0), after_in_child=freeze)
"""


@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_that_is_frozen_before_it_joins_is_named(folder, tmp_path, rank):
    words = ("-g", 2, "-a", "tiny_plain", "-b", "5", "--dist-timeout", LIMIT)
    before = FREEZES.replace("RANK", str(rank))
    with start("imagenet_ddp.py", *words, "--output-dir", tmp_path, folder, BEFORE=before) as run:
        result = run.result()
    assert result.code == LOST_PEER
    expected = f"error: rank {rank} of 2 has not joined the job within {LIMIT} s "
    assert the_line(result.err).startswith(expected)
    assert not list(tmp_path.iterdir())


def test_a_loader_worker_that_hangs_is_named(folder, tmp_path):
    with job(folder, tmp_path, STEP_SECONDS="0.05") as run:
        run.until(r"Epoch 1/10000 step +3/")
        trainer = process_of_rank(run, 1)
        workers = [one for one in run.meet_family() if one.parent == trainer.pid]
        for worker in workers:
            os.kill(worker.pid, signal.SIGSTOP)
        result = run.result()
    assert result.code == LOST_PEER
    pattern = rf"rank 1 .* it waits for images; loader worker (\d+) {STOPPED}; rank 0 waits for it"
    found = re.search(pattern, the_line(result.err))
    assert found, result.err
    assert int(found[1]) in [worker.pid for worker in workers]


def test_the_image_that_a_worker_reads_is_named():
    images = BeingRead(2)
    for worker in range(2):  # as in a worker, which is told its number
        images.row = 2 * worker
        images.cells[images.row] = os.getppid()
    images.note(5)
    assert images.describe("image {}".format) == f"loader worker {os.getppid()} is reading image 5"
    with images.batch():
        images.note(7)
        assert images.describe("image {}".format) == "it is reading image 7"
    images.row = 2
    images.note(-1)
    assert images.describe(str) == "no loader worker is reading"


# ---- the rules, with a clock and a store of their own


class Job:
    """Watchdogs without threads in place of processes; the time passes on demand."""

    def __init__(self, monkeypatch, size: int, limit: float = 12.0):
        self.now, self.texts, self.errors = 0.0, {}, []
        monkeypatch.setattr(hang.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(threading.Thread, "start", lambda _: None)
        monkeypatch.setattr(hang, "main", progress.Progress(phase=progress.TRAINING))
        self.started = [[7, 3] for _ in range(size)]
        self.dogs = []
        for rank in range(size):
            place = hang.Place(rank, size, f"node{rank}", 2**22 + rank, True)
            counts = self.started[rank]
            dog = hang.Watchdog(
                self, place, lambda counts=counts: tuple(counts), limit, self.errors.append
            )
            self.dogs.append(dog)

    def set(self, key: str, value: str) -> None:
        self.texts[key] = value.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.texts[key] for key in keys]

    def pass_time(self, seconds: float, frozen: tuple[int, ...] = ()) -> None:
        for _ in range(round(seconds)):
            self.now += 1.0
            alive = [dog for rank, dog in enumerate(self.dogs) if rank not in frozen]
            for dog in alive:
                dog.share()
            self.errors += [str(error) for dog in alive if (error := dog.judge())]


@pytest.mark.parametrize(
    ("size", "waiting"),
    [
        (2, "rank 0 waits"),
        (4, "ranks 0, 2, 3 wait"),
        (9, "ranks 0, 2, 3, 4, 5, 6, 7, 8 wait"),
        (10, "9 ranks wait"),
    ],
)
def test_the_ranks_that_wait_are_listed_and_the_one_behind_is_named(monkeypatch, size, waiting):
    trial = Job(monkeypatch, size)
    trial.pass_time(5)
    for rank in {*range(size)} - {1}:  # they have started another all-reduce
        trial.started[rank][0] = 8
    trial.pass_time(5)
    assert trial.dogs[0].explain() is None, "so soon"
    trial.pass_time(7)
    assert not trial.errors
    expected = (
        rf"rank 1 of {size} on node1 has made no progress for 1[6-9] s in step 1 of epoch 1: it is "
    )
    expected += rf"in .*; {waiting} for it \("
    assert all(re.match(expected, dog.explain() or "") for dog in trial.dogs)
    trial.pass_time(2)
    assert len(trial.errors) >= size - 1
    assert all(re.match(expected, line) for line in trial.errors)


def test_slow_and_equal_ranks_are_no_hang(monkeypatch):
    """All compile for longer than the limit; then one starts an all-reduce before the others."""
    trial = Job(monkeypatch, 2)
    trial.pass_time(40)
    trial.started[0][0] = 8
    trial.pass_time(11)
    trial.started[1][0] = 8
    trial.pass_time(40)
    assert not trial.errors
    assert [dog.explain() for dog in trial.dogs] == [None, None]


def test_ranks_that_disagree_about_the_order_of_collectives_are_not_accused(monkeypatch):
    trial = Job(monkeypatch, 2)
    trial.started[0][0], trial.started[1][1] = 8, 4
    trial.pass_time(30)
    assert not trial.errors


def test_a_frozen_rank_is_named_by_the_others(monkeypatch):
    trial = Job(monkeypatch, 3)
    trial.pass_time(5)
    for rank in (0, 1):
        trial.started[rank][0] = 8
    trial.pass_time(14, frozen=(2,))
    assert {line.split(" of ")[0] for line in trial.errors} == {"rank 2"}
    assert "no sign of life" in trial.errors[0]
    assert "its machine or the link to it is down; ranks 0, 1 wait for it" in trial.errors[0]
    trial = Job(monkeypatch, 4)  # two of them, as those of a machine
    trial.pass_time(5)
    for rank in (0, 1):
        trial.started[rank][0] = 8
    trial.pass_time(14, frozen=(2, 3))
    assert trial.errors[0].startswith("rank 2 of 4 on node2 (and rank 3) has shown no sign")
    assert "; ranks 0, 1 wait for it" in trial.errors[0]


def test_a_job_that_was_suspended_goes_on(monkeypatch):
    trial = Job(monkeypatch, 2)
    trial.started[0][0] = 8
    trial.pass_time(6)
    trial.now += 3600
    trial.pass_time(8)
    assert not trial.errors
    assert trial.dogs[0].explain() is None or "no sign" not in trial.dogs[0].explain()


def test_the_store_of_rank_0_that_does_not_answer_accuses_rank_0(monkeypatch):
    trial = Job(monkeypatch, 2)
    trial.pass_time(2)
    trial.started[1][0] = 8

    def gone(_: list[str]) -> list[bytes]:
        raise RuntimeError("timed out")

    monkeypatch.setattr(trial, "multi_get", gone)
    trial.pass_time(14, frozen=(0,))
    (line,) = trial.errors
    assert line.startswith("rank 0 of 2 on node0 has shown no sign of life for ")


def test_the_error_ends_the_process_as_a_lost_peer_does(monkeypatch):
    trial = Job(monkeypatch, 2)
    trial.started[0][0] = 8
    trial.pass_time(13)
    trial.now += 1
    error = trial.dogs[0].judge()
    assert isinstance(error, UserError)
    assert (error.code, error.on_every_rank) == (LOST_PEER, True)
