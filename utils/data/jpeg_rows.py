"""Decoding only those rows of a JPEG file that are wanted, by any decoder.

A decoder believes the height in the frame header. With a lower one it stops after that row, and
the pixels above are the same: each row of blocks is transformed by itself, and only the upsampling
of colour looks at rows beside it. Where a restart marker ends each row of blocks, as in the copies
that prepare_data.py makes, the rows above the wanted ones are left out of the file as well.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

JPEG_MAGIC, JPEG_END = b"\xff\xd8", b"\xff\xd9"
SEQUENTIAL = (0xC0, 0xC1)  # SOF0 and SOF1; progressive files are smoothed across rows of blocks
# APP0 to APP15, COM, tables and the restart interval: what may stand before the frame header.
BEFORE_FRAME = {*range(0xE0, 0xF0), 0xFE, 0xDB, 0xC4, 0xDD}
# Upsampling doubles colour vertically, and looks at one row of it above and below: two of pixels.
MARGIN = 2
RESTART_INTERVAL, SCAN = 0xDD, 0xDA
RESTARTS = bytes(range(0xD0, 0xD8))  # second bytes of the markers, in their order
LEAST = 16  # rows; to leave out fewer gains nothing, as whole rows of blocks are decoded


def has_jpeg_ends(data: bytes) -> bool:
    """True if ``data`` begins and ends (but for padding) as a whole JPEG file does.

    Decoders fill up what is missing of a file without its end, instead of refusing it.
    """
    return data.startswith(JPEG_MAGIC) and data[-64:].rstrip(b"\0").endswith(JPEG_END)


class Frame(NamedTuple):
    """What the frame header of a JPEG file says, and where in the file its height stands."""

    height: int
    width: int
    at: int


def frame_of(data: bytes) -> Frame | None:
    """The frame of a JPEG file whose height may be lowered; None for any other file.

    Others are progressive, lossless or arithmetic coded ones, CMYK, unusual subsampling, and files
    that do not follow the standard up to the frame header.
    """
    at, end = 2, len(data) - 20
    if not data.startswith(JPEG_MAGIC):
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


def between(data: bytes, frame: Frame, top: int, rows: int) -> tuple[bytearray, int] | None:
    """A file of the rows ``top`` to ``top`` + ``rows``, and which row of the image its first is.

    None where there is no restart marker behind each row of blocks, where the markers are not in
    their order, and where that leaves out hardly anything. The rows around the wanted ones may
    differ from the image's.
    """
    found = _scan(data, frame)
    if found is None:
        return None
    begin, block_rows = found
    high = -(-frame.height // block_rows)
    first = max(0, top - MARGIN) // block_rows
    last = min(high, -(-(top + rows + MARGIN) // block_rows))
    if (high - (last - first)) * block_rows < LEAST:
        return None
    codes = np.frombuffer(data, np.uint8)
    ends = begin + np.flatnonzero(codes[begin:-1] == 0xFF)
    following = codes[ends + 1]
    ends = ends[following != 0][: last + 1].tolist()  # the others are bytes of pixels
    markers = following[following != 0].tobytes()
    if not markers.startswith((RESTARTS * (high // 8 + 1))[: high - 1] + JPEG_END[1:]):
        return None
    copy = bytearray(data[:begin])
    below = min(frame.height, last * block_rows) - first * block_rows
    copy[frame.at : frame.at + 2] = below.to_bytes(2, "big")
    start = ends[first - 1] + 2 if first else begin
    copy += data[start : ends[last - 1]]
    if first % 8:  # decoders want the first marker first
        for number, end in enumerate(ends[first : last - 1]):
            copy[begin + end - start + 1] = RESTARTS[number % 8]
    copy += JPEG_END
    return copy, first * block_rows


def _scan(data: bytes, frame: Frame) -> tuple[int, int] | None:
    """Where the only scan begins, and the height of a row of blocks; None without restarts."""
    components = data[frame.at + 4]
    factors = data[frame.at + 6 : frame.at + 5 + 3 * components : 3]
    wide, high = (max(f >> 4 for f in factors), max(f & 15 for f in factors))
    if components == 1:  # whose blocks are coded one by one, whatever its factors
        wide = high = 1
    if not wide or not high:
        return None
    at, end, restart = frame.at + 5 + 3 * components, len(data) - 20, 0
    while at < end and data[at] == 0xFF:
        marker, length = data[at + 1], data[at + 2] << 8 | data[at + 3]
        if marker == RESTART_INTERVAL:
            restart = data[at + 4] << 8 | data[at + 5]
        elif marker == SCAN:
            whole = data[at + 4] == components  # not a scan for each of them
            per_row = -(-frame.width // (8 * wide))
            return (at + 2 + length, 8 * high) if whole and restart == per_row else None
        elif marker not in BEFORE_FRAME or length < 2:
            return None
        at += 2 + length
    return None


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Throw away what libraries write to stderr: libjpeg warns of bytes that it does not need.

    It does so for the whole process: other threads must not write there meanwhile.
    """
    kept = os.dup(2)
    try:
        os.dup2(_nowhere(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


_opened: list[int] = []


def _nowhere() -> int:
    if not _opened:
        _opened.append(os.open(os.devnull, os.O_WRONLY))
    return _opened[0]
