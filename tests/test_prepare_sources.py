"""`prepare_data.py` with miniatures of Fashion-MNIST, CIFAR-10 and ImageNet."""

import codecs
import gzip
import os
import pickle
import re
import shlex
import shutil
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from conftest import shell
from PIL import Image
from preparing import devkit_bytes, fail, folder_of, images, put, succeed, tar_bytes, times, tree
from torchvision import datasets

from utils.data.opening import check_parts
from utils.start.errors import UserError

TRAIN_TAR, VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
CSV, DEVKIT = "LOC_val_solution.csv", "ILSVRC2012_devkit_t12.tar.gz"
KAGGLE = "ILSVRC/Data/CLS-LOC"
TENCH, GOLDFISH = "n01440764", "n01443537"
TRAIN = {label: [f"{label}_{i}.JPEG" for i in range(1, 6)] for label in (GOLDFISH, TENCH)}
VAL = [f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, 5)]
VAL_CLASSES = [GOLDFISH, TENCH, TENCH]  # the last image is in no archive
CLOTHES = (
    *("tshirt_top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle_boot"),
)


# ---- Fashion-MNIST and CIFAR-10


def idx(array):
    """An array as a file of Fashion-MNIST."""
    return struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


def test_fashion_mnist(tmp_path):
    out, source, numbers = tmp_path / "out", tmp_path / "source", np.random.default_rng(0)
    arrays = {}
    for prefix, split, count in (("train", "train", 20), ("t10k", "val", 10)):
        arrays[split] = numbers.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = gzip.compress(idx(np.arange(count, dtype=np.uint8) % 10))
        put(source, {f"{prefix}-images-idx3-ubyte": idx(arrays[split])})
        put(source, {f"{prefix}-labels-idx1-ubyte.gz": labels})
    succeed("fashion-mnist", out, "--source", source)
    assert len(images(out)) == 30
    for split, array in arrays.items():
        for number, pixels in enumerate(array):
            folder = f"{number % 10}_{CLOTHES[number % 10]}"
            with Image.open(out / split / folder / f"{number:05d}.png") as image:
                assert image.mode == "L" and np.array_equal(np.asarray(image), pixels)
    # Damaged files are named, and missing ones.
    pixels, labels = source / "t10k-images-idx3-ubyte", source / "t10k-labels-idx1-ubyte.gz"
    command = ("fashion-mnist", tmp_path / "new", "--source", source)
    for path, data, message in (
        (labels, gzip.compress(b""), f"cannot read {labels}"),
        (labels, gzip.compress(idx(np.zeros(9, np.uint8))), f"cannot read {source}"),
        (pixels, pixels.read_bytes()[:-1], f"cannot read {pixels}"),
    ):
        path.write_bytes(data)
        assert message in fail(*command)
    pixels.unlink()
    assert f"neither {pixels.name} nor {pixels.name}.gz is in {source}" in fail(*command)


@pytest.mark.parametrize(
    ("command", "reader", "file"),
    [
        ("fashion-mnist", "FashionMNIST", "the four .gz files of github.com/zalandoresearch/"),
        ("cifar10", "CIFAR10", "download cifar-10-python.tar.gz from www.cs.toronto.edu"),
    ],
)
def test_without_internet_it_says_how_to_get_the_data(monkeypatch, tmp_path, command, reader, file):
    def download(*_, **__):
        raise OSError("Name or service not known")

    monkeypatch.setattr(datasets, reader, download)
    monkeypatch.setattr("prepare.sources.DEBIAN_FASHION", tmp_path / "none")
    if reader == "CIFAR10":
        download.tgz_md5 = ""
    line = fail(command, tmp_path / "out")
    assert "from the internet (Name or service not known)" in line
    assert file in line and "--source F" in line


