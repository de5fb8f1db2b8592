"""Fill OUT/train, OUT/val and OUT/test, with several processes: class folders, or shards.

After an interruption the same command finishes the work: a file gets its name when it is complete,
existing files are skipped, and a marker file records the content and the finished splits.
"""

import fcntl
import json
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tqdm import tqdm

from utils.atomic import remove_leftovers, save_atomically
from utils.errors import UserError
from utils.folder import Folder, list_class
from utils.launch import die_with_parent

Job = TypeVar("Job")

SPLITS = ("train", "val", "test")
MARKER = ".prepared.json"
BATCH = 16  # images handed to a worker together
AGAIN = "run the same command again to finish the work"


class Stored(NamedTuple):
    """Bytes in a file; without a length, the whole file."""

    path: str
    offset: int = 0
    length: int | None = None

    def read(self) -> bytes:
        """Raises: OSError; `UserError` for a pipe or a device, which may have no end, and for a
        file that ends too early."""
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            raise UserError(f"{self.path} is a pipe or a device, not an image: remove it")
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read(self.length)
        if self.length is not None and len(data) < self.length:
            raise UserError(f"{self.path} is truncated: get it again")
        return data


class Item(NamedTuple):
    """One image: its place ``SPLIT/CLASS/NAME``, and its content.

    A worker gets the content by reading what is `Stored`, or by calling a function. With
    ``change`` it writes ``change(content)``, or the content as it is if that raises ValueError.
    """

    place: str
    content: bytes | Stored | Callable[[], bytes]
    change: Callable[[bytes], bytes] | None = None

    def data(self, messages: list[str]) -> bytes:
        """In a worker: the bytes to write; an image that cannot be changed adds a message."""
        content = self.content
        if isinstance(content, Stored):
            content = content.read()
        elif not isinstance(content, bytes):
            content = content()
        try:
            return self.change(content) if self.change else content
        except ValueError as error:
            name = self.content.path if isinstance(self.content, Stored) else self.place
            messages.append(f"copied as it is: {name}: {error}")
            return content


class Split(NamedTuple):
    """What OUT/train, say, is to hold: its images in chunks, of which a worker writes one at a
    time. Each chunk becomes a shard; for a folder they are small."""

    images: int
    chunks: Iterable[Iterable[Item]]  # a `Sequence` for shards
    classes: Sequence[str] = ()  # sorted; classes without an image, too


def in_batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """``items`` in chunks for a folder."""
    each = iter(items)
    return iter(lambda: list(islice(each, BATCH)), [])


def work(
    function: Callable[[Job], tuple[int, list[str]]],
    jobs: Iterable[Job],
    workers: int,
    total: int,
    unit: str,
) -> list[str]:
    """Call ``function(job)`` for each job in ``workers`` processes, with a progress bar.

    It returns how much of ``total`` it has done, and messages; these are printed. The processes end
    with this one, even if it is killed. Returns: all messages. Raises: what ``function`` raises;
    `UserError` if a process dies.
    """
    context = multiprocessing.get_context("spawn")  # numpy has started threads already
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pool = ProcessPoolExecutor(workers, context, die_with_parent, (os.getpid(),))
    every = 0.1 if sys.stderr.isatty() else 10  # seconds: few lines in a log file
    bar = tqdm(total=total, unit=unit, mininterval=every, maxinterval=10, delay=every)
    waiting: deque[Future] = deque()
    messages: list[str] = []

    def finish_one() -> None:
        number, new = waiting.popleft().result()
        bar.update(number)
        for message in new:
            tqdm.write(message, file=sys.stderr)
        messages.extend(new)

    try:
        # A terminal sends Ctrl-C to all processes; workers inherit that they ignore it.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        list(pool.map(abs, range(workers)))  # starts them all
        signal.signal(signal.SIGINT, before)
        for job in jobs:
            waiting.append(pool.submit(function, job))
            if len(waiting) >= 4 * workers:
                finish_one()
        while waiting:
            finish_one()
    except BrokenProcessPool as error:
        raise UserError(
            f"a worker process died, perhaps for lack of memory; {AGAIN}, with fewer --workers"
        ) from error
    finally:
        bar.close()
        if waiting:  # after an exception: drop the jobs in progress
            for child in multiprocessing.active_children():
                child.kill()
        pool.shutdown(cancel_futures=True)
    return messages


