"""Decode an image folder once: uint8 pixels in a few large files, with an index.

The pixels are those of `shrink` without its second loss by JPEG. Reading them needs no decoder, but
ten times the space. utils/data/pack.py describes the format and reads it.

A file that cannot be decoded is reported, counted and stored unchanged, so that training's rule for
bad files applies to it. Each worker writes whole files of the pack. A file gets its name when it is
complete; running an interrupted command again writes the missing files.
"""

import io
import os
import shutil
import sys
import zipfile
import zlib
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from prepare.folder import AGAIN, SPLITS, locked, mark, progress, spread
from prepare.shrink import bytes_text, check_places, opened, read, reduce, reduced_shape
from tqdm import tqdm

from utils.atomic import remove_leftovers, save_atomically
from utils.data import pack
from utils.data.index import ImageIndex, class_folders
from utils.data.jpeg import to_rgb
from utils.errors import UserError

SAMPLE = 256  # images from whose size the size of the pack is estimated


class File(NamedTuple):
    """One file of a pack: its path, and its images in the order of the index of their split."""

    path: Path
    images: range
    index: ImageIndex

    def is_whole(self) -> bool:
        """Whether it exists, with all its images."""
        found = read_end(self.path)
        return found is not None and found["image"].tolist() == list(self.images)


def end_of_file(records: np.ndarray) -> bytes:
    """The bytes after the images in a file: its index, the index's length and `pack.MAGIC`."""
    file = io.BytesIO()
    np.savez(file, records=records)
    return file.getvalue() + len(file.getvalue()).to_bytes(8, "little") + pack.MAGIC


