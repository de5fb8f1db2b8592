"""Read images directly from tar files, without extracting them.

No option: used if DATA/train, val or test is a folder of tar files, such as the shards that
`scripts/prepare_data.py shards` writes, or if DATA contains train.tar, ILSVRC2012_img_train.tar
or WebDataset's NAME-train-0000.tar instead. Interface: `open_tars`, `class_names`
and `tar_files`.

The class of an image is the first of these that exists:

- its label: KEY.cls beside the image KEY.jpg (WebDataset). If the label is a number, it selects a
  line of classes.txt (beside the tar files or in DATA), counted from 0. Without that file, the
  number is padded to five digits and becomes the name of the class;
- its first folder in the tar file, or the first below train/ (val/, test/) if all are in there;
- the name of its tar file, if that is in another tar file or in a folder of tar files;
- for ILSVRC2012_val_NNNNNNNN.JPEG, the entry in the devkit or in Kaggle's table in DATA.

Links, sparse files, labels in JSON and classes in deeper folders are errors, not guesses.

The index is read from the tar headers and cached like the list of an image folder. Images have the
same order as in the extracted folder. Paths in tar files are safe, because nothing is written.
"""

import codecs
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote_to_bytes

import numpy as np
from tqdm import tqdm

from utils.data import devkit
from utils.data import list_cache as cache
from utils.data.list_cache import Listing, is_racy
from utils.data.sources import THREADS, Archive, Index, is_hidden
from utils.data.tar_headers import (
    COMPRESSED,
    Tar,
    compressed_error,
    sample_key,
    tar_error,
    unsupported_error,
)

PARTS = {"train": "train(?:ing)?", "val": "val(?:id|idation)?", "test": "test"}
CLASSES = "classes.txt"
RECORD = np.dtype([("file", "<u2"), ("offset", "<i8"), ("bytes", "<i8")])  # for each image
# The index's name in the cache, which no class can have. The number grows with a change of rules.
KEPT = "/2"

Record = tuple[int, int, int]  # see `RECORD`


def tar_files(root: Path) -> list[Path]:
    """Return the tar files with the images of ``root`` (such as DATA/train), sorted; [] if none.

    Raises: `UserError` if they are compressed or a shard is missing.
    """
    if root.is_dir():
        with os.scandir(root) as entries:
            # If there are class folders, they were extracted from the tar files.
            if any(not is_hidden(entry.name) and entry.is_dir() for entry in entries):
                return []
        folder, patterns = root, [r"[^.].*\.tar"]
    else:
        folder, part = root.parent, re.escape(root.name)
        shards = rf"(?:[^.].*[-_.])?{PARTS.get(root.name, part)}[-_.]?\d+(?:-of-\d+)?\.tar"
        # The images in ILSVRC2012_img_test.tar have no classes.
        original = [] if root.name == "test" else [rf"ILSVRC2012_img_{part}\.tar"]
        patterns = [rf"{part}\.tar", *original, shards]
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    for pattern in patterns:
        if tars := [name for name in names if re.fullmatch(pattern, name)]:
            _check_complete(folder, tars)
            return [folder / name for name in tars]
    for name in names:
        stem, suffix = os.path.splitext(re.sub(r"\.tgz$", ".tar.tgz", name))
        if suffix in COMPRESSED and any(re.fullmatch(pattern, stem) for pattern in patterns):
            raise compressed_error(folder / name, suffix)
    return []


def _check_complete(folder: Path, names: list[str]) -> None:
    """Raise `UserError` if one of the shards NAME-00000-of-NNNNN.tar is missing."""
    shards = filter(None, (re.fullmatch(r"(.*-)(\d+)(-of-(\d+)\.tar)", name) for name in names))
    for prefix, digits, end, count in {(m[1], len(m[2]), m[3], int(m[4])) for m in shards}:
        if missing := {f"{prefix}{i:0{digits}}{end}" for i in range(count)} - set(names):
            text = f"{folder / min(missing)} is missing (one of {count} tar files): finish its"
            raise tar_error(f"{text} preparation, or copy it again")


