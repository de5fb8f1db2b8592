"""Writes image folders OUT/SPLIT/CLASS/IMAGE in such a way that an interruption never hurts.

An image appears under its name only when it is whole, and marker files say what a folder holds and
whether it is finished, so that a preparation can always be run again to finish the work.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from prepare.files import images_by_class, write_whole
from tqdm import tqdm

from utils.atomic import remove_leftovers
from utils.errors import UserError

try:
    import fcntl
except ImportError:  # not a Unix system: no protection from two preparations at once
    fcntl = None

SPLITS = ("train", "val")
ALL_SPLITS = (*SPLITS, "test")
PREPARING, PREPARED = ".preparing.json", ".prepared.json"
SECONDS_BETWEEN_LINES = 10.0


class Item(NamedTuple):
    """One image: its place OUT/split/label/name, and a file to copy or a function for its bytes.

    The name may begin with sub-folders of the class.
    """

    split: str
    label: str
    name: str
    content: Path | Callable[[], bytes]


class Plan(NamedTuple):
    """What a source holds.

    items: every image of `splits`; the content of one must be read before the next is asked for.
    full: the number of images in the complete data set, by split.
    notes: sentences for the user.
    same_classes: whether train and val must have the same classes in the end.
    """

    items: Iterator[Item]
    splits: tuple[str, ...]
    full: dict[str, int]
    notes: list[str]
    same_classes: bool = True


class Progress:
    """Shows the progress: as a bar on a terminal, as a line every ten seconds elsewhere."""

    def __init__(self, total: int, unit: str = " images"):
        self.total, self.number, self.unit = total, 0, unit
        self.said = time.monotonic(), 0  # time and number of images of the last line printed
        self.bar = tqdm(total=total, unit=unit) if sys.stderr.isatty() else None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def advance(self) -> None:
        """Counts one more image."""
        self.number += 1
        if self.bar is not None:
            self.bar.update()
            return
        seconds = time.monotonic() - self.said[0]
        if seconds >= SECONDS_BETWEEN_LINES:
            rate = (self.number - self.said[1]) / seconds
            left = tqdm.format_interval(max(0, self.total - self.number) / rate)
            unit = self.unit
            speed = f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"
            line = f"{self.number} of {self.total}{unit}, {speed}{unit}/s, {left} left"
            print(line, file=sys.stderr, flush=True)
            self.said = time.monotonic(), self.number


# Writes images that are missing, each to its path, and yields once for each that is written.
Writer = Callable[[Iterator[tuple[Path, Item]]], Iterator[None]]


def read_marker(path: Path) -> dict[str, Any] | None:
    """What a marker file says; None where there is none. Raises UserError for a damaged one."""
    try:
        marker = json.loads(path.read_bytes())
        return {"source": marker["source"], "options": dict(marker["options"]), **marker}
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is damaged; remove the folder {path.parent}") from error


def describe(marker: dict[str, Any]) -> str:
    """What a folder holds, in a few words."""
    options = ", ".join(f"{k} {v}" for k, v in marker["options"].items() if v is not None)
    return f"{marker['source']} ({options})" if options else marker["source"]


def _summary(counts: dict[str, dict[str, int]]) -> str:
    return ", ".join(
        f"{s} {n['images']} images in {n['classes']} classes" for s, n in counts.items()
    )


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Holds a lock on `folder`, which the system releases however the process ends."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another process is preparing {folder} right now") from error
        except OSError:
            pass  # some network file systems have no locks
        yield
    finally:
        os.close(handle)


def write_in_turn(missing: Iterator[tuple[Path, Item]]) -> Iterator[None]:
    """Writes one image after the other, each before the next is asked for."""
    for path, item in missing:
        content = item.content
        write_whole(path, content if isinstance(content, Path) else content())
        yield


def _write_items(out: Path, plan: Plan, write: Writer) -> Counter[str]:
    """Writes the images that `out` lacks and returns how many the plan has, by split."""
    remove_leftovers(out)
    for split in plan.splits:
        remove_leftovers(out / split, recursive=True)
    seen: Counter[str] = Counter()

    def missing() -> Iterator[tuple[Path, Item]]:
        for item in plan.items:
            path = out / item.split / item.label / item.name
            seen[item.split] += 1
            # An empty file is what a crash of the whole system may leave behind.
            if path.exists() and path.stat().st_size > 0:
                progress.advance()
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            yield path, item

    total = sum(plan.full[split] for split in plan.splits)
    with Progress(total) as progress, closing(write(missing())) as written:
        for _ in written:
            progress.advance()
    return seen


def _check(out: Path, plan: Plan, seen: Counter[str], counts: dict[str, dict[str, int]]) -> None:
    """Compares what lies in `out` with what the source had, and adds it to `counts`."""
    classes = {}
    for split in (*counts, *seen):
        found = {label: len(names) for label, names in images_by_class(out / split)}
        classes[split] = set(found)
        if split in seen and sum(found.values()) != seen[split]:
            raise UserError(
                f"{out / split} has {sum(found.values())} images but the source {seen[split]}: "
                "remove what does not belong there"
            )
        counts[split] = {"classes": len(found), "images": sum(found.values())}
    # A class that only one split has would shift the numbers of all classes after it.
    both = plan.same_classes and classes.keys() >= {"train", "val"}
    if both and classes["train"] != classes["val"]:
        only = {
            one: ", ".join(sorted(classes[one] - classes[other])[:3])
            for one, other in (("train", "val"), ("val", "train"))
        }
        raise UserError(
            f"train and val in {out} do not have the same classes: "
            + "; ".join(f"only {split} has {names}" for split, names in only.items() if names)
        )


def check_own(out: Path, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The marker of a finished `out`, if it has one.

    Raises:
        UserError: `out` holds something else than `wanted`, or what no preparation has made.
    """
    done, begun = read_marker(out / PREPARED), read_marker(out / PREPARING)
    for marker in (done, begun):
        if marker and {key: marker[key] for key in wanted} != wanted:
            raise UserError(
                f"{out} holds {describe(marker)}, not {describe(wanted)}; "
                "choose another folder or remove that one"
            )
    foreign = next((split for split in ALL_SPLITS if (out / split).exists()), None)
    if not done and not begun and foreign:
        raise UserError(
            f"{out} has a {foreign} folder that this command did not make; choose another folder"
        )
    return done


