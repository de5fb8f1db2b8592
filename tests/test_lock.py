"""One owner of a run directory at a time, also after a crash."""

import errno
import fcntl
import logging
import signal
import socket
import time
from pathlib import Path
from unittest import mock

import pytest
from conftest import python, scalars, train
from joined import start
from running import Running, eventually

from utils.run import console, run_lock
from utils.start.errors import UserError


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
    assert not {run_lock.LOCK, run_lock.OWNER} & {path.name for path in run.iterdir()}
    assert [x for x, _ in scalars(run)["Loss/train"]] == [1, 2]


def holder(folder: Path) -> Running:
    """A process that holds the lock of ``folder``, and writes its name beside it."""
    code = (
        "import filelock, os, pathlib, sys, time\n"
        "lock = filelock.FileLock(sys.argv[1]); lock.acquire()\n"
        "pathlib.Path(sys.argv[2]).write_text(f'process {os.getpid()} on another')\n"
        "print('locked', flush=True); time.sleep(600)"
    )
    return Running("-c", code, folder / run_lock.LOCK, folder / run_lock.OWNER)


@pytest.mark.parametrize("patient", [False, True])
def test_a_lock_that_is_held_is_waited_for_and_then_an_error(tmp_path, monkeypatch, patient):
    later, now = 0.0, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + later)
    mine = run_lock.Lock(tmp_path, patient)
    with holder(tmp_path) as other:
        other.until("locked")
        assert not mine.poll()
        if patient:
            later = 100.0
            assert not mine.poll()
        later = 200.0 if patient else 3.0
        with pytest.raises(UserError, match=f"process {other.process.pid} on"):
            mine.poll()
        other.send(signal.SIGKILL)
        other.result()
    assert mine.poll()
    assert f"process {other.process.pid} on" in mine.note
    mine.release()
    assert not list(tmp_path.iterdir())


def test_a_lock_that_is_given_up_while_another_takes_it_is_not_held_by_two(tmp_path, monkeypatch):
    """One has opened the file, which the other then removes."""
    first, second, third = (run_lock.Lock(tmp_path) for _ in range(3))
    assert first.poll()
    flock = fcntl.flock

    def late(file, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        first.release()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    assert not second.poll()
    assert third.poll()
    assert not second.poll()
    assert not third.note  # nobody was killed
    third.release()
    assert not list(tmp_path.iterdir())


def test_files_of_another_owner_stay(tmp_path):
    """Somebody removed the lock, as the message advises, and another run has begun there."""
    first, second = run_lock.Lock(tmp_path), run_lock.Lock(tmp_path)
    assert first.poll()
    first.path.unlink()
    second.text = "process 1 on another"
    assert second.poll()
    first.release()
    assert second.owner.read_text() == second.text and second.path.exists()
    assert not run_lock.Lock(tmp_path).poll()
    second.release()


def test_without_locks_in_the_file_system_one_line_warns(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "none")))
    one = run_lock.Lock(tmp_path)
    assert one.poll()
    assert "has no locks" in one.note
    one.release()
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.EIO, "disk")))
    with pytest.raises(OSError, match="disk"):
        run_lock.Lock(tmp_path).poll()


@pytest.mark.parametrize("name", [run_lock.LOCK, run_lock.OWNER])
@pytest.mark.parametrize("kind", ["text", "link"])
def test_a_file_of_that_name_that_is_none_is_a_short_message_or_taken_over(tmp_path, kind, name):
    """Nothing is written where a link leads; bytes of a terminal's commands are shown as text."""
    path, one = tmp_path / name, run_lock.Lock(tmp_path)
    if kind == "text":
        path.write_bytes(b"\xff\xfe\x1b[2Jx")
        assert one.poll()
        record = logging.makeLogRecord({"msg": one.note, "levelno": logging.INFO})
        shown = "\\x1b[2Jx was killed" in console.as_line(record)
        assert shown == (name == run_lock.OWNER)
        one.release()
        assert not list(tmp_path.iterdir())
    else:
        path.symlink_to(tmp_path / "victim")
        with pytest.raises(UserError, match=f"{path} is a symbolic link.*remove it"):
            one.poll()
        assert not (tmp_path / "victim").exists()
