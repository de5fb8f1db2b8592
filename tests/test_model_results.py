"""scripts/model_results.py: figures recomputed from its CSV, hostile names, an exported model."""

import csv
import html
import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import model_results
import numpy as np
import pytest
import torch
from browser import Page
from conftest import ROOT, draw_folder, environment, python, summary
from joined import command
from results import export, figures, predictions
from results.predictions import Best, Predictions
from torchvision.models import get_model

from utils.data import wordnet
from utils.data.images import ImageBatches
from utils.data.sources import Source
from utils.start.errors import UserError
from utils.start.world import World

ARCH, SIZE = "shufflenet_v2_x0_5", 32
HOSTILE = "<img src=x onerror=alert(1)>\n\u202ec,d"
NO_IMAGES = ImageBatches(Source("/", [], b"", []), SIZE, 0, train=False)
CLASSES = sorted([HOSTILE, "class_1", "class_2"])


def results(*words, **env):
    return python("scripts/model_results.py", *words, "-j", 0, **env)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with ``data``, of which one class has a hostile name, and a run on it."""
    place = tmp_path_factory.mktemp("results")
    data = draw_folder(place / "data", train=8, val=7)
    for part in ("train", "val"):
        (data / part / "class_0").rename(data / part / HOSTILE)
    line = ("-a", ARCH, "--image-size", SIZE, "-b", 8, "-j", 0, "--epochs", 1, "--lr", 0.01)
    done = python("imagenet_nd.py", *line, "--output-dir", place, "--name", "run", data)
    assert done.code == 0, done.err
    return place


def predicted(classes, paths, targets, top, sure=0.5):
    """Predictions of images, of which ``top`` has the most likely classes."""
    top = np.array(top).reshape(len(paths), -1)
    sure = np.broadcast_to(np.array(sure, np.float32).reshape(-1, 1), top.shape)
    numbers, ones = np.arange(len(paths)), np.ones(len(paths))
    columns = np.array(targets), top, sure, ones, numbers
    return Predictions(classes, [*range(len(classes))], paths, *columns, NO_IMAGES)


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_the_figures_are_those_of_the_predictions(place):
    """Two processes, of which one has an image more."""
    broken = place / "data/val/class_2/broken.jpeg"
    broken.write_bytes(b"no image")
    image = place / "data/val/class_1/003.JPEG"
    (place / "run/here").mkdir()
    run = place / "run/here/.."  # as "..", which is no name for the run
    done = results(run, place / "data", "-g", 2, "-b", 4, "--images", broken, image)
    broken.unlink()
    done.fails_with("1 of 2 images cannot be read")  # but the rest is there
    assert "broken.jpeg: cannot be read" in done.out and done.out.count("\nrun: 21 images; ") == 1
    assert re.search(r"(?m)^  top-1 \(%\) +[\d.]+ \([\d.]+ to [\d.]+\)$", done.out), done.out
    page = (place / "run/results_val.html").read_text()
    assert "1 images could not be read" in page
    few = re.search(r"<p>Worst: (.*) \S+ %. Best: (.*) \S+ %. Click", page).groups()
    assert few[0] != few[1] and " %, " not in "".join(few), "of three classes, none is both"
    rows = rows_of(place / "run/predictions_val.csv")
    files = {str(path.relative_to(place / "data/val")) for path in place.glob("data/val/*/*.JPEG")}
    assert len(rows) == 21
    assert [row["path"] for row in rows] == sorted(files), "in the folder's order, not by process"

    (row,) = [row for row in rows if row["path"] == "class_1/003.JPEG"]
    assert f"{image}: {row['predicted']} {100 * float(row['probability']):.1f} %" in done.out
    right = [row["true"] == row["predicted"] for row in rows]
    ranked = [[row["predicted"], row["class2"], row["class3"]] for row in rows]
    assert all(sorted(one) == CLASSES for one in ranked)
    run = summary(place / "run")
    assert 100 * np.mean(right) == pytest.approx(run["best_top1"])
    losses = [-np.log(float(row["probability_of_true"])) for row in rows]
    assert np.mean(losses) == pytest.approx(run["best_loss"], rel=1e-4)

    def shown(name):
        cell = re.search(rf"<th>{re.escape(name)}</th><td>(.*?)</td>", page)[1]
        return [float(x) for x in re.findall(r"-?\d+\.\d+", cell)]

    p, z2 = np.mean(right), 1.959964**2 / 21  # Wilson: where |p - x| is 1.96 standard errors of x
    interval = sorted(100 * np.roots([1 + z2, -(2 * p + z2), p * p]))
    assert shown("top-1 (%)") == pytest.approx([100 * p, *interval], abs=0.006)
    half = 1.959964 * np.std(losses, ddof=1) / 21**0.5
    assert shown("loss") == pytest.approx(np.mean(losses) + [0, -half, half], abs=0.006)
    sure, error = np.array([float(row["probability"]) for row in rows]), 0.0
    for low in np.arange(15) / 15:
        chosen = (sure > low) & (sure <= low + 1 / 15)
        error += abs(sum(sure[chosen]) - np.sum(np.array(right)[chosen])) / 21
    assert shown("expected calibration error (%)") == [pytest.approx(100 * error, abs=0.006)]

    assert "<img src=x" not in page and "\u202e" not in page
    assert html.escape("<img src=x onerror=alert(1)>") in page


def test_some_of_the_classes_and_two_runs(place, tmp_path):
    """A folder of class folders; the same model twice gains and loses nothing. Runs of the same
    name are told apart by their folders."""
    subset = tmp_path / "subset"
    for name in ("class_1", "class_2"):
        shutil.copytree(place / "data/val" / name, subset / name)
    copy = shutil.copytree(place / "run", tmp_path / "copy/run")
    done = results(place / "run", copy, subset)
    assert done.code == 0, done.err
    first, second = (rows_of(copy / f"predictions_subset_{i}.csv") for i in (1, 2))
    assert first == second
    assert len(first) == 14
    assert {row["predicted"] for row in first} <= {"class_1", "class_2"}
    line = f"python {ROOT}/scripts/model_results.py run --all-classes {subset} --out {tmp_path}"
    _, script, *words = line.split()
    assert command(script, *words, BEFORE=f"import os; os.chdir('{place}')").code == 0
    page = html.unescape((tmp_path / "results_subset.html").read_text())
    assert f"<pre>{line}</pre>" in page, "as it is typed in that folder"
    among_all = rows_of(tmp_path / "predictions_subset.csv")
    for rows, is_all in ((first, False), (among_all, True)):
        likely = [float(row["probability"]) + float(row["probability2"]) for row in rows]
        assert (max(likely) < 0.999) == is_all, "the third class takes its part"
        assert ("class3" in rows[0]) == is_all, "and counts among the five most likely ones"
    page = (copy / "results_subset_2_runs.html").read_text()
    only = f"0 are right only in {copy}, 0 only in {place / 'run'}, "
    assert re.search(rf"changed by 0\.00 .*: {re.escape(only)}", page)
    broken = tmp_path / "broken/class_1/1.jpeg"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"no image")
    results(place / "run", tmp_path / "broken").fails_with("none of the images in", "broken")
    results(place / "run", "--images", tmp_path / "broken").fails_with("no image is in this folder")
    done = results(place / "run", "--images", tmp_path / "no\n.jpg")
    done.fails_with(f"--images {tmp_path}/no\\n.jpg is missing")
    assert "21 images" not in done.out, "before an evaluation"
    (subset / "unknown").mkdir()
    results(place / "run", subset).fails_with("1 of the 3 classes", "unknown")


def test_a_run_that_was_trained_on_some_of_the_classes(place, tmp_path):
    """--classes class_1,class_2: best.pt has their names, and DATA has one class more, in tar files
    of which one is evaluated. An image alone has the same probability (of an untrained ShuffleNet
    all images have nearly the same)."""
    names = ["class_1", "class_2"]
    model = get_model("resnet18", num_classes=2)
    best = torch.load(place / "run/best.pt") | {"state_dict": model.state_dict()}
    best |= {"arch": "resnet18", "model_args": {}}
    best["preprocessing"] |= {"interpolation": "bicubic"}
    torch.save(best | {"classes": names}, tmp_path / "best.pt")
    for part, images in (("train", "train"), ("test", "val")):
        shutil.make_archive(str(tmp_path / "data" / part), "tar", place / "data" / images)
    done = results(tmp_path, tmp_path / "data", "--part", "test")
    assert done.code == 0, done.err
    rows = rows_of(tmp_path / "predictions_test.csv")
    assert (len(rows), {row["true"] for row in rows}) == (14, set(names))
    image = place / "data/val" / rows[0]["path"]
    (alone,) = predictions.of_files(Best(tmp_path), [image], World(torch.device("cpu")))
    assert alone["ranked"][0][1] == pytest.approx(float(rows[0]["probability"]), rel=1e-3)


def test_which_of_two_models_is_the_better_one():
    """The second gains two images of class a, and loses one of b. It could not read the first."""
    paths, targets, tops = "tuvwxyz", [0, 0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 1, 1, 1]
    one = predicted(["a", "b"], list(paths), targets, tops)
    other = predicted(["a", "b"], list(paths[1:]), targets[1:], [0, 0, 0, 1, 1, 0])
    changes = figures.changes(one, other)
    assert changes["difference"].value == pytest.approx(100 / 6)
    assert (changes["gained"], changes["lost"], changes["both"], changes["neither"]) == (2, 1, 3, 0)
    by_name = {row["name"]: row["change"] for row in changes["classes"]}
    assert by_name == pytest.approx({"a": 75, "b": -100 / 3})
    assert [*by_name] == ["b", "a"], "what is lost comes first"


def test_classes_and_mistakes_in_the_order_of_their_weight():
    """Of four images of class a one is right; b and c have two each. None of d could be read. The
    folder does not have the model's first class."""
    tops, sure = [1, 2, 2, 3, 1, 2, 3, 3], [0.6, 0.5, 0.9, 0.7, 0.8, 0.95, 1, 1]
    names = ["", "a", "b", "c", "d"]
    result = predicted(names, list("stuvwxyz"), [1, 1, 1, 1, 2, 2, 3, 3], tops, sure)
    result.present = [1, 2, 3, 4]
    rows = figures.by_class(result)
    assert [(row["name"], row["images"], row["accuracy"].value) for row in rows] == [
        ("a", 4, 25), ("b", 2, 50), ("c", 2, 100)
    ]  # fmt: skip
    assert [(row["taken_for"], row["times"]) for row in rows] == [("b", 2), ("a", 1), ("", 0)]
    assert figures.frequent_confusions(result)[0] == ("a", "b", 2)
    many = [f"{i}" for i in range(60)]
    others = predicted(many, many, range(60), [(i + 1) % 60 for i in range(60)])
    assert len(figures.frequent_confusions(others)) == 50
    names, cells = figures.confusion_matrix(result)
    assert names == ["a", "b", "c", "d"]
    assert {(0, 0, 1, 0.25), (0, 1, 2, 0.5), (1, 0, 1, 0.5), (2, 2, 2, 1.0)} <= {*cells}
    assert figures.confident_mistakes(result) == [2, 4, 3, 1]
    error, curve = figures.calibration(result)
    assert error == pytest.approx((50 + 40 + 70 + 80 + 90 + 5) / 8)
    bins = [(50, 0, 1), (60, 100, 1), (70, 0, 1), (80, 0, 1), (90, 0, 1), (295 / 3, 100, 3)]
    assert np.array(curve) == pytest.approx(np.array(bins))


