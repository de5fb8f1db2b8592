"""The list of the files in an image folder, kept in that folder as .index.npz.

No option: every script, imagenet_nd.py for one, uses it for a folder of files. Interface: `read`,
`is_fresh` and `write`, which `utils.folder.listings` calls. Without this file, each process lists
the folder at its start.

Listing 1.28 million files takes seconds on a warm local disk and minutes on a cold network disk.
The list is kept class by class, with the modification times of its folders: adding, removing or
renaming a file changes one of them, and the class is listed again.
"""

import io
import json
import os
from pathlib import Path

import numpy as np

from utils.atomic import save_atomically
from utils.folder import Listing

CACHE = ".index.npz"


def is_fresh(root: Path, listing: Listing) -> bool:
    """Whether the folders of ``listing`` are as they were when it was made."""
    try:
        return all(
            changed and os.stat(root / folder).st_mtime_ns == changed
            for folder, changed in listing.folders.items()
        )
    except OSError:
        return False


def read(root: Path) -> dict[str, Listing]:
    """The kept listings by class; none if there are none, or none that can be read."""
    try:
        with np.load(root / CACHE) as file:
            classes = json.loads(file["classes"].tobytes())
            paths = io.BytesIO(file["paths"].tobytes())
    except Exception:  # zipfile and numpy find a damaged file in many ways
        return {}
    return {name: Listing(paths.read(size), seen) for name, (size, seen) in classes.items()}


def write(root: Path, known: dict[str, Listing], shows: bool) -> None:
    """Keep the listings ``known`` (by class) in ``root``; with ``shows``, say if that fails."""
    classes = {name: (len(one.paths), one.folders) for name, one in known.items()}
    content = {
        "classes": np.frombuffer(json.dumps(classes).encode(), np.uint8),
        "paths": np.frombuffer(b"".join(one.paths for one in known.values()), np.uint8),
    }
    try:
        save_atomically(lambda file: np.savez(file, **content), root / CACHE)
    except OSError as fault:
        if shows:
            text = f"note: cannot keep the list of files in {root} ({fault.strerror})"
            print(f"{text}: each run lists the folder again", flush=True)
