"""Decode images once, and store uint8 pixels in a few large files, with an index.

The pixels equal those of `shrink`, without a second JPEG compression. Reading them needs no
decoder, but ten times the space. utils/extras/pack.py describes the format and reads it. A file
that cannot be decoded is stored unchanged, so that training handles it by its rule for bad files.
"""

import argparse
import io
import os
import zlib
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from prepare.reading import Images
from prepare.shrink import opened, reduce
from prepare.writing import SPLITS, Item, Split, work

from utils import addons
from utils.atomic import save_atomically
from utils.errors import UserError
from utils.extras import pack
from utils.preprocessing import to_rgb


def read_end(path: Path) -> np.ndarray | None:
    """Return the index at the end of a file, `pack.RECORD` [n]; None if the file is incomplete."""
    try:
        with open(path, "rb") as file:
            file.seek(-8 - len(pack.MAGIC), os.SEEK_END)
            length, magic = int.from_bytes(file.read(8), "little"), file.read()
            file.seek(-8 - len(pack.MAGIC) - length, os.SEEK_END)
            with np.load(io.BytesIO(file.read(length))) as content:
                records = content["records"]
    except Exception:  # a missing file; zipfile and numpy report damage by many types
        return None
    return records if magic == pack.MAGIC else None


def _write_file(size: int, job: tuple[Path, int, list[Item]]) -> tuple[int, list[str]]:
    """Write one file, in a worker. Returns 1, and a message for each undecodable image.

    ``job``: the file's path, the number of its first image, and its images.
    """
    path, first, items = job
    records, messages = [], []

    def write(file: BinaryIO) -> None:
        for number, item in enumerate(items, start=first):
            data, shape = item.content(), (0, 0)
            try:
                with opened(data) as image:
                    small = reduce(image, size)
                    pixels = np.asarray(to_rgb(image) if small is None else small)
                data, shape = pixels.tobytes(), pixels.shape[:2]
            except ValueError as error:
                messages.append(f"stored unchanged: {item.place}: {error}")
            records.append((number, file.tell(), len(data), *shape, zlib.crc32(data)))
            file.write(data)
        index = io.BytesIO()
        np.savez(index, records=np.array(records, pack.RECORD))
        file.write(index.getvalue() + len(index.getvalue()).to_bytes(8, "little") + pack.MAGIC)

    save_atomically(write, path)
    return 1, messages


def write_pack(
    images: dict[str, Images], size: int, out: Path, name: str, split: Split, workers: int
) -> tuple[int, int]:
    """Write OUT/``name``, a file per chunk; short sides have at most ``size`` pixels.

    Returns: the number of new files, and of all undecodable images.
    """
    paths = [out / name / pack.file_name(i) for i in range(len(split.chunks))]
    missing = [i for i, path in enumerate(paths) if read_end(path) is None]
    jobs = ((paths[i], i * pack.IMAGES_PER_FILE, split.chunks[i]) for i in missing)
    work(partial(_write_file, size), jobs, workers, len(missing), " files")
    source, records = images[name].source, np.concatenate([read_end(path) for path in paths])
    arrays = {
        "version": pack.VERSION,
        "size": size,
        "classes": np.frombuffer(b"\0".join(map(os.fsencode, source.classes)), np.uint8),
        "counts": np.bincount(source.targets, minlength=len(source.classes)),
        "paths": np.frombuffer(source.paths, np.uint8),
        "records": records,
        "file_bytes": np.array([path.stat().st_size for path in paths], np.int64),
    }
    save_atomically(lambda file: np.savez(file, **arrays), out / name / pack.INDEX)
    return len(missing), int((records["height"] == 0).sum())


def _check(path: Path) -> tuple[int, list[str]]:
    """Check one file of a pack, in a worker. Returns 1, and a message if the file has changed."""
    records = read_end(path)
    intact = records is not None
    if intact:
        with path.open("rb") as file:
            intact = all(zlib.crc32(file.read(one["bytes"])) == one["crc"] for one in records)
    return 1, [] if intact else [f"damaged: {path}"]


def verify(args: argparse.Namespace) -> None:
    """Run `verify`: read a pack, compare checksums, name damaged files. Raises: `UserError`."""
    paths = []
    for folder in (args.out / split for split in SPLITS):
        if addons.source_kind(folder) is pack.Pack:
            pack.Pack.class_names(folder)  # raises `UserError` if the pack is incomplete
            paths += sorted(folder.glob(f"*{pack.SUFFIX}"))
    if not paths:
        raise UserError(f"{args.out} holds no packed pixels")
    if damaged := work(_check, paths, args.workers, len(paths), " files"):
        text = f"{len(damaged)} of {len(paths)} files are damaged: remove them, then run again the"
        raise UserError(f"{text} command that made the pack")
    print(f"{args.out}: all {len(paths)} files match their checksums")
