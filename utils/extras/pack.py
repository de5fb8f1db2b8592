"""Packed data sets: decoded pixels in a few large files, written by `scripts/prepare_data.py pack`.

No option: used if DATA/train, val or test contains such files. Interface: `Pack` is a
`utils.folder.Source`. Without this file, packed data sets cannot be read.

A packed part (such as DATA/train) contains 00000.pixels, 00001.pixels, ... and their index,
pack.npz. An image is stored as uint8 RGB pixels, row by row. If it cannot be decoded, the bytes of
its file are stored, so that training handles it like other unreadable files. Each .pixels file ends
with the index of its images, so that interrupted packing can resume.

pread reads only the rows that a crop shows. If a file is truncated or the disk fails, pread raises
an `OSError`: one unreadable image. With a memory-mapped file, the worker would be killed.
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
# For each image: its number in the part, its offset, the number of bytes, height and width in
# pixels (0 and 0 if the bytes of its file are stored) and CRC-32.
RECORD = np.dtype(
    [("image", "<i8"), ("place", "<i8"), ("bytes", "<i8"), ("height", "<i4"), ("width", "<i4")]
    + [("crc", "<u4")]
)


def file_name(number: int) -> str:
    """Return the name of the file whose first image is ``number`` * `IMAGES_PER_FILE`."""
    return f"{number:05d}{SUFFIX}"


class Pack(Archive):
    """The images of a packed part. They have the paths of the original folder."""

    stores_pixels = True

    def __init__(self, root: Path, classes: list[str], shows: bool = False):
        """Read the index, and check that all files exist and have the right size.

        ``classes``: the classes to use, in this order. Raises: `UserError` if the pack is
        incomplete or damaged, or lacks one of them.
        """
        index, self.size = _read_index(root)  # largest short side, pixels
        super().__init__(root, classes, index)

    @staticmethod
    def class_names(root: Path) -> list[str]:
        """Return all classes of a pack. Raises: `UserError`."""
        return _read_index(root)[0].classes

    def fingerprint(self) -> str:
        """Return a text that is equal on nodes with equal image names and image sizes."""
        return f"{super().fingerprint()}, packed with {self.size} pixels"

    def sample_sizes(self, most: int = 0) -> tuple[float, str]:
        """Return the mean size of all images in bytes, and a fingerprint of their contents."""
        crcs = f"{zlib.crc32(self.records['crc'].tobytes()):08x}"
        return float(self.records["bytes"].mean()), crcs

    def shape(self, image: int) -> tuple[int, int] | None:
        """Return height and width of ``image``; None if the bytes of its file are stored."""
        record = self.records[image]
        return (int(record["height"]), int(record["width"])) if record["height"] else None

    def rows(self, image: int, top: int, height: int) -> np.ndarray:
        """Return rows of an image that has a `shape`: uint8 [height, width, 3].

        The next call overwrites them. Raises: OSError.
        """
        width = int(self.records[image]["width"])
        return self._read(image, 3 * width * top, 3 * width * height).reshape(height, width, 3)


def _read_index(root: Path) -> tuple[Index, int]:
    """Return the content of `INDEX`, and the largest short side in pixels. Raises: `UserError`."""
    place = root / INDEX
    if not place.exists():
        raise _broken(f"{place} is missing: packing was not finished, or the copy is incomplete")
    try:
        with np.load(place) as file:
            version, size, file_bytes = int(file["version"]), int(file["size"]), file["file_bytes"]
            classes = [os.fsdecode(name) for name in file["classes"].tobytes().split(b"\0")]
            counts, paths, records = file["counts"], file["paths"].tobytes(), file["records"]
            numbers = records["image"] // IMAGES_PER_FILE
    except Exception as error:  # damage causes many types of error
        raise _broken(f"{place} is damaged ({error})") from None
    if version != VERSION:
        raise _broken(f"{place} is of version {version}, not {VERSION}")
    files = [str(root / file_name(number)) for number in range(len(file_bytes))]
    for path, expected in zip(files, file_bytes, strict=True):
        if not os.path.exists(path) or os.path.getsize(path) != expected:
            raise _broken(f"{path} is missing, or its size is not {expected:,} bytes")
    return Index(files, classes, counts, paths, records, numbers), size


def _broken(what: str) -> UserError:
    text = f"{what}; copy the pack again, or run prepare_data.py pack again"
    return UserError(text, on_every_rank=True)
