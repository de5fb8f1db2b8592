"""Image sources (`Source`). The usual one is a folder of files, CLASS/*.JPEG.

To add another kind, write a file in utils/extras with a subclass of `Source`, or of `Archive` if
one file holds many images. Override `class_names`, ``__init__(root, classes, shows)``, `read` and
`stored`, and add a line to `utils.addons.source_kind`. No other code depends on the kind.
"""

import os
import resource
import stat
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from utils import addons
from utils.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
_SUFFIXES = tuple(suffix.encode() for suffix in SUFFIXES)
# If a folder or file changed less than this before it was read, another change within the same tick
# of the file system's clock would go unnoticed: its list is not cached.
RACY_SECONDS = 2.0
THREADS = 8  # a network disk serves many requests at once
SIZES_ASKED = 10_000  # files, spread over the data set, from which the mean size is estimated


class Source:
    """The images of one part of a data set (DATA/train, say), numbered from 0, class by class.

    ``targets``: integers [n], the index of each image's class in ``classes``. All names are in one
    byte string: 1.28 million Python strings would be copied into the memory of every loader worker
    as their reference counts change.
    """

    stores_pixels = False  # True: decoded images, of which `rows` reads only what a crop needs

    def __init__(self, root: Path | str, classes: list[str], paths: bytes, counts: Sequence[int]):
        """``paths`` of all images, relative to ``root``, class by class, each followed by a zero
        byte; ``counts``: how many images each class has. Raises: `UserError` for a class without
        images."""
        self.root, self.classes, self.paths = str(root), classes, paths
        for name, count in zip(classes, counts, strict=True):
            if not count:
                text = f"class folder {root}/{name} has no images ({' '.join(SUFFIXES)})"
                raise UserError(text, on_every_rank=True)
        self.starts = path_starts(paths)
        small = np.int16 if len(classes) < 2**15 else np.int32
        self.targets = np.repeat(np.arange(len(classes), dtype=small), counts)

    @staticmethod
    def class_names(root: Path) -> list[str]:
        """Sorted names of the class folders in ``root``; empty if ``root`` is not a folder."""
        names = os.listdir(root) if root.is_dir() else []
        return sorted(n for n in names if n[0] != "." and os.path.isdir(root / n))

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

    def shape(self, image: int) -> tuple[int, int] | None:
        """Height and width, if `rows` can read stored pixels; None: `read` the file instead."""
        return None

    def rows(self, image: int, top: int, height: int) -> np.ndarray:
        """Rows of an image that has a `shape`: uint8 [height, width, 3], valid until the next call.

        Raises: OSError.
        """
        raise OSError(f"{self.path(image)} is stored as a file")

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


# ---- a folder of files


class Listing(NamedTuple):
    """The images of one class, sorted by path."""

    paths: bytes  # relative to the root, each followed by a zero byte
    folders: dict[str, int]  # path -> st_mtime_ns, or 0 to list it again next time


class Folder(Source):
    """The image files below ``root``/CLASS/, sub-folders included."""

    def __init__(self, root: Path, classes: list[str], shows: bool = False):
        """List the folder, or read the list that an earlier run has cached.

        ``shows``: draw a progress bar. Raises: `UserError` for a class folder that is missing or
        has no image.
        """
        lists = [listing.paths for listing in listings(root, classes, shows)]
        super().__init__(root, classes, b"".join(lists), [paths.count(b"\0") for paths in lists])


def listings(root: Path, classes: list[str], shows: bool = False) -> list[Listing]:
    """The listing of each class folder ``root/CLASS``, from the cache if that is up to date.

    ``shows``: draw a progress bar on a terminal, and report a cache that cannot be written. Raises:
    `UserError`.
    """
    cache = addons.list_cache()
    known = cache.read(root) if cache else {}
    if missing := [n for n in classes if n not in known or not cache.is_fresh(root, known[n])]:
        with ThreadPoolExecutor(THREADS) as pool:
            bar = tqdm(
                pool.map(lambda name: list_class(root, name), missing),
                f"Indexing {root}",
                len(missing),
                leave=False,
                unit="class",
                disable=not (shows and sys.stderr.isatty()),
            )
            known |= zip(missing, bar, strict=True)
        if cache:
            cache.write(root, known, shows)
    return [known[name] for name in classes]


def settled_mtime(path: bytes | str) -> int:
    """Modification time in ns; 0 if so recent that another change could go unnoticed.

    Raises: OSError.
    """
    changed = os.stat(path).st_mtime_ns
    return 0 if abs(time.time() - changed / 1e9) < RACY_SECONDS else changed


