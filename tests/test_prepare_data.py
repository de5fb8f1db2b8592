"""`prepare_data.py sample`, and which folders all commands leave alone."""

import fcntl
import os

import numpy as np
import pytest
from PIL import Image
from preparing import fail, images, put, run, succeed, times, tree

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
    paths = list(sample.rglob("*.JPEG"))
    assert len(paths) == len(set(images(sample).values())) == 140
    sizes = [Image.open(path).size for path in paths]
    width, height = np.mean(sizes, axis=0)
    assert 430 < width < 560 and 350 < height < 460


def test_sample_is_the_same_every_time_and_done_once(sample, tmp_path):
    # An image does not depend on how many others there are, nor on workers, but on the seed.
    few = ("--classes", 2, "--train", 2, "--val", 1)
    succeed("sample", tmp_path / "few", *few, "--workers", 1)
    found = images(tmp_path / "few")
    assert len(found) == 6 and found.items() <= images(sample).items()
    succeed("sample", tmp_path / "other", *few, "--seed", 1)
    other = images(tmp_path / "other")
    assert other.keys() == found.keys() and not set(other.values()) & set(found.values())
    before = times(sample)
    assert "nothing to do" in succeed("sample", sample, *SAMPLE)
    assert times(sample) == before


def test_folders_of_something_else_are_left_alone(sample, tmp_path):
    before = tree(sample)
    assert "seed 5" in fail("sample", sample, *SAMPLE, "--seed", 5)
    assert "not cifar10" in fail("cifar10", sample, "--source", tmp_path)
    assert tree(sample) == before
    put(tmp_path, {"foreign/test/a/x": b"", "bad/.prepared.json": b"{"})
    message = fail("sample", tmp_path / "foreign")
    assert "has a test folder that this command did not make" in message
    assert "is damaged" in fail("sample", tmp_path / "bad")
    assert "has 10 classes" in fail("sample", tmp_path / "many", "--classes", 11)
    assert not (tmp_path / "many").exists()
    handle = os.open(tmp_path / "bad", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    assert "another process" in fail("sample", tmp_path / "bad")
    os.close(handle)


def test_wrong_numbers_are_refused(tmp_path):
    done = run("shrink", tmp_path / "in", tmp_path / "out", "--quality", 101)
    assert done.code == 2 and "--quality: 101 is not at least 1" in done.err
