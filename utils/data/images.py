"""Decode, crop and resize images, and fill batches with them in a loader worker.

Pixels stay uint8 and channels-last in memory. That is faster than Pillow with float tensors: with
the decoder's channels-last strides, torch's antialiased resize takes its vectorised path.
"""

import functools
import io
import itertools
import math
import random
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from utils.data import region_decode
from utils.data.being_read import BeingRead
from utils.data.preprocessing import CROP_SCALE, to_rgb
from utils.data.region_decode import Box
from utils.data.samplers import UNREADABLE, Batch, checksum
from utils.data.sources import Source

try:
    from torchvision.io import ImageReadMode, decode_image
except ImportError:  # torchvision 0.29 announces its removal
    decode_image = ImageReadMode = None
# It announces that at the first image of each worker, as an error with PYTHONWARNINGS=error.
warnings.filterwarnings("ignore", ".*TorchCodec", DeprecationWarning)

JPEG_MAGIC = b"\xff\xd8"
RATIO = (3 / 4, 4 / 3)  # of width : height in a training crop
EXTREME = 16  # long side : short side; evaluation uses only the middle of a longer image
RESIZE = {
    "bilinear": torch.ops.aten._upsample_bilinear2d_aa.out,
    "bicubic": torch.ops.aten._upsample_bicubic2d_aa.out,
}


class Crop(NamedTuple):
    """How a crop is made of an image: cut out ``box``, resize, cut out ``window``, mirror."""

    box: Box
    size: tuple[int, int]  # height and width after the resize
    window: Box
    mirrored: bool


def decode(data: bytes) -> Tensor:
    """Decode an image file to uint8 [3, height, width], RGB, strides of [height, width, 3].

    torchvision decodes JPEG if it can, Pillow the rest. The result is that of
    ``PIL.Image.convert("RGB")``: grey, CMYK and palette images become RGB, alpha is dropped, EXIF
    rotation is not applied. `to_rgb` describes images with more than 8 bits per channel.
    Raises: ValueError unless ``data`` is a whole image.
    """
    if not data:
        raise ValueError("the file is empty")
    # Only JPEG: torchvision 0.29 crashes with a segmentation fault on a damaged PNG.
    if decode_image and ImageReadMode and data.startswith(JPEG_MAGIC):
        try:
            # A bytearray, as torch would warn that bytes are read-only.
            whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return decode_image(whole, ImageReadMode.RGB)
        except RuntimeError:
            pass  # damaged: Pillow gives a more readable reason
    try:
        with Image.open(io.BytesIO(data)) as picture:
            pixels = np.array(to_rgb(picture))
    except UnidentifiedImageError:
        raise ValueError("not an image, or of an unknown format") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(str(error)) from None
    return torch.from_numpy(pixels).permute(2, 0, 1)


def random_box(draw: random.Random, height: int, width: int, smallest: float = CROP_SCALE) -> Box:
    """A random training crop, with the distribution of torchvision's RandomResizedCrop.

    The area (at least the fraction ``smallest``) and the log of the aspect ratio are uniform. If
    ten boxes do not fit, it returns the largest centred one within the ratio limits (Szegedy et al.
    2014, arXiv:1409.4842).
    """
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    for _ in range(10):
        area = height * width * (smallest + (1 - smallest) * draw.random())
        ratio = math.exp(low + (high - low) * draw.random())
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top = int((height - h + 1) * draw.random())
            return top, int((width - w + 1) * draw.random()), h, w
    w, h = width, height
    if width / height < RATIO[0]:
        h = round(width / RATIO[0])
    elif width / height > RATIO[1]:
        w = round(height * RATIO[1])
    return (height - h) // 2, (width - w) // 2, h, w


def train_crop(
    shape: tuple[int, int], size: int, draw: random.Random, smallest: float = CROP_SCALE
) -> Crop:
    """A random crop of an image of ``shape`` (height, width), mirrored with probability 0.5."""
    box = random_box(draw, *shape, smallest)
    return Crop(box, (size, size), (0, 0, size, size), draw.random() < 0.5)


