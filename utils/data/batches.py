"""Batches on the device: uploaded from the ring, normalised, mixed; and the files that were bad."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from utils.data.images import ImageBatches, Reading
from utils.data.preprocessing import MEAN, STD, Channels, Preprocessing
from utils.data.ring import RingLoader, Sampler
from utils.data.samplers import UNREADABLE, EvalSampler, TrainSampler
from utils.data.sources import Source
from utils.start import progress
from utils.start.errors import UserError
from utils.start.world import World

log = logging.getLogger(__name__)


@dataclass
class BadFiles:
    """Unreadable files of one loader: each is logged once; more than ``limit`` are `too_many`."""

    source: Source
    limit: int
    seen: dict[int, str] = field(default_factory=dict)  # image: reason

    @property
    def too_many(self) -> bool:
        """Whether the run should end, with `error`."""
        return len(self.seen) > self.limit

    def note(self, unreadable: list[tuple[int, str]]) -> None:
        """Log the new ones among ``unreadable``, until there are too many."""
        for image, reason in unreadable:
            if image not in self.seen and not self.too_many:
                self.seen[image] = reason
                log.info(f"unreadable image {self.source.path(image)}: {reason}; skipped")

    def share(self, world: World) -> None:
        """Collect the files of all ranks, so that rank 0's log names each file."""
        for seen in world.gather(dict(self.seen)):
            self.note(list(seen.items()))

    def error(self) -> UserError:
        """The error for too many files, or all of them, to raise in every rank after `share`."""
        last, reason = list(self.seen.items())[-1]
        name, check = self.source.path(last), "check the disk and the copy of the data set"
        if self.too_many:
            text = f"more than {self.limit} image files could not be read (--max-bad-files), most "
            text += f"recently {name}: {check}"
        else:
            text = f"none of the {len(self.seen)} images in {self.source.root} could be read, such "
            text += f"as {name} ({reason}): {check}"
        return UserError(text, on_every_rank=True)


AnySampler = TypeVar("AnySampler", bound=Sampler)
Position = tuple[int, int, int]  # epoch, step, index of the micro-batch in the step
# (images, targets, position) -> (images, targets, labels) of a `MicroBatch`
Mix = Callable[[Tensor, Tensor, Position], tuple[Tensor, Tensor, Tensor]]


class MicroBatch(NamedTuple):
    """A micro-batch on the device, and its position in the training."""

    images: Tensor  # [n, 3, size, size], normalised
    targets: Tensor  # int64 [n], or float [n, classes] where images are mixed
    labels: Tensor  # int64 [n], for the metrics
    weight: float  # factor of its mean loss: world size x fraction of the global batch
    position: Position
    opens_step: bool
    ends_step: bool
    taken: int = 0  # see `utils.data.images.Reading`


