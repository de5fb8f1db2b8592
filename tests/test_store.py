"""--store and URLs to resume from: copies of a run in a store, and faults of it."""

import signal
import threading
from pathlib import Path

import pytest
from conftest import Result, python, summary, train
from fsspec.implementations.memory import MemoryFileSystem
from running import assert_same_weights, snapshot, start, tiny

from utils.errors import INTERRUPTED, UserError
from utils.run import store

TWO_EPOCHS = ("-b", "10", "--epochs", "2", "-p", "1")


def line(folder: Path, runs: Path, name: str | None, *more: object) -> tuple[object, ...]:
    """A command line behind the script's name."""
    named = ("--name", name) if name else ()
    return (*tiny(full=True)[0], *TWO_EPOCHS, "--output-dir", runs, *named, *more, folder)


def attempt(folder: Path, runs: Path, *more: object, **env: str) -> Result:
    """Run to the end, whatever it is."""
    arguments = line(folder, runs, "run", "--image-size", "32", "-j", "1", *more)
    return python("imagenet_nd.py", *arguments, **{**tiny()[1], **env})


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, folder) -> Path:
    """The undisturbed run "whole", and "half", stopped in epoch 2 and in the store too."""
    runs = tmp_path_factory.mktemp("stopped")
    train("imagenet_nd.py", *line(folder, runs, "whole"), **tiny()[1])
    where = line(folder, runs, "half", "--store", runs / "store")
    with start("imagenet_nd.py", *where, **tiny(step_seconds=0.05)[1]) as run:
        run.until(r"Epoch 2/2 step +3/")
        run.send(signal.SIGTERM)
        result = run.result()
    assert result.code == INTERRUPTED, result.err
    assert snapshot(runs / "half")["progress"]["step"] >= 3
    return runs


def test_best_and_last_arrive(stopped):
    here, there = stopped / "half", stopped / "store" / "half"
    names = {"best.pt", "snapshot.pt", "options.json", "summary.json"}
    assert {path.name for path in there.iterdir()} == names
    for name in names:
        assert (there / name).read_bytes() == (here / name).read_bytes()


@pytest.mark.parametrize("how", ["auto", "file", "folder"])
def test_a_new_machine_continues_bit_for_bit(folder, tmp_path, stopped, how):
    url = f"file://{stopped}/store/half"
    options = {
        "auto": ("--resume", "auto", "--store", stopped / "store"),
        "file": ("--resume", f"{url}/snapshot.pt"),
        "folder": ("--resume", url),
    }[how]
    kept = {path: path.read_bytes() for path in (stopped / "store" / "half").iterdir()}
    name = "half" if how == "auto" else None
    result = train("imagenet_nd.py", *line(folder, tmp_path, name, *options), **tiny()[1])
    for path, content in kept.items():
        path.unlink()
        path.write_bytes(content)
    assert "resumed from" in result.out
    assert [path.name for path in tmp_path.iterdir()] == ["half"]
    assert not list((tmp_path / "half").glob(".*"))
    assert_same_weights(tmp_path / "half", stopped / "whole")
    best = [snapshot(run, "best.pt") for run in (tmp_path / "half", stopped / "whole")]
    assert best[0]["epoch"] == best[1]["epoch"]


def test_what_could_overwrite_or_miss_a_run_is_refused(folder, tmp_path, stopped):
    taken = attempt(folder, tmp_path, "--store", stopped / "store", "--name", "half")
    assert taken.code == 2
    assert "/store/half holds a run already" in taken.sentence
    (tmp_path / "file").touch()
    unknown = attempt(folder, tmp_path, "--store", tmp_path / "file", "--resume", "auto")
    assert unknown.code == 2
    assert "cannot tell whether" in unknown.sentence
    absent = attempt(folder, tmp_path, "--resume", f"file://{stopped}/absent/snapshot.pt")
    assert "there is no file://" in absent.sentence


def test_a_failing_store_is_told_once_and_training_ends_well(folder, tmp_path):
    (tmp_path / "file").touch()
    result = attempt(folder, tmp_path, "--store", tmp_path / "file")
    assert result.code == 0, result.err
    (warning,) = [text for text in result.out.splitlines() if text.startswith("warning")]
    assert f"the store {tmp_path}/file/run cannot be used (" in warning
    assert "snapshot.pt, summary.json could not be copied to" in result.out
    assert summary(tmp_path / "run")["finished_because"] == "epochs"


def test_urls_are_checked_before_anything_else(folder, tmp_path):
    for url, words in (("s4://a/b", "s4:// is not known"), ("file:///", "names no bucket")):
        with pytest.raises(UserError, match=words):
            store.check_options(url, None)
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['s3fs'] = None\n")
    paths = f"{tmp_path}:{tiny()[1]['PYTHONPATH']}"
    without = attempt(folder, tmp_path / "runs", "--store", "s3://a/b", PYTHONPATH=paths)
    assert without.code == 2
    assert "s3fs" in without.sentence
    assert not (tmp_path / "runs").exists()


class Bucket(MemoryFileSystem):
    """An object store whose puts wait for ``gate`` and fail while ``faults`` are left."""

    protocol = "bucket"
    cachable = False

    def __init__(self, faults: int = 0):
        super().__init__()
        self.gate, self.faults, self.puts = threading.Event(), faults, []

    def put_file(self, lpath, rpath, **options):
        assert self.gate.wait(60)
        if self.faults:
            self.faults -= 1
            raise ConnectionError("gone for a while")
        self.puts.append((Path(rpath).name, Path(lpath).read_text()))


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """A function that makes a `store.Store` in a `Bucket`, and the bucket."""

    def make(faults: int = 0) -> tuple[store.Store, Bucket]:
        bucket = Bucket(faults)
        monkeypatch.setattr(store, "_connect", lambda url: (bucket, "/runs/one"))
        monkeypatch.setattr(store, "_LONGEST_PAUSE", 0.01)
        one = store.Store("bucket://runs", tmp_path)
        one.open(goes_on=False, wanted=())
        return one, bucket

    return make


def test_the_newest_version_arrives_and_nobody_waits_before_the_end(copies, tmp_path):
    one, bucket = copies()
    for text in ("old", "older", "new"):
        (tmp_path / "snapshot.pt").write_text(text)
        one.upload(tmp_path / "snapshot.pt")
    one.upload(tmp_path / "not there")
    bucket.gate.set()
    one.close()
    assert bucket.puts[-1] == ("snapshot.pt", "new")


def test_uploads_are_tried_again(copies, tmp_path, logged):
    one, bucket = copies(faults=4)
    (tmp_path / "best.pt").write_text("best")
    one.upload(tmp_path / "best.pt")
    bucket.gate.set()
    while bucket.faults:
        pass
    one.close()
    assert bucket.puts == [("best.pt", "best")]
    assert [text.split()[0] for text in logged] == ["warning:", "the"]


def test_the_end_does_not_wait_for_ever(copies, tmp_path, monkeypatch, logged):
    monkeypatch.setattr(store, "END_WAIT", 0.1)
    one, _ = copies()
    (tmp_path / "best.pt").write_text("best")
    one.upload(tmp_path / "best.pt")
    one.close()
    assert "best.pt could not be copied to bucket://runs/" in logged[-1]
