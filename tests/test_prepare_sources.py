"""`prepare_data.py` with miniatures of Fashion-MNIST, CIFAR-10 and ImageNet."""

import gzip
import os
import pickle
import shutil
import struct

import numpy as np
import pytest
from PIL import Image
from preparing import devkit_bytes, fail, images, put, succeed, tar_bytes, times, tree
from torchvision import datasets

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


@pytest.fixture
def no_sums(monkeypatch):
    """Miniature archives pass for the published ones."""
    for module in (datasets.cifar, datasets.imagenet, datasets.utils):
        monkeypatch.setattr(module, "check_integrity", lambda path, md5=None: os.path.isfile(path))


# ---- Fashion-MNIST


def idx(array):
    """An array as a file of Fashion-MNIST."""
    return struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


def test_fashion_mnist(no_sums, tmp_path):
    out, source, numbers = tmp_path / "out", tmp_path / "source", np.random.default_rng(0)
    arrays = {}
    for prefix, split, count in (("train", "train", 20), ("t10k", "val", 10)):
        arrays[split] = numbers.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        put(source, {f"{prefix}-images-idx3-ubyte": idx(arrays[split])})
        labels = gzip.compress(idx(np.arange(count, dtype=np.uint8) % 10))
        put(source, {f"{prefix}-labels-idx1-ubyte.gz": labels})
    succeed("fashion-mnist", out, "--source", source)
    assert len(images(out)) == 30
    for split in arrays:
        folders = sorted(os.listdir(out / split))
        assert folders == [f"{i}_{name}" for i, name in enumerate(CLOTHES)]
        for number, pixels in enumerate(arrays[split]):
            with Image.open(out / split / folders[number % 10] / f"{number:05d}.png") as image:
                assert image.mode == "L" and np.array_equal(np.asarray(image), pixels)
    # Damaged ones are named, and missing ones.
    damaged = source / "t10k-images-idx3-ubyte"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    command = ("fashion-mnist", tmp_path / "new", "--source", source)
    assert f"cannot read {source}" in fail(*command)
    damaged.unlink()
    assert f"neither {damaged.name} nor {damaged.name}.gz is in {source}" in fail(*command)


# ---- CIFAR-10


def test_cifar10(request, tmp_path):
    numbers, pixels = np.random.default_rng(0), {}
    files = {"batches.meta": pickle.dumps({"label_names": list("abcdefghij")})}
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        pixels[name] = numbers.integers(0, 256, (10, 3072), dtype=np.uint8)
        files[name] = pickle.dumps({"data": pixels[name], "labels": list(range(10))})
    members = [(f"cifar-10-batches-py/{name}", data) for name, data in files.items()]
    put(tmp_path, {"archive/cifar-10-python.tar.gz": tar_bytes(members, "w:gz")})
    archive, out = tmp_path / "archive" / "cifar-10-python.tar.gz", tmp_path / "out"
    # By its MD5 sum it is not the published one: it is not opened, as a pickle can run anything.
    assert f"{archive} is not the published file" in fail("cifar10", out, "--source", archive)
    assert not out.exists()
    request.getfixturevalue("no_sums")
    succeed("cifar10", out, "--source", archive.parent)
    expected = np.concatenate(list(pixels.values())).reshape(-1, 3, 32, 32)
    for number, channels in enumerate(expected):
        split, i = ("train", number) if number < 50 else ("val", number - 50)
        label = "abcdefghij"[number % 10]
        with Image.open(out / split / label / f"{i:05d}.png") as image:
            assert np.array_equal(np.asarray(image), channels.transpose(1, 2, 0))


# ---- ImageNet


def content(name):
    """Bytes that stand for an image, and that no other has."""
    return name.encode() * 99


def tar_of(names):
    return tar_bytes([(name, content(name)) for name in names])


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


@pytest.fixture
def archives(tmp_path):
    train = tar_bytes([(f"{label}.tar", tar_of(names)) for label, names in TRAIN.items()])
    return put(tmp_path / "source", {TRAIN_TAR: train, VAL_TAR: tar_of(VAL[:3]), CSV: solution()})


