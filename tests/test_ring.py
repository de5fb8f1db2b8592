"""The ring: no slot is written before its batch was copied, whatever the consumer does."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch
from batches import SEED, SIZE, batches_of, fetch, noise_index

from utils.data import ring as ring_module
from utils.data.dataset import ImageBatches
from utils.data.index import ImageIndex
from utils.data.ring import Ring, RingLoader
from utils.errors import UserError
from utils.metrics import UNREADABLE
from utils.samplers import Batch, EvalSampler, TrainSampler

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
IMAGES, BATCH = 30, 2


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> ImageIndex:
    return noise_index(tmp_path_factory.mktemp("ring"), IMAGES, "jpg", 90, 70)


def sampler() -> TrainSampler:
    """15 batches: more than the ring of two workers has slots."""
    return TrainSampler(IMAGES, BATCH, (0, 1), 1, SEED)


def plain(index):
    """The batches of the epoch without workers, ring, or partial decoding."""
    dataset = ImageBatches(index, SIZE, SEED, train=True)
    dataset.partly = False
    return [fetch(dataset, batch.indices)[:2] for batch in sampler()]


def same(batches, got, expected):
    """Whether ``got``, as `Batches` gives it, are the uint8 ones ``expected``."""
    return [
        torch.equal(images, batches._normalise(raw)) and torch.equal(targets, wanted)
        for (images, targets), (raw, wanted) in zip(got, expected, strict=True)
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_consumer_may_keep_batches_leave_and_begin_again(index, workers):
    batches, expected, kept = batches_of(index, sampler(), workers), plain(index), []
    assert len(sampler()) > batches.loader.slots
    for taken in (1, 2, 7):
        for number, batch in enumerate(batches, 1):
            kept.append((batch, expected[number - 1]))
            if number == taken:
                break
    for _ in range(2):
        assert all(same(batches, list(batches), expected))
    assert all(same(batches, *zip(*kept, strict=True))), "what was kept stays as it was"


class LateCopy:
    """An upload that happens as late as it may: when it is waited for."""

    def __init__(self, source):
        self.source, self.copy = source, None

    def synchronize(self):
        """Copy now."""
        if self.copy is None:
            self.copy = self.source.clone()


@pytest.mark.parametrize("workers", [0, 2])
def test_no_slot_is_written_before_its_upload_has_passed(index, workers):
    dataset = ImageBatches(index, SIZE, SEED, train=True)
    loader, uploads = RingLoader(dataset, sampler(), workers), []
    for _ in range(2):
        for filled in loader:
            uploads.append(LateCopy(loader.ring.images[filled.slot]))
            loader.ring.free_after(filled.slot, uploads[-1])
    done = [upload for upload in uploads if upload.copy is not None]
    assert len(done) >= len(uploads) - loader.slots, "slots have been used again"
    for upload in uploads:
        upload.synchronize()
    for upload, (images, _) in zip(uploads, 2 * plain(index), strict=True):
        assert torch.equal(upload.copy, images)


def test_a_slot_with_an_unreadable_image_shows_nothing_of_the_batch_before(index, tmp_path):
    (tmp_path / "a").mkdir()
    for i in range(8):
        data = Path(index.path(i)).read_bytes()
        (tmp_path / "a" / f"{i}.jpg").write_bytes(data if i < 6 else b"")
    few = ImageIndex(tmp_path, ["a"])
    dataset = ImageBatches(few, SIZE, SEED, train=False)
    loader, seen = RingLoader(dataset, EvalSampler(8, 1, (0, 1)), 0), []
    for filled in loader:
        seen.append((loader.ring.images[filled.slot].clone(), filled.targets.tolist()))
        loader.ring.free_after(filled.slot)
    assert [targets for _, targets in seen] == [[0]] * 6 + [[UNREADABLE]] * 2
    assert [bool(images.any()) for images, _ in seen] == [True] * 6 + [False] * 2


def test_a_worker_killed_while_it_fills_a_slot_is_named(index):
    class Deadly(ImageBatches):
        def fill(self, images: torch.Tensor, batch: Batch):
            if self.quietly and 7 in batch.indices:  # in a worker
                os.kill(os.getpid(), signal.SIGKILL)
            return super().fill(images, batch)

    batches = batches_of(index, sampler(), 2)
    batches.loader.into_ring.dataset = Deadly(index, SIZE, SEED, train=True)
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid"):
        list(batches)


def test_nothing_lies_in_dev_shm(index):
    """Neither under a name nor as a file without one, so that its size does not matter."""
    batches = iter(batches_of(index, sampler(), 2))
    kept = [next(batches), next(batches)]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    files = {line.split("/", 1)[1] for line in mapped if "/" in line}
    assert not [name for name in files if name.startswith(("torch_", "dev/shm/torch_"))]
    assert len(kept) == 2


def test_no_memory_is_a_sentence():
    with pytest.raises(UserError, match=r"no memory for 18 batches of 1000000000 images.*-j"):
        Ring(18, 10**9, 224)


class Runtime:
    """Stands in for CUDA's: notes what is page-locked."""

    def __init__(self, answer=0):
        self.answer, self.locked = answer, []

    def cudaHostRegister(self, place, size, flags):
        """Note it."""
        self.locked.append((place, size))
        return self.answer

    def cudaHostUnregister(self, place):
        """Forget it."""
        self.locked = [one for one in self.locked if one[0] != place]
        return 0


def test_pages_are_locked_and_given_back(monkeypatch, logged):
    runtime = Runtime()
    monkeypatch.setattr(ring_module.torch.cuda, "cudart", lambda: runtime)
    ring = Ring(3, 2, 8)
    ring.lock_pages()
    ((place, size),) = runtime.locked
    assert place == ring.images.data_ptr()
    assert place + size == ring.targets.data_ptr() + ring.targets.nbytes
    del ring
    assert not runtime.locked
    runtime.answer = 2
    Ring(3, 2, 8).lock_pages()
    assert "could not be page-locked" in logged[0]


class Stream:
    """Stands in for a CUDA stream on a machine without one."""

    def __init__(self):
        self.events, self.uploads = [], 0

    def upload(self, tensor):
        """In place of `Tensor.to`: a copy, counted."""
        self.uploads += 1
        return tensor.clone()

    def record_event(self):
        """An event that passes when it is waited for; of the uploads that were issued before."""
        assert self.uploads == 2 * len(self.events) + 2, "images and targets come before the event"
        self.events.append(LateCopy(torch.zeros(1)))
        return self.events[-1]

    def wait_stream(self, other):
        """Nothing to wait for."""


@pytest.mark.parametrize("workers", [0, 2])
def test_uploads_through_a_page_locked_ring(index, monkeypatch, workers):
    """The way to a GPU, with stand-ins for its runtime and streams."""
    runtime, stream = Runtime(), Stream()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    batches = batches_of(index, sampler(), workers)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, device, **_: stream.upload(x))
    batches.stream, batches.loader.page_locked = stream, True
    for _ in range(2):
        assert all(same(batches, list(batches), plain(index)))
    assert len(runtime.locked) == 1
    assert len(stream.events) == 2 * len(sampler())
    waited = [event for event in stream.events if event.copy is not None]
    assert len(waited) >= len(stream.events) - batches.loader.slots
