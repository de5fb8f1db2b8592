"""One owner of a run directory at a time, also after a crash and on a disk of several machines."""

import json
import os
import signal
import socket
from pathlib import Path

import pytest
from conftest import ROOT, python, scalars, summary, train
from joined import start
from running import Running, eventually, tiny

from utils.errors import UserError
from utils.run import lock


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder``: relative path -> bytes."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def thread_states(pid: int) -> list[str]:
    """What each thread of a process is doing: a signal to stop reaches one after the other."""
    stats = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat"))
    return [text.rpartition(")")[2].split()[0] for text in stats]


def test_a_second_training_is_refused_while_the_first_lives_and_takes_its_place_after(
    folder, tmp_path
):
    model, env = tiny(step_seconds=0.05)
    where = ("--output-dir", tmp_path, "--name", "one", "--resume", "auto", folder)
    line = (*model, "-b", "5", "-p", "1", "--epochs", "2", *where)
    with start("imagenet_nd.py", *line, **env) as first:
        first.until(r"Epoch 2/2 step +1/")
        first.send(signal.SIGSTOP)  # what is stopped is not dead, and writes nothing meanwhile
        assert eventually(lambda: set(thread_states(first.process.pid)) == {"T"})
        before = contents(tmp_path)
        refused = python("imagenet_nd.py", *line, "--image-size", "32", "-j", "0", **env)
        assert refused.code == 2
        for word in (tmp_path / "one", f"process {first.process.pid} on {socket.gethostname()}"):
            assert str(word) in refused.sentence
        assert contents(tmp_path) == before
        assert refused.out == ""
        first.send(signal.SIGKILL)
        first.result()
    second = train("imagenet_nd.py", *line, **env)
    assert f"process {first.process.pid} on" in second.out
    assert "resumed from" in second.out
    assert summary(tmp_path / "one")["epochs_done"] == 2
    assert not (tmp_path / "one" / lock.LOCK).exists()
    points = scalars(tmp_path / "one")["Loss/train"]
    assert [x for x, _ in points] == [1, 2]


def foreign(place: Path, **changes: object) -> Path:
    """The file of an owner on another machine."""
    record = {"name": "process 1 on far, since noon", "machine": "other boot"}
    path = place / lock.LOCK
    path.write_text(json.dumps(record | changes))
    return path


class Clock:
    """Stands in for the module time of `lock`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 1000.0
        monkeypatch.setattr(lock, "time", self)

    def monotonic(self) -> float:
        return self.now

    def strftime(self, form: str) -> str:
        return form


@pytest.mark.parametrize("ago", [0, 3600, -3600])
def test_a_silent_owner_on_another_machine_is_followed(monkeypatch, tmp_path, ago):
    """However old its file seems by this machine's clock, it is watched for a while."""
    clock, path = Clock(monkeypatch), foreign(tmp_path)
    touched = path.stat().st_mtime - ago
    os.utime(path, (touched, touched))
    mine = lock.Lock(tmp_path)
    assert not mine.poll()
    clock.now += lock.SILENT - 0.5
    assert not mine.poll()
    assert mine.note is None
    clock.now += 0.5
    assert not mine.poll()
    assert mine.poll()
    assert "process 1 on far, since noon" in mine.note
    mine.release()
    assert not list(tmp_path.iterdir())


def test_an_owner_that_gives_a_sign_of_life_is_left_alone(monkeypatch, tmp_path):
    clock, path = Clock(monkeypatch), foreign(tmp_path)
    os.utime(path, (1, 1))  # by its clock
    before = path.read_text()
    locks = [lock.Lock(tmp_path, patient) for patient in (False, True)]
    assert not any(one.poll() for one in locks)
    clock.now += 3
    os.utime(path, (4, 4))
    with pytest.raises(UserError, match="process 1 on far"):
        locks[0].poll()
    assert not locks[1].poll()  # a restart: the attempt before it may be about to end
    path.unlink()
    assert locks[1].poll()
    locks[1].release()
    foreign(tmp_path)
    assert path.read_text() == before


def test_of_two_that_take_over_one_gets_the_lock(tmp_path):
    """Both found the holder dead before either took its place."""
    here = {"machine": lock._machine(), "folder": tmp_path.stat().st_ino}
    path = foreign(tmp_path, pid=2**22 + 1, started="1", **here)
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


def test_a_copy_of_a_run_directory_has_no_owner(tmp_path):
    for name in ("one", "copy"):
        (tmp_path / name).mkdir()
    one, copy = lock.Lock(tmp_path / "one"), lock.Lock(tmp_path / "copy")
    assert one.poll()
    copy.path.write_text(one.path.read_text())
    assert not copy.poll()
    assert copy.poll()
    copy.release()
    one.release()


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
    assert "process 1 on far" in done.sentence
    assert touched.exists()
