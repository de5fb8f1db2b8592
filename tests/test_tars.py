"""Training from tar files: the images, their order, the kept index, and hostile archives."""

import gzip
import io
import json
import os
import shutil
import tarfile
import time
from pathlib import Path

import pytest
import torch
from batches import fetch
from joined import Job, run_jobs
from preparing import devkit_bytes, put, tar_bytes
from running import assert_same_weights

from utils.data.images import ImageBatches
from utils.data.opening import check_same_classes, class_folders, has_part, open_source
from utils.start.errors import UserError

TENCH, GOLDFISH = "n01440764", "n01443537"


def images(folder, part="train"):
    """Each image of a folder: (class, name, bytes)."""
    paths = sorted((folder / part).glob("*/*.JPEG"))
    return [(path.parent.name, path.name, path.read_bytes()) for path in paths]


def by_class(folder, part):
    """class: [(name, bytes)]"""
    all_of = images(folder, part)
    return {c: [one[1:] for one in all_of if one[0] == c] for c, _, _ in all_of}


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
    members = []
    for c, name, data in sorted(images(folder, part), key=lambda one: one[1]):
        suffix, text = label(int(c[-1]))
        members += [(f"{c}-{name}", data), (f"{c}-{name.removesuffix('.JPEG')}.{suffix}", text)]
    return members


def shards(folder, part):
    members = samples(folder, part, lambda number: ("cls", b"%d" % number))
    names = (f"{part}/{part}-{i:05d}-of-00003.tar" for i in range(3))
    return {name: tar_bytes(members[i * 40 : i * 40 + 40]) for i, name in enumerate(names)} | {
        "classes.txt": b"class_0\nclass_1\nclass_2\n"
    }


def documents(folder, part):
    """Shards in DATA itself, with a second file of metadata, as timm/imagenet-1k-wds has them."""
    members = samples(folder, part, lambda number: ("cls", b"%d" % number))
    document = json.dumps({"label": 7}).encode()
    members += [(n.replace(".cls", ".json"), document) for n, _ in members if n.endswith(".cls")]
    members.sort(key=lambda one: (one[0][8:11], one[0]))  # the three of a sample stay together
    name = {"train": "imagenet1k-train-{:04}.tar", "val": "imagenet1k-validation-{:02}.tar"}[part]
    return {name.format(i): tar_bytes(members[i * 120 : i * 120 + 120]) for i in range(2)}


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
            assert other.path(5) == f"{path}/{other.name(5)}"
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


# ---- slow disks


