"""Read the parquet files of Hugging Face's image data sets, as of ILSVRC/imagenet-1k.

A row has an image, a struct of `bytes` and `path`, and an integer label. The bytes of the images
stay as they are. Rows are read in groups, so that memory is bounded. Rows with label -1 (ImageNet's
test images, whose classes are not published) are left out.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from prepare.folder import BATCH, Item, Split
from prepare.shards import images_per_shard
from tqdm import tqdm

from utils.errors import UserError
from utils.folder import SUFFIXES

SPLITS = {"train": "train", "validation": "val", "valid": "val", "val": "val", "test": "test"}
WORDNET = re.compile(r"(?:^|_)(n\d{8})(?=[_.])")  # ImageNet's class in the name of an image
SIGNATURES = {b"\x89PNG": ".png", b"RIFF": ".webp", b"GIF8": ".gif"}


class Columns(NamedTuple):
    """The names of the columns that are read."""

    image: str
    label: str


@dataclass
class Rows:
    """The images in some row groups of a file: a chunk of a `Split`.

    ``first`` is the number of the first row in the split; with ``numbered`` names begin with it.
    """

    path: str
    groups: range
    first: int
    split: str
    columns: Columns
    names: dict[int, str]  # label -> class
    numbered: bool

    def __iter__(self) -> Iterator[Item]:
        number = self.first
        with _opened(Path(self.path)) as file:
            for batch in file.iter_batches(BATCH, self.groups, list(self.columns)):
                labels = batch.column(self.columns.label).to_pylist()
                images = batch.column(self.columns.image).to_pylist()
                for image, label in zip(images, labels, strict=True):
                    if label in self.names:
                        yield self._item(image, label, number)
                    number += 1

    def _item(self, image: dict[str, Any] | None, label: int, number: int) -> Item:
        if not image or not image["bytes"]:
            raise UserError(f"{self.path} has no bytes of image {number}: get the files again")
        data = image["bytes"]
        stem, suffix = os.path.splitext(os.path.basename(image["path"] or ""))
        if suffix.lower() not in SUFFIXES:
            suffix = SIGNATURES.get(data[:4], ".jpg")
        if self.numbered:
            stem = f"{number:08d}_{stem}".rstrip("_")
        return Item(f"{self.split}/{self.names[label]}/{stem}{suffix}", data)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An open parquet file. Raises: `UserError` if it is damaged, also where it is read inside the
    block, and without pyarrow."""
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


def find_files(folder: Path) -> dict[str, list[Path]]:
    """The files of each split in ``folder`` or folder/data. Raises: `UserError`."""
    splits: dict[str, list[Path]] = {}
    for path in sorted([*folder.glob("*.parquet"), *folder.glob("data/*.parquet")]):
        word = re.match(r"[a-z]*", path.name)[0]
        if word in SPLITS:
            splits.setdefault(SPLITS[word], []).append(path)
        total = re.search(r"-of-(\d+)", path.name)
        same = path.name.rpartition("-of-")[0][:-5] + "*" + path.name[-len(".parquet") :]
        if total and len(list(path.parent.glob(same))) != int(total[1]):
            raise UserError(f"{path.parent} has not all {int(total[1])} files such as {path.name}")
    if not splits:
        names = "train-*.parquet, validation-*.parquet"
        raise UserError(f"{folder} has no files {names}, nor has {folder}/data")
    return splits


def _columns(path: Path) -> Columns:
    """Raises: `UserError` for a file of another kind."""
    with _opened(path) as file:
        schema = file.schema_arrow
    structs = [field.name for field in schema if "bytes" in _parts(field)]
    labels = [field.name for field in schema if str(field.type).startswith(("int", "uint"))]
    if len(labels) > 1:
        labels = [name for name in labels if name == "label"]
    if len(structs) != 1 or len(labels) != 1:
        text = "one column of images (a struct of bytes and path) and a column label"
        raise UserError(f"{path} has the columns {', '.join(schema.names)}; it needs {text}")
    return Columns(structs[0], labels[0])


def _parts(field: Any) -> set[str]:
    return {field.type.field(i).name for i in range(field.type.num_fields)}


