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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tqdm import tqdm

from utils.atomic import link_atomically, remove_leftovers, save_atomically
from utils.data.index import class_names, image_files
from utils.errors import UserError
from utils.launch.supervise import die_with_parent

Job, Answer = TypeVar("Job"), TypeVar("Answer")

SPLITS = ("train", "val", "test")
MARKER = ".prepared.json"
BATCH = 16  # images handed to a worker together
AGAIN = "run the same command again to finish the work"


class Item(NamedTuple):
    """One image: its place ``SPLIT/CLASS/NAME`` and its content.

    The content is a file to link or copy, or a function that returns the bytes. The function runs
    in a worker, or ``in_turn`` in this process (for a tar). If it raises ValueError, ``source`` is
    copied.
    """

    place: str
    content: Any
    source: Path | None = None
    in_turn: bool = False


# The number of images that a complete split has, and the images of the source.
Split = tuple[int, Iterable[Item]]


def progress(total: int, unit: str = " images") -> tqdm:
    """A progress bar; in a log file, one line every 10 seconds."""
    every = 0.1 if sys.stderr.isatty() else 10
    return tqdm(total=total, unit=unit, mininterval=every, maxinterval=10, delay=every)


def spread(
    function: Callable[[Job], Answer], jobs: Iterable[Job], workers: int
) -> Iterator[Answer]:
    """Yield ``function(job)`` of each job, computed by ``workers`` processes, in any order.

    Jobs are taken as processes become free. The processes end with this one, even if it is killed,
    and at once when this iterator is closed. Raises: what ``function`` raises; `UserError` if a
    process dies.
    """
    context = multiprocessing.get_context("spawn")  # numpy has started threads already
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pool = ProcessPoolExecutor(workers, context, die_with_parent, (os.getpid(),))
    waiting: set[Any] = set()
    try:
        # A terminal sends Ctrl-C to all processes; workers inherit that they ignore it.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            list(pool.map(abs, range(workers)))  # starts them all
        finally:
            signal.signal(signal.SIGINT, before)
        for job in jobs:
            waiting.add(pool.submit(function, job))
            if len(waiting) >= 2 * workers:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (one.result() for one in done)
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            yield from (one.result() for one in done)
    except BrokenProcessPool as error:
        raise UserError(
            f"a worker process died, perhaps for lack of memory; {AGAIN}, with fewer --workers"
        ) from error
    finally:
        if waiting:  # after an exception: drop the jobs in progress
            for child in multiprocessing.active_children():
                child.kill()
        pool.shutdown(cancel_futures=True)


def images_by_class(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Each class in ``folder``, and the sorted paths of its images relative to ``folder``, as
    training finds them; nothing if ``folder`` does not exist. Raises: `UserError`."""
    for label in class_names(folder):
        yield label, sorted(map(os.fsdecode, image_files(folder, label, {})))


def write_whole(path: Path, content: bytes | Path) -> None:
    """Write bytes, or link or copy a file; ``path`` is complete or absent. Raises: `UserError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            link_atomically(content, path)
        else:
            # Not flushed, which would take longer than the rest. A file that a crash of the system
            # leaves empty is written again.
            save_atomically(lambda file: file.write(content), path, durable=False)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}); then {AGAIN}") from error


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
    write_whole(folder / MARKER, json.dumps(content, indent=2).encode())


@contextmanager
def locked(out: Path, what: str) -> Iterator[dict[str, Any]]:
    """Make the folder ``out`` if necessary and lock it; yield the content of its marker.

    ``what``: the command and all that determines the content. A new folder that stays empty is
    removed. Raises: `UserError` if ``out`` holds something else or is in use.
    """
    is_new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{out} is not a folder") from error
    handle = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another process is preparing {out} right now") from error
        except OSError:
            pass  # some network file systems have no locks
        marker = read_marker(out)
        if marker.get("what", what) != what:
            advice = "choose another folder or remove that one"
            raise UserError(f"{out} holds {marker['what']}, not {what}; {advice}")
        foreign = next((split for split in SPLITS if (out / split).exists()), None)
        if foreign and not marker:
            raise UserError(
                f"{out} has a {foreign} folder that this command did not make; "
                "choose another folder"
            )
        yield marker
    finally:
        os.close(handle)
        if is_new:
            with suppress(OSError):
                out.rmdir()  # fails unless it is empty


def _write(out: Path, items: list[Item]) -> tuple[int, list[tuple[Item, str]]]:
    """In a worker: write images. Returns their number, and the undecodable ones with the reason."""
    faults = []
    for item in items:
        try:
            content = item.content if isinstance(item.content, Path) else item.content()
        except ValueError as error:
            faults.append((item, str(error)))
            content = item.source.read_bytes()
        write_whole(out / item.place, content)
    return len(items), faults


def fill(
    out: Path, what: str, wanted: tuple[str, ...], open_source: Callable[..., Any], workers: int
) -> int | None:
    """Write all images that are missing.

    Args:
        what: the command and all that determines the content.
        wanted: the splits that ``out`` is to have.
        open_source: returns a `Split` for each unfinished split, or for some of them.

    Returns: the number of images that could not be decoded; None if there was nothing to do.
    Raises: `UserError`; the same command then continues.
    """
    with locked(out, what) as marker:
        counts, faults = dict(marker.get("counts", {})), 0
        missing = [name for name in wanted if name not in counts]
        todo: dict[str, Split] = open_source(missing) if missing else {}
        for name, (total, items) in todo.items():
            mark(out, what, False, counts)
            faults += _fill_split(out, name, total, items, workers)
            counts[name] = sum(len(names) for _, names in images_by_class(out / name))
        if todo or not marker["finished"]:
            mark(out, what, True, counts)
    found = {split: len(class_names(out / split)) for split in counts}
    numbers = ", ".join(f"{s} {n} images in {found[s]} classes" for s, n in counts.items())
    print(f"{'done' if todo else 'nothing to do'}: {out} holds {what}: {numbers}")
    return faults if todo else None


def _fill_split(out: Path, name: str, total: int, items: Iterable[Item], workers: int) -> int:
    """Write the missing images of a split. Returns the number that could not be decoded."""
    seen = faults = 0

    def missing() -> Iterator[Item]:
        nonlocal seen
        for item in items:
            seen += 1
            path = out / item.place
            if path.exists() and path.stat().st_size:
                bar.update()
            elif item.in_turn:
                yield item._replace(content=partial(bytes, item.content()))
            else:
                yield item

    each = missing()
    batches = iter(lambda: list(islice(each, BATCH)), [])
    remove_leftovers(out / name, recursive=True)
    try:
        with (
            progress(total) as bar,
            closing(spread(partial(_write, out), batches, workers)) as written,
        ):
            for number, failed in written:
                bar.update(number)
                faults += len(failed)
                for item, reason in failed:
                    tqdm.write(f"copied as it is: {item.source}: {reason}", file=sys.stderr)
    finally:
        remove_leftovers(out / name, recursive=True)
    found = sum(len(names) for _, names in images_by_class(out / name))
    if found != seen:
        raise UserError(
            f"{out / name} has {found} images but the source {seen}: "
            "remove the files that do not belong there"
        )
    if seen != total:
        print(f"note: the complete {name} set has {total} images, not {seen}")
    return faults
