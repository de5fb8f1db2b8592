"""One owner of a run directory at a time, also after a crash and on a disk of several machines."""

import json
import os
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, python, scalars, train
from joined import start
from running import Running, eventually

from utils.errors import UserError
from utils.run import lock


def thread_states(pid: int) -> set[str]:
    """What the threads of a process are doing: a signal to stop reaches one after the other."""
    stats = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat"))
    return {text.rpartition(")")[2].split()[0] for text in stats}


def test_a_second_training_is_refused_while_the_first_lives_and_takes_its_place_after(
    folder, tmp_path
):
    where = ("--output-dir", tmp_path, "--name", "one", "--resume", "auto", folder)
    line = ("imagenet_nd.py", "-a", "tiny_plain", "-b", "5", "-p", "1", "--epochs", "2", *where)
    run = tmp_path / "one"
    with start(*line, STEP_SECONDS="0.05") as first:
        first.until(r"Epoch 2/2 step +1/")
        first.send(signal.SIGSTOP)  # what is stopped is not dead, and writes nothing meanwhile
        assert eventually(lambda: thread_states(first.process.pid) == {"T"})
        before = {path: path.read_bytes() for path in run.iterdir()}
        refused = python(*line, "--image-size", "32", "-j", "0")
        refused.fails_with(run, f"process {first.process.pid} on {socket.gethostname()}")
        assert {path: path.read_bytes() for path in run.iterdir()} == before
        first.send(signal.SIGKILL)
        first.result()
    second = train(*line)
    assert f"process {first.process.pid} on" in second.out
    assert not (run / lock.LOCK).exists()
    assert [x for x, _ in scalars(run)["Loss/train"]] == [1, 2]


def foreign(place: Path, **changes: object) -> Path:
    """The file of an owner on another machine."""
    record = {"name": "process 1 on far, since noon", "machine": "other boot"}
    path = place / lock.LOCK
    path.write_text(json.dumps(record | changes))
    return path


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """``now`` is what the lock's clock shows."""
    clock = SimpleNamespace(now=1000.0)
    played = SimpleNamespace(monotonic=lambda: clock.now, strftime=time.strftime)
    monkeypatch.setattr(lock, "time", played)
    return clock


def test_a_silent_owner_on_another_machine_is_followed(clock, tmp_path):
    """However old its file seems by this machine's clock, it is watched for a while."""
    path = foreign(tmp_path)
    os.utime(path, (1, 1))
    mine = lock.Lock(tmp_path)
    for seconds in (0.0, lock.SILENT - 0.5):
        clock.now += seconds
        assert not mine.poll()
        assert mine.note is None
    clock.now += 0.5
    assert not mine.poll()
    assert mine.poll()
    assert "process 1 on far, since noon" in mine.note
    mine.release()
    assert not list(tmp_path.iterdir())


def test_an_owner_that_gives_a_sign_of_life_is_left_alone(clock, tmp_path):
    path = foreign(tmp_path)
    os.utime(path, (1, 1))  # by its clock
    at_once, patient = lock.Lock(tmp_path), lock.Lock(tmp_path, patient=True)
    assert not at_once.poll()
    assert not patient.poll()
    clock.now += 3
    os.utime(path, (4, 4))
    with pytest.raises(UserError, match="process 1 on far"):
        at_once.poll()
    assert not patient.poll()  # a restart: the attempt before it may be about to end
    clock.now += lock.PATIENCE
    os.utime(path, (5, 5))
    with pytest.raises(UserError, match="process 1 on far"):
        patient.poll()
    path.unlink()
    assert patient.poll()
    foreign(tmp_path)
    patient.release()
    assert "on far" in path.read_text()


def test_of_two_that_take_over_one_gets_the_lock(tmp_path):
    """Both found the holder dead, whose number is now another process's, before either acted."""
    here = {"machine": lock._machine(), "folder": tmp_path.stat().st_ino}
    path = foreign(tmp_path, pid=os.getpid(), started="1", **here)
    dead = path.read_text()
    one, other = lock.Lock(tmp_path), lock.Lock(tmp_path)
    assert not one.poll()
    path.write_text(dead)  # as the other one has read it
    assert not other.poll()
    other.text = other.text.replace('"pid"', '"number": 2, "pid"')  # as of another process
    path.write_text(other.text)
    assert other.poll()
    with pytest.raises(UserError, match=f"process {os.getpid()} on"):
        one.poll()
    one.release()
    assert path.exists()
    other.release()
    assert not path.exists()


def test_an_owner_whose_place_was_taken_ends(tmp_path):
    """It was held up, and must not write beside the new one."""
    code = (
        "import sys, pathlib, time; from utils.run import lock; lock.BEAT = 0.05\n"
        "lock.Lock(pathlib.Path(sys.argv[1])).poll(); print('mine', flush=True)\n"
        "time.sleep(600)"
    )
    with Running("-c", code, tmp_path, PYTHONPATH=str(ROOT)) as held_up:
        held_up.until("mine")
        touched = tmp_path / lock.LOCK
        last = touched.stat().st_mtime_ns
        assert eventually(lambda: touched.stat().st_mtime_ns > last), "no heartbeat"
        foreign(tmp_path)
        done = held_up.result()
    assert done.code == 2
    done.fails_with("process 1 on far")
    assert touched.exists()
