"""The run directory: its name, its files and curves, and what other programs read from it."""

import json
import math
import re
import shlex
import shutil
import socket
import time
from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import SMALL, TORCHVISION_MODEL, draw_folder, scalars, summary, train
from joined import command, start
from running import free_port, snapshot
from test_best_model import evaluated
from test_checkpoint import trained
from torchvision.models import get_model

from utils import epoch, loop, report
from utils.comparison import closing
from utils.run import run_directory
from utils.run.run_directory import Run, checkpoint_file, choose
from utils.run.run_folder import RunFolder
from utils.run.stopping import WHY, Reason
from utils.start import errors
from utils.start.errors import INTERRUPTED, UserError
from utils.start.option_types import Options
from utils.start.world import World

TAGS = {
    *("Loss/train", "Loss/val", "Top1/train", "Top1/val", "Top5/train", "Top5/val"),
    *("Throughput/train", "Throughput/val", "Time/train", "Time/val", "Lr"),
}
GROUPS = ("Best/", "IO/", "CPU/", "Memory/", "Amp/", "Step/")
GROUPS += ("Time/data", "Time/compute", "Time/communication", "Loss/test", "Top1/test", "Top5/test")
OPTIONS = (*TORCHVISION_MODEL, "-b", "5", "--epochs", "3", "--lr", "0.1", "--seed", "2", "-p", "5")


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> SimpleNamespace:
    """Three epochs of a ResNet-18 without a --name, on data with a test/ unlike val/.

    Each image of val/ is there once in every class: whatever is learned, the first epoch's accuracy
    is the best, so that the best model is not the last one.
    """
    data = draw_folder(tmp_path_factory.mktemp("my data"))
    for name in ("class_1", "class_2"):
        shutil.copytree(data / "val/class_0", data / "val" / name, dirs_exist_ok=True)
    other = draw_folder(tmp_path_factory.mktemp("other"), train=1, val=11)
    for image in (other / "val").glob("*/00[0-5].JPEG"):
        image.unlink()
    (other / "val").rename(data / "test")
    output = tmp_path_factory.mktemp("output") / "made" / "runs"
    out = train("imagenet_nd.py", *OPTIONS, "--output-dir", output, data).out
    (run,) = output.iterdir()
    curves, results = scalars(run), summary(run)
    return SimpleNamespace(folder=run, data=data, out=out, curves=curves, summary=results)


def test_a_run_on_the_disk_of_another_node_does_not_begin_anew(folder, tmp_path):
    """Node 0 has the run directory, on its own disk; the nodes got their ranks the other way."""
    words = ("-a", "tiny_plain", "--name", "run", "--resume", "auto", "--epochs", 1, folder)
    for node in ("0", "1"):
        (tmp_path / node).mkdir()
    before = {node: f"import os; os.chdir('{tmp_path / node}')" for node in ("0", "1")}
    assert command("imagenet_ddp", *SMALL, *words, BEFORE=before["1"]).code == 0
    where = ("-n", 2, "-g", 1, "--dist-url", f"tcp://127.0.0.1:{free_port()}", *words)
    with (
        start("imagenet_ddp.py", "-nr", 0, *where, BEFORE=before["0"]) as first,
        start("imagenet_ddp.py", "-nr", 1, *where, BEFORE=before["1"]) as other,
    ):
        for run in (first, other):
            run.result().fails_with(
                "runs/run has a snapshot on",
                "(node 1), but none on node 0, which continues the run: start with",
                "that node as node 0",
            )
    assert not list((tmp_path / "0").iterdir())


def test_name_and_files_of_a_run(ran):
    run = ran.folder
    host = socket.gethostname().split(".")[0]
    when, name = run.name[:14], run.name[14:]
    assert time.strftime("%b%d_%H-%M-%S", time.strptime(when, "%b%d_%H-%M-%S")) == when
    assert name == f"_{host}_shufflenet_v2_x0_5_gpux1_b5_cpu1_nd"
    best, events, *files = sorted(path.name for path in run.iterdir())
    assert (best, events.startswith("events.out.tfevents.")) == ("best.pt", True)
    others = ["snapshot.pt", "snapshot_previous.pt", "summary.json", "train.log"]
    assert files == ["ledger.json", "options.json", *others]