@pytest.mark.parametrize(("rank", "part"), [("0", "val"), ("1", "val"), ("0", "test")])
def test_the_part_that_chose_the_model_is_noted_once(
    place, tmp_path, monkeypatch, capsys, rank, part
):
    """By one of torchrun's processes."""
    (tmp_path / "test/class_1").mkdir(parents=True)
    words = ["model_results.py", place / "run", tmp_path, "--part", part, "--out", tmp_path]
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(model_results.launch, "run", lambda *_: 0)
    assert model_results.main() == 0
    is_noted = (rank, part) == ("0", "val")
    assert ("note: DATA/val has chosen the best epoch" in capsys.readouterr().out) == is_noted


def test_bad_input_is_an_error(place, tmp_path, monkeypatch):
    """But --images does without DATA, and says what WordNet's ids mean."""
    words = {"n01440764": "tench", "n01443537": "goldfish", "n02012849": "crane"}
    torch.save(torch.load(place / "run/best.pt") | {"classes": [*words]}, tmp_path / "best.pt")
    (tmp_path / "Labels.json").write_text(json.dumps(words))
    (tmp_path / "options.json").write_text('{"data": "/nowhere"}')
    image = next(place.glob("data/val/class_1/*"))
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / image.name).symlink_to(image)
    (photos / f"._{image.name}").write_text("what macOS leaves beside a file")
    (photos / "notes.txt").touch()
    image = photos / image.name
    done = results(tmp_path / "best.pt", "--images", photos, "--out", tmp_path / "page")
    assert re.search(rf"{image}: n0\d+ (tench|goldfish|crane) \d+\.\d %, n0", done.out)
    assert (tmp_path / "page/results_images.html").is_file()
    (tmp_path / "options.json").unlink()  # best.pt alone was copied to another machine
    words = ["model_results.py", str(tmp_path / "best.pt"), "--images", str(image)]
    monkeypatch.setattr(sys, "argv", words)
    with monkeypatch.context() as change:
        change.setattr(model_results.launch, "run", lambda _, args: args.evaluates)
        assert model_results.main() is False
        (tmp_path / "options.json").write_text(json.dumps({"data": str(place / "data")}))
        assert model_results.main() is True, "DATA is here: images are predicted beside it"
    (tmp_path / "file").touch()
    (tmp_path / "real.json").write_text("[[1], 2]")
    for words, message in (
        ((place, place / "data"), "has no best.pt"),
        ((place / "run", "--out", tmp_path / "file/page"), "cannot write .* --out"),
        ((place / "run", "--export", tmp_path / "file/model"), "another place with --export"),
        ((place / "run", "--real", tmp_path / "real.json"), "not a list of lists"),
        ((place / "run", place / "run", "--export", tmp_path / "out"), "one model: give one run"),
        ((place / "run", tmp_path), f"{place}/run and {tmp_path} have different classes"),
    ):
        monkeypatch.setattr(sys, "argv", ["model_results.py", *map(str, words)])
        with pytest.raises(UserError, match=message):
            model_results.main()
    for name in ("sets/a", "sets/b"):
        shutil.copytree(place / "data/val/class_1", tmp_path / name)
    (flat := tmp_path / "sets/flat").mkdir()
    with pytest.raises(UserError) as error:  # and not that the folder above is to be divided
        predictions.open_part(Best(place / "run"), SimpleNamespace(data=flat, part="val"), None)
    assert str(error.value) == f"{flat} has neither val/ nor class folders, nor best.pt"


