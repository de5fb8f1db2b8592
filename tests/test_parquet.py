"""`prepare_data.py parquet`: made-up files with the schema of Hugging Face's ILSVRC/imagenet-1k."""

import json
import re
import shlex
import sys

import pyarrow
import pytest
import webdataset
from preparing import fail, folder_of, images, put, succeed
from pyarrow import parquet

from utils.data.opening import class_folders
from utils.start.errors import UserError

WORDNET = ("n01440764", "n01443537", "n02012849", "n03126707")
# As in ImageNet: the names of two classes are equal.
NAMES = ["tench, Tinca tinca", "goldfish", "crane", "crane"]
IMAGE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])


def write(path, rows, names=NAMES, group=2, label="label"):
    """A parquet file of (bytes, path, label); if that is called label, with another number."""
    info = {"info": {"features": {label: {"names": names, "_type": "ClassLabel"}}}}
    numbers = ("height", label) if label == "label" else (label,)
    schema = pyarrow.schema([("image", IMAGE), *((name, pyarrow.int64()) for name in numbers)])
    if names:
        schema = schema.with_metadata({"huggingface": json.dumps(info)})
    data = [{"image": {"bytes": b, "path": p}, label: number} for b, p, number in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(data, schema)
    parquet.write_table(table, path, row_group_size=group)


@pytest.fixture
def hub(tmp_path):
    """Five training files, whose rows are shuffled, and two of validation; the expected folder."""
    expected, folder = {}, tmp_path / "hub"
    for split, part, files in (("train", "train", 5), ("validation", "val", 2)):
        for number in range(files):
            rows = []
            for i in range(7):
                label = (i * 5 + number) % 4
                start = "ILSVRC2012_val" if part == "val" else WORDNET[label]
                name = f"{start}_{number}{i}_{WORDNET[label]}.JPEG"
                rows.append((f"{part}{number}{i}".encode() * 50, name, label))
                expected[f"{part}/{WORDNET[label]}/{name}"] = rows[-1][0]
            end = f"-{number}123456789abcdef" if part == "val" else ""  # of Hugging Face until 2023
            write(folder / "data" / f"{split}-{number:05d}-of-{files:05d}{end}.parquet", rows)
    tests = [(b"test", f"ILSVRC2012_test_{i}.JPEG", -1) for i in range(3)]
    write(folder / "data" / "test-00000-of-00001.parquet", tests)
    return folder, expected


def test_imagenet_in_shards_and_in_folders(hub, tmp_path):
    folder, expected = hub
    with pytest.raises(UserError, match="contains Hugging Face's parquet files") as error:
        class_folders(folder / "train")
    command, out = re.search(r"run `python (.*)`, and train on (.*)$", str(error.value)).groups()
    assert shlex.split(command)[1:] == ["parquet", str(folder), out]
    said = succeed("parquet", folder, tmp_path / "shards")
    assert "left out: test, because its classes are not published" in said
    assert "train 35 images, val 14 images" in said
    assert folder_of(tmp_path / "shards") == expected
    assert (tmp_path / "shards/val/classes.txt").read_text().split() == sorted(WORDNET)
    shards = sorted(map(str, tmp_path.glob("shards/train/train-*-of-00005.tar")))
    for sample in webdataset.WebDataset(shards, shardshuffle=False):
        assert sample["__key__"].startswith(f"{WORDNET[int(sample['cls'])]}/")
    succeed("parquet", folder / "data", tmp_path / "folders", "--folders")
    assert images(tmp_path / "folders") == expected
    assert "nothing to do" in succeed("parquet", folder, tmp_path / "shards")
    lost = folder / "data" / "train-00003-of-00005.parquet"
    lost.rename(f"{lost}.part")
    assert "lacks some of the 5 files such as train-0" in fail("parquet", folder, tmp_path / "new")
    lost.write_bytes(b"PAR1 no")
    assert f"cannot read {lost}" in fail("parquet", folder, tmp_path / "new")


def test_names_from_the_metadata_or_a_table(tmp_path):
    """Images without names, or several of the same name: each is kept."""
    rows = [(b"\x89PNG1", None, 1), (b"2", "a/x.jpg", 0), (b"3", "x.jpg", 0), (b"4", "b.bmp", -1)]
    rows += [(b"5", "c.jpg", None)]
    write(tmp_path / "in/train-00000-of-00001.parquet", rows, ["b", "a"], label="fine_label")
    rows = [(b"2", "x.jpg", 0), (b"5", "x.jpg", 1)]
    write(tmp_path / "in/test-00000-of-00001.parquet", rows, ["b", "a"], label="fine_label")
    said = succeed("parquet", tmp_path / "in", tmp_path / "out", "--folders")
    assert "numbered in the order of their names" in said
    assert "left out: 2 images of train without a label" in said
    assert "becomes val/" in said and "train 3 images, val 2 images" in said
    assert images(tmp_path / "out") == {
        "train/a/00000000.png": b"\x89PNG1",
        "train/b/00000001_x.jpg": b"2",
        "train/b/00000002_x.jpg": b"3",
        "val/b/x.jpg": b"2",
        "val/a/x.jpg": b"5",
    }
    # A label whose images have the WordNet ids of two classes is none of ImageNet's.
    rows = [(b"%d" % i, f"{WORDNET[i]}_1.JPEG", i // 2) for i in range(3)]
    write(tmp_path / "mixed/train.parquet", rows, ["b", "a"])
    write(tmp_path / "mixed/data/val.parquet", rows[2:], ["b", "a"])  # one class has no image in it
    succeed("parquet", tmp_path / "mixed", tmp_path / "mixed out")
    for part in ("train", "val"):
        assert (tmp_path / f"mixed out/{part}/classes.txt").read_text() == "a\nb\n"
    (tmp_path / "names").write_text("zebra\nyak\n\n", "utf-8-sig")  # as some editors write
    succeed("parquet", tmp_path / "in", tmp_path / "table", "--names", tmp_path / "names")
    assert (tmp_path / "table/train/classes.txt").read_text() == "yak\nzebra\n"
    assert folder_of(tmp_path / "table")["train/yak/00000000.png"] == b"\x89PNG1"
    table = ("--names", tmp_path / "names")
    assert "nothing to do" in succeed("parquet", tmp_path / "in", tmp_path / "table", *table)
    # Shards of other names or another size would stand beside these, or have other names.
    (tmp_path / "names").write_text("zebra\nyaks\n")
    for more in ((), (*table, "--size", 2), table):
        message = fail("parquet", tmp_path / "in", tmp_path / "table", *more)
        assert "choose another folder" in message
    (tmp_path / "names").write_text("zébra\nyak\n", "latin-1")
    message = fail("parquet", tmp_path / "in", tmp_path / "latin", "--names", tmp_path / "names")
    assert f"cannot read {tmp_path}/names: give a text file in UTF-8" in message


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["crane", "crane"], "2 classes are named 'crane': give --names FILE"),
        (["../../up", "b"], "a class cannot be named '../../up'"),
        (["a"], "labels up to 1, and 1 names of classes"),
        ([], "labels up to 1, and 0 names of classes"),
    ],
)
def test_bad_names_of_classes_are_one_line(tmp_path, names, message):
    write(tmp_path / "in/train.parquet", [(b"1", "x.jpg", 0), (b"2", "../../y.jpg", 1)], names)
    assert message in fail("parquet", tmp_path / "in", tmp_path / "a/b/out", "--folders")
    assert not list(tmp_path.rglob("*.jpg"))


