"""Batches on the device: loader workers fill a ring in memory, from which batches are uploaded.

Workers write pixels straight into a slot of the ring, and slots are reused: no batch is allocated,
copied into shared memory, or mapped into another process. The memory is anonymous, so it neither
fills /dev/shm nor outlives the processes.

The signals that stop a run are blocked in workers. Ctrl-C and a scheduler's SIGTERM go to the whole
process group, but the training process needs its workers until the snapshot is written. If workers
ignored the signals instead, there would be a gap after the fork, and DataLoader installs a handler
of SIGTERM.
"""

import logging
import mmap
import os
import signal
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from utils import addons, launch
from utils.errors import UserError
from utils.folder import Source, check_same_classes, class_folders, has_part, open_source
from utils.images import ImageBatches, Reading
from utils.metrics import UNREADABLE
from utils.preprocessing import MEAN, STD, Channels, Preprocessing
from utils.samplers import Batch, EvalSampler, TrainSampler
from utils.world import World, first_on_node, gather

log = logging.getLogger(__name__)
PREFETCH = 2  # batches per worker that are requested in advance
MORE_SLOTS = 2  # for the batch that is about to be uploaded, and for the one being uploaded
PAGE = mmap.PAGESIZE
PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # Slurm sends the last one


class Filled(NamedTuple):
    """A worker's answer to a `Batch`: where its images and targets are, see `Ring.view`."""

    slot: int
    images: int  # how many
    size: int  # their side, pixels
    reading: Reading


class Ring(Dataset):
    """Both the sampler of DataLoader, which assigns a slot to each batch of ``sampler``, and its
    data set, which fills that slot in a worker.

    DataLoader returns batches in order and requests `PREFETCH` batches per worker in advance. So
    the slots are used in turn: when a slot is assigned again, the upload of its last batch has
    begun. ``uploads`` has a CUDA event for each slot, which completes when the upload has ended;
    None: there is nothing to wait for.
    """

    def __init__(self, dataset: ImageBatches, sampler: TrainSampler | EvalSampler, slots: int):
        self.dataset, self.sampler = dataset, sampler
        self.uploads: list[torch.cuda.Event | None] = [None] * slots
        self.memory: Tensor | None = None

    def allocate(self) -> None:
        """Allocate the memory. Until then the size of the images may change.

        Raises: `UserError` if there is not enough.
        """
        slots, batch, size = len(self.uploads), self.sampler.largest, self.dataset.size
        length = -(-batch * size * size * 3 // PAGE) * PAGE
        try:
            memory = mmap.mmap(-1, slots * (length + batch * 8))
        except (OSError, ValueError, OverflowError):
            raise UserError(
                f"no memory for {slots} batches of {batch} images of {size} x {size} pixels "
                f"({slots * length / 1e9:.1f} GB): use fewer workers (-j) or a smaller -b"
            ) from None
        self.memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._images = self.memory[: slots * length].view(slots, length)
        self._targets = self.memory[slots * length :].view(torch.int64).view(slots, batch)

    def view(self, slot: int, images: int, size: int) -> tuple[Tensor, Tensor]:
        """The images of a slot, uint8 [images, size, size, 3], and their targets, int64."""
        pixels = self._images[slot, : images * size * size * 3]
        return pixels.view(images, size, size, 3), self._targets[slot, :images]

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self.sampler):
            slot = number % len(self.uploads)
            if (upload := self.uploads[slot]) is not None:
                upload.synchronize()
            yield batch._replace(slot=slot)

    def __getitem__(self, batch: Batch) -> Filled:
        where = (batch.slot, len(batch.indices), batch.size or self.dataset.size)
        return Filled(*where, self.dataset.fill(*self.view(*where), batch))

    def lock_pages(self) -> None:
        """Page-lock the memory, so that the GPU copies from it while it computes.

        Call it once, after the workers were forked. If it fails, uploads are only slower.
        """
        place, size = self.memory.data_ptr(), self.memory.nbytes
        runtime = torch.cuda.cudart()
        if code := int(runtime.cudaHostRegister(place, size, PORTABLE)):
            text = f"{size / 1e9:.1f} GB of batches could not be page-locked (CUDA error {code})"
            log.warning(f"{text}: uploads are slower; ulimit -l may be too low")
            return
        # Not at the interpreter's exit, as CUDA has ended by then.
        weakref.finalize(self, runtime.cudaHostUnregister, place).atexit = False


