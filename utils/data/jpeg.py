"""Decode no more of a JPEG file than a crop shows; the pixels are those of the whole image.

The library made of region_decode.c decodes that region alone. `scripts/build_region_decode.py`
builds it, where there is a C compiler; nodes with and without it train on the same batches.

Without the library, the rows below the crop are left out, by any decoder: it believes the height
in the frame header. With a lower one it stops after that row, and the pixels above are the same:
each row of blocks is transformed by itself, and only the upsampling of colour looks at rows
beside it.
"""

import contextlib
import ctypes
import functools
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np


def library_of(source: Path) -> Path:
    """The library of a ``source``, beside it; one that was built from another has another name."""
    return source.with_name(f"libregion_decode_{zlib.crc32(source.read_bytes()):08x}.so")


SOURCE = Path(__file__).with_name("region_decode.c")
LIBRARY = library_of(SOURCE)
# Columns beside the wanted ones: a margin of 2 on each side, and up to the edge of a block, which
# is 32 wide where colour has a quarter of the columns.
BESIDE = 2 + 2 + 31

JPEG_MAGIC, JPEG_END = b"\xff\xd8", b"\xff\xd9"
SEQUENTIAL = (0xC0, 0xC1)  # SOF0 and SOF1; progressive files are smoothed across rows of blocks
# APP0 to APP15, COM, tables and the restart interval: what may stand before the frame header.
BEFORE_FRAME = {*range(0xE0, 0xF0), 0xFE, 0xDB, 0xC4, 0xDD}
# Upsampling doubles colour vertically, and looks at one row of it below: two of pixels.
MARGIN = 2
LEAST = 16  # rows; to leave out fewer gains nothing, as whole rows of blocks are decoded

Box = tuple[int, int, int, int]  # top, left, height, width in pixels


class Frame(NamedTuple):
    """What the frame header of a JPEG file says, and where in the file its height stands."""

    height: int
    width: int
    at: int


def frame_of(data: bytes) -> Frame | None:
    """The frame of a JPEG file that may be decoded in part; None for any other file.

    Others are progressive, lossless or arithmetic coded ones, CMYK, unusual subsampling, files that
    do not follow the standard up to the frame header, and files without their end (but for
    padding): decoders fill up what is missing of those.
    """
    at, end = 2, len(data) - 20
    if not (data.startswith(JPEG_MAGIC) and data[-64:].rstrip(b"\0").endswith(JPEG_END)):
        return None
    while at < end and data[at] == 0xFF:
        marker, length = data[at + 1], data[at + 2] << 8 | data[at + 3]
        if marker in SEQUENTIAL:
            return _read_frame(data[at + 4 : at + 2 + length], at + 5)
        if marker not in BEFORE_FRAME or length < 2:
            return None
        at += 2 + length
    return None


def _read_frame(header: bytes, at: int) -> Frame | None:
    # precision, height (2), width (2), components; id, sampling factors, table of each
    if len(header) < 9 or header[0] != 8 or header[5] not in (1, 3):
        return None
    if len(header) != 6 + 3 * header[5] or max(factor & 15 for factor in header[7::3]) > 2:
        return None
    height, width = header[1] << 8 | header[2], header[3] << 8 | header[4]
    return Frame(height, width, at) if height and width else None


def lowered(data: bytes, frame: Frame, rows: int) -> bytearray | None:
    """A copy of ``data`` that ends, for a decoder, soon after the first ``rows`` rows.

    None where that leaves out hardly anything.
    """
    height = rows + MARGIN
    if height + LEAST > frame.height:
        return None
    copy = bytearray(data)
    copy[frame.at : frame.at + 2] = height.to_bytes(2, "big")
    return copy


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Throw away what libraries write to stderr: libjpeg warns of bytes that it does not need.

    It does so for the whole process: other threads must not write there meanwhile.
    """
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def decode_region(data: bytes, box: Box, path: Path | None = None) -> tuple[np.ndarray, int] | None:
    """The rows of ``box``, and which column of the image their first one is.

    ``data`` is a file that `frame_of` knows, ``path`` the library (`LIBRARY`). Returns: uint8
    [height, n, 3], n being the width and some more; None without the library, and where the file
    is damaged or smaller than that.
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
    """True if the library was built from today's source, and fits this machine."""
    return _load(LIBRARY) is not None


@functools.cache
def _load(path: Path) -> Callable[..., int] | None:
    try:
        call = ctypes.CDLL(str(path)).decode_region
    except (OSError, AttributeError):  # not there, or built on another kind of machine
        return None
    call.restype, number = ctypes.c_int, ctypes.c_uint
    call.argtypes = [ctypes.c_char_p, ctypes.c_ulong, number, number, ctypes.POINTER(number)]
    call.argtypes += [number, ctypes.c_void_p, ctypes.c_ulong]
    return call
