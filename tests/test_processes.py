"""No orphans: when a launcher or a rank dies, nothing that the run has started lives on."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import running
from conftest import ROOT, python, summary
from joined import Forked, start
from running import TORCHRUN, Process, Running, eventually, everyone

from utils.start import errors, launch, signals, temporary
from utils.start.cores import usable_cores

INTERRUPTED = 75
SHORT = ("--dist-timeout", "60")
WAYS = {
    "nd": ("imagenet_nd.py", (), ()),
    "spawn": ("imagenet_ddp.py", ("-g", "2", *SHORT), ()),
    "torchrun": ("imagenet_fsdp.py", SHORT, (*TORCHRUN, "--nproc_per_node=2")),
}


def endless(
    way: str, folder: Path, runs: Path, step_seconds: float = 0.05, start: Any = start, **more: str
) -> Running:
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
        pytest.param("spawn", 4, False, marks=pytest.mark.long),
        ("torchrun", 4, False),  # while it trains: test_wrappers
    ],
)
def test_nothing_outlives_the_process_that_was_typed(folder, tmp_path, way, least, training):
    """Ranks that still import torch, which takes seconds, have to notice that it is gone."""
    if training:
        with endless(way, folder, tmp_path) as run:
            run.until(r"step +3/")
            assert len(run.meet_family()) >= least
            run.send(signal.SIGKILL)
            run.process.wait()
            assert all_gone(run), run.family
        return
    mark = f"{tmp_path}/{random.getrandbits(40):x}"
    with endless(way, folder, tmp_path, start=running.start, MARK=mark) as run:
        assert eventually(lambda: len(marked(mark)) >= least - 1)
        time.sleep(random.uniform(0, 0.7))
        run.send(signal.SIGKILL)
        run.process.wait()
        try:
            assert eventually(lambda: not marked(mark)), marked(mark)
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
    assert not re.search("Traceback|resource_tracker", result.err), result.err
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


# A training as torchrun starts it, but without torch, whose import takes seconds.
WAITS = """
import os, time
from utils.start import launch
launch.run_main(lambda: os.write(1, b"has begun\\n") and time.sleep(600))  # in one piece
"""


def test_temporary_folders_of_a_killed_run_are_removed_by_the_next(tmp_path):
    """Those of a run that still continues are not: torchrun's, and those of its processes."""

    def left() -> set[str]:
        names = {one.name for one in Path(short).iterdir()}
        return {one for one in names if one.startswith(("pymp", "torche"))}

    (tmp_path / "train.py").write_text(WAITS)
    line = (*TORCHRUN, "--nproc_per_node=2", tmp_path / "train.py")
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        (Path(short) / "pymp-foreign").mkdir()
        env = {"TMPDIR": short, "PYTHONPATH": str(ROOT)}
        with Forked(*line, **env) as lives:
            for _ in range(2):
                lives.until("has begun")
            of_living = left()
            with Forked(*line, **env) as killed:
                for _ in range(2):
                    killed.until("has begun")
                assert len(left() - of_living) == 3
                killed.meet_family()
                killed.send(signal.SIGKILL)
                killed.process.wait()
                for one in killed.family:  # which do not watch their parent, as trainings do
                    one.lives() and os.kill(one.pid, signal.SIGKILL)
                assert all_gone(killed)
            assert left() > of_living
            code = "from utils.start import launch; launch.run_main(int)"
            done = python("-c", code, TMPDIR=short)
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
    Path(os.environ["FILE"]).write_text(str(child))
    os._exit(code)


def test_the_first_failure_decides_and_ends_the_others(tmp_path, monkeypatch):
    """A child that lives on has inherited the pipe by which the end of its parent is seen."""
    monkeypatch.setattr(launch, "GRACE_SECONDS", 1.0)
    before = {n: signal.getsignal(n) for n in signals.STOPS}
    file = tmp_path / "child"
    places = [{"NUMBER": number, "FILE": file} for number in range(2)]
    code = launch.supervise(end_as, 3, places)
    child = Process(int(file.read_text()))
    try:
        assert code == 3
        assert child.lives()
        assert not {"NUMBER", "FILE", launch.LAUNCHER} & os.environ.keys()
    finally:
        os.kill(child.pid, signal.SIGKILL)
        for signum, handler in before.items():
            signal.signal(signum, handler)


def end_late(args: int) -> int:
    """The second process ends at once; the first one works longer than the time for failures."""
    if os.environ["NUMBER"] == "0":
        time.sleep(1.5)
        Path(os.environ["FILE"]).write_text("done")
    return 0


