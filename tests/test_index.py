"""The index of an image folder, its cache, and the choice of classes."""

import os
from unittest import mock

import pytest

from utils.data import classes, list_cache
from utils.data.folder import open_folder
from utils.data.opening import class_folders, open_source
from utils.data.sources import Source
from utils.start.errors import UserError


def make(root, *names):
    """Empty files of these names (a name that ends with / is a folder), made an hour ago."""
    for name in names:
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.touch()
    for place, _, _ in os.walk(root):
        past = os.stat(place).st_mtime - 3600
        os.utime(place, (past, past))
    return root


def contents(images):
    paths = [os.path.relpath(images.path(i), images.root) for i in range(len(images))]
    return list(zip(paths, images.targets.tolist(), strict=True))


def test_images_are_sorted_and_numbered_by_the_given_order_of_classes(tmp_path):
    """Hidden and other files are left out, sub-folders are not."""
    make(tmp_path, "b/2.JPEG", "b/10.jpg", "a/z.png", "a/a.webp", "c/more/deep/5.Png", "c/4.jpeg")
    make(tmp_path, "a/.2.JPEG", "a/._1.JPEG", "a/Thumbs.db", "a/list.txt", "a/jpg", "a/.x/3.jpg")
    names = [f"ü/{'x' * 200}.jpg", "ü/ä b.jpg", "ü/字.jpg", os.fsdecode(b"\xc3\xbc/\xff\xfe.jpg")]
    make(tmp_path, *names)  # of any bytes and lengths
    named = [("c/4.jpeg", 0), ("c/more/deep/5.Png", 0), ("a/a.webp", 1), ("a/z.png", 1)]
    named += [("b/10.jpg", 2), ("b/2.JPEG", 2), *((name, 3) for name in names)]
    for _ in ("listed", "from the cache"):
        assert contents(open_folder(tmp_path, ["c", "a", "b", "ü"])) == named


@pytest.mark.parametrize("count", [1000, 2**15 + 1])
def test_each_of_many_classes_has_its_number(count):
    index = Source("", [*map(str, range(count))], b"x\0" * count, [1] * count)
    assert index.targets.tolist() == [*range(count)]


def test_folders_named_like_images_and_what_systems_leave(tmp_path, capsys):
    """A folder is never an image; what is left out is counted in one note."""
    make(tmp_path, "a/1.jpg", "a/2.jfif", "a/3.JPE", "a/shots.png/4.jpg", "b/1.jpg")
    left = ("@eaDir/000.jpg/THUMB.jpg", "__MACOSX/1.jpg", "Thumbs.db", "#recycle/1.jpg")
    make(tmp_path, *left, *(f"a/{name}" for name in left))
    make(tmp_path, "a/list.txt", "a/x.HEIC", "a/y.heic", "b/README", "note.txt")
    make(tmp_path, "b/1.\x1b", "b/2.\x1b", "loose.jpg", "LOOSE.JPG", "._loose.jpg")
    assert class_folders(tmp_path) == ["a", "b"]
    names = ["1.jpg", "2.jfif", "3.JPE", "shots.png/4.jpg"]
    for _ in ("listed", "from the cache"):
        images = contents(open_folder(tmp_path, ["a", "b"], shows=True))
        assert images == [*((f"a/{name}", 0) for name in names), ("b/1.jpg", 1)]
    # a alone is listed again
    make(tmp_path, "a/z.heic", *(f"a/{i}.mov" for i in range(4)), *(f"a/{i}.cr2" for i in range(5)))
    open_folder(tmp_path, ["a", "b"], shows=True)
    assert capsys.readouterr().out.splitlines() == [
        f"note: left out of {tmp_path}: {text}) and 2 images that are in no class folder"
        for text in (
            "6 files that are not images (.heic 2, .\\x1b 2, .txt 1, README 1",
            "16 files that are not images (.cr2 5, .mov 4, .heic 3, .\\x1b 2, .txt 1, ...",
        )
    ]