def test_runs_without_a_name_that_begin_in_the_same_second_have_different_folders(tmp_path, parse):
    """Each is made when it is chosen, so that no other process can choose it as well."""
    options = parse("imagenet_nd", "--output-dir", tmp_path / "runs", tmp_path)
    world = World(torch.device("cpu"))
    with mock.patch.object(time, "strftime", lambda _: "Nov25_12-00-00"):
        first, *others = (choose(Options(**options), world, "nd") for _ in range(3))
    assert [path.name for path in others] == [f"{first.name}-2", f"{first.name}-3"]
    assert first.name.startswith("Nov25_12-00-00") and first.is_dir()


@pytest.mark.parametrize(
    ("words", "end"),
    [
        ("", "taken contains a run already: continue it with --resume auto, or choose another"),
        ("-e --resume a.pt", "taken contains a run already: choose another --name"),
        ("-e --resume auto", None),  # that of the run is evaluated
        ("--find-batch", None),
    ],
)
def test_a_name_that_is_taken(tmp_path, parse, monkeypatch, words, end):
    """Only commands that would write there are refused."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # --find-batch needs one
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/options.json").touch()
    line = ("--output-dir", tmp_path, "--name", "taken", *words.split(), tmp_path)
    options, world = Options(**parse("imagenet_nd", *line)), World(torch.device("cpu"))
    if end is None:
        assert choose(options, world, "nd") is None
        return
    with pytest.raises(UserError, match=re.escape(f"{tmp_path}/{end}")):
        choose(options, world, "nd")


@pytest.mark.parametrize("restarts", [0, 3])
def test_a_job_that_is_started_again_waits_for_the_end_of_its_last_attempt(
    tmp_path, parse, monkeypatch, restarts
):
    """By the patience of its lock."""
    lock = mock.Mock(return_value=mock.Mock(note=""))
    monkeypatch.setattr(run_directory, "Lock", lock)
    monkeypatch.setattr(run_directory, "Console", mock.Mock())
    monkeypatch.setattr(errors, "how_to_continue", "")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(restarts))
    line = ("--output-dir", tmp_path, "--name", "x", "--resume", "auto", tmp_path)
    Run(Options(**parse("imagenet_nd", *line)), World(torch.device("cpu")), "nd")
    lock.assert_called_once_with(tmp_path / "x", restarts > 0)


def test_an_evaluation_of_a_run_takes_its_best_model(tmp_path):
    """Which need not be the last one; a run without one has its snapshot evaluated."""
    args = Namespace(resume="auto", output_dir=tmp_path, name="run", evaluate=True, store=None)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/snapshot.pt").touch()
    assert checkpoint_file(args) == tmp_path / "run/snapshot.pt"
    (tmp_path / "run/best.pt").touch()
    assert checkpoint_file(args) == tmp_path / "run/best.pt"
    args.evaluate = False
    assert checkpoint_file(args) == tmp_path / "run/snapshot.pt"
    args.evaluate, args.name = True, "other"
    with pytest.raises(
        UserError, match=r"other has no best\.pt and no snapshot\.pt to evaluate: c"
    ):
        checkpoint_file(args)
    args.name, args.store = "my run", "s3://bucket/runs/"  # the copy is not fetched to evaluate it
    with pytest.raises(UserError, match=r"use --resume 's3://bucket/runs/my run/best\.pt'$"):
        checkpoint_file(args)


@pytest.mark.parametrize(
    ("plain", "averaged", "ends"), [(40, 50, True), (50, 40, True), (40, 45, False)]
)
def test_the_better_of_model_and_average_reaches_the_desired_accuracy(plain, averaged, ends):
    evaluated = {f"{name}/{model}": 1.0 for name in ("Loss", "Top5") for model in ("val", "ema")}
    evaluated |= {"Top1/val": float(plain), "Top1/ema": float(averaged)}
    world = World(torch.device("cpu"))
    session = mock.MagicMock(state=trained(), snapshots=None, first_epoch=0, world=world)
    session.args = SimpleNamespace(best_by="top1", target_top1=50.0, epochs=9, train_time=None)
    session.stop.reason = None
    loop.close_epoch(session, {"Loss/train": 1.0}, evaluated)
    asked = [call.args[0] for call in session.stop.ask.call_args_list]
    assert asked == [Reason.DESIRED_ACC] * ends


@pytest.mark.parametrize("first", [1, 2])
def test_advice_comes_after_the_first_epoch_of_this_start(monkeypatch, first):
    """Also of a run that was resumed."""
    state, given = replace(trained(), epoch=2), mock.Mock()
    monkeypatch.setattr(loop.advice, "bottleneck", given)
    monkeypatch.setattr(loop.advice, "is_enough", lambda _: True)
    session = mock.MagicMock(state=state, first_epoch=first, world=World(torch.device("cpu")))
    session.args = SimpleNamespace(best_by="top1", target_top1=None, epochs=9, train_time=None)
    session.snapshots = None
    loop.close_epoch(session, {}, {"Top1/val": 1.0, "Top5/val": 2.0, "Loss/val": 3.0})
    assert given.called == (first == 2)


@pytest.mark.parametrize("reason", [Reason.EPOCHS, Reason.TRAIN_TIME, Reason.INTERRUPTED])
def test_the_best_model_is_tested_unless_a_signal_waits(monkeypatch, reason):
    tested = mock.Mock(return_value={})
    monkeypatch.setattr(loop, "test_best", tested)
    monkeypatch.setattr(loop.report, "end", mock.Mock())
    session = mock.MagicMock(world=World(torch.device("cpu")), snapshots=None)
    session.stop.error, session.stop.reason = None, None
    session.stop.end_training.return_value = reason
    interrupted = reason is Reason.INTERRUPTED
    assert loop.end(session, None) == (INTERRUPTED if interrupted else 0)
    assert tested.called != interrupted
    session.stop.error = UserError("too many images are unreadable")
    with pytest.raises(UserError):
        loop.end(session, None)
    session.run.close.assert_called_once_with()  # the store has the last files


def test_the_last_model_is_not_taken_for_the_best_one(tmp_path, monkeypatch, logged):
    """Where best.pt is missing, as somebody has removed it."""
    monkeypatch.setattr(epoch, "evaluate_weights", mock.Mock(return_value=None))
    session = mock.MagicMock(world=World(torch.device("cpu")), folder=tmp_path)
    session.stop.error = None
    assert epoch.test_best(session, mock.Mock(), mock.Mock()) is None
    assert re.fullmatch(r"warning: \S+/best.pt is missing: .* with the last model", *logged)
    session.stop.error = UserError("too many images are unreadable")
    with pytest.raises(UserError):
        epoch.test_best(session, mock.Mock(), mock.Mock())
    session.run.close.assert_called_once_with()  # the store has the last files


@pytest.mark.parametrize(("done", "goes_on"), [(2, True), (3, False), (5, False)])
def test_a_run_that_has_more_epochs_than_it_is_asked_for_is_over(done, goes_on):
    """It is resumed with fewer --epochs."""
    stop = mock.Mock(reason=None)
    stop.ask.side_effect = lambda reason: setattr(stop, "reason", reason)
    session = SimpleNamespace(state=SimpleNamespace(epoch=done), args=Options(epochs=3), stop=stop)
    assert loop.has_next_epoch(session) == goes_on
    assert stop.reason is (None if goes_on else Reason.EPOCHS)


def test_one_rank_that_waits_for_its_images_makes_all_wait(monkeypatch):
    monkeypatch.setattr(World, "gather", lambda _, mine: [mine, (9.0, 2 * 10**6, 30)])
    train = SimpleNamespace(waited=1.0, reading=SimpleNamespace(bytes=10**6, files=10))
    record = epoch.input_record(train, 10.0, World(torch.device("cpu"), 0, 2))
    assert record == {"IO/wait_share": 0.9, "IO/read_mb_s": 0.3, "IO/files_s": 4.0}


def test_curves_have_the_tags_of_older_runs_and_count_what_they_say(ran):
    extra = ran.curves.keys() - TAGS
    assert not [tag for tag in extra if not tag.startswith(GROUPS)]
    curves = {tag: [value for _, value in points] for tag, points in ran.curves.items()}
    for tag in TAGS:
        assert [x for x, _ in ran.curves[tag]] == [1, 2, 3], tag
        assert all(map(math.isfinite, curves[tag])), tag
    assert curves["Top5/train"] == curves["Top5/val"] == [100] * 3  # there are 3 classes
    assert curves["Lr"] == pytest.approx([0.1] * 3)
    assert curves["IO/files_s"] == pytest.approx(curves["Throughput/train"])
    # The first step has a line as well; the next line includes it, and curves leave it out.
    lines = re.findall(r"^Epoch (\d)/3 step +(\d+)/12  loss (\S+)", ran.out, re.MULTILINE)
    printed = [(epoch, step) for epoch in (1, 2, 3) for step in (5, 10, 12)]
    assert [(int(epoch), int(step)) for epoch, step, _ in lines] == [(1, 1), *printed]
    for tag in [tag for tag in curves if tag.startswith("Step/")]:  # in thousandths of an epoch
        places = [round(1000 * (epoch - 1 + step / 12)) for epoch, step in printed]
        assert [x for x, _ in ran.curves[tag]] == places, tag
    losses = curves["Step/loss"]  # a point is of the steps since the last one
    assert losses == pytest.approx([float(loss) for _, _, loss in lines[1:]], rel=1e-3)
    means = [(5 * losses[i] + 5 * losses[i + 1] + 2 * losses[i + 2]) / 12 for i in (0, 3, 6)]
    assert means == pytest.approx(curves["Loss/train"])


def test_summary_agrees_with_curves(ran):
    results = ran.summary
    last = {tag: points[-1][1] for tag, points in ran.curves.items()}
    expected = {"best_top1": 100 / 3, "best_top5": 100, "best_epoch": 1, "epochs_done": 3}
    expected |= {f"val_{name.lower()}": last[f"{name}/val"] for name in ("Loss", "Top1", "Top5")}
    expected |= {"val_images": 21, "world_size": 1, "nodes": 1, "global_batch": 5}
    assert {key: results[key] for key in expected} == pytest.approx(expected)
    assert results["finished_because"] == "epochs"
    seconds = [one["Seconds"] for one in snapshot(ran.folder)["progress"]["history"]]
    assert results["epoch_seconds"] == pytest.approx(sum(seconds[1:]) / 2)
    assert 0 < sum(seconds) <= results["elapsed_seconds"]
    rates = [value for _, value in ran.curves["Throughput/train"]]
    assert min(rates) * 0.99 <= results["images_per_s"] <= max(rates) * 1.01


def test_the_time_left_is_that_of_the_epochs_or_of_the_limit():
    state = replace(trained(), epoch=2, history=[{"epoch": n, "Seconds": 100.0} for n in (1, 2)])
    cases = (5, None, 0, "0:05:00"), (5, 0.1, 300, "0:01:00"), (5, 0.1, 400, ""), (2, None, 0, "")
    cases += ((5, 1.0, 300, "0:05:00"),)
    for epochs, limit, state.elapsed, left in cases:
        assert report.time_left(Options(epochs=epochs, train_time=limit), state) == left


def test_the_line_of_an_epoch(logged):
    record = {"epoch": 2.0, "Lr": 0.01, "Throughput/train": 60.0, "Top1/ema": 50.0}
    record |= {"Loss/train": 1.5, "Top1/train": 10.0, "Top5/train": 20.0}
    record |= {"Loss/val": 123456789.0, "Top1/val": 30.0, "Top5/val": 40.0}
    Run.epoch(mock.MagicMock(args=Options(epochs=3)), record, "0:01:00")
    assert logged == [
        "Epoch 2/3  train: loss 1.5000 top-1 10.00 top-5 20.00  val: loss 1.235e+08 top-1 30.00 "
        "top-5 40.00 ema 50.00  lr 0.01  60.0 images/s  left 0:01:00"
    ]
    record["Throughput/train"] = math.nan  # resumed after the last step
    Run.epoch(mock.MagicMock(args=Options(epochs=3)), record, "")
    assert logged[1].endswith(" ema 50.00  lr 0.01")


def test_the_last_line_and_the_summary_of_averaged_weights(logged):
    """The lowest loss is that of either model, and the best model may be the plain one."""
    history = [
        {"epoch": 1, "Loss/val": 2.0, "Loss/ema": 1.5, "Throughput/train": 60.0},
        {"epoch": 2, "Loss/val": 1.75, "Loss/ema": 3.0, "Throughput/train": 80.0},
        {"epoch": 3, "Loss/val": 1.75, "Loss/ema": 3.0, "Throughput/train": 100.0},
    ]
    session = mock.MagicMock(world=World(torch.device("cpu")))
    session.state = replace(trained(), history=history, elapsed=3723.0, ema=mock.Mock())
    for averaged, loss, by, reason, words in (
        (1, 1.5, "loss", Reason.EPOCHS, "loss 1.5000, top-1 50.00 % (epoch 1, averaged weights)"),
        (0, 2.0, "top1", Reason.UNSAVED, "top-1 50.00 % (epoch 1)"),
    ):
        session.state.best = {"epoch": 1, "top1": 50.0, "loss": loss, "ema": averaged}
        session.args.best_by = by
        report.end(session, reason, pauses=(0.1, 0.5, 0.2))
        results, last = session.run.finish.call_args.args
        assert last == closing(success=reason is Reason.EPOCHS)
        assert results["best_weights"] == ("ema" if averaged else "model")
        assert (results["lowest_val_loss"], results["snapshot_pause_seconds"]) == (1.5, 0.5)
        assert logged[-1] == f"Training time 1:02:03, best {words}, 90.0 images/s: {WHY[reason]}"


def test_values_that_are_missing_are_null_in_the_summary_and_no_points(tmp_path):
    sink = mock.Mock()
    run = SimpleNamespace(folder=SimpleNamespace(sinks=[sink]))
    Run.scalars(run, {"Lr": 0.1, "Time/train": math.nan}, 3)
    sink.scalars.assert_called_once_with({"Lr": 0.1}, 3)
    results = {"val_loss": math.nan, "lowest_val_loss": math.inf, "epochs_done": 2}
    RunFolder(tmp_path, None).write_summary(results, ())
    assert summary(tmp_path) == {"val_loss": None, "lowest_val_loss": None, "epochs_done": 2}


def test_options_json_keeps_all_options_and_the_command(ran):
    results = json.loads((ran.folder / "options.json").read_text())
    expected = {"batch_size": 5, "lr": 0.1, "data": str(ran.data), "momentum": 0.9}  # a default
    assert {key: results[key] for key in expected} == expected
    script, *_, last = shlex.split(results["command"])
    assert (script, last) == ("imagenet_nd.py", str(ran.data))


def test_log_keeps_every_line_of_the_console(ran):
    log = (ran.folder / "train.log").read_text().splitlines()
    first, *lines = ran.out.splitlines()
    assert first.startswith("reading the lists of images"), "before there is a log"
    assert log == lines


def test_the_best_model_is_plain_torchvision_and_as_good_as_the_summary_says(ran):
    """On val/, and on test/, which is evaluated once, at the end."""
    results, best = ran.summary, snapshot(ran.folder, "best.pt")
    get_model(TORCHVISION_MODEL[1], num_classes=3).load_state_dict(snapshot(ran.folder)["model"])
    for key in ("epoch", "top1", "top5", "loss"):
        assert best[key] == results[f"best_{key}"]
    best_loss = dict(ran.curves["Loss/val"])[results["best_epoch"]]
    parts = (
        ("val", 21, results["best_top1"], best_loss),
        ("test", 15, results["test_top1"], results["test_loss"]),
    )
    folders = [ran.data / part for part, *_ in parts]
    elsewhere = evaluated(ran.folder / "best.pt", *folders, alone=False)
    for (part, images, top1, loss), plain in zip(parts, elsewhere, strict=True):
        assert results[f"{part}_images"] == plain["images"] == images
        assert plain["top1"] == pytest.approx(top1, abs=1e-6)
        assert plain["loss"] == pytest.approx(loss, rel=0.01)
    for name in ("Top1", "Top5", "Loss"):
        assert ran.curves[f"{name}/test"] == [(3, pytest.approx(results[f"test_{name.lower()}"]))]
        best_so_far = ran.curves[f"{name}/val"][0][1]  # of epoch 1
        assert ran.curves[f"Best/{name}"] == [(epoch, best_so_far) for epoch in (1, 2, 3)]
    lines = ran.out.splitlines()
    assert "best top-1 33.33 % (epoch 1), " in lines[-1]
    assert [line for line in lines if line.startswith("test:")] == lines[-2:-1]


def test_the_best_model_may_be_that_of_the_lowest_loss(ran, tmp_path):
    """All epochs have the same accuracy, so that by accuracy the first one would be the best."""
    shutil.copytree(ran.data / "train", tmp_path / "data/train")
    for part in ("val", "test"):
        shutil.copytree(ran.data / "val", tmp_path / "data" / part)
    options = ("-a", "tiny_plain", "-b", "5", "--epochs", "3", "--best-by", "loss")
    options += ("--lr", "0.01", "--momentum", "0", "--wd", "10")  # the weights shrink
    where = ("--output-dir", tmp_path, "--name")
    train("imagenet_nd.py", *options, *where, "a", tmp_path / "data")
    losses, results = dict(scalars(tmp_path / "a")["Loss/val"]), summary(tmp_path / "a")
    epoch = min(losses, key=losses.get)
    assert epoch > 1, losses
    assert (results["best_epoch"], results["best_loss"]) == (epoch, pytest.approx(losses[epoch]))
    # DATA/test has the images of DATA/val.
    assert results["test_loss"] == pytest.approx(results["best_loss"])
    # It is evaluated by the run's name, or by its file, and nothing is written.
    evaluate = ("-a", "tiny_plain", "-e", *where[:2])
    for part, line in (
        ("val", ("--name", "a", "--resume", "auto", "--start-epoch", "0")),  # as it was trained
        ("test", ("--part", "test", "--resume", tmp_path / "a/best.pt")),
    ):
        done = train("imagenet_nd.py", *evaluate, *line, tmp_path / "data")
        assert f"{part}: loss {results['best_loss']:.4f}  top-1 33.333 %" in done.out
    assert {path.name for path in tmp_path.iterdir()} == {"a", "data"}
    assert summary(tmp_path / "a") == results
    # Continued from the snapshot alone: the best model of the epochs before it is not there.
    (tmp_path / "a/snapshot.pt").rename(tmp_path / "alone.pt")
    again = ("--epochs", "4", "--resume", tmp_path / "alone.pt", *where, "b", tmp_path / "data")
    done = train("imagenet_nd.py", *options, "--best-by", "top1", *again)
    assert "note: best.pt is missing" in done.out
    results, best = summary(tmp_path / "b"), snapshot(tmp_path / "b", "best.pt")
    assert results["best_epoch"] == best["epoch"] == 4


def test_the_last_line_says_how_to_continue(folder, tmp_path):
    """With --start-epoch, the same command would train the finished steps again."""
    line = ("-a", "tiny_plain", "-b", "5", "--epochs", "1", "--output-dir", tmp_path / "my runs")
    anew = ("--train-time", "1e-9", "--output-dir", tmp_path, "--name", "a", "--resume", "auto")
    out = train("imagenet_nd.py", *line, *anew, folder, TORCHELASTIC_MAX_RESTARTS="1").out
    assert out.endswith(" and run the same command again\n")
    out = train("imagenet_nd.py", "--train-time", "1e-9", "--start-epoch", "0", *line, folder).out
    advice = (
        "raise --train-time .* and run the same command with (--.*) and without --start-epoch\n$"
    )
    (option,) = re.findall(advice, out)
    out = train("imagenet_nd.py", "--train-time", "1", *line, *shlex.split(option), folder).out
    assert re.search("resumed from .*: epoch 1, step 1$", out, re.MULTILINE)
    (run,) = (tmp_path / "my runs").iterdir()
    assert summary(run)["finished_because"] == "epochs"
    line = (*line, "--name", "new", "--train-time", "1e-9", "--resume", run / "best.pt", folder)
    out = train("imagenet_nd.py", *line, "--start-epoch", "0").out
    assert out.endswith("the same command with --resume auto and without --start-epoch\n")