def test_cifar10(monkeypatch, tmp_path):
    numbers, pixels = np.random.default_rng(0), {}
    files = {"batches.meta": pickle.dumps({"label_names": list("abcdefghij")})}
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        pixels[name] = numbers.integers(0, 256, (10, 3072), dtype=np.uint8)
        files[name] = pickle.dumps({"data": pixels[name], "labels": list(range(10))})
    members = [(f"cifar-10-batches-py/{name}", data) for name, data in files.items()]
    put(tmp_path, {"archive/cifar-10-python.tar.gz": tar_bytes(members, "w:gz")})
    archive, out = tmp_path / "archive" / "cifar-10-python.tar.gz", tmp_path / "out"
    # Its MD5 sum is wrong: it is not opened, as a pickle can run anything.
    assert f"{archive} is not the published file" in fail("cifar10", out, "--source", archive)
    assert not out.exists()
    for module in (datasets.cifar, datasets.utils):  # now it passes for the published one
        monkeypatch.setattr(module, "check_integrity", lambda path, md5=None: os.path.isfile(path))
    succeed("cifar10", out, "--source", archive.parent)
    expected = np.concatenate(list(pixels.values())).reshape(-1, 3, 32, 32)
    for number, channels in enumerate(expected):
        split, i = ("train", number) if number < 50 else ("val", number - 50)
        with Image.open(out / split / "abcdefghij"[number % 10] / f"{i:05d}.png") as image:
            assert np.array_equal(np.asarray(image), channels.transpose(1, 2, 0))


# ---- ImageNet


def content(name):
    """Bytes that stand for an image, and that no other has."""
    return name.encode() * 99


def solution(classes=VAL_CLASSES):
    """Kaggle's table: each image with its boxes, in no certain order."""
    rows = [
        f"{name.removesuffix('.JPEG')},{label} 1 2 30 40 {label} 5 6 70 80 "
        for name, label in zip(VAL, classes, strict=False)
    ]
    return "\n".join(["ImageId,PredictionString", *reversed(rows), ""]).encode()


def expected():
    """The images that must come out: path -> bytes."""
    train = [f"train/{label}/{name}" for label, names in TRAIN.items() for name in names]
    val = [f"val/{label}/{name}" for label, name in zip(VAL_CLASSES, VAL, strict=False)]
    return {path: content(path.rpartition("/")[2]) for path in (*train, *val)}


def make(layout, folder):
    """Write the images in one of the published layouts; returns ``folder``."""
    if layout == "archives":

        def tar_of(names):
            return tar_bytes([(name, content(name)) for name in names])

        train = tar_bytes([(f"{label}.tar", tar_of(names)) for label, names in TRAIN.items()])
        return put(folder, {TRAIN_TAR: train, VAL_TAR: tar_of(VAL[:3]), CSV: solution()})
    files = {}
    for path, data in expected().items():
        split, label, name = path.split("/")
        if layout == "imagenet100":
            part = {GOLDFISH: "train.X4", TENCH: "train.X1"}[label] if split == "train" else "val.X"
            files[f"{part}/{label}/{name}"] = data
        else:
            root = "" if layout == "flat" else f"{KAGGLE}/"
            flat = split == "val" and layout != "kaggle_sorted"
            files[f"{root}{f'val/{name}' if flat else path}"] = data
    more = {
        "kaggle": {CSV: codecs.BOM_UTF8 + solution()},  # as an editor writes it
        "kaggle_sorted": {CSV: b""},  # with folders for the classes of val
        "imagenet100": {"Labels.json": b"{}"},
        "flat": {
            DEVKIT: devkit_bytes([1, 2, 2]),
            "test/ILSVRC2012_test_1.JPEG": b"x",
            f"val/._{VAL[0]}": b"macOS",
            "val/@eaDir/x": b"of a network disk",
        },
    }
    return put(folder, files | more[layout])


@pytest.mark.parametrize("layout", ["archives", "kaggle", "kaggle_sorted", "imagenet100", "flat"])
def test_every_image_lands_in_its_class(tmp_path, monkeypatch, layout):
    source, out = make(layout, tmp_path / "source"), tmp_path / "out"
    monkeypatch.setenv("HOME", str(tmp_path))
    if layout == "flat":  # an image may be a link, which leads nowhere from another folder
        image = source / f"train/{TENCH}/{TRAIN[TENCH][0]}"
        (source / "aside").mkdir()
        image.rename(source / "aside" / image.name)
        image.symlink_to(f"../../aside/{image.name}")
    succeed("imagenet", out, "--source", source)
    assert images(out) == expected() and tree(out).keys() - images(out).keys() == {".prepared.json"}
    if layout != "archives":  # hard links: no second copy
        files = {path.stat().st_ino for path in source.rglob("*.JPEG")}
        assert {(out / name).stat().st_ino for name in expected()} <= files
    succeed("shards", "~/source", "~/shards")
    assert "no folder ~nobody-here/x" in fail("split", "~nobody-here/x", "--val", 0.2)
    assert folder_of(tmp_path / "shards") == expected()
    before = times(out)
    shutil.rmtree(source)
    succeed("imagenet", out, "--source", "~/source")
    assert "choose another folder" in fail("imagenet", out, "--source", tmp_path / "other")
    assert times(out) == before