def test_a_process_that_succeeds_early_does_not_end_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.5)
    before = {n: signal.getsignal(n) for n in signals.STOPS}
    places = [{"NUMBER": number, "FILE": tmp_path / "file"} for number in range(2)]
    try:
        assert launch.supervise(end_late, 0, places) == 0
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    assert (tmp_path / "file").read_text() == "done"


def test_a_signal_between_the_first_line_and_the_first_process_is_passed_on(tmp_path, monkeypatch):
    start_tracker = signals.start_resource_tracker

    def stopped() -> None:
        start_tracker()
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(signals, "start_resource_tracker", stopped)
    before = {n: signal.getsignal(n) for n in signals.STOPS}
    places = [{"NUMBER": number, "FILE": tmp_path / "file"} for number in range(2)]
    try:
        assert launch.supervise(end_late, 0, places) == errors.INTERRUPTED
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    assert not (tmp_path / "file").exists()


def test_the_folder_of_a_job_stays_while_a_process_of_it_begins(tmp_path, monkeypatch):
    """The other process of the job has already ended: it has left an error message for torchrun."""
    file = tmp_path / "torchelastic_1/job/attempt_0/1/error.json"
    file.parent.mkdir(parents=True)
    (tmp_path / f"torchelastic_1/{temporary.IN_USE}1").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file.parent.parent / "0/error.json"))
    temporary.make()
    assert file.parent.is_dir()


def test_the_folder_of_a_job_stays_until_torchrun_has_read_its_errors(tmp_path, monkeypatch):
    """All processes of the job have ended, and another run begins."""
    for number, torchrun in enumerate((os.getppid(), 2**22 + 1, "")):  # the second has ended, too
        (tmp_path / f"torchelastic_{number}").mkdir()
        (tmp_path / f"torchelastic_{number}/{temporary.IN_USE}1").write_text(f"{torchrun}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    temporary.make()
    assert [path.name for path in tmp_path.glob("torche*")] == ["torchelastic_0"]


def test_old_temporary_folders_are_removed_by_several_processes_at_once(tmp_path):
    for number in range(100):
        folder = tmp_path / f"pymp-{number}"
        folder.mkdir()
        for name in ("imagenet_in_use_1", "socket"):
            (folder / name).touch()
    code = "import sys; from utils.start import temporary; print(flush=True); sys.stdin.read(1)"
    line = [sys.executable, "-c", f"{code}; temporary.make()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    started = [subprocess.Popen(line, cwd=ROOT, env=env, text=True, **pipes) for _ in range(6)]
    for one in started:
        one.stdout.readline()
    for one in started:
        one.stdin.write("x")
        one.stdin.flush()
    assert [(one.communicate()[1], one.returncode) for one in started] == [("", 0)] * 6
    assert not list(tmp_path.glob("pymp-*"))


CPU = "sys/fs/cgroup/cpu,cpuacct/cpu.cfs"
VERSION_1 = {"proc/self/cgroup": "4:cpu,cpuacct:/docker/1\n3:memory:/x\n"}
VERSION_1 |= {f"{CPU}_period_us": "100000"}


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "150000 100000"}, 2),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/cpu.max": "300000 100000"}, 3),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cpu.max": "100000 100000"}, None),  # no group
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        (VERSION_1 | {f"{CPU}_quota_us": "100000"}, 1),
        (VERSION_1 | {f"{CPU}_quota_us": "-1"}, None),  # no limit
        ({}, None),
    ],
)
def test_a_containers_quota_limits_the_usable_cores(tmp_path, monkeypatch, files, cores):
    """Of version 2 of control groups, of a group above the process's own, and of version 1."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert usable_cores(tmp_path) == (cores or 8)


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
    code += "from utils.start import launch; launch.run_main(lambda: 7)"
    assert python("-c", code).code == 7


STUCK_FORK = """
import os, time
from utils.data import workers

workers.BEGIN_SECONDS = 1.0
count, last_stuck = 0, 2

def before():
    global count
    count += 1

os.register_at_fork(before=before)
os.register_at_fork(after_in_child=lambda: count <= last_stuck and time.sleep(600))
worker = workers.WorkerContext().Process(target=print, args=("begun",))
worker.start()
worker.join()
print(count, flush=True)
workers.BEGIN_SECONDS, last_stuck = 0.1, count + 9
workers.WorkerContext().Process(target=print).start()
"""


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="later Pythons' forks do not get stuck")
def test_a_worker_whose_fork_gets_stuck_is_forked_again():
    """At most four times: one that never begins is an error."""
    done = python("-c", STUCK_FORK, PYTHONPATH=str(ROOT))
    begun, count = done.out.split()
    assert begun == "begun", done.err
    assert int(count) >= 3  # a busy machine may take a slow fork for a stuck one
    assert done.code == 1
    assert "5 forks of a data loading worker hung" in done.err
