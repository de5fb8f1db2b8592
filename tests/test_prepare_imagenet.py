"""Tests of `scripts/prepare_data.py imagenet`.

They run real processes, on miniatures of the published archives that they make themselves; only the
many refusals are checked within this process.
"""

import base64
import os
import resource
import shutil
import signal
import struct

import pytest
from preparing import SCRIPTS, fail, images, run, succeed, tar_bytes, tree

TRAIN_TAR, VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
CSV, DEVKIT = "LOC_val_solution.csv", "ILSVRC2012_devkit_t12.tar.gz"
KAGGLE = "ILSVRC/Data/CLS-LOC"
TENCH, GOLDFISH = "n01440764", "n01443537"
VAL_CLASSES = [GOLDFISH, TENCH, TENCH]
# ILSVRC2012_ID 1 is the goldfish, 2 the tench, and 3 a node above them: neither the order of the
# names nor that of the rows gives the classes, only the numbers do.
SYNSETS = [(2, TENCH, "tench"), (3, "n00001740", "entity"), (1, GOLDFISH, "goldfish")]
TRUTH = "1\n2\n2\n"
MAT_HEADER = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM"
# The same, sorted by number, as scipy.io.savemat(..., do_compression=True) writes it, without the
# header.
SCIPY_SYNSETS = """
DwAAADMBAAB4nONjYGC4wcbAAEQMHEDMxAABrFA+MxAzQjE7EBdX5hWnlhQD5VkYBKHiHUDs6RMcFuRsZGBoFO/pAjIg
3A9Cw0F5flFKMbJAek5+MYpAXmlufHJGZk5KUWoeWACFAzMjL7UkPiM1Mz2jBKqlpCgxMy8+MzcxPbWYgQ8oaMGA8A8b
mn8YkTAIcELFIeCDPUi/A5J+Fiz6OZH0C0D5eQaGJibGpsbmUHF0d2AzhwPNHBA/PT8nJS2zOIMY/exo+kH8RAVIsFIW
DhD3G+DRDwPI+rH5mxx7ydYfMMWBQvsdKIp/A3MzExz+wGYOK5o5IH5Jal5yBpH6R+Of2vHPQUH8A4GhuYkBDn9gM4cN
zRwQPzWvJLOkcsDjHyMcsOlnQtMvANf+wR7ZHErLY0rSAwA3cUyS"""

# Lets the process kill itself as it names its image number DIE_AT, which is then written as a
# whole; and lets the kernel kill it within a file that is larger than its limit, instead of only
# failing the call.
DIE = """
import os, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
left = int(os.environ["DIE_AT"])
def hook(event, arguments):
    global left
    if event == "os.rename" and str(arguments[1]).endswith(".JPEG"):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
"""


# ---- miniatures of the published files


def content(name):
    """What stands for an image: bytes that no other has, of an odd length."""
    return name.encode() * (90 + 7 * int(name[-6]))


def train_name(label, number):
    return f"{label}_{number}.JPEG"


def val_name(number):
    return f"ILSVRC2012_val_{number:08d}.JPEG"


def class_tar(label, count=5):
    names = [train_name(label, number) for number in range(1, count + 1)]
    return tar_bytes([(name, content(name)) for name in names])


def train_tar(**replaced):
    """The tar of a tar for each class; keywords replace some, or add others."""
    tars = {label: class_tar(label) for label in (GOLDFISH, TENCH)} | replaced
    return tar_bytes([(f"{label}.tar", data) for label, data in tars.items()])


def val_tar():
    names = [val_name(number) for number in range(1, 1 + len(VAL_CLASSES))]
    return tar_bytes([(name, content(name)) for name in names])


def element(kind, data):
    """A data element of a MAT file, in the short form where it fits."""
    if len(data) <= 4:
        return struct.pack("<HH", kind, len(data)) + data.ljust(4, b"\0")
    return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)


def matrix(kind, shape, *parts, name=b""):
    """An array of a MAT file: 2 is a struct, 4 characters, 6 doubles."""
    flags = element(6, struct.pack("<II", kind, 0))
    return element(14, b"".join((flags, element(5, struct.pack("<2i", *shape)), name, *parts)))


def meta_mat(synsets=SYNSETS):
    """data/meta.mat as MATLAB writes it: small numbers as single bytes, text as UTF-16."""

    def number(value):
        return matrix(6, (1, 1), element(2, bytes([value])), name=element(1, b""))

    def text(value):
        return matrix(4, (1, len(value)), element(4, value.encode("utf-16-le")), name=nameless)

    nameless = element(1, b"")
    fields = ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children")
    names = b"".join(field.encode().ljust(64, b"\0") for field in fields)
    rows = [
        (number(i), text(wnid), text(word), text("a gloss"), number(0)) for i, wnid, word in synsets
    ]
    return MAT_HEADER + matrix(
        *(2, (len(rows), 1), element(5, struct.pack("<i", 64)), element(1, names)),
        *(value for row in rows for value in row),
        name=element(1, b"synsets"),
    )