def test_names_of_wordnet_classes(tmp_path):
    """From a table beside or in the data set; without one, ImageNet's by torchvision."""
    (tmp_path / "data").mkdir()
    ids = ["n01440764", "n01443537"]
    assert wordnet.find(ids, tmp_path / "data")[ids[0]] == ids[0], "not ImageNet's 1000"
    (tmp_path / "LOC_synset_mapping.txt").write_text(
        "n01440764 tench, Tinca tinca\nn01443537 goldfish\n", encoding="utf-8-sig"
    )
    found = wordnet.find(ids, tmp_path / "data")
    assert found == {ids[0]: "n01440764 tench, Tinca tinca", ids[1]: "n01443537 goldfish"}
    long = f'n01440764,"{"tench " * 30_000}\n'  # a quotation mark that is never closed
    (tmp_path / "data/class_names.csv").write_text(long)
    assert wordnet.find(ids, tmp_path / "data") == found
    (tmp_path / "data/Labels.json").write_text('{"n01440764": "tench"}')
    assert wordnet.find(ids, tmp_path / "data") == {ids[0]: "n01440764 tench", ids[1]: ids[1]}
    many, nowhere = [f"n{2_000_000 + i:08}" for i in range(1000)], tmp_path / "nowhere" / "data"
    assert wordnet.find(many, nowhere)[many[1]] == many[1], "1000 others of WordNet's classes"
    many[0], many[-1] = ids[0], "n15075141"
    assert wordnet.find(many, nowhere)[ids[0]] == f"{ids[0]} tench"
    assert wordnet.find(["cat"], tmp_path / "data") == {"cat": "cat"}


