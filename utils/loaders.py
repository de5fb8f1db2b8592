"""From images to batches on the device: a ring in memory that workers fill, and the upload.

Workers write pixels straight into a slot of the ring, and slots are reused: no batch is allocated,
copied into shared memory, or mapped into another process. The memory is anonymous, so it neither
fills /dev/shm nor outlives the processes.

Only the training process assigns slots: it names a free one when it asks for a batch, and frees it
(`Ring.free_after`) when the batch has been copied or uploaded.

Workers have the signals that stop a run blocked from the fork on. Ctrl-C and a scheduler's SIGTERM
go to the whole process group, but the training process needs its workers until the snapshot is
written. Ignoring the signals would leave a gap after the fork, and DataLoader installs a handler of
SIGTERM.
"""

import functools
import logging
import mmap
import os
import signal
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
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
    """A worker's answer to a `Batch`: its images are in ``slot``; ``targets`` are int64 [images].

    ``size`` is the images' side, pixels; 0: that of the ring.
    """

    slot: int
    targets: np.ndarray
    reading: Reading
    size: int


class Ring:
    """``slots`` times room for ``batch`` images of ``size`` x ``size`` pixels and their targets.

    ``images`` are uint8 [slots, batch, size, size, 3], ``targets`` int64 [slots, batch]. Raises:
    `UserError` if there is no memory for them.
    """

    def __init__(self, slots: int, batch: int, size: int):
        shape = (slots, batch, size, size, 3)
        pixels = -(-int(np.prod(shape)) // PAGE) * PAGE
        try:
            memory = mmap.mmap(-1, pixels + slots * batch * 8)
        except (OSError, ValueError, OverflowError):
            raise UserError(
                f"no memory for {slots} batches of {batch} images of {size} x {size} pixels "
                f"({pixels / 1e9:.1f} GB): use fewer workers (-j) or a smaller -b"
            ) from None
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self.images = whole[: np.prod(shape)].view(shape)
        self.targets = whole[pixels:].view(torch.int64).view(slots, batch)
        self._whole = whole
        self._free: deque[tuple[int, torch.cuda.Event | None]] = deque()

    def slot_view(self, slot: int, number: int, size: int = 0) -> Tensor:
        """The place of ``number`` images in a slot: uint8 [number, size, size, 3], contiguous.

        ``size`` 0: the ring's.
        """
        images = self.images[slot]
        if size in (0, images.shape[1]):
            return images[:number]
        return images.view(-1)[: number * size * size * 3].view(number, size, size, 3)

    def restart(self) -> None:
        """Free the slots of batches that an interrupted iteration did not fetch.

        Call it when no worker writes: before the first task of an iteration.
        """
        known = {slot for slot, _ in self._free}
        self._free.extend((slot, None) for slot in range(len(self.images)) if slot not in known)

    def take(self) -> int:
        """The slot that was freed first, once its upload has passed."""
        slot, passed = self._free.popleft()
        if passed is not None:
            passed.synchronize()
        return slot

    def free_after(self, slot: int, passed: torch.cuda.Event | None = None) -> None:
        """Free a slot, to be written again after the event ``passed`` (None: at once)."""
        self._free.append((slot, passed))

    def lock_pages(self) -> None:
        """Page-lock the ring, so that the GPU copies from it while it computes.

        Call it once, after the workers were forked. If it fails, uploads are only slower.
        """
        place, size = self._whole.data_ptr(), self._whole.nbytes
        runtime = torch.cuda.cudart()
        if code := int(runtime.cudaHostRegister(place, size, PORTABLE)):
            text = f"{size / 1e9:.1f} GB of batches could not be page-locked (CUDA error {code})"
            log.warning(f"{text}: uploads are slower; ulimit -l may be too low")
            return
        # Not at the interpreter's exit, after CUDA's.
        weakref.finalize(self, runtime.cudaHostUnregister, place).atexit = False


class RingLoader:
    """The batches of ``dataset`` that ``sampler`` asks for, in slots of a ring.

    Iterating gives `Filled`; free each slot with ``ring.free_after`` before taking the next.
    ``page_locked``: for uploads to a GPU. Workers stay for all iterations; the one after an
    interrupted iteration waits until they have finished their tasks.
    """

    def __init__(
        self,
        dataset: ImageBatches,
        sampler: TrainSampler | EvalSampler,
        workers: int,
        page_locked: bool = False,
    ):
        self.page_locked = page_locked
        self.slots = PREFETCH * workers + MORE_SLOTS
        self.tasks = Tasks(dataset, sampler)
        # Each process would say so for each loader. More workers than cores help with a slow disk.
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        self._loader = DataLoader(
            self.tasks,
            batch_sampler=self.tasks,
            num_workers=workers,
            prefetch_factor=PREFETCH if workers else None,
            collate_fn=lambda filled: filled,
            # A spawned process would spawn its workers, and each would import torch.
            multiprocessing_context=WorkerContext() if workers else None,
            persistent_workers=workers > 0,
        )

    @functools.cached_property
    def ring(self) -> Ring:
        """Made with the first iteration: until then the size of the images may change."""
        return Ring(self.slots, self.tasks.sampler.largest, self.tasks.dataset.size)

    def __iter__(self) -> Iterator[Filled]:
        self.tasks.ring = self.ring  # before the workers are forked
        filled = iter(self._loader)
        if self.page_locked:
            self.ring.lock_pages()
            self.page_locked = False
        yield from filled


class Tasks(Dataset):
    """DataLoader's ``batch_sampler``, the sampler's batches with a slot for each, and its
    ``dataset``, which fills a slot, in a worker."""

    def __init__(self, dataset: ImageBatches, sampler: TrainSampler | EvalSampler):
        self.dataset, self.sampler = dataset, sampler
        self.ring: Ring

    def __iter__(self) -> Iterator[Batch]:
        # A generator starts with its first item. DataLoader asks for that when all workers have
        # finished the tasks of an interrupted iteration.
        self.ring.restart()
        for batch in self.sampler:
            yield batch._replace(slot=self.ring.take())

    def __getitems__(self, batch: Batch) -> Filled:
        images = self.ring.slot_view(batch.slot, len(batch.indices), batch.size)
        return Filled(batch.slot, *self.dataset.fill(images, batch), batch.size)


class Worker(ForkProcess):
    """A forked process with `STOPS` blocked, which exits with the training process."""

    def start(self) -> None:
        """Fork; the child keeps the mask of signals."""
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
        """In the child."""
        launch.die_with_parent(self._trainer)
        super().run()


class WorkerContext(ForkContext):
    """For ``DataLoader(multiprocessing_context=...)``."""

    @property
    def Process(self) -> type[Worker]:  # the name that DataLoader calls
        """The class of the workers."""
        return addons.worker_class() or Worker


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
        """Let every rank know what all have seen, so that rank 0's log names each file."""
        for seen in gather(dict(self.seen), world):
            self.note(list(seen.items()))

    def error(self) -> UserError:
        """The error for too many, to raise in every rank after `share`."""
        last = self.source.path(list(self.seen)[-1])
        return UserError(
            f"more than {self.limit} image files could not be read (--max-bad-files), the last "
            f"one {last}: check the disk and the copy of the data set",
            on_every_rank=True,
        )


Place = tuple[int, int, int]  # epoch, step, number in the step


class MicroBatch(NamedTuple):
    """A part of a training step, on the device, and its place."""

    images: Tensor  # [n, 3, size, size], normalised
    targets: Tensor  # int64 [n], or float [n, classes] where images are mixed
    labels: Tensor  # int64 [n], for the metrics
    weight: float  # of its mean loss: world size x share of the global batch
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
        """Make images as ``how`` says. Before the first iteration, which starts the workers."""
        if isinstance(self.sampler, TrainSampler):  # the largest, where they grow
            self.dataset.size = max(self.sampler.sizes, default=how.image_size)
        else:
            self.dataset.size = how.crop
        self.dataset.resize = how.val_resize_size
        self.dataset.interpolation = how.interpolation
        self._normalise_by(how.mean, how.std)

    def _normalise_by(self, mean: Channels, std: Channels) -> None:
        scale = [1 / (255 * s) for s in std]
        shift = [-m / s for m, s in zip(mean, std, strict=True)]
        # For all values of a row of pixels: three channels in turn are too short to be vectorised.
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
        for filled in self._loaded():
            self.waited += time.perf_counter() - before
            self.reading.add(filled.reading)
            self.bad.note(filled.reading.unreadable)
            if self.dataset.train and (filled.targets == UNREADABLE).any():
                # Nor is there a replacement. Other ranks may not have noticed: this one reports it.
                raise UserError(str(self.bad.error()))
            yield self._upload(filled)
            before = time.perf_counter()

    def rest(self, epoch: int, step: int) -> Iterator[MicroBatch]:
        """The training batches of an epoch from ``step`` on."""
        sampler = self.sampler
        sampler.start_at(epoch, step)
        for count, (images, targets) in enumerate(self if step < sampler.steps_per_epoch else ()):
            done, number = divmod(count, sampler.accum)
            place = (epoch, step + done, number)
            weight = len(targets) * sampler.slices / sampler.global_batch
            mixed = self.mix(images, targets, place) if self.mix else (images, targets, targets)
            yield MicroBatch(*mixed, weight, place, number == 0, number + 1 == sampler.accum)

    def _loaded(self) -> Iterator[Filled]:
        try:
            yield from self.loader
        except (EOFError, ConnectionError, FileNotFoundError):
            # A worker died while it handed a batch over: wait for SIGCHLD, whose handler raises the
            # error that names it.
            time.sleep(5)
            raise

    def _upload(self, filled: Filled) -> tuple[Tensor, Tensor]:
        """The batch on the device, normalised; its slot is free again when that is done."""
        ring = self.loader.ring
        slot, number = filled.slot, len(filled.targets)
        images = ring.slot_view(slot, number, filled.size)
        if self.stream is None:
            batch = self._normalise(images), torch.from_numpy(filled.targets)
            ring.free_after(slot)
            return batch
        targets = ring.targets[slot, :number].copy_(torch.from_numpy(filled.targets))
        # On a stream of its own the copy runs while the device still computes the last step.
        with torch.cuda.stream(self.stream):
            images = images.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            ring.free_after(slot, self.stream.record_event())
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
    root = Path(args.data)
    evaluate_only = args.evaluate and not has_part(root / "train")
    parts = ["val", "test"] if has_part(root / "test") else ["val"]
    if args.evaluate:
        parts = [args.part]

    def find_classes() -> list[str]:
        folders = class_folders(root / (args.part if evaluate_only else "train"))
        classes = addons.select_classes(args.classes, folders)
        for part in parts:
            check_same_classes(root, part, classes, subset=bool(args.classes))
        return classes

    # The first process of a node makes the index of tar files; the others read its cache.
    classes = first_on_node(find_classes, world)
    if not args.evaluate:
        parts.insert(0, "train")
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
    train = part == "train"
    dataset = ImageBatches(source, args.image_size, args.seed, train, args.crop_scale)
    slices, batch = (world.slice, world.slices), args.batch_size
    sampler: TrainSampler | EvalSampler = EvalSampler(len(source), batch, slices)
    if train:
        if len(source) < 2 * world.slices * args.accum_steps:
            raise UserError(
                f"{len(source)} training images are too few for {world.slices} processes x "
                f"{args.accum_steps} accumulation steps (at least 2 for each)",
                on_every_rank=True,
            )
        sampler = TrainSampler(len(source), batch, slices, args.accum_steps, args.seed)
        sampler.sizes = args.epoch_sizes
    place = (world.device, args.memory_format, dtype)
    workers = -(-args.workers // world.local_size)
    batches = Batches(dataset, sampler, BadFiles(source, args.max_bad_files), place, workers)
    if train:
        addons.change_training_batches(batches, args, len(source.classes))
    return batches