def test_other_files_and_a_missing_package(tmp_path, monkeypatch):
    put(tmp_path, {"empty/x.txt": b""})
    assert "has no files train-*.parquet" in fail("parquet", tmp_path / "empty", tmp_path / "out")
    damaged = tmp_path / "damaged/train.parquet"
    write(damaged, [(b"image" * 999, "x.jpg", 0)], ["a"])
    data = damaged.read_bytes()
    place = data.index(b"PAR1") + 4  # the first page, which a worker reads
    damaged.write_bytes(data[:place] + b"\xff" * 60 + data[place + 60 :])
    assert f"cannot read {damaged}" in fail("parquet", damaged.parent, tmp_path / "out1")
    rows = [(b"x", "1.jpg", 0), (b"x", "2.jpg", 0), (None, "3.jpg", 0)]
    write(tmp_path / "remote/train.parquet", rows, ["a"])
    message = fail("parquet", tmp_path / "remote", tmp_path / "out2")
    assert f"{tmp_path}/remote/train.parquet has no bytes of image 2" in message
    (tmp_path / "in").mkdir()
    parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "in/train.parquet")
    line = fail("parquet", tmp_path / "in", tmp_path / "out")
    assert "has the columns text; it needs one column of images" in line
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    line = fail("parquet", tmp_path / "in", tmp_path / "out")
    assert line == "error: parquet files need pyarrow: pip install pyarrow"


@pytest.mark.parametrize("label", [-1, None])
def test_files_without_any_label(tmp_path, label):
    write(tmp_path / "hub/train-0.parquet", [(b"x", "1.jpg", label)] * 3)
    message = fail("parquet", tmp_path / "hub", tmp_path / "out")
    assert "has a label (all are -1 or null)" in message


def test_images_without_names_are_numbered_through_all_files(tmp_path):
    """Of each split. A group of two images is larger than a shard."""
    for number, name in enumerate(("train-0", "train-1", "train-2", "valid", "test")):
        rows = [(b"%-700000d" % (3 * number + i), None, i % 2) for i in range(3)]
        write(tmp_path / f"hub/{name}.parquet", [*rows, (b"x", None, -1)], ["a", "b"])
    words = ("parquet", tmp_path / "hub", tmp_path / "out", "--size", 1, "--workers", 1)
    assert "left out: 3 images of train" in succeed(*words)
    content = {"test": {}, "train": {}, "val": {}}
    for name, data in folder_of(tmp_path / "out").items():
        content[name.split("/")[0]][int(name[-12:-4])] = int(data)
    assert content == {
        "test": {0: 12, 1: 13, 2: 14},
        "train": {i + i // 3: i for i in range(9)},
        "val": {0: 9, 1: 10, 2: 11},
    }
    assert len([*tmp_path.glob("out/train/train-*-of-00006.tar")]) == 6
