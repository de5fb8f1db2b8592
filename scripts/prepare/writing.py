"""Write OUT/train, OUT/val and OUT/test with several processes: class folders or shards.

After an interruption the same command finishes the work. A file gets its name when it is complete,
existing files are skipped, and a marker file records the content and the finished splits.
"""

import fcntl
import json
import math
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tqdm import tqdm

from utils.data.folder import class_names, list_class
from utils.start.atomic import remove_leftovers, save_atomically
from utils.start.errors import UserError
from utils.start.orphans import die_with_parent

SPLITS = ("train", "val", "test")
MARKER = ".prepared.json"
BATCH = 16  # images that a worker writes into class folders at a time
AGAIN = "run the same command again to finish the work"


class Stored(NamedTuple):
    """Bytes in a file; without a length, the whole file. Call it to read them."""

    path: str
    offset: int = 0
    length: int | None = None

    def __call__(self) -> bytes:
        """Raises: OSError; `UserError` for a pipe or device, which may never end, and for a file
        that ends too early."""
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            raise UserError(f"{self.path} is a pipe or a device, not an image: remove it")
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            try:
                data = file.read(self.length)
            except OSError as error:  # of a disk: it does not name the file, and OUT is in order
                error.filename = self.path
                raise
        if self.length is not None and len(data) < self.length:
            raise UserError(f"{self.path} is truncated: get it again")
        return data


class Item(NamedTuple):
    """An image: its place SPLIT/CLASS/NAME below OUT, and a function that returns its bytes."""

    place: str
    content: Callable[[], bytes]


class Chunks(Protocol):
    """The chunks of a split: a list, or `Lazy`."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Iterable[Item]]: ...
    def __getitem__(self, number: int, /) -> Iterable[Item]: ...


class Lazy:
    """``count`` items in chunks of ``size``. ``item(i)`` is called only when a chunk is used."""

    def __init__(self, count: int, size: int, item: Callable[[int], Item]):
        self.items, self.size, self.item = range(count), size, item

    def __len__(self) -> int:
        return math.ceil(len(self.items) / self.size)

    def __iter__(self) -> Iterator[list[Item]]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> list[Item]:
        return [*map(self.item, self.items[number * self.size :][: self.size])]


class Split(NamedTuple):
    """The content of a split, such as OUT/train. A worker writes one chunk at a time: a shard,
    or some images of a folder. ``change`` returns the bytes to write. It raises
    ValueError for an image that cannot be decoded."""

    images: int
    chunks: Chunks
    classes: Sequence[str]  # also those without an image
    change: Callable[[bytes], bytes] | None = None

    def data(self, item: Item, messages: list[str]) -> bytes:
        """Return the bytes to write, in a worker. An undecodable image stays, with a message."""
        data = item.content()
        try:
            return self.change(data) if self.change else data
        except ValueError as error:
            messages.append(f"copied unchanged: {item.place}: {error}")
            return data


def work(
    function: Callable[[Any], tuple[int, list[str]]],
    jobs: Iterable[Any],
    workers: int,
    total: int,
    unit: str,
) -> list[str]:
    """Call ``function(job)`` for each job in at most ``workers`` processes, with a progress bar.

    It returns how much of ``total`` it has done, and messages to print. The processes end with this
    one, even if it is killed. Returns: all messages. Raises: the exceptions of ``function``, and
    `UserError` if a process dies.
    """
    if not total:
        return []
    jobs, workers = iter(jobs), min(workers, total)
    context = multiprocessing.get_context("spawn")  # numpy has started threads already
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pool = ProcessPoolExecutor(workers, context, die_with_parent, (os.getpid(),))
    every = 0.1 if sys.stderr.isatty() else 10  # seconds: few lines in a log file
    bar = tqdm(total=total, unit=unit, mininterval=every, maxinterval=10, delay=every)
    running: deque[Future] = deque()
    messages: list[str] = []
    try:
        # A terminal sends Ctrl-C to all processes; workers inherit the ignored signal.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        list(pool.map(abs, range(workers)))  # starts them all
        signal.signal(signal.SIGINT, before)
        while True:
            while len(running) < 4 * workers and (job := next(jobs, None)) is not None:
                running.append(pool.submit(function, job))
            if not running:
                return messages
            count, new = running.popleft().result()
            bar.update(count)
            for message in new:
                tqdm.write(message, file=sys.stderr)
            messages += new
    except BrokenProcessPool as error:
        text = "a worker process died, perhaps because memory ran out"
        raise UserError(f"{text}; {AGAIN}, with fewer --workers") from error
    finally:
        bar.close()
        if running:  # after an exception: drop the jobs in progress
            for child in multiprocessing.active_children():
                child.kill()
        pool.shutdown(cancel_futures=True)


def images_by_class(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each class in ``folder``, with its image paths relative to ``folder``, sorted as in
    training. Yields nothing if ``folder`` does not exist. Raises: `UserError`."""
    for label in class_names(folder):
        yield label, os.fsdecode(list_class(folder, label).paths).split("\0")[:-1]