class RingLoader:
    """The batches of ``dataset`` that ``sampler`` asks for, in slots of a `Ring`.

    Iterating gives `Filled`. A slot is valid until the next batch is requested, or until
    ``ring.uploads[slot]`` completes. ``page_locked``: for uploads to a GPU. Workers stay alive.
    After an interrupted iteration, the next one waits until they have finished their tasks.
    """

    def __init__(
        self,
        dataset: ImageBatches,
        sampler: TrainSampler | EvalSampler,
        workers: int,
        page_locked: bool = False,
    ):
        self.page_locked = page_locked
        self.ring = Ring(dataset, sampler, PREFETCH * workers + MORE_SLOTS)
        # DataLoader would warn in each process, but more workers than cores help on a slow disk.
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        self._loader = DataLoader(
            self.ring,
            sampler=self.ring,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=PREFETCH if workers else None,
            collate_fn=lambda filled: filled,
            # Without it, a spawned process would spawn its workers, and each would import torch.
            multiprocessing_context=WorkerContext() if workers else None,
            persistent_workers=workers > 0,
        )

    def __iter__(self) -> Iterator[Filled]:
        is_new = self.ring.memory is None
        if is_new:
            self.ring.allocate()
        try:
            filled = iter(self._loader)  # the first time, this forks the workers
            if is_new and self.page_locked:
                self.ring.lock_pages()
            yield from filled
        except (EOFError, ConnectionError, FileNotFoundError):
            # A worker died while sending a batch: wait for SIGCHLD, whose handler raises an error
            # that names the worker.
            time.sleep(5)
            raise


class Worker(ForkProcess):
    """A forked process with `STOPS` blocked, which exits with the training process."""

    def start(self) -> None:
        """Fork with the signals blocked; the child inherits the mask."""
        self._trainer = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # At exit, multiprocessing stops the workers of a live iterator by SIGTERM, which is
        # blocked, and would then wait for them forever.
        self._popen.terminate = self._popen.kill

    def run(self) -> None:
        """Runs in the child."""
        launch.die_with_parent(self._trainer)
        super().run()


class WorkerContext(ForkContext):
    """For ``DataLoader(multiprocessing_context=...)``."""

    Process = property(lambda _: addons.worker_class() or Worker)  # the name that DataLoader calls


# ---- batches on the device


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
        for seen in gather(dict(self.seen), world):
            self.note(list(seen.items()))

    def error(self) -> UserError:
        """The error for too many files, to raise in every rank after `share`."""
        last = self.source.path(list(self.seen)[-1])
        return UserError(
            f"more than {self.limit} image files could not be read (--max-bad-files), most "
            f"recently {last}: check the disk and the copy of the data set",
            on_every_rank=True,
        )


Place = tuple[int, int, int]  # epoch, step, index of the micro-batch in the step


class MicroBatch(NamedTuple):
    """A micro-batch on the device, and its place in the training."""

    images: Tensor  # [n, 3, size, size], normalised
    targets: Tensor  # int64 [n], or float [n, classes] where images are mixed
    labels: Tensor  # int64 [n], for the metrics
    weight: float  # factor of its mean loss: world size x fraction of the global batch
    place: Place
    opens_step: bool
    ends_step: bool


