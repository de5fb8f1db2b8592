"""Fill an image folder OUT/SPLIT/CLASS/ with several processes.

After an interruption the same command finishes the work: an image gets its name when it is whole,
existing images are skipped, and a marker file records the content and the finished splits.
"""

import fcntl
import json
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

from tqdm import tqdm

from utils.atomic import link_atomically, remove_leftovers, save_atomically
from utils.errors import UserError
from utils.folder import Folder, list_class
from utils.launch import die_with_parent

Job = TypeVar("Job")

SPLITS = ("train", "val", "test")
MARKER = ".prepared.json"
BATCH = 16  # images handed to a worker together
AGAIN = "run the same command again to finish the work"


class Item(NamedTuple):
    """One image: its place ``SPLIT/CLASS/NAME`` and its content.

    The content is bytes, a file to link or copy, or a function that a worker calls for the bytes.
    If that raises ValueError, the file ``source`` is copied.
    """

    place: str
    content: bytes | Path | Callable[[], bytes]
    source: Path | None = None


# The number of images that a complete split has, and the images of the source.
Split = tuple[int, Iterable[Item]]


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


def place_in(out: Path, place: str) -> Path:
    """The path of ``place`` in ``out``. Raises: `UserError` for a place outside, which an archive
    or a list of classes may name."""
    if ".." in PurePosixPath(place).parts or "\0" in place:
        raise UserError(f"{place!r}, in the source, is no place in {out}: get the source again")
    return out / place.lstrip("/")


def read_regular(path: Path) -> bytes:
    """The content of a file. Raises: `UserError` for a pipe or a device, which may have no end."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is a pipe or a device, not an image: remove it")
    return path.read_bytes()


def _write(out: Path, items: list[Item]) -> tuple[int, list[str]]:
    """In a worker: write the images that are missing. Returns the number of all, and a message for
    each undecodable one."""
    notes = []
    for place, content, source in items:
        path = place_in(out, place)
        if path.exists() and path.stat().st_size:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            link_atomically(content, path)
            continue
        try:
            data = content if isinstance(content, bytes) else content()
        except ValueError as error:
            notes.append(f"copied as it is: {source}: {error}")
            data = read_regular(source)
        # Not flushed, which would take longer than the rest. A file that a crash of the system
        # leaves empty is written again.
        save_atomically(lambda file, data=data: file.write(data), path, durable=False)
    return len(items), notes


def fill(
    out: Path, what: str, wanted: tuple[str, ...], open_source: Callable[..., Any], workers: int
) -> int:
    """Write all images that are missing.

    ``what`` is the command and all that determines the content, ``wanted`` the splits that ``out``
    is to have. ``open_source`` returns a `Split` for each unfinished split, or for some of them.

    Returns: the number of images that could not be decoded. Raises: `UserError`; the same command
    then continues.
    """
    with locked(out, what) as marker:
        counts, faults = dict(marker.get("counts", {})), 0
        missing = [name for name in wanted if name not in counts]
        todo: dict[str, Split] = open_source(missing) if missing else {}
        for name, (total, items) in todo.items():
            mark(out, what, False, counts)
            remove_leftovers(out / name, recursive=True)
            each = iter(items)
            batches = iter(lambda each=each: list(islice(each, BATCH)), [])
            faults += len(work(partial(_write, out), batches, workers, total, " images"))
            counts[name] = sum(len(names) for _, names in images_by_class(out / name))
            if counts[name] != total:
                print(f"note: the complete {name} set has {total} images, not {counts[name]}")
        if todo or not marker["finished"]:
            mark(out, what, True, counts)
    found = {split: len(Folder.class_names(out / split)) for split in counts}
    numbers = ", ".join(f"{s} {n} images in {found[s]} classes" for s, n in counts.items())
    print(f"{'done' if todo else 'nothing to do'}: {out} holds {what}: {numbers}")
    return faults
