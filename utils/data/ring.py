"""A ring of batches in memory that the training process shares with its loader's workers.

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
import multiprocessing.connection
import os
import signal
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from multiprocessing.context import ForkContext, ForkProcess
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from utils.data.dataset import ImageBatches, Reading
from utils.errors import UserError
from utils.launch import supervise
from utils.samplers import Batch, EvalSampler, TrainSampler

log = logging.getLogger(__name__)
PREFETCH = 2  # batches per worker that are requested in advance
MORE_SLOTS = 2  # for the batch that is about to be uploaded, and for the one being uploaded
PAGE = mmap.PAGESIZE
PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device
BEGIN_SECONDS = 10.0  # a fork takes milliseconds, and repeating a slow one does no harm
TRIES = 5
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

    def room(self, slot: int, number: int, size: int = 0) -> Tensor:
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
        if fault := int(runtime.cudaHostRegister(place, size, PORTABLE)):
            text = f"{size / 1e9:.1f} GB of batches could not be page-locked (CUDA error {fault})"
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
        self.dataset, self.page_locked = dataset, page_locked
        self.slots = PREFETCH * workers + MORE_SLOTS
        self.tasks, self.into_ring = _Tasks(sampler), _IntoRing(dataset)
        # Each process would say so for each loader. More workers than cores help with a slow disk.
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        self._loader = DataLoader(
            self.into_ring,
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
        return Ring(self.slots, self.tasks.sampler.largest, self.dataset.size)

    def __iter__(self) -> Iterator[Filled]:
        self.tasks.ring = self.into_ring.ring = self.ring  # before the workers are forked
        filled = iter(self._loader)
        if self.page_locked:
            self.ring.lock_pages()
            self.page_locked = False
        yield from filled


class _Tasks:
    """A sampler's batches, each with a slot; a ``batch_sampler`` for DataLoader."""

    def __init__(self, sampler: TrainSampler | EvalSampler):
        self.sampler = sampler
        self.ring: Ring

    def __iter__(self) -> Iterator[Batch]:
        # A generator starts with its first item. DataLoader asks for that when all workers have
        # finished the tasks of an interrupted iteration.
        self.ring.restart()
        for batch in self.sampler:
            yield batch._replace(slot=self.ring.take())


class _IntoRing(Dataset):
    """``dataset``, its batches written into a ring."""

    def __init__(self, dataset: ImageBatches):
        self.dataset = dataset
        self.ring: Ring

    def __getitems__(self, batch: Batch) -> Filled:
        images = self.ring.room(batch.slot, len(batch.indices), batch.size)
        return Filled(batch.slot, *self.dataset.fill(images, batch), batch.size)


class Worker(ForkProcess):
    """A forked process with `STOPS` blocked; `start` returns when it runs.

    A fork that hangs is repeated: when one of torch's C++ threads is about to enter Python, the
    child may wait for the interpreter's lock forever
    (https://github.com/python/cpython/issues/112275, fixed in Python 3.12).
    """

    def start(self) -> None:
        """Fork until the child reports that it runs. Raises: RuntimeError when none does."""
        task = self._target, self._args, self._kwargs  # start() forgets them
        for _ in range(TRIES):
            self._target, self._args, self._kwargs = task
            self._pipe = os.pipe()
            self._trainer = os.getpid()
            before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
            try:
                super().start()  # the child keeps the mask
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(self._pipe[1])
            # Also at the end of the pipe: DataLoader finds out that the child has died.
            begun = multiprocessing.connection.wait([self._pipe[0]], BEGIN_SECONDS)
            os.close(self._pipe[0])
            if begun:
                # At exit, multiprocessing stops the workers of a live iterator by SIGTERM, which
                # is blocked, and would then wait for them forever.
                self._popen.terminate = self._popen.kill
                return
            self.kill()
            self.join()
            self._popen = None
        raise RuntimeError(f"{TRIES} forks of a data loading worker hung")

    def run(self) -> None:
        """In the child: exit with the training process, report that it runs, and do the task."""
        supervise.die_with_parent(self._trainer)
        os.write(self._pipe[1], b".")
        for end in self._pipe:
            os.close(end)
        super().run()


class WorkerContext(ForkContext):
    """For ``DataLoader(multiprocessing_context=...)``."""

    Process = Worker
