"""The images of one part of a data set: `Source`, and `Archive` where one file holds many images.

Nothing else depends on where images come from. `utils.data.opening` makes the source that fits a
folder. To add a kind, write its two functions (`Kind` there) and a line in `source_kind`. Override
`read` and `stored` of `Source`, unless `Archive` fits.
"""

import os
import stat
import threading
import weakref
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.start.errors import UserError

SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".ppm", ".bmp", ".pgm"),
    *(".tif", ".tiff", ".webp", ".gif"),
)
# Folders and files, in lower case, that network disks, desktops and archives put among images.
SYSTEM_NAMES = {
    *("@eadir", "@tmp", "@sharebin", "#recycle", "#snapshot", "@recycle", "@recently-snapshot"),
    *("__macosx", "$recycle.bin", "recycler", "system volume information", "lost+found"),
    *("thumbs.db", "desktop.ini", "ehthumbs.db"),
}
THREADS = 8  # a network disk serves many requests at once
SIZES_ASKED = 10_000  # files, spread over the data set, from which the mean size is estimated


class Source:
    """The images of one part of a data set (DATA/train, say), numbered from 0, class by class.

    ``targets``: integers [n], the index of each image's class in ``classes``. All names are in one
    byte string: 1.28 million Python strings would be copied into the memory of every loader worker
    as their reference counts change.
    """

    def __init__(self, root: Path | str, classes: list[str], paths: bytes, counts: Sequence[int]):
        """``paths`` of all images, relative to ``root``, class by class, each followed by a zero
        byte; ``counts``: how many images each class has."""
        self.root, self.classes, self.paths = str(root), classes, paths
        self.starts = path_starts(paths)
        small = np.int16 if len(classes) < 2**15 else np.int32
        self.targets = np.repeat(np.arange(len(classes), dtype=small), counts)

    def __len__(self) -> int:
        return len(self.targets)

    def name(self, image: int) -> str:
        """The path relative to the root."""
        return os.fsdecode(self.paths[self.starts[image] : self.starts[image + 1] - 1])

    def path(self, image: int) -> str:
        """The path to print in messages."""
        return os.path.join(self.root, self.name(image))

    def read(self, image: int) -> bytes:
        """The image file. Raises: OSError."""
        with open(self.path(image), "rb", buffering=0, opener=open_regular) as file:
            return file.read()

    def stored(self, image: int) -> tuple[str, int, int | None]:
        """The file with ``image``, the offset there, and the size in bytes (None: to the end)."""
        return self.path(image), 0, None

    def fingerprint(self) -> str:
        """A short text that is equal on nodes with equal file names."""
        number = f"{len(self)} images in {len(self.classes)} classes"
        return f"{number} ({zlib.crc32(self.paths):08x})"

    def class_fingerprints(self) -> dict[str, str]:
        """The fingerprint of each class, by its name, to find one that differs."""
        ends, prints = np.searchsorted(self.targets, np.arange(len(self.classes) + 1)), {}
        for name, start, end in zip(self.classes, ends[:-1], ends[1:], strict=True):
            names = self.paths[self.starts[start] : self.starts[end]]
            prints[name] = f"{end - start} images ({zlib.crc32(names):08x})"
        return prints

    def sample_sizes(self, most: int = SIZES_ASKED) -> tuple[float, str]:
        """Mean size in bytes and a fingerprint of at most ``most`` evenly spaced images."""
        count = min(len(self), most)
        chosen = (np.arange(count) * len(self) // count).tolist()
        with ThreadPoolExecutor(THREADS) as pool:
            sizes = np.fromiter(pool.map(self._size, chosen), np.int64, count)
        return float(sizes.mean()), f"{zlib.crc32(sizes.tobytes()):08x}"

    def _size(self, image: int) -> int:
        path, _, size = self.stored(image)
        try:
            return os.stat(path).st_size if size is None else size
        except OSError:
            return 0  # a dangling link: reading it will report that


def is_hidden(name: str) -> bool:
    """Whether a file or folder is no part of a data set: hidden, or left by a system."""
    return name.startswith(".") or name.lower() in SYSTEM_NAMES


def path_starts(paths: bytes) -> np.ndarray:
    """The offset of each path (each ends with a zero byte) and of the end: integers [n+1]."""
    ends = np.flatnonzero(np.frombuffer(paths, np.uint8) == 0)
    return np.concatenate([[0], ends + 1]).astype(np.uint32 if len(paths) < 2**32 else np.int64)


def open_regular(path: str, flags: int) -> int:
    """A file descriptor. Raises: OSError, also for a pipe, which would wait for its writer, and for
    a device, which may have no end."""
    handle = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError("not a regular file")
    return handle


# ---- files that hold many images


class Index(NamedTuple):
    """Where the images of a part lie, class by class."""

    files: list[str]
    classes: list[str]
    counts: Any  # images of each class, integers [classes]
    paths: bytes  # see `Source`
    records: np.ndarray  # [n], with at least the fields "offset" and "bytes"
    numbers: np.ndarray  # index in ``files`` of each image's file: integers [n]


class Archive(Source):
    """Images in a few large files, which are opened once, before loader workers are forked. They
    can share the files, as pread needs no file position. Several threads may read."""

    def __init__(self, root: Path, chosen: list[str], index: Index):
        """Take the ``chosen`` classes, in this order. Raises: `UserError` if one is missing, or a
        file cannot be opened."""
        if unknown := set(chosen) - set(index.classes):
            raise UserError(f"{root} has no class {min(unknown)}", on_every_rank=True)
        images = np.concatenate([[0], np.cumsum(index.counts)])
        bounds = path_starts(index.paths)[images]
        numbers = {name: number for number, name in enumerate(index.classes)}
        taken = [numbers[name] for name in chosen]
        rows = np.concatenate([np.arange(images[n], images[n + 1]) for n in taken])
        paths = b"".join(index.paths[bounds[n] : bounds[n + 1]] for n in taken)
        counts = [index.counts[n] for n in taken]
        super().__init__(root, chosen, paths, counts)
        self.files, self.records = index.files, index.records[rows]
        self.numbers = index.numbers[rows].astype(np.uint16)
        self._buffer, self._handles, self._stamps = np.empty(0, np.uint8), [], []
        for path in index.files:
            try:
                self._handles.append(open_regular(path, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                text = f"cannot open {path} ({error.strerror or error})"
                raise UserError(text, on_every_rank=True) from None
            self._stamps.append(_content_stamp(self._handles[-1]))
            os.posix_fadvise(self._handles[-1], 0, 0, os.POSIX_FADV_RANDOM)  # do not read ahead
        weakref.finalize(self, lambda handles: [*map(os.close, handles)], self._handles)

    def path(self, image: int) -> str:
        """The path of the file with many images, joined with the image's path in it."""
        return os.path.join(self.stored(image)[0], self.name(image))

    def stored(self, image: int) -> tuple[str, int, int]:
        """The file that holds ``image``, the offset there, and the size in bytes."""
        record = self.records[image]
        return self.files[self.numbers[image]], int(record["offset"]), int(record["bytes"])

    def read(self, image: int) -> bytes:
        """All bytes of an image. Raises: OSError."""
        record, number, buffer = self.records[image], self.numbers[image], self._buffer
        offset, count = int(record["offset"]), int(record["bytes"])
        if threading.current_thread() is not threading.main_thread():  # several reads in flight
            buffer = np.empty(count, np.uint8)
        elif len(buffer) < count:  # a reused buffer stays in the processor's cache
            buffer = self._buffer = np.empty(count, np.uint8)
        if _content_stamp(self._handles[number]) != self._stamps[number]:
            name = os.path.basename(self.files[number])
            raise OSError(f"{name} was changed during this run: start the run again")
        target, done = buffer[:count].data, 0
        while done < count:  # a network disk may return fewer bytes than requested
            got = os.preadv(self._handles[number], [target[done:]], offset + done)
            if not got:
                name = os.path.basename(self.files[number])
                raise OSError(f"{name} ends before the image does")
            done += got
        return target.tobytes()


def _content_stamp(handle: int) -> tuple[int, int]:
    """Numbers that change when an open file is rewritten, though not when its name is."""
    status = os.fstat(handle)
    return status.st_mtime_ns, status.st_size
