"""``--decode gpu``: JPEG files are decoded, cropped and resized on the GPU (nvJPEG by torchvision).

The workers only read files. It frees CPU cores, at the price of GPU time and memory and of waiting
for the decoder in each step; pixels differ from the CPU's by rounding, and by what nvJPEG's own
inverse transform makes of a file. Which images are cut out, and how, is the same.
"""

import io
import time
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from utils.data import images as im
from utils.data.dataset import ImageBatches, Reading
from utils.metrics import UNREADABLE
from utils.samplers import Batch


class Raw(NamedTuple):
    """A file that is left to the GPU, and what is to be done with it."""

    row: int
    length: int  # bytes
    cut: im.Cut
    image: int
    epoch: int


class RawFiles(NamedTuple):
    """The files of a batch that are left to the GPU.

    One tensor, uint8 [bytes], for all: each tensor that a worker hands over costs an open file.
    """

    data: Tensor
    files: list[Raw]


class RawBatches(ImageBatches):
    """Like `ImageBatches`, but leaves JPEG files to `finish`: it adds `RawFiles` to a batch.

    Files that nvJPEG cannot be trusted with (other formats, CMYK, no end marker) come decoded.
    """

    def __getitems__(self, batch: Batch) -> tuple[Tensor, Tensor, Reading, RawFiles]:
        began = time.perf_counter()
        reading, raw, blob, others = Reading(), [], bytearray(), []
        for row, wanted in enumerate(batch.indices.tolist()):
            try:
                data = self._read(wanted, reading)
                shape = whole_jpeg(data)
            except OSError:
                shape = None  # found and reported once more below
            if shape is None:
                others.append(row)
                continue
            cut = self._cut(shape, batch.epoch, wanted)
            raw.append(Raw(row, len(data), cut, wanted, batch.epoch))
            blob += data
        n = len(batch.indices)
        images = torch.zeros(n, self.size, self.size, 3, dtype=torch.uint8)
        targets = torch.from_numpy(self.index.targets[batch.indices])
        images[others], targets[others], more = super().__getitems__(
            Batch(batch.epoch, batch.indices[others])
        )
        reading.add(more)
        reading.faults = more.faults
        reading.seconds = time.perf_counter() - began
        joined = torch.frombuffer(blob, dtype=torch.uint8) if blob else torch.empty(0).byte()
        return images, targets, reading, RawFiles(joined, raw)

    def finish(self, images: Tensor, targets: Tensor, raw: RawFiles) -> list[tuple[int, str]]:
        """Decode ``raw`` on the device of ``images`` (uint8 [n, size, size, 3]), in place.

        Files that fail there are judged, and replaced, by the rules of the CPU. Returns: faults.
        """
        reading = Reading()
        files = list(raw.data.split([file.length for file in raw.files]))
        for item, image in zip(raw.files, _decode(files, images.device), strict=True):
            if image is not None:
                images[item.row] = im.view(image, item.cut)
                continue
            found, view = self._sample(item.image, item.epoch, reading)
            if view is None:
                targets[item.row] = UNREADABLE
            else:
                images[item.row] = view.to(images.device)
                targets[item.row] = int(self.index.targets[found])
        return reading.faults


def whole_jpeg(data: bytes) -> tuple[int, int] | None:
    """Height and width of a grey or colour JPEG file with both its ends, else None."""
    if not im.has_jpeg_ends(data):
        return None
    try:
        with Image.open(io.BytesIO(data)) as picture:
            known = picture.format == "JPEG" and picture.mode in ("L", "RGB")
            return (picture.height, picture.width) if known else None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None


def _decode(files: list[Tensor], device: torch.device) -> list[Tensor | None]:
    if not files:
        return []
    try:
        return list(decode_jpeg(files, ImageReadMode.RGB, device=device))
    except RuntimeError:
        # One of them: nvJPEG does not say which.
        return [_decode_one(file, device) for file in files]


def _decode_one(file: Tensor, device: torch.device) -> Tensor | None:
    try:
        return decode_jpeg(file, ImageReadMode.RGB, device=device)
    except RuntimeError:
        return None
