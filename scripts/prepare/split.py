"""Divide a folder of images into DATA/train, DATA/val and DATA/test.

DATA holds CLASS/NAME, train/CLASS/NAME, or images and a table of labels (CSV: name, class). Images
are renamed, never copied. The choice depends only on their names and the seed, so all nodes agree.
DATA/.split.json, written before the first image moves, says how DATA looked and what is wanted:
after an interruption the same command continues, other fractions move images in either direction,
and --undo restores the original folders.
"""

import argparse
import csv
import fcntl
import hashlib
import json
import os
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prepare.writing import AGAIN, check_place
from tqdm import tqdm

from utils.data import layouts
from utils.data.folder import class_names, list_class
from utils.data.opening import FOLDER, source_kind
from utils.data.sources import SUFFIXES, is_hidden
from utils.start import errors
from utils.start.atomic import remove_leftovers, save_atomically
from utils.start.errors import UserError, printable

MARKER = ".split.json"
PARTS = ("test", "val")  # in the order in which they take images
CLASS_COLUMNS = {"class", "label", "category"}


def split_folder(args: argparse.Namespace) -> None:
    """Run `split`. Raises: `UserError` before anything has moved, or if a move fails."""
    data: Path = args.out
    if not data.is_dir():
        raise UserError(layouts.no_folder(data))
    with _locked(data):
        _split(data, args)


