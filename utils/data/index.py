"""The images of a data set: DATA/train/CLASS/*.JPEG and DATA/val/CLASS/*.JPEG."""

import os
import zlib
from pathlib import Path

import numpy as np

from utils.data.listing import SUFFIXES, class_names, listings
from utils.errors import UserError


class ImageIndex:
    """The images below ``root``/CLASS/: paths, and class numbers by the order of ``classes``.

    Paths are one byte array with offsets: 1.28 million Python strings would be copied, page by
    page, into the memory of every loader worker as reference counts change.
    """

    def __init__(self, root: Path, classes: list[str], shows: bool = False):
        """List the folder, or read the list that an earlier run has left in it.

        ``shows``: draw a progress bar. Raises `UserError`: a class folder is missing or has no
        image.
        """
        self.root, self.classes = str(root), classes
        found = listings(root, classes, shows)
        for name, listing in zip(classes, found, strict=True):
            if not len(listing.sizes):
                raise UserError(
                    f"class folder {root}/{name} has no images ({' '.join(SUFFIXES)})",
                    alike=True,
                )
        counts = [len(listing.sizes) for listing in found]
        self.blob = b"".join(listing.paths for listing in found)
        self.offsets = np.zeros(sum(counts) + 1, np.int64)
        np.cumsum(np.concatenate([listing.lengths for listing in found]), out=self.offsets[1:])
        self.sizes = np.concatenate([listing.sizes for listing in found])
        self.targets = np.repeat(np.arange(len(classes), dtype=np.int64), counts)

    def __len__(self) -> int:
        return len(self.targets)

    def path(self, index: int) -> str:
        """Path of image ``index``."""
        name = self.blob[self.offsets[index] : self.offsets[index + 1]]
        return os.path.join(self.root, os.fsdecode(name))

    def fingerprint(self) -> str:
        """Short text that is the same on two nodes if and only if their file names are."""
        return f"{len(self)} images in {len(self.classes)} classes ({zlib.crc32(self.blob):08x})"

    def class_fingerprints(self) -> dict[str, str]:
        """The same for each class, by its name: shows which one differs."""
        ends = np.searchsorted(self.targets, np.arange(len(self.classes) + 1))
        parts = zip(self.classes, ends[:-1], ends[1:], strict=True)
        return {
            name: f"{end - start} images "
            f"({zlib.crc32(self.blob[self.offsets[start] : self.offsets[end]]):08x})"
            for name, start, end in parts
        }


def class_folders(root: Path) -> list[str]:
    """Sorted names of the class folders in ``root``. Raises `UserError` if there are none."""
    if not root.is_dir():
        raise UserError(
            f"folder {root} is missing: DATA must hold train/CLASS/*.JPEG and val/CLASS/*.JPEG "
            "(scripts/prepare_data.py makes them)",
            alike=True,
        )
    found = class_names(root)
    if not found:
        raise UserError(f"folder {root} has no class folders in it", alike=True)
    return found


def select_classes(choice: str | None, folders: list[str]) -> list[str]:
    """The classes named by ``--classes``: a number, a file of names, one per line, or a,b,c."""
    if not choice:
        return folders
    if choice.isdecimal():
        if not 0 < int(choice) <= len(folders):
            raise UserError(f"--classes {choice}: there are {len(folders)} classes", alike=True)
        return folders[: int(choice)]
    wanted = choice.split(",")
    if os.path.isfile(choice):
        wanted = Path(choice).read_text().split("\n")
    wanted = sorted({name.strip() for name in wanted} - {""})
    unknown = [name for name in wanted if name not in folders]
    if unknown or not wanted:
        named = ", ".join(unknown[:3]) or "nothing"
        raise UserError(f"--classes names {named}, which is not a class folder", alike=True)
    return wanted


def check_same_classes(root: Path, part: str, classes: list[str], subset: bool) -> None:
    """Raise `UserError` naming the difference unless ``root/part`` has the folders ``classes``.

    With ``subset`` (``--classes``) it may have more of them.
    """
    found = set(class_folders(root / part))
    missing = [name for name in classes if name not in found]
    extra = [] if subset else sorted(found - set(classes))
    if missing or extra:
        only = f"only train has {', '.join(missing[:3])}" if missing else ""
        more = f"only {part} has {', '.join(extra[:3])}" if extra else ""
        raise UserError(
            f"{root}/train and {root}/{part} have different classes: "
            + "; ".join(text for text in (only, more) if text),
            alike=True,
        )
