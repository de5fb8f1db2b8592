"""A folder of image files, CLASS/*.JPEG: its classes, its images, and the `Source` made of them."""

import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from utils.data import list_cache as cache
from utils.data.list_cache import Listing, folder_stamp, is_racy
from utils.data.sources import SUFFIXES, THREADS, Source, is_hidden
from utils.start.errors import UserError, printable

_SUFFIXES = tuple(suffix.encode() for suffix in SUFFIXES)


def class_names(root: Path) -> list[str]:
    """Sorted names of the class folders in ``root``; empty if ``root`` is not a folder."""
    if not root.is_dir():
        return []
    with os.scandir(root) as entries:
        named = [entry for entry in entries if not is_hidden(entry.name)]
    # Only links and files need a call of stat, which takes a millisecond on a network disk.
    folders = (one for one in named if one.is_dir(follow_symlinks=False) or os.path.isdir(one))
    return sorted(one.name for one in folders)


def open_folder(root: Path, classes: list[str], shows: bool = False) -> Source:
    """The image files below ``root``/CLASS/, sub-folders included.

    Lists the folder, or reads the list that an earlier run has cached. ``shows``: draw a progress
    bar. Raises: `UserError` for a class folder that is missing.
    """
    lists = [listing.paths for listing in listings(root, classes, shows)]
    counts = [paths.count(b"\0") for paths in lists]
    return Source(root, classes, b"".join(lists), counts)


def listings(root: Path, classes: list[str], shows: bool = False) -> list[Listing]:
    """The listing of each class folder ``root/CLASS``, from the cache if that is up to date.

    ``shows``: draw a progress bar on a terminal, and report a cache that cannot be written. Raises:
    `UserError`.
    """
    known = cache.read(root)
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
        cache.write(root, known, shows)
        if shows and (text := _left_out(root, [known[name] for name in classes])):
            print(printable(f"note: left out of {root}: {text}"), flush=True)
    return [known[name] for name in classes]


def _left_out(root: Path, lists: list[Listing]) -> str:
    """The number of files that are not used, by suffix, and of images outside class folders."""
    counts = Counter[str]()
    for one in lists:
        counts.update(one.others)
    suffixes = ", ".join(f"{suffix} {count}" for suffix, count in counts.most_common(5))
    more = ", ..." if len(counts) > 5 else ""
    texts = [f"{counts.total()} files that are not images ({suffixes}{more})"] if counts else []
    with os.scandir(root) as entries:
        names = [entry.name for entry in entries if entry.is_file() and not is_hidden(entry.name)]
    if loose := sum(name.lower().endswith(SUFFIXES) for name in names):
        texts.append(f"{loose} images that are in no class folder")
    return " and ".join(texts)


def list_class(root: Path, name: str) -> Listing:
    """List the images of class folder ``name``, sub-folders included. Raises: `UserError`.

    It does not call stat on the files: for 1.28 million that would double the time.
    """
    files: list[bytes] = []
    folders: dict[str, Any] = {}
    others = Counter[str]()
    waiting = [os.fsencode(name)]
    while waiting:
        folder = waiting.pop()
        path = os.path.join(os.fsencode(root), folder)
        try:
            stamp = folder_stamp(path)
            folders[os.fsdecode(folder)] = None if is_racy(stamp[0]) else stamp
            with os.scandir(path) as entries:
                for entry in entries:
                    # Hidden files are not samples: editors, copy programs and macOS leave them.
                    if entry.name.startswith(b"."):
                        continue
                    is_image = entry.name.lower().endswith(_SUFFIXES)
                    # A folder may have the name of an image. A link that has is not followed, as
                    # that takes a call of stat; reading it fails if it leads to a folder.
                    if entry.is_dir(follow_symlinks=not is_image):  # fails for a link to itself
                        if not is_hidden(os.fsdecode(entry.name)):
                            waiting.append(b"%s/%s" % (folder, entry.name))
                    elif is_image:
                        files.append(b"%s/%s" % (folder, entry.name))
                    elif not is_hidden(name := os.fsdecode(entry.name)):
                        others[os.path.splitext(name)[1].lower() or name] += 1
        except OSError as error:
            text = f"cannot read the class folder {os.fsdecode(path):.200}: {error.strerror}"
            raise UserError(text, on_every_rank=True) from None
    return Listing(b"".join(file + b"\0" for file in sorted(files)), folders, others)
