"""Read the parquet files of Hugging Face's image data sets, such as ILSVRC/imagenet-1k.

A row has an image (a struct of `bytes` and `path`) and an integer label. Image bytes are copied
unchanged. Rows are read in groups, so that memory is bounded. Rows with label -1 (ImageNet's test
images, whose classes are not published) are left out.
"""

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from prepare.shards import images_per_shard
from prepare.writing import BATCH, Item, Split
from tqdm import tqdm

from utils.data.sources import SUFFIXES
from utils.start.errors import UserError

SPLITS = {"train": "train", "validation": "val", "valid": "val", "val": "val", "test": "test"}
WORDNET = re.compile(r"(?:^|_)(n\d{8})(?=[_.])")  # ImageNet's class in the name of an image
SIGNATURES = {b"\x89PNG": ".png", b"RIFF": ".webp", b"GIF8": ".gif"}


class Columns(NamedTuple):
    """The names of the two columns to read."""

    image: str
    label: str


@dataclass
class Rows:
    """The images in some row groups of a file: a chunk of a `Split`."""

    path: Path
    columns: Columns
    split: str
    classes: dict[int, str]  # label: class
    groups: range
    first: int  # number of the first row in the split
    numbered: bool  # put the row's number before the image's name

    def __iter__(self) -> Iterator[Item]:
        for number, (image, label) in enumerate(_rows(self.path, self.columns, self.groups)):
            if label in self.classes:
                yield self._item(self.first + number, self.classes[label], image)

    def _item(self, number: int, class_name: str, image: dict[str, Any] | None) -> Item:
        if not image or not (data := image["bytes"]):
            raise UserError(f"{self.path} has no bytes of image {number}: get the files again")
        name, suffix = os.path.splitext(os.path.basename(image["path"] or ""))
        if suffix.lower() not in SUFFIXES:
            suffix = SIGNATURES.get(data[:4], ".jpg")
        if self.numbered:
            name = f"{number:08d}_{name}".rstrip("_")
        return Item(f"{self.split}/{class_name}/{name}{suffix}", partial(bytes, data))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a parquet file. Raises: `UserError` if it is damaged (also if the `with` block notices
    that), or pyarrow is missing."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError("parquet files need pyarrow: pip install pyarrow") from error
    try:
        with ParquetFile(path) as file:
            yield file
    except (ArrowException, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot read {path} ({reason}): get it again") from error


def _rows(path: Path, columns: Columns, groups: range | None = None) -> Iterator[tuple[Any, Any]]:
    """Yield image and label of each row in ``groups``; without ``groups``, paths and all labels."""
    names = [columns.image if groups else f"{columns.image}.path", columns.label]
    with _opened(path) as file:
        for batch in file.iter_batches(BATCH if groups else 65536, groups, names):
            yield from zip(*(batch.column(name).to_pylist() for name in columns), strict=True)


def find_files(folder: Path) -> dict[str, list[Path]]:
    """Find the files of each split in ``folder`` or folder/data. Raises: `UserError`."""
    splits: dict[str, list[Path]] = {}
    for path in sorted([*folder.glob("*.parquet"), *folder.glob("data/*.parquet")]):
        word = re.split(r"[^a-z]", path.name)[0]
        if word in SPLITS:
            splits.setdefault(SPLITS[word], []).append(path)
        if total := re.search(r"\d{5}-of-(\d+)", path.name):
            # Until 2023 each name ended with a text of its own.
            start, end = re.escape(path.name[: total.start()]), rf"-of-{total[1]}\b.*\.parquet"
            others = (re.fullmatch(rf"{start}(\d{{5}}){end}", n) for n in os.listdir(path.parent))
            if len({one[1] for one in others if one}) != int(total[1]):
                text = f"{path.parent} lacks some of the {int(total[1])} files such as {path.name}"
                raise UserError(f"{text}: finish the download")
    if not splits:
        names = "train-*.parquet, validation-*.parquet"
        raise UserError(f"{folder} has no files {names}, nor has {folder}/data")
    return splits


def _schema(path: Path) -> tuple[Columns, list[str]]:
    """Return the columns of a file, and the names of its labels if Hugging Face stored them.

    Raises: `UserError` if the file has other columns.
    """
    with _opened(path) as file:
        schema = file.schema_arrow
    structs = {one.name: {part.name for part in one.flatten()} for one in schema}
    images = [name for name, parts in structs.items() if {f"{name}.bytes", f"{name}.path"} <= parts]
    labels = [one.name for one in schema if str(one.type).startswith(("int", "uint"))]
    if len(labels) > 1:
        labels = [name for name in labels if name == "label"]
    if len(images) != 1 or len(labels) != 1:
        text = "one column of images (a struct of bytes and path) and a column label"
        raise UserError(f"{path} has the columns {', '.join(schema.names)}; it needs {text}")
    try:
        info = json.loads((schema.metadata or {})[b"huggingface"])
        names = [str(name) for name in info["info"]["features"][labels[0]]["names"]]
    except (ValueError, TypeError, KeyError):
        names = []
    return Columns(images[0], labels[0]), names


def _scan(
    paths: list[Path], columns: Columns, synsets: dict[int, set[str]]
) -> tuple[Counter[int | None], bool]:
    """Count the rows of each label, and check whether names are unique within each class.

    Adds to ``synsets`` the WordNet ids in the names of each label's images.
    """
    counts: Counter[int | None] = Counter()
    unique, seen = True, set()  # of hashes, because names would take much memory
    for path in tqdm(paths, "reading labels", unit="file", delay=1, leave=False):
        for image, label in _rows(path, columns):
            counts[label] += 1
            name = os.path.basename((image or {}).get("path") or "")
            key = hash((label, os.path.splitext(name)[0]))
            unique = unique and bool(name) and key not in seen
            seen.add(key)
            synset = WORDNET.search(name)
            synsets[label].add(synset[1] if synset else "")
    return counts, unique


def _classes(
    labels: list[int], synsets: dict[int, set[str]], names: list[str], table: Path | None
) -> dict[int, str]:
    """Return the class of each label, from ``table``, else from ImageNet's file names, else from
    ``names`` in the parquet files. Raises: `UserError`."""
    if table:
        try:
            text = table.read_text(encoding="utf-8-sig")  # some editors add a mark
        except (OSError, ValueError) as error:
            advice = "give a text file in UTF-8, with a class in each line"
            raise UserError(f"cannot read {table}: {advice}") from error
        names = [line.strip() for line in text.rstrip().splitlines()]
    else:
        classes = {label: min(synsets[label]) for label in labels if len(synsets[label]) == 1}
        if len(set(classes.values()) - {""}) == len(labels):
            return classes
    advice = "give --names FILE, with the class of label 0 in the first line, and so on"
    if labels and not 0 <= labels[0] <= labels[-1] < len(names):
        text = f"there are labels up to {labels[-1]}, and {len(names)} names of classes"
        raise UserError(f"{text}: {advice}")
    for name, count in Counter(names).items():
        if count > 1:
            raise UserError(f"{count} classes are named {name!r}: {advice}")
        if not name or "/" in name or name.startswith("."):
            raise UserError(f"a class cannot be named {name!r}: {advice}")
    if names != sorted(names):
        print("note: classes are numbered in the order of their names, not as in the parquet files")
    return dict(enumerate(names))


def open_parquet(folder: Path, table: Path | None, megabytes: int) -> dict[str, Split]:
    """Open the splits in ``folder``, in chunks of about ``megabytes``.

    ``table``: a file with the names of classes, one per line. Raises: `UserError`.
    """
    files = find_files(folder)
    columns, names = _schema(files[min(files)][0])
    synsets: dict[int, set[str]] = defaultdict(set)
    scans = {split: _scan(paths, columns, synsets) for split, paths in files.items()}
    known = {label for counts, _ in scans.values() for label in counts if label is not None}
    labels = known - {-1}
    if not labels:
        raise UserError(f"no image in {folder} has a label (all are -1 or null): get other files")
    for split, (counts, _) in [*scans.items()]:
        if not counts.keys() - {-1, None}:
            print(f"left out: {split}, because its classes are not published (label -1)")
            del scans[split]
        elif unlabelled := counts[-1] + counts[None]:
            print(f"left out: {unlabelled} images of {split} without a label")
    if "val" not in scans and "test" in scans:
        print("note: there are no validation files, so the test split becomes val/")
        scans["val"], files["val"] = scans.pop("test"), files["test"]
    classes = _classes(sorted(labels), synsets, names, table)
    splits = {}
    for split, (counts, unique) in scans.items():
        chunks, first = [], 0
        for path in files[split]:
            for groups, rows in _groups(path, megabytes):
                chunks.append(Rows(path, columns, split, classes, groups, first, not unique))
                first += rows
        total = sum(counts[label] for label in classes)
        splits[split] = Split(total, chunks, sorted(classes.values()))
    return splits


def _groups(path: Path, megabytes: int) -> Iterator[tuple[range, int]]:
    """Yield ranges of row groups of about ``megabytes``, each with its number of rows."""
    with _opened(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    size = sum(group.total_byte_size for group in groups)
    rows = [group.num_rows for group in groups]
    about = images_per_shard(size / max(1, sum(rows)), megabytes)
    start = 0
    for end in range(1, len(groups) + 1):
        if sum(rows[start:end]) >= about or end == len(groups):
            yield range(start, end), sum(rows[start:end])
            start = end
