"""Cache the list of images in a folder, as .index.npz in that folder.

No option: all scripts (such as imagenet_nd.py) use it for image folders and for tar files.
Interface: `read`, `is_fresh` and `write`, which `utils.folder.listings` calls. Without this file,
each process lists the folder when it starts.

Listing 1.28 million files takes seconds on a warm local disk and minutes on a cold network disk.
Each class has a list of its own, with the modification times of its folders: adding, removing or
renaming a file changes one of them, and the class is listed again.

If the folder is not writable, the list is kept in the user's cache folder
($XDG_CACHE_HOME/imagenet-training, or ~/.cache/imagenet-training).
"""

import hashlib
import io
import json
import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from utils.atomic import save_atomically
from utils.folder import Listing

CACHE = ".index.npz"


def _places(root: Path) -> list[Path]:
    """Return the files in which the list of ``root`` may be: beside the images, in the cache."""
    here = root / CACHE if root.is_dir() else root.with_name(f".{root.name}{CACHE}")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = hashlib.sha256(os.fsencode(os.path.abspath(root))).hexdigest()[:16]
    return [here, Path(cache, "imagenet-training", f"{name}.npz")]


def is_fresh(root: Path, listing: Listing) -> bool:
    """Return whether the folders of ``listing`` are unchanged since it was made."""
    try:
        return all(
            changed and os.stat(root / folder).st_mtime_ns == changed
            for folder, changed in listing.folders.items()
        )
    except OSError:
        return False


def read(root: Path) -> dict[str, Listing]:
    """Return the saved listings by class; empty if there are none, or if they are damaged."""
    known = {}
    for place in _places(root):  # a list in the user's cache is newer: see `write`
        with suppress(Exception), np.load(place) as file:  # damage causes many types of error
            paths = io.BytesIO(file["paths"].tobytes())
            for name, (size, seen) in json.loads(file["classes"].tobytes()).items():
                known[name] = Listing(paths.read(size), seen)
    return known


def write(root: Path, known: dict[str, Listing], shows: bool) -> None:
    """Save the listings ``known`` (by class). ``shows``: print a note if that fails."""
    classes = {name: (len(one.paths), one.folders) for name, one in known.items()}
    content = {
        "classes": np.frombuffer(json.dumps(classes).encode(), np.uint8),
        "paths": np.frombuffer(b"".join(one.paths for one in known.values()), np.uint8),
    }
    here, in_cache = _places(root)
    reasons = []
    for place in (here, in_cache):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            save_atomically(lambda file: np.savez(file, **content), place)
            if place is here:
                in_cache.unlink(missing_ok=True)
            return
        except OSError as error:
            reasons.append(error.strerror)
    if shows:
        text = f"note: cannot save the list of files in {root} ({reasons[0]}) or {in_cache.parent}"
        print(f"{text}: each run lists the folder again", flush=True)
