"""The run directory: its name, its files and curves, and what other programs read from it."""

import argparse
import json
import math
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Result, draw_folder, python, scalars, summary, train

from utils import option_types
from utils.train import report

TAGS = {
    *("Loss/train", "Loss/val", "Top1/train", "Top1/val", "Top5/train", "Top5/val"),
    *("Throughput/train", "Throughput/val", "Time/train", "Time/val", "Lr"),
}
TESTED = {"Loss/test", "Top1/test", "Top5/test"}  # one point, at the end
GROUPS = ("IO/", "GPU/", "CPU/", "Memory/", "Amp/", "Step/")
PARTS = {"Time/data", "Time/compute", "Time/communication"}  # of a step
KEYS = {
    *("best_top1", "best_top5", "best_epoch", "epochs_done", "images_per_s", "epoch_seconds"),
    *("elapsed_seconds", "world_size", "nodes", "global_batch", "val_images", "val_top1"),
    *("val_top5", "val_loss", "finished_because"),
}
# With these the best epoch of the three is not the last one, so the two can be told apart.
OPTIONS = ("-b", "5", "--epochs", "3", "--lr", "0.1", "--seed", "2", "-p", "4")

# What somebody without this repository would write: plain torchvision, in its own process.
PLAIN_EVALUATION = """
import json, sys
import torch, torchvision
from torch.nn.functional import cross_entropy
from torchvision import transforms as T

best = torch.load(sys.argv[1], weights_only=True)
model = torchvision.models.get_model(best["arch"], num_classes=len(best["classes"]))
model.load_state_dict(best["state_dict"])
model.eval()
norm = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
view = T.Compose([T.Resize(round(32 * 256 / 224)), T.CenterCrop(32), T.ToTensor(), norm])
data = torchvision.datasets.ImageFolder(sys.argv[2], view)
assert data.classes == best["classes"]
images, targets = zip(*data)
with torch.no_grad():
    logits = model(torch.stack(images))
targets = torch.tensor(targets)
found = {
    "top1": 100 * (logits.argmax(1) == targets).double().mean().item(),
    "loss": cross_entropy(logits, targets).item(),
    "images": len(data),
}
print(json.dumps({**found, "file": {key: best[key] for key in ("epoch", "top1", "top5")}}))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A data set with a test/ folder that differs from val/."""
    root = draw_folder(tmp_path_factory.mktemp("data"))
    other = draw_folder(tmp_path_factory.mktemp("other"), train=1, val=11)
    for image in (other / "val").glob("*/00[0-5].JPEG"):
        image.unlink()
    (other / "val").rename(root / "test")
    return root


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    """The --output-dir of the module's one training; made by the script."""
    return tmp_path_factory.mktemp("output") / "made" / "runs"


@pytest.fixture(scope="module")
def trained(data, output) -> Result:
    """Three epochs of a ResNet-18 without a --name."""
    return train("imagenet_nd.py", *OPTIONS, "--output-dir", output, data)


@pytest.fixture(scope="module")
def run(trained, output) -> Path:
    """The run directory of that training."""
    (folder,) = output.iterdir()
    return folder


