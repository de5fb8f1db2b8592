"""The event files of this suite: points that are cut off, and what compare and TensorBoard find."""

import os
import re
import resource
import subprocess
import time
from pathlib import Path

import pytest
import torch
from conftest import TORCHVISION_MODEL, scalars, summary, train
from event_files import note, table
from running import fill, small_disk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from torch.utils.tensorboard import SummaryWriter

from utils import comparison
from utils.comparison import closing, opening
from utils.run.tensorboard import EventFile, cut_off


@pytest.fixture
def written(tmp_path):
    """The event file of six epochs: a text, a scalar an epoch, four points of a Step/ curve, the
    figures of DATA/test, once in the middle, and the picture of the second epoch's first batch."""
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_text("options", "lr 0.1", 0)
        writer.add_scalar("Top1/test", 60.0, 2)
        writer.add_image("Images/train", torch.zeros(3, 2, 2), 1001)
        for x in range(250, 6001, 250):
            writer.add_scalar("Step/loss", x, x)
        for epoch in range(1, 7):
            writer.add_scalar("Loss/train", epoch, epoch, walltime=1000.0 + epoch)
    (path,) = tmp_path.iterdir()
    return path


def test_a_clock_that_was_set_back_does_not_turn_curves_around(tmp_path, monkeypatch):
    """TensorBoard reads the files of a run in the order of their names."""
    for epoch, now in enumerate((2000.5, 1500.0, 1500.0), 1):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        EventFile(tmp_path).scalars({"Loss/train": 1.0}, epoch)
    assert [x for x, _ in scalars(tmp_path)["Loss/train"]] == [1, 2, 3]


def test_a_clock_that_is_set_does_not_change_how_long_training_took(tmp_path, monkeypatch):
    events, now = EventFile(tmp_path), time.time()
    for epoch, jump in enumerate((-7200, 86400), 1):
        monkeypatch.setattr(time, "time", lambda jump=jump: now + jump)
        events.scalars({"Loss/train": 1.0}, epoch)
    (run,) = table(tmp_path)[2].runs
    assert 0 < run.hours[1] < run.hours[2] < 0.01


@pytest.mark.parametrize(("epoch", "step_x", "lost"), [(3, 3500, 0), (2, 2000, 10), (6, 6000, 0)])
def test_only_later_points_are_removed(written, epoch, step_x, lost):
    """Also from a file that a crash cut short. The figures of DATA/test are written again by a
    finished run that is started again."""
    os.truncate(written, written.stat().st_size - lost)
    before = written.read_bytes(), written.stat().st_ino  # of a file that is rewritten, another one
    cut_off(written.parent, epoch, step_x)
    assert ((written.read_bytes(), written.stat().st_ino) == before) == (epoch == 6)
    expected = {
        "Loss/train": [(e, float(e)) for e in range(1, 7) if e <= epoch],
        "Step/loss": [(x, float(x)) for x in range(250, 6001, 250) if x <= step_x],
        "Top1/test": [(2, 60.0)] if epoch > 2 else [],
    }
    points = scalars(written.parent)
    assert {tag: points.get(tag, []) for tag in expected} == expected
    events = EventAccumulator(str(written.parent)).Reload()
    assert events.Tags()["tensors"] == ["options/text_summary"]
    assert events.file_version == 2.0, "the header is there"
    assert [picture.step for picture in events.Images("Images/train")] == [1001]
    times = [point.wall_time for point in events.Scalars("Loss/train")]
    assert times == [1000.0 + e for e in range(1, epoch + 1)]


def test_a_folder_whose_name_is_not_utf_8(written):
    """TensorBoard's reader does not open such a path: the run could not be resumed."""
    folder = written.parent / "M\udcfcller"
    folder.mkdir()
    written.rename(folder / written.name)
    cut_off(folder, 3, 3500)
    (run,) = table(folder.rename(written.parent / "renamed"))[2].runs
    assert run.last("Loss/train") == 3.0


def test_a_disk_that_was_full_leaves_one_file_whose_curves_have_a_gap(tmp_path, logged):
    with small_disk(tmp_path) as disk:
        events, ballast = EventFile(disk, opening({"lr": 0.1})), disk / "ballast"
        events.scalars({"Loss/train": 1.0}, 1)
        fill(ballast)
        for x in range(2, 200):
            events.scalars({"Loss/train": float(x), "Loss/val": 2.0}, x)
        kept = [x for x, _ in scalars(disk)["Loss/train"]]
        assert kept == [*range(1, kept[-1] + 1)] and kept[-1] < 199
        ballast.unlink()
        events.scalars({"Loss/train": 200.0}, 200)
        events.add(closing(success=True))
        assert [x for x, _ in scalars(disk)["Loss/train"]] == [*kept, 200]
        assert len(list(disk.iterdir())) == 1
        assert len(logged) == 1 and "its curves have a gap" in logged[0]


