"""`prepare_data.py sample`, and which folders all commands leave alone."""

import fcntl
import json
import os
import shutil

import numpy as np
import pytest
from PIL import Image
from preparing import fail, images, put, run, succeed, tree

SAMPLE = ("--classes", "4", "--train", "30", "--val", "5")


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    out = tmp_path_factory.mktemp("sample") / "out"
    assert "train 120 images in 4 classes, val 20 images" in succeed("sample", out, *SAMPLE)
    return out


def test_sample_has_the_layout_and_sizes_of_imagenet(sample):
    assert sorted(os.listdir(sample)) == [".prepared.json", "train", "val"]
    names = ["bricks", "checker", "dots", "grid"]
    assert sorted(os.listdir(sample / "train")) == sorted(os.listdir(sample / "val")) == names
    sizes = []
    for path in sample.rglob("*.JPEG"):
        with Image.open(path) as image:
            assert (image.format, image.mode) == ("JPEG", "RGB")
            sizes.append(image.size)
    assert len(sizes) == 140 and len(set(images(sample).values())) == 140
    width, height = np.mean(sizes, axis=0)
    assert 430 < width < 560 and 350 < height < 460 and any(w < h for w, h in sizes)


def test_sample_is_the_same_every_time_and_done_once(sample, tmp_path):
    succeed("sample", tmp_path / "again", *SAMPLE)
    assert tree(tmp_path / "again") == tree(sample)
    # An image does not depend on how many others there are, but does on the seed.
    succeed("sample", tmp_path / "few", "--classes", 2, "--train", 2, "--val", 1)
    few = images(tmp_path / "few")
    assert len(few) == 6 and few.items() <= images(sample).items()
    succeed("sample", tmp_path / "other", "--classes", 2, "--train", 2, "--val", 1, "--seed", 1)
    other = images(tmp_path / "other")
    assert other.keys() == few.keys() and not set(other.values()) & set(few.values())
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "again").rglob("*")}
    assert "nothing to do" in succeed("sample", tmp_path / "again", *SAMPLE)
    assert times == {path: path.stat().st_mtime_ns for path in (tmp_path / "again").rglob("*")}


def test_sample_colour_does_not_tell_the_class(sample):
    means = {"train": {}, "val": {}}
    for path in sample.rglob("*.JPEG"):
        with Image.open(path) as image:
            colour = np.asarray(image.resize((1, 1), Image.Resampling.BOX), float).ravel()
        means[path.parts[-3]].setdefault(path.parts[-2], []).append(colour)
    centres = {name: np.mean(colours, axis=0) for name, colours in means["train"].items()}
    hits = [
        name == min(centres, key=lambda other, c=colour: np.abs(centres[other] - c).sum())
        for name, colours in means["val"].items()
        for colour in colours
    ]
    assert np.mean(hits) < 0.6  # 0.25 by chance; a class with a colour of its own is always hit


def test_folders_of_something_else_are_left_alone(sample, tmp_path):
    before = tree(sample)
    assert "seed 5" in fail("sample", sample, *SAMPLE, "--seed", 5)
    assert "not cifar10" in fail("cifar10", sample, "--source", tmp_path)
    assert tree(sample) == before
    put(tmp_path, {"foreign/train/a/x": b"", "file": b"", "bad/.prepared.json": b"{"})
    for name, message in {
        "foreign": "has a train folder that this command did not make",
        "file": "is not a folder",
        "bad": "is damaged",
    }.items():
        assert message in fail("sample", tmp_path / name)
    assert "has 10 classes" in fail("sample", tmp_path / "many", "--classes", 11)
    wrong = run("sample", tmp_path / "many", "--train", 0)
    assert wrong.code == 2 and "0 is not at least 1" in wrong.err
    assert not (tmp_path / "many").exists()
    handle = os.open(tmp_path / "bad", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    assert "another process" in fail("sample", tmp_path / "bad")
    os.close(handle)
    # Images that somebody has added to a folder of this command.
    shutil.copytree(sample, tmp_path / "more")
    marker = json.loads((sample / ".prepared.json").read_text()) | {"counts": {}, "finished": False}
    (tmp_path / "more" / ".prepared.json").write_text(json.dumps(marker))
    (tmp_path / "more" / "val" / "dots" / "mine.png").write_bytes(b"x")
    assert "has 21 images but the source 20" in fail("sample", tmp_path / "more", *SAMPLE)
