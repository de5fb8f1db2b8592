"""`prepare_data.py split`: a test part, chosen by names and seed; no image is ever lost."""

import fcntl
import os
import re
import shlex
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from conftest import shell
from preparing import SCRIPT, fail, images, put, succeed, tree
from running import Running

from utils.data import layouts
from utils.data.opening import check_parts, check_same_classes, class_folders
from utils.start.errors import UserError


@pytest.fixture
def data(tmp_path):
    names = [f"train/{c}/{i:03d}.jpg" for c in ("a", "b/sub") for i in range(30)]
    return put(tmp_path / "data", {name: name.encode() for name in [*names, "val/a/x.jpg"]})


@pytest.mark.parametrize("data", [".", "sub/.."])
def test_a_copy_of_the_current_folder_is_beside_it(tmp_path, monkeypatch, data):
    (tmp_path / "photos/sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "photos")
    assert layouts.beside(Path(data), "shards") == tmp_path / "photos_shards"


def test_classes_and_tables_are_told_from_parts_and_other_tables(tmp_path):
    names = ("cat", "dog", "val", "test", "other data/train/a", "more data/val/a")
    put(tmp_path, {f"{name}/1.jpg": b"" for name in names})
    assert layouts.classes_at_top(tmp_path) == ["cat", "dog"]
    for name, table in (("a", "a"), ("my_labels", "my_labels"), ("train", None)):
        (tmp_path / f"{name}.csv").touch()
        assert layouts.label_table(tmp_path) == (table and tmp_path / f"{table}.csv")


def test_same_names_and_seed_give_the_same_part_and_zero_undoes_it(data, tmp_path):
    (data / "train/not yet").mkdir()
    before = images(data)
    assert "train 54 images, test 6 images" in succeed("split", data, "--test", 0.1)
    assert sorted(images(data).values()) == sorted(before.values())
    aside = {name for name in images(data) if name.startswith("test/")}
    assert {name.split("/")[1] for name in aside} == {"a", "b"} and len(aside) == 6
    other = put(tmp_path / "node", {name: b"%d" % len(name) for name in reversed(before)})
    succeed("split", other, "--test", 0.1, "--seed", 0)
    assert images(other).keys() == images(data).keys()
    succeed("split", other, "--test", 0.1, "--seed", 1)
    before_again = tree(other)
    assert images(other).keys() != images(data).keys() and len(before_again) == 62
    succeed("split", other, "--test", 0.1)  # the seed of the last call
    assert tree(other) == before_again
    succeed("split", data, "--test", 0.2)
    larger = {name for name in images(data) if name.startswith("test/")}
    assert len(larger) == 12 and aside < larger
    succeed("split", data, "--test", 0)
    assert images(data) == before and not (data / "test").exists()
    succeed("split", data, "--test", 0.1)
    (data / ".split.json").rename(data / "test/.split.json")  # as an earlier version left it
    succeed("split", data, "--undo")
    assert images(data) == before and (data / "train/not yet").exists()


def test_links_are_moved_and_lead_to_the_same_files(tmp_path):
    data = put(tmp_path / "data", {"b/4.jpg": b"4", "b/5.jpg": b"5", "a/.x": b""})
    for i in range(4):
        put(tmp_path, {f"files/{i}.jpg": b"%d" % i})
        target = "../../files" if i % 2 else tmp_path / "files"
        (data / f"a/{i}.jpg").symlink_to(f"{target}/{i}.jpg")
    for words in (("--val", 0.5), ("--undo",)):
        succeed("split", data, *words)
        assert sorted(images(data).values()) == [b"%d" % i for i in range(6)]
        if words[0] == "--val":
            # As if killed between the two steps of moving a relative link, from here and back.
            (data / "a/1.jpg").symlink_to("../../files/1.jpg")
            succeed("split", data, *words)
            assert sorted(images(data).values()) == [b"%d" % i for i in range(6)]
            (data / "a/1.jpg").symlink_to("../../files/1.jpg")


def test_killed_at_any_moment_no_image_is_lost(tmp_path):
    files = {f"train/{c}/{i:04d}.jpg": b"%d" % i for c in "ab" for i in range(1500)}
    data = put(tmp_path / "data", files)
    for seed in (0, 1):
        with Running(SCRIPT, "split", data, "--test", 0.5, "--seed", seed) as command:
            start = set(data.rglob("*.jpg"))
            while command.process.poll() is None and start == set(data.rglob("*.jpg")):
                time.sleep(0.001)
            command.send(signal.SIGKILL)
            command.process.wait(30)
        assert sorted(images(data).values()) == sorted(files.values())
    succeed("split", data, "--test", 0.5, "--seed", 0)
    succeed("split", put(tmp_path / "other", files), "--test", 0.5)
    assert images(tmp_path / "other") == images(data)


def test_what_cannot_be_split_is_left_as_it_is(data, tmp_path):
    put(data, {"train/c/only.jpg": b"x"})
    before, command = images(data), ("split", data, "--test", 0.1)
    assert "class c has only 1 image, so none would be left" in fail(*command)
    assert images(data) == before
    put(data, {"test/a/other.jpg": b"x"})
    assert f"{data}/test exists, and this command did not make it" in fail(*command)
    assert images(data) == before | {"test/a/other.jpg": b"x"}
    assert "take 100%: leave some" in fail("split", data, "--val", 0.5, "--test", 0.5)
    assert "there is no folder" in fail("split", tmp_path / "none", "--test", 0.1)
    put(tmp_path, {"photos.zip": b""})
    assert "a file: give a folder (extract" in fail("split", tmp_path / "photos.zip", "--test", 0.1)
    succeed("shards", data, tmp_path / "shards")
    assert "no class folders of images" in fail("split", tmp_path / "shards", "--test", 0.1)


# ---- one's own images, in other layouts

LAYOUTS = {
    "class folders": "{c}/{i:02d}.jpg",
    "class folders and an empty train": "{c}/{i:02d}.jpg",
    "train alone": "train/{c}/{i:02d}.jpg",
    "a table": "{c}_{i:02d}.jpg",
    "a table, images in train": "train/{c}_{i:02d}.jpg",
}


def own(root, layout):
    """Images of one's own: 20 in each of two classes, and other files."""
    images = [(c, LAYOUTS[layout].format(c=c, i=i)) for c in "ab" for i in range(20)]
    put(root, {name: name.encode() for _, name in images})
    if "empty" in layout:  # a desktop has left a file in it
        put(root, {"train/.DS_Store": b""})
    if layout == "train alone":
        put(root, {"notes.csv": b"a_00,xa", "train/a/.mine.tmp": b"mine"})
    if "table" in layout:
        has_columns = "train" in layout  # and their names in the first line
        more = "7," if has_columns else ""
        # A row has the name of an image without its suffix, the whole name, or the path.
        names = [(os.path.basename(name)[:-4], os.path.basename(name), name) for _, name in images]
        rows = [f"{names[i][i % 3]},{more}x{c}" for i, (c, _) in enumerate(images)]
        text = "\n".join(["name,number,class", *rows] if has_columns else rows)
        text = text.replace(",", ";") if has_columns else text
        put(root, {"labels.csv": text.encode("utf-8-sig")})
    return root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ones_own_images_are_divided_and_put_back(tmp_path, layout):
    """As the error of a training says; the same on every node. --undo restores each file."""
    data, before = own(tmp_path / "my photos", layout), tree(own(tmp_path / "before", layout))
    folders = {path for path in data.rglob("*") if path.is_dir()}
    with pytest.raises(UserError) as error:
        check_same_classes(data, "val", class_folders(data / "train"), subset=False)
    command = shlex.split(re.search("`(.*)`", str(error.value))[1])
    assert command[-4:] == ["split", str(data), "--val", "0.2"]
    said = succeed(*command[2:], "--test", 0.1)
    assert "train 28 images, val 8 images, test 4 images" in said and "left " not in said
    places = Counter(name.rsplit("/", 1)[0][-1:] for name in images(data) if name[0] == "v")
    assert places == {"a": 4, "b": 4}, "a part has its share of each class"
    assert {path.name for path in data.iterdir() if path.is_dir()} == {"train", "val", "test"}
    kept = [data for name, data in before.items() if "/." not in name]
    assert sorted(images(data).values()) == sorted(kept)
    check_same_classes(data, "val", class_folders(data / "train"), subset=False)
    succeed("split", own(tmp_path / "node", layout), "--val", 0.2, "--test", 0.1)
    assert images(tmp_path / "node").keys() == images(data).keys()
    succeed("split", data, "--val", 0.28)  # of 20 images 5.6
    parts = [name.split("/")[0] for name in images(data)]
    assert (parts.count("val"), parts.count("test")) == (12, 4)
    succeed("split", data, "--undo")
    assert tree(data) == before
    assert {path for path in data.rglob("*") if path.is_dir()} == folders
    assert "was not split" in fail("split", data, "--undo")


def test_files_that_are_not_read_are_counted_and_the_hint_works_as_printed(tmp_path, monkeypatch):
    """A camera's HEIC files, a single class, a name with a space, and another current folder."""
    monkeypatch.chdir(tmp_path)
    data = put(tmp_path / "my photos", {f"dog/{i}.jpg": b"%d" % i for i in range(10)})
    put(data, {"cat/1.HEIC": b"x", "cat/2.heic": b"x", "cat/@eaDir/3.heic": b"x"})
    message = fail("split", data, "--val", 0.2)
    assert "one class folder only, dog" in message and "2 .heic" in message
    before = tree(put(data, {f"cat/{i}.jpg": b"cat" for i in range(3)}))
    out = succeed("split", data, "--val", 0.2)
    assert "note: left in place, as they are not images that training reads: 2 .heic" in out
    (hint,) = re.findall("`(python .*)`", out)
    (undone,) = shell(f"cd {tmp_path} && {hint}")
    assert (undone.code, tree(data)) == (0, before), undone


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("train valid test", "parts of other names"),
        ("Training validation Testing", "parts of other names"),
        ("up/train up/val up/test", "up has train/ and val/: give that folder"),
        ("up", "up has 2 class folders: give that folder"),
    ],
)
def test_parts_elsewhere_are_neither_classes_nor_made_again(tmp_path, names, words):
    """As Roboflow and Kaggle name them, or as an archive holds them; the hint works as printed."""
    data = tmp_path / "my photos"
    put(data, {f"{part}/{c}/1.jpg": b"1" for part in names.split() for c in ("cat", "dog")})
    before = tree(data)
    with pytest.raises(UserError, match=words) as error:
        check_parts(data, ("train", "val"))
    assert words in fail("split", data, "--val", 0.2)
    assert words in fail("shards", data, tmp_path / "shards")
    assert tree(data) == before
    if command := re.search("`(.*)`", str(error.value)):
        assert shell(command[1])[0].code == 0
    if names == "up":
        return
    whole = data if command else data / "up"
    check_parts(whole, ("train", "val", "test"))
    put(whole, {"valid/a/2.jpg": b"1"})
    assert layouts.split_advice(whole) is None, "it would be moved into val/"


