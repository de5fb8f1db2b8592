"""`prepare_data.py split`: a test part, chosen by names and seed; no image is ever lost."""

import os
import signal
import time

import pytest
from preparing import SCRIPT, fail, images, put, succeed
from running import Running


@pytest.fixture
def data(tmp_path):
    names = [f"train/{c}/{i:03d}.jpg" for c in ("a", "b/sub") for i in range(30)]
    return put(tmp_path / "data", {name: name.encode() for name in [*names, "val/a/x.jpg"]})


def test_same_names_and_seed_give_the_same_part_and_zero_undoes_it(data, tmp_path):
    before = images(data)
    assert "train 54 images, test 6 images" in succeed("split", data, "--test", 0.1)
    assert sorted(images(data).values()) == sorted(before.values())
    aside = {name for name in images(data) if name.startswith("test/")}
    assert {name.split("/")[1] for name in aside} == {"a", "b"} and len(aside) == 6
    other = put(tmp_path / "node", {name: b"%d" % len(name) for name in reversed(before)})
    succeed("split", other, "--test", "0.1", "--seed", 0)
    assert images(other).keys() == images(data).keys()
    succeed("split", other, "--test", "0.1", "--seed", 1)
    assert images(other).keys() != images(data).keys() and len(images(other)) == 61
    succeed("split", data, "--test", 0.2)
    larger = {name for name in images(data) if name.startswith("test/")}
    assert len(larger) == 12 and aside < larger
    succeed("split", data, "--test", 0)
    assert images(data) == before and not (data / "test").exists()


def test_links_are_moved_and_lead_to_the_same_files(tmp_path):
    put(tmp_path, {f"files/{i}.jpg": b"%d" % i for i in range(4)})
    folder = tmp_path / "data/train/a"
    folder.mkdir(parents=True)
    for i in range(4):
        target = "../../../files" if i % 2 else tmp_path / "files"
        (folder / f"{i}.jpg").symlink_to(f"{target}/{i}.jpg")
    for fraction in (0.6, 0):
        succeed("split", tmp_path / "data", "--test", fraction)
        assert sorted(images(tmp_path / "data").values()) == [b"0", b"1", b"2", b"3"]


def test_killed_at_any_moment_no_image_is_lost(tmp_path):
    files = {f"train/{c}/{i:04d}.jpg": b"%d" % i for c in "ab" for i in range(1500)}
    data = put(tmp_path / "data", files)
    for kill in range(3):
        with Running(SCRIPT, "split", data, "--test", 0.5, "--seed", kill % 2) as command:
            start = set(data.rglob("*.jpg"))
            while command.process.poll() is None and start == set(data.rglob("*.jpg")):
                time.sleep(0.001)
            command.send(signal.SIGKILL)
            command.process.wait(30)
        assert sorted(images(data).values()) == sorted(files.values())
    succeed("split", data, "--test", 0.5)
    put(tmp_path / "other", files)
    succeed("split", tmp_path / "other", "--test", 0.5)
    assert images(tmp_path / "other") == images(data)


def test_what_cannot_be_split_is_left_as_it_is(data, tmp_path):
    put(data, {"train/c/only.jpg": b"x"})
    before = images(data)
    assert "class c has only 1 images, so none would be left" in fail("split", data, "--test", 0.1)
    put(data, {"test/a/other.jpg": b"x"})
    message = fail("split", data, "--test", 0.1)
    assert f"{data}/test exists, and this command did not make it" in message
    os.remove(data / "test/a/other.jpg")
    assert images(data) == before
    assert "has no class folders of images" in fail("split", tmp_path / "none", "--test", 0.1)
    succeed("shards", data, tmp_path / "shards")
    line = fail("split", tmp_path / "shards", "--test", 0.1)
    assert "no class folders of images" in line or "no images in class folders" in line
