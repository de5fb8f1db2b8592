"""Training from tar files: the images, their order, the kept index, and archives that lie."""

import json
import os
from pathlib import Path

import pytest
from joined import Job, run_jobs
from preparing import devkit_bytes, put, tar_bytes
from running import assert_same_weights

from utils.errors import UserError
from utils.folder import check_same_classes, class_folders, has_part, open_source

TENCH, GOLDFISH = "n01440764", "n01443537"


def images(folder, part="train"):
    """Each image of a folder: (class, name, bytes)."""
    paths = sorted((folder / part).glob("*/*.JPEG"))
    return [(path.parent.name, path.name, path.read_bytes()) for path in paths]


def by_class(folder, part):
    """class: [(name, bytes)]"""
    classes = {}
    for label, name, data in images(folder, part):
        classes.setdefault(label, []).append((name, data))
    return classes


# ---- the layouts: files of one part of `folder`, path: bytes


def of_folders(folder, part):
    """As `tar cf train.tar train` does."""
    return {
        f"{part}.tar": tar_bytes([(f"./{part}/{c}/{n}", d) for c, n, d in images(folder, part)])
    }


def nested(folder, part):
    """As image-net.org's training images come."""
    classes = by_class(folder, part).items()
    return {f"{part}.tar": tar_bytes([(f"{c}.tar", tar_bytes(files)) for c, files in classes])}


def a_tar_a_class(folder, part):
    return {f"{part}/{c}.tar": tar_bytes(files) for c, files in by_class(folder, part).items()}


def samples(folder, part, label):
    """The members of WebDataset's shards, two classes in turn; ``label(class number)``: a file."""
    found = []
    for c, name, data in sorted(images(folder, part), key=lambda one: one[1]):
        suffix, text = label(int(c[-1]))
        found += [(f"{c}-{name}", data), (f"{c}-{name.removesuffix('.JPEG')}.{suffix}", text)]
    return found


def shards(folder, part):
    members = samples(folder, part, lambda number: ("cls", b"%d" % number))
    names = (f"{part}/{part}-{i:05d}-of-00003.tar" for i in range(3))
    return {name: tar_bytes(members[i * 40 : i * 40 + 40]) for i, name in enumerate(names)} | {
        "classes.txt": b"class_0\nclass_1\nclass_2\n"
    }


def documents(folder, part):
    """Shards in DATA itself, as timm/imagenet-1k-wds has them."""
    members = samples(folder, part, lambda n: ("json", json.dumps({"label": n}).encode()))
    name = {"train": "imagenet1k-train-{:04}.tar", "val": "imagenet1k-validation-{:02}.tar"}[part]
    return {name.format(i): tar_bytes(members[i * 80 : i * 80 + 80]) for i in range(2)}


LAYOUTS = (of_folders, nested, a_tar_a_class, shards, documents)


def make(layout, folder, out):
    """A data set of tar files, written an hour ago."""
    for part in ("train", "val"):
        put(out, layout(folder, part))
    age(out)
    return out


def age(folder):
    """What has just changed may change again unnoticed: its index would not be kept."""
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (1.7e9, 1.7e9))


def source(data, part="train", classes=None):
    return open_source(data / part, classes or class_folders(data / part))


def contents(index):
    return [index.read(i) for i in range(len(index))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_and_their_order_are_those_of_the_folder(folder, tmp_path, layout):
    data = make(layout, folder, tmp_path)
    for part in ("train", "val"):
        for _ in ("indexed", "from the cache"):
            one, other = source(folder, part), source(data, part)
            assert contents(one) == contents(other)
            assert (one.targets == other.targets).all()
            path, start, size = other.stored(5)
            assert Path(path).read_bytes()[start : start + size] == other.read(5)
            assert other.path(5).startswith(f"{path}/") and other.path(5).endswith(".JPEG")
    classes = ["00000", "00001", "00002"] if layout is documents else source(folder).classes
    check_same_classes(data, "val", classes, subset=False)
    if layout in (of_folders, nested, a_tar_a_class):
        assert one.paths == other.paths and one.fingerprint() == other.fingerprint()
    some = source(data, classes=[classes[2], classes[0]])
    assert contents(some) == contents(source(folder, classes=["class_2", "class_0"]))
    assert some.targets.tolist() == [0] * 20 + [1] * 20


@pytest.fixture
def originals(folder, tmp_path):
    """image-net.org's files in miniature, among other downloads; and the same images, extracted."""
    train, val = by_class(folder, "train"), images(folder, "val")[:14]
    labels = [TENCH if label == "class_0" else GOLDFISH for label, _, _ in val]
    names = [f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, 15)]
    inner = {TENCH: train["class_0"], GOLDFISH: train["class_1"]}
    flat = [(name, data) for name, (_, _, data) in zip(names, val, strict=True)]
    put(
        tmp_path / "Downloads",
        {
            "ILSVRC2012_img_train.tar": nested_bytes(inner),
            "ILSVRC2012_img_val.tar": tar_bytes(flat),
            "ILSVRC2012_devkit_t12.tar.gz": devkit_bytes([2] * 7 + [1] * 7),
            "ILSVRC2012_img_test_v10102019.tar": tar_bytes([("test/1.JPEG", b"no class")]),
            "ILSVRC2012_img_train_t3.tar": b"another task",
            "my_train.tar": b"something else",
        },
    )
    extracted = {f"train/{c}/{n}": data for c, files in inner.items() for n, data in files}
    extracted |= {
        f"val/{label}/{name}": data for label, (name, data) in zip(labels, flat, strict=True)
    }
    return tmp_path / "Downloads", put(tmp_path / "extracted", extracted)


def nested_bytes(classes):
    return tar_bytes([(f"{name}.tar", tar_bytes(files)) for name, files in classes.items()])


def test_the_original_files(originals):
    downloads, extracted = originals
    assert not has_part(downloads / "test")
    for part in ("train", "val"):
        one, other = source(extracted, part), source(downloads, part)
        assert one.paths == other.paths and contents(one) == contents(other)
    (downloads / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    with pytest.raises(UserError, match=r"classes of the validation images are not known: neither"):
        source(downloads, "val")


def line(data, place, name, *more):
    options = ("-a", "tiny_plain", "--image-size", 32, "-j", 1, "--epochs", 2, "--lr", 0.05)
    return (*options, "--output-dir", place, "--name", name, "--resume", "auto", *more, data)


def test_weights_are_those_of_the_folder_bit_for_bit(folder, originals, tmp_path):
    """On one process and on two, stopped in the middle of an epoch and resumed."""
    data = make(shards, folder, tmp_path / "data")
    jobs = [Job("imagenet_nd", line(d, tmp_path, f"nd_{d.name}", "-b", 5), 1) for d in originals]
    two = [
        Job("imagenet_ddp", line(d, tmp_path, f"ddp_{n}", "-b", 5), stop_after=stop)
        for d, n, stop in ((folder, "folder", 0), (data, "data", 4))
    ]
    run_jobs([*jobs, *two], tmp_path)
    run_jobs([Job("imagenet_ddp", two[1].options)], tmp_path)
    assert_same_weights(tmp_path / "nd_Downloads", tmp_path / "nd_extracted")
    assert_same_weights(tmp_path / "ddp_folder", tmp_path / "ddp_data")
