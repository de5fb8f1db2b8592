"""Decoding only the part of a JPEG file that a crop shows, where the library for it was built.

``python scripts/build_region_decode.py`` builds it from ``region_decode.c``, for this machine. The
pixels are those that decoding the whole image gives, so nodes with and without the library train
on the same batches.
"""

import ctypes
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

LIBRARY = Path(__file__).with_name("libregion_decode.so")
# Columns beside the wanted ones: a margin of 2 on each side, and up to the edge of a block, which
# is 32 wide where colour has a quarter of the columns.
BESIDE = 2 + 2 + 31

Box = tuple[int, int, int, int]  # top, left, height, width in pixels
_opened: dict[Path, ctypes.CDLL | None] = {}


def available() -> bool:
    """True if the library was built and fits this machine."""
    return _library(LIBRARY) is not None


def decode(
    data: bytes | bytearray, box: Box, path: Path | None = None
) -> tuple[Tensor, int] | None:
    """The rows of ``box``, and which column of the image their first one is.

    ``data`` is a file that `utils.data.jpeg_rows.frame_of` knows, ``path`` the library (`LIBRARY`).
    Returns: uint8 [3, height, n], strides as of `utils.data.images.decode`, n being the width and
    some more; None without the library, and where the file is damaged or smaller than that.
    """
    library = _library(path or LIBRARY)
    if library is None:
        return None
    top, left, height, width = box
    bytes_ = np.frombuffer(data, np.uint8)
    pixels = np.empty((height, width + BESIDE, 3), np.uint8)
    column = ctypes.c_uint(left)
    failed = library.decode_region(
        *(bytes_.ctypes.data, len(data), top, height, ctypes.byref(column), width),
        *(pixels.ctypes.data, pixels.strides[0]),
    )
    return None if failed else (torch.from_numpy(pixels).permute(2, 0, 1), column.value)


def _library(path: Path) -> ctypes.CDLL | None:
    if path not in _opened:
        _opened[path] = _load(path)
    return _opened[path]


def _load(path: Path) -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(path))
        call = library.decode_region
    except (OSError, AttributeError):  # not there, or built on another kind of machine
        return None
    call.restype, number = ctypes.c_int, ctypes.c_uint
    call.argtypes = [ctypes.c_void_p, ctypes.c_ulong, number, number, ctypes.POINTER(number)]
    call.argtypes += [number, ctypes.c_void_p, ctypes.c_ulong]
    return library
