"""--tracker wandb, with the real package offline; what it wrote is read with its own code."""

import importlib.util
import json
import re
import signal
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import event_files
import pytest
from conftest import python, scalars, summary, train
from joined import start
from PIL import Image
from running import assert_same_weights

from utils.run.tracker import Tracker
from utils.start.errors import INTERRUPTED, UserError

LINE = ("-a", "tiny_full", "-b", "10", "--epochs", "2", "-p", "1")
OFFLINE = {"WANDB_MODE": "offline"}
needs_wandb = pytest.mark.skipif(not importlib.util.find_spec("wandb"), reason="no wandb here")


def records(run: Path) -> list:
    """All records that wandb has written for a run: a LevelDB log of protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    result = []
    for file in sorted(run.glob("wandb/offline-run-*/run-*.wandb")):
        data, place, parts = file.read_bytes(), 7, b""
        while place + 7 <= len(data):
            if (left := 32768 - place % 32768) < 7:  # no header across the end of a block
                place += left
                continue
            _, size, kind = struct.unpack_from("<IHB", data, place)
            parts += data[place + 7 : place + 7 + size]
            place += 7 + size
            if kind in (1, 4):  # whole, or the last part
                result.append(wandb_internal_pb2.Record.FromString(parts))
                parts = b""
    return result


def values(items: Iterable) -> dict[str, Any]:
    """The names and values in records."""
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def curves(run: Path) -> dict[str, list[tuple[float, float]]]:
    """tag -> [(epoch, value)] in the order in which they were logged."""
    result: dict[str, list[tuple[float, float]]] = {}
    for record in records(run):
        row = values(record.history.item)
        for tag, value in row.items():
            if isinstance(value, float | int) and not tag.startswith(("epoch", "_", "Images/")):
                result.setdefault(tag, []).append((row["epoch"], value))
    return result


@needs_wandb
def test_a_killed_and_resumed_run_is_one_run_with_each_point_once(folder, tmp_path):
    """And the same weights as without the tracker; SIGTERM still ends in a snapshot."""
    words = (*LINE, "--output-dir", tmp_path)
    train("imagenet_nd.py", *words, "--name", "plain", folder)
    words, run = (*words, "--name", "run", "--tracker", "wandb"), tmp_path / "run"
    with start("imagenet_nd.py", *words, folder, HOLD_AFTER="3", **OFFLINE) as started:
        started.until("waiting for a signal")
        started.send(signal.SIGTERM)
        assert started.result().code == INTERRUPTED
    # As if another process had gone on until step 6 and been killed, before the last point was out.
    killed = {833: {"Step/loss": 7.0}, 1000: {"Step/loss": 7.0}, 1001: {"Step/loss": 7.0}}
    event_files.write(run, killed)
    (run / "wandb/offline-run-20260101_000000-another").mkdir()  # as where WANDB_DIR is of all runs
    number = (run / "wandb.id").read_text()
    synced = run / f"wandb/offline-run-20260102_000000-{number}"
    synced.mkdir()
    (synced / f"run-{number}.wandb.synced").touch()
    env = OFFLINE | {"WANDB_PROJECT": "mine"}
    done = train("imagenet_nd.py", *words, "--resume", "auto", folder, **env)
    assert done.err == "" and "warning" not in done.out
    sessions = sorted({*run.glob(f"wandb/offline-run-*-{number}")} - {synced})
    sync = f"wandb sync {' '.join(map(str, sessions))}\n"
    assert sync in done.out, "the terminal says where the run went, both sessions of it"
    assert_same_weights(run, tmp_path / "plain")
    files = list(run.glob("wandb/offline-run-*/run-*.wandb"))
    assert [file.stem for file in files] == [f"run-{number}"] * 2
    drawn = {
        tag: [(x / 1000 if tag.startswith("Step/") else x, y) for x, y in points]
        for tag, points in scalars(run).items()
    }
    drawn["Step/loss"] = [point for point in drawn["Step/loss"] if point[0] not in (0.833, 1.0)]
    sent = curves(run)
    places, expected = ({tag: [x for x, _ in one[tag]] for tag in one} for one in (sent, drawn))
    assert places == expected
    assert sent["Loss/val"] == [(x, pytest.approx(y)) for x, y in drawn["Loss/val"]]
    assert {one.run.project for one in records(run)} - {""} == {"imagenet", "mine"}
    config = values(item for one in records(run) for item in one.run.config.update)
    best = values(item for one in records(run) for item in one.summary.update)
    assert best["best_top1"] == pytest.approx(summary(run)["best_top1"])
    assert (config["arch"], config["batch_size"], config["val_images"]) == ("tiny_full", 10, 21)
    assert len(list(run.glob("wandb/offline-run-*/files/media/images/Images/*.png"))) == 2


HARMED = """
import os, signal, sys
from pathlib import Path
from utils.run import tracker

