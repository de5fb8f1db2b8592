"""--store and URLs to resume from: copies of a run in a store, and errors of it."""

import json
import shutil
import signal
import sys
from pathlib import Path
from threading import Event

import fsspec
import pytest
from conftest import python, summary, train
from fsspec.implementations.memory import MemoryFileSystem
from joined import start
from running import assert_same_weights, eventually, snapshot

from utils.run import store
from utils.start.errors import INTERRUPTED, UserError

TWO_EPOCHS = ("-a", "tiny_full", "-b", "10", "--epochs", "2", "-p", "1")


def line(folder: Path, runs: Path, *more: object) -> tuple[object, ...]:
    """A command line behind the script's name."""
    return (*TWO_EPOCHS, "--output-dir", runs, *more, folder)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, folder) -> Path:
    """The undisturbed run "whole", and "half", stopped in epoch 2 and in the store too."""
    runs = tmp_path_factory.mktemp("stopped")
    train("imagenet_nd.py", *line(folder, runs, "--name", "whole"))
    where = line(folder, runs, "--name", "half", "--store", runs / "store")
    with start("imagenet_nd.py", *where, HOLD_AFTER="9") as run:
        run.until("waiting for a signal")
        run.send(signal.SIGTERM)
        assert run.result().code == INTERRUPTED
    assert snapshot(runs / "half")["progress"]["step"] == 4
    return runs


@pytest.mark.parametrize("how", ["store", "URL", "file", "hand"])
def test_a_new_machine_continues_bit_for_bit(folder, tmp_path, stopped, how):
    there = list((stopped / "store" / "half").iterdir())
    names = {path.name for path in there}
    assert names == {"best.pt", "snapshot.pt", "options.json", "summary.json", "ledger.json"}
    # Each is a link, so at no time half a file.
    assert all(path.samefile(stopped / "half" / path.name) for path in there)
    copy = shutil.copytree(stopped / "store", tmp_path / "store") / "half"
    options = ("--resume", f"file://{copy}")  # its snapshot
    if how == "store":
        options = ("--name", "half", "--resume", "auto", "--store", copy.parent)
    if how == "file":  # another folder of this machine
        options = ("--name", "half", "--resume", copy / "snapshot.pt")
    runs = tmp_path / "runs"
    if how == "hand":
        shutil.copytree(copy, runs / "half", ignore=shutil.ignore_patterns("options.json"))
        options = ("--name", "half", "--resume", "auto")
    slip = ("-j", 0, "--image-size", 32, "--lr-schedule", "cosine")
    done = python("imagenet_nd.py", *line(folder, runs, *options, *slip))
    assert done.code == 2 and "was made with --lr-schedule step" in done.err
    # A snapshot that is left there would be continued without best.pt.
    assert runs.exists() == (how == "hand")
    result = train("imagenet_nd.py", *line(folder, runs, *options))
    assert "resumed from" in result.out
    assert [path.name for path in runs.iterdir()] == ["half"]
    assert not list((runs / "half").glob(".*"))
    assert_same_weights(runs / "half", stopped / "whole")
    best = [snapshot(run, "best.pt")["epoch"] for run in (runs / "half", stopped / "whole")]
    assert best[0] == best[1]
    starts = json.loads((runs / "half/ledger.json").read_text())
    assert len(starts) == 1 + (how in ("store", "hand")), "what the run has used on all machines"


