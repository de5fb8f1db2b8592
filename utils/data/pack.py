"""Decoded pixels in a few large files, written by `prepare_data.py pack` and read by training.

A packed part (DATA/train, say) holds 00000.pixels, 00001.pixels, ... and pack.npz, their index. An
image is stored as its pixels, uint8 RGB, row by row; or, if it cannot be decoded, as the bytes of
its file, so that training's rule for unreadable files applies. Each file ends with the index of its
images, so that interrupted packing can resume.

Only the rows that a crop shows are read, by pread: if a file is truncated or the disk fails, that
is an `OSError`, an unreadable image, where a memory-mapped file would kill the worker.
"""

import io
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from utils.errors import UserError

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


def is_pack(root: Path | str) -> bool:
    """Whether ``root`` (DATA/train, say) holds packed pixels, whole or not."""
    try:
        with os.scandir(root) as entries:
            return any(e.name == INDEX or e.name.endswith(SUFFIX) for e in entries)
    except OSError:
        return False


def file_name(number: int) -> str:
    """Name of the file with images ``number`` * `IMAGES_PER_FILE` and on."""
    return f"{number:05d}{SUFFIX}"


def path_starts(paths: bytes) -> np.ndarray:
    """The start of each path (each ends with a zero byte), and the end of the last: int64 [n+1]."""
    ends = np.flatnonzero(np.frombuffer(paths, np.uint8) == 0)
    return np.concatenate([[0], ends + 1])


@dataclass
class Contents:
    """The arrays in pack.npz; images are ordered by class, and by path within a class."""

    size: int  # largest short side, pixels
    classes: list[str]
    counts: np.ndarray  # int64 [classes]: images of each
    paths: bytes  # relative to the part, each followed by a zero byte
    records: np.ndarray  # `RECORD` [n]
    file_bytes: np.ndarray  # int64 [files]


def load(root: Path | str) -> Contents:
    """The index of the pack ``root``, whose files are all there and as long as they should be.

    Raises: `UserError` for an incomplete or damaged pack.
    """
    place = os.path.join(root, INDEX)
    try:
        with np.load(place) as file:
            arrays = {key: file[key] for key in file.files}
        if (version := int(arrays.pop("version"))) != VERSION:
            raise _broken(f"{place} is of version {version}, not {VERSION}")
        contents = Contents(**arrays)
    except FileNotFoundError:
        raise _broken(
            f"{place} is missing: packing was not finished, or the copy is incomplete"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as fault:
        raise _broken(f"{place} is damaged ({fault})") from None
    contents.size, contents.paths = int(contents.size), contents.paths.tobytes()
    contents.classes = [os.fsdecode(name) for name in contents.classes.tobytes().split(b"\0")]
    for number, wanted in enumerate(contents.file_bytes.tolist()):
        path = os.path.join(root, file_name(number))
        try:
            found = os.stat(path).st_size
        except OSError as fault:
            raise _broken(f"cannot open {path} ({fault.strerror})") from None
        if found != wanted:
            raise _broken(f"{path} has {found:,} bytes instead of {wanted:,}")
    return contents


def _broken(what: str) -> UserError:
    return UserError(f"{what}; copy the pack again, or run prepare_data.py pack again", alike=True)


@dataclass
class Pack:
    """The packed images of an index, open for reading. Not for several threads at once."""

    root: str
    size: int  # largest short side, pixels
    records: np.ndarray  # `RECORD` [n], in the order of the index
    files: np.ndarray  # int32 [n]: the file that each image is in
    _open: dict[int, io.FileIO] = field(default_factory=dict)
    _buffer: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))

    def shape(self, image: int) -> tuple[int, int] | None:
        """Height and width of ``image``; None if the bytes of its file are stored."""
        record = self.records[image]
        return (int(record["height"]), int(record["width"])) if record["height"] else None

    def rows(self, image: int, top: int, height: int) -> np.ndarray:
        """Rows of an image that has a `shape`: uint8 [height, width, 3], until the next call.

        Raises: OSError.
        """
        width = int(self.records[image]["width"])
        data = self._read(image, 3 * width * top, 3 * width * height)
        return data.reshape(height, width, 3)

    def file(self, image: int) -> bytes:
        """All stored bytes of an image, pixels or a file. Raises: OSError."""
        return self._read(image, 0, int(self.records[image]["bytes"])).tobytes()

    def stored(self, image: int) -> tuple[str, int, int]:
        """The file that ``image`` is in, its place there and its number of bytes."""
        record = self.records[image]
        path = os.path.join(self.root, file_name(int(self.files[image])))
        return path, int(record["place"]), int(record["bytes"])

    def _read(self, image: int, start: int, count: int) -> np.ndarray:
        number, place = int(self.files[image]), int(self.records[image]["place"]) + start
        # A reused buffer stays in the processor's cache.
        if len(self._buffer) < count:
            self._buffer = np.empty(count, np.uint8)
        file = self._open.get(number)
        if file is None:
            if len(self._open) >= OPEN_FILES:
                del self._open[next(iter(self._open))]  # the one opened first; this closes it
            file = self._open[number] = open(
                os.path.join(self.root, file_name(number)), "rb", buffering=0
            )
            # Images are read in random order: do not read ahead.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        wanted, done = self._buffer[:count], 0
        while done < count:
            got = os.preadv(file.fileno(), [wanted[done:]], place + done)
            if not got:
                raise OSError(f"{file_name(number)} ends before the image does")
            done += got
        return wanted


def select(root: str, classes: list[str]) -> tuple[Pack, bytes, list[int]]:
    """Open the images of ``classes`` in the pack ``root``, in this order.

    Returns: the images, their paths (each followed by a zero byte), and the number of images of
    each class. Raises: `UserError`.
    """
    contents = load(root)
    if unknown := [name for name in classes if name not in contents.classes]:
        raise UserError(f"the pack has no class {unknown[0]}", alike=True)
    starts, ends = path_starts(contents.paths), np.cumsum(contents.counts)
    rows, paths, counts = [], [], []
    for number in map(contents.classes.index, classes):
        count, end = int(contents.counts[number]), int(ends[number])
        rows.append(np.arange(end - count, end))
        paths.append(contents.paths[starts[end - count] : starts[end]])
        counts.append(count)
    images = np.concatenate(rows)
    files = (images // IMAGES_PER_FILE).astype(np.int32)
    opened = Pack(root, contents.size, contents.records[images], files)
    return opened, b"".join(paths), counts
