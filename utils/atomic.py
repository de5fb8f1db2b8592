"""Files that are either there as a whole or not at all."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files that a killed process has left in ``folder``."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def save_atomically(write: Callable[[Any], None], path: Path, previous: Path | None = None) -> None:
    """Let ``write(file)`` fill a temporary file, flush it to disk, then give it its name.

    At any instant ``path`` is either the old file or the whole new one; the old one is kept as
    ``previous``, if that is given. Raises: OSError, and whatever ``write`` raises; ``path`` is then
    as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            _keep(path, previous)
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name, too, must outlive a power cut
        finally:
            os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)


def _keep(path: Path, name: Path) -> None:
    """Give the file ``path`` a second ``name``."""
    link = name.with_name(f".{name.name}.{os.getpid()}.tmp")
    try:
        link.unlink(missing_ok=True)
        os.link(path, link)
        os.replace(link, name)
    except OSError:  # a file system without hard links: for an instant there is ``name`` alone
        link.unlink(missing_ok=True)
        os.replace(path, name)