tracker.WAIT = 3.0
hook = sys.excepthook
sink = tracker.Tracker(Path(sys.argv[1]), {}, {"best_top1": 5.0})
assert sys.excepthook is hook, "or errors of the training would be no single lines"
services = os.popen(f"pgrep -P {os.getpid()} ^wandb-").read().split()
assert services
for process in services:
    os.kill(int(process), int(sys.argv[2]))
for x in range(1, 200):
    sink.scalars({"Loss/train": 1.0}, x)
sink.close()
print("closed")
"""


@needs_wandb
@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_a_wandb_that_hangs_or_dies_does_not_outlast_the_run(tmp_path, harm):
    """The process ends by itself soon after the wait, without a traceback."""
    done = python("-c", HARMED, tmp_path, int(harm), timeout=100, **OFFLINE)
    assert (done.code, "Traceback" in done.err) == (0, False), done.err
    assert "closed" in done.out


@needs_wandb
def test_a_tracker_that_fails_never_stops_training(folder, tmp_path):
    """No login and no network; the warning comes once."""
    (tmp_path / "wandb").mkdir()
    words = (*LINE, "--output-dir", tmp_path, "--name", "run", "--tracker", "wandb", folder)
    env = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "x", "HOME": str(tmp_path)}
    done = train("imagenet_nd.py", *words, **env)
    assert done.out.count("wandb cannot be used") == 1
    assert "all epochs done" in done.out


@pytest.mark.parametrize(("epoch", "said"), [(None, False), (2, False), (1, True)])
def test_points_that_are_trained_anew_are_not_sent_and_the_log_says_so(
    tmp_path, logged, monkeypatch, epoch, said
):
    """A curve of Weights & Biases only grows."""
    package = mock.MagicMock()
    package.init.return_value.offline = False
    monkeypatch.setitem(sys.modules, "wandb", package)
    both = {"Step/loss": 1.0, "Images/train": 1.0}
    event_files.write(tmp_path, {1: {"Top1/val": 5.0}, 2000: both, 3: {"Lr": 0.1}})
    (tmp_path / "wandb.id").write_text("0123")
    sink = Tracker(tmp_path, {"start_epoch": epoch}, {})
    sink.close()
    known = f"keeps the points that it has of this run, up to epoch 2: .* {tmp_path}/wandb.id"
    assert [bool(re.search(known, text)) for text in logged].count(True) == said


def test_an_error_in_a_training_is_said_once(tmp_path, logged, monkeypatch):
    package = mock.MagicMock()
    package.init.return_value.offline = False
    monkeypatch.setitem(sys.modules, "wandb", package)
    sink = Tracker(tmp_path, {}, {"best_top1": 5.0, "best_loss": None, "arch": "x"})
    sink.image("Images/train", Image.new("RGB", (1, 1)), 1001)
    package.log.assert_called_once_with({"Images/train": package.Image(), "epoch": 1.001})
    package.log.side_effect = OSError("no network")
    for epoch in (1, 2):
        sink.scalars({"Lr": 0.1}, epoch)
    sink.close()
    told = "warning: wandb cannot be used (no network): training continues without it"
    assert [text for text in logged if "cannot" in text] == [told]
    package.init().summary.update.assert_called_once_with({"best_top1": 5.0})


def test_a_missing_package_is_one_line(folder, parse, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="--tracker wandb needs a package: pip install wandb"):
        parse("imagenet_nd", "--tracker", "wandb", folder)
