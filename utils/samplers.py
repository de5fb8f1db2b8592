"""The order of training samples, and exact shards for evaluation.

The order of an epoch is a function of (seed, epoch) alone. It is cut into global batches, and each
global batch into equal parts for micro-batches and slices (see `utils.world.World`), so that global
batch k holds the same images on any number of processes as long as its size is the same.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
    """A sampler's request to a loader: ``indices`` (int64) of the images, and their epoch.

    Index i + v x images is view v of image i, which has its own random augmentation.

    ``size`` is the side of the images in pixels (0: the data set's own), ``slot`` their place in
    the ring of `utils.loaders`.
    """

    epoch: int
    indices: np.ndarray
    size: int = 0
    slot: int = 0


def epoch_order(images: int, seed: int, epoch: int) -> np.ndarray:
    """The shuffled indices 0..images-1 of an epoch, int64.

    RandomState, not Generator: NumPy promises that its stream never changes between versions, and
    the nodes of a job may have different ones.
    """
    source = np.random.MT19937(np.random.SeedSequence([seed, epoch]))
    return np.random.RandomState(source).permutation(images)


def global_batch(batch: int, slices: int, accum: int, images: float = math.inf) -> int:
    """Images per optimiser step over all processes.

    ``batch`` images per process and micro-batch, ``accum`` micro-batches per step. A data set with
    fewer ``images`` is one step.
    """
    return int(min(images, batch * slices * accum))


class TrainSampler:
    """Batches of one slice, epoch by epoch, from any step on: a ``batch_sampler`` for DataLoader.

    ``batch`` is the size of a micro-batch per process and ``accum`` the number of micro-batches per
    step, so a global batch has batch x slices x accum images. An incomplete global batch at the end
    of an epoch is dropped (with other images each epoch). A data set smaller than one global batch
    makes one smaller step an epoch, divided as evenly as possible. ``sizes`` are the sides of the
    images in each epoch (``args.epoch_sizes``), () if all have the same.
    """

    def __init__(self, images: int, batch: int, slices: tuple[int, int], accum: int, seed: int):
        self.images = images
        self.slice, self.slices = slices
        self.accum = accum
        self.seed = seed
        self.global_batch = global_batch(batch, self.slices, accum, images)
        self.steps_per_epoch = images // self.global_batch
        self.largest = -(-self.global_batch // (self.slices * accum))  # images in a batch
        # (order of the epoch, images of a global batch) -> another order; see `Batch`
        self.reorder: Callable[[np.ndarray, int], np.ndarray] | None = None
        self.sizes: tuple[int, ...] = ()
        self.epoch = 0
        self.first_step = 0

    @property
    def size(self) -> int:
        """The side of this epoch's images, pixels; 0: the data set's own."""
        return self.sizes[min(self.epoch, len(self.sizes) - 1)] if self.sizes else 0

    def start_at(self, epoch: int, step: int) -> None:
        """Begin the next iteration with ``step`` of ``epoch``."""
        self.epoch, self.first_step = epoch, step

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.first_step) * self.accum

    def __iter__(self) -> Iterator[Batch]:
        order = epoch_order(self.images, self.seed, self.epoch)
        if self.reorder:
            order = self.reorder(order, self.global_batch)
        parts = self.slices * self.accum
        for step in range(self.first_step, self.steps_per_epoch):
            start = step * self.global_batch
            for micro in range(self.accum):
                part = micro * self.slices + self.slice
                low = start + part * self.global_batch // parts
                high = start + (part + 1) * self.global_batch // parts
                yield Batch(self.epoch, order[low:high], self.size)


class EvalSampler:
    """Batches of one slice for evaluation: over all slices every image comes exactly once.

    The images are cut into consecutive batches and these are dealt to the slices in turn. No image
    is repeated or dropped, and a batch is made of the same images at any world size.
    """

    def __init__(self, images: int, batch: int, slices: tuple[int, int]):
        self.images = images
        self.slice, self.slices = slices
        self.batch = batch
        self.largest = max(1, min(batch, self.images))  # images in a batch
        self.starts = range(self.slice * batch, self.images, self.slices * batch)
        # The highest number of batches of any slice.
        self.rounds = -(-self.images // (batch * self.slices))

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[Batch]:
        for start in self.starts:
            yield Batch(0, np.arange(start, min(start + self.batch, self.images)))