class Batches(Generic[AnySampler]):
    """Batches on the device: `TrainBatches` or `EvalBatches`.

    Iterating gives (images, targets): ``dtype`` [n, 3, size, size], normalised, and int64 [n].
    ``waited`` counts the seconds that the caller waited for them, ``reading`` the files
    and bytes; `start_count` sets both to zero. ``to``: device, memory format and ``dtype``.
    """

    def __init__(
        self,
        dataset: ImageBatches,
        sampler: AnySampler,
        bad: BadFiles,
        to: tuple[torch.device, torch.memory_format, torch.dtype],
        workers: int,
    ):
        self.dataset, self.sampler, self.bad = dataset, sampler, bad
        self.device, self.layout, self.dtype = to
        self.start_count()
        cuda = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if cuda else None
        self._normalise_by(MEAN, STD)
        self.loader = RingLoader(dataset, sampler, workers, page_locked=cuda)

    def use(self, how: Preprocessing) -> None:
        """Preprocess as ``how`` says. Call it before the first iteration, which starts workers."""
        self.dataset.size = self._largest_side(how)
        self.dataset.resize = how.val_resize_size
        self.dataset.interpolation = how.interpolation
        self._normalise_by(how.mean, how.std)

    def _largest_side(self, how: Preprocessing) -> int:
        """The side in pixels of the largest images that ``how`` makes."""
        return how.crop

    def _normalise_by(self, mean: Channels, std: Channels) -> None:
        scale = [1 / (255 * s) for s in std]
        shift = [-m / s for m, s in zip(mean, std, strict=True)]
        # Repeated for a whole row of pixels: three channels are too few for a vectorised loop.
        rows = [torch.tensor(one).repeat(self.dataset.size) for one in (scale, shift)]
        self.scale, self.shift = (one.to(self.device) for one in rows)

    def start_count(self) -> None:
        """Set `waited` and `reading` to zero."""
        self.waited, self.reading, self.taken = 0.0, Reading(), 0

    def blank(self, side: int = 0) -> Tensor:
        """A batch of one image of zeros, by default of the largest size."""
        side = side or self.dataset.size
        return torch.zeros(1, 3, side, side, dtype=self.dtype, device=self.device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        before = time.perf_counter()
        progress.main.awaited = self.loader.describe_wait
        for filled in self.loader:
            progress.main.awaited = None
            progress.main.count += 1
            self.waited += time.perf_counter() - before
            self.reading.add(filled.reading)
            self.taken = filled.reading.taken
            self.bad.note(filled.reading.unreadable)
            images, targets = self.loader.ring.view(filled.slot, filled.images, filled.size)
            if self.dataset.train and (targets == UNREADABLE).any():
                # No image was left to replace it. Only this rank may know that, so it reports it.
                raise UserError(str(self.bad.error()))
            yield self._upload(images, targets, filled.slot)
            before = time.perf_counter()
            progress.main.awaited = self.loader.describe_wait
        progress.main.awaited = None

    def _upload(self, images: Tensor, targets: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """The batch on the device, normalised."""
        if self.stream is None:
            return self._normalise(images), targets.clone()
        # On a stream of its own the copy runs while the device still computes the last step.
        with torch.cuda.stream(self.stream):
            images = images.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            self.loader.ring.uploads[slot] = self.stream.record_event()
            images = self._normalise(images)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        images.record_stream(current)
        targets.record_stream(current)
        return images, targets

    def _normalise(self, images: Tensor) -> Tensor:
        """uint8 [n, s, s, 3] to (x / 255 - mean) / std as ``dtype`` [n, 3, s, s].

        One kernel, which computes in float32 and rounds once.
        """
        n, size, width, _ = images.shape
        rows = images.reshape(n, size, width * 3)
        out = torch.empty_like(rows, dtype=self.dtype)
        torch.addcmul(self.shift[: width * 3], rows, self.scale[: width * 3], out=out)
        out = out.view(n, size, width, 3).permute(0, 3, 1, 2)
        return out.contiguous(memory_format=self.layout)


class EvalBatches(Batches[EvalSampler]):
    """Centre crops, each image once over all ranks."""


class TrainBatches(Batches[TrainSampler]):
    """Training crops. ``mix`` changes whole batches; None: it does not."""

    mix: Mix | None = None

    def _largest_side(self, how: Preprocessing) -> int:
        return max(self.sampler.sizes, default=how.image_size)

    def rest(self, epoch: int, step: int) -> Iterator[MicroBatch]:
        """The micro-batches of ``epoch``, from ``step`` on."""
        sampler = self.sampler
        sampler.start_at(epoch, step)
        for count, (images, targets) in enumerate(self if step < sampler.steps_per_epoch else ()):
            done, number = divmod(count, sampler.accum)
            position = (epoch, step + done, number)
            weight = len(targets) * sampler.num_replicas / sampler.global_batch
            mixed = self.mix(images, targets, position) if self.mix else (images, targets, targets)
            ends = number + 1 == sampler.accum
            yield MicroBatch(*mixed, weight, position, number == 0, ends, self.taken)
