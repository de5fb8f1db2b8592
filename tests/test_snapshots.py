"""Snapshots written in the background, with faults at every place of the write."""

import os
import re
import signal
import subprocess
import threading
from contextlib import contextmanager

import pytest
import torch
from conftest import SMALL, python, summary, train
from running import start, tiny
from test_checkpoint import ARGS, CLASSES, WORLD, build, ours, same_weights, trained

from utils import atomic
from utils.atomic import read_checkpoint
from utils.errors import UserError
from utils.run import snapshots
from utils.run.checkpoint import resume
from utils.run.snapshots import PREVIOUS, SNAPSHOT, SnapshotWriter, read_latest, write


def save_epoch(folder, epoch):
    state = trained(seed=epoch)
    state.epoch = epoch
    write(ours(state), folder / SNAPSHOT)


def epoch_of(path):
    return read_latest(path)["progress"]["epoch"]


@pytest.mark.parametrize("hard_links", [True, False])
def test_the_one_before_is_kept(tmp_path, monkeypatch, hard_links):
    def refuse(*_):
        raise OSError("no hard links here")

    if not hard_links:
        monkeypatch.setattr(os, "link", refuse)
    for epoch in (1, 2, 3):
        save_epoch(tmp_path, epoch)
    assert sorted(os.listdir(tmp_path)) == [SNAPSHOT, PREVIOUS]
    assert epoch_of(tmp_path / SNAPSHOT) == 3
    assert epoch_of(tmp_path / PREVIOUS) == 2


def flip_a_weight(path):
    """A bit in the middle of a weight, where torch.load itself would not notice it."""
    weight = read_checkpoint(path)["model"]["0.weight"]
    content = bytearray(path.read_bytes())
    content[content.index(weight.numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "flipped": flip_a_weight,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "a little short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_snapshot_gives_way_to_the_one_before(tmp_path, logged, damage):
    save_epoch(tmp_path, 1)
    save_epoch(tmp_path, 2)
    path = tmp_path / SNAPSHOT
    DAMAGES[damage](path)
    assert snapshots.latest(tmp_path) == (path if damage != "missing" else tmp_path / PREVIOUS)
    state = build(seed=9)
    state.global_batch = 32
    assert resume(state, ARGS, WORLD, path, CLASSES)
    assert same_weights(state, trained(seed=1))
    assert re.search(
        f"warning: .*{path}.*; continuing from the snapshot before it, .*{PREVIOUS}", logged[0]
    )
    os.truncate(tmp_path / PREVIOUS, 100)
    with pytest.raises(UserError, match=f"{PREVIOUS} is not a checkpoint"):
        read_latest(path)


# ---- faults at every call of a write


@pytest.mark.parametrize("name", ["fsync", "link", "replace", "open", "unlink"])
@pytest.mark.parametrize("deadly", [False, True], ids=["ENOSPC", "kill"])
def test_a_fault_at_any_call_leaves_a_readable_snapshot(tmp_path, name, deadly):
    """The n-th call of a function fails, or the process dies in it; for each n that there is."""
    for number in range(1, 5):
        for left in tmp_path.iterdir():
            left.unlink()
        save_epoch(tmp_path, 1)
        save_epoch(tmp_path, 2)
        pid = os.fork()
        if pid == 0:
            real, count = getattr(atomic.os, name), 0

            def fail(*arguments, real=real, number=number, **options):
                nonlocal count
                count += 1
                if count == number:
                    if deadly:
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise OSError(28, "No space left on device")
                return real(*arguments, **options)

            setattr(atomic.os, name, fail)
            try:
                save_epoch(tmp_path, 3)
            except UserError:
                os._exit(9)
            os._exit(count >= number)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in ((-9, 0) if deadly else (9, 0, 1))
        assert epoch_of(tmp_path / SNAPSHOT) in (2, 3)
        if code == 0:  # there was no n-th call
            break


# ---- in the background


def test_what_is_written_is_the_state_at_the_call(tmp_path, monkeypatch):
    """Training goes on while the thread is held up; the file has none of it."""
    gate, state = threading.Event(), trained()
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    monkeypatch.setattr(snapshots, "write", lambda *a: gate.wait(60) and write(*a))
    writer = SnapshotWriter(tmp_path)
    writer.save({SNAPSHOT: ours(state)})
    assert writer.busy
    state.epoch = 99
    state.history.append({"Loss/val": 7.0})
    for tensor in (*state.model.state_dict().values(), *state.model.parameters()):
        tensor.data.zero_()
    gate.set()
    writer.wait()
    assert not writer.busy
    found = read_checkpoint(tmp_path / SNAPSHOT)
    assert found["progress"]["epoch"] == 2
    assert len(found["progress"]["history"]) == 2
    assert all(torch.equal(found["model"][name], value) for name, value in before.items())
    writer.save({SNAPSHOT: ours(state)})  # into the same buffers
    writer.wait()
    assert not read_checkpoint(tmp_path / SNAPSHOT)["model"]["0.weight"].any()
    assert len(writer.pauses) == 2


def test_a_failing_write_is_reported_once_until_it_works_again(tmp_path, monkeypatch, logged):
    works = [False, False, True, False]
    writer = SnapshotWriter(tmp_path)

    def perhaps(content, path):
        if not works.pop(0):
            raise UserError(f"cannot write {path}")
        write(content, path)

    monkeypatch.setattr(snapshots, "write", perhaps)
    for failed in (True, True, False, True):
        writer.save({SNAPSHOT: ours()})
        writer.wait()
        assert (writer.failure is not None) == failed
    assert [line.split()[0] for line in logged] == [
        "warning:",
        f"{tmp_path / SNAPSHOT}",
        "warning:",
    ]


@contextmanager
def small_disk(place, megabytes):
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(place)],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_does_not_end_a_training(folder, tmp_path):
    model, env = tiny(full=True, step_seconds=0.05)
    with small_disk(tmp_path / "disk", 1) as disk:
        recipe = ("--epochs", 2, "-b", 5, "-p", 1, "--lr", "0.05")
        line = (*model, *recipe, "--output-dir", disk, "--name", "x", folder)
        with start("imagenet_nd.py", *line, **env) as run:
            run.until(r"Epoch 2/2 step +1/")
            with open(disk / "ballast", "wb", buffering=0) as ballast, pytest.raises(OSError):
                while True:
                    ballast.write(b"x" * 4096)
            done = run.result()
        assert done.code == 2, done.err
        assert re.fullmatch(r"error: [^\n]*\n", done.err), "TensorBoard's thread is quiet"
        assert "Epoch 2/2  train: loss" in done.out, "it has gone on to the end"
        warning = r"warning: cannot write \S+snapshot.pt \(No space left on device\)"
        assert re.search(warning, done.out)
        assert "free disk space" in done.err
        assert read_checkpoint(disk / "x" / SNAPSHOT)["progress"]["epoch"] == 1
        again = python("imagenet_nd.py", *SMALL, *line, "--resume", "auto", **env)
        assert again.code == 2
        assert "cannot write into the run directory" in again.sentence
        assert read_checkpoint(disk / "x" / SNAPSHOT)["progress"]["epoch"] == 1
        (disk / "ballast").unlink()
        done = train("imagenet_nd.py", *line, "--resume", "auto", **env)
        assert summary(disk / "x")["epochs_done"] == 2
