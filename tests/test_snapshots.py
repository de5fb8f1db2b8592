"""Snapshots written in the background, with faults at every place of the write."""

import os
import re
import signal
import subprocess
import threading

import pytest
import torch
from conftest import SMALL, python, summary, train
from joined import start
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


def flip_a_weight(path):
    """A bit in the middle of a weight, where torch.load itself would not notice it."""
    weight = read_checkpoint(path)["model"]["0.weight"]
    content = bytearray(path.read_bytes())
    content[content.index(weight.numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "flipped": flip_a_weight,
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
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
    code, number = None, 0
    while code != 0:  # then there was no n-th call
        number += 1
        for epoch in (1, 2):
            save_epoch(tmp_path, epoch)
        pid = os.fork()
        if pid == 0:
            real, calls = getattr(atomic.os, name), []

            def fail(*arguments, real=real, calls=calls, number=number, **options):
                calls.append(arguments)
                if len(calls) != number:
                    return real(*arguments, **options)
                if deadly:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(28, "No space left on device")

            setattr(atomic.os, name, fail)
            try:
                save_epoch(tmp_path, 3)
            except UserError:
                os._exit(9)
            os._exit(len(calls) >= number)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in ((-9, 0) if deadly else (9, 0, 1))
        assert epoch_of(tmp_path / SNAPSHOT) in (2, 3)
        for left in tmp_path.iterdir():
            left.unlink()


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


def test_a_failing_write_is_reported_once_until_it_works_again(tmp_path, logged):
    writer = SnapshotWriter(tmp_path)
    for folder in ("missing", "missing", "", "missing"):
        writer.folder = tmp_path / folder
        writer.save({SNAPSHOT: ours()})
        assert bool(writer.wait()) == bool(folder)
    words = ["warning:", f"{tmp_path / SNAPSHOT}", "warning:"]
    assert [line.split()[0] for line in logged] == words


@pytest.fixture
def small_disk(tmp_path):
    """A disk of a megabyte."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_does_not_end_a_training(folder, small_disk):
    run, ballast = small_disk / "x", small_disk / "ballast"
    line = ("-a", "tiny_full", "--epochs", 2, "-b", 5, "-p", 1, "--lr", "0.05")
    line += ("--output-dir", small_disk, "--name", "x", folder)
    with start("imagenet_nd.py", *line, STEP_SECONDS="0.05") as command:
        command.until(r"Epoch 2/2 step +1/")
        with open(ballast, "wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(b"x" * 4096)
        done = command.result()
    assert done.code == 2, done.err
    assert re.fullmatch(r"error: [^\n]*free disk space[^\n]*\n", done.err), "also TensorBoard's"
    assert "Epoch 2/2  train: loss" in done.out, "it has gone on to the end"
    warning = r"warning: cannot write \S+snapshot.pt \(No space left on device\)"
    assert re.search(warning, done.out)
    assert read_checkpoint(run / SNAPSHOT)["progress"]["epoch"] == 1
    again = python("imagenet_nd.py", *SMALL, *line, "--resume", "auto")
    assert again.code == 2
    assert "cannot write into the run directory" in again.sentence
    assert read_checkpoint(run / SNAPSHOT)["progress"]["epoch"] == 1
    ballast.unlink()
    train("imagenet_nd.py", *line, "--resume", "auto")
    assert summary(run)["epochs_done"] == 2