def _prepare_locked(
    out: Path,
    wanted: dict[str, Any],
    open_plan: Callable[[tuple[str, ...]], Plan],
    write: Writer,
    splits: tuple[str, ...],
) -> None:
    done = check_own(out, wanted)
    counts = done.get("counts", {}) if done else {}
    plan = open_plan(tuple(counts)) if set(splits) - set(counts) else None
    for note in plan.notes if plan else []:
        print(note, flush=True)
    if not plan or not plan.splits:
        (out / PREPARING).unlink(missing_ok=True)
        print(f"nothing to do: {out} already holds {describe(wanted)}: {_summary(counts)}")
        return
    write_whole(out / PREPARING, json.dumps(wanted, indent=2).encode())
    seen = _write_items(out, plan, write)
    _check(out, plan, seen, counts)
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
    write: Writer = write_in_turn,
    splits: tuple[str, ...] = SPLITS,
) -> None:
    """Makes the image folders OUT/train/CLASS/ and OUT/val/CLASS/ from a source.

    Writes only what is missing, so that it finishes what an interrupted call with the same source
    and options began, and does nothing in a folder that is finished.

    Args:
        out: the folder to make.
        source: the source's name; together with `options` it says what the folder holds.
        options: what else determines the content, in types that JSON can store.
        open_plan: opens the source; is given the splits that are finished already.
        write: writes the images that are missing.
        splits: the splits that `out` will have when nothing is left to do.

    Raises:
        UserError: `out` holds something else, another process is writing it, it cannot be
            written, or the source is missing or damaged.
    """
    with made_by_one(out):
        wanted = {"source": source, "options": options}
        _prepare_locked(out, wanted, open_plan, write, splits)


@contextmanager
def made_by_one(out: Path) -> Iterator[None]:
    """Makes the folder `out` if necessary, and holds a lock on it.

    A new one is removed if nothing was written into it. Raises UserError.
    """
    is_new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UserError(f"{out} is not a folder") from error
    try:
        with _only_writer(out):
            yield
    finally:
        if is_new:
            with suppress(OSError):
                out.rmdir()  # fails, as it should, unless nothing was written