def list_class(root: Path, name: str) -> Listing:
    """List the images of class folder ``name``, sub-folders included. Raises: `UserError`.

    It does not call stat on the files: for 1.28 million that would double the time.
    """
    files: list[bytes] = []
    folders: dict[str, int] = {}
    waiting = [os.fsencode(name)]
    while waiting:
        folder = waiting.pop()
        place = os.path.join(os.fsencode(root), folder)
        try:
            folders[os.fsdecode(folder)] = settled_mtime(place)
            with os.scandir(place) as entries:
                for entry in entries:
                    # Hidden files are not samples: editors, copy programs and macOS leave them.
                    if entry.name.startswith(b"."):
                        continue
                    if entry.name.lower().endswith(_SUFFIXES):
                        files.append(b"%s/%s" % (folder, entry.name))
                    elif entry.is_dir():  # fails for a link that leads back to itself
                        waiting.append(b"%s/%s" % (folder, entry.name))
        except OSError as error:
            text = f"cannot read the class folder {os.fsdecode(place):.200}: {error.strerror}"
            raise UserError(text, on_every_rank=True) from None
    return Listing(b"".join(path + b"\0" for path in sorted(files)), folders)


# ---- files that hold many images


class Index(NamedTuple):
    """Where the images of a part lie, class by class."""

    files: list[str]
    classes: list[str]
    counts: Any  # images of each class, integers [classes]
    paths: bytes  # see `Source`
    records: np.ndarray  # [n], with at least the fields "place" and "bytes"
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
        taken = [index.classes.index(name) for name in chosen]
        rows = np.concatenate([np.arange(images[n], images[n + 1]) for n in taken])
        paths = b"".join(index.paths[bounds[n] : bounds[n + 1]] for n in taken)
        super().__init__(root, chosen, paths, [index.counts[n] for n in taken])
        self.files, self.records = index.files, index.records[rows]
        self.numbers = index.numbers[rows].astype(np.uint16)
        self._buffer, self._handles = np.empty(0, np.uint8), []
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # there may be thousands of files
        for path in index.files:
            try:
                self._handles.append(open_regular(path, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                text = f"cannot open {path} ({error.strerror or error})"
                raise UserError(text, on_every_rank=True) from None
            os.posix_fadvise(self._handles[-1], 0, 0, os.POSIX_FADV_RANDOM)  # do not read ahead
        weakref.finalize(self, lambda handles: [*map(os.close, handles)], self._handles)

    def stored(self, image: int) -> tuple[str, int, int]:
        """The file that holds ``image``, the offset there, and the size in bytes."""
        record = self.records[image]
        return self.files[self.numbers[image]], int(record["place"]), int(record["bytes"])

    def read(self, image: int) -> bytes:
        """All bytes of an image. Raises: OSError."""
        return self._read(image, 0, int(self.records[image]["bytes"])).tobytes()

    def _read(self, image: int, start: int, count: int) -> np.ndarray:
        """``count`` bytes of an image from byte ``start`` on: uint8, valid until the next call.

        Raises: OSError.
        """
        number, place, buffer = self.numbers[image], int(self.records[image]["place"]), self._buffer
        if threading.current_thread() is not threading.main_thread():  # several reads in flight
            buffer = np.empty(count, np.uint8)
        elif len(buffer) < count:  # a reused buffer stays in the processor's cache
            buffer = self._buffer = np.empty(count, np.uint8)
        target, done = buffer[:count], 0
        while done < count:  # a network disk may return fewer bytes than requested
            got = os.preadv(self._handles[number], [target[done:]], place + start + done)
            if not got:
                name = os.path.basename(self.files[number])
                raise OSError(f"{name} ends before the image does")
            done += got
        return target


# ---- the parts of a data set: DATA/train, DATA/val, DATA/test


def open_source(root: Path, classes: list[str], shows: bool = False) -> Source:
    """The images of ``classes`` in DATA/train, DATA/val or DATA/test.

    ``shows``: draw a progress bar on a terminal. Raises: `UserError`.
    """
    kind = addons.source_kind(root) or Folder
    return kind(root, classes, shows)


def has_part(root: Path) -> bool:
    """Whether DATA/train, DATA/val or DATA/test exists, as a folder or as tar files next to it."""
    return root.is_dir() or addons.source_kind(root) is not None


def class_folders(root: Path) -> list[str]:
    """Sorted names of the classes in ``root``. Raises `UserError` if there are none."""
    kind = addons.source_kind(root) or Folder
    if names := kind.class_names(root):
        return names
    why = addons.layout_advice(root.parent)
    if root.is_dir():
        text = f"folder {root} has no class folders in it{(why and f': {why}') or ''}"
    elif root.name == "test":
        text = f"folder {root} is missing: --part test needs it; --part val uses DATA/val"
    else:
        usual = "DATA must hold train/CLASS/*.JPEG and val/CLASS/*.JPEG, or train.tar and val.tar "
        usual += "(scripts/prepare_data.py converts known data sets)"
        text = f"folder {root} is missing: {why or usual}"
    raise UserError(text, on_every_rank=True)


def check_same_classes(root: Path, part: str, classes: list[str], subset: bool) -> None:
    """Raise `UserError` unless ``root/part`` has ``classes`` and, without ``subset``, no others."""
    present, known = set(class_folders(root / part)), set(classes)
    differences = {"train": known - present, part: set() if subset else present - known}
    if only := [f"only {k} has {', '.join(sorted(v)[:3])}" for k, v in differences.items() if v]:
        text = f"{root}/train and {root}/{part} have different classes: {'; '.join(only)}"
        raise UserError(text, on_every_rank=True)
