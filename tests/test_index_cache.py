"""The cached index: what is found again, and what makes it forget."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

from utils.data import index
from utils.data.index import ImageIndex
from utils.errors import UserError

CLASSES = ["a", "b", "Ünï côde"]


@pytest.fixture
def root(tmp_path):
    """Three classes, one with a sub-folder, last changed long ago."""
    for name in CLASSES:
        (tmp_path / name / "deep").mkdir(parents=True)
        for i in range(4):
            (tmp_path / name / f"{i}.jpg").write_bytes(b"x" * (i + 1))
        (tmp_path / name / "deep" / "z.png").write_bytes(b"y" * 10)
    age(tmp_path)
    return tmp_path


def age(root):
    """Let all folders look as if nothing had changed for an hour."""
    for folder, _, _ in os.walk(root):
        past = os.stat(folder).st_mtime - 3600
        os.utime(folder, (past, past))


@pytest.fixture
def scans(monkeypatch):
    """The names of the classes that are listed from now on."""
    seen = []
    real = index.list_class

    def noted(root, name):
        seen.append(name)
        return real(root, name)

    monkeypatch.setattr(index, "list_class", noted)
    return seen


def contents(images):
    return [(images.path(i), int(images.targets[i])) for i in range(len(images))]


def test_second_time_nothing_is_listed_and_all_is_the_same(root, scans):
    first = ImageIndex(root, CLASSES)
    assert sorted(scans) == sorted(CLASSES)
    scans.clear()
    again = ImageIndex(root, CLASSES)
    assert scans == []
    assert contents(again) == contents(first)
    assert again.fingerprint() == first.fingerprint()
    assert all(os.path.isfile(again.path(i)) for i in range(len(again)))


def test_sizes_are_asked_of_a_sample(root, monkeypatch):
    first = ImageIndex(root, CLASSES).sample_sizes()
    assert first[0] == 4
    os.truncate(root / "b" / "deep" / "z.png", 0)
    second = ImageIndex(root, CLASSES).sample_sizes()
    assert second[0] == 4 - 10 / 15 and second[1] != first[1]
    monkeypatch.setattr(index, "SIZES_ASKED", 3)
    assert ImageIndex(root, CLASSES).sample_sizes()[0] == 1, "the first file of each class"


@pytest.mark.parametrize("place", ["b", "b/deep"])
@pytest.mark.parametrize("change", ["add", "remove", "rename"])
def test_change_lists_that_class_anew(root, scans, place, change):
    ImageIndex(root, CLASSES)
    scans.clear()
    folder = root / place
    if change == "add":
        (folder / "new.jpg").write_bytes(b"")
    else:
        victim = next(path for path in sorted(folder.iterdir()) if path.is_file())
        victim.unlink() if change == "remove" else victim.rename(folder / "other.jpg")
    images = ImageIndex(root, CLASSES)
    assert scans == ["b"]
    (root / index.CACHE).unlink()
    assert contents(images) == contents(ImageIndex(root, CLASSES))


def test_subset_is_taken_from_the_whole_and_adds_to_it(root, scans):
    ImageIndex(root, CLASSES[:1])
    ImageIndex(root, CLASSES)
    assert scans.count("a") == 1
    scans.clear()
    images = ImageIndex(root, CLASSES[1:])
    assert scans == []
    assert images.path(0) == str(root / "b" / "0.jpg")
    assert images.targets.tolist() == [0] * 5 + [1] * 5


def test_folder_that_has_just_changed_is_not_believed(root, scans):
    (root / "b" / "new.jpg").write_bytes(b"1")
    ImageIndex(root, CLASSES)
    scans.clear()
    ImageIndex(root, CLASSES)
    assert scans == ["b"], "a second change in the same tick of the clock would go unnoticed"


@pytest.mark.parametrize("damage", ["cut", "noise", "empty", "other arrays"])
def test_damaged_cache_is_made_again(root, scans, damage):
    expected = contents(ImageIndex(root, CLASSES))
    cache = root / index.CACHE
    data = cache.read_bytes()
    if damage == "other arrays":
        np.savez(cache, something=np.arange(3))
    else:
        middle = len(data) // 2
        cache.write_bytes(
            {
                "cut": data[:middle],
                "noise": data[:middle] + b"\xff" * 64 + data[middle + 64 :],
                "empty": b"",
            }[damage]
        )
    scans.clear()
    assert contents(ImageIndex(root, CLASSES)) == expected
    assert sorted(scans) == sorted(CLASSES)
    scans.clear()
    ImageIndex(root, CLASSES)
    assert scans == []


def test_read_only_folder_is_told_and_used(root, capsys, monkeypatch):
    def refuse(write, path):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(index, "save_atomically", refuse)
    assert len(ImageIndex(root, CLASSES, shows=True)) == 15
    assert "cannot be kept there (Read-only file system)" in capsys.readouterr().out
    ImageIndex(root, CLASSES)
    assert capsys.readouterr().out == ""


def test_missing_class_is_named_though_it_was_cached(root):
    ImageIndex(root, CLASSES)
    (root / "a").rename(root / "other")
    with pytest.raises(UserError, match="a is missing"):
        ImageIndex(root, CLASSES)


WORKER = """
import json, sys
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from pathlib import Path
from utils.data import index
root, count = Path(sys.argv[1]), int(sys.argv[2])
paths = [b"n%08d/n%08d_%08d.JPEG" % (7, 7, i) for i in range(count)]
lengths = np.array([len(path) for path in paths])
found = index.Listing(b"".join(paths), lengths, {})
del paths
index.listings = lambda root, classes, shows: [found]
images = index.ImageIndex(root, ["n00000007"])
def private():
    lines = open("/proc/self/smaps_rollup").read().split("\\n")
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private"))
class Touch(Dataset):
    def __len__(self): return count
    def __getitems__(self, indices):
        for i in indices: images.path(i), int(images.targets[i])
        return private()
order = np.random.permutation(count)
batches = [order[i:i + 4096] for i in range(0, count, 4096)]
loader = DataLoader(Touch(), batch_sampler=batches, num_workers=1, collate_fn=lambda x: x)
seen = list(loader)
print(json.dumps({"first": seen[1], "last": seen[-1]}))
"""


def test_workers_do_not_grow_over_an_epoch(tmp_path):
    """300,000 paths as Python strings would cost a worker 40 MB of copied pages."""
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(tmp_path), "300000"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    kilobytes = json.loads(done.stdout)
    assert kilobytes["last"] - kilobytes["first"] < 5_000