def images_by_class(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Each class in ``folder`` (none if it does not exist), and the sorted paths of its images
    relative to ``folder``, as training finds them. Raises: `UserError`."""
    for label in Folder.class_names(folder):
        yield label, os.fsdecode(list_class(folder, label).paths).split("\0")[:-1]


def read_marker(folder: Path) -> dict[str, Any]:
    """The content of a folder's marker file; {} without one. Raises: `UserError`."""
    try:
        marker = json.loads((folder / MARKER).read_bytes())
        return {key: marker[key] for key in ("what", "finished", "counts")}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{folder / MARKER} is damaged; remove the folder {folder}") from error


def mark(folder: Path, what: str, finished: bool, counts: dict[str, int]) -> None:
    """Write the marker file: ``what`` the folder holds, and the images of each finished split."""
    content = {"what": what, "finished": finished, "counts": counts}
    data = json.dumps(content, indent=2).encode()
    save_atomically(lambda file: file.write(data), folder / MARKER)


@contextmanager
def locked(out: Path, what: str) -> Iterator[dict[str, Any]]:
    """Make the folder ``out`` if necessary and lock it; yield the content of its marker.

    ``what``: the command and all that determines the content. Raises: `UserError` if ``out`` holds
    something else or is in use.
    """
    out.mkdir(parents=True, exist_ok=True)
    handle = os.open(out, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(f"another process is preparing {out} right now") from error
        marker = read_marker(out)
        if marker.get("what", what) != what:
            advice = "choose another folder or remove that one"
            raise UserError(f"{out} holds {marker['what']}, not {what}; {advice}")
        foreign = [split for split in SPLITS if (out / split).exists()]
        if foreign and not marker:
            text = f"{out} has a {foreign[0]} folder that this command did not make"
            raise UserError(f"{text}; choose another folder")
        yield marker
    finally:
        os.close(handle)
        with suppress(OSError):
            out.rmdir()  # fails unless it is empty


def check_place(out: Path, place: str) -> str:
    """``place`` itself: SPLIT/CLASS/NAME below ``out``, with folders between them or not.

    All names come through here, as archives, tables and metadata may name anything. Raises:
    `UserError` for a place outside ``out``, or one that training would ignore.
    """
    parts = place.split("/")
    if not {"", ".", ".."}.isdisjoint(parts) or "\0" in place or place.count("/") < 2:
        raise UserError(f"{place!r}, in the source, is no place in {out}: get the source again")
    if any(part.startswith(".") for part in parts):
        raise UserError(f"{place!r}, in the source, is a hidden file, which training would ignore")
    return place


def _link(source: Path, path: Path) -> None:
    """Make ``path`` a hard link to the file ``source``, or a symbolic one where that is impossible
    (another file system, a file of another user)."""
    source = source.resolve()  # a link to a symbolic link would not be a file of its own
    path.unlink(missing_ok=True)
    try:
        os.link(source, path)
    except OSError:
        os.symlink(source, path)


def _write(out: Path, chunk: Iterable[Item]) -> tuple[int, list[str]]:
    """In a worker: write the images that are missing. Returns the number of all, and a message for
    each undecodable one."""
    messages: list[str] = []
    count = 0
    for item in chunk:
        count += 1
        path = out / check_place(out, item.place)
        if path.exists() and path.stat().st_size:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        content = item.content
        if isinstance(content, Stored) and content.length is None and not item.change:
            _link(Path(content.path), path)
            continue
        data = item.data(messages)
        # Not flushed, which would take longer than the rest. A file that a crash of the system
        # leaves empty is written again.
        save_atomically(lambda file, data=data: file.write(data), path, durable=False)
    return count, messages


def _fill_folder(out: Path, name: str, split: Split, workers: int) -> tuple[int, int]:
    """Write a split as class folders. Returns: images that are there, and undecodable ones."""
    for class_name in split.classes:  # without images, too, as class numbers must not change
        (out / check_place(out, f"{name}/{class_name}/x")).parent.mkdir(parents=True, exist_ok=True)
    messages = work(partial(_write, out), split.chunks, workers, split.images, " images")
    return sum(len(names) for _, names in images_by_class(out / name)), len(messages)


Filler = Callable[[Path, str, Split, int], tuple[int, int]]


def fill(
    out: Path,
    what: str,
    splits: Iterable[str],
    open_splits: Callable[[list[str]], dict[str, Split]],
    workers: int,
    filler: Filler = _fill_folder,
) -> None:
    """Write all images that are missing.

    ``what`` is the command and all that determines the content, ``splits`` what ``out`` is to
    have. ``open_splits``, called with the unfinished ones, returns the `Split` of each, or of some;
    finished ones are ignored. ``filler`` writes one. Raises: `UserError`; the same command then
    continues.
    """
    with locked(out, what) as marker:
        counts, undecodable = dict(marker.get("counts", {})), 0
        missing = [name for name in splits if name not in counts]
        opened = open_splits(missing) if missing else {}
        opened = {name: split for name, split in opened.items() if name in missing}
        for name, split in opened.items():
            mark(out, what, False, counts)
            (out / name).mkdir(exist_ok=True)
            remove_leftovers(out / name, recursive=True)
            counts[name], failed = filler(out, name, split, workers)
            undecodable += failed
            if counts[name] != split.images:
                text = f"the complete {name} set has {split.images} images, not {counts[name]}"
                print(f"note: {text}")
        if opened or not marker["finished"]:
            mark(out, what, True, counts)
    numbers = ", ".join(f"{name} {count} images" for name, count in counts.items())
    print(f"{'done' if opened else 'nothing to do'}: {out} holds {what}: {numbers}")
    if undecodable:
        print(f"{undecodable} images cannot be decoded, and were copied as they are")