def test_no_cell_of_the_csv_is_a_formula(tmp_path):
    names = ["=1+1", "@x", "plain"]
    result = predicted(names, ["-a", "+b", "c"], [0, 1, 2], [0, 1, 2])
    predictions.write_csv(result, tmp_path / "x.csv", {name: name for name in names})
    rows = [(row["path"], row["true"]) for row in rows_of(tmp_path / "x.csv")]
    assert rows == [("'-a", "'=1+1"), ("'+b", "'@x"), ("c", "plain")]


def test_the_page_in_a_browser(place):
    """It shows the model, and finds and sorts classes by keyboard."""
    assert results(place / "run", place / "data").code == 0
    with Page(place / "run/results_val.html") as page:
        head = page.run("document.querySelector('table').innerText")
        assert ARCH in head and f"{SIZE} (resized to" in head
        table = "document.querySelector('table.sortable')"
        page.run(f"{table}.tHead.rows[0].cells[0].focus()")
        page.key("Enter")
        assert page.run(f"{table}.tHead.rows[0].cells[0].getAttribute('aria-sort')")
        page.run("document.querySelector('.find').value = 'CLASS_1'")
        page.run("document.querySelector('.find').oninput()")
        shown = page.run(f"[...{table}.tBodies[0].rows].filter(r => !r.hidden).length")
        assert shown == 1
        page.run("document.querySelector('svg.matrix').focus()")
        page.key("ArrowRight")
        names = page.run("[...document.querySelectorAll('.row title')].map(t => t.textContent)")
        reading = page.run("document.querySelector('.reading').textContent")
        assert reading.startswith(f"{names[0]}, predicted as {names[1]}: "), reading
        assert not page.errors
        # On a telephone no number of the one row that is shown is broken into lines.
        size = {"width": 400, "height": 600, "deviceScaleFactor": 1, "mobile": True}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        assert page.run(f"{table}.tBodies[0].getBoundingClientRect().height") < 60


