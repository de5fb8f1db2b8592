"""Files that exist as a whole or not at all; snapshots, with errors at every place of a write."""

import copy
import os
import re
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import SMALL, python, summary, train
from joined import command, start
from running import eventually, fill, same, small_disk
from test_checkpoint import ours, trained

from utils.run import snapshots
from utils.run.snapshots import BEST, PREVIOUS, SNAPSHOT, SnapshotWriter, read_whole, write
from utils.start import progress
from utils.start.atomic import link_atomically, read_checkpoint, save_atomically
from utils.start.errors import UserError


def save_epoch(folder, epoch):
    write(ours(replace(trained(seed=epoch), epoch=epoch)), folder / SNAPSHOT)


def epoch_of(path):
    return read_whole(path)[1]["progress"]["epoch"]


def flip_a_weight(path):
    """A bit in the middle of a weight, where torch.load itself would not notice it."""
    bias = next(x for x in read_checkpoint(path)["model"].values() if x.dim() == 1)
    content = bytearray(path.read_bytes())
    content[content.index(bias.numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("make", ["mkfifo {}", "mkdir {}", "ln -s /not/mounted {}"])
def test_a_snapshot_that_cannot_be_looked_at_begins_no_run_anew(tmp_path, make):
    """As a link to a disk that is not mounted today."""
    save_epoch(tmp_path, 1)
    (tmp_path / SNAPSHOT).unlink()
    os.system(make.format(tmp_path / SNAPSHOT))
    for look in (snapshots.latest, snapshots.name_newer_snapshot):
        with pytest.raises(UserError, match=f"{SNAPSHOT} is a broken link, or .*: mount its disk"):
            look(tmp_path)


# ---- the calls of a write, and errors in each of them


@pytest.fixture
def calls(monkeypatch):
    """The system calls for durable files, in order: names, with what they were made on."""
    made, fsync, replace = [], os.fsync, os.replace

    def note_fsync(handle):
        path, size = Path(os.readlink(f"/proc/self/fd/{handle}")), os.fstat(handle).st_size
        made.append(f"fsync {path}" if path.is_dir() else f"fsync {size} bytes")
        fsync(handle)

    def note_replace(source, target):
        made.append(f"name {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    return made


def test_a_durable_file_is_flushed_before_it_has_its_name_and_the_name_after(tmp_path, calls):
    """In any other order a power cut may leave an empty file, or the old one."""
    long = "x" * 255  # as the file system allows
    save_atomically(lambda file: file.write(b"abc"), tmp_path / long, durable=False)
    assert (tmp_path / long).read_bytes() == b"abc"
    for step in (1, 2, 3):
        assert calls  # of the file before
        calls.clear()
        snapshots.write({"step": step}, tmp_path / SNAPSHOT)
    size = (tmp_path / SNAPSHOT).stat().st_size
    kept = f"name {PREVIOUS}"
    assert calls == [f"fsync {size} bytes", kept, f"name {SNAPSHOT}", f"fsync {tmp_path}"]
    assert {path.name for path in tmp_path.iterdir()} == {long, SNAPSHOT, PREVIOUS}
    assert read_checkpoint(tmp_path / SNAPSHOT) == {"step": 3}
    assert read_checkpoint(tmp_path / PREVIOUS) == {"step": 2}


def test_an_error_names_the_file_and_not_a_temporary_one(tmp_path):
    with pytest.raises(OSError, match=r"/missing/data.json'$"):
        save_atomically(lambda file: file.write(b""), tmp_path / "missing/data.json")


@pytest.mark.parametrize("by_link", [True, False])
def test_linked_or_copied(tmp_path, monkeypatch, by_link):
    if not by_link:
        refuse = mock.Mock(side_effect=OSError(18, "Invalid cross-device link"))
        monkeypatch.setattr(os, "link", refuse)
    source, path = tmp_path / "source", tmp_path / "path"
    source.write_bytes(b"new")
    (tmp_path / "symbolic").symlink_to(source)
    for _ in range(2):
        link_atomically(tmp_path / "symbolic", path)
        assert (path.read_bytes(), path.is_symlink()) == (b"new", False)
        assert path.samefile(source) == by_link
        assert sorted(os.listdir(tmp_path)) == ["path", "source", "symbolic"]


@pytest.mark.parametrize("name", ["fsync", "link", "replace", "open", "unlink"])
@pytest.mark.parametrize("deadly", [False, True], ids=["ENOSPC", "kill"])
def test_an_error_in_any_call_leaves_a_readable_snapshot(tmp_path, name, deadly):
    """The n-th call of a function fails, or the process dies in it; for each n that there is."""
    code, number = None, 0
    while code != 0:  # then there was no n-th call
        number += 1
        for epoch in (1, 2):
            save_epoch(tmp_path, epoch)
        pid = os.fork()
        if pid == 0:
            real, calls = getattr(os, name), []

            def fail(*arguments, real=real, calls=calls, number=number, **options):
                calls.append(arguments)
                if len(calls) != number:
                    return real(*arguments, **options)
                if deadly:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(28, "No space left on device")

            setattr(os, name, fail)
            try:
                save_epoch(tmp_path, 3)
            except UserError:
                os._exit(9)
            os._exit(len(calls) >= number)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in ((-9, 0) if deadly else (9, 0, 1))
        assert epoch_of(tmp_path / SNAPSHOT) in (2, 3)
        for path in tmp_path.iterdir():
            path.unlink()


# ---- in the background


def test_a_training_that_waits_for_its_disk_is_said_to(tmp_path):
    """So that the line about a hang does not name the copying of the weights."""
    answers = threading.Event()
    writer = SnapshotWriter(tmp_path, lambda path: answers.wait() and None)
    writer.save({SNAPSHOT: {}})
    waiting = threading.Thread(target=writer.wait)
    waiting.start()
    try:
        assert eventually(lambda: "until a snapshot is written" in progress.main.where())
    finally:
        answers.set()
        waiting.join()
        writer.wait()
    assert "snapshot" not in progress.main.where()


def test_what_is_written_is_the_state_at_the_call(tmp_path, monkeypatch):
    """Training goes on while the thread is held up; the file has none of it."""
    gate, state, save = threading.Event(), trained(), torch.save
    before = copy.deepcopy(state.model.state_dict())
    monkeypatch.setattr(torch, "save", lambda *a: gate.wait(60) and save(*a))
    writer = SnapshotWriter(tmp_path)
    writer.save({SNAPSHOT: ours(state)})
    assert writer.busy
    state.epoch = 99
    state.history.append({"Loss/val": 7.0})
    for tensor in (*state.model.state_dict().values(), *state.model.parameters()):
        tensor.data.zero_()
    again = threading.Thread(target=writer.save, args=({SNAPSHOT: ours(state)}, 100.0))
    again.start()  # it waits, as its copies go into the same buffers
    again.join(0.5)
    gate.set()
    again.join()
    writer.wait()
    assert not writer.busy
    first = read_checkpoint(tmp_path / PREVIOUS)
    assert (first["progress"]["epoch"], len(first["progress"]["history"])) == (2, 2)
    assert same(first["model"], before)
    assert not read_checkpoint(tmp_path / SNAPSHOT)["model"]["0.weight"].any()
    pause, longer = writer.pauses
    assert 0 < pause < 100 < longer < 200


def test_a_failing_write_is_reported_once_until_it_works_again(tmp_path, logged):
    """So is the best model, as it was then: perhaps no later epoch is better."""
    order: list[Path] = []
    writer, state = SnapshotWriter(tmp_path, order.append), trained()
    before = copy.deepcopy(state.model.state_dict())
    for folder in ("missing/x", "missing/x", "", ""):  # as of a disk that is away
        best = {} if state.epoch > 2 else {BEST: {"state_dict": state.model.state_dict()}}
        writer.folder = tmp_path / folder
        writer.save({**best, SNAPSHOT: ours(state)})
        assert bool(writer.wait()) == bool(folder)
        assert len(logged) == (1 if folder else 2), "at the first failure"
        state.epoch += 1
        state.model.state_dict()["0.weight"].zero_()
    assert [path.name for path in order] == [BEST, SNAPSHOT, SNAPSHOT], "it refers to that model"
    assert same(read_checkpoint(tmp_path / BEST)["state_dict"], before)
    assert read_checkpoint(tmp_path / PREVIOUS)["progress"]["epoch"] == 4
    assert [line.split()[0] for line in logged] == ["warning:", f"{tmp_path / SNAPSHOT}"]


def test_a_folder_that_was_renamed_is_made_again(tmp_path, logged):
    """By a person who tidies up: the rest of the training would be lost."""
    writer, state = SnapshotWriter(tmp_path / "x"), trained()
    writer.save({SNAPSHOT: ours(state)})
    assert writer.wait() is None and (tmp_path / "x" / SNAPSHOT).exists()
    assert [line.partition(" is gone")[0] for line in logged] == [f"warning: {tmp_path}/x"]


# ---- runs that continue

LINE = ("-a", "tiny_plain", "-b", "10", "-j", "0", "--image-size", "32", "--name", "x")


@pytest.fixture(scope="module")
def stopped(folder, tmp_path_factory):
    """The folder of a run of one epoch."""
    place = tmp_path_factory.mktemp("stopped")
    train("imagenet_nd.py", *LINE, "--output-dir", place, "--epochs", "1", folder)
    best, snapshot = ((place / "x" / name).stat().st_mtime_ns for name in (BEST, SNAPSHOT))
    assert best < snapshot, "a snapshot would refer to a best model that is not on disk yet"
    return place


@pytest.fixture
def run(stopped, tmp_path, folder):
    """A copy of that run, and a function that continues it."""
    where = (*LINE, "--output-dir", tmp_path, "--epochs", "2", folder)
    return (
        shutil.copytree(stopped / "x", tmp_path / "x"),
        lambda *options: python("imagenet_nd.py", *where, "--resume", *options),
    )


def test_a_damaged_snapshot_gives_way_to_the_one_before(run):
    """And is never kept as the previous one, when the next one is saved."""
    folder, again = run
    shutil.copy(folder / SNAPSHOT, folder / PREVIOUS)
    flip_a_weight(folder / SNAPSHOT)
    before = sorted(folder.iterdir())
    assert snapshots.read_whole(folder / SNAPSHOT)[0] == folder / PREVIOUS
    assert sorted(folder.iterdir()) == before, "an evaluation leaves the run as it is"
    done = again("auto")
    assert done.code == 0, done.err
    assert f"resumed from {folder / PREVIOUS}: epoch 2" in done.out
    assert (epoch_of(folder / PREVIOUS), epoch_of(folder / SNAPSHOT)) == (1, 2)
    assert f"continuing from the snapshot before it, {folder / PREVIOUS}" in done.out
    damaged = folder / "snapshot_damaged.pt"
    with pytest.raises(UserError, match="it is damaged"):
        read_checkpoint(damaged)
    damaged.unlink()
    flip_a_weight(folder / SNAPSHOT)
    assert again(folder / "../x" / SNAPSHOT).code == 0
    assert damaged.exists(), "the same folder by another path"
    (folder / SNAPSHOT).unlink()
    assert again(folder / SNAPSHOT).code == 0, "its own, though it is missing"
    for name in (SNAPSHOT, PREVIOUS):
        os.truncate(folder / name, 100)
    again("auto").fails_with(f"{PREVIOUS} is not a checkpoint", "with another --name")


def test_a_newer_snapshot_without_its_name_is_used(run):
    """A process that is killed between the write and the renaming leaves one. The last one with a
    name was damaged meanwhile."""
    folder, again = run
    newer = read_checkpoint(folder / SNAPSHOT)
    newer["progress"]["elapsed"] = 4321.0
    torch.save(newer, folder / ".0123456789abcdef.tmp")
    torch.save({"state_dict": {}}, folder / ".1123456789abcdef.tmp")
    (folder / ".2123456789abcdef.tmp").write_bytes(b"half a file")
    written = (folder / SNAPSHOT).stat().st_mtime
    os.truncate(folder / SNAPSHOT, 1000)
    os.utime(folder / SNAPSHOT, (written, written))
    done = again("auto")
    assert done.code == 0, done.err
    assert f"resumed from {folder / SNAPSHOT}: epoch 2" in done.out
    assert summary(folder)["elapsed_seconds"] > 4321
    assert not list(folder.glob(".*"))
    assert read_checkpoint(folder / PREVIOUS)["progress"]["elapsed"] == 4321.0


def test_a_damaged_snapshot_is_not_kept_as_the_one_before_a_newer_one(tmp_path):
    """A killed process has not yet renamed the newest, and the last one was damaged meanwhile."""
    for epoch in (1, 2, 3):
        save_epoch(tmp_path, epoch)
    (tmp_path / SNAPSHOT).rename(tmp_path / ".0123456789abcdef.tmp")
    (tmp_path / SNAPSHOT).write_bytes(b"damaged")
    os.utime(tmp_path / SNAPSHOT, (1000, 1000))
    snapshots.name_newer_snapshot(tmp_path)
    assert (epoch_of(tmp_path / SNAPSHOT), epoch_of(tmp_path / PREVIOUS)) == (3, 2)
    (tmp_path / SNAPSHOT).unlink()
    assert snapshots.latest(tmp_path) == tmp_path / PREVIOUS


@pytest.mark.parametrize("file", ["auto", "weights.pt"])
def test_weights_do_not_begin_a_run_anew_in_its_own_directory(run, tmp_path, file):
    """Those of best.pt in place of the snapshot, or from elsewhere."""
    folder, again = run
    if file != "auto":
        file = tmp_path / file
    shutil.copy(folder / "best.pt", folder / SNAPSHOT if file == "auto" else file)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    again(file).fails_with("no position in a training", folder, "--pretrained")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    if file != "auto":  # the best model alone would be overwritten, too
        for path in folder.glob("snapshot*"):
            path.unlink()
        again(file).fails_with("no position in a training", folder)
    assert again(file, "--start-epoch", "1").code == 0, "--start-epoch asks for it"


def test_a_snapshot_of_another_run_does_not_overwrite_that_of_a_run(run, tmp_path):
    """As when the command that has made the run from it is typed again."""
    folder, again = run
    shutil.copytree(folder, tmp_path / "other")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for source in (tmp_path / "other" / SNAPSHOT, f"file://{tmp_path}/other"):
        again(source).fails_with(folder, "of its own", "use --resume auto, or")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    # Its own copy is that of the same run.
    store = f"file://{tmp_path}/store/"
    shutil.copytree(folder, tmp_path / "store" / folder.name)
    for end in ("/", f"/{SNAPSHOT}"):
        assert again(f"{store}{folder.name}{end}", "--store", store).code == 0


CRASH = """
from torch import nn
def forward(*_):
    raise RuntimeError("DataLoader worker (pid 7) exited")
nn.CrossEntropyLoss.forward = forward
"""


@pytest.mark.parametrize(
    ("file", "said"), [(SNAPSHOT, "resumed from"), ("best.pt", "only its weights are loaded")]
)
def test_a_run_that_ends_before_its_first_snapshot_begins_again_as_it_did(
    stopped, tmp_path, folder, file, said
):
    """With --resume auto it would begin with random weights."""
    line = (*LINE[:-1], "new", "--epochs", 2, "--output-dir", tmp_path)
    line += ("--resume", stopped / "x" / file, folder)
    missing = f"--resume auto (unchanged while {tmp_path}/new/{SNAPSHOT} is missing)"
    command("imagenet_nd", *line, BEFORE=CRASH).fails_with(f"run the same command with {missing}")
    done = command("imagenet_nd", *line)
    assert done.code == 0 and said in done.out, done


def test_a_run_without_a_name_has_nothing_to_resume_before_its_first_snapshot(tmp_path, folder):
    line = (*LINE[:-2], "--output-dir", tmp_path, folder)
    done = command("imagenet_nd", *line, BEFORE=CRASH)
    (run,) = tmp_path.iterdir()
    missing = f"--resume {run}/{SNAPSHOT} (unchanged while {run}/{SNAPSHOT} is missing)"
    done.fails_with(f"run the same command with {missing}")


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path) as place:
        yield place


def test_a_full_disk_does_not_end_a_training(folder, disk):
    run, ballast = disk / "x", disk / "ballast"
    line = ("-a", "tiny_full", "--epochs", 2, "-b", 5, "-p", 1, "--lr", "0.05")
    line += ("--output-dir", disk, "--name", "x", folder)
    with start("imagenet_nd.py", *line, STEP_SECONDS="0.05") as command:
        command.until(r"Epoch 2/2 step +1/")
        fill(ballast)
        os.truncate(ballast, ballast.stat().st_size - 2**14)  # room for a summary
        done = command.result()
    assert done.code == 2, done.err
    assert re.fullmatch(r"error: [^\n]*free disk space[^\n]*\n", done.err), "also TensorBoard's"
    assert "Epoch 2/2  train: loss" in done.out, "it has gone on to the end"
    warning = r"warning: cannot write \S+snapshot.pt \(No space left on device\): the last"
    assert re.search(warning, done.out)
    assert read_checkpoint(run / SNAPSHOT)["progress"]["epoch"] == 1
    assert summary(run)["finished_because"] == "unsaved", "a study would not train it again"
    again = python("imagenet_nd.py", *SMALL, *line, "--resume", "auto")
    assert again.code == 2
    assert "cannot write into the run directory" in again.sentence
    assert read_checkpoint(run / SNAPSHOT)["progress"]["epoch"] == 1
    ballast.unlink()
    train("imagenet_nd.py", *line, "--resume", "auto")
    assert summary(run)["epochs_done"] == 2
