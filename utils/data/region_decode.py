"""Decoding only the part of a JPEG file that a crop shows, by NVIDIA's nvImageCodec if installed.

``pip install nvidia-nvimgcodec-cu12`` (or -cu13) is enough; it works without a GPU. Blocks outside
of the crop are entropy-decoded, but neither transformed nor upsampled. The pixels are those that
decoding the whole image gives, so nodes with and without the package train on the same batches.
"""

import contextlib
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.data.images import Box
from utils.data.jpeg_rows import has_jpeg_ends

LARGEST_SHARE = 0.4  # of the image's area; from 0.3 to 0.5 on, decoding all rows of it is as fast
_made: dict[int, tuple[Any, Any] | None] = {}  # by process, as it cannot be forked


class RegionOfJpeg:
    """A JPEG file that can be decoded in part."""

    def __init__(self, codec: Any, decoder: Any, data: bytes):
        """Raises: RuntimeError or ValueError for what the library does not know."""
        self.codec, self.decoder = codec, decoder
        self.stream = codec.CodeStream(data)
        self.shape = (self.stream.height, self.stream.width)

    def decode(self, box: Box) -> Tensor | None:
        """The pixels in ``box``, uint8 [3, height, width] like `utils.data.images.decode`'s.

        None when the whole image had better be decoded: a large box, or a damaged file.
        """
        top, left, height, width = box
        if height * width > LARGEST_SHARE * self.shape[0] * self.shape[1]:
            return None
        region = self.codec.Region([top, left], [top + height, left + width])
        part = self.decoder.decode(
            self.stream.get_sub_code_stream(region=region),
            params=self.codec.DecodeParams(apply_exif_orientation=False),
        )
        if part is None:
            return None
        pixels = np.asarray(part)
        if pixels.shape != (height, width, 3) or pixels.dtype != np.uint8:
            return None
        return torch.from_numpy(pixels).permute(2, 0, 1)


def open_jpeg(data: bytes) -> RegionOfJpeg | None:
    """``data`` as something to decode in part; None if that is not possible, or would not be exact.

    That is so without nvImageCodec, for other formats, for grey and CMYK files, and for files whose
    end is missing.
    """
    library = _library()
    if library is None or not has_jpeg_ends(data):
        return None
    try:
        part = RegionOfJpeg(*library, data)
    except (RuntimeError, ValueError):
        return None
    usual = part.stream.codec_name == "jpeg" and part.stream.num_channels == 3
    return part if usual else None


def available() -> bool:
    """True if nvImageCodec is installed (and has not failed in this process)."""
    try:
        return (
            find_spec("nvidia.nvimgcodec") is not None and _made.get(os.getpid(), True) is not None
        )
    except ModuleNotFoundError:  # nothing of NVIDIA's
        return False


def _library() -> tuple[Any, Any] | None:
    """The library and a decoder of it for this process; None without it."""
    process = os.getpid()
    if process not in _made:
        _made[process] = _load() if available() else None
    return _made[process]


def _load() -> tuple[Any, Any] | None:
    with _silent_stderr():
        try:
            from nvidia import nvimgcodec as codec

            decoder = codec.Decoder(
                device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY,
                max_num_cpu_threads=1,
                backends=[codec.Backend(codec.BackendKind.CPU_ONLY)],
            )
        except (ImportError, AttributeError, RuntimeError):
            return None  # an older release, or one that does not fit the machine
    return codec, decoder


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    # The library complains there about each codec for GPUs that is not installed.
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