def test_what_was_downloaded_takes_no_room_while_it_is_trained_on(folder, tmp_path, stopped):
    """Nor does what a process has left that was killed while it read it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.snapshot.pt.from_store.tmp").touch()
    where = line(folder, tmp_path, "--name", "run", "--resume", f"file://{stopped}/store/half")
    with start("imagenet_nd.py", *where, HOLD_AFTER="1") as run:
        run.until("waiting for a signal")
        assert not list((tmp_path / "run").glob(".*.tmp"))
    where = line(folder, tmp_path, "--name", "evaluated", "--resume", where[-2])
    train("imagenet_nd.py", "-e", *where)
    names = {path.name for path in (tmp_path / "evaluated").iterdir()}
    assert names == {"options.json", "summary.json", "train.log"}, "the best model is not needed"


def test_a_rejected_url_is_an_error_line_and_leaves_no_file(folder, tmp_path):
    """What is no checkpoint may be anything, and private."""
    (tmp_path / "secret").write_text("secret")
    url = f"file://{tmp_path}/secret"
    where = line(folder, tmp_path, "--name", "run", "--resume", url)
    done = python("imagenet_nd.py", "-j", "0", "--image-size", "32", *where)
    done.fails_with("is not a checkpoint")
    assert not list((tmp_path / "run").glob(".*"))
    with pytest.raises(UserError, match="is a folder without snapshot"):
        store.fetch(f"file://{tmp_path}", tmp_path)


def test_what_could_overwrite_or_miss_a_run_is_refused(tmp_path, monkeypatch):
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "summary.json").touch()
    (tmp_path / "half" / "snapshot.pt").touch()
    (tmp_path / "file").touch()
    here = tmp_path / "here" / "half"
    for own in (tmp_path / "half" / "snapshot.pt", f"file://{tmp_path}/half"):
        store.Store(str(tmp_path), here).open(str(own))  # continues that run
    for place, resume, words in [
        (tmp_path, None, "/half contains a run already"),
        (tmp_path, f"{tmp_path}/other/snapshot.pt", "/half contains a run already"),
        (tmp_path, f"file://{tmp_path}/other", "/half contains a run already"),
        (tmp_path / "file", "auto", "cannot tell whether .*/file/half has a snapshot"),
    ]:
        with pytest.raises(UserError, match=words):
            store.Store(str(place), here).open(resume)
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url, **_: (Bucket(), "typo/half"))
    with pytest.raises(UserError, match="the bucket typo of --store s3://typo/half does not exist"):
        store.Store("s3://typo", tmp_path / "half").open(None)


def test_the_files_here_are_not_overwritten_by_those_in_the_store(tmp_path):
    own = tmp_path / "runs" / "half"
    for folder, text in ((own, "newer"), (tmp_path / "half", "older")):
        folder.mkdir(parents=True)
        (folder / "snapshot.pt").write_text(text)
        (folder / "best.pt").write_text(text)
    one = store.Store(str(tmp_path), own)
    one.open("auto")
    one.close()
    store.fetch(f"file://{tmp_path}/half", own, with_best=True)
    assert (own / "snapshot.pt").read_text() == (own / "best.pt").read_text() == "newer"


def test_a_copy_that_another_machine_has_continued_is_not_overwritten(tmp_path):
    own, there = tmp_path / "runs" / "half", tmp_path / "half"
    for folder, starts in ((own, "[{}]"), (there, "[{}, {}]")):
        folder.mkdir(parents=True)
        (folder / "snapshot.pt").write_text(starts)
        (folder / "ledger.json").write_text(starts)
    with pytest.raises(UserError, match=f"type rm {own}/snapshot.pt, then run the same command"):
        store.Store(str(tmp_path), own).open("auto")
    (own / "snapshot.pt").unlink()
    for _ in range(2):  # fetched, then continued
        store.Store(str(tmp_path), own).open("auto")
        assert (own / "snapshot.pt").read_text() == "[{}, {}]"


def test_a_best_model_that_cannot_be_fetched_is_fetched_the_next_time(tmp_path):
    """The snapshot comes last: where there is one, nothing is fetched."""
    there, own = tmp_path / "half", tmp_path / "runs" / "half"
    for folder in (there / "best.pt", own):
        folder.mkdir(parents=True)
    (there / "snapshot.pt").touch()
    with pytest.raises(UserError, match="cannot tell whether"):
        store.Store(str(tmp_path), own).open("auto")
    assert not (own / "snapshot.pt").exists()


def test_a_failing_store_is_reported_once_and_training_ends_well(folder, tmp_path):
    (tmp_path / "file").touch()
    options = line(folder, tmp_path, "--name", "run", "--store", tmp_path / "file")
    result = train("imagenet_nd.py", *options)
    (warning,) = [text for text in result.out.splitlines() if text.startswith("warning")]
    assert f"the store {tmp_path}/file/run cannot be used (" in warning
    assert "snapshot.pt, summary.json could not be copied to" in result.out
    assert summary(tmp_path / "run")["finished_because"] == "epochs"


def test_urls_are_checked_before_anything_else(folder, parse, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for option, url, words in [
        ("--resume", "s4://a/b", "s4.* a store is a folder, s3://"),
        ("--store", "s3://a/b", "s3fs"),
    ]:
        with pytest.raises(UserError, match=words):
            parse("imagenet_nd", option, url, folder)


class Bucket(MemoryFileSystem):
    """An object store whose puts wait for ``gate`` and fail while ``errors`` are left."""

    protocol = "bucket"
    cachable = False

    def __init__(self, errors: int = 0):
        super().__init__()
        self.begun, self.gate, self.errors, self.puts = Event(), Event(), errors, []

    def put_file(self, lpath, rpath, **options):
        text = Path(lpath).read_text()
        self.begun.set()
        assert self.gate.wait(60)
        if self.errors:
            self.errors -= 1
            raise ConnectionError("gone for a while")
        self.puts.append((Path(rpath).name, text))


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """A function that makes a `store.Store` in a `Bucket`, and the bucket."""

    def make(errors: int = 0) -> tuple[store.Store, Bucket]:
        bucket = Bucket(errors)
        monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url, **_: (bucket, "/runs/one"))
        monkeypatch.setattr(store, "LAST_TRIES", (0.0, 0.0, 0.0))
        one = store.Store("bucket://runs", tmp_path)
        one.open(resume=None)
        return one, bucket

    return make


@pytest.mark.parametrize("errors", [0, 1])
def test_the_newest_version_arrives_and_nobody_waits_before_the_end(copies, tmp_path, errors):
    one, bucket = copies(errors)
    for text in ("old", "older", "new"):  # the first is on its way when the others come
        (tmp_path / "snapshot.pt").write_text(text)
        one.file(tmp_path / "snapshot.pt")
        assert bucket.begun.wait(60)
    one.file(tmp_path / "not there")
    bucket.gate.set()
    assert eventually(lambda: bucket.puts and bucket.puts[-1][1] == "new")
    assert len(bucket.puts) == 2 - errors
    one.close()
    assert not one.waiting


def test_the_next_snapshot_is_the_retry_and_the_end_tries_more(copies, tmp_path, logged):
    one, bucket = copies(errors=4)
    bucket.gate.set()
    for name, left in (("best.pt", 3), ("snapshot.pt", 1)):
        (tmp_path / name).write_text(name)
        one.file(tmp_path / name)
        assert eventually(lambda left=left: bucket.errors == left)
    one.close()
    assert {name for name, _ in bucket.puts} == {"best.pt", "snapshot.pt"}
    assert not bucket.errors
    assert len(logged) == 2, "once that it fails, once that it works again"


def test_the_end_does_not_wait_for_ever(copies, tmp_path, monkeypatch, logged):
    one, bucket = copies()
    (tmp_path / "best.pt").write_text("best")
    one.file(tmp_path / "best.pt")
    monkeypatch.setattr(store, "END_WAIT", 0.1)
    one.close()
    assert not bucket.puts and logged[0].startswith("note: best.pt could not be copied")
    bucket.gate.set()
    one.thread.join()
