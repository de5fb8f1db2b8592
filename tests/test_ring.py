"""The ring: no slot is written before its batch was copied, whatever the consumer does."""

import contextlib
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from batches import SEED, SIZE, batches_of, fetch, noise_index
from torch.utils.data import get_worker_info
from torchvision.transforms.v2.functional import normalize

from utils.data.being_read import BeingRead
from utils.data.images import ImageBatches
from utils.data.preprocessing import IMAGENET
from utils.data.ring import Ring
from utils.data.samplers import Batch, TrainSampler
from utils.data.sources import Source
from utils.data.workers import Worker
from utils.start.errors import UserError

IMAGES, BATCH = 30, 2


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Source:
    return noise_index(tmp_path_factory.mktemp("ring"), IMAGES, "jpg", 90, 70)


def sampler() -> TrainSampler:
    """15 batches: more than the ring of two workers has slots."""
    return TrainSampler(IMAGES, BATCH, (0, 1), 1, SEED)


def plain(index):
    """The batches of the epoch without workers, ring, or partial decoding."""
    dataset = ImageBatches(index, SIZE, SEED, train=True, regions=None)
    return [fetch(dataset, batch.indices)[:2] for batch in sampler()]


def assert_same(got, expected):
    for batch, other in zip(got, expected, strict=True):
        torch.testing.assert_close([*batch], [*other], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_consumer_may_keep_batches_leave_and_begin_again(index, workers):
    batches, kept = batches_of(index, sampler(), workers), []
    shown = ((images.permute(0, 3, 1, 2) / 255, targets) for images, targets in plain(index))
    how = (IMAGENET.mean, IMAGENET.std)
    expected = [(normalize(images, *how), targets) for images, targets in shown]
    for taken in (1, 2, 7):
        kept += zip(batches, expected[:taken], strict=False)
    for _ in range(2):
        assert_same(batches, expected)
    assert_same(*zip(*kept, strict=True))
    mapped = Path("/proc/self/maps").read_text()
    assert "/torch_" not in mapped, "the size of /dev/shm does not matter"


def test_a_worker_killed_while_it_fills_a_slot_is_named(index):
    class Deadly(ImageBatches):
        def fill(self, images: torch.Tensor, targets: torch.Tensor, batch: Batch):
            if get_worker_info() and 7 in batch.indices:  # in a worker
                os.kill(os.getpid(), signal.SIGKILL)
            return super().fill(images, targets, batch)

    batches = batches_of(index, sampler(), 2)
    batches.loader.ring.dataset = Deadly(index, SIZE, SEED, train=True)
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid"):
        list(batches)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_meets_a_starting_worker_does_not_end_it(index, monkeypatch, signum):
    """As from a terminal or scheduler, at once after the fork."""
    run = Worker.run

    def hit(worker):
        os.kill(os.getpid(), signum)
        run(worker)

    monkeypatch.setattr(Worker, "run", hit)
    batches = batches_of(index, sampler(), workers=2)
    assert sum(len(images) for images, _ in batches) == IMAGES
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "the training process listens again"


def test_a_process_that_exits_ends_its_workers():
    """As multiprocessing does at exit; the script would wait for one that goes on."""
    worker = Worker(target=time.sleep, args=(60,))
    worker.start()
    worker.terminate()
    worker.join(30)
    assert worker.exitcode == -signal.SIGKILL


def test_each_worker_has_a_place_for_the_image_that_it_reads(monkeypatch):
    reads = BeingRead(workers=3)
    for number in (1, 2):
        worker = SimpleNamespace(id=number)
        monkeypatch.setattr("utils.data.being_read.get_worker_info", lambda worker=worker: worker)
        with reads.batch():
            reads.note(number)
            assert reads.describe(str) == f"it is reading {number}"


def ring_of(slots, batch, size) -> Ring:
    return Ring(SimpleNamespace(size=size), SimpleNamespace(largest=batch), slots)


def test_too_little_memory_is_an_error_line():
    with pytest.raises(UserError, match=r"no memory for 18 batches of 1000000000 images.*-j"):
        ring_of(18, 10**9, 224)


# ---- the way to a GPU


def test_pages_are_locked_and_given_back(monkeypatch, logged):
    runtime = mock.Mock()
    runtime.cudaHostRegister.side_effect = [0, 2]
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    ring = ring_of(3, 2, 8)
    ring.lock_pages()
    (place, size, _), _ = runtime.cudaHostRegister.call_args
    images, targets = ring.view(0, 2, 8)[0], ring.view(2, 2, 8)[1]
    assert place == images.data_ptr()
    assert place + size == targets.data_ptr() + targets.nbytes
    del images, targets
    runtime.cudaHostUnregister.assert_not_called()
    del ring
    runtime.cudaHostUnregister.assert_called_once_with(place)
    ring_of(3, 2, 8).lock_pages()
    assert "could not be page-locked" in logged[0]


class Event(list):
    """The copies that were issued before it; they happen when it is waited for, at last."""

    def synchronize(self):
        while self:
            to, source = self.pop()
            to.copy_(source)


class Stream:
    """Stands in for a CUDA stream."""

    def __init__(self):
        self.copies, self.events, self.uploaded = [], [], []

    def upload(self, tensor):
        """In place of `Tensor.to`."""
        self.copies.append((torch.empty_like(tensor), tensor))
        return self.copies[-1][0]

    def record_event(self):
        assert len(self.copies) == 2, "of images and of targets"
        self.uploaded.append(tuple(to for to, _ in self.copies))
        self.events.append(Event(self.copies))
        self.copies = []
        return self.events[-1]

    def wait_stream(self, other):
        pass


@pytest.mark.parametrize("workers", [0, 2])
def test_no_slot_is_written_before_its_upload_has_passed(index, monkeypatch, workers):
    runtime, stream = mock.Mock(), Stream()
    runtime.cudaHostRegister.return_value = 0
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    expected = 2 * plain(index)
    batches = batches_of(index, sampler(), workers)
    batches.stream, batches.loader.page_locked = stream, True
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: stream.upload(tensor))
    assert len([*batches, *batches]) == len(expected)
    runtime.cudaHostRegister.assert_called_once()
    waiting = [event for event in stream.events if event]
    assert 0 < len(waiting) <= len(batches.loader.ring.uploads)
    for event in waiting:
        event.synchronize()
    assert_same(stream.uploaded, expected)