def read_end(path: Path) -> np.ndarray | None:
    """The index at the end of a file, `pack.RECORD` [n]; None if the file is not complete."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(size - 8 - len(pack.MAGIC))
            length, magic = int.from_bytes(file.read(8), "little"), file.read()
            start = size - 8 - len(pack.MAGIC) - length
            if magic != pack.MAGIC or start < 0:
                return None
            file.seek(start)
            with np.load(io.BytesIO(file.read(length))) as content:
                records = content["records"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    whole = records.dtype == pack.RECORD and int(records["bytes"].sum()) == start
    return records if whole else None


def _files(out: Path, index: ImageIndex) -> list[File]:
    step = pack.IMAGES_PER_FILE
    starts = range(0, len(index), step)
    return [
        File(out / pack.file_name(number), range(i, min(i + step, len(index))), index)
        for number, i in enumerate(starts)
    ]


def _content(path: str, size: int) -> tuple[bytes, tuple[int, int], str | None]:
    """The content to store for an image, its height and width, and why it cannot be decoded."""
    data = read(path)
    try:
        with opened(data) as picture:
            small = reduce(picture, size)
            pixels = np.asarray(to_rgb(picture) if small is None else small)
        return pixels.tobytes(), pixels.shape[:2], None
    except ValueError as error:
        return data, (0, 0), str(error)


def _make(size: int, job: tuple[Path, int, list[str]]) -> list[str]:
    """In a worker: write one file of a pack. Returns a message for each image stored unchanged.

    ``job``: the file's path, the number of its first image, and the images' paths.
    """
    place, first, paths = job
    records, notes = [], []

    def write(file: BinaryIO) -> None:
        for image, path in enumerate(paths, start=first):
            content, shape, reason = _content(path, size)
            records.append((image, file.tell(), len(content), *shape, zlib.crc32(content)))
            file.write(content)
            notes.extend([f"stored as it is: {path}: {reason}"] if reason else [])
        file.write(end_of_file(np.array(records, pack.RECORD)))

    try:
        save_atomically(write, place)
    except OSError as error:
        raise UserError(f"cannot write {place} ({error.strerror}); then {AGAIN}") from error
    return notes


def _check_space(files: list[File], out: Path, size: int) -> None:
    """Print the estimated size of the files. Raises: `UserError` if the disk has less space."""
    paths = [file.index.path(image) for file in files for image in file.images]
    found = []
    for path in paths[:: -(-len(paths) // SAMPLE)]:
        data = read(path)
        try:
            with opened(data) as picture:
                found.append(3 * np.prod(reduced_shape(*picture.size, size)))
        except ValueError:
            found.append(len(data))
    mean, free = float(np.mean(found)), shutil.disk_usage(out).free
    wanted = mean * len(paths)
    print(
        f"{len(paths)} images to pack: about {bytes_text(wanted)} in {len(files)} files, "
        f"{bytes_text(mean)} an image; {bytes_text(free)} are free in {out}",
        flush=True,
    )
    if wanted > free:
        raise UserError(
            f"the pack needs about {bytes_text(wanted - free)} more than the disk of {out} has: "
            "make room, choose another folder or a smaller --size"
        )


def _write(files: list[File], size: int, workers: int) -> None:
    folders = {file.path.parent for file in files}
    for folder in folders:
        folder.mkdir(exist_ok=True)
        remove_leftovers(folder)
    jobs = ((f.path, f.images.start, [f.index.path(i) for i in f.images]) for f in files)
    try:
        with progress(len(files), " files") as bar:
            # A small data set is one file: more workers would be idle.
            for notes in spread(partial(_make, size), jobs, min(workers, len(files))):
                bar.update()
                for note in notes:
                    tqdm.write(note, file=sys.stderr)
    finally:
        for folder in folders:
            remove_leftovers(folder)


def _join(files: list[File], size: int) -> pack.Contents:
    """Write the index of a split whose files are all complete."""
    index = files[0].index
    contents = pack.Contents(
        size,
        index.classes,
        np.bincount(index.targets, minlength=len(index.classes)),
        index.blob,
        np.concatenate([read_end(file.path) for file in files]),
        np.array([file.path.stat().st_size for file in files], np.int64),
    )
    arrays = vars(contents) | {
        "classes": np.frombuffer(b"\0".join(map(os.fsencode, contents.classes)), np.uint8),
        "paths": np.frombuffer(contents.paths, np.uint8),
    }
    save_atomically(
        lambda file: np.savez(file, version=pack.VERSION, **arrays),
        files[0].path.parent / pack.INDEX,
    )
    return contents


def pack_folder(source: Path, out: Path, size: int, workers: int) -> None:
    """Write the packed copy of an image folder, its short sides at most ``size`` pixels.

    Raises: `UserError` if a file cannot be opened, the disk is too small, or ``out`` holds
    something else or is being written; and what `check_places` raises.
    """
    source, out, splits = check_places(source, out)
    print(f"listing the images in {source}", flush=True)
    indices = {s: ImageIndex(source / s, class_folders(source / s), shows=True) for s in splits}
    files = {split: _files(out / split, index) for split, index in indices.items()}
    # The fingerprints change when files are added, removed or renamed.
    images = ", ".join(f"{split} {index.fingerprint()}" for split, index in indices.items())
    what = f"pack (source {source}, size {size}, {images})"
    counts = {split: len(index) for split, index in indices.items()}
    with locked(out, what) as marker:
        missing = [one for some in files.values() for one in some if not one.is_whole()]
        if (
            not missing
            and marker.get("finished")
            and all(map(_is_whole, map(out.joinpath, splits)))
        ):
            print(f"nothing to do: {out} already holds this pack")
            return
        if missing:
            _check_space(missing, out, size)
            mark(out, what, False, {})
            _write(missing, size, workers)
        found = [_join(some, size) for some in files.values()]
        mark(out, what, True, counts)
    sizes = [count for contents in found for count in contents.file_bytes.tolist()]
    number = sum(counts.values())
    print(f"done: {out}: {number} images in {len(sizes)} files, {bytes_text(sum(sizes))}")
    if faults := sum(int((contents.records["height"] == 0).sum()) for contents in found):
        print(f"{faults} images cannot be decoded, and are stored as they are")


def _is_whole(folder: Path) -> bool:
    try:
        pack.load(folder)
    except UserError:
        return False
    return True


def _damaged(path: Path) -> Path | None:
    """In a worker: ``path`` if this file of a pack has changed since it was written."""
    records = read_end(path)
    if records is None:
        return path
    with path.open("rb") as file:
        for record in np.sort(records, order="place"):
            if zlib.crc32(file.read(int(record["bytes"]))) != record["crc"]:
                return path
    return None


def verify(out: Path, workers: int) -> None:
    """Read a whole pack and compare checksums. Raises: `UserError`, naming damaged files."""
    paths = [
        out / split / pack.file_name(number)
        for split in SPLITS
        if pack.is_pack(out / split)
        for number in range(len(pack.load(out / split).file_bytes))
    ]
    if not paths:
        raise UserError(f"{out} holds no packed pixels")
    damaged = []
    with progress(len(paths), " files") as bar:
        for path in spread(_damaged, paths, min(workers, len(paths))):
            bar.update()
            damaged += [str(path)] if path else []
    if damaged:
        raise UserError(
            f"{len(damaged)} of {len(paths)} files are damaged ({', '.join(sorted(damaged)[:3])}): "
            "remove them, and run the command that made the pack again"
        )
    print(f"{out}: {len(paths)} files are as they were written")