@contextmanager
def _locked(data: Path) -> Iterator[None]:
    """Let one process at a time change ``data``. Raises: `UserError`."""
    handle = os.open(data, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(f"another process is splitting {data} right now") from error
        yield
    finally:
        os.close(handle)


def _split(data: Path, args: argparse.Namespace) -> None:
    marker = _read_marker(data)
    given = {"val": args.val, "test": args.test}
    wanted = {part: marker.get(part, 0.0) for part in PARTS}
    wanted |= {part: value for part, value in given.items() if value is not None}
    if args.undo:
        if not marker:
            raise UserError(f"{data} was not split by this command: there is nothing to undo")
        wanted = dict.fromkeys(PARTS, 0.0)
    elif args.val is None and args.test is None:
        raise UserError("say which part to make: --val 0.2, --test 0.1, or both; or --undo")
    if sum(wanted.values()) >= 1:
        raise UserError(
            f"--val and --test take {sum(wanted.values()):.0%}: leave some for training"
        )
    if marker and not args.undo:
        _check_labels(data, marker, args.labels)
    state = {**marker} if marker else _describe(data, args.labels)
    state |= wanted | {"seed": args.seed if args.seed is not None else marker.get("seed", 0)}
    own = [part for part in PARTS if part in marker or wanted[part]]
    for part in own:
        folder = data / part
        if part not in marker and folder.exists() and any(folder.iterdir()):
            text = f"{folder} exists, and this command did not make it"
            raise UserError(f"{text}: remove it if it is a copy, or use it as the {part} part")
    state = {key: value for key, value in state.items() if key not in PARTS or key in own}
    if "classes" in marker and not args.undo and (later := _later_classes(data, marker)):
        print(f"note: classes that came after an earlier call: {printable(', '.join(later))}")
        state["classes"] = sorted({*state["classes"], *later})
    to_train = {} if args.undo else _into_train(data, state)
    moves, counts = _choose(data, state, to_train)
    if not any(counts.values()) and not args.undo:
        raise UserError(f"{data / 'train'} has no images in class folders")
    content = json.dumps(state).encode()
    save_atomically(lambda file: file.write(content), data / MARKER)
    (data / "test" / MARKER).unlink(missing_ok=True)  # an earlier version of this command made it
    _move_all(data, to_train)
    _move_all(data, moves)
    if args.undo:
        _move_all(data, _out_of_train(data, state))
    _remove_empty(data, own, state, args.undo)
    if not any(wanted.values()) and (args.undo or state["layout"] == "train"):
        (data / MARKER).unlink(missing_ok=True)
    numbers = ", ".join(f"{part} {count} images" for part, count in counts.items())
    if any(wanted.values()):
        undo = errors.command("prepare_data.py", "split", data, "--undo")
        numbers += f"; `{undo}` moves them back"
    print(f"{data}: {numbers}")
    if left := _not_images(data):
        print(f"note: left in place, as they are not images that training reads: {left}")


def _later_classes(data: Path, marker: dict[str, Any]) -> list[str]:
    """New folders at the top with images directly in them; runs/, say, has them further below."""

    def has_image(folder: Path) -> bool:
        return any(path.suffix.lower() in SUFFIXES for path in folder.iterdir())

    names = {*layouts.classes_at_top(data, least=1)} - {*marker["classes"]}
    return sorted(name for name in names if has_image(data / name))


def _not_images(data: Path) -> str:
    """The numbers of files below ``data`` by suffix that are no images, tables or hidden files."""
    suffixes = Counter[str]()
    for _, folders, names in os.walk(data):
        folders[:] = [name for name in folders if not is_hidden(name)]
        shown = (name for name in names if not is_hidden(name))
        suffixes.update(os.path.splitext(name)[1].lower() or name for name in shown)
    known = (*SUFFIXES, ".csv", ".txt", ".json")
    return printable(
        ", ".join(f"{n} {one}" for one, n in suffixes.most_common() if one not in known)
    )


# ---- how DATA looked before


def _read_marker(data: Path) -> dict[str, Any]:
    """The state that an earlier call has written; {} without one. Raises: `UserError`."""
    for path in (data / MARKER, data / "test" / MARKER):
        try:
            marker = json.loads(path.read_bytes())
            return {"layout": "train", **marker}
        except FileNotFoundError:
            continue
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is damaged: remove it, and look where images are") from error
    return {}


def _describe(data: Path, table: Path | None) -> dict[str, Any]:
    """The layout of a folder that was not split before. Raises: `UserError`."""
    train = data / "train"
    if not table and (found := layouts.misplaced(data)):
        raise UserError(found)
    if table or not train.is_dir() or not class_names(train):
        if table is None:
            classes = [] if layouts.has_image(train) else layouts.classes_at_top(data)
            table = layouts.label_table(data)
            if classes and table is not None:
                _check_folders(data, classes, table)
            if classes:
                return {"layout": "folders", "classes": classes}
        if table is not None:
            labels = os.path.abspath(table)
            return {"layout": "table", "from": _labelled(data, table, {}), "labels": labels}
    if not train.is_dir() or source_kind(train) is not FOLDER or not class_names(train):
        text = f"{data} has no class folders of images, neither in it nor in train/"
        if not layouts.has_image(train) and (one := layouts.classes_at_top(data, least=1)):
            text = f"{data} has images in one class folder only, {one[0]}"
        if left := _not_images(data):
            text += f" (no images that training reads: {left})"
        raise UserError(f"{text}, and no table of labels (--labels FILE.csv); split before shards")
    return {"layout": "train"}


def _check_folders(data: Path, classes: list[str], table: Path) -> None:
    """Raise `UserError` if ``table`` in ``data`` names the images, but none of their folders.

    In competitions of Kaggle, the folders are train_images and test_images.
    """
    try:
        cells = {cell.strip() for row in _rows(table) for cell in row}
    except UserError:
        return  # a damaged table does not matter here
    folders = (data / name for name in classes)
    paths = [x for one in folders for x in one.rglob("*") if x.suffix.lower() in SUFFIXES]
    names = ((x.name, x.stem, str(x.relative_to(data))) for x in paths)
    named = sum(not cells.isdisjoint(one) for one in names)
    if named and 10 * named >= len(paths) and cells.isdisjoint(classes):  # few may be so by chance
        text = f"{table} names images in {data}, but not their folders, such as {classes[0]}: add "
        text += f"--labels {shlex.quote(str(table))} if it has name and class of each, or if the "
        raise UserError(f"{text}folders are the classes, move it elsewhere")


def _check_labels(data: Path, marker: dict[str, Any], table: Path | None) -> None:
    """Raise `UserError` if the table, by default that of the first call, has other labels now."""
    if table is None and os.path.isfile(first := marker.get("labels", "")):
        table = Path(first)
    known = marker.get("from")
    if table is not None and (not known or _labelled(data, table, known) != known):
        undo = errors.command("prepare_data.py", "split", data, "--undo")
        text = f"{data} was divided by other labels than {table} has: first run `{undo}`"
        raise UserError(f"{text}, then this command again")


def _rows(table: Path) -> list[list[str]]:
    """The lines of a CSV file, with any of the usual delimiters. Raises: `UserError`."""
    try:
        text = table.read_text(encoding="utf-8-sig")
        first = text.partition("\n")[0]
        return list(csv.reader(text.splitlines(), delimiter=max(",;\t", key=first.count)))
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"cannot read {table}: give a CSV file (name, class) in UTF-8") from error


