"""What is in a folder of class folders, remembered from one run to the next.

Listing 1.28 million files takes seconds on a warm local disk and minutes on a cold network disk.
The listing is kept in the folder itself, class by class, with the modification times of the folders
it was made from: adding, removing or renaming a file changes one of them, and that class is listed
anew.
"""

import errno
import os
import sys
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from utils.atomic import save_atomically
from utils.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
CACHE = ".index.npz"
VERSION = 2
READABLE = (1, VERSION)  # the first one kept the files' sizes as well
# A folder that changed this short a time before it was listed may change once more within the same
# tick of the file system's clock, unnoticed: such a listing is not kept.
RACY_SECONDS = 2.0
THREADS = 8  # a network disk answers many questions at once
# Seconds of waiting until threads are worth it: while a disk answers at once, they wait for each
# other at the interpreter's lock, and take three times the CPU time.
PATIENCE = 0.5
_SUFFIXES = tuple(suffix.encode() for suffix in SUFFIXES)


@dataclass(frozen=True)
class Listing:
    """The images of one class, sorted by path."""

    paths: bytes  # relative to the root, one after another
    lengths: np.ndarray  # int64 [n]: of each path, bytes
    folders: dict[str, int]  # relative to the root: st_mtime_ns, or 0 for one never to be believed


def listings(root: Path, classes: list[str], shows: bool = False) -> list[Listing]:
    """The listing of each class folder ``root/CLASS``, from the cache where that is up to date.

    Classes that had to be listed are added to the cache. With ``shows`` a progress bar is drawn on
    a terminal, and a line says when the cache cannot be written. Raises: `UserError`.
    """
    known = _read(root)
    found = {name: known[name] for name in classes if name in known and _fresh(root, known[name])}
    missing = [name for name in classes if name not in found]
    if missing:
        bar = tqdm(
            zip(missing, _listed(root, missing), strict=True),
            total=len(missing),
            desc=f"Indexing {root}",
            unit="class",
            leave=False,
            disable=not (shows and sys.stderr.isatty()),
        )
        found |= dict(bar)
        write(root, known | found, shows)
    return [found[name] for name in classes]


def _listed(root: Path, classes: list[str]) -> Iterator[Listing]:
    """Each class listed: one after the other, and in threads once the disk makes us wait."""
    waited = worked = 0.0
    for number, name in enumerate(classes):
        if waited > PATIENCE + worked:
            with ThreadPoolExecutor(THREADS) as pool:
                yield from pool.map(lambda name: list_class(root, name), classes[number:])
            return
        began, before = time.perf_counter(), time.thread_time()
        listing = list_class(root, name)
        busy = time.thread_time() - before
        waited, worked = waited + time.perf_counter() - began - busy, worked + busy
        yield listing


def list_class(root: Path, name: str) -> Listing:
    """List the images of class folder ``name``, sub-folders included. Raises: `UserError`."""
    folders: dict[str, int] = {}
    paths = sorted(image_files(root, name, folders))
    lengths = np.fromiter(map(len, paths), np.int64, len(paths))
    return Listing(b"".join(paths), lengths, folders)


def class_names(root: Path) -> list[str]:
    """Sorted names of the class folders in ``root``; none where that is no folder."""
    if not root.is_dir():
        return []
    with os.scandir(root) as entries:
        return sorted(e.name for e in entries if not e.name.startswith(".") and _is_folder(e, root))


def _is_folder(entry: os.DirEntry[Any], top: Path) -> bool:
    """Whether an ``entry`` below ``top`` is a folder. Raises: `UserError` for a loop of links."""
    try:
        return entry.is_dir()
    except OSError as fault:
        if fault.errno != errno.ELOOP:
            raise
    link = Path(os.fsdecode(entry.path))
    # Such as a/up -> .., which is found as a/up/a/up/a/up...: name its first occurrence.
    names = link.relative_to(top).parts
    first = top.joinpath(*names[: names.index(names[-1]) + 1])
    raise UserError(f"{first} is a link that leads back to itself: remove it", alike=True)