def test_reads_in_flight_on_a_slow_disk_change_nothing(folder, tmp_path, monkeypatch):
    """The same batches, and the same bad files; the first batch shows that the disk is slow."""
    data = Path(shutil.copytree(folder, tmp_path / "data"))
    (data / "train" / "class_1" / "007.JPEG").write_bytes(b"")
    results, most, now = [], [0], [0]
    for slow in (False, True):
        index = source(data)
        if slow:
            real = index.read

            def late(*task, real=real):
                now[0] += 1
                most.append(now[0])
                time.sleep(0.002)
                now[0] -= 1
                return real(*task)

            monkeypatch.setattr(index, "read", late)
        dataset = ImageBatches(index, 24, seed=0, train=True)
        results.append([fetch(dataset, range(k, k + 30), epoch=k) for k in range(3)])
    assert max(most) > 1
    for one, other in zip(*results, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
        assert one[2].unreadable == other[2].unreadable and one[2].files == other[2].files


# ---- the kept index


def kept_index(folder):
    """Which file is the kept index of train; it is replaced when the index is made again."""
    (path,) = folder.rglob("*.npz")
    return path.stat().st_ino, path.stat().st_mtime_ns


def test_the_index_is_kept_and_made_again_when_a_file_has_changed(folder, tmp_path):
    data = make(shards, folder, tmp_path)
    expected = source(data).classes
    kept = kept_index(tmp_path)
    source(data)
    assert kept_index(tmp_path) == kept
    for changed in ("train/train-00001-of-00003.tar", "classes.txt", "train/.index.npz"):
        if more := changed == "classes.txt":
            (data / changed).write_bytes(b"class_0\nclass_1\nclass_2\nclass_3\n")
        elif changed.endswith(".npz"):
            (data / changed).write_bytes(b"damaged")
        os.utime(data / changed, (1.8e9, 1.8e9))
        kept = kept_index(tmp_path)
        expected += ["class_3"] * more
        assert class_folders(data / "train") == expected
        assert kept_index(tmp_path) != kept, changed


def test_a_tar_file_of_the_same_size_and_time_is_noticed(folder, tmp_path):
    """Rewritten in place, and replaced."""
    one, other = (tar_bytes([(f"{c}/1.jpg", c.encode())]) for c in "ab")
    data = put(tmp_path, {"train.tar": one})
    for content, replace in ((one, False), (other, False), (one, True)):
        new = data / "train.new"
        (new if replace else data / "train.tar").write_bytes(content)
        if replace:
            os.utime(new, (1.7e9, 1.7e9))
            new.rename(data / "train.tar")
        age(data)
        assert class_folders(data / "train") == ["b" if content is other else "a"]


@pytest.mark.parametrize("way", ["rewritten", "replaced"])
def test_a_tar_file_that_changes_during_a_run(tmp_path, way):
    """Images are not read from places of the old index; a replaced file is still open."""
    data = put(tmp_path, {"train.tar": tar_bytes([("a/1.jpg", b"old"), ("b/1.jpg", b"x")])})
    age(data)
    index, new = source(data), tar_bytes([("a/1.jpg", b"new"), ("b/1.jpg", b"y")])
    if way == "rewritten":
        (data / "train.tar").write_bytes(new)
        with pytest.raises(OSError, match=r"train\.tar was changed during this run"):
            index.read(0)
    else:
        (data / "train.new").write_bytes(new)
        (data / "train.new").rename(data / "train.tar")
        assert index.read(0) == b"old"


def test_the_index_of_data_that_cannot_be_written_is_in_the_users_cache(
    folder, tmp_path, monkeypatch, capsys
):
    data, cache = make(nested, folder, tmp_path / "data"), tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    real = os.replace

    def replace(path, target):
        if str(target).startswith(str(data)):
            raise OSError(30, "Read-only file system")
        real(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        expected = contents(source(data))
        kept = kept_index(cache)
        assert contents(source(data)) == expected and kept_index(cache) == kept
        assert not list(data.glob(".*"))
    os.utime(data / "train.tar", (1.6e9, 1.6e9))
    assert contents(source(data)) == expected
    assert (data / ".train.index.npz").exists() and not list(cache.rglob("*.npz")), "the old one"
    assert capsys.readouterr().out == ""


# ---- hostile archives


def member(name, data=b"", **fields):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, io.BytesIO(data)


def of_members(*members, form=tarfile.GNU_FORMAT):
    """A tar file of `member` results."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=form) as file:
        for one in members:
            file.addfile(*one)
    return content.getvalue()


SPARSE = member("a/1.jpg", type=tarfile.GNUTYPE_SPARSE)
HARD = member("a/2.jpg", type=tarfile.LNKTYPE, linkname="a/1.jpg")
SOFT = member("b/3.jpg", type=tarfile.SYMTYPE, linkname="../a/1.jpg")


def names(data):
    index = source(data)
    return [os.fsdecode(path) for path in index.paths.split(b"\0")[:-1]]


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_of_every_kind(tmp_path, form):
    long, deep = f"c/{'x' * 200}.jpg", f"c/{'d' * 90}/{'e' * 90}/f.jpg"
    plain = (
        "b/ä b.jpg",
        "b/字 \n.png",
        "../../b/up.jpg",
        "/b/absolute.jpg",
        "b//./c.jpg",
        long,
        deep,
    )
    other = ("b/README.txt", "b/.hidden.jpg", "b/._a.jpg", ".x/a.jpg", "top.jpg", "b/jpg")
    members = [member(name, name.encode(), mtime=1.5) for name in (*plain, *other)]
    data = put(tmp_path, {"train.tar": of_members(*members, form=form)})
    inside = ["b/absolute.jpg", "b/c.jpg", "b/up.jpg", "b/ä b.jpg", "b/字 \n.png"]
    assert names(data) == [*inside, deep, long]
    by_name = dict(zip(names(data), contents(source(data)), strict=True))
    assert by_name[long] == long.encode() and by_name["b/up.jpg"] == b"../../b/up.jpg"
    assert not (tmp_path.parent / "b").exists()


def test_names_of_over_100_bytes_in_ustar(tmp_path):
    """They are divided between two fields of the header."""
    paths = [f"{c}/{'d' * 90}/{'e' * 60}.jpg" for c in "ab"]
    content = of_members(*(member(n, n.encode()) for n in paths), form=tarfile.USTAR_FORMAT)
    data = put(tmp_path, {"train.tar": content})
    assert class_folders(data / "train") == ["a", "b"] and names(data) == paths
    assert contents(source(data)) == [path.encode() for path in paths]


def test_keys_of_webdataset_end_at_the_first_dot(tmp_path):
    files = [
        ("d.1/0001.left.jpg", b"x"),
        ("d.1/0001.cls", b"3"),
        ("0002.a.b.jpg", b"y"),
        ("0002.cls", b"4"),
    ]
    put(tmp_path, {"train/0.tar": tar_bytes(files)})
    assert names(tmp_path) == ["00003/d.1/0001.left.jpg", "00004/0002.a.b.jpg"]


def test_a_disk_that_returns_fewer_bytes_than_requested_is_read_on(tmp_path, monkeypatch):
    data = put(tmp_path, {"train.tar": tar_bytes([("a/1.jpg", bytes(range(256)))])})
    index, read = source(data), os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, into, at: read(file, [into[0][:100]], at))
    assert index.read(0) == bytes(range(256))


def test_duplicates_are_as_after_extraction(tmp_path):
    files = [("a/1.jpg", b"old"), ("b/2.jpg", b"other"), ("a/1.jpg", b"new")]
    data = put(tmp_path, {"train.tar": tar_bytes(files)})
    assert names(data) == ["a/1.jpg", "b/2.jpg"] and contents(source(data)) == [b"new", b"other"]


def test_a_folder_of_the_parts_name_is_no_class_but_one_of_another_name_is(tmp_path):
    """Only train/ itself, and only if all images are below it."""
    files = [("train/a/1.jpg", b"x"), ("train/b/c/2.jpg", b"y")]
    put(tmp_path / "inside", {"train.tar": tar_bytes(files)})
    assert names(tmp_path / "inside") == ["a/1.jpg", "b/c/2.jpg"]
    put(tmp_path / "beside", {"train.tar": tar_bytes([*files, ("bus/3.jpg", b"z")])})
    assert class_folders(tmp_path / "beside" / "train") == ["bus", "train"]
    put(tmp_path / "one", {"train.tar": tar_bytes([("train/1.jpg", b"z")])})
    assert class_folders(tmp_path / "one" / "train") == ["train"]


def test_equal_keys_in_several_shards_are_different_images(tmp_path):
    for i in range(2):
        sample = [("000.jpg", b"%d" % i), ("000.cls", b"%d" % i), ("001.cls", b"0")]
        put(tmp_path, {f"train/{i}.tar": tar_bytes([*sample, ("001.jpg", b"x")])})
    expected = "00000/0/000.jpg 00000/0/001.jpg 00000/1/001.jpg 00001/1/000.jpg"
    assert names(tmp_path) == expected.split()


def test_numbers_of_another_encoding_and_a_tar_without_magic(tmp_path):
    """Sizes in base 256, as of files above 8 GB; the header of 1979."""
    data = bytearray(tar_bytes([("a/1.jpg", b"one"), ("b/2.jpg", b"two")]))
    for start in (0, 1024):
        data[start + 124 : start + 136] = b"\x80" + (3).to_bytes(11, "big")
        data[start + 257 : start + 265] = bytes(8)
        data[start + 148 : start + 156] = b" " * 8
        data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
    (tmp_path / "train.tar").write_bytes(data)
    assert contents(source(tmp_path)) == [b"one", b"two"]


WHOLE = tar_bytes([("a/1.jpg", b"x" * 900), ("b/2.jpg", b"y" * 900)])
SHARD = "train/x-{}-of-003.tar"
INSTEAD = r"which training does not read: extract .* \(scripts/prepare_data\.py shards DATA OUT\)"
CASES = {
    "cut in a file": (WHOLE[:1100], "train.tar ends before its last file does"),
    "cut between files": (WHOLE[:3072], "the copy is incomplete, copy it again"),
    "cut in a header": (WHOLE[:1700], "ends before its last file does"),
    "empty": (b"", "ends before its last file does"),
    "html": (b"<html>" * 400, "train.tar is not a tar file"),
    "damaged": (WHOLE[:1540] + b"z" + WHOLE[1541:], "train.tar is damaged at byte 1,536"),
    "no images": (tar_bytes([("a/1.txt", b"x")]), "has no images in class folders"),
    "no label": (
        tar_bytes([("1.jpg", b""), ("1.cls", b"0"), ("2.jpg", b"")]),
        "2.jpg has no label",
    ),
    "bad label": (tar_bytes([("1.jpg", b""), ("1.cls", b"../x")]), "the label ../x"),
    "compressed class": (tar_bytes([("a.tar.gz", b"")]), "a.tar.gz is a compressed tar file"),
    "class is no tar": (tar_bytes([("a.tar", b"x" * 600)]), "train.tar/a is not a tar file"),
    "empty class": (tar_bytes([("a.tar", WHOLE), ("b.tar", tar_bytes([]))]), "b has no images"),
    "sparse": (of_members(SPARSE), rf"contains the sparse file a/1\.jpg, {INSTEAD}"),
    "hard link": (of_members(HARD), rf"train\.tar/a/2\.jpg is a link, {INSTEAD}"),
    "soft link": (of_members(SOFT), rf"train\.tar/b/3\.jpg is a link, {INSTEAD}"),
    "label in JSON": (
        {"train/0.tar": tar_bytes([("1.jpg", b""), ("1.json", b'{"label": 3}')])},
        rf"train/0\.tar/1\.jpg has its label in a JSON file, {INSTEAD}",
    ),
    "classes in a folder": (
        tar_bytes([("CLS-LOC/train/a/1.jpg", b""), ("CLS-LOC/train/b/2.jpg", b"")]),
        rf"train\.tar has its classes inside the folder CLS-LOC, {INSTEAD}",
    ),
    "gzip": (
        gzip.compress(WHOLE, mtime=0) * 9,
        "is compressed.*mv .*train.tar.gz && gunzip .*.gz` first",
    ),
    "tgz": ({"train.tgz": b""}, r"train\.tgz is compressed.*: run `gunzip .*\.tgz` first"),
    "missing": ({}, r"train is missing: DATA must hold .* or train\.tar"),
    "missing shard": (
        {SHARD.format(i): WHOLE for i in ("000", "001")},
        r"x-002-of-003\.tar is missing \(one of 3 tar files\)",
    ),
    "class twice": (
        {"train.tar": WHOLE, "classes.txt": b"crane\na\ncrane\n"},
        r"classes\.txt has crane twice",
    ),
    "class missing": (
        {"val.tar": WHOLE, "train.tar": tar_bytes([("a/1.jpg", b"")])},
        "different classes: only val has b",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_used_is_an_error_of_one_line(tmp_path, case):
    content, message = CASES[case]
    put(tmp_path, content if isinstance(content, dict) else {"train.tar": content})
    with pytest.raises(UserError, match=message) as error:
        check_same_classes(tmp_path, "val", source(tmp_path).classes, subset=False)
    assert str(error.value).isprintable()


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "train.tar")
    with pytest.raises(UserError, match=r"cannot open .*train\.tar \(not a regular file\)"):
        source(tmp_path)


def test_a_tar_file_that_grows_while_its_headers_are_read(folder, tmp_path, monkeypatch):
    data, real = make(of_folders, folder, tmp_path), tarfile.TarInfo.fromtarfile

    def parse(tar):
        with open(data / "train.tar", "ab") as file:
            file.write(bytes(512))
        return real(tar)

    monkeypatch.setattr(tarfile.TarInfo, "fromtarfile", parse)
    with pytest.raises(UserError, match=r"train\.tar changed while its headers were read"):
        source(data)
