"""The images of a data set: DATA/train/CLASS/*.JPEG and DATA/val/CLASS/*.JPEG, or packs of them."""

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from utils.data import pack
from utils.data.listing import SUFFIXES, THREADS, class_names, listings
from utils.errors import UserError

SIZES_ASKED = 10_000  # files, spread over the data set, whose sizes stand for all


class ImageIndex:
    """The images below ``root``/CLASS/: paths, and class numbers by the order of ``classes``.

    ``root`` may also be a pack (see `utils.data.pack`), whose paths are those of the folder that it
    was made from, as if they were in ``root``.

    Paths are one byte array with offsets: 1.28 million Python strings would be copied, page by
    page, into the memory of every loader worker as reference counts change.
    """

    def __init__(self, root: Path, classes: list[str], shows: bool = False):
        """List the folder, or read the list that an earlier run has left in it.

        ``shows``: draw a progress bar. Raises `UserError`: a class folder is missing or has no
        image, or a pack is not whole.
        """
        self.root, self.classes = str(root), classes
        self.pack: pack.Pack | None = None  # where pixels come from, if not from files
        if pack.is_pack(root):
            counts, lengths = self._open_pack()
        else:
            found = listings(root, classes, shows)
            counts = [len(listing.lengths) for listing in found]
            self.blob = b"".join(listing.paths for listing in found)
            lengths = np.concatenate([listing.lengths for listing in found])
        for name, count in zip(classes, counts, strict=True):
            if not count:
                raise UserError(
                    f"class folder {root}/{name} has no images ({' '.join(SUFFIXES)})",
                    alike=True,
                )
        self.offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=self.offsets[1:])
        self.targets = np.repeat(np.arange(len(classes), dtype=np.int64), counts)

    def _open_pack(self) -> tuple[list[int], np.ndarray]:
        """Open the pack in ``root``: number of images of each class, and lengths of their paths."""
        contents = pack.load(self.root)
        parts = list(pack.selected(contents, self.classes))
        ends = np.concatenate([[0], np.cumsum(contents.lengths)])
        self.blob = b"".join(contents.paths[ends[p.start] : ends[p.stop]] for p in parts)
        rows = np.concatenate([np.arange(p.start, p.stop) for p in parts])
        files = (rows // pack.IMAGES_PER_FILE).astype(np.int32)
        self.pack = pack.Pack(self.root, contents.size, contents.records[rows], files)
        return [p.stop - p.start for p in parts], contents.lengths[rows]

    def __len__(self) -> int:
        return len(self.targets)

    def path(self, index: int) -> str:
        """Path of image ``index``."""
        name = self.blob[self.offsets[index] : self.offsets[index + 1]]
        return os.path.join(self.root, os.fsdecode(name))

    def fingerprint(self) -> str:
        """Short text that is the same on two nodes if and only if their file names are.

        A pack's is another than that of the folder that it was made from.
        """
        packed = f", packed with {self.pack.size} pixels" if self.pack else ""
        names = f"{zlib.crc32(self.blob):08x}"
        return f"{len(self)} images in {len(self.classes)} classes{packed} ({names})"

    def stored(self, image: int) -> tuple[str, int, int | None]:
        """Where image ``image`` lies: a file, the place in it, and bytes (None: to its end)."""
        if self.pack is None:
            return self.path(image), 0, None
        return self.pack.stored(image)

    def sample_sizes(self) -> tuple[float, str]:
        """Mean size of the images in bytes, and a text that differs where the sizes do.

        Of a folder, of `SIZES_ASKED` files evenly spread over it; of a pack, of all images, and
        the text tells their contents apart, too.
        """
        if self.pack is not None:
            records = self.pack.records
            return float(records["bytes"].mean()), f"{zlib.crc32(records['crc'].tobytes()):08x}"
        count = min(len(self), SIZES_ASKED)
        with ThreadPoolExecutor(THREADS) as pool:
            chosen = np.arange(count) * len(self) // count
            sizes = np.fromiter(pool.map(self._size, chosen.tolist()), np.int64, count)
        return float(sizes.mean()), f"{zlib.crc32(sizes.tobytes()):08x}"

    def _size(self, image: int) -> int:
        try:
            return os.stat(self.path(image)).st_size
        except OSError:
            return 0  # a dangling link: reading it will show that

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
    found = pack.load(root).classes if pack.is_pack(root) else class_names(root)
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
        try:
            text = Path(choice).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            text = "\0"
        if "\0" in text:
            raise UserError(
                f"--classes {choice} is no text file: list class names in it, one per line",
                alike=True,
            )
        wanted = text.split("\n")
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