@pytest.mark.parametrize("part", ["train", "Validation"])
def test_a_part_of_a_data_set_is_not_divided(tmp_path, monkeypatch, part):
    """DATA/train in place of DATA: training would learn from the images of one part only."""
    names = (part, "Testing", "others")
    put(tmp_path, {f"{one}/{c}/1.jpg": b"1" for one in names for c in ("cat", "dog")})
    put(tmp_path, {"alone/train/cat/1.jpg": b"1", "alone/val/emu/1.jpg": b"1"})
    put(tmp_path, {f"two/{n}/{p}/cat/1.jpg": b"1" for n in ("a", "b") for p in ("train", "val")})
    before = tree(tmp_path)
    for data in (tmp_path / part, ""):
        with pytest.raises(UserError, match=f"is a part of a data set: give {tmp_path}"):
            check_parts(Path(data), ("train", "val"))
        assert "is a part of a data set" in fail("split", data, "--val", 0.2)
        monkeypatch.chdir(tmp_path / part)
    assert tree(tmp_path) == before
    assert layouts.misplaced(tmp_path / "others") is None
    assert layouts.misplaced(tmp_path / "alone/train") is None, "other classes"
    assert layouts.misplaced(tmp_path / "two") is None, "which of two data sets is meant?"


def test_a_class_that_comes_later_is_divided_too(tmp_path):
    data = put(tmp_path, {f"{c}/{i}.jpg": c.encode() for c in ("cat", "dog") for i in range(5)})
    succeed("split", data, "--val", 0.2)
    put(data, {"runs/one/overlay.png": b"curves"} | {f"emu/{i}.jpg": b"emu" for i in range(5)})
    said = succeed("split", data, "--val", 0.2)
    assert "classes that came after an earlier call: emu\n" in said
    assert "train 12 images, val 3 images" in said
    assert {path.name for path in data.iterdir() if path.is_dir()} == {"train", "val", "runs"}
    succeed("split", data, "--undo")
    (data / "runs/one/overlay.png").unlink()
    assert sorted(tree(data)) == [f"{c}/{i}.jpg" for c in ("cat", "dog", "emu") for i in range(5)]