def devkit(mat=None, truth=TRUTH):
    files = {
        "readme.txt": b"ILSVRC2012 development kit",
        "data/meta.mat": meta_mat() if mat is None else mat,
        "data/ILSVRC2012_validation_ground_truth.txt": truth.encode(),
        "evaluation/demo_eval.m": b"% demo",
    }
    members = [(f"ILSVRC2012_devkit_t12/{name}", data) for name, data in files.items()]
    return tar_bytes(members, "w:gz")


def solution():
    """Kaggle's table: each image with its boxes, in no certain order."""
    rows = [
        f"{val_name(number).removesuffix('.JPEG')},{label} 1 2 30 40 {label} 5 6 70 80 "
        for number, label in enumerate(VAL_CLASSES, start=1)
    ]
    return "\n".join(["ImageId,PredictionString", *reversed(rows), ""]).encode()


def expected():
    """The images that must come out: path -> bytes."""
    train = [f"train/{c}/{train_name(c, i)}" for c in (TENCH, GOLDFISH) for i in range(1, 6)]
    val = [f"val/{c}/{val_name(i)}" for i, c in enumerate(VAL_CLASSES, start=1)]
    return {path: content(path.rpartition("/")[2]) for path in (*train, *val)}


def put(folder, files):
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def source(tmp_path):
    """A folder of the three published files."""
    files = {TRAIN_TAR: train_tar(), VAL_TAR: val_tar(), DEVKIT: devkit()}
    return put(tmp_path / "source", files)


@pytest.fixture
def kaggle(tmp_path):
    """Kaggle's archive, unpacked."""
    folders = {f"{KAGGLE}/{path}": data for path, data in expected().items()}
    for number, label in enumerate(VAL_CLASSES, start=1):  # whose validation images lie flat
        name = val_name(number)
        folders[f"{KAGGLE}/val/{name}"] = folders.pop(f"{KAGGLE}/val/{label}/{name}")
    return put(tmp_path / "kaggle", {**folders, CSV: solution()})


# ---- whole


def check_finished(out):
    """The images are there, each in its class, and nothing else is."""
    assert tree(out).keys() - images(out).keys() == {".prepared.json"}
    assert images(out) == expected()


@pytest.mark.parametrize("labels", ["MATLAB", "scipy", "Kaggle"])
def test_every_image_lands_in_its_class(source, tmp_path, labels):
    if labels == "scipy":
        mat = MAT_HEADER + base64.b64decode(SCIPY_SYNSETS)
        (source / DEVKIT).write_bytes(devkit(mat))
    if labels == "Kaggle":
        (source / DEVKIT).unlink()
        (source / CSV).write_bytes(solution())
    out = tmp_path / "out"
    said = succeed("imagenet", out, "--source", source)
    assert f"validation images are from {CSV if labels == 'Kaggle' else DEVKIT}" in said
    assert "train 10 images in 2 classes, val 3 images in 2 classes" in said
    assert "the complete train set has 1281167 images, not 10" in said
    check_finished(out)


def test_finished_work_is_not_repeated(source, tmp_path):
    out = tmp_path / "out"
    succeed("imagenet", out, "--source", source)
    times = stamps(out)
    shutil.rmtree(source)
    assert "nothing to do" in succeed("imagenet", out, "--source", source)
    assert stamps(out) == times


def test_splits_may_come_one_after_the_other(source, tmp_path):
    """Only the archives that are still needed must be there."""
    out, later = tmp_path / "out", tmp_path / "later"
    (source / VAL_TAR).rename(later)
    said = succeed("imagenet", out, "--source", source)
    assert f"not prepared: val, as neither {VAL_TAR} nor" in said
    assert images(out) == {k: v for k, v in expected().items() if k.startswith("train")}
    times = stamps(out)
    (source / TRAIN_TAR).unlink()
    later.rename(source / VAL_TAR)
    assert "val 3 images in 2 classes" in succeed("imagenet", out, "--source", source)
    check_finished(out)
    assert times.items() <= stamps(out).items()


def test_kaggles_folders_are_linked(kaggle, tmp_path):
    out = tmp_path / "out"
    succeed("imagenet", out, "--source", kaggle)
    check_finished(out)
    name = train_name(TENCH, 1)
    assert (out / "train" / TENCH / name).samefile(kaggle / KAGGLE / "train" / TENCH / name)


