"""Files that exist as a whole or not at all; snapshots have tests of their own."""

import os
from pathlib import Path
from unittest import mock

import pytest

from utils import atomic
from utils.atomic import link_atomically, remove_leftovers, save_atomically
from utils.run import snapshots


@pytest.fixture
def calls(monkeypatch):
    """The system calls for durable files, in order: names, with what they were made on."""
    found, fsync, replace = [], os.fsync, os.replace

    def note_fsync(handle):
        path, size = Path(os.readlink(f"/proc/self/fd/{handle}")), os.fstat(handle).st_size
        found.append(f"fsync {path}" if path.is_dir() else f"fsync {size} bytes")
        fsync(handle)

    def note_replace(source, target):
        found.append(f"name {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(atomic.os, "fsync", note_fsync)
    monkeypatch.setattr(atomic.os, "replace", note_replace)
    return found


def test_a_durable_file_is_flushed_before_it_has_its_name_and_the_name_after(tmp_path, calls):
    """In any other order a power cut may leave an empty file, or the old one."""
    long = "x" * 255  # as the file system allows
    save_atomically(lambda file: file.write(b"abc"), tmp_path / long, durable=False)
    assert (tmp_path / long).read_bytes() == b"abc"
    save_atomically(lambda file: file.write(b"abc"), tmp_path / "safe")
    assert calls == [f"name {long}", "fsync 3 bytes", "name safe", f"fsync {tmp_path}"]
    for step in (1, 2, 3):
        calls.clear()
        snapshots.write({"step": step}, tmp_path / "snapshot.pt")
    size = (tmp_path / "snapshot.pt").stat().st_size
    kept = "name snapshot_previous.pt"
    assert calls == [f"fsync {size} bytes", kept, "name snapshot.pt", f"fsync {tmp_path}"]
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {long, "safe", "snapshot.pt", "snapshot_previous.pt"}
    assert snapshots.read_latest(tmp_path / "snapshot.pt") == {"step": 3}
    assert snapshots.read_latest(tmp_path / "snapshot_previous.pt") == {"step": 2}


@pytest.mark.parametrize("by_link", [True, False])
def test_linked_or_copied(tmp_path, monkeypatch, by_link):
    if not by_link:
        refuse = mock.Mock(side_effect=OSError(18, "Invalid cross-device link"))
        monkeypatch.setattr(atomic.os, "link", refuse)
    source, path = tmp_path / "source", tmp_path / "path"
    source.write_bytes(b"new")
    (tmp_path / "symbolic").symlink_to(source)
    for _ in range(2):
        link_atomically(tmp_path / "symbolic", path)
        assert (path.read_bytes(), path.is_symlink()) == (b"new", False)
        assert path.samefile(source) == by_link
        assert sorted(os.listdir(tmp_path)) == ["path", "source", "symbolic"]


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    kept = {"a.tmp", ".hidden", "sub/b.tmp"}
    (tmp_path / "sub").mkdir()
    for name in (*kept, ".1.tmp", "sub/.2.tmp"):
        (tmp_path / name).touch()
    for recursive, left in ((False, kept | {"sub/.2.tmp"}), (True, kept)):
        remove_leftovers(tmp_path, recursive)
        files = {path for path in tmp_path.rglob("*") if path.is_file()}
        assert {str(path.relative_to(tmp_path)) for path in files} == left