def image_files(root: Path, name: str, folders: dict[str, int]) -> list[bytes]:
    """Paths relative to ``root`` of the images in ``root/name`` and its sub-folders, unsorted.

    Adds the folders to ``folders`` (see `Listing`). No file is asked for its size: for 1.28 million
    that takes as long as all the rest. Raises: `UserError` for a folder that cannot be read.
    """
    found: list[bytes] = []
    waiting = [os.fsencode(name)]
    while waiting:
        folder = waiting.pop()
        place = os.path.join(os.fsencode(root), folder)
        try:
            changed = os.stat(place).st_mtime_ns
            racy = abs(time.time() - changed / 1e9) < RACY_SECONDS
            folders[os.fsdecode(folder)] = 0 if racy else changed
            with os.scandir(place) as entries:
                for entry in entries:
                    file = entry.name
                    # A hidden file is no sample: editors, copies under way and macOS leave them.
                    if file.startswith(b"."):
                        continue
                    if file.lower().endswith(_SUFFIXES):
                        found.append(b"%s/%s" % (folder, file))
                    elif _is_folder(entry, root):
                        waiting.append(b"%s/%s" % (folder, file))
        except OSError as fault:
            raise _unusable(os.fsdecode(place), fault) from None
    return found


def _unusable(place: str, fault: OSError) -> UserError:
    if isinstance(fault, FileNotFoundError):
        return UserError(f"class folder {place} is missing", alike=True)
    if isinstance(fault, NotADirectoryError):
        return UserError(f"{place} is not a folder", alike=True)
    return UserError(f"cannot read the folder {place}: {fault.strerror}", alike=True)


def _fresh(root: Path, listing: Listing) -> bool:
    try:
        return all(
            seen and os.stat(root / folder).st_mtime_ns == seen
            for folder, seen in listing.folders.items()
        )
    except OSError:
        return False


def _read(root: Path) -> dict[str, Listing]:
    """The cached listings by class; none if there is no cache, or none that can be read."""
    try:
        with np.load(root / CACHE) as file:
            if int(file["version"]) not in READABLE:
                return {}
            paths = file["paths"].tobytes()
            lengths, counts = file["lengths"], file["counts"]
            folder_counts = file["folder_counts"]
            folders = list(zip(_split(file["folders"]), file["changed"].tolist(), strict=True))
            names = _split(file["classes"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return {}
    ends = np.cumsum(np.concatenate([[0], lengths]))
    listings, image, folder = {}, 0, 0
    for name, count, folder_count in zip(names, counts, folder_counts, strict=True):
        here = slice(image, image + count)
        listings[name] = Listing(
            paths[ends[image] : ends[image + count]],
            lengths[here],
            dict(folders[folder : folder + folder_count]),
        )
        image, folder = image + count, folder + folder_count
    return listings


def write(root: Path, known: dict[str, Listing], shows: bool = False) -> None:
    """Keep the listings ``known`` (by class) in ``root``; with ``shows``, say if that fails."""
    values = [known[name] for name in sorted(known)]
    folders = [item for listing in values for item in listing.folders.items()]
    content = {
        "version": np.array(VERSION),
        "classes": _join(sorted(known)),
        "counts": np.array([len(listing.lengths) for listing in values], np.int64),
        "paths": np.frombuffer(b"".join(listing.paths for listing in values), np.uint8),
        "lengths": np.concatenate([listing.lengths for listing in values]),
        "folders": _join([folder for folder, _ in folders]),
        "changed": np.array([changed for _, changed in folders], np.int64),
        "folder_counts": np.array([len(listing.folders) for listing in values], np.int64),
    }
    try:
        save_atomically(lambda file: np.savez(file, **content), root / CACHE)
    except OSError as fault:
        if shows:
            print(
                f"note: the index of {root} cannot be kept there ({fault.strerror}), so each run "
                "lists the folder anew",
                flush=True,
            )


def _join(names: list[str]) -> np.ndarray:
    # No file name holds a zero byte; arrays of Python strings would need pickle.
    return np.frombuffer(b"\0".join(map(os.fsencode, names)), np.uint8)


def _split(joined: np.ndarray) -> list[str]:
    text = joined.tobytes()
    return [os.fsdecode(name) for name in text.split(b"\0")] if text else []