EXPORTED = """
import os, sys, torch
os.chdir(sys.argv[1])
{code}
torch.save(model(torch.load("images.pt")), "logits.pt")
"""


@pytest.mark.parametrize("arch", ["resnet18", pytest.param("mnasnet0_5", marks=pytest.mark.long)])
def test_an_exported_model_loads_elsewhere(arch, tmp_path, monkeypatch):
    """By the lines in the folder's README.md for torchvision, and by timm where it is installed."""
    pytest.importorskip("safetensors")
    model, names = get_model(arch, num_classes=3).eval(), ["a", "b", "ä"]
    # 64 / (64 / 93) is less than 93, and timm takes the whole number below.
    sizes = {"image_size": 64, "val_resize_size": 93, "val_image_size": None}
    sizes |= {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.2, 0.3), "interpolation": "bicubic"}
    best = {"state_dict": model.state_dict(), "arch": arch, "classes": names}
    (tmp_path / "run").mkdir()
    best |= {"epoch": 3, "top1": 61.5, "preprocessing": sizes, "model_args": {}}
    torch.save(best, tmp_path / "run/best.pt")
    out = tmp_path / "out"
    done = results(tmp_path / "run", "--export", out)
    assert done.code == 0, done.err
    config = json.loads((out / "config.json").read_text())
    assert config["label_names"] == names
    assert config["trained"] == {"epoch": 3, "top1": 61.5, "top5": None, "loss": None}
    weights = config["pretrained_cfg"]
    assert (weights["mean"], weights["std"]) == ([0.4, 0.5, 0.6], [0.2, 0.2, 0.3])
    assert (weights["input_size"], int(64 / weights["crop_pct"])) == ([3, 64, 64], 93)
    images = torch.rand(2, 3, 64, 64)
    torch.save(images, out / "images.pt")
    (code,) = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    code += "assert preprocess.transforms[0].size == 93 and config['label_names'][2] == 'ä'\n"
    timm = 'import timm\nmodel = timm.create_model("local-dir:.", pretrained=True).eval()\n'
    timm += "config = timm.data.resolve_model_data_config(model)\n"
    timm += "steps = timm.data.create_transform(**config, is_training=False).transforms\n"
    timm += "assert steps[0].size == 93, steps"
    tried = [sys.executable, "-Ic", "import timm"]
    has_timm = not subprocess.run(tried, capture_output=True, check=False).returncode
    for lines in (code, timm) if has_timm and arch == "resnet18" else (code,):
        words = [sys.executable, "-Ic", EXPORTED.format(code=lines), str(out)]
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert torch.equal(torch.load(out / "logits.pt"), model(images))
    written = []
    monkeypatch.setattr("torch.onnx.export", lambda *words, **_: written.append(words[2]))
    export.export(Best(tmp_path / "run"), out, onnx=True)
    assert written == [out / "model.onnx"]
    assert "`images`, float32 [n, 3, 64, 64]" in (out / "README.md").read_text()


def test_real_labels_and_many_classes(tmp_path):
    """Of three validation images, one has two right classes, one has none and does not count."""
    names = [f"n{i:08}" for i in range(1000)]
    paths = [f"n/ILSVRC2012_val_{i:08}.JPEG" for i in (3, 1, 2)]
    result = predicted(names, paths, [7, 4, 9], [[7, 1], [5, 4], [9, 1]])
    (tmp_path / "real.json").write_text("[[4, 5], [], [8]]")
    assert figures.real_accuracy(result, tmp_path / "real.json").value == 50.0
    summary = figures.summary(result)
    assert (summary["top-1 (%)"].value, summary["top-5 (%)"].value) == (pytest.approx(200 / 3), 100)