def test_the_training_finds_the_same_classes(source, tmp_path):
    from utils.data.index import ImageIndex, check_same_classes, class_folders

    out = tmp_path / "out"
    succeed("imagenet", out, "--source", source)
    classes = class_folders(out / "train")
    check_same_classes(out, "val", classes, subset=False)
    index = ImageIndex(out / "val", classes)
    assert [classes[target] for target in index.targets] == sorted(VAL_CLASSES)


# ---- interrupted


def stamps(out):
    """What changes when an image is written again: path -> (inode, time)."""
    found = {path: path.stat() for path in out.rglob("*.JPEG")}
    return {str(path): (stat.st_ino, stat.st_mtime_ns) for path, stat in found.items()}


@pytest.fixture
def deadly(tmp_path):
    """A function that gives the environment in which the process dies at an image."""
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "sitecustomize.py").write_text(DIE)

    def environment(number):
        stub = {"PYTHONPATH": str(tmp_path / "stub"), "DIE_AT": str(number)}
        return {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **stub}

    return environment


@pytest.mark.parametrize("layout", ["source", "kaggle"])
def test_killed_again_and_again_it_still_finishes(request, tmp_path, deadly, layout):
    source, out = request.getfixturevalue(layout), tmp_path / "out"
    before = {}
    # In the first class, in the second, and in the validation images.
    for number, whole in ((3, 2), (5, 6), (6, 11)):
        done = run("imagenet", out, "--source", source, env=deadly(number))
        assert done.returncode == -signal.SIGKILL, done
        found = {name: data for name, data in images(out).items() if name.endswith(".JPEG")}
        assert len(found) == whole
        assert found.items() <= expected().items()
        assert before.items() <= stamps(out).items(), "an image was written twice"
        before = stamps(out)
        assert not (out / ".prepared.json").exists()
    assert list(out.rglob(".*.tmp")), "it did not die between writing and naming"
    succeed("imagenet", out, "--source", source)
    check_finished(out)
    assert before.items() <= stamps(out).items(), "an image was written twice"


def test_killed_within_an_image_it_leaves_no_half_one(source, tmp_path, deadly):
    def small_files_only():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    out, name = tmp_path / "out", train_name(TENCH, 6)
    large = content(name) * 100
    members = [(train_name(TENCH, i), content(train_name(TENCH, i))) for i in range(1, 6)]
    (source / TRAIN_TAR).write_bytes(train_tar(**{TENCH: tar_bytes([*members, (name, large)])}))
    done = run("imagenet", out, "--source", source, env=deadly(99), preexec_fn=small_files_only)
    assert done.returncode == -signal.SIGXFSZ, done
    found = {path: data for path, data in images(out).items() if path.endswith(".JPEG")}
    assert found == {k: v for k, v in expected().items() if k.startswith("train")}
    assert [path.stat().st_size for path in out.rglob(".*.tmp")] == [50_000]
    succeed("imagenet", out, "--source", source)
    assert images(out) == {**expected(), f"train/{TENCH}/{name}": large}


# ---- damaged and missing


