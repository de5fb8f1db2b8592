"""Decode an image folder once: uint8 pixels in a few large files, with an index.

The pixels are those of `shrink` without its second loss by JPEG. Reading them needs no decoder, but
ten times the space. utils/extras/pack.py describes the format and reads it.

A file that cannot be decoded is reported, counted and stored unchanged, so that training's rule for
bad files applies to it. Each worker writes whole files of the pack. A file gets its name when it is
complete; running an interrupted command again writes the missing files.
"""

import io
import os
import zlib
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from prepare.folder import SPLITS, Stored, locked, mark, work
from prepare.reading import check_apart, open_images
from prepare.shrink import opened, reduce
from tqdm import tqdm

from utils import addons
from utils.atomic import remove_leftovers, save_atomically
from utils.errors import UserError
from utils.extras import pack
from utils.folder import Source
from utils.preprocessing import to_rgb

File = tuple[Path, range, Source]  # of a pack: its path, and its images in this source


def end_of_file(records: np.ndarray) -> bytes:
    """The bytes after the images in a file: its index, the index's length and `pack.MAGIC`."""
    file = io.BytesIO()
    np.savez(file, records=records)
    return file.getvalue() + len(file.getvalue()).to_bytes(8, "little") + pack.MAGIC


def read_end(path: Path) -> np.ndarray | None:
    """The index at the end of a file, `pack.RECORD` [n]; None if the file is not complete."""
    try:
        with open(path, "rb") as file:
            file.seek(-8 - len(pack.MAGIC), os.SEEK_END)
            length, magic = int.from_bytes(file.read(8), "little"), file.read()
            file.seek(-8 - len(pack.MAGIC) - length, os.SEEK_END)
            with np.load(io.BytesIO(file.read(length))) as content:
                records = content["records"]
    except Exception:  # it is missing, or zipfile and numpy find it damaged in many ways
        return None
    return records if magic == pack.MAGIC else None


def _content(image: Stored, size: int) -> tuple[bytes, tuple[int, int], str | None]:
    """The content to store for an image, its height and width, and why it cannot be decoded."""
    data = image.read()
    try:
        with opened(data) as picture:
            small = reduce(picture, size)
            pixels = np.asarray(to_rgb(picture) if small is None else small)
        return pixels.tobytes(), pixels.shape[:2], None
    except ValueError as error:
        return data, (0, 0), str(error)


def _make(size: int, job: tuple[Path, int, list[Stored]]) -> tuple[int, list[str]]:
    """In a worker: write one file of a pack. Returns 1, and a message for each image stored
    unchanged.

    ``job``: the file's path, the number of its first image, and where the images are.
    """
    place, first, images = job
    records, notes = [], []

    def write(file: BinaryIO) -> None:
        for number, image in enumerate(images, start=first):
            content, shape, reason = _content(image, size)
            records.append((number, file.tell(), len(content), *shape, zlib.crc32(content)))
            file.write(content)
            notes.extend([f"stored as it is: {image.path}: {reason}"] if reason else [])
        file.write(end_of_file(np.array(records, pack.RECORD)))

    save_atomically(write, place)
    return 1, notes


def _join(folder: Path, files: list[Path], index: Source, size: int) -> np.ndarray:
    """Write the index of a split whose ``files`` are all complete. Returns its records."""
    records = np.concatenate([read_end(path) for path in files])
    arrays = {
        "version": pack.VERSION,
        "size": size,
        "classes": np.frombuffer(b"\0".join(map(os.fsencode, index.classes)), np.uint8),
        "counts": np.bincount(index.targets, minlength=len(index.classes)),
        "paths": np.frombuffer(index.paths, np.uint8),
        "records": records,
        "file_bytes": np.array([path.stat().st_size for path in files], np.int64),
    }
    save_atomically(lambda file: np.savez(file, **arrays), folder / pack.INDEX)
    return records


def pack_folder(source: Path, out: Path, size: int, workers: int) -> None:
    """Write the packed copy of a data set, its short sides at most ``size`` pixels.

    Raises: OSError if a file cannot be opened; `UserError` if ``out`` holds something else or is
    being written; and what `open_images` raises.
    """
    source, out = check_apart(source, out)
    indices = {}
    for split, (images, classes) in open_images(source).items():
        if empty := set(classes) - set(images.classes):
            raise UserError(f"class {min(empty)} of {source / split} has no images: remove it")
        indices[split] = images
    # The fingerprints change when files are added, removed or renamed.
    images = ", ".join(f"{split} {index.fingerprint()}" for split, index in indices.items())
    what = f"pack (source {source}, size {size}, {images})"
    files: list[File] = []
    for split, index in indices.items():
        for number, start in enumerate(range(0, len(index), pack.IMAGES_PER_FILE)):
            part = range(start, min(start + pack.IMAGES_PER_FILE, len(index)))
            files.append((out / split / pack.file_name(number), part, index))
    with locked(out, what):
        remove_leftovers(out, recursive=True)
        if missing := [one for one in files if read_end(one[0]) is None]:
            mark(out, what, False, {})
            for split in indices:
                (out / split).mkdir(exist_ok=True)
            jobs = (
                (path, part.start, [Stored(*index.stored(i)) for i in part])
                for path, part, index in missing
            )
            # A small data set is one file: more workers would be idle.
            work(partial(_make, size), jobs, min(workers, len(missing)), len(missing), " files")
        faults = 0
        for split, index in indices.items():
            own = [path for path, _, other in files if other is index]
            faults += int((_join(out / split, own, index, size)["height"] == 0).sum())
        counts = {split: len(index) for split, index in indices.items()}
        mark(out, what, True, counts)
    total = sum(path.stat().st_size for path, *_ in files)
    print(
        f"{'done' if missing else 'nothing to do'}: {out}: {sum(counts.values())} images in "
        f"{len(files)} files, {tqdm.format_sizeof(total, 'B')}"
    )
    if faults:
        print(f"{faults} images cannot be decoded, and are stored as they are")


def _check(path: Path) -> tuple[int, list[str]]:
    """In a worker: 1, and a message if this file of a pack has changed since it was written."""
    records = read_end(path)
    whole = records is not None
    if whole:
        with path.open("rb") as file:
            whole = all(zlib.crc32(file.read(one["bytes"])) == one["crc"] for one in records)
    return 1, [] if whole else [f"damaged: {path}"]


def verify(out: Path, workers: int) -> None:
    """Read a whole pack, compare checksums and name damaged files. Raises: `UserError`."""
    paths = []
    for folder in (out / split for split in SPLITS):
        if addons.source_kind(folder) is not pack.Pack:
            continue
        pack.Pack.class_names(folder)
        paths += sorted(folder.glob(f"*{pack.SUFFIX}"))
    if not paths:
        raise UserError(f"{out} holds no packed pixels")
    if damaged := work(_check, paths, min(workers, len(paths)), len(paths), " files"):
        raise UserError(
            f"{len(damaged)} of {len(paths)} files are damaged: remove them, and run the command "
            "that made the pack again"
        )
    print(f"{out}: {len(paths)} files are as they were written")
