"""Training from tar files: the images, their order, the kept index, and hostile archives."""

import bz2
import gzip
import io
import lzma
import os
import shutil
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from batches import fetch
from joined import Job, run_jobs
from preparing import devkit_bytes, put, tar_bytes
from running import assert_same_weights

from utils.data import tar_headers
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
    files = [(f"./{part}/{c}/{name}", data) for c, name, data in images(folder, part)]
    return {f"{part}.tar": tar_bytes(files)}


def nested(folder, part):
    """As image-net.org's training images come."""
    classes = by_class(folder, part).items()
    return {f"{part}.tar": tar_bytes([(f"{c}.tar", tar_bytes(files)) for c, files in classes])}


def a_tar_a_class(folder, part):
    return {f"{part}/{c}.tar": tar_bytes(files) for c, files in by_class(folder, part).items()}


def shards(folder, part):
    """As WebDataset's: two classes in turn, and labels that are lines of classes.txt.

    Labels end with a line break, as `echo` writes them, and the list is of an editor on Windows.
    """
    members = []
    for c, name, data in sorted(images(folder, part), key=lambda one: one[1]):
        label = f"{c}-{name.removesuffix('.JPEG')}.cls"
        members += [(f"{c}-{name}", data), (label, c[-1].encode() + b"\n")]
    table = "class_0\r\nclass_1\r\nclass_2\r\n\r\n".encode("utf-8-sig")
    files = {"classes.txt": table, f"{part}/@eaDir/x": b""}
    for i in range(3):
        files[f"{part}/{part}-{i:05d}-of-00003.tar"] = tar_bytes(members[i * 40 : i * 40 + 40])
    return files


def unlabelled(folder, part):
    """Shards in DATA itself, without a list of classes, as timm/imagenet-1k-wds has them."""
    tars = [data for name, data in shards(folder, part).items() if name.endswith(".tar")]
    name = {"train": "imagenet1k-train-{:04}.tar", "val": "imagenet1k-validation-{:02}.tar"}[part]
    return {name.format(i): data for i, data in enumerate(tars)}


LAYOUTS = (of_folders, nested, a_tar_a_class, shards, unlabelled)


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


def names(data, part="train"):
    paths = source(data, part).paths
    return [os.fsdecode(path) for path in paths.split(b"\0")[:-1]]


def of_names(*names):
    """A tar file of these files."""
    return tar_bytes([(name, b"0") for name in names])


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
    classes = ["00000", "00001", "00002"] if layout is unlabelled else source(folder).classes
    check_same_classes(data, "val", classes, subset=False)
    if layout in (of_folders, nested, a_tar_a_class):
        assert one.paths == other.paths and one.fingerprint() == other.fingerprint()
    some = source(data, classes=[classes[2], classes[0]])
    assert contents(some) == contents(source(folder, classes=["class_2", "class_0"]))
    assert some.targets.tolist() == [0] * 20 + [1] * 20


def test_the_original_files(tmp_path):
    """Of image-net.org, in miniature, among other downloads."""
    val = [f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, 4)]
    train = [(f"{name}.tar", of_names("1.JPEG")) for name in (GOLDFISH, TENCH)]
    devkit = "ILSVRC2012_devkit_t12.tar.gz"
    files = {
        "ILSVRC2012_img_train.tar": tar_bytes(train),
        "ILSVRC2012_img_val.tar": of_names(*val),
        devkit: devkit_bytes([2, 1, 2]),
        "ILSVRC2012_img_test_v10102019.tar": of_names("test/1.JPEG"),
        "ILSVRC2012_img_test.tar": of_names("ILSVRC2012_test_00000001.JPEG"),  # of earlier years
        "ILSVRC2012_img_train_t3.tar": b"another task",
        "my_train.tar": b"something else",
    }
    put(tmp_path, files)
    age(tmp_path)
    assert names(tmp_path) == [f"{TENCH}/1.JPEG", f"{GOLDFISH}/1.JPEG"]
    expected = [f"{TENCH}/{val[0]}", f"{TENCH}/{val[2]}", f"{GOLDFISH}/{val[1]}"]
    assert names(tmp_path, "val") == expected
    assert not has_part(tmp_path / "test")
    inside = {"val/images.tar": of_names(*val), devkit: files[devkit]}
    assert names(put(tmp_path / "parts", inside), "val") == expected
    put(tmp_path, {devkit: devkit_bytes([2, 1])})
    with pytest.raises(UserError, match=rf"class of {val[2]} is not known"):
        source(tmp_path, "val")
    (tmp_path / devkit).unlink()
    with pytest.raises(UserError, match=r"classes of the validation images are not known: neither"):
        source(tmp_path, "val")