def test_a_table_that_contradicts_itself(tmp_path):
    data = own(tmp_path / "photos", "a table")
    table = tmp_path / "mine.csv"
    table.write_bytes((data / "labels.csv").read_bytes() + b"\na_00,xb")
    before, message = tree(data), fail("split", data, "--val", 0.2, "--labels", table)
    assert f"{table} names an image twice, with different classes" in message
    rows = [f"{name},{x},{1 - x}.0" for x in (0, 1) for name in (f"a_{x:02}", f"b_{x:02}.jpg")]
    table.write_text("\n".join(["image,MEL,NV", *rows]))
    message = fail("split", data, "--val", 0.2, "--labels", table)
    assert f"{table} has a column for each class (MEL, NV): write" in message
    assert tree(data) == before
    for label in ("", "x/a", ".xa"):
        table.write_text(f"a_00,xa\na_01,{label}\n")
        message = fail("split", data, "--val", 0.2, "--labels", table)
        assert f"line 2 of {table}: a class cannot be named {label!r}" in message
    table.write_text(f'a_00,"{"x" * 150_000}\n')  # a quotation mark that is never closed
    message = fail("split", data, "--val", 0.2, "--labels", table)
    assert f"cannot read {table}: give a CSV file" in message
    rows = [f"{c}_{i:02},{number},0" for c, number in (("a", 1), ("b", 2)) for i in range(9)]
    table.write_text("\n".join(rows))  # classes that are numbers, and another column
    succeed("split", data, "--val", 0.2, "--labels", table)