def test_a_file_that_could_not_be_opened_loses_nothing(tmp_path, logged):
    """Too many files are open: it was emptied once."""
    events = EventFile(tmp_path, opening({"lr": 0.1}))
    events.scalars({"Loss/train": 1.0}, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for x in (2, 4):
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            events.scalars({"Loss/train": 2.0}, x)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        events.scalars({"Loss/train": 3.0}, x + 1)
    assert scalars(tmp_path)["Loss/train"] == [(1, 1.0), (3, 3.0), (5, 3.0)]
    assert len(logged) == 2 and all("its curves have a gap" in text for text in logged)


def test_only_changed_code_marks_the_commit(tmp_path, monkeypatch):
    """compare_runs.py --results edits RESULTS.md, and a run after that is of the same code."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    for name in ("code.py", "R.md", "figures/a.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(comparison, "ROOT", tmp_path)
    clean = comparison.commit()
    assert re.fullmatch("[0-9a-f]{7,}", clean)
    for name, expected in (("R.md", clean), ("figures/a.png", clean), ("code.py", f"{clean}+")):
        (tmp_path / name).write_text("2\n")
        assert comparison.commit() == expected, name
    subprocess.run([*git, "add", "."], check=True)
    assert comparison.commit() == f"{clean}+", "staged code has changed, too"
    monkeypatch.setattr(comparison, "ROOT", tmp_path / "figures")
    assert comparison.commit() == "", "the repository is another one's"


# ---- runs of this suite


@pytest.fixture(scope="module")
def ours(folder, tmp_path_factory) -> Path:
    """A run that was resumed on two processes after an epoch on one."""
    root = tmp_path_factory.mktemp("ours")
    options = (*TORCHVISION_MODEL, "-p", "2", "--lr", "0.01", "--output-dir", root, "--name", "one")
    train("imagenet_nd.py", "-b", "12", "--epochs", "1", *options, folder)
    more = ("-b", "3", "--accum-steps", "2", "--epochs", "2", "--resume", "auto")
    train("imagenet_ddp.py", *more, *options, folder, processes=2)
    return root


def test_all_is_in_the_event_files(ours, tmp_path):
    for file in (ours / "one").glob("*tfevents*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    cells, notes, both = table(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2, "one per session"
    tags = scalars(tmp_path)
    assert "IO/bad_files" not in tags, "no curve at 0"
    events = EventAccumulator(str(tmp_path)).Reload()
    layout = events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0]
    for chart in (one for page in Layout.FromString(layout).category for one in page.chart):
        assert any(re.match(one, tag) for one in chart.multiline.tag for tag in tags), chart.title
    expected = {
        "nodes": "1", "gpus": "2", "arch": "shufflenet_v2_x0_5", "mode": "ddp", "lr": "0.01",
        "batch_per_gpu": "6", "global_batch": "12", "steps_per_epoch": "5", "epochs": "2",
        "state": "finished",
        # 344,867 weights in float32, and 7,952 values of batch norm with 56 counts of batches; the
        # weights again in 1.38 MB of gradients, of which each process sends a half twice.
        "parameters_mb": "1.346", "optimizer_mb": "1.316", "sent_mb_per_step": "1.379",
    }  # fmt: skip
    assert {key: cells[key] for key in expected} == {key: [s] for key, s in expected.items()}
    (run,) = both.runs
    facts = summary(ours / "one")
    assert run.best("Top1/val") == (pytest.approx(facts["best_top1"]), facts["best_epoch"])
    note(notes, "resumed on another number of processes \\(1, 2\\)")
    assert "60 images in 3 classes" in run.facts["data_id"]
    sizes = [run.facts[name] for name in ("train_images", "val_images", "class_count")]
    assert sizes == [60, 21, 3]
    assert all(run.facts.get(key) for key in ("torch", "cpu", "date", "commit", "command"))


def test_the_text_page_and_the_charts_of_a_run(tmp_path):
    """Command, commit, machine and options; no chart that stays empty on a CPU."""
    facts = {"device": "cpu", "precision": "off", "progressive": "", "lr": 0.1}
    facts |= {"command": "x.py -b 7", "data": "/M\udcfcller"}  # a path that is not UTF-8
    EventFile(tmp_path, opening(facts))
    events = EventAccumulator(str(tmp_path)).Reload()
    (event,) = events.Tensors("run/text_summary")
    page = event.tensor_proto.string_val[0].decode()
    assert "**command**: `x.py -b 7`" in page and "| lr | `0.1` |" in page
    assert r"| data | `/M\udcfcller` |" in page
    gpu, scale, test, sizes = (
        next(title for charts in comparison.CHARTS.values() for title in charts if words in title)
        for words in ("GPU power", "loss scale", "DATA/test", "--progressive")
    )
    facts |= {"val_images": 7}
    for more, shown in (
        ({}, set()),
        ({"device": "cuda", "precision": "fp16"}, {gpu, scale}),
        ({"device": "cuda", "precision": "bf16"}, {gpu}),
        ({"test_images": 7, "progressive": "16,24"}, {test, sizes}),
    ):
        pages = comparison.layout(facts | more).values()
        titles = {title for charts in pages for title in charts}
        assert titles & {gpu, scale, test, sizes} == shown