def test_of_many_kinds_of_other_files_the_most_frequent_are_named(tmp_path, capsys):
    make(tmp_path, "a/1.jpg", *(f"a/{i}.x{kind}" for kind in range(6) for i in range(9 - kind)))
    open_folder(tmp_path, ["a"], shows=True)
    kinds = "(.x0 9, .x1 8, .x2 7, .x3 6, .x4 5, ...)"
    assert f": 39 files that are not images {kinds}\n" in capsys.readouterr().out


def test_a_class_folder_replaced_by_one_of_the_same_time_is_noticed(tmp_path):
    """As two archives that give all folders the same time."""
    for name in ("1.jpg", "2.jpg"):
        for path in (tmp_path / "a").glob("*"):
            path.unlink()
        make(tmp_path, f"a/{name}")
        os.utime(tmp_path / "a", (1.7e9, 1.7e9))
        assert contents(open_folder(tmp_path, ["a"])) == [(f"a/{name}", 0)]


def test_fingerprint_is_of_the_names(tmp_path):
    """Two nodes may have the data in different folders, but not other files."""
    one, same, another = (
        open_folder(make(tmp_path / place, "a/1.jpg", f"b/{'x' * 200}/{name}.jpg"), ["a", "b"])
        for place, name in (("here", 1), ("there", 1), ("other", 2))
    )
    assert one.fingerprint() == same.fingerprint() != another.fingerprint()
    classes = one.class_fingerprints(), another.class_fingerprints()
    assert classes[0]["a"] == classes[1]["a"] and classes[0]["b"] != classes[1]["b"]


def test_class_folders(tmp_path):
    for name, message in (
        ("nowhere", r"nowhere is missing.*prepare_data"),
        ("test", "test is missing: --part test needs it"),
        (".", "no class folders"),
    ):
        with pytest.raises(UserError, match=message):
            class_folders(tmp_path / name)
    make(tmp_path, "b/1.jpg", "a/1.jpg", "C/1.jpg", "empty/", ".hidden/", "readme.txt", "b b/1.jpg")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "b" / "me").symlink_to("me")
    assert class_folders(tmp_path) == ["C", "a", "b", "b b", "empty", "link"], "not as b/, b b/"
    for name, message in (
        ("empty", "empty has no images"),
        ("gone", "gone: No such file or directory"),
        ("b", r"cannot read .*/b.*: Too many levels"),
    ):
        with pytest.raises(UserError, match=message):
            open_source(tmp_path, ["a", name])
    make(tmp_path, "pack.npz")
    with pytest.raises(UserError, match=r"cannot read .*: File name too|is missing"):
        class_folders(tmp_path / ("x" * 300))  # the second from Python 3.14 on
    with pytest.raises(UserError, match=r"holds decoded pixels.*prepare_data\.py shards"):
        class_folders(tmp_path)


# ---- --classes

FOLDERS = ["ant", "bee", "cat", "dog"]


def test_select_classes(tmp_path):
    names, binary = tmp_path / "names", tmp_path / "binary"
    names.write_bytes(b"dog\r\n\n  ant\ndog\n")
    binary.write_bytes(b"\xff\xd8")
    assert classes.select("3", FOLDERS) == FOLDERS[:3]
    assert classes.select("4", FOLDERS) == FOLDERS
    assert classes.select(" dog , bee,", FOLDERS) == ["bee", "dog"]
    assert classes.select(str(names), FOLDERS) == ["ant", "dog"]
    for wrong, words in (
        ("0", "0: there are 4 classes"),
        ("5", "5: there are 4 classes"),
        ("ant,cow,emu", "names 'cow', 'emu', which is not a class folder"),
        (",", "names nothing, which is not a class folder"),
        (str(binary), "names '\\ufffd\\ufffd', which is not a class folder"),
    ):
        with pytest.raises(UserError) as error:
            classes.select(wrong, FOLDERS)
        assert str(error.value) == f"--classes {words}" and str(error.value).isprintable()


# ---- the cache

CLASSES = ["a", "b", "Ünï côde"]