@pytest.mark.parametrize("layout", ["kaggle", "imagenet100", "flat"])
def test_training_names_the_command_that_works(tmp_path, layout):
    data = make(layout, tmp_path / "it's $HOME; data")
    with pytest.raises(UserError) as error:
        check_parts(data, ("train", "val"))
    command, out = re.search(r"run `(.*)`, and train on (.*)$", str(error.value)).groups()
    assert str(data) in out and "scripts/prepare_data.py imagenet" in command
    if layout == "kaggle":
        (prepared,) = shell(command)
        assert prepared.code == 0, prepared
    else:
        succeed(*shlex.split(command)[2:])
    assert images(Path(out)) == expected()


def test_training_says_which_file_has_the_classes(tmp_path):
    data = make("flat", tmp_path / "data")
    (data / DEVKIT).unlink()
    with pytest.raises(UserError, match=f"put {CSV} or {DEVKIT} .*, then run"):
        check_parts(data, ["val"])
    inside = make("kaggle", tmp_path / "kaggle") / KAGGLE  # the table is three folders above
    with pytest.raises(UserError, match="without class folders: run"):
        check_parts(inside, ["val"])


def test_on_another_file_system_links_are_symbolic(tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        if os.stat(memory).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("/dev/shm is not another file system")
        out = Path(memory, "out")
        succeed("imagenet", out, "--source", make("kaggle", tmp_path / "source"))
        assert images(out) == expected()
        assert all((out / name).is_symlink() for name in expected())


def test_archives_may_come_one_after_the_other_and_a_cut_one_is_named(tmp_path):
    """The devkit's table has a node above the classes; its rows are in no order."""
    source, out = make("archives", tmp_path / "source"), tmp_path / "out"
    (source / CSV).unlink()
    put(source, {DEVKIT: devkit_bytes([1, 2, 2])})
    command, archive = ("imagenet", out, "--source", source), (source / TRAIN_TAR).read_bytes()
    (source / VAL_TAR).rename(tmp_path / "later")
    put(source, {TRAIN_TAR: archive[: len(archive) // 2]})
    assert TRAIN_TAR in fail(*command)
    assert not out.exists()
    put(source, {TRAIN_TAR: archive})
    assert "left out: val" in succeed(*command)
    assert images(out) == {k: v for k, v in expected().items() if k.startswith("train")}
    (source / TRAIN_TAR).unlink()
    (tmp_path / "later").rename(source / VAL_TAR)
    put(source, {DEVKIT: devkit_bytes([1, 2, 2])[:300]})
    assert f"cannot read {source / DEVKIT} (" in fail(*command)
    put(source, {DEVKIT: devkit_bytes([1, 2, 2])})
    succeed(*command)
    assert images(out) == expected()


@pytest.mark.parametrize(("command", "layout"), [("imagenet", "flat"), ("shards", "archives")])
def test_nothing_is_written_outside_the_folder(tmp_path, command, layout):
    """A list of classes names a place further up, or an absolute one."""
    source = make(layout, tmp_path / "source")
    for number, bad in enumerate(("../../../../x", f"{tmp_path}/x", ".")):
        out = tmp_path / f"deep/er/out{number}"
        put(source, {CSV: solution([bad, TENCH, TENCH])})
        words = (out, "--source", source) if command == "imagenet" else (source, out)
        assert "would be outside" in fail(command, *words)
    assert not (tmp_path / "x").exists() and not list(tmp_path.rglob("deep/**/x"))


def test_wrong_labels_are_refused(tmp_path):
    source, out = make("flat", tmp_path / "source"), tmp_path / "out"
    parts = make("imagenet100", tmp_path / "parts")
    put(parts, {f"train.X2/{TENCH}/{TRAIN[TENCH][0]}": b"another image"})
    for folder, labels, message in (
        (tmp_path / "missing", None, f"there is no folder {tmp_path}/missing"),
        (parts, None, f"{TENCH}_1.JPEG is in {parts}/train.X2 and "),
        (source, solution(VAL_CLASSES[:2]), f"holds {VAL[2]}, which is not in the list"),
        (source, solution([*VAL_CLASSES, TENCH]), f"lacks 1 of the images, such as {VAL[3]}"),
    ):
        put(tmp_path, {f"source/{CSV}": labels} if labels else {})
        assert message in fail("imagenet", out, "--source", folder)
        assert not out.exists()
