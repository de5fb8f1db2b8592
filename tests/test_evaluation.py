"""Evaluation counts every image once; odd images are taken, unreadable ones are named."""

import random
from itertools import pairwise

import joined
import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import SMALL, draw_folder, python, scalars, summary, train
from PIL import Image
from test_images import ODD

from utils.metrics import UNREADABLE, Sums
from utils.start.world import World

MANY = 503  # a prime: no number of processes or batch size divides it


def test_every_image_counts_once_on_any_number_of_processes(tmp_path):
    """By weights that know nothing. There are more than 5 classes, or top-5 would be 100 %."""
    source = random.Random(5)
    for number in range(7):
        (tmp_path / "data/val" / f"class_{number}").mkdir(parents=True)
    for i in range(MANY):
        image = Image.frombytes("RGB", (4, 4), source.randbytes(48))
        image.save(tmp_path / "data/val" / f"class_{i % 7}" / f"{i}.png", compress_level=0)
    torch.manual_seed(0)
    model = timm.create_model("tiny_plain", num_classes=7)
    model[-1].weight.data *= 100  # or the images would differ by less than the biases
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    options = ("-e", "--resume", tmp_path / "weights.pt", "-a", "tiny_plain", "--image-size", 8)
    options += ("-b", 64, "-j", 0, "--output-dir", tmp_path, tmp_path / "data", "--name")
    ways = {1: "imagenet_nd", 2: "imagenet_ddp", 3: "imagenet_ddp"}
    joined.run_jobs([joined.Job(way, (*options, n), n) for n, way in ways.items()], tmp_path)
    runs = {count: summary(tmp_path / str(count)) for count in ways}
    alone = runs[1]
    assert 0 < alone["val_top1"] < alone["val_top5"] < 100
    assert alone["val_loss"] > 1  # of random weights
    for count, run in runs.items():
        assert (run["world_size"], run["val_images"]) == (count, MANY)
        for key in ("val_top1", "val_top5"):
            hits = run[key] / 100 * MANY
            assert hits == pytest.approx(round(hits), abs=1e-6), key  # a whole number of them
            assert run[key] == alone[key], key
        assert run["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-6)


def test_odd_images_are_good_images_and_unreadable_ones_are_named(tmp_path):
    data = draw_folder(tmp_path / "data", train=6, val=4)
    for part in ("train", "val"):
        for number in range(3):
            odd = data / part / f"class_{number}" / "odd"  # sub-folders count, too
            odd.mkdir()
            for kind, content in ODD.items():
                (odd / f"{kind}.JPEG").write_bytes(content)
    bad = [data / part / "class_1" / "001.JPEG" for part in ("train", "val")]
    bad[0].write_bytes(bad[0].read_bytes()[:300])
    bad[1].write_bytes(b"")
    options = ("-a", "tiny_plain", "-b", "11", "-j", "0", "--epochs", "2", "--max-bad-files", "1")
    options += ("--ema", "0.9", "--output-dir", tmp_path, "--name", "odd")
    done = train("imagenet_ddp.py", *options, data, processes=2)
    assert f"{3 * (6 + len(ODD))} images in 3 classes" in done.out
    results = summary(tmp_path / "odd")
    assert (results["val_images"], results["val_unreadable"]) == (3 * (4 + len(ODD)) - 1, 1)
    assert results["val_ema_loss"] != results["val_loss"]  # of other weights
    assert results["best_weights"] == torch.load(tmp_path / "odd/best.pt")["weights"]
    assert scalars(tmp_path / "odd")["IO/bad_files"] == [(1, 1), (2, 1)]
    assert done.out.count("unreadable image ") == 2, "once each, not in every epoch"
    assert all(f"unreadable image {path}" in done.out for path in bad)


def test_validation_without_a_readable_image_is_an_error(tmp_path):
    """In a training, whose snapshot is kept; there are fewer than --max-bad-files."""
    data = draw_folder(tmp_path / "data", train=6, val=2)
    for path in (data / "val").glob("*/*"):
        path.write_bytes(b"no image")
    line = ("imagenet_nd.py", *SMALL, "-a", "tiny_plain", "-b", "5000", "--epochs", "2")
    done = python(*line, "--output-dir", tmp_path, "--name", "blind", data)
    done.fails_with(f"none of the 6 images in {data / 'val'} could be read")
    progress = torch.load(tmp_path / "blind" / "snapshot.pt", weights_only=True)["progress"]
    assert (progress["epoch"], progress["step"]) == (0, 1)


# ---- sums and counts of one process


def reference(logits, targets):
    """[loss, top-1, top-5, images]: a hit in the top k has fewer than k larger logits."""
    known = targets != UNREADABLE
    logits, targets = logits[known].double(), targets[known]
    larger = (logits > logits.gather(1, targets[:, None])).sum(1)
    loss = F.cross_entropy(logits, targets, reduction="sum")
    return [float(x) for x in (loss, (larger < 1).sum(), (larger < 5).sum(), known.sum())]


@pytest.mark.parametrize("classes", [2, 6])
def test_sums_of_batches_are_those_of_all_images(classes):
    """With few classes every image is a top-5 hit. float32 could not count on from 2^24."""
    torch.manual_seed(0)
    logits, targets = torch.randn(50, classes), torch.randint(classes, (50,))
    targets[::7] = UNREADABLE
    expected = reference(logits, targets)
    assert (expected[2] == expected[3]) == (classes <= 5)
    sums = Sums(torch.device("cpu"), [0.0] + [2.0**24] * 3)
    for first, end in pairwise((0, 1, 30, 50)):
        one, labels = logits[first:end].requires_grad_(), targets[first:end]
        loss = F.cross_entropy(one, labels, reduction="sum", ignore_index=UNREADABLE)
        sums.add(loss, one, labels)
    loss, *counts = sums.total(World(torch.device("cpu")))
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert counts == [2**24 + count for count in expected[1:]]
