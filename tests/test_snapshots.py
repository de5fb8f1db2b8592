"""Snapshots within an epoch, in the background, with faults at every place of the write."""

import os
import re
import signal
import subprocess
import threading
from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import SMALL, python, summary, train
from running import assert_same_weights, snapshot, start, tiny
from test_checkpoint import (
    ARGS,
    CLASSES,
    OPTIONS,
    WORLD,
    build,
    same_weights,
    save_snapshot,
    trained,
)

from utils import atomic
from utils.atomic import read_checkpoint
from utils.errors import UserError
from utils.run import snapshots
from utils.run.checkpoint import read_latest, resume, snapshot_of
from utils.run.snapshots import PREVIOUS, SNAPSHOT, SnapshotWriter, write


def save_epoch(folder, epoch):
    state = trained(seed=epoch)
    state.epoch = epoch
    save_snapshot(state, folder, OPTIONS)


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


def flip(path, where):
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)


def data_place(path):
    """A byte in the middle of a weight, where torch.load itself would not notice a flipped bit."""
    weight = read_checkpoint(path)["model"]["0.weight"]
    return path.read_bytes().index(weight.numpy().tobytes()) + 5


DAMAGES = {
    "flipped": lambda path: flip(path, data_place(path)),
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
    assert epoch_of(path) == 1
    assert re.search(
        f"warning: .*{path}.*; continuing from the snapshot before it, .*{PREVIOUS}", logged[0]
    )
    state = build(seed=9)
    state.global_batch = 32
    assert resume(state, ARGS, WORLD, path, CLASSES)
    assert same_weights(state, trained(seed=1))


def test_both_damaged_is_a_sentence(tmp_path):
    save_epoch(tmp_path, 1)
    save_epoch(tmp_path, 2)
    for name in (SNAPSHOT, PREVIOUS):
        os.truncate(tmp_path / name, 100)
    with pytest.raises(UserError, match=f"{SNAPSHOT} is not a checkpoint"):
        read_latest(tmp_path / SNAPSHOT)


# ---- faults at every call of a write


CALLS = [(atomic.os, name) for name in ("fsync", "link", "replace", "open", "unlink")]


@pytest.mark.parametrize(("module", "name"), CALLS, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("deadly", [False, True], ids=["ENOSPC", "kill"])
def test_a_fault_at_any_call_leaves_a_readable_snapshot(tmp_path, module, name, deadly):
    """The n-th call of a function fails, or the process dies in it; for each n that there is."""
    for number in range(1, 5):
        for left in tmp_path.iterdir():
            left.unlink()
        save_epoch(tmp_path, 1)
        save_epoch(tmp_path, 2)
        pid = os.fork()
        if pid == 0:
            real, count = getattr(module, name), 0

            def fail(*arguments, real=real, number=number, **options):
                nonlocal count
                count += 1
                if count == number:
                    if deadly:
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise OSError(28, "No space left on device")
                return real(*arguments, **options)

            setattr(module, name, fail)
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


def contents(state):
    weights = state.full_weights()
    return {SNAPSHOT: snapshot_of(state, OPTIONS, CLASSES, weights)}


def test_what_is_written_is_the_state_at_the_call(tmp_path, monkeypatch):
    """Training goes on while the thread is held up; the file has none of it."""
    gate, state = threading.Event(), trained()
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    monkeypatch.setattr(snapshots, "write", lambda *a: gate.wait(60) and write(*a))
    writer = SnapshotWriter(tmp_path)
    writer.save(contents(state))
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
    writer.save(contents(state))  # into the same buffers
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
        writer.save(contents(trained()))
        writer.wait()
        assert (writer.failure is not None) == failed
    assert [line.split()[0] for line in logged] == [
        "warning:",
        f"{tmp_path / SNAPSHOT}",
        "warning:",
    ]


# ---- whole runs

RECIPE = ("--epochs", 2, "-b", 5, "-p", 1, "--lr", "0.05")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, folder) -> Path:
    model, env = tiny(full=True)
    root = tmp_path_factory.mktemp("runs")
    train("imagenet_nd.py", *model, *RECIPE, "--output-dir", root, "--name", "whole", folder, **env)
    return root / "whole"


@pytest.mark.parametrize(
    "script", ["imagenet_nd.py", pytest.param("imagenet_ddp.py", marks=pytest.mark.long)]
)
def test_a_killed_run_loses_no_more_than_since_the_last_snapshot(whole, folder, tmp_path, script):
    """Snapshots at each step; killed in the middle of an epoch, then again; the same outcome."""
    model, env = tiny(full=True, step_seconds=0.05)
    processes = ("-g", 2, "-b", 5) if script == "imagenet_ddp.py" else ()
    options = (*model, *RECIPE, *processes, "--output-dir", tmp_path, "--name", "x")
    line = (*options, "--resume", "auto", "--snapshot-minutes", 0, folder)
    for epoch, step in ((1, 4), (2, 3)):
        with start(script, *line, **env) as run:
            run.until(rf"Epoch {epoch}/2 step +{step}/")
            run.send(signal.SIGKILL, group=True)
        found = snapshot(tmp_path / "x")["progress"]
        assert (found["epoch"], found["step"]) >= (epoch - 1, step - 3)
        assert found["elapsed"] > 0
    train(script, *line, **env)
    if script == "imagenet_nd.py":
        assert_same_weights(tmp_path / "x", whole)
    else:
        reference = (*options[:-1], "y", folder)
        train(script, *reference, **env)
        assert_same_weights(tmp_path / "x", tmp_path / "y")


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
        line = (*model, *RECIPE, "--output-dir", disk, "--name", "x", folder)
        with start("imagenet_nd.py", *line, **env) as run:
            run.until(r"Epoch 2/2 step +1/")
            with open(disk / "ballast", "wb", buffering=0) as ballast, pytest.raises(OSError):
                while True:
                    ballast.write(b"x" * 4096)
            done = run.result()
        assert done.code == 2, done.err
        assert re.fullmatch(r"error: [^\n]*\n", done.err), "TensorBoard's thread is quiet"
        assert "Epoch 2/2  train: loss" in done.out, "it has gone on to the end"
        assert re.search(
            r"warning: cannot write \S+snapshot.pt \(No space left on device\)", done.out
        )
        assert "free disk space" in done.err
        assert read_checkpoint(disk / "x" / SNAPSHOT)["progress"]["epoch"] == 1
        again = python("imagenet_nd.py", *SMALL, *line, "--resume", "auto", **env)
        assert again.code == 2
        assert "cannot write into the run directory" in again.sentence
        assert read_checkpoint(disk / "x" / SNAPSHOT)["progress"]["epoch"] == 1
        (disk / "ballast").unlink()
        done = train("imagenet_nd.py", *line, "--resume", "auto", **env)
        assert summary(disk / "x")["epochs_done"] == 2


# ---- options that contradict

SAVED = {"arch": "tiny", "seed": 0, "lr_schedule": "step", "warmup_epochs": 0, "epochs": 2}


@pytest.mark.parametrize(
    ("now", "name"),
    [
        ({"seed": 5}, "--seed 0"),
        ({"lr_schedule": "cosine"}, "--lr-schedule step"),
        ({"warmup_epochs": 1}, "--warmup-epochs 0"),
        ({"arch": "resnet18"}, "-a tiny"),
        ({"classes": ["a", "b"]}, "--classes"),
    ],
)
def test_contradicting_options_are_refused_by_name(tmp_path, now, name):
    save_snapshot(trained(), tmp_path, SAVED)
    classes = now.pop("classes", CLASSES)
    args = Namespace(**{**vars(ARGS), **SAVED, **now})
    with pytest.raises(UserError, match=name):
        resume(build(), args, WORLD, tmp_path / SNAPSHOT, classes)


def test_harmless_changes_are_told(whole, folder, tmp_path):
    model, env = tiny(full=True)
    line = (*model, *RECIPE, "--output-dir", tmp_path, "--resume", whole / SNAPSHOT, "--name", "n")
    done = train("imagenet_nd.py", *line, "--epochs", 3, "--lr", 0.01, "-j", 2, folder, **env)
    assert "changed since the snapshot: " in done.out
    for change in ("--epochs 3 (was 2)", "--lr 0.01 (was 0.05)", "--workers 2 (was 1)"):
        assert change in done.out