def class_names(root: Path) -> list[str]:
    """Return all classes, sorted. Raises: `UserError`."""
    return _index_of(root, os.environ.get("LOCAL_RANK", "0") == "0").classes


def open_tars(root: Path, classes: list[str], shows: bool = False) -> Archive:
    """The images in the tar files of ``root``, in the order that the extracted folder would have.

    Loads the cached index, or reads all headers. Opens all tar files. ``classes``: the classes to
    use, in this order. Raises: `UserError`.
    """
    return Archive(root, classes, _index_of(root, shows))


# ---- the index of a part


def _index_of(root: Path, shows: bool) -> Index:
    """Return the index of a part, from the cache if no file has changed. Raises: `UserError`."""
    files = tar_files(root)
    tables = [path for folder in (root, root.parent) if (path := folder / CLASSES).is_file()][:1]
    used = files + tables + devkit.label_files(root.parent)
    stamps, kept = _stamps(root.parent, used), cache.read(root).get(KEPT)
    settled = not any(is_racy(changed) for changed, *_ in stamps.values())
    if kept and kept.folders["files"] == stamps and settled:
        counts, data = kept.folders["classes"], kept.paths
    else:
        table = _read_table(tables[0]) if tables else []
        counts, data = _make_index(root, files, table, shows)
        for name, stamp in _stamps(root.parent, used).items():
            if stamp != stamps[name]:
                text = f"{root.parent / name} changed while its headers were read"
                raise tar_error(f"{text}: wait until it is complete")
        if settled:
            listing = Listing(data, {"files": stamps, "classes": counts}, {})
            cache.write(root, {KEPT: listing}, shows)
    end = RECORD.itemsize * sum(counts.values())
    records, names = np.frombuffer(data[:end], RECORD), [str(path) for path in files]
    return Index(names, list(counts), [*counts.values()], data[end:], records, records["file"])


def _stamps(data: Path, files: list[Path]) -> dict[str, list[int]]:
    """Return numbers that change when a file is rewritten or replaced. Raises: `UserError`.

    A copy program can restore size and modification time, but neither inode nor change time.
    """
    try:
        stats = {str(path.relative_to(data)): path.stat() for path in files}
    except OSError as error:
        raise tar_error(f"cannot read {error.filename} ({error.strerror})") from None
    return {
        name: [one.st_mtime_ns, one.st_ctime_ns, one.st_size, one.st_ino]
        for name, one in stats.items()
    }


def _read_table(path: Path) -> list[str]:
    """Return the lines of a classes.txt. Raises: `UserError`."""
    text = os.fsdecode(path.read_bytes().removeprefix(codecs.BOM_UTF8))  # some editors add it
    names = text.replace("\r", "").rstrip("\n").split("\n")
    for number, name in enumerate(names):
        if not name or name[0] == "." or "/" in name or "\0" in name:
            raise tar_error(f"line {number + 1} of {path} is not the name of a class")
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise tar_error(f"{path} has {double} twice: give each class a different name")
    return names


def _make_index(
    root: Path, files: list[Path], table: list[str], shows: bool
) -> tuple[dict[str, int], bytes]:
    """Read all headers of ``files`` with several threads. ``table``: the lines of classes.txt.

    Returns: the number of images by class, sorted by name; and as bytes, first the records of all
    images (by class, then by path), then their paths in the same order, each with a zero byte.
    """
    tars = [Tar(path, number, 0, path.stat().st_size) for number, path in enumerate(files)]
    style = {"unit": "B", "unit_scale": True, "leave": False, "delay": 1}
    style["disable"] = not (shows and sys.stderr.isatty())
    bar = tqdm(desc=f"Indexing {root}", total=sum(tar.end for tar in tars), **style)
    with bar, ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda tar: tar.read(bar), tars))
        tars += [inner for tar in tars for inner in tar.inner]
        list(pool.map(lambda tar: tar.read(bar), tars[len(files) :]))
    by_class = _by_class(root, tars, table)
    if not by_class:
        text = f"{files[0]} has no images in class folders, none with a label beside it (KEY.cls), "
        raise tar_error(f"{text}and no tar file for each class")
    counts, records, paths = {}, [], []
    for name in sorted(map(os.fsdecode, by_class)):
        images = sorted(by_class.pop(os.fsencode(name)).items())
        counts[name] = len(images)
        records.append(np.array([record for _, record in images], RECORD).tobytes())
        paths += [path + b"\0" for path, _ in images]
    return counts, b"".join(records + paths)


