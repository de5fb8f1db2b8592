"""The order of training samples, and exact shards for evaluation.

The order of an epoch is a function of (seed, epoch) alone. It is cut into global batches, and each
global batch into equal parts for micro-batches and data-parallel ranks (see `World`), so that
global batch k holds the same images on any number of processes as long as its size is the same.
"""

import math
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from utils.start.option_types import Options

UNREADABLE = -1  # target of an image that could not be read; metrics ignore it


class Batch(NamedTuple):
    """A sampler's request to a loader: ``indices`` (int64) of the images, and their epoch.

    ``size`` is the side of the images in pixels (0: the data set's own), ``slot`` their place in
    the ring of `utils.data.ring`.
    """

    epoch: int
    indices: np.ndarray
    size: int = 0
    slot: int = 0


def checksum(indices: np.ndarray) -> int:
    """The CRC-32 of the indices (int64) of a batch's images, in their order."""
    return zlib.crc32(np.ascontiguousarray(indices, dtype="<i8").tobytes())


def epoch_order(images: int, seed: int, epoch: int) -> np.ndarray:
    """The shuffled indices 0..images-1 of an epoch, int64.

    RandomState, not Generator: NumPy promises that its stream never changes between versions, and
    the nodes of a job may have different ones.
    """
    source = np.random.MT19937(np.random.SeedSequence([seed, epoch]))
    return np.random.RandomState(source).permutation(images)


def step_shape(args: Options, num_replicas: int, images: float = math.inf) -> tuple[int, int]:
    """Images per optimiser step over all processes, and micro-batches per step in each.

    With ``--global-batch`` both follow from it, and ``-b`` is the largest micro-batch. A data set
    with fewer ``images`` is one step.
    """
    accum, total = args.accum_steps, args.global_batch
    if total is None:
        total = args.batch_size * num_replicas * accum
    else:
        accum = -(-min(total, images) // (args.batch_size * num_replicas))
    return int(min(images, total)), int(accum)


class TrainSampler:
    """Batches of one rank, epoch by epoch, from any step on: a ``batch_sampler`` for DataLoader.

    ``replica`` is (rank, num_replicas), as `torch.utils.data.DistributedSampler` calls them.
    ``batch`` is the size of a micro-batch per process and ``accum`` the number of micro-batches per
    step, so a global batch has batch x num_replicas x accum images, or ``total`` if that is given.
    It is divided as evenly as possible: micro-batches differ by at most one image. An incomplete
    global batch at the end of an epoch is dropped (with other images each epoch). A data set
    smaller than one global batch makes one smaller step an epoch. ``sizes`` are the sides of the
    images in each epoch (``args.epoch_sizes``), () if all have the same.
    """

    def __init__(
        self,
        images: int,
        batch: int,
        replica: tuple[int, int],
        accum: int,
        seed: int,
        total: int | None = None,
    ):
        self.images = images
        self.rank, self.num_replicas = replica
        self.accum = accum
        self.seed = seed
        self.global_batch = min(images, total or batch * self.num_replicas * accum)
        self.steps_per_epoch = images // self.global_batch
        self.largest = -(-self.global_batch // (self.num_replicas * accum))  # images in a batch
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
        parts = self.num_replicas * self.accum
        for step in range(self.first_step, self.steps_per_epoch):
            start = step * self.global_batch
            for micro in range(self.accum):
                part = micro * self.num_replicas + self.rank
                low = start + part * self.global_batch // parts
                high = start + (part + 1) * self.global_batch // parts
                yield Batch(self.epoch, order[low:high], self.size)


class EvalSampler:
    """Batches of one rank for evaluation: over all ranks every image comes exactly once.

    The images are cut into consecutive batches and these are dealt to the ranks in turn. No image
    is repeated or dropped, and a batch is made of the same images at any world size.
    """

    def __init__(self, images: int, batch: int, replica: tuple[int, int]):
        self.images = images
        self.rank, self.num_replicas = replica
        self.batch = batch
        self.largest = max(1, min(batch, self.images))  # images in a batch
        self.starts = range(self.rank * batch, self.images, self.num_replicas * batch)
        # The highest number of batches of any rank.
        self.rounds = -(-self.images // (batch * self.num_replicas))

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[Batch]:
        for start in self.starts:
            yield Batch(0, np.arange(start, min(start + self.batch, self.images)))
