"""Decoded pixels in a few large files, which `scripts/prepare_data.py pack` writes.

No option: used where DATA/train, val or test holds such files. Interface: `Pack` is a
`utils.folder.Source`. Without this file, packed data sets cannot be read.

A packed part (DATA/train, say) holds 00000.pixels, 00001.pixels, ... and pack.npz, their index. An
image is stored as its pixels, uint8 RGB, row by row; or, if it cannot be decoded, as the bytes of
its file, so that training's rule for unreadable files applies. Each file ends with the index of its
images, so that interrupted packing can resume.

Only the rows that a crop shows are read, by pread: if a file is truncated or the disk fails, that
is an `OSError`, so one unreadable image; a memory-mapped file would kill the worker.
"""

import os
import zlib
from pathlib import Path

import numpy as np

from utils.errors import UserError
from utils.folder import Archive, Index

INDEX = "pack.npz"
SUFFIX = ".pixels"
VERSION = 2
IMAGES_PER_FILE = 4096  # 1.1 GB at 256 pixels: 326 files for ImageNet
MAGIC = b"pixels 1"
# Of each image: its number in the part, its place, the number of bytes, height and width in pixels
# (0 and 0 for the bytes of a file) and CRC-32.
RECORD = np.dtype(
    [("image", "<i8"), ("place", "<i8"), ("bytes", "<i8"), ("height", "<i4"), ("width", "<i4")]
    + [("crc", "<u4")]
)


def file_name(number: int) -> str:
    """Name of the file with images ``number`` * `IMAGES_PER_FILE` and on."""
    return f"{number:05d}{SUFFIX}"


class Pack(Archive):
    """The images of a packed part, with the paths of the folder that it was made from."""

    stores_pixels = True

    def __init__(self, root: Path, classes: list[str], shows: bool = False):
        """Read the index, and check that all files are there and as long as they should be.

        ``classes``: those to take, in this order. Raises: `UserError` for an incomplete or damaged
        pack, or one without a class.
        """
        index, self.size = _read_index(root)  # largest short side, pixels
        super().__init__(root, classes, index)

    @staticmethod
    def class_names(root: Path) -> list[str]:
        """The classes of a whole pack. Raises: `UserError`."""
        return _read_index(root)[0].classes

    def fingerprint(self) -> str:
        """Equal on two nodes with equal file names and sizes of pixels."""
        return f"{super().fingerprint()}, packed with {self.size} pixels"

    def sample_sizes(self, most: int = 0) -> tuple[float, str]:
        """Mean size, and a fingerprint of the contents, of all images."""
        crcs = f"{zlib.crc32(self.records['crc'].tobytes()):08x}"
        return float(self.records["bytes"].mean()), crcs

    def shape(self, image: int) -> tuple[int, int] | None:
        """Height and width of ``image``; None if the bytes of its file are stored."""
        record = self.records[image]
        return (int(record["height"]), int(record["width"])) if record["height"] else None

    def rows(self, image: int, top: int, height: int) -> np.ndarray:
        """Rows of an image that has a `shape`: uint8 [height, width, 3], until the next call.

        Raises: OSError.
        """
        width = int(self.records[image]["width"])
        return self._read(image, 3 * width * top, 3 * width * height).reshape(height, width, 3)


def _read_index(root: Path) -> tuple[Index, int]:
    """The content of `INDEX`, and the largest short side in pixels. Raises: `UserError`."""
    place = root / INDEX
    if not place.exists():
        raise _broken(f"{place} is missing: packing was not finished, or the copy is incomplete")
    try:
        with np.load(place) as file:
            version, size, file_bytes = int(file["version"]), int(file["size"]), file["file_bytes"]
            classes = [os.fsdecode(name) for name in file["classes"].tobytes().split(b"\0")]
            counts, paths, records = file["counts"], file["paths"].tobytes(), file["records"]
            numbers = records["image"] // IMAGES_PER_FILE
    except Exception as error:  # zipfile and numpy report damage by half a dozen types
        raise _broken(f"{place} is damaged ({error})") from None
    if version != VERSION:
        raise _broken(f"{place} is of version {version}, not {VERSION}")
    files = [str(root / file_name(number)) for number in range(len(file_bytes))]
    for path, expected in zip(files, file_bytes, strict=True):
        if not os.path.exists(path) or os.path.getsize(path) != expected:
            raise _broken(f"{path} is missing or has not {expected:,} bytes")
    return Index(files, classes, counts, paths, records, numbers), size


def _broken(what: str) -> UserError:
    text = f"{what}; copy the pack again, or run prepare_data.py pack again"
    return UserError(text, on_every_rank=True)
