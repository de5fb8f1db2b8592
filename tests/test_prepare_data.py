"""`prepare_data.py sample` and `shrink`: pixels, names, interruptions and refusals."""

import fcntl
import io
import os
import shutil
import signal
import time

import numpy as np
import prepare_data
import pytest
from batches import encode, picture
from conftest import shell
from PIL import Image
from prepare.writing import Stored
from preparing import SCRIPT, fail, folder_of, images, put, run, said, succeed, times, tree
from running import Running, wait_for_group
from test_images import ODD

from utils.data import images as decoding
from utils.start.errors import UserError

SAMPLE = ("--classes", "4", "--train", "30", "--val", "5")
SIZE = 64
OPTIONS = ("--size", SIZE, "--quality", 85, "--workers", 2)
BAD = ("cut.JPEG", "small_cut.JPEG", "empty.jpg", "text.JPEG")  # what cannot be read


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    out = tmp_path_factory.mktemp("sample") / "out"
    assert "train 120 images, val 20 images" in succeed("sample", out, *SAMPLE)
    return out


def test_sample_has_the_layout_and_sizes_of_imagenet(sample):
    assert sorted(os.listdir(sample)) == [".prepared.json", "train", "val"]
    names = ["bricks", "checker", "dots", "grid"]
    assert sorted(os.listdir(sample / "train")) == sorted(os.listdir(sample / "val")) == names
    paths = list(sample.rglob("*.JPEG"))
    assert len(paths) == len(set(images(sample).values())) == 140
    width, height = np.mean([Image.open(path).size for path in paths], axis=0)
    assert 430 < width < 560 and 350 < height < 460


def test_sample_is_the_same_every_time_and_done_once(sample, tmp_path):
    """An image depends on the seed, neither on how many others there are nor on workers."""
    few = ("--classes", 2, "--train", 2, "--val", 1)
    succeed("sample", tmp_path / "1", *few, "--workers", 1)
    succeed("sample", tmp_path / "2", *few, "--seed", 1)
    one, other = images(tmp_path / "1"), images(tmp_path / "2")
    assert len(one) == 6 and one.items() <= images(sample).items()
    assert other.keys() == one.keys() and not set(other.values()) & set(one.values())
    args = prepare_data.build_parser().parse_args(["sample", "out"])
    assert (args.classes * args.train, args.classes * args.val) == (1000, 200), "as in README.md"
    before = times(sample)
    assert "nothing to do" in succeed("sample", sample, *SAMPLE)
    assert times(sample) == before