def _by_class(root: Path, tars: list[Tar], table: list[str]) -> dict[bytes, dict[bytes, Record]]:
    """Return the path CLASS/NAME and the record of each image, by class.

    If images have the same path, the last one counts, as it does when tar files are extracted.
    """
    lines = [os.fsencode(name) for name in table]
    classes: dict[bytes, dict[bytes, Record]] = {name: {} for name in lines}
    known, val_labels = set(lines), {}
    plain: dict[bytes, Record] = {}  # images whose class is a folder
    labelled = []

    def add(path: bytes, record: Record) -> None:
        classes.setdefault(path.partition(b"/")[0], {})[path] = record

    for tar in tars:
        stem = os.fsencode(tar.path.stem)
        for name, (offset, size) in tar.images.items():
            record = (tar.number, offset, size)
            if known and (path := _unquoted(name)).partition(b"/")[0] in known:
                add(path, record)
            elif (label := tar.labels.get(sample_key(name))) is not None:
                labelled.append(
                    (_class_of(label, lines, known, tar.where(name)), stem, name, record)
                )
            elif tar.labels:
                raise tar_error(f"{tar.where(name)} has no label beside it (KEY.cls)")
            elif sample_key(name) in tar.documents:
                raise unsupported_error(f"{tar.where(name)} has its label in a JSON file")
            elif b"/" in name:
                plain[name] = record
            elif re.fullmatch(rb"ILSVRC2012_val_\d{8}\.JPEG", name):
                val_labels = val_labels or devkit.val_labels(root.parent)
                if name.decode() not in val_labels:
                    raise tar_error(f"the class of {name.decode()} is not known")
                add(val_labels[name.decode()].encode() + b"/" + name, record)
            elif root.is_dir():
                plain[stem + b"/" + name] = record
            # Else the image is beside the class folders and not part of the data set.
    # Each shard may number its images from 0.
    unique = len({(label, name) for label, _, name, _ in labelled}) == len(labelled)
    for label, stem, name, record in labelled:
        add(b"/".join((label, name) if unique else (label, stem, name)), record)
    top = os.fsencode(root.name) + b"/"  # train/
    if not (plain and all(name.startswith(top) and name.count(b"/") > 1 for name in plain)):
        top = b""
    for name, record in plain.items():
        add(name[len(top) :], record)
    if not labelled and not known:
        for folder in set().union(*(tar.folders for tar in tars)):
            if folder.startswith(top) and folder[len(top) :]:
                classes.setdefault(folder[len(top) :].partition(b"/")[0], {})
        if len(classes) == 1 and plain and all(name[len(top) :].count(b"/") > 1 for name in plain):
            folder = os.fsdecode(top + next(iter(classes)))
            raise unsupported_error(f"{tars[0].path} has its classes inside the folder {folder}")
    return classes


def _unquoted(name: bytes) -> bytes:
    """Return the original path that `scripts/prepare_data.py shards` has encoded as ``name``."""
    path = unquote_to_bytes(name) if b"%" in name else name
    return name if b"\0" in path else path


def _class_of(label: bytes, lines: list[bytes], known: set[bytes], where: str) -> bytes:
    """Return the class of a label. ``lines``: those of classes.txt, ``known``: the same as a set.

    Raises: `UserError`.
    """
    if label.isdigit() and len(label) < 10:
        number = int(label)
        if not lines:
            return b"%05d" % number
        if number < len(lines):
            return lines[number]
    elif label in known or (not lines and not re.search(rb"^\.|[/\0\n]", label)):
        return label
    text = f"{where} has the label {os.fsdecode(label[:40])}"
    raise tar_error(f"{text}, which is neither a line number of {CLASSES} nor a class")