def test_what_a_table_leaves_out_is_counted(tmp_path):
    """The names of its columns decide which one has the class, the first line what divides them."""
    names = [f"{i}.jpg" for i in range(6)]
    put(tmp_path, dict.fromkeys((*names, "sub/twin.jpg", "twin.jpg"), b"x"))
    rows = [f"{name} ;a, b, c, d, e; {'cat' if name < '3' else 'dog'}" for name in names]
    rows = ["Name;Notes; Class ", *rows, "", "gone.jpg;;cat", "0.jpg;;cat", "twin;;cat"]
    rows.append("sub/twin.jpg;")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    said = succeed("split", tmp_path, "--val", 0.3)
    assert "train 4 images, val 2 images" in said
    assert {path.name for path in (tmp_path / "val").iterdir()} == {"cat", "dog"}
    assert f"left out: 3 lines of {tmp_path}/labels.csv that name no image" in said
    assert "left out: 2 images that" in said


def test_folders_that_a_table_contradicts_are_no_classes(tmp_path):
    """As competitions of Kaggle have them. Any other table is left alone."""
    names = [f"{part}_images/{part}{i}.jpg" for part in ("train", "test") for i in range(4)]
    data = put(tmp_path / "my data", {name: name.encode() for name in names})
    before, table, command = tree(data), data / "train.csv", ("split", data, "--val", 0.2)
    texts = ("animal,class\nzebra,striped", "image,class\ntrain0.jpg,train_images", '"', "")
    for text in texts:
        table.write_text(text)
        assert "left out" not in succeed(*command)
        succeed("split", data, "--undo")
    table.write_text("\n".join(["id,image,label", *(f"x{i},train{i},cat" for i in range(4))]))
    assert "names images" in fail(*command), "in another column"
    table.write_text("\n".join(["id,label", *(f"train{i},{'cat' * (i % 2)}x" for i in range(4))]))
    message = fail(*command)
    assert "names images" in message and "but not their folders, such as test_images" in message
    assert tree(data) == before | {"train.csv": table.read_bytes()}
    labels = shlex.split(re.search("add (--labels .*?) if", message)[1])
    assert "left out: 4 images" in succeed(*command, *labels)
    assert {path.name for path in (data / "train").iterdir()} == {"catx", "x"}