def read_marker(folder: Path) -> dict[str, Any]:
    """Read a folder's marker file; {} if there is none. Raises: `UserError`."""
    try:
        marker = json.loads((folder / MARKER).read_bytes())
        return {key: marker[key] for key in ("what", "finished", "counts")}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{folder / MARKER} is damaged; remove the folder {folder}") from error


@contextmanager
def _locked(out: Path, what: str) -> Iterator[dict[str, Any]]:
    """Make the folder ``out`` if necessary and lock it; yield the content of its marker.

    Raises: `UserError` if ``out`` holds other data or is in use.
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
    """Check and return ``place``: SPLIT/CLASS/NAME below ``out``, perhaps with more folders.

    All names are checked here, because archives, tables and metadata may hold any name. Raises:
    `UserError` for a place outside ``out``, or one that training would ignore.
    """
    parts = place.split("/")
    if not {"", ".", ".."}.isdisjoint(parts) or "\0" in place or len(parts) < 3:
        raise UserError(f"{place!r} in the source would be outside {out}: get the source again")
    if any(part.startswith(".") for part in parts):
        raise UserError(f"{place!r} in the source is a hidden file, which training would ignore")
    return place


def _link(source: Path, path: Path) -> None:
    """Make ``path`` a hard link to the file ``source``, or a symbolic one where that is impossible
    (another file system, a file of another user)."""
    source = source.resolve()  # a hard link to a symbolic link would not hold the file
    path.unlink(missing_ok=True)
    try:
        os.link(source, path)
    except OSError:
        os.symlink(source, path)


def _write_images(out: Path, split: Split, chunk: Iterable[Item]) -> tuple[int, list[str]]:
    """Write missing images, in a worker. Returns: the number of all images, and messages."""
    messages: list[str] = []
    count = 0
    for item in chunk:
        count += 1
        path = out / check_place(out, item.place)
        if path.exists() and path.stat().st_size:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(item.content, Stored) and item.content.length is None and not split.change:
            _link(Path(item.content.path), path)
            continue
        data = split.data(item, messages)
        # Not flushed to disk, which would take longer than the rest. If the system crashes and
        # leaves an empty file, the next call writes it again.
        save_atomically(lambda file, data=data: file.write(data), path, durable=False)
    return count, messages


def write_folders(out: Path, name: str, split: Split, workers: int) -> tuple[int, int]:
    """Write OUT/``name`` as class folders. Returns: numbers of files and undecodable images."""
    for class_name in split.classes:  # also classes without images: numbers must not change
        (out / check_place(out, f"{name}/{class_name}/x")).parent.mkdir(parents=True, exist_ok=True)
    write = partial(_write_images, out, split._replace(chunks=()))
    messages = work(write, split.chunks, workers, split.images, " images")
    images = sum(len(names) for _, names in images_by_class(out / name))
    if images != split.images:
        print(f"note: {out / name} has {images} images, but its source has {split.images}")
    return images, len(messages)


def fill(
    out: Path,
    what: str,
    names: Sequence[str],
    open_splits: Callable[[Sequence[str]], dict[str, Split]],
    workers: int,
    write: Callable[[Path, str, Split, int], tuple[int, int]] | None = None,
    known: Mapping[str, int] | None = None,
) -> None:
    """Write all files of ``out`` that are missing.

    ``what``: the command and everything else that determines the content. ``open_splits`` gets the
    unfinished ones of ``names``; it returns the `Split` of each that exists. ``write`` writes a
    split as a few large files; it returns the numbers of new files and of undecodable images.
    Without ``write``, splits become class folders; finished ones are not checked again, unless
    ``known``, the number of images in the source, is another one. Raises: `UserError`; after it,
    the same command continues.
    """
    with _locked(out, what) as marker:
        counts, new, undecodable = dict(marker.get("counts", {})), 0, 0

        def mark(finished: bool) -> None:
            content = {"what": what, "finished": finished, "counts": counts}
            data = json.dumps(content, indent=2).encode()
            save_atomically(lambda file: file.write(data), out / MARKER)

        now = counts | dict(known or {})
        missing = [name for name in names if write or counts.get(name, -1) != now.get(name)]
        opened = open_splits(missing) if missing else {}
        opened = {name: opened[name] for name in missing if name in opened}
        for name, split in opened.items():
            counts.pop(name, None)
            mark(False)
            (out / name).mkdir(exist_ok=True)
            remove_leftovers(out / name, recursive=True)
            files, failed = (write or write_folders)(out, name, split, workers)
            new, undecodable = new + files, undecodable + failed
            counts[name] = split.images
        if opened or not marker["finished"]:
            mark(True)
    numbers = ", ".join(f"{name} {count} images" for name, count in counts.items())
    print(f"{'done' if new else 'nothing to do'}: {out}: {numbers}")
    if undecodable:
        print(f"{undecodable} images cannot be decoded, and were copied unchanged")
