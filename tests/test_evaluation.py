"""Evaluation counts every image once; odd images are taken, unreadable ones are named."""

import random
from pathlib import Path

import joined
import pytest
import torch
from conftest import SMALL, draw_folder, python, scalars, summary, train
from PIL import Image

MANY = 503  # a prime: no number of processes or batch size divides it


def test_every_image_counts_once_on_any_number_of_processes(tmp_path):
    """By random weights. There are more than 5 classes, or top-5 would be 100 %."""
    source = random.Random(5)
    for number in range(7):
        (tmp_path / "data/val" / f"class_{number}").mkdir(parents=True)
    for i in range(MANY):
        # 4 x 4 pixels of noise; a dozen of the files, far apart, are of other sizes.
        size = (4, 4) if i % 41 else (3 + i % 5, 4)
        image = Image.frombytes("RGB", size, source.randbytes(3 * size[0] * size[1]))
        image.save(tmp_path / "data/val" / f"class_{i % 7}" / f"{i}.png", compress_level=0)
    options = ("-e", "-a", "resnet18", "--image-size", 8, "-b", 64, "-j", 0)
    options += ("--output-dir", tmp_path, tmp_path / "data", "--name")
    counts = (1, 2, 3)
    ways = ("imagenet_nd", "imagenet_ddp", "imagenet_ddp")
    jobs = [joined.Job(way, (*options, n), n) for way, n in zip(ways, counts, strict=True)]
    joined.run_jobs(jobs, tmp_path)
    alone, *others = (summary(tmp_path / str(count)) for count in counts)
    assert 0 < alone["val_top1"] < alone["val_top5"] < 100
    assert alone["val_loss"] > 1  # of random weights
    for key in ("val_top1", "val_top5"):
        hits = alone[key] / 100 * MANY
        assert hits == pytest.approx(round(hits), abs=1e-6), key  # a whole number of them
    for count, found in zip(counts, (alone, *others), strict=True):
        assert (found["world_size"], found["val_images"]) == (count, MANY)
        for key in ("val_top1", "val_top5"):
            assert found[key] == alone[key], key
        assert found["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-6)


def odd_images(folder: Path, number: int) -> int:
    """Write images of odd kinds, named as in ImageNet; test_images.py has more.

    Returns: their number.
    """
    colour = [60, 60, 60]
    colour[number] = 200
    plain = Image.new("RGB", (48, 40), tuple(colour))
    plain.convert("L").save(folder / "grey.JPEG", "JPEG")
    plain.convert("CMYK").save(folder / "cmyk.JPEG", "JPEG")
    plain.save(folder / "png.JPEG", "PNG")
    plain.convert("RGBA").save(folder / "alpha.png")
    plain.resize((1, 1)).save(folder / "dot.JPEG", "JPEG")
    plain.resize((200, 3)).save(folder / "line.JPEG", "JPEG")
    plain.resize((4000, 3000)).save(folder / "huge.JPEG", "JPEG")
    return len(list(folder.iterdir()))


def test_odd_images_are_good_images_and_unreadable_ones_are_named(tmp_path):
    data = draw_folder(tmp_path / "data", train=6, val=4)
    for part in ("train", "val"):
        for number in range(3):
            odd = data / part / f"class_{number}" / "odd"  # sub-folders count, too
            odd.mkdir()
            kinds = odd_images(odd, number)
    bad = [data / part / "class_1" / "001.JPEG" for part in ("train", "val")]
    bad[0].write_bytes(bad[0].read_bytes()[:300])
    bad[1].write_bytes(b"")
    options = ("-a", "tiny_plain", "-b", "19", "-j", "0", "--epochs", "2", "--max-bad-files", "1")
    options += ("--ema", "0.9", "--output-dir", tmp_path, "--name", "odd")
    done = train("imagenet_nd.py", *options, data)
    assert f"{3 * (6 + kinds)} images in 3 classes" in done.out
    found = summary(tmp_path / "odd")
    assert (found["epochs_done"], found["finished_because"]) == (2, "epochs")
    assert (found["val_images"], found["val_unreadable"]) == (3 * (4 + kinds) - 1, 1)
    assert found["val_ema_loss"] != found["val_loss"]  # of other weights
    assert scalars(tmp_path / "odd")["IO/bad_files"] == [(1, 1), (2, 1)]
    assert done.out.count("unreadable image ") == 2
    for path in bad:
        assert done.out.count(f"unreadable image {path}") == 1, "once, not in every epoch"


def test_validation_without_a_readable_image_is_an_error(tmp_path):
    """In a training, whose snapshot is kept; there are fewer than --max-bad-files."""
    data = draw_folder(tmp_path / "data", train=6, val=2)
    for path in (data / "val").glob("*/*"):
        path.write_bytes(b"no image")
    line = ("imagenet_nd.py", *SMALL, "-a", "tiny_plain", "-b", "5000", "--epochs", "2")
    done = python(*line, "--output-dir", tmp_path, "--name", "blind", data)
    assert done.code == 2
    assert f"none of the 6 images in {data / 'val'} could be read" in done.sentence
    assert "global batch 18 (5000 per process x 1; the whole data set is one step)" in done.out
    progress = torch.load(tmp_path / "blind" / "snapshot.pt", weights_only=True)["progress"]
    assert (progress["epoch"], progress["step"]) == (0, 1)
