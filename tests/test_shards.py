"""`prepare_data.py shards`: tar files that training and WebDataset read, whatever interrupts it."""

import tarfile
from urllib.parse import unquote

import pytest
import webdataset
from batches import encode, picture
from PIL import Image
from preparing import fail, images, put, run, said, succeed, tree
from test_prepare_data import source  # noqa: F401  (a fixture: a folder with all oddities)

from utils.folder import class_folders, open_source

ODD_NAMES = (
    *("blank in name.JPEG", "größe-写真.jpg", "two.dots.jpeg", "100%25.png", "__meta__.jpg"),
    *("twin.jpg", "twin.png", "twin.jpeg", "line\nbreak.jpg", f"{'long' * 60}.JPEG"),
    "deep/er/x.webp",
)
CLASSES = ["__odd__", "a.b", "c d", "none"]


def members(shard):
    """Names and bytes in a tar file, in order."""
    with tarfile.open(shard) as tar:
        return [(one.name, tar.extractfile(one).read()) for one in tar]


def folder_of(out):
    """The image folder that shards hold: path -> bytes."""
    found = {}
    for shard in out.glob("*/*.tar"):
        for name, data in members(shard):
            if not name.endswith(".cls"):
                found[f"{shard.parent.name}/{unquote(name, errors='surrogateescape')}"] = data
    return found


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


def test_webdataset_reads_every_image_with_its_label(odd, tmp_path):
    out = tmp_path / "out"
    assert "train 23 images, val 11 images" in succeed("shards", odd, out, "--size", 1)
    assert folder_of(out) == images(odd)
    assert (out / "train/classes.txt").read_text().splitlines() == CLASSES
    assert (out / "train/classes.txt").read_bytes() == (out / "val/classes.txt").read_bytes()
    for split in ("train", "val"):
        shards = sorted(map(str, (out / split).glob(f"{split}-*-of-*.tar")))
        assert len(shards) > 1 and shards[0].endswith(f"{split}-00000-of-{len(shards):05d}.tar")
        read = {}
        for sample in webdataset.WebDataset(shards, shardshuffle=False):
            (data,) = (v for k, v in sample.items() if k[0] != "_" and k != "cls")
            class_name = unquote(sample["__key__"]).split("/")[0]
            assert CLASSES[int(sample["cls"])] == class_name
            assert read.setdefault(sample["__key__"], data) is data
        assert sorted(read.values()) == sorted(
            data for name, data in images(odd).items() if name.startswith(f"{split}/")
        )


def test_training_reads_the_images_of_the_folder_in_its_order(odd, tmp_path):
    """So weights are equal, too."""
    succeed("shards", odd, tmp_path / "out", "--size", 1)
    assert class_folders(tmp_path / "out/train") == class_folders(odd / "train") == CLASSES
    index, folder = (open_source(root / "train", CLASSES[:3]) for root in (tmp_path / "out", odd))
    assert index.paths == folder.paths and index.targets.tolist() == folder.targets.tolist()
    assert index.fingerprint() == folder.fingerprint()
    assert all(index.read(i) == folder.read(i) for i in range(len(folder)))


def test_shrunk_into_shards_in_one_pass(source, tmp_path):  # noqa: F811
    """The same bytes, messages and classes as those of a shrunk folder."""
    options = ("--size", 64, "--quality", 85, "--workers", 2)
    done = run("shrink", source, tmp_path / "shards", *options, "--shards", 1)
    expected = run("shrink", source, tmp_path / "folder", *options)
    assert folder_of(tmp_path / "shards") == images(tmp_path / "folder")
    assert done.code == 0 and sorted(said(done.err)) == sorted(said(expected.err))
    assert "4 images cannot be decoded" in done.out
    assert "nothing\n" in (tmp_path / "shards/val/classes.txt").read_text()


def test_a_shard_that_is_lost_is_written_again_and_a_new_image_is_refused(tmp_path):
    names = [f"{c}/{i:02d}.jpg" for c in "ab" for i in range(15)]
    put(tmp_path / "data/train", dict.fromkeys(names, b"x" * 90_000))
    command = ("shards", tmp_path / "data", tmp_path / "out", "--size", 1, "--workers", 2)
    succeed(*command)
    shards, before = sorted((tmp_path / "out/train").glob("*.tar")), tree(tmp_path / "out")
    order = [name for shard in shards for name, _ in members(shard) if name.endswith(".jpg")]
    assert order == names
    succeed("imagenet", tmp_path / "back", "--source", tmp_path / "out")
    assert images(tmp_path / "back") == images(tmp_path / "data")
    shards[1].unlink()
    assert "done" in succeed(*command)
    assert "nothing to do" in succeed(*command)
    assert tree(tmp_path / "out") == before
    put(tmp_path / "data/train", {"a/new.jpg": b"x"})
    assert "choose another folder" in fail(*command)


def test_images_that_differ_in_case_of_the_suffix_are_kept_apart(tmp_path):
    sizes = {"x.jpg": 30, "x.JPG": 31, "y.png": 32, "y.jpg": 33}
    files = {name: encode(picture(40, size)) for name, size in sizes.items()}
    put(tmp_path / "data/train/a", files)
    succeed("shards", tmp_path / "data", tmp_path / "out")
    assert folder_of(tmp_path / "out") == images(tmp_path / "data")
    (shard,) = (tmp_path / "out").rglob("*.tar")
    samples = list(webdataset.WebDataset(str(shard), shardshuffle=False).decode("pil"))
    assert len(samples) == 4 and {sample["cls"] for sample in samples} == {0}
    assert isinstance(samples[0]["jpg"], Image.Image)
    put(tmp_path / "data/train/a", {"x.jpeg": b"x"})
    assert "rename one of them" in fail("shards", tmp_path / "data", tmp_path / "third")
    put(tmp_path / "data/train", {"two\nlines/x.jpg": b"x"})
    assert "rename its folder" in fail("shards", tmp_path / "data", tmp_path / "lines")