def test_weights_are_those_of_the_folder_bit_for_bit(folder, tmp_path):
    """On two processes, stopped in the middle of an epoch and resumed."""

    def job(data, name, stop_after=0):
        options = ("-a", "tiny_plain", "--image-size", 32, "-b", 5, "-j", 1, "--epochs", 2)
        place = ("--output-dir", tmp_path, "--name", name, "--resume", "auto", data)
        return Job("imagenet_ddp", (*options, *place), stop_after=stop_after)

    data = make(shards, folder, tmp_path / "data")
    run_jobs([job(folder, "folder"), job(data, "tars", stop_after=4)], tmp_path)
    run_jobs([job(data, "tars")], tmp_path)
    assert_same_weights(tmp_path / "folder", tmp_path / "tars")


# ---- slow disks


def test_reads_in_flight_on_a_slow_disk_change_nothing(folder, tmp_path, monkeypatch):
    """The same batches, and the same bad files; the first batch shows that the disk is slow."""
    data = Path(shutil.copytree(folder, tmp_path / "data"))
    (data / "train" / "class_1" / "007.JPEG").write_bytes(b"")
    index, results, most, now = source(data), [], 0, 0
    real = index.read

    def late(image):
        nonlocal most, now
        now += 1
        most = max(most, now)
        time.sleep(0.002)
        now -= 1
        return real(image)

    for read in (real, late):
        monkeypatch.setattr(index, "read", read)
        dataset = ImageBatches(index, 24, seed=0, train=True)
        results.append([fetch(dataset, range(k, k + 30), epoch=k) for k in range(3)])
    assert most > 1
    for one, other in zip(*results, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
        assert one[2].unreadable == other[2].unreadable and one[2].files == other[2].files


def test_reads_in_flight_share_no_memory(tmp_path, monkeypatch):
    files = [bytes([number]) * 1000 for number in range(8)]
    tar = tar_bytes([(f"a/{number}.jpg", data) for number, data in enumerate(files)])
    index, read = source(put(tmp_path, {"train.tar": tar})), os.preadv
    all_have_read = threading.Barrier(len(files), timeout=60)

    def together(file, into, at):
        count = read(file, into, at)
        all_have_read.wait()
        return count

    monkeypatch.setattr(os, "preadv", together)
    with ThreadPoolExecutor(len(files)) as pool:
        assert [*pool.map(index.read, range(len(files)))] == files


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
    put(data, {"classes.txt": b"class_0\nclass_1\nclass_2\nclass_3\n"})
    for changed in ("classes.txt", "train/train-00001-of-00003.tar", "train/.index.npz"):
        if changed.endswith(".npz"):
            (data / changed).write_bytes(b"damaged")
        os.utime(data / changed)  # so recently that a second change could go unnoticed
        kept = kept_index(tmp_path)
        assert class_folders(data / "train") == [*expected, "class_3"]
        assert kept_index(tmp_path) == kept or changed.endswith(".npz")
        os.utime(data / changed, (1.8e9, 1.8e9))
        assert class_folders(data / "train") == [*expected, "class_3"]
        assert kept_index(tmp_path) != kept, changed


def test_a_tar_file_of_the_same_size_and_time_is_noticed(tmp_path):
    """Rewritten in place, and replaced."""
    for name, replace in (("a", False), ("b", False), ("a", True)):
        path = tmp_path / ("new" if replace else "train.tar")
        path.write_bytes(tar_bytes([(f"{name}/1.jpg", b"x")]))
        os.utime(path, (1.7e9, 1.7e9))
        path.rename(tmp_path / "train.tar")
        age(tmp_path)
        assert class_folders(tmp_path / "train") == [name]


def test_a_tar_file_that_changes_during_a_run(tmp_path):
    """Images are not read from places of the old index; a replaced file is still open."""
    data = put(tmp_path, {"train.tar": tar_bytes([("a/1.jpg", b"old"), ("b/1.jpg", b"x")])})
    index, new = source(data), tar_bytes([("a/1.jpg", b"new"), ("b/1.jpg", b"y")])
    put(data, {"train.new": new})
    (data / "train.new").rename(data / "train.tar")
    assert index.read(0) == b"old"
    age(data)
    index = source(data)
    put(data, {"train.tar": new})
    with pytest.raises(OSError, match=r"train\.tar was changed during this run"):
        index.read(0)


def test_the_index_of_data_that_cannot_be_written_is_in_the_users_cache(
    folder, tmp_path, monkeypatch
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


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_of_every_kind(tmp_path, form):
    long, deep = f"c/{'x' * 200}.jpg", f"c/{'d' * 90}/{'e' * 90}/f.jpg"
    plain = ["b/ä b.jpg", "b/字 \n.png", "../../b/up.jpg", "/b/absolute.jpg", "b//./c.jpg"]
    plain += [long, deep]
    other = ("b/README.txt", "b/.hidden.jpg", "b/._a.jpg", ".x/a.jpg", "top.jpg", "b/jpg")
    members = [member(name, name.encode(), mtime=1.5) for name in [*plain, *other]]
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
    assert names(data) == paths
    assert contents(source(data)) == [path.encode() for path in paths]


def test_images_of_one_name(tmp_path):
    """In a tar file the last one counts, as after extraction; in shards both are images."""
    files = [("a/1.jpg", b"old"), ("b/2.jpg", b"other"), ("a/1.jpg", b"new")]
    put(tmp_path, {"train.tar": tar_bytes(files)})
    assert names(tmp_path) == ["a/1.jpg", "b/2.jpg"]
    assert contents(source(tmp_path)) == [b"new", b"other"]
    for i in (0, 1):
        files = [("000.jpg", b"x"), ("000.cls", b"%d" % i), ("001.cls", b"0"), ("001.jpg", b"x")]
        put(tmp_path / "shards/train", {f"{i}.tar": tar_bytes(files)})
    expected = "00000/0/000.jpg 00000/0/001.jpg 00000/1/001.jpg 00001/1/000.jpg"
    assert names(tmp_path / "shards") == expected.split()


def test_keys_of_webdataset_end_at_the_first_dot(tmp_path):
    files = [("d.1/0001.left.jpg", b"x"), ("d.1/0001.cls", b"3")]
    files += [("0002.a.b.jpg", b"y"), ("0002.cls", b"4"), ("0002.json", b"{}")]
    put(tmp_path, {"train/0.tar": tar_bytes(files)})
    assert names(tmp_path) == ["00003/d.1/0001.left.jpg", "00004/0002.a.b.jpg"]


def test_a_disk_that_returns_fewer_bytes_than_requested_is_read_on(tmp_path, monkeypatch):
    data = put(tmp_path, {"train.tar": tar_bytes([("a/1.jpg", bytes(range(256)))])})
    index, read = source(data), os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, into, at: read(file, [into[0][:100]], at))
    assert index.read(0) == bytes(range(256))


def test_a_folder_of_the_parts_name_is_no_class_but_one_of_another_name_is(tmp_path):
    """Only train/ itself, and only if all images are below it."""
    for files, classes in (
        (["train/a/1.jpg", "train/b/c/2.jpg"], ["a", "b"]),
        (["train/a/1.jpg", "train/b/c/2.jpg", "bus/3.jpg"], ["bus", "train"]),
        (["train/1.jpg"], ["train"]),
    ):
        put(tmp_path, {"train.tar": of_names(*files)})
        assert class_folders(tmp_path / "train") == classes


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
CASES = {
    "cut in a file": (WHOLE[:1100], "train.tar ends before its last file does"),
    "cut between files": (WHOLE[:3072], "the copy is incomplete"),
    "cut class": (tar_bytes([("a.tar", WHOLE[:1100]), ("b.tar", WHOLE)]), "train.tar/a ends"),
    "empty": (b"", "ends before its last file does"),
    "html": (b"<html>" * 400, "train.tar is not a tar file"),
    "damaged": (WHOLE[:1540] + b"z" + WHOLE[1541:], "train.tar is damaged at byte 1,536"),
    "no images": (of_names("a/1.txt"), "has no images in class folders"),
    "no label": (of_names("1.jpg", "1.cls", "2.jpg"), "2.jpg has no label"),
    "bad label": (tar_bytes([("1.jpg", b""), ("1.cls", b"../x")]), "the label ../x"),
    "label of no line": (
        {"train.tar": tar_bytes([("1.jpg", b""), ("1.cls", b"1")]), "classes.txt": b"crane\n"},
        "the label 1, which is neither a line number",
    ),
    "compressed class": (of_names("a.tar.gz"), "a.tar.gz is a compressed tar file"),
    "empty class": (tar_bytes([("a.tar", WHOLE), ("b.tar", tar_bytes([]))]), "class b of .* no im"),
    "sparse": (of_members(SPARSE), r"the sparse file a/1\.jpg, .* extract .*prepare_data\.py"),
    "hard link": (of_members(HARD), r"train\.tar/a/2\.jpg is a link"),
    "soft link": (of_members(SOFT), r"train\.tar/b/3\.jpg is a link"),
    "label in JSON": (of_names("1.jpg", "1.json"), r"train\.tar/1\.jpg has its label in a JSON"),
    "classes in a folder": (of_names("x/a/1.jpg", "x/b/2.jpg"), "inside the folder x"),
    "gzip": (gzip.compress(WHOLE) * 9, "compressed.*mv .*train.tar.gz && gunzip .*.gz` first"),
    "bzip2": (bz2.compress(WHOLE) * 9, "compressed.*mv .*train.tar.bz2 && bunzip2 .*.bz2` first"),
    "xz": (lzma.compress(WHOLE) * 9, "compressed.*mv .*train.tar.xz && unxz .*.xz` first"),
    "tgz": ({"train.tgz": b""}, r"run `gunzip .*\.tgz` first"),
    "missing": ({}, r"train is missing: DATA must hold .* or train\.tar"),
    "missing shard": (
        dict.fromkeys(["train/x-001-of-003.tar", "train/x-002-of-003.tar"], WHOLE),
        r"x-000-of-003\.tar is missing \(one of 3 tar files\)",
    ),
    "class twice": ({"train.tar": WHOLE, "classes.txt": b"crane\na\ncrane\n"}, "has crane twice"),
    "class missing": ({"val.tar": WHOLE, "train.tar": of_names("a/1.jpg")}, "only val has b"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_used_is_an_error_of_one_line(tmp_path, case):
    content, message = CASES[case]
    put(tmp_path, content if isinstance(content, dict) else {"train.tar": content})
    with pytest.raises(UserError, match=message) as error:
        check_same_classes(tmp_path, "val", source(tmp_path).classes, subset=False)
    assert str(error.value).isprintable()


def test_a_pipe_is_not_waited_for_and_a_failing_disk_is_named(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "train.tar")
    with pytest.raises(UserError, match=r"cannot read .*train\.tar \(not a regular file\)"):
        source(tmp_path)
    (tmp_path / "train.tar").unlink()
    put(tmp_path, {"train.tar": of_members(member("a/1.jpg"))})
    # A descriptor that cannot be read stands for a disk that cannot.
    monkeypatch.setattr(tar_headers, "open_regular", lambda path, _: os.open(path, os.O_WRONLY))
    with pytest.raises(UserError, match=r"cannot read .*train\.tar \(Bad file descriptor\)"):
        source(tmp_path)


def test_a_tar_file_that_grows_while_its_headers_are_read(tmp_path, monkeypatch):
    put(tmp_path, {"train.tar": of_members(member("a", type=tarfile.DIRTYPE), member("a/1.jpg"))})
    real = tarfile.TarInfo.fromtarfile

    def parse(tar):
        with open(tmp_path / "train.tar", "ab") as file:
            file.write(bytes(512))
        return real(tar)

    monkeypatch.setattr(tarfile.TarInfo, "fromtarfile", parse)
    with pytest.raises(UserError, match=r"train\.tar changed while its headers were read"):
        source(tmp_path)