def eval_crop(shape: tuple[int, int], size: int, short: int) -> Crop:
    """The centre ``size`` x ``size`` after the short side is resized to ``short`` pixels."""
    # Limit the aspect ratio: resizing a strip of 1 x 60,000 pixels would take gigabytes.
    height, width = (min(side, EXTREME * min(shape)) for side in shape)
    box = ((shape[0] - height) // 2, (shape[1] - width) // 2, height, width)
    if height <= width:
        target = (short, int(short * width / height))
    else:
        target = (int(short * height / width), short)
    top, left = round((target[0] - size) / 2), round((target[1] - size) / 2)
    return Crop(box, target, (top, left, size, size), False)


def resized_crop(
    image: Tensor, crop: Crop, interpolation: str = "bilinear", out: Tensor | None = None
) -> Tensor:
    """Apply ``crop`` to ``image`` (uint8 [3, height, width]), antialiased.

    Returns: uint8 [height, width, 3], in ``out`` if given (contiguous).
    """
    top, left, height, width = crop.box
    # Permute to [h, w, 3] and back: if [3, h, w] were unsqueezed, torch would not recognise the
    # memory as channels-last, and would take twice the time.
    pixels = image.permute(1, 2, 0)[top : top + height, left : left + width][None]
    pixels = pixels.permute(0, 3, 1, 2)
    y, x, *shape = crop.window
    if out is None:
        out = torch.empty(*shape, 3, dtype=torch.uint8)
    whole = crop.size == tuple(shape) and not crop.mirrored
    if whole and image.stride(0) == 1:  # else torch would not write the channels in order
        # F.interpolate calls this, but has no argument ``out``.
        RESIZE[interpolation](
            pixels, crop.size, False, None, None, out=out[None].permute(0, 3, 1, 2)
        )
        return out
    resized = F.interpolate(pixels, size=crop.size, mode=interpolation, antialias=True)
    resized = resized[0].permute(1, 2, 0)[y : y + shape[0], x : x + shape[1]]
    return out.copy_(resized.flip(1) if crop.mirrored else resized)


# ---- a batch of images, in a loader worker

LONGEST_SEARCH = 10_000  # unreadable files in one batch; more mean a broken disk
SLOW = 3e-4  # mean seconds per read; if reads are slower, a worker keeps several in flight
READS = 8  # in flight: a file on a network disk takes several round trips, decoding 3 to 8 ms


class Fetched(NamedTuple):
    """The result of a read: an image file."""

    data: bytes
    seconds: float


@dataclass
class Reading:
    """The cost of batches: files and bytes read, seconds of reading and overall, bad files."""

    files: int = 0
    bytes: int = 0
    read_seconds: float = 0.0
    seconds: float = 0.0
    unreadable: list[tuple[int, str]] = field(default_factory=list)  # (image, reason)
    taken: int = 0  # of one batch: `utils.data.samplers.checksum` of its indices

    def add(self, other: "Reading") -> None:
        """Add the cost of another batch, except its unreadable files."""
        self.files += other.files
        self.bytes += other.bytes
        self.read_seconds += other.read_seconds
        self.seconds += other.seconds


@dataclass(eq=False)
class ImageBatches(Dataset):
    """Whole batches of ``source``: training crops if ``train``, else centre crops.

    A batch is (images uint8 [n, size, size, 3], targets int64 [n], `Reading`); ``size`` is the
    side, unless the batch has one of its own. A training image that cannot be read is replaced by
    the next readable one, so that no other sample moves; in evaluation it is black, with target
    `UNREADABLE`. Augmentation is a function of (seed, epoch, image). ``augment`` is applied to each
    training crop (uint8 [3, size, size]), after these three have seeded torch's random state.
    """

    source: Source
    size: int
    seed: int
    train: bool
    crop_scale: float = CROP_SCALE
    resize: int = 256  # in evaluation, the short side before the crop
    interpolation: str = "bilinear"
    augment: Callable[[Tensor], Tensor] | None = None
    # Whether to decode only the part of a file that a training crop needs.
    regions: bool = field(default_factory=region_decode.has_library)
    # Reads in flight, by image and key; used if the reads of the last batch were `SLOW`.
    ahead: dict[tuple[int, int], Future[Fetched]] = field(default_factory=dict, init=False)
    slow: bool = field(default=False, init=False)
    fetch_seconds: float = field(default=0.0, init=False)  # of this batch, in all threads
    being_read: BeingRead = field(default_factory=lambda: BeingRead(0), init=False)

    def __getitems__(self, batch: Batch) -> tuple[Tensor, Tensor, Reading]:
        size = batch.size or self.size
        images = torch.empty((len(batch.indices), size, size, 3), dtype=torch.uint8)
        targets = torch.empty(len(images), dtype=torch.int64)
        return images, targets, self.fill(images, targets, batch)

    def fill(self, images: Tensor, targets: Tensor, batch: Batch) -> Reading:
        """Write a batch into ``images`` (uint8 [n, size, size, 3]) and ``targets`` (int64 [n])."""
        with self.being_read.batch():
            return self._fill(images, targets, batch)

    def _fill(self, images: Tensor, targets: Tensor, batch: Batch) -> Reading:
        began, reading, labels = time.perf_counter(), Reading(), []
        indices = batch.indices.tolist()
        coming = iter(indices if self.slow else ())
        self.fetch_seconds = 0.0
        self.ahead.clear()
        for row, image in enumerate(indices):
            for later in itertools.islice(coming, READS - len(self.ahead)):
                task = later, self.key(later, batch.epoch)
                self.ahead[task] = self._readers.submit(self._fetch, task[0])
            labels.append(self._show(image, batch.epoch, images[row], reading))
        targets.copy_(torch.tensor(labels))
        self.slow = self.fetch_seconds > SLOW * len(indices)
        reading.taken = checksum(batch.indices)
        reading.seconds = time.perf_counter() - began
        return reading

    @functools.cached_property
    def _readers(self) -> ThreadPoolExecutor:
        """Created for the first slow batch, so in a worker after the fork."""
        return ThreadPoolExecutor(READS)

    def _show(self, image: int, epoch: int, out: Tensor, reading: Reading) -> int:
        """Write the crop of ``image``, or of its replacement, into ``out``: [size, size, 3].

        Returns: the target of the image shown. If none is readable, ``out`` is black.
        """
        key = self.key(image, epoch)
        for step in range(len(self.source) if self.train else 1):
            if len(reading.unreadable) >= LONGEST_SEARCH:
                break
            shown = (image + step) % len(self.source)
            try:
                pixels, crop = self._pixels(shown, key, len(out), reading)
                resized_crop(pixels, crop, self.interpolation, out)
            except (OSError, ValueError) as error:
                reading.unreadable.append((shown, str(error)))
                continue
            if self.train and self.augment:
                # Without workers, this is the training process: keep its random state.
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(random.Random(key).getrandbits(63))
                    # Pass a copy: some transforms return their argument, others modify it.
                    out.copy_(self.augment(out.clone().permute(2, 0, 1)).permute(1, 2, 0))
            return int(self.source.targets[shown])
        out.zero_()
        return UNREADABLE

    def key(self, image: int, epoch: int) -> int:
        """The seed for the augmentation of ``image`` (an index in a `Batch`) in an epoch."""
        return (self.seed << 72) | (epoch << 48) | image

    def _pixels(self, image: int, key: int, size: int, reading: Reading) -> tuple[Tensor, Crop]:
        """The pixels of an image that its crop needs, and the `Crop` to make of these pixels."""
        began = time.perf_counter()
        self.being_read.note(image)
        reads = self.ahead.pop((image, key), None)
        data, seconds = reads.result() if reads else self._fetch(image)
        self.fetch_seconds += seconds
        reading.files += 1
        reading.bytes += len(data)
        reading.read_seconds += time.perf_counter() - began
        if self.train and self.regions and (shape := region_decode.shape_of(data)) is not None:
            crop = self.crop(shape, key, size)
            if (decoded := region_decode.decode(data, crop.box)) is not None:
                return decoded[0], crop._replace(box=decoded[1])
        pixels = decode(data)
        _, height, width = pixels.shape
        return pixels, self.crop((height, width), key, size)

    def _fetch(self, image: int) -> Fetched:
        """Read an image file. Raises: OSError."""
        began = time.perf_counter()
        return Fetched(self.source.read(image), time.perf_counter() - began)

    def crop(self, shape: tuple[int, int], key: int, size: int) -> Crop:
        """The `Crop` of ``size`` x ``size`` pixels from an image of ``shape`` (height, width)."""
        if not self.train:
            return eval_crop(shape, size, self.resize)
        return train_crop(shape, size, random.Random(key), self.crop_scale)