@pytest.fixture(scope="module")
def plain(run, data, tmp_path_factory):
    """Evaluate best.pt on a part of the data set without this repository on the path."""

    def evaluate(part: str) -> dict:
        done = subprocess.run(
            [sys.executable, "-I", "-c", PLAIN_EVALUATION, run / "best.pt", data / part],
            cwd=tmp_path_factory.mktemp("elsewhere"),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return evaluate


def test_default_name_tells_date_host_model_and_batch(run):
    host = re.escape(socket.gethostname().split(".")[0])
    when = r"(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\d\d_\d\d-\d\d-\d\d"
    assert re.fullmatch(rf"{when}_{host}_resnet18_gpux1_b5_cpu1_nd", run.name)


def test_files_of_a_run_and_no_others(run):
    names = {path.name for path in run.iterdir()}
    events = {name for name in names if name.startswith("events.out.tfevents.")}
    assert len(events) == 1
    own = {
        "options.json",
        "snapshot.pt",
        "snapshot_previous.pt",
        "best.pt",
        "summary.json",
        "train.log",
    }
    assert names - events == own


def test_curves_have_the_tags_of_older_runs_and_one_point_an_epoch(run):
    curves = scalars(run)
    assert set(curves) >= TAGS
    for tag in TAGS:
        assert [x for x, _ in curves[tag]] == [1, 2, 3], tag
        assert all(math.isfinite(value) for _, value in curves[tag]), tag
    extra = {tag for tag in set(curves) - TAGS - PARTS - TESTED if not tag.startswith(GROUPS)}
    assert not extra


def test_step_curves_count_in_thousandths_of_an_epoch(run):
    curves = {tag: points for tag, points in scalars(run).items() if tag.startswith("Step/")}
    assert "Step/loss" in curves
    for tag, points in curves.items():
        # 12 steps per epoch, a line after every fourth.
        assert [x for x, _ in points] == [round(1000 * i / 3) for i in range(1, 10)], tag


def test_a_point_of_step_loss_is_of_the_steps_since_the_last(run):
    curves = scalars(run)
    points = [value for _, value in curves["Step/loss"]]
    means = [sum(points[i : i + 3]) / 3 for i in range(0, 9, 3)]  # all of as many steps
    assert means == pytest.approx([value for _, value in curves["Loss/train"]])


def test_curves_count_what_they_say(run):
    curves = scalars(run)
    for part in ("train", "val"):
        for _, value in curves[f"Top5/{part}"]:
            assert value == 100  # there are 3 classes
        images = 5 if part == "train" else 21 / 5  # a step; the last batch has one image
        for (_, rate), (_, seconds) in zip(
            curves[f"Throughput/{part}"], curves[f"Time/{part}"], strict=True
        ):
            assert rate * seconds == pytest.approx(images, rel=1e-3)
    assert [value for _, value in curves["Lr"]] == pytest.approx([0.1] * 3)


def test_summary_agrees_with_curves(run):
    found, curves = summary(run), scalars(run)
    assert set(found) >= KEYS
    top1 = [value for _, value in curves["Top1/val"]]
    assert found["best_top1"] == pytest.approx(max(top1))
    assert found["best_epoch"] == 1 + top1.index(max(top1))
    assert found["best_top5"] == 100
    assert found["epochs_done"] == 3
    assert found["val_images"] == 21
    for key, tag in (("val_top1", "Top1/val"), ("val_top5", "Top5/val"), ("val_loss", "Loss/val")):
        assert found[key] == pytest.approx(curves[tag][-1][1]), key
    assert (found["world_size"], found["nodes"], found["global_batch"]) == (1, 1, 5)
    assert found["finished_because"] == "epochs"
    assert found["elapsed_seconds"] >= 3 * found["epoch_seconds"] * 0.5 > 0
    rates = [value for _, value in curves["Throughput/train"]]
    assert min(rates) * 0.99 <= found["images_per_s"] <= max(rates) * 1.01


def test_options_json_keeps_all_options_and_the_command(run, data):
    found = json.loads((run / "options.json").read_text())
    wanted = {"arch": "resnet18", "batch_size": 5, "epochs": 3, "lr": 0.1, "seed": 2, "workers": 1}
    assert {key: found[key] for key in wanted} == wanted
    assert found["data"] == str(data)
    assert found["momentum"] == 0.9  # a default
    assert "--seed 2" in found["command"]
    assert "imagenet_nd.py" in found["command"]


def test_log_keeps_every_line_of_the_console(trained, run):
    log = (run / "train.log").read_text().splitlines()
    assert log == trained.out.splitlines()
    epochs = [line for line in log if re.match(r"Epoch \d/3  train:", line)]
    assert len(epochs) == 3
    left = [bool(re.search(r" images/s  left \d+:\d\d:\d\d$", line)) for line in epochs]
    assert left == [True, True, False]


@pytest.mark.parametrize(
    ("epochs", "hours", "text"),
    [(90, None, "13:20:00"), (90, 2, "1:30:00"), (12, 2, "0:20:00"), (10, 2, ""), (90, 0.1, "")],
)
def test_time_left_is_that_of_the_epochs_or_of_the_limit(epochs, hours, text):
    """10 epochs took 10 minutes each but the first, which does not count; half an hour was used."""
    history = [{"epoch": x, "Seconds": 600.0 if x > 1 else 9000.0} for x in range(1, 11)]
    state = SimpleNamespace(history=history, epoch=10, elapsed=1800.0)
    args = SimpleNamespace(epochs=epochs, train_time=hours)
    assert report.time_left(args, state) == text


def test_best_model_is_plain_torchvision_and_as_good_as_the_summary_says(run, plain):
    found, mine = summary(run), plain("val")
    assert mine["images"] == found["val_images"]
    assert mine["top1"] == pytest.approx(found["best_top1"], abs=1e-6)
    at_best = dict(scalars(run)["Loss/val"])[found["best_epoch"]]
    assert mine["loss"] == pytest.approx(at_best, rel=0.01)
    keys = {"epoch": "best_epoch", "top1": "best_top1", "top5": "best_top5"}
    assert mine["file"] == {key: pytest.approx(found[name]) for key, name in keys.items()}


def test_test_folder_is_evaluated_once_with_the_best_model(trained, run, plain):
    found, mine = summary(run), plain("test")
    lines = [line for line in trained.out.splitlines() if line.startswith("test:")]
    assert len(lines) == 1
    assert trained.out.rstrip().splitlines()[-2] == lines[0]  # only the closing line follows
    assert found["test_images"] == mine["images"] == 15
    assert found["test_top1"] == pytest.approx(mine["top1"], abs=1e-6)
    assert found["test_loss"] == pytest.approx(mine["loss"], rel=0.01)
    curves = scalars(run)
    for name in ("Top1", "Top5", "Loss"):
        assert curves[f"{name}/test"] == [(3, pytest.approx(found[f"test_{name.lower()}"]))]


def test_snapshot_holds_the_model_under_torchvision_names(run):
    import torch
    from torchvision.models import get_model

    model = torch.load(run / "snapshot.pt", weights_only=True)["model"]
    get_model("resnet18", num_classes=3).load_state_dict(model)


def test_taken_name_is_refused_and_the_old_run_stays(run, output, folder):
    before = {path: path.read_bytes() for path in run.iterdir()}
    taken = python("imagenet_nd.py", *OPTIONS, "--output-dir", output, "--name", run.name, folder)
    assert taken.code == 2
    for word in (run.name, "--resume", "--name"):
        assert word in taken.sentence
    assert {path: path.read_bytes() for path in run.iterdir()} == before


@pytest.mark.parametrize("name", ["..", "a/b", "../x", "x" * 300, "a\n"], ids=repr)
def test_a_name_that_is_no_folder_name_is_refused(name):
    with pytest.raises(argparse.ArgumentTypeError):
        option_types.run_name(name)


@pytest.mark.parametrize("name", ["snapshot.pt", "best.pt", "options.json"])
def test_a_folder_in_the_place_of_a_file_is_found_before_training(tmp_path, folder, name):
    (tmp_path / "run" / name).mkdir(parents=True)
    where = ("--output-dir", tmp_path, "--name", "run", "--resume", "auto", folder)
    done = python("imagenet_nd.py", *OPTIONS, "--image-size", 32, "-j", 0, *where)
    assert done.code == 2
    assert f"{tmp_path}/run/{name} is not a file" in done.sentence
    assert "Epoch" not in done.out