@pytest.mark.parametrize("layout", ["a table", "a table, images in train", "class folders"])
def test_other_labels_than_at_first_need_undo(tmp_path, layout):
    """A table that was corrected, or one for images that were divided by their folders."""
    data, table = own(tmp_path / "my photos", layout), tmp_path / "labels.csv"
    command, rows = ("split", data, "--val", 0.2), [f"{name},x{name[-8]}" for name in images(data)]
    table.write_text("\n".join(rows))
    has_table = "table" in layout
    succeed(*command, *["--labels", table] * has_table)
    next(data.rglob("train/*a/*")).unlink()  # a bad image, which the table still names
    succeed(*command, *["--labels", table] * has_table)
    table.write_text(table.read_text().replace("xb", "emu"))
    before = tree(data)
    for words in (["--labels", table], [])[: 1 + has_table]:
        message = fail(*command, *words)
        assert f"{data} was divided by other labels than {table} has: first run `" in message
    assert tree(data) == before
    succeed(*shlex.split(re.search("`(.*)`", message)[1])[2:])
    succeed(*command, "--labels", table)
    assert {path.name for path in (data / "train").iterdir()} == {"xa", "emu"}


@pytest.mark.parametrize("linked", ["train", "train/a", "train/a/sub", "a"])
def test_images_of_another_data_set_are_not_moved(tmp_path, monkeypatch, linked):
    """A link to a folder, of a part, a class or below it. What the error proposes works."""
    other = put(tmp_path / "other", {f"{i}.jpg": b"%d" % i for i in range(9)} | {"a/1.jpg": b"1"})
    top = "" if linked == "a" else "train/"
    data = put(tmp_path / "my data", {f"{top}{c}/x{i}.jpg": b"x" for c in "bc" for i in range(5)})
    if linked == "train":
        other = (data / "train").rename(tmp_path / "train")
    (data / linked).parent.mkdir(exist_ok=True)
    (data / linked).symlink_to(other)
    before = tree(tmp_path)
    assert f"{data}/{linked} is a link" in fail("split", data, "--val", 0.2)
    monkeypatch.chdir(data)
    proposed = re.search("`(.*)`", fail("split", ".", "--val", 0.2))
    assert tree(tmp_path) == before
    (made,) = shell(f"cd '{data}' && {proposed[1]}")
    assert made.code == 0, made.err
    succeed("split", f"{data}_copy", "--val", 0.1)
    assert before.items() <= tree(tmp_path).items()


def test_two_at_once_and_what_a_killed_one_leaves(tmp_path):
    data = put(tmp_path / "data", {f"train/{c}/{i}.jpg": b"x" for c in "ab" for i in range(9)})
    handle = os.open(data, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert "another process is splitting" in fail("split", data, "--test", 0.2)
    os.close(handle)
    # Killed between the two steps of moving a relative link, and before the marker had its name.
    put(tmp_path, {"file.jpg": b"file"})
    succeed("split", data, "--test", 0.3)
    moved, *_ = (data / "test/a").glob("*.jpg")
    moved.unlink()
    moved.symlink_to(tmp_path / "file.jpg")
    left = data / "train/a" / moved.name
    left.symlink_to("../../../file.jpg")
    put(data, {"test/.0123456789abcdef.tmp": b"", "test/a/.my.tmp": b"mine"})
    succeed("split", data, "--test", 0.3)
    assert moved.read_bytes() == b"file" and not left.exists()
    assert (data / "test/a/.my.tmp").exists() and not list(data.rglob(".0123*"))
