"""`prepare_data.py shards`: tar files that training and WebDataset read, whatever interrupts it."""

from urllib.parse import unquote

import pytest
import webdataset
from batches import encode, picture
from PIL import Image
from preparing import fail, folder_of, images, members, put, succeed, tree

from utils.data.opening import class_folders, open_source

ODD_NAMES = (
    *("blank in name.JPEG", "größe-写真.jpg", "two.dots.jpeg", "100%25.png", "__meta__.jpg"),
    *("twin.jpg", "twin.png", "twin.jpeg", "line\nbreak.jpg", f"{'long' * 60}.JPEG"),
    "deep/er/x.webp",
)
CLASSES = ["__odd__", "a.b", "c d", "none"]


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Few bytes for each image: shards copy what they do not understand."""
    folder = tmp_path_factory.mktemp("odd") / "data"
    for split, class_name in (("train", "__odd__"), ("train", "a.b"), ("val", "c d")):
        files = {name: f"{class_name}/{name}".encode() * 3999 for name in ODD_NAMES}
        put(folder / split / class_name, files)
    put(folder / "train" / "c d", {b"\xff.jpg".decode("utf-8", "surrogateescape"): b"x"})
    for class_name in CLASSES:
        (folder / "train" / class_name).mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def shards(odd, tmp_path_factory):
    out = tmp_path_factory.mktemp("shards") / "out"
    assert "train 23 images, val 11 images" in succeed("shards", odd, out, "--size", 1)
    return out


def test_webdataset_reads_every_image_with_its_label(odd, shards):
    assert folder_of(shards) == images(odd)
    assert (shards / "train/classes.txt").read_text().splitlines() == CLASSES
    assert (shards / "val/classes.txt").read_text().splitlines() == CLASSES
    for split in ("train", "val"):
        paths = sorted(map(str, (shards / split).glob(f"{split}-*-of-*.tar")))
        assert len(paths) > 1 and paths[0].endswith(f"{split}-00000-of-{len(paths):05d}.tar")
        read = {}
        for sample in webdataset.WebDataset(paths, shardshuffle=False):
            (data,) = (v for k, v in sample.items() if k[0] != "_" and k != "cls")
            class_name = unquote(sample["__key__"]).split("/")[0]
            assert CLASSES[int(sample["cls"])] == class_name
            assert read.setdefault(sample["__key__"], data) is data
        assert sorted(read.values()) == sorted(
            data for name, data in images(odd).items() if name.startswith(f"{split}/")
        )


def test_training_reads_the_images_of_the_folder_in_its_order(odd, shards):
    """So weights are equal, too."""
    assert class_folders(shards / "train") == class_folders(odd / "train") == CLASSES
    index, folder = (open_source(root / "train", CLASSES[:3]) for root in (shards, odd))
    assert index.paths == folder.paths and index.targets.tolist() == folder.targets.tolist()
    assert index.fingerprint() == folder.fingerprint()
    assert all(index.read(i) == folder.read(i) for i in range(len(folder)))


def test_small_images_make_no_larger_shards(tmp_path):
    """Headers, labels and padding take more room than they do."""
    put(tmp_path / "data/train", {f"a/{i}.jpg": b"x" for i in range(600)})
    succeed("shards", tmp_path / "data", tmp_path / "out", "--size", 1)
    sizes = [path.stat().st_size for path in (tmp_path / "out").rglob("*.tar")]
    assert len(sizes) == 2 and max(sizes) < 1.02e6


def test_shards_are_copied_with_a_class_that_has_no_images(shards, tmp_path):
    succeed("shards", shards, tmp_path / "out", "--size", 1)
    assert folder_of(tmp_path / "out") == folder_of(shards)
    assert (tmp_path / "out/train/classes.txt").read_text().splitlines() == CLASSES


def test_a_shard_that_is_lost_is_written_again_and_a_new_image_is_refused(tmp_path):
    names = [f"{c}/{i:02d}.jpg" for c in "ab" for i in range(15)]
    put(tmp_path / "data/train", dict.fromkeys(names, b"x" * 90_000))
    put(tmp_path / "data/val", {f"{c}/1.jpg": c.encode() for c in "ab"})
    command = ("shards", tmp_path / "data", tmp_path / "out", "--size", 1, "--workers", 2)
    succeed(*command)
    paths, before = sorted((tmp_path / "out/train").glob("*.tar")), tree(tmp_path / "out")
    order = [name for path in paths for name, _ in members(path) if name.endswith(".jpg")]
    assert order == names
    succeed("imagenet", tmp_path / "back", "--source", tmp_path / "out")
    assert images(tmp_path / "back") == images(tmp_path / "data")
    paths[1].unlink()
    assert "done" in succeed(*command)
    assert "nothing to do" in succeed(*command)
    message = fail("shards", tmp_path / "data", tmp_path / "out", "--size", 2)
    assert "choose another folder" in message, "its shards would stand beside these"
    assert tree(tmp_path / "out") == before
    for new in ("train/a/new.jpg", "val/b/new.jpg"):
        put(tmp_path / "data", {new: b"x"})
        assert "choose another folder" in fail(*command)
        (tmp_path / "data" / new).unlink()


def test_images_that_differ_in_case_of_the_suffix_are_kept_apart(tmp_path):
    sizes = {"x.jpg": 30, "x.JPG": 31, "y.png": 32, "y.jpg": 33}
    files = {name: encode(picture(40, size)) for name, size in sizes.items()}
    put(tmp_path / "data/train/a", files)
    put(tmp_path / "data/val", {"only in val/1.jpg": b"val"})
    succeed("shards", tmp_path / "data", tmp_path / "out")
    assert folder_of(tmp_path / "out") == images(tmp_path / "data")
    (shard,) = (tmp_path / "out/train").glob("*.tar")
    samples = list(webdataset.WebDataset(str(shard), shardshuffle=False).decode("pil"))
    assert len(samples) == 4 and {sample["cls"] for sample in samples} == {0}
    assert isinstance(samples[0]["jpg"], Image.Image)
    put(tmp_path / "data/train/a", {"x.jpeg": b"x"})
    assert "rename one of them" in fail("shards", tmp_path / "data", tmp_path / "third")
    put(tmp_path / "data/train", {"two\nlines/x.jpg": b"x"})
    assert "rename its folder" in fail("shards", tmp_path / "data", tmp_path / "lines")