def _labelled(data: Path, table: Path, known: dict[str, str]) -> dict[str, str]:
    """Place CLASS/NAME -> path below ``data`` of each image in a table. ``known``: the same of
    images that may have moved. Raises: `UserError`."""
    rows = _rows(table)
    files: dict[str, str] = {}
    moved = {f"{part}/{one}": known[one] for part in ("train", *PARTS) for one in known}
    paths = [str(path.relative_to(data)) for path in data.rglob("*") if path.is_file()]
    names = sorted({*known.values(), *(moved.get(path, path) for path in paths)})
    images = [n for n in names if n.lower().endswith(SUFFIXES) and not _any_hidden(n)]
    for name in images:  # a table may name the path, the file, or the file without its suffix
        for key in (Path(name).name, Path(name).stem):
            files[key] = name if files.get(key, name) == name else ""
    files |= {name: name for name in images}
    if _is_one_hot(rows):
        names = ", ".join(name.strip() for name in rows[0][1:])
        text = f"{table} has a column for each class ({names:.200}): write a table of two columns"
        raise UserError(f"{text}, name and class, and give it with --labels")
    column, places, missing = 1, {}, 0
    for number, row in enumerate(rows):
        if not row:
            continue
        path = files.get(row[0].strip())
        if number == 0 and path is None:  # the names of the columns
            of_class = (i for i, one in enumerate(row) if one.strip().lower() in CLASS_COLUMNS)
            column = next(of_class, 1)
            continue
        if not path or len(row) <= column:
            missing += 1
            continue
        label = row[column].strip()
        if not label or "/" in label or is_hidden(label):
            raise UserError(f"line {number + 1} of {table}: a class cannot be named {label!r}")
        place = f"{label}/{Path(path).name}"
        if places.setdefault(place, path) != path:
            raise UserError(f"{path} and {places[place]} are both images {place}: rename one")
    if not places:
        raise UserError(f"{table} names none of the {len(images)} images in {data}")
    if missing:
        print(f"left out: {missing} lines of {table} that name no image, or have no class")
    if left := len(images) - len(set(places.values())):
        print(f"left out: {left} images that {table} does not name")
    if len(set(places.values())) < len(places):
        raise UserError(f"{table} names an image twice, with different classes")
    return places


def _is_one_hot(rows: list[list[str]]) -> bool:
    """Whether every row but the first marks one of several columns with 1, the others with 0."""
    try:
        marks = [sorted(map(float, row[1:])) for row in rows[1:] if row]
    except ValueError:
        return False
    return bool(marks) and all(len(x) > 1 and x == [0.0] * (len(x) - 1) + [1.0] for x in marks)


def _any_hidden(name: str) -> bool:
    return any(is_hidden(part) for part in name.split("/"))


# ---- which image goes where


def _images(data: Path, part: str) -> dict[str, list[str]]:
    """The images of each class in a part, CLASS/NAME. Raises: `UserError` if a folder is a link,
    as its images belong to another data set."""
    folder = data / part
    if folder.is_symlink():
        raise _foreign(data, folder)
    images = {}
    for name in class_names(folder) if folder.is_dir() else []:
        listing = list_class(folder, name)
        for path in listing.folders:
            if (folder / path).is_symlink():
                raise _foreign(data, folder / path)
        images[name] = os.fsdecode(listing.paths).split("\0")[:-1]
    return images


def _foreign(data: Path, link: Path) -> UserError:
    whole = Path(os.path.abspath(data))  # from any folder
    out = layouts.beside(whole, "copy")
    line = shlex.join(["cp", "-rlL", str(whole), str(out)])
    if link.is_relative_to(data / "train"):  # which works on two file systems, too
        line = errors.command("prepare_data.py", "imagenet", out, "--source", whole)
    text = f"{link} is a link, so its images belong to another folder: make one of hard links with"
    return UserError(f"{text} `{line}`, and split that")


def _into_train(data: Path, state: dict[str, Any]) -> dict[str, str]:
    """Moves from the original layout to DATA/train: path -> path, below ``data``."""
    if state["layout"] == "table":
        return {
            path: check_place(data, f"train/{place}")
            for place, path in state["from"].items()
            if os.path.lexists(data / path) and not os.path.lexists(data / "train" / place)
        }
    moves = {}
    for name in state.get("classes", ()):
        folder = data / name
        if folder.is_symlink():
            raise _foreign(data, folder)
        if not folder.is_dir():
            continue
        listing = list_class(data, name)
        for path in listing.folders:
            if (data / path).is_symlink():
                raise _foreign(data, data / path)
        moves |= {n: f"train/{n}" for n in os.fsdecode(listing.paths).split("\0")[:-1]}
    return moves


