"""The index of an image folder, and the choice of classes."""

import os

import pytest

from utils.data.index import ImageIndex, check_same_classes, class_folders, select_classes
from utils.errors import UserError


def make(root, *names):
    """Empty files of these names (a name that ends with / is a folder)."""
    for name in names:
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.touch()
    return root


def listed(index):
    return [os.path.relpath(index.path(i), index.root) for i in range(len(index))]


def test_images_are_sorted_and_numbered_by_class(tmp_path):
    make(tmp_path, "b/2.JPEG", "b/10.jpg", "a/z.png", "a/a.webp", "c/1.jpeg")
    index = ImageIndex(tmp_path, ["a", "b", "c"])
    assert listed(index) == ["a/a.webp", "a/z.png", "b/10.jpg", "b/2.JPEG", "c/1.jpeg"]
    assert index.targets.tolist() == [0, 0, 1, 1, 2]
    assert len(index) == 5


def test_class_numbers_follow_the_given_order(tmp_path):
    make(tmp_path, "a/1.jpg", "b/1.jpg", "b/2.jpg", "c/1.jpg")
    index = ImageIndex(tmp_path, ["c", "b"])
    assert listed(index) == ["c/1.jpg", "b/1.jpg", "b/2.jpg"]
    assert index.targets.tolist() == [0, 1, 1]


def test_hidden_and_other_files_are_no_samples(tmp_path):
    make(tmp_path, "a/1.JPEG", "a/.2.JPEG", "a/._1.JPEG", "a/Thumbs.db", "a/list.txt", "a/jpg")
    make(tmp_path, "a/.cache/3.jpg", "a/more/4.JPG", "a/more/deep/5.Png")
    index = ImageIndex(tmp_path, ["a"])
    assert listed(index) == ["a/1.JPEG", "a/more/4.JPG", "a/more/deep/5.Png"]


def test_names_of_any_bytes_and_lengths(tmp_path):
    names = ["ä b.jpg", "字.jpg", "x" * 200 + ".jpg", os.fsdecode(b"\xff\xfe.jpg")]
    make(tmp_path, *(f"a/{name}" for name in names))
    index = ImageIndex(tmp_path, ["a"])
    assert sorted(listed(index)) == sorted(f"a/{name}" for name in names)
    assert all(os.path.isfile(index.path(i)) for i in range(len(index)))


def test_fingerprint_is_of_the_names(tmp_path):
    """Two nodes may have the data in different folders, but not other files."""
    here = make(tmp_path / "here", "a/1.jpg", "b/1.jpg")
    there = make(tmp_path / "there", "b/1.jpg", "a/1.jpg")
    other = make(tmp_path / "other", "a/1.jpg", "b/2.jpg")
    prints = [ImageIndex(root, ["a", "b"]).fingerprint() for root in (here, there, other)]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("empty", "empty has no images"), ("gone", "gone is missing"), ("file", "is not a folder")],
)
def test_class_without_images_is_named(tmp_path, name, sentence):
    make(tmp_path, "a/1.jpg", "empty/", "file")
    with pytest.raises(UserError, match=sentence):
        ImageIndex(tmp_path, ["a", name])


def test_class_folders_are_sorted(tmp_path):
    make(tmp_path, "b/", "a/", "C/", ".hidden/", "readme.txt")
    assert class_folders(tmp_path) == ["C", "a", "b"]


def test_missing_or_empty_data_folder(tmp_path):
    with pytest.raises(UserError, match=r"nowhere is missing.*prepare_data"):
        class_folders(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no class folders"):
        class_folders(tmp_path)


FOLDERS = ["ant", "bee", "cat", "dog"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, FOLDERS),
        ("", FOLDERS),
        ("1", ["ant"]),
        ("4", FOLDERS),
        ("dog,bee", ["bee", "dog"]),
        (" dog , bee,", ["bee", "dog"]),
        ("cat", ["cat"]),
    ],
)
def test_select_classes(choice, expected):
    assert select_classes(choice, FOLDERS) == expected


def test_select_classes_from_a_file(tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("dog\r\n\n  ant\ndog\n")
    assert select_classes(str(names), FOLDERS) == ["ant", "dog"]


@pytest.mark.parametrize("choice", ["0", "5", "cow", "ant,cow", ",", "-1"])
def test_select_classes_refuses(choice):
    with pytest.raises(UserError, match="--classes"):
        select_classes(choice, FOLDERS)


@pytest.mark.parametrize("content", [bytes(range(256)), b"dog\0ant", b"\xff\xd8\xff\xe0"])
def test_a_binary_file_as_classes_is_refused(tmp_path, content):
    (tmp_path / "binary").write_bytes(content)
    with pytest.raises(UserError, match=r"--classes .*binary is no text file: list class names"):
        select_classes(str(tmp_path / "binary"), FOLDERS)


def test_a_link_that_leads_back_to_itself_is_named(tmp_path):
    make(tmp_path, "part/a/1.jpg", "loop/b/1.jpg", "up/c/1.jpg", "far/d/1.jpg")
    (tmp_path / "part/me").symlink_to("me")
    (tmp_path / "loop/b/me").symlink_to("me")
    (tmp_path / "up/c/round").symlink_to("..")
    with pytest.raises(UserError, match="part/me is a link that leads back to itself: remove it"):
        class_folders(tmp_path / "part")
    with pytest.raises(UserError, match="b/me is a link that leads back to itself"):
        ImageIndex(tmp_path / "loop", ["b"])
    with pytest.raises(UserError, match=r"up/c/round is a link .* itself") as error:
        ImageIndex(tmp_path / "up", ["c"])
    assert len(str(error.value)) < 200
    (tmp_path / "far/more").symlink_to("d")
    assert class_folders(tmp_path / "far") == ["d", "more"], "other links are folders"


def test_same_classes_in_both_parts(tmp_path):
    make(tmp_path, "val/a/", "val/b/", "val/x/")
    check_same_classes(tmp_path, "val", ["a", "b", "x"], subset=False)
    check_same_classes(tmp_path, "val", ["a", "x"], subset=True)
    with pytest.raises(UserError, match="only val has x"):
        check_same_classes(tmp_path, "val", ["a", "b"], subset=False)
    for subset in (False, True):
        with pytest.raises(UserError, match="only train has c"):
            check_same_classes(tmp_path, "val", ["a", "b", "c", "x"], subset=subset)
