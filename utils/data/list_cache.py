"""Cache the list of images in a folder, as .index.npz in that folder.

No option: all scripts (such as imagenet_nd.py) use it for image folders and for tar files.
Interface: `read`, `is_fresh` and `write`, which `utils.data.folder.listings` calls.

Listing 1.28 million files takes seconds on a warm local disk and minutes on a cold network disk.
Each class has a list of its own, with the times at which its folders changed: adding, removing or
renaming a file changes them, and the class is listed again.

If the folder is not writable, the list is kept in the user's cache folder
($XDG_CACHE_HOME/imagenet-training, or ~/.cache/imagenet-training).
"""

import hashlib
import io
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.start.atomic import save_atomically

CACHE = ".index.npz"
# If a folder or file changed less than this before it was read, another change within the same tick
# of the file system's clock would go unnoticed: its list is not cached.
RACY_SECONDS = 2.0


class Listing(NamedTuple):
    """The images of one class, sorted by path."""

    paths: bytes  # relative to the root, each followed by a zero byte
    folders: dict[str, Any]  # path -> its `folder_stamp`, or None to list it again next time
    others: dict[str, int]  # suffix -> number of files that are no images


def folder_stamp(path: bytes | str) -> list[int]:
    """Numbers that change when an entry of a folder does: the times of its last changes in ns.

    The second one, of its metadata, cannot be set: an archive may give two versions of a folder
    the same first one. Raises: OSError.
    """
    status = os.stat(path)
    return [status.st_mtime_ns, status.st_ctime_ns]


def is_racy(mtime_ns: int) -> bool:
    """Whether something changed so recently that another change could go unnoticed."""
    return abs(time.time() - mtime_ns / 1e9) < RACY_SECONDS


def _files(root: Path) -> list[Path]:
    """Return the files in which the list of ``root`` may be: beside the images, in the cache."""
    here = root / CACHE if root.is_dir() else root.with_name(f".{root.name}{CACHE}")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = hashlib.sha256(os.fsencode(os.path.abspath(root))).hexdigest()[:16]
    return [here, Path(cache, "imagenet-training", f"{name}.npz")]


def is_fresh(root: Path, listing: Listing) -> bool:
    """Return whether the folders of ``listing`` are unchanged since it was made."""
    try:
        return all(
            stamp and folder_stamp(os.path.join(root, folder)) == stamp
            for folder, stamp in listing.folders.items()
        )
    except OSError:
        return False


def read(root: Path) -> dict[str, Listing]:
    """Return the saved listings by class; empty if there are none, or if they are damaged."""
    known = {}
    for path in _files(root):  # a list in the user's cache is newer: see `write`
        with suppress(Exception), np.load(path) as file:  # damage causes many types of error
            paths = io.BytesIO(file["paths"].tobytes())
            for name, (size, *rest) in json.loads(file["lists"].tobytes()).items():
                known[name] = Listing(paths.read(size), *rest)
    return known


def write(root: Path, known: dict[str, Listing], shows: bool) -> None:
    """Save the listings ``known`` (by class). ``shows``: print a note if that fails."""
    lists = {name: (len(one.paths), *one[1:]) for name, one in known.items()}
    names = np.frombuffer(json.dumps(lists).encode(), np.uint8)
    paths = np.frombuffer(b"".join(one.paths for one in known.values()), np.uint8)
    here, in_cache = _files(root)
    reasons = []
    for path in (here, in_cache):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_atomically(lambda file: np.savez(file, lists=names, paths=paths), path)
            if path is here:
                in_cache.unlink(missing_ok=True)
            return
        except OSError as error:
            reasons.append(error.strerror)
    if shows:
        text = f"note: cannot save the list of files in {root} ({reasons[0]}) or {in_cache.parent}"
        print(f"{text}: each run lists the folder again", flush=True)