@pytest.fixture
def kaggle(tmp_path):
    """Kaggle's archive, unpacked; its validation images lie flat."""
    files = {CSV: solution()}
    for path, data in expected().items():
        split, _, name = path.split("/")
        files[f"{KAGGLE}/{path if split == 'train' else f'val/{name}'}"] = data
    return put(tmp_path / "source", files)


@pytest.mark.parametrize("layout", ["archives", "kaggle"])
def test_every_image_lands_in_its_class(no_sums, request, tmp_path, layout):
    source, out = request.getfixturevalue(layout), tmp_path / "out"
    succeed("imagenet", out, "--source", source)
    assert images(out) == expected() and tree(out).keys() - images(out).keys() == {".prepared.json"}
    if layout == "kaggle":
        name = f"train/{TENCH}/{TENCH}_1.JPEG"
        assert (out / name).samefile(source / KAGGLE / name)
    before = times(out)
    shutil.rmtree(source)
    succeed("imagenet", out, "--source", source)
    assert times(out) == before


def test_the_devkit_gives_the_classes(no_sums, archives, tmp_path):
    """Its table has a node above the classes; its rows are in no order."""
    put(archives, {DEVKIT: devkit_bytes([1, 2, 2])})
    (archives / CSV).unlink()
    succeed("imagenet", tmp_path / "out", "--source", archives)
    assert images(tmp_path / "out") == expected()
    put(archives, {DEVKIT: devkit_bytes([1, 2, 2])[:300]})
    assert f"cannot read {archives / DEVKIT} (" in fail(
        "imagenet", tmp_path / "again", "--source", archives
    )


def test_archives_may_come_one_after_the_other_and_a_cut_one_is_named(no_sums, archives, tmp_path):
    out, whole = tmp_path / "out", (archives / TRAIN_TAR).read_bytes()
    command = ("imagenet", out, "--source", archives)
    (archives / VAL_TAR).rename(tmp_path / "later")
    (archives / TRAIN_TAR).write_bytes(whole[: len(whole) // 2])
    assert TRAIN_TAR in fail(*command)
    assert images(out).items() <= expected().items()
    (archives / TRAIN_TAR).write_bytes(whole)
    succeed(*command)
    assert images(out) == {k: v for k, v in expected().items() if k.startswith("train")}
    (archives / TRAIN_TAR).unlink()
    (tmp_path / "later").rename(archives / VAL_TAR)
    succeed(*command)
    assert images(out) == expected()


def test_nothing_is_written_outside_the_folder(no_sums, archives, tmp_path):
    """A list of classes, or an archive, names a place further up."""
    out = tmp_path / "deep/er/out"
    before = tree(archives)
    put(archives, {CSV: solution(["../../../../x", TENCH, TENCH])})
    command = ("imagenet", out, "--source", archives)
    assert "is no place in" in fail(*command)
    put(archives, before | {TRAIN_TAR: tar_bytes([("...tar", tar_of(["x.JPEG"]))])})
    assert "'train/../x.JPEG'" in fail("imagenet", tmp_path / "a/b", "--source", archives)
    assert not list(tmp_path.rglob("x")) + list(tmp_path.rglob("x.JPEG"))


def test_wrong_labels_and_archives_are_refused(request, archives, tmp_path):
    out = tmp_path / "out"
    message = fail("imagenet", out, "--source", tmp_path / "missing")
    assert f"neither {TRAIN_TAR} nor {VAL_TAR} nor the folder {KAGGLE} is in" in message
    assert not out.exists()
    for name in (TRAIN_TAR, VAL_TAR):
        assert f"{name} is not the published file" in fail("imagenet", out, "--source", archives)
        assert not images(out)
        (archives / name).unlink()
    request.getfixturevalue("no_sums")
    put(archives, {VAL_TAR: tar_of(VAL[:3])})
    for labels, message in (
        (solution(VAL_CLASSES[:2]), f"holds {VAL[2]}, which the list of classes"),
        (solution([*VAL_CLASSES, TENCH]), f"lacks 1 of the images, such as {VAL[3]}"),
    ):
        put(archives, {CSV: labels})
        assert message in fail("imagenet", out, "--source", archives)
    (archives / CSV).unlink()
    message = fail("imagenet", out, "--source", archives)
    assert "the classes of the validation images are not known: neither" in message