def _metadata_names(path: Path, column: str) -> list[str]:
    """The names of the labels that Hugging Face keeps in a file; none if there are none."""
    with _opened(path) as file:
        text = (file.schema_arrow.metadata or {}).get(b"huggingface", b"{}")
    try:
        names = json.loads(text)["info"]["features"][column]["names"]
        return [str(name) for name in names]
    except (ValueError, TypeError, KeyError):
        return []


class _Scan:
    """Labels and names of all rows of a split, without the images themselves."""

    def __init__(self, paths: list[Path], columns: Columns):
        self.counts: Counter[int] = Counter()
        self.wordnet: dict[int, set[str]] = {}
        seen: set[int] = set()  # hashes: a set of names would take much memory
        self.unique = True
        for path in tqdm(paths, "reading labels", unit="file", delay=1, leave=False):
            with _opened(path) as file:
                named = "path" in _parts(file.schema_arrow.field(columns.image))
                names = [f"{columns.image}.path"] if named else []
                for batch in file.iter_batches(65536, columns=[columns.label, *names]):
                    self._add(batch, columns, named, seen)

    def _add(self, batch: Any, columns: Columns, named: bool, seen: set[int]) -> None:
        labels = batch.column(columns.label).to_pylist()
        images = batch.column(columns.image).to_pylist() if named else [None] * len(labels)
        for label, image in zip(labels, images, strict=True):
            self.counts[label] += 1
            name = os.path.basename((image or {}).get("path") or "")
            key = hash((label, os.path.splitext(name)[0]))
            self.unique = self.unique and bool(name) and key not in seen
            seen.add(key)
            found = WORDNET.search(name)
            self.wordnet.setdefault(label, set()).add(found[1] if found else "")


def _names_of_labels(scans: list[_Scan], metadata: list[str], table: Path | None) -> dict[int, str]:
    """The class of each label: from the table, from ImageNet's names of images, or from the
    metadata. Raises: `UserError`."""
    labels = sorted(set().union(*(scan.counts for scan in scans)) - {-1, None})
    if table:
        names = [line.strip() for line in table.read_text(encoding="utf-8").splitlines()]
    else:
        words = [set().union(*(s.wordnet.get(label, set()) for s in scans)) for label in labels]
        if all(len(word) == 1 for word in words) and len(set().union(*words) - {""}) == len(words):
            return {label: word.pop() for label, word in zip(labels, words, strict=True)}
        names = metadata
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
    """The splits in ``folder``, in chunks of about ``megabytes``.

    ``table``: names of classes, one per line. Raises: `UserError`.
    """
    files = find_files(folder)
    columns = _columns(files[min(files)][0])
    scans = {split: _Scan(paths, columns) for split, paths in files.items()}
    for split in [name for name, scan in scans.items() if set(scan.counts) <= {-1, None}]:
        print(f"left out: {split}, as its classes are not published (label -1)")
        del scans[split]
    if "val" not in scans and "test" in scans:
        print("note: there are no validation files: those of the test split become val/")
        scans["val"], files["val"] = scans.pop("test"), files.pop("test")
    metadata = _metadata_names(files[min(files)][0], columns.label)
    names = _names_of_labels(list(scans.values()), metadata, table)
    splits = {}
    for split, scan in scans.items():
        if unlabelled := scan.counts[-1] + scan.counts[None]:
            print(f"left out: {unlabelled} images of {split} without a label")
        chunks = []
        first = 0
        for path in files[split]:
            with _opened(path) as file:
                rows, about = file.metadata, images_per_shard(_row_bytes(file), megabytes)
                start, images = 0, 0
                for group in range(rows.num_row_groups):
                    images += rows.row_group(group).num_rows
                    if images >= about or group == rows.num_row_groups - 1:
                        groups = range(start, group + 1)
                        numbered = not scan.unique
                        chunks.append(
                            Rows(str(path), groups, first, split, columns, names, numbered)
                        )
                        first, start, images = first + images, group + 1, 0
        total = sum(scan.counts[label] for label in names)
        splits[split] = Split(total, chunks, sorted(names.values()))
    return splits


def _row_bytes(file: Any) -> float:
    """Mean bytes of a row."""
    metadata = file.metadata
    groups = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    return sum(groups) / max(1, metadata.num_rows)
