"""Writes image folders OUT/SPLIT/CLASS/IMAGE in such a way that an interruption never hurts.

An image appears under its name only when it is whole, and marker files tell what a folder holds and
whether it is finished, so that a preparation can always be run again to finish the work.
"""

import csv
import gzip
import io
import json
import os
import pickle
import shutil
import struct
import sys
import tarfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from tqdm import tqdm

try:
    import fcntl
except ImportError:  # not a Unix system: no protection from two preparations at once
    fcntl = None

SPLITS = ("train", "val")
PREPARING, PREPARED = ".preparing.json", ".prepared.json"
IMAGE_SUFFIXES = (".jpeg", ".png")
SECONDS_BETWEEN_LINES = 10.0


class PrepareError(Exception):
    """What stops a preparation, as one sentence for the user."""


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Turns what reading damaged data raises into a PrepareError that names `what` is read."""
    try:
        yield
    except (tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError, struct.error) as error:
        raise PrepareError(f"{what} is damaged ({error})") from error
    except (
        *(csv.Error, pickle.UnpicklingError, ValueError, TypeError, LookupError),
        *(AttributeError, OverflowError, MemoryError),
    ) as error:
        raise PrepareError(f"{what} does not hold what it should ({error})") from error


class Item(NamedTuple):
    """One image: its place OUT/split/label/name, and a file to copy or what gives its bytes."""

    split: str
    label: str
    name: str
    content: Path | Callable[[], bytes]


class Plan(NamedTuple):
    """What a source holds.

    items: every image of `splits`; the content of one must be read before the next is asked for.
    full: the number of images in the complete data set, by split.
    notes: sentences for the user.
    """

    items: Iterator[Item]
    splits: tuple[str, ...]
    full: dict[str, int]
    notes: list[str]


def png_bytes(pixels: np.ndarray) -> bytes:
    """A PNG file of a uint8 array: height x width (greyscale) or height x width x 3 (RGB)."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_whole(path: Path, content: bytes | Path) -> None:
    """Writes bytes, or links or copies a file, so that `path` never exists half-written.

    Raises PrepareError where it cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        if isinstance(content, bytes):
            part.write_bytes(content)
        else:
            try:
                # The resolved path, as a link to a symbolic link would not be an image of its own.
                os.link(content.resolve(), part)
            except OSError:
                shutil.copyfile(content, part)
        os.replace(part, path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink()
        if not isinstance(error, OSError):
            raise
        raise PrepareError(
            f"cannot write {path} ({error.strerror}); once that is put right, run the same "
            "command again to finish the work"
        ) from error


def _read_marker(path: Path) -> dict[str, Any] | None:
    try:
        marker = json.loads(path.read_bytes())
        return {"source": marker["source"], "options": dict(marker["options"]), **marker}
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise PrepareError(f"{path} is damaged; remove the folder {path.parent}") from error


def _describe(marker: dict[str, Any]) -> str:
    options = ", ".join(f"{k} {v}" for k, v in marker["options"].items() if v is not None)
    return f"{marker['source']} ({options})" if options else marker["source"]


def _summary(counts: dict[str, dict[str, int]]) -> str:
    return ", ".join(
        f"{s} {n['images']} images in {n['classes']} classes" for s, n in counts.items()
    )


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Holds a lock on `folder`, which the system lets go however the process ends."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PrepareError(f"another process is preparing {folder} right now") from error
        except OSError:
            pass  # some network file systems have no locks
        yield
    finally:
        os.close(handle)


def _with_progress(items: Iterator[Item], total: int) -> Iterator[Item]:
    if sys.stderr.isatty():
        yield from tqdm(items, total=total, unit=" images")
        return
    said = time.monotonic()
    for number, item in enumerate(items, start=1):
        yield item
        if time.monotonic() - said >= SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            print(f"{number} of {total} images", file=sys.stderr, flush=True)


def _write_items(out: Path, plan: Plan) -> Counter[str]:
    """Writes the images that `out` lacks and returns how many the plan has, by split."""
    for split in SPLITS:
        for stale in out.glob(f"{split}/*/.*.part"):
            stale.unlink()
    seen: Counter[str] = Counter()
    for item in _with_progress(plan.items, sum(plan.full[split] for split in plan.splits)):
        path = out / item.split / item.label / item.name
        seen[item.split] += 1
        # An empty file is what a crash of the whole system may leave behind.
        if not path.exists() or path.stat().st_size == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = item.content
            write_whole(path, content if isinstance(content, Path) else content())
    return seen


def _images_by_class(folder: Path) -> dict[str, int]:
    return {
        label.name: sum(name.lower().endswith(IMAGE_SUFFIXES) for name in os.listdir(label))
        for label in folder.iterdir()
        if label.is_dir()
    }


def _check(out: Path, seen: Counter[str], counts: dict[str, dict[str, int]]) -> None:
    """Compares what lies in `out` with what the source had, and adds it to `counts`."""
    classes = {}
    for split in (*counts, *seen):
        found = _images_by_class(out / split)
        classes[split] = set(found)
        if split in seen and sum(found.values()) != seen[split]:
            raise PrepareError(
                f"{out / split} has {sum(found.values())} images but the source {seen[split]}: "
                "remove what does not belong there"
            )
        counts[split] = {"classes": len(found), "images": sum(found.values())}
    # A class that only one split has would shift the numbers of all classes after it.
    if len(classes) == 2 and (odd := classes["train"] ^ classes["val"]):
        raise PrepareError(
            f"train and val in {out} do not have the same classes: {len(odd)} are in one "
            f"only, such as {min(odd)}"
        )


def _prepare_locked(
    out: Path, wanted: dict[str, Any], open_plan: Callable[[tuple[str, ...]], Plan]
) -> None:
    done, begun = _read_marker(out / PREPARED), _read_marker(out / PREPARING)
    for marker in (done, begun):
        if marker and {key: marker[key] for key in wanted} != wanted:
            raise PrepareError(
                f"{out} holds {_describe(marker)}, not {_describe(wanted)}; "
                "choose another folder or remove that one"
            )
    if not done and not begun and any((out / split).exists() for split in SPLITS):
        raise PrepareError(
            f"{out} has a train or val folder of other origin; choose another folder"
        )
    counts = done.get("counts", {}) if done else {}
    plan = open_plan(tuple(counts)) if len(counts) < len(SPLITS) else None
    for note in plan.notes if plan else []:
        print(note, flush=True)
    if not plan or not plan.splits:
        (out / PREPARING).unlink(missing_ok=True)
        print(f"nothing to do: {out} already holds {_describe(wanted)}: {_summary(counts)}")
        return
    write_whole(out / PREPARING, json.dumps(wanted, indent=2).encode())
    seen = _write_items(out, plan)
    _check(out, seen, counts)
    write_whole(out / PREPARED, json.dumps({**wanted, "counts": counts}, indent=2).encode())
    (out / PREPARING).unlink()
    print(f"done: {out}: {_summary(counts)}")
    for split, number in seen.items():
        if number != plan.full[split]:
            print(f"note: the complete {split} set has {plan.full[split]} images, not {number}")


def prepare(
    out: Path,
    source: str,
    options: dict[str, int | str | None],
    open_plan: Callable[[tuple[str, ...]], Plan],
) -> None:
    """Makes the image folders OUT/train/CLASS/ and OUT/val/CLASS/ from a source.

    Writes only what is missing, so that it finishes what an interrupted call with the same source
    and options began, and does nothing in a folder that is finished.

    Args:
        out: the folder to make.
        source: the source's name; together with `options` it tells what the folder holds.
        options: what else decides the content, as JSON can store it.
        open_plan: opens the source; is given the splits that are finished already.

    Raises:
        PrepareError: `out` holds or is to hold something else, another process is writing it, it
            cannot be written, or the source is missing or damaged.
    """
    is_new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise PrepareError(f"{out} is not a folder") from error
    try:
        with _only_writer(out):
            _prepare_locked(out, {"source": source, "options": options}, open_plan)
    finally:
        if is_new:
            with suppress(OSError):
                out.rmdir()  # fails, as it should, unless nothing was written