def test_folders_of_something_else_are_left_alone(sample, tmp_path):
    before = tree(sample)
    assert "seed 5" in fail("sample", sample, *SAMPLE, "--seed", 5)
    assert "not cifar10" in fail("cifar10", sample, "--source", tmp_path)
    assert tree(sample) == before
    put(tmp_path, {"foreign/test/a/x": b"", "bad/.prepared.json": b"{"})
    assert "has a test folder that this command did not" in fail("sample", tmp_path / "foreign")
    assert "is damaged" in fail("sample", tmp_path / "bad")
    assert "has 10 classes" in fail("sample", tmp_path / "many", "--classes", 11)
    assert not (tmp_path / "many").exists()
    handle = os.open(tmp_path / "bad", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    assert "another process" in fail("sample", tmp_path / "bad")
    os.close(handle)


# ---- shrink


def pixels(data):
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"), float)


def reference(data, size, quality):
    """Reduced after a full decode, without any shortcut."""
    with Image.open(io.BytesIO(data)) as image:
        rgb = image.convert("RGB")
    factor = size / min(rgb.size)
    small = rgb.resize([round(side * factor) for side in rgb.size], Image.Resampling.BICUBIC)
    small.info = {}
    return encode(small, quality=quality)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """An image folder with most of the oddities that such folders have been seen to hold."""
    folder = tmp_path_factory.mktemp("source") / "images"
    grey = np.linspace(0, 65535, 150 * 100).reshape(100, 150).astype(np.uint16)
    # Blocks of one colour: leaving out pixels in a reduction shows.
    dots = Image.fromarray(np.random.default_rng(0).integers(0, 256, (65, 86, 3), np.uint8))
    blocks = dots.resize((683, 513), Image.Resampling.NEAREST)
    large = ODD["jpeg"]
    files = {
        "small.JPEG": encode(picture(63, 300)),
        "exact.JPEG": encode(picture(64, 64)),
        "cut.JPEG": large[:-900],
        "small_cut.JPEG": encode(picture(60, 50))[:-200],
        "text.JPEG": b"<html>404</html>",
        "empty.jpg": b"",
        "tall.jpg": encode(picture(70, 121)),
        "huge.JPEG": encode(blocks, quality=92, subsampling=0),
        "deep.png": encode(Image.fromarray(grey), "PNG"),
        "sub/deep/wide.JPEG": large,
    }
    put(folder / "train" / "a", files)
    put(folder / "train" / "odd", {f"{kind}.JPEG": data for kind, data in ODD.items()})
    put(folder, {f"{split}/{label}/x.JPEG": large for split in ("val", "test") for label in "ab"})
    for split in ("train", "val", "test"):
        (folder / split / "nothing").mkdir()
    put(folder, {"train/a/.hidden.JPEG": b"x", "train/a/notes.txt": b"x", "README": b"x"})
    return folder


@pytest.fixture(scope="module")
def shrunk(source, tmp_path_factory):
    """The finished copy, and what was printed."""
    out = tmp_path_factory.mktemp("shrunk") / "out"
    return out, run("shrink", source, out, *OPTIONS)


def test_names_and_pixels(source, shrunk):
    """Small and unreadable files are copied; all others are reduced, without any metadata."""
    before, after = images(source), images(shrunk[0])
    assert len(after) == 30 and before.keys() - after.keys() == {"README", "train/a/notes.txt"}
    assert tree(shrunk[0]).keys() - after.keys() == {".prepared.json"}
    for split in ("train", "val", "test"):
        assert (shrunk[0] / split / "nothing").is_dir()
    changed = {name for name, data in after.items() if before[name] != data}
    assert len(changed) == 22
    for name in changed:
        assert min(pixels(before[name]).shape[:2]) > SIZE
        if name not in ("train/a/huge.JPEG", "train/a/deep.png"):
            assert after[name] == reference(before[name], SIZE, 85), name
    # The huge one is decoded at a quarter of its size, which must hardly be seen: the difference
    # is 5.3 of 255; at an eighth, which is just enough for the final size, it is 10.8.
    huge, ours = before["train/a/huge.JPEG"], pixels(after["train/a/huge.JPEG"])
    careful = pixels(reference(huge, SIZE, 85))
    assert careful.shape == ours.shape and np.abs(careful - ours).mean() < 8
    # 16 bits a pixel: the training scales what Pillow's conversion would clip to white.
    deep = [decoding.decode(each["train/a/deep.png"]).float() for each in (before, after)]
    assert deep[1].shape == (3, 64, 96) and abs(deep[0].mean() - deep[1].mean()) < 3
    # What cannot be read is named and counted.
    done = shrunk[1]
    assert (done.code, done.err.count("copied unchanged: ")) == (0, len(BAD))
    assert all(f": train/a/{name}: " in done.err for name in BAD)
    assert "4 images cannot be decoded" in done.out


def test_shrunk_into_shards_in_one_pass(source, shrunk, tmp_path):
    """The same bytes, messages and classes as those of a shrunk folder."""
    done = run("shrink", source, tmp_path / "out", *OPTIONS, "--shards", 1)
    assert folder_of(tmp_path / "out") == images(shrunk[0])
    assert done.code == 0 and sorted(said(done.err)) == sorted(said(shrunk[1].err))
    assert "4 images cannot be decoded" in done.out
    assert "nothing\n" in (tmp_path / "out/val/classes.txt").read_text()


def test_an_image_that_is_new_in_the_source_is_copied_by_the_next_call(tmp_path):
    command, image = ("shrink", tmp_path / "data", tmp_path / "out"), encode(picture(40, 30))
    put(tmp_path, {f"data/{split}/a/1.JPEG": image for split in ("train", "val")})
    succeed(*command)
    put(tmp_path, {"data/train/b/2.JPEG": image})
    assert "done: " in succeed(*command)
    assert images(tmp_path / "out") == images(tmp_path / "data")
    (tmp_path / "data/train/b/2.JPEG").unlink()
    said = succeed(*command)
    assert f"note: {tmp_path}/out/train has 2 images, but its source has 1\n" in said
    assert "nothing to do" in succeed(*command)


# ---- interruptions


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A folder of 360 images."""
    data = [encode(picture(800, 600, seed)) for seed in range(4)]
    folders = ("train/a", "train/b/sub", "val/a")
    files = {f"{folder}/{i:03d}.JPEG": data[i % 4] for folder in folders for i in range(120)}
    return put(tmp_path_factory.mktemp("many"), files)


def written(out):
    """When each image and each shard was written."""
    paths = [*out.rglob("*.JPEG"), *out.rglob("*.tar")]
    return {path: path.stat().st_mtime_ns for path in paths if path.name[0] != "."}


def interrupt(how, number, out, *command):
    """Interrupt a command when ``number`` more files are there; wait until all processes end."""
    before = len(written(out))
    with Running(SCRIPT, *command) as running:
        workers = []
        while len(written(out)) < before + number or len(workers) < 2:
            assert running.process.poll() is None, running.result()
            if len(workers) < 2:  # asking for them takes a while: before the first file is there
                workers = [one.pid for one in running.meet_family() if "spawn_main" in one.command]
            time.sleep(0.003)
        if how == "kill":
            running.process.kill()
        elif how == "worker":  # as the system does when memory is short
            os.kill(workers[0], signal.SIGKILL)
        else:  # a terminal sends Ctrl-C to all processes
            running.send(signal.SIGINT, group=True)
        running.process.wait(30)
        assert not wait_for_group(running.pid, 30), "processes outlive the one that started them"
        done = running.result()
    assert done.code == {"kill": -signal.SIGKILL, "worker": 2, "Ctrl-C": 130}[how]
    if how != "kill":
        (line,) = said(done.err)
        assert "same command" in line
        assert how != "worker" or "error: a worker process died" in line


@pytest.mark.parametrize(
    ("form", "ways", "number"),
    [
        pytest.param((), ("worker", "Ctrl-C"), 12, id="folder", marks=pytest.mark.long),
        pytest.param(("--shards", 1), ("kill",), 1, id="shards"),
    ],
)
def test_interrupted_again_and_again_it_still_finishes(many, tmp_path, form, ways, number):
    """At any moment only whole files have names; those of before are kept."""
    out, options = tmp_path / "out", ("--size", 150, "--quality", 95, "--workers", 2, *form)
    command, kept = ("shrink", many, out, *options), {}
    for how in ways:
        interrupt(how, number, out, *command)
        assert kept.items() <= written(out).items()
        assert not list(out.rglob("classes.txt"))
        assert "is not finished" in fail("shards", out, tmp_path / "copy")
        kept = written(out)
    for name in ("train/sub/.7f7f7f7f7f7f7f7f.tmp", "val/.8f8f8f8f8f8f8f8f.tmp"):
        put(out, {name: b"half"})
    if not form:
        put(out, {"train/b/sub/001.JPEG": b""})
        kept.pop(out / "train/b/sub/001.JPEG", None)
    succeed(*command)
    succeed("shrink", many, tmp_path / "undisturbed", *options)
    assert len(kept) < len(written(out)) and kept.items() <= written(out).items()
    assert tree(out) == tree(tmp_path / "undisturbed")
    assert not form or len([*out.glob("train/*.tar")]) == 3, "by the size of what is written"
    assert "nothing to do" in succeed(*command)


def test_full_disk_leaves_no_half_image(many, tmp_path):
    options = " ".join(map(str, OPTIONS))
    (done,) = shell(f"ulimit -f 1; python {SCRIPT} shrink {many} {tmp_path}/out {options}")
    (error,) = said(done.err)
    assert done.code == 2 and "File too large" in error and "same command" in error
    assert not written(tmp_path)


# ---- refusals


def test_folders_that_cannot_be_copied_are_refused(shrunk, tmp_path):
    begun = b'{"what": "sample", "finished": false, "counts": {}}'
    put(tmp_path, {"data/train/a/y.JPEG": encode(picture(90, 90)), "flat/train/x.JPEG": b"x"})
    put(tmp_path, {"begun/train/a/x.JPEG": b"x", "begun/.prepared.json": begun})
    put(tmp_path, {f"my own/{name}/1.jpg": b"x" for name in ("cat", "dog")})
    put(tmp_path, {"packed/train/00000.pixels": b"x"})  # not even its index was written
    (tmp_path / "data/train/a/x.JPEG").symlink_to(tmp_path / "gone")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    before, of_copy = tree(tmp_path), tree(shrunk[0])
    message = fail("shrink", tmp_path / "data", shrunk[0])
    assert f"not shrink (source {tmp_path}/data, size 256, quality 90)" in message
    assert tree(shrunk[0]) == of_copy
    for folder, out, message in (
        *(("data", out, "overlap") for out in ("data", ".", "link/small")),
        ("flat", "out", "has no images in train/CLASS/"),
        ("my own", "out", f"split '{tmp_path}/my own' --val 0.2`"),
        ("begun", "out", "is not finished"),
        ("packed", "out", "train on the images that it was made from, or make shards"),
    ):
        assert message in fail("shrink", tmp_path / folder, tmp_path / out), (folder, out)
    assert tree(tmp_path) == before and not (tmp_path / "out").exists()
    pipe = tmp_path / "flat/train/a/x.jpg"
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    message = fail("shrink", tmp_path / "flat", tmp_path / "out", "--workers", 1)
    assert f"{pipe} is a pipe or a device" in message
    shutil.rmtree(tmp_path / "out")
    message = fail("shrink", tmp_path / "data", tmp_path / "out")
    assert "data/train/a/x.JPEG: No such file" in message and "same command" in message


def test_an_archive_that_is_cut_or_whose_disk_fails(tmp_path):
    put(tmp_path, {"images.tar": b"0123456789"})
    assert Stored(str(tmp_path / "images.tar"), 4, 6)() == b"456789"
    with pytest.raises(UserError, match="truncated: get it again"):
        Stored(str(tmp_path / "images.tar"), 4, 7)()
    with pytest.raises(OSError, match=r"Input/output error: '/proc/self/mem'"):
        Stored("/proc/self/mem", 0, 7)()