def test_a_cut_archive_is_refused_and_a_whole_one_finishes_the_work(source, tmp_path):
    out, whole = tmp_path / "out", (source / TRAIN_TAR).read_bytes()
    (source / TRAIN_TAR).write_bytes(whole[: len(whole) // 2])
    message = fail("imagenet", out, "--source", source)
    assert TENCH in message and TRAIN_TAR in message and "is damaged" in message
    assert images(out).items() <= expected().items() and len(images(out)) >= 5
    before = stamps(out)
    (source / TRAIN_TAR).write_bytes(whole)
    succeed("imagenet", out, "--source", source)
    check_finished(out)
    assert before.items() <= stamps(out).items()


def test_missing_archives_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    for source in (tmp_path / "empty", tmp_path / "missing"):
        message = fail("imagenet", tmp_path / "out", "--source", source)
        assert f"neither {TRAIN_TAR} nor {VAL_TAR} nor the folder {KAGGLE} is in" in message
        assert not (tmp_path / "out").exists()
    done = run("imagenet", tmp_path / "out")
    assert done.returncode == 2 and "--source" in done.stderr


@pytest.fixture
def refusal(monkeypatch, capsys, tmp_path):
    """A function that gives the error message for a source, which must be one line."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import prepare_data

    def call(source):
        out = tmp_path / "out"
        assert prepare_data.main(["imagenet", str(out), "--source", str(source)]) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: ") and message.count("\n") == 1, message
        if out.exists():
            assert images(out).items() <= expected().items()
            assert not (out / ".prepared.json").exists()
        return message

    return call


GOOD = {TRAIN_TAR: train_tar(), VAL_TAR: val_tar(), DEVKIT: devkit()}


def with_bad_header(name):
    """The training archive with a letter wrong in the header of a member."""
    whole = name.encode() + b"\0"
    assert whole in GOOD[TRAIN_TAR]
    return GOOD[TRAIN_TAR].replace(whole, b"?" + whole[1:], 1)


def in_class_tar(name, data=b"x"):
    """A training archive with one file more in a class."""
    return train_tar(**{TENCH: tar_bytes([(name, data)])})


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        ({TRAIN_TAR: b""}, "is damaged"),
        ({TRAIN_TAR: b"<html>404</html>" * 99}, "is damaged"),
        ({TRAIN_TAR: train_tar(**{TENCH: b"noise" * 999})}, f"{TENCH}.tar in"),
        # tarfile takes a damaged header, here of a class and of an image, for the end.
        ({TRAIN_TAR: with_bad_header(f"{TENCH}.tar")}, f"{TRAIN_TAR} is damaged or cut short at"),
        ({TRAIN_TAR: with_bad_header(f"{TENCH}_3.JPEG")}, f"{TENCH}.tar in"),
        ({TRAIN_TAR: train_tar(dog=class_tar(TENCH))}, "holds 'dog.tar', which does not belong"),
        ({TRAIN_TAR: in_class_tar("../n01440764_1.JPEG")}, "holds '../n01440764_1.JPEG'"),
        ({TRAIN_TAR: in_class_tar("/n01440764_1.JPEG")}, "holds '/n01440764_1.JPEG'"),
        ({TRAIN_TAR: in_class_tar("n01440764_1.JPEG", None)}, "holds 'n01440764_1.JPEG'"),
        ({TRAIN_TAR: in_class_tar("n01440764_1.JPEG", b"")}, "holds 'n01440764_1.JPEG'"),
        ({TRAIN_TAR: in_class_tar("readme.txt")}, "holds 'readme.txt'"),
        ({VAL_TAR: GOOD[VAL_TAR][:1000]}, f"{VAL_TAR} is damaged"),
        ({DEVKIT: None}, "the classes of the validation images are not known: neither"),
        ({DEVKIT: GOOD[DEVKIT][:-50]}, f"{DEVKIT} is damaged"),
        ({DEVKIT: tar_bytes([("readme.txt", b"x")], "w:gz")}, "does not hold what it should"),
        ({DEVKIT: devkit(b"noise" * 99)}, "meta.mat is not a little-endian MAT file"),
        ({DEVKIT: devkit(meta_mat()[:-40])}, "it is cut short"),
        ({DEVKIT: devkit(MAT_HEADER)}, "meta.mat has no synsets"),
        ({DEVKIT: devkit(meta_mat([(1, "dog", "dog"), (2, TENCH, "")]))}, "a WordNet id for each"),
        ({DEVKIT: devkit(truth="1\n2\n9\n")}, "does not hold what it should"),
        ({DEVKIT: devkit(truth="1\n2\n")}, f"holds {val_name(3)}, whose class is not known"),
        ({DEVKIT: devkit(truth="1\n2\n2\n1\n")}, f"lacks 1 of the images, such as {val_name(4)}"),
        ({CSV: b"noise\n1\n"}, f"{CSV} does not hold what it should"),
        ({CSV: b"ImageId,PredictionString\n"}, "a WordNet id for each"),
    ],
)
def test_damaged_and_hostile_archives_are_refused(refusal, tmp_path, damaged, message):
    files = {name: data for name, data in {**GOOD, **damaged}.items() if data is not None}
    assert message in refusal(put(tmp_path / "source", files))
    assert not list(tmp_path.glob("*.JPEG")) and not list((tmp_path / "out").glob("*.JPEG"))


def test_classes_that_only_one_split_has_are_refused(source, tmp_path):
    (source / DEVKIT).write_bytes(devkit(truth="2\n2\n2\n"))
    out = tmp_path / "out"
    message = fail("imagenet", out, "--source", source)
    assert f"do not have the same classes: only train has {GOLDFISH}" in message
    assert not (out / ".prepared.json").exists()


@pytest.mark.parametrize(
    ("stranger", "message"),
    [
        ("train/dog/n01440764_1.JPEG", "dog is not named like an ImageNet class"),
        (f"train/{TENCH}/notes.txt", "notes.txt does not belong there"),
        (f"val/{val_name(4)}", f"holds {val_name(4)}, whose class is not known"),
    ],
)
def test_strangers_in_kaggles_folders_are_refused(refusal, kaggle, stranger, message):
    put(kaggle / KAGGLE, {stranger: b"x"})
    assert message in refusal(kaggle)


def test_an_empty_image_in_kaggles_folders_is_refused(refusal, kaggle):
    name = train_name(TENCH, 2)
    (kaggle / KAGGLE / "train" / TENCH / name).write_bytes(b"")
    assert f"{name} does not belong there" in refusal(kaggle)