def _out_of_train(data: Path, state: dict[str, Any]) -> dict[str, str]:
    """Moves from DATA/train to the original layout."""
    if state["layout"] == "table":
        pairs = ((f"train/{place}", path) for place, path in state["from"].items())
        return {old: new for old, new in pairs if os.path.lexists(data / old)}
    moves = {}
    for name, images in _images(data, "train").items():
        if name in state.get("classes", ()):
            moves |= {f"train/{image}": image for image in images}
    return moves


def _choose(
    data: Path, state: dict[str, Any], to_train: dict[str, str]
) -> tuple[dict[str, str], dict[str, int]]:
    """Moves between the parts, and how many images each part will have. Removes finished ones from
    ``to_train``. Raises: `UserError`.

    A part takes the images with the smallest hashes of seed and name, at least one of each class.
    """

    def rank(path: str) -> bytes:
        text = f"{state['seed']}/{path}".encode("utf-8", "surrogateescape")
        return hashlib.sha256(text).digest()

    own = [part for part in PARTS if part in state]
    where: dict[str, dict[str, str]] = {}  # class: {CLASS/NAME: part}
    for part in ("train", *own):
        remove_leftovers(data / part, recursive=True)
        for name, images in _images(data, part).items():
            for image in images:
                if other := where.setdefault(name, {}).get(image):
                    _finish_move(data / other / image, data / part / image)
                where[name][image] = part
    for old, new in [*to_train.items()]:
        image = new.partition("/")[2]
        parts = where.setdefault(image.partition("/")[0], {})
        if other := parts.get(image):
            _finish_move(data / old, data / other / image)
            del to_train[old]  # done
        parts.setdefault(image, "train")
    moves, counts = {}, dict.fromkeys(("train", *own[::-1]), 0)
    for name, images in where.items():
        ranked = sorted(images, key=rank)
        chosen = dict.fromkeys(ranked, "train")
        start = 0
        for part in own:
            count = max(1, round(state[part] * len(ranked))) if state[part] else 0
            chosen |= dict.fromkeys(ranked[start : start + count], part)
            start += count
            counts[part] += count
        if ranked and start >= len(ranked):
            number = f"{len(ranked)} image{'s' * (len(ranked) > 1)}"
            text = f"class {name} has only {number}, so none would be left for training"
            raise UserError(f"{text}: add images or remove the class")
        counts["train"] += len(ranked) - start
        changed = ((image, images[image], part) for image, part in sorted(chosen.items()))
        moves |= {f"{old}/{image}": f"{new}/{image}" for image, old, new in changed if old != new}
    return moves, counts


def _finish_move(one: Path, other: Path) -> None:
    """Remove the first of two links, if a killed process has left both. Raises: `UserError`."""
    if not (one.is_symlink() and other.is_symlink() and os.path.samefile(one, other)):
        raise UserError(f"{one} and {other} both exist: remove one of them")
    one.unlink()


def _move_all(data: Path, moves: dict[str, str]) -> None:
    for old, new in tqdm(moves.items(), unit=" images", delay=1):
        _move(data / old, data / new)


def _move(old: Path, new: Path) -> None:
    """Rename an image. At every moment one of the names exists. Raises: `UserError`."""
    try:
        new.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(new):
            _finish_move(old, new)
        elif old.is_symlink() and not os.path.isabs(os.readlink(old)):
            # A relative link would lead elsewhere from another folder.
            temporary = new.with_name(f".{os.urandom(8).hex()}.tmp")
            temporary.symlink_to(old.resolve())
            os.replace(temporary, new)
            old.unlink()
        else:
            os.rename(old, new)
    except OSError as error:
        text = f"cannot move {old} to {new} ({error.strerror}); correct that, then {AGAIN}"
        raise UserError(text) from error


def _remove_empty(data: Path, own: list[str], state: dict[str, Any], undone: bool) -> None:
    """Remove the folders that moves have emptied; what holds something else stays."""
    roots = [data / part for part in own if not state[part]]
    roots += [data / name for name in state.get("classes", ())] if not undone else [data / "train"]
    for root in roots:
        if state["layout"] == "train" and root.name == "train":
            continue
        (root / ".index.npz").unlink(missing_ok=True)
        for folder, _, _ in os.walk(root, topdown=False):
            with suppress(OSError):  # it holds something else
                os.rmdir(folder)
