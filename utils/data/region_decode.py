"""Decode only the part of a JPEG file that a training crop shows.

No option: used after `scripts/build_region_decode.py` has built the library from region_decode.c.
Interface: `shape_of` and `decode`, which `utils.data.images.ImageBatches` calls for each file.
Without the library, whole images are decoded, which takes longer. The pixels are the
same, so only some nodes may have the library.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

# torch takes seconds to import. Only decoding needs it; the wrappers just call `has_library`.
if TYPE_CHECKING:
    import torch

Box = tuple[int, int, int, int]  # top, left, height, width in pixels

SOURCE = Path(__file__).with_name("region_decode.c")
# The name contains a checksum of the source, so that an old library is not loaded.
LIBRARY = SOURCE.with_name(f"libregion_decode_{zlib.crc32(SOURCE.read_bytes()):08x}.so")
# Extra columns: a margin of 2 on each side, and up to 31 to the edge of a block. A block is 32
# wide if colour is stored at a quarter of the horizontal resolution.
BESIDE = 2 + 2 + 31

JPEG_MAGIC = b"\xff\xd8"
JPEG_END = b"\xff\xd9"
SEQUENTIAL = (0xC0, 0xC1)  # SOF0 and SOF1; progressive files are smoothed across rows of blocks
# Segments that may precede the frame header: APP0 to APP15, COM, tables, the restart interval.
BEFORE_FRAME = {*range(0xE0, 0xF0), 0xFE, 0xDB, 0xC4, 0xDD}


def shape_of(data: bytes) -> tuple[int, int] | None:
    """Return height and width of a JPEG file if a part of it can be decoded, else None.

    None for files that are progressive, lossless, arithmetic coded, CMYK, truncated (padding is
    accepted), or that have unusual subsampling or unusual segments before the frame header.
    """
    at, end = 2, len(data) - 20
    if not (data.startswith(JPEG_MAGIC) and data[-64:].rstrip(b"\0").endswith(JPEG_END)):
        return None
    while at < end and data[at] == 0xFF:
        marker, length = data[at + 1], data[at + 2] << 8 | data[at + 3]
        if marker in SEQUENTIAL:
            return _read_frame(data[at + 4 : at + 2 + length])
        if marker not in BEFORE_FRAME or length < 2:
            return None
        at += 2 + length
    return None


def _read_frame(header: bytes) -> tuple[int, int] | None:
    # precision, height (2), width (2), components; for each: id, sampling factors, table
    if len(header) < 9 or header[0] != 8 or header[5] not in (1, 3):
        return None
    if len(header) != 6 + 3 * header[5] or max(factor & 15 for factor in header[7::3]) > 2:
        return None
    height, width = header[1] << 8 | header[2], header[3] << 8 | header[4]
    return (height, width) if height and width else None


def decode(data: bytes, box: Box) -> tuple[torch.Tensor, Box] | None:
    """Return a part of an image, uint8 [3, height, width] in channels-last memory, and the position
    of ``box`` in it.

    ``data`` is a file that `shape_of` accepts. Returns None if there is no library or the image is
    damaged; the caller must then decode the whole image.
    """
    import torch

    _, left, height, width = box
    if (decoded := decode_region(data, box)) is None:
        return None
    pixels, column = decoded
    return torch.from_numpy(pixels).permute(2, 0, 1), (0, left - column, height, width)


def decode_region(data: bytes, box: Box, path: Path | None = None) -> tuple[np.ndarray, int] | None:
    """Return the rows of ``box``, and the column of the image at which they begin.

    ``data`` is a file that `shape_of` accepts, ``path`` the library (default: `LIBRARY`). The rows
    are uint8 [height, n, 3]; n is at least the width. Returns None without the library, or if the
    file is damaged or too small for the box.
    """
    call = _load(path or LIBRARY)
    if call is None:
        return None
    top, left, height, width = box
    pixels = np.empty((height, width + BESIDE, 3), np.uint8)
    column = ctypes.c_uint(left)
    failed = call(
        *(data, len(data), top, height, ctypes.byref(column), width),
        *(pixels.ctypes.data, pixels.strides[0]),
    )
    return None if failed else (pixels, column.value)


def has_library() -> bool:
    """Return whether the library was built from the current source and loads on this machine."""
    return _load(LIBRARY) is not None


@functools.cache
def _load(path: Path) -> Callable[..., int] | None:
    try:
        call = ctypes.CDLL(str(path)).decode_region
    except (OSError, AttributeError):  # missing, or built for another architecture
        return None
    call.restype, number = ctypes.c_int, ctypes.c_uint
    call.argtypes = [ctypes.c_char_p, ctypes.c_ulong, number, number, ctypes.POINTER(number)]
    call.argtypes += [number, ctypes.c_void_p, ctypes.c_ulong]
    return call
