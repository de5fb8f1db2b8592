"""Decoded pixels in a few large files, which `scripts/prepare_data.py pack` writes.

No option: used where DATA/train, val or test holds such files. Interface: `Pack` is a
`utils.folder.Source`. Without this file, packed data sets cannot be read.

A packed part (DATA/train, say) holds 00000.pixels, 00001.pixels, ... and pack.npz, their index. An
image is stored as its pixels, uint8 RGB, row by row; or, if it cannot be decoded, as the bytes of
its file, so that training's rule for unreadable files applies. Each file ends with the index of its
images, so that interrupted packing can resume.

Only the rows that a crop shows are read, by pread: if a file is truncated or the disk fails, that
is an `OSError`, so one unreadable image; a memory-mapped file would kill the worker.
"""

import functools
import io
import os
import threading
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.errors import UserError
from utils.folder import Source, path_starts

INDEX = "pack.npz"
SUFFIX = ".pixels"
VERSION = 2
IMAGES_PER_FILE = 4096  # 1.1 GB at 256 pixels: 326 files for ImageNet
OPEN_FILES = 512  # at most, in a process; the usual limit is 1024
MAGIC = b"pixels 1"
# Of each image: its number in the part, its place, the number of bytes, height and width in pixels
# (0 and 0 for the bytes of a file) and CRC-32.
RECORD = np.dtype(
    [("image", "<i8"), ("place", "<i8"), ("bytes", "<i8"), ("height", "<i4"), ("width", "<i4")]
    + [("crc", "<u4")]
)


def file_name(number: int) -> str:
    """Name of the file with images ``number`` * `IMAGES_PER_FILE` and on."""
    return f"{number:05d}{SUFFIX}"


class Pack(Source):
    """The images of a packed part, with the paths of the folder that it was made from, as if they
    were in ``root``. Several threads may read."""

    stores_pixels = True

    def __init__(self, root: Path, classes: list[str], shows: bool = False):
        """Read the index, and check that all files are there and as long as they should be.

        ``classes``: those to take, in this order. Raises: `UserError` for an incomplete or damaged
        pack, or one without a class.
        """
        index = _read_index(root)
        self.size = index.size
        if unknown := [name for name in classes if name not in index.classes]:
            raise UserError(f"the pack has no class {unknown[0]}", on_every_rank=True)
        numbers = [index.classes.index(name) for name in classes]
        ends, counts = np.cumsum(index.counts), index.counts[numbers]
        rows = [np.arange(ends[n] - index.counts[n], ends[n]) for n in numbers]
        self.records = index.records[np.concatenate(rows)]
        starts = path_starts(index.paths)
        paths = b"".join(index.paths[starts[row[0]] : starts[row[-1] + 1]] for row in rows)
        super().__init__(root, classes, paths, counts.tolist())
        self._buffer = np.empty(0, np.uint8)

    @staticmethod
    def class_names(root: Path) -> list[str]:
        """The classes of a whole pack. Raises: `UserError`."""
        return _read_index(root).classes

    def fingerprint(self) -> str:
        """Equal on two nodes with equal file names and sizes of pixels."""
        return f"{super().fingerprint()}, packed with {self.size} pixels"

    def sample_sizes(self, most: int = 0) -> tuple[float, str]:
        """Mean size, and a fingerprint of the contents, of all images."""
        crcs = f"{zlib.crc32(self.records['crc'].tobytes()):08x}"
        return float(self.records["bytes"].mean()), crcs

    def shape(self, image: int) -> tuple[int, int] | None:
        """Height and width of ``image``; None if the bytes of its file are stored."""
        record = self.records[image]
        return (int(record["height"]), int(record["width"])) if record["height"] else None

    def rows(self, image: int, top: int, height: int) -> np.ndarray:
        """Rows of an image that has a `shape`: uint8 [height, width, 3], until the next call.

        Raises: OSError.
        """
        width = int(self.records[image]["width"])
        return self._read(image, 3 * width * top, 3 * width * height).reshape(height, width, 3)

    def read(self, image: int) -> bytes:
        """All stored bytes of an image: those of its file, or its pixels. Raises: OSError."""
        return self._read(image, 0, int(self.records[image]["bytes"])).tobytes()

    def stored(self, image: int) -> tuple[str, int, int]:
        """The file that ``image`` is in, its place there and its number of bytes."""
        record = self.records[image]
        path = os.path.join(self.root, file_name(int(record["image"]) // IMAGES_PER_FILE))
        return path, int(record["place"]), int(record["bytes"])

    def _read(self, image: int, start: int, count: int) -> np.ndarray:
        path, place, _ = self.stored(image)
        buffer = self._buffer
        if threading.current_thread() is not threading.main_thread():  # one of many reads in flight
            buffer = np.empty(count, np.uint8)
        elif len(buffer) < count:  # a reused buffer stays in the processor's cache
            buffer = self._buffer = np.empty(count, np.uint8)
        # The file object, as other threads may cause `_open` to forget it, which closes the file.
        file, target, done = _open(path), buffer[:count], 0
        while done < count:
            got = os.preadv(file.fileno(), [target[done:]], place + start + done)
            if not got:
                raise OSError(f"{os.path.basename(path)} ends before the image does")
            done += got
        return target


@functools.lru_cache(OPEN_FILES)
def _open(path: str) -> io.FileIO:
    file = open(path, "rb", buffering=0)
    # Images are read in random order: do not read ahead.
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
    return file


class _Index(NamedTuple):
    """The content of `INDEX`."""

    size: int  # largest short side, pixels
    classes: list[str]
    counts: np.ndarray  # int64 [classes]: images of each
    paths: bytes  # relative to the part, each followed by a zero byte
    records: np.ndarray  # `RECORD` [n]


def _read_index(root: Path) -> _Index:
    place = os.path.join(root, INDEX)
    if not os.path.exists(place):
        raise _broken(f"{place} is missing: packing was not finished, or the copy is incomplete")
    try:
        with np.load(place) as file:
            version, file_bytes = int(file["version"]), file["file_bytes"].tolist()
            classes = [os.fsdecode(name) for name in file["classes"].tobytes().split(b"\0")]
            paths, records = file["paths"].tobytes(), file["records"]
            index = _Index(int(file["size"]), classes, file["counts"], paths, records)
    except Exception as error:  # zipfile and numpy report damage by half a dozen types
        raise _broken(f"{place} is damaged ({error})") from None
    if version != VERSION:
        raise _broken(f"{place} is of version {version}, not {VERSION}")
    for number, size in enumerate(file_bytes):
        path = os.path.join(root, file_name(number))
        if not os.path.exists(path) or os.path.getsize(path) != size:
            raise _broken(f"{path} is missing or has not {size:,} bytes")
    return index


def _broken(what: str) -> UserError:
    return UserError(
        f"{what}; copy the pack again, or run prepare_data.py pack again", on_every_rank=True
    )
