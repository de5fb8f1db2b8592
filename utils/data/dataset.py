"""The work of a loader worker: read, decode and crop a batch of images."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from utils.data import images as im
from utils.data import jpeg
from utils.data.folder import Source
from utils.metrics import UNREADABLE
from utils.samplers import Batch

LONGEST_SEARCH = 10_000  # unreadable files in one batch; with more, the disk is at fault


@dataclass
class Reading:
    """The cost of batches: files and bytes read, seconds of reading and in all, bad files."""

    files: int = 0
    bytes: int = 0
    read_seconds: float = 0.0
    seconds: float = 0.0
    faults: list[tuple[int, str]] = field(default_factory=list)  # (image, reason)

    def add(self, other: "Reading") -> None:
        """Add another batch's, but for its faults."""
        self.files += other.files
        self.bytes += other.bytes
        self.read_seconds += other.read_seconds
        self.seconds += other.seconds

    def count(self, size: int, began: float) -> None:
        """Count one file, of which ``size`` bytes were read since ``began``."""
        self.files += 1
        self.bytes += size
        self.read_seconds += time.perf_counter() - began


@dataclass(eq=False)
class ImageBatches(Dataset):
    """Whole batches of ``source``: training crops if ``train``, else centre crops.

    A batch is (images uint8 [n, size, size, 3], targets int64 [n], `Reading`); ``size`` is the side
    where the batch does not name another. A training image that cannot be read is replaced by the
    next readable one, so that no other sample moves; in evaluation it is black, with
    target `UNREADABLE`. Augmentation is a function of (seed, epoch, image). ``augment`` is applied
    to each training crop (uint8 [3, size, size]) with torch's random state seeded by these three.
    """

    source: Source
    size: int
    seed: int
    train: bool
    crop_scale: float = im.CROP_SCALE
    resize: int = 256  # in evaluation, the short side before the crop
    interpolation: str = "bilinear"
    augment: Callable[[Tensor], Tensor] | None = None
    regions: bool = True  # decode no more than a training crop, where the library can

    def __getitems__(self, batch: Batch) -> tuple[Tensor, Tensor, Reading]:
        size = batch.size or self.size
        images = torch.empty((len(batch.indices), size, size, 3), dtype=torch.uint8)
        targets, reading = self.fill(images, batch)
        return images, torch.from_numpy(targets), reading

    def fill(self, images: Tensor, batch: Batch) -> tuple[np.ndarray, Reading]:
        """Write the images of ``batch`` into ``images`` (uint8 [n, size, size, 3]).

        Returns: targets int64 [n], and the cost.
        """
        began = time.perf_counter()
        targets = np.full(len(batch.indices), UNREADABLE, np.int64)
        reading = Reading()
        for row, wanted in enumerate(batch.indices.tolist()):
            found = self._sample(wanted, batch.epoch, images[row], reading)
            if found is None:
                images[row].zero_()
            else:
                targets[row] = self.source.targets[found]
        reading.seconds = time.perf_counter() - began
        return targets, reading

    def _sample(self, wanted: int, epoch: int, out: Tensor, reading: Reading) -> int | None:
        """Write the view of image ``wanted``, or of its replacement, into ``out``.

        Returns: the index of the image; None if none is readable.
        """
        for step in range(len(self.source) if self.train else 1):
            if len(reading.faults) >= LONGEST_SEARCH:
                break
            found = (wanted + step) % len(self.source)
            try:
                self._view(found, (self.seed << 72) | (epoch << 48) | wanted, out, reading)
                return found
            except (OSError, ValueError) as fault:
                reading.faults.append((found, str(fault)))
        return None

    def _view(self, image: int, key: int, out: Tensor, reading: Reading) -> None:
        """Read an image and write its view: uint8 [size, size, 3]; ``key`` seeds its augmentation.

        Raises: OSError, ValueError.
        """
        pixels, cut = self._pixels(image, key, len(out), reading)
        im.view(pixels, cut, self.interpolation, out)
        if self.train and self.augment:
            # Without workers this is the training process, whose own random state must not change.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(random.Random(key).getrandbits(63))
                # Of a copy: some transforms return their argument, and some write into it.
                out.copy_(self.augment(out.clone().permute(2, 0, 1)).permute(1, 2, 0))

    def _pixels(self, image: int, key: int, size: int, reading: Reading) -> tuple[Tensor, im.Cut]:
        """The pixels that the view of an image needs, and how to cut the view out of them."""
        source = self.source
        if (shape := source.shape(image)) is not None:
            cut = self._cut(shape, key, size)
            top, left, height, width = cut.box
            began = time.perf_counter()
            rows = source.rows(image, top, height)
            reading.count(rows.nbytes, began)
            box = (0, left, height, width)
            return torch.from_numpy(rows).permute(2, 0, 1), cut._replace(box=box)
        began = time.perf_counter()
        data = source.read(image)
        reading.count(len(data), began)
        in_part = self.train and self.regions and jpeg.has_library()
        if in_part and (shape := jpeg.shape_of(data)) is not None:
            cut = self._cut(shape, key, size)
            if (decoded := im.decode_part(data, cut.box)) is not None:
                return decoded[0], cut._replace(box=decoded[1])
        pixels = im.decode(data)
        return pixels, self._cut(pixels.shape[1:], key, size)

    def _cut(self, shape: tuple[int, int], key: int, size: int) -> im.Cut:
        if not self.train:
            return im.eval_cut(shape, size, self.resize)
        return im.train_cut(shape, size, random.Random(key), self.crop_scale)