@pytest.fixture
def root(tmp_path):
    """Three classes, each with a sub-folder."""
    for name in CLASSES:
        make(tmp_path, *(f"{name}/{i}.jpg" for i in range(4)), f"{name}/deep/z.png")
        os.truncate(tmp_path / name / "deep" / "z.png", 20)
    return tmp_path


@pytest.fixture
def scans(monkeypatch):
    """The names of the classes that are listed from now on."""
    seen, real = [], os.scandir

    def scan(place):
        name = os.fsdecode(os.path.basename(place))
        if name != "deep":  # their sub-folder
            seen.append(name)
        return real(place)

    monkeypatch.setattr(os, "scandir", scan)
    return seen


def test_no_class_is_listed_twice_and_all_is_the_same(root, scans):
    """A subset of the classes adds to the cache, and is taken from it."""
    open_folder(root, CLASSES[:1])
    first, again = open_folder(root, CLASSES), open_folder(root, CLASSES)
    some = contents(open_folder(root, CLASSES[1:]))
    assert sorted(scans) == sorted(CLASSES)
    assert contents(again) == contents(first)
    assert some == [(path, number - 1) for path, number in contents(first)[5:]]
    # A Python object for each image would be copied into every worker that looks at it.
    lists = [value for value in vars(again).values() if isinstance(value, (list, tuple, dict))]
    assert lists == [CLASSES]


def test_a_sample_of_sizes_is_spread_over_all_classes(root):
    """A bad copy of the last classes is noticed."""
    assert open_folder(root, CLASSES).sample_sizes()[0] == 4
    first = open_folder(root, CLASSES).sample_sizes(most=3)
    (root / CLASSES[0] / "gone.jpg").symlink_to("nowhere")  # reading it will report that
    assert open_folder(root, CLASSES).sample_sizes()[0] == 4 * 15 / 16
    (root / CLASSES[0] / "gone.jpg").unlink()
    for path in (root / CLASSES[-1]).rglob("*.*"):
        os.truncate(path, 50)
    assert open_folder(root, CLASSES).sample_sizes(most=3) != first


def test_change_lists_that_class_anew(root, scans):
    open_folder(root, CLASSES)
    scans.clear()
    (root / "b" / "deep" / "z.png").rename(root / "b" / "deep" / "new.jpg")
    images = contents(open_folder(root, CLASSES))
    assert images[9] == ("b/deep/new.jpg", 1) and len(images) == 15
    assert images == contents(open_folder(root, CLASSES))
    assert scans == ["b", "b"], "a second change in the same tick of the clock would go unnoticed"


def test_a_list_in_the_users_cache_gives_way_to_one_beside_the_images(
    root, scans, monkeypatch, tmp_path_factory
):
    """When the folder can be written again: an old list would be refused in each start."""
    cache, save = tmp_path_factory.mktemp("cache"), list_cache.save_atomically
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))

    def refuse(write, path):
        if path.parent == root:
            raise OSError(30, "Read-only")
        save(write, path)

    with monkeypatch.context() as patch:
        patch.setattr(list_cache, "save_atomically", refuse)
        open_folder(root, CLASSES)
    assert list(cache.glob("*/*.npz"))
    make(root, "b/5.jpg")
    scans.clear()
    assert len(open_folder(root, CLASSES)) == len(open_folder(root, CLASSES)) == 16
    assert sorted(scans) == sorted(CLASSES), "each once"


def test_damaged_cache_is_made_again(root, scans):
    expected = contents(open_folder(root, CLASSES))
    data = (root / list_cache.CACHE).read_bytes()
    half = len(data) // 2
    for damaged in (data[:half], data[:half] + b"\xff" * 64 + data[half + 64 :], b""):
        (root / list_cache.CACHE).write_bytes(damaged)
        scans.clear()
        for _ in range(2):
            assert contents(open_folder(root, CLASSES)) == expected
            assert len(scans) == 3


def test_read_only_folder_is_reported_and_used(root, capsys, monkeypatch):
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=OSError(30, "Read-only")))
    for shows in (False, True):
        assert len(open_folder(root, CLASSES, shows)) == 15
    (line,) = capsys.readouterr().out.splitlines()
    assert f"cannot save the list of files in {root} (Read-only)" in line