class Batches:
    """Batches on the device.

    Iterating gives (images, targets): ``dtype`` [n, 3, size, size], normalised, and int64 [n].
    ``waited`` counts the seconds that the caller waited for them, ``reading`` the files
    and bytes; `start_count` sets both to zero. ``place``: device, memory layout and ``dtype``.
    """

    def __init__(
        self,
        dataset: ImageBatches,
        sampler: TrainSampler | EvalSampler,
        bad: BadFiles,
        place: tuple[torch.device, torch.memory_format, torch.dtype],
        workers: int,
    ):
        self.dataset, self.sampler, self.bad = dataset, sampler, bad
        self.device, self.layout, self.dtype = place
        # (images, targets, place) -> (images, targets, labels) of a `MicroBatch`; None: unchanged
        self.mix: Callable[[Tensor, Tensor, Place], tuple[Tensor, Tensor, Tensor]] | None = None
        self.start_count()
        cuda = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if cuda else None
        self._normalise_by(MEAN, STD)
        self.loader = RingLoader(dataset, sampler, workers, page_locked=cuda)

    def use(self, how: Preprocessing) -> None:
        """Preprocess as ``how`` says. Call it before the first iteration, which starts workers."""
        self.dataset.size = how.crop
        if self.dataset.train:  # the largest size, if they grow
            self.dataset.size = max(self.sampler.sizes, default=how.image_size)
        self.dataset.resize = how.val_resize_size
        self.dataset.interpolation = how.interpolation
        self._normalise_by(how.mean, how.std)

    def _normalise_by(self, mean: Channels, std: Channels) -> None:
        scale = [1 / (255 * s) for s in std]
        shift = [-m / s for m, s in zip(mean, std, strict=True)]
        # Repeated for a whole row of pixels: three channels are too few for a vectorised loop.
        rows = [torch.tensor(one).repeat(self.dataset.size) for one in (scale, shift)]
        self.scale, self.shift = (one.to(self.device) for one in rows)

    def start_count(self) -> None:
        """Set `waited` and `reading` to zero."""
        self.waited, self.reading = 0.0, Reading()

    def __len__(self) -> int:
        return len(self.sampler)

    def blank(self) -> Tensor:
        """A batch of one image of zeros."""
        side = self.dataset.size
        return torch.zeros(1, 3, side, side, dtype=self.dtype, device=self.device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        before = time.perf_counter()
        for filled in self.loader:
            self.waited += time.perf_counter() - before
            self.reading.add(filled.reading)
            self.bad.note(filled.reading.unreadable)
            images, targets = self.loader.ring.view(filled.slot, filled.images, filled.size)
            if self.dataset.train and (targets == UNREADABLE).any():
                # No image was left to replace it. Only this rank may know that, so it reports it.
                raise UserError(str(self.bad.error()))
            yield self._upload(images, targets, filled.slot)
            before = time.perf_counter()

    def rest(self, epoch: int, step: int) -> Iterator[MicroBatch]:
        """The micro-batches of ``epoch``, from ``step`` on."""
        sampler = self.sampler
        sampler.start_at(epoch, step)
        for count, (images, targets) in enumerate(self if step < sampler.steps_per_epoch else ()):
            done, number = divmod(count, sampler.accum)
            place = (epoch, step + done, number)
            weight = len(targets) * sampler.slices / sampler.global_batch
            mixed = self.mix(images, targets, place) if self.mix else (images, targets, targets)
            yield MicroBatch(*mixed, weight, place, number == 0, number + 1 == sampler.accum)

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


@dataclass
class Loaders:
    """The batches of a run's parts; None for a part that is missing or not needed."""

    classes: list[str]
    dtype: torch.dtype  # of the images
    train: Batches | None = None
    val: Batches | None = None
    test: Batches | None = None

    def use(self, how: Preprocessing) -> None:
        """`Batches.use` for all parts."""
        for part in filter(None, (self.train, self.val, self.test)):
            part.use(how)


def build_loaders(args: Any, world: World, dtype: torch.dtype) -> Loaders:
    """The batches of this rank, of DATA/train, DATA/val and, if present, DATA/test.

    ``dtype`` is that of the first layer. Raises: `UserError` for missing folders, classes that
    differ between train and val, too few images, or a data set that differs between nodes.
    """
    sources = addons.sources(args) or _open_parts(args, world)
    made = {part: _batches(part, source, args, world, dtype) for part, source in sources.items()}
    loaders = Loaders(next(iter(sources.values())).classes, dtype, **made)
    loaders.use(args.preprocessing)
    return loaders


def _open_parts(args: Any, world: World) -> dict[str, Source]:
    """The images of the parts of DATA that this run needs: train, val, test."""
    root, first = Path(args.data), "train"
    parts = ["train", "val", *["test"] * has_part(root / "test")]
    if args.evaluate:
        parts, first = [args.part], "train" if has_part(root / "train") else args.part

    def find_classes() -> list[str]:
        classes = addons.select_classes(args.classes, class_folders(root / first))
        for part in parts:
            if part != first:
                check_same_classes(root, part, classes, subset=bool(args.classes))
        return classes

    # The first process of a node makes the index of tar files; the others read its cache.
    classes = first_on_node(find_classes, world)
    return {part: _open_part(part, classes, args, world) for part in parts}


def _open_part(part: str, classes: list[str], args: Any, world: World) -> Source:
    root = Path(args.data) / part
    # The first process of a node lists the folder; the others read its cache.
    source = first_on_node(lambda: open_source(root, classes, world.local_rank == 0), world)
    if check := addons.preflight():
        check.compare_data(f"the data set's {part} folder", source, world)
    return source


def part_batches(
    part: str, classes: list[str], args: Any, world: World, dtype: torch.dtype
) -> Batches:
    """The batches of DATA/``part`` alone; see `build_loaders`."""
    return _batches(part, _open_part(part, classes, args, world), args, world, dtype)


def _batches(part: str, source: Source, args: Any, world: World, dtype: torch.dtype) -> Batches:
    """The batches of ``part``: training crops of "train", else centre crops."""
    place = (world.device, args.memory_format, dtype)
    workers = -(-args.workers // world.local_size)
    bad, slices = BadFiles(source, args.max_bad_files), (world.slice, world.slices)
    if part != "train":
        dataset = ImageBatches(source, args.image_size, args.seed, train=False)
        sampler = EvalSampler(len(source), args.batch_size, slices)
        return Batches(dataset, sampler, bad, place, workers)
    if len(source) < 2 * world.slices * args.accum_steps:
        raise UserError(
            f"{len(source)} training images are too few for {world.slices} processes x "
            f"{args.accum_steps} accumulation steps (at least 2 for each)",
            on_every_rank=True,
        )
    dataset = ImageBatches(source, args.image_size, args.seed, True, args.crop_scale)
    sampler = TrainSampler(len(source), args.batch_size, slices, args.accum_steps, args.seed)
    sampler.sizes = args.epoch_sizes
    batches = Batches(dataset, sampler, bad, place, workers)
    addons.change_training_batches(batches, args, len(source.classes))
    return batches
