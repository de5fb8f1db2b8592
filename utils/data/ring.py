"""A ring in memory, which loader workers fill with batches and from which batches are uploaded.

Workers write pixels straight into a slot of the ring, and slots are reused: no batch is allocated,
copied into shared memory, or mapped into another process. The memory is anonymous, so it neither
fills /dev/shm nor outlives the processes.
"""

import functools
import logging
import mmap
import warnings
import weakref
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from utils.data.being_read import BeingRead
from utils.data.images import ImageBatches, Reading
from utils.data.samplers import Batch
from utils.data.workers import WorkerContext
from utils.start.errors import UserError

log = logging.getLogger(__name__)
PREFETCH = 2  # batches per worker that are requested in advance
MORE_SLOTS = 2  # for the batch that is about to be uploaded, and for the one being uploaded
PAGE = mmap.PAGESIZE
PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device


class FilledSlot(NamedTuple):
    """A worker's answer to a `Batch`: the slot with its images and targets, see `Ring.view`."""

    slot: int
    images: int  # how many
    size: int  # their side, pixels
    reading: Reading


class Sampler(Protocol):
    """What asks a `Ring` for batches."""

    @property
    def largest(self) -> int: ...  # images in a batch, at most
    def __iter__(self) -> Iterator[Batch]: ...


class Upload(Protocol):
    """A `torch.cuda.Event` that completes when an upload has ended."""

    def synchronize(self) -> None: ...


class Ring(Dataset):
    """Both the sampler of DataLoader, which assigns a slot to each batch of ``sampler``, and its
    data set, which fills that slot in a worker.

    DataLoader returns batches in order and requests `PREFETCH` batches per worker in advance. So
    the slots are used in turn: when a slot is assigned again, the upload of its last batch has
    begun. ``uploads`` has an entry for each slot; None: there is nothing to wait for.
    """

    def __init__(self, dataset: ImageBatches, sampler: Sampler, slots: int):
        """Allocate ``slots``. Raises: `UserError` if there is not enough memory."""
        self.dataset, self.sampler = dataset, sampler
        self.uploads: list[Upload | None] = [None] * slots
        self.has_tried_locking = False
        batch, size = sampler.largest, dataset.size
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

    def __getitem__(self, batch: Batch) -> FilledSlot:
        where = (batch.slot, len(batch.indices), batch.size or self.dataset.size)
        return FilledSlot(*where, self.dataset.fill(*self.view(*where), batch))

    def lock_pages(self) -> None:
        """Page-lock the memory, so that the GPU copies from it while it computes.

        Call it after the workers were forked; again, it does nothing. If it fails, uploads are only
        slower.
        """
        if self.has_tried_locking:
            return
        self.has_tried_locking = True
        address, size = self.memory.data_ptr(), self.memory.nbytes
        runtime = torch.cuda.cudart()
        assert runtime is not None, "CUDA is initialised, as there are batches on a GPU"
        if code := int(runtime.cudaHostRegister(address, size, PORTABLE)):
            text = f"{size / 1e9:.1f} GB of batches could not be page-locked (CUDA error {code})"
            log.warning(f"{text}: uploads are slower; ulimit -l may be too low")
            return
        # Not at the interpreter's exit, as CUDA has ended by then.
        weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False


class RingLoader:
    """The batches of ``dataset`` that ``sampler`` asks for, in slots of a `Ring`.

    Iterating gives `FilledSlot`. A slot is valid until the next batch is requested, or until
    ``ring.uploads[slot]`` completes. ``page_locked``: for uploads to a GPU. Workers stay alive.
    After an interrupted iteration, the next one waits until they have finished their tasks.
    """

    def __init__(
        self,
        dataset: ImageBatches,
        sampler: Sampler,
        workers: int,
        page_locked: bool = False,
    ):
        self.dataset, self.sampler, self.workers = dataset, sampler, workers
        self.page_locked = page_locked

    @functools.cached_property
    def ring(self) -> Ring:
        """The slots, allocated for the first batch: until then the size of images may change."""
        return Ring(self.dataset, self.sampler, PREFETCH * self.workers + MORE_SLOTS)

    @functools.cached_property
    def _loader(self) -> DataLoader:
        self.ring.dataset.being_read = BeingRead(self.workers)  # before the workers are forked
        # DataLoader would warn in each process, but more workers than cores help on a slow disk.
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        return DataLoader(
            self.ring,
            sampler=self.ring,
            batch_size=None,
            num_workers=self.workers,
            prefetch_factor=PREFETCH if self.workers else None,
            collate_fn=lambda filled: filled,
            # Without it, a spawned process would spawn its workers, and each would import torch.
            multiprocessing_context=WorkerContext() if self.workers else None,
            persistent_workers=self.workers > 0,
        )

    def __iter__(self) -> Iterator[FilledSlot]:
        filled = iter(self._loader)  # the first time, this forks the workers
        if self.page_locked:
            self.ring.lock_pages()
        yield from filled

    def describe_wait(self) -> str:
        """A sentence about the batch that does not come."""
        dataset = self.ring.dataset
        return dataset.being_read.describe(dataset.source.path)
