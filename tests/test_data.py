"""Batches: the same pixels on any number of workers and ranks, and what unreadable files do."""

import os
import re
import signal
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import eval_view, python
from PIL import Image
from torch.utils.data._utils import signal_handling
from torchvision.transforms.v2 import functional as tv

from utils import options
from utils.data import augment
from utils.data import images as im
from utils.data.dataset import ImageBatches
from utils.data.index import ImageIndex
from utils.data.loaders import BadFiles, Batches, build_loaders
from utils.data.preprocessing import MEAN, STD
from utils.data.ring import Worker
from utils.errors import UserError
from utils.launch.world import World
from utils.metrics import UNREADABLE
from utils.samplers import Batch, EvalSampler, TrainSampler

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
CPU = World(torch.device("cpu"))
IMAGES, SIZE, SEED = 24, 16, 3
PLACE = (CPU.device, torch.contiguous_format, torch.float32)


@pytest.fixture
def index(tmp_path) -> ImageIndex:
    """Noise, but the blue of every pixel of image i is 10 * i, however it is cropped."""
    source = np.random.default_rng(0)
    for i in range(IMAGES):
        pixels = source.integers(0, 256, (20 + i, 30, 3), np.uint8)
        pixels[..., 2] = 10 * i
        path = tmp_path / "train" / f"class_{i // 8}" / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return ImageIndex(tmp_path / "train", ["class_0", "class_1", "class_2"])


def spoil(index, *images):
    """Make files unreadable, each in another way."""
    for number, image in enumerate(images):
        with open(index.path(image), "r+b") as file:
            file.truncate((0, 60, 400)[number % 3])


def numbers(images):
    """Which files the rows of a uint8 batch [n, s, s, 3] come from."""
    blue = images[..., 2].flatten(1)
    assert (blue == blue[:, :1]).all()
    return (blue[:, 0] // 10).tolist()


def fetch(index, wanted, train=True, epoch=0, seed=SEED):
    dataset = ImageBatches(index, SIZE, seed, train)
    return dataset.__getitems__(Batch(epoch, np.array(wanted)))


def epoch_pixels(index, ranks=1, workers=0, epoch=0, seed=SEED, start=0):
    """Image -> (its float pixels, its target) in a training epoch, as all ranks together see it."""
    seen = {}
    for rank in range(ranks):
        sampler = TrainSampler(IMAGES, 12 // ranks, (rank, ranks), 1, seed)
        sampler.start_at(epoch, start)
        dataset = ImageBatches(index, SIZE, seed, train=True)
        batches = Batches(dataset, sampler, BadFiles(index, 0), PLACE, workers)
        for asked, (images, targets) in zip(sampler, batches, strict=True):
            for image, pixels, target in zip(asked.indices, images, targets, strict=True):
                seen[int(image)] = (pixels, int(target))
    return seen


def equal(one, other):
    return [torch.equal(one[i][0], other[i][0]) and one[i][1] == other[i][1] for i in one]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 3), (2, 0), (4, 1)])
def test_pixels_are_the_same_for_any_workers_and_ranks(index, ranks, workers):
    expected = epoch_pixels(index)
    assert sorted(expected) == list(range(IMAGES))
    got = epoch_pixels(index, ranks, workers)
    assert sorted(got) == sorted(expected)
    assert all(equal(expected, got)), "bit for bit"
    assert all(target == index.targets[i] for i, (_, target) in got.items())


def test_pixels_of_the_rest_of_an_epoch_are_those_of_the_whole_one(index):
    rest = epoch_pixels(index, ranks=2, workers=1, start=1)
    assert len(rest) == IMAGES // 2
    assert all(equal(rest, epoch_pixels(index)))


@pytest.mark.parametrize("change", [{"epoch": 1}, {"seed": SEED + 1}])
def test_pixels_differ_between_epochs_and_seeds(index, change):
    assert not any(equal(epoch_pixels(index), epoch_pixels(index, **change)))


def test_images_of_a_batch_are_cropped_independently(index):
    """Sixteen times the same picture under other numbers: sixteen different crops, of any area."""
    data = open(index.path(0), "rb").read()
    for i in range(16):
        with open(index.path(i), "wb") as file:
            file.write(data)
    images, _, _ = fetch(index, range(16))
    assert len({row.numpy().tobytes() for row in images}) == 16
    whole = ImageBatches(index, SIZE, SEED, train=True, crop_scale=1.0)
    assert not torch.equal(whole.__getitems__(Batch(0, np.arange(16)))[0], images)


def test_persistent_workers_follow_the_sampler(index):
    """One `Batches` serves all epochs; its workers must not go on with the first one's order."""
    sampler = TrainSampler(IMAGES, 12, (0, 1), 1, SEED)
    dataset = ImageBatches(index, SIZE, SEED, train=True)
    batches = Batches(dataset, sampler, BadFiles(index, 0), PLACE, 1)
    for epoch in (0, 1):
        sampler.start_at(epoch, 0)
        got = torch.cat([images for images, _ in batches])
        expected = epoch_pixels(index, epoch=epoch)
        order = [i for asked in sampler for i in asked.indices]
        assert torch.equal(got, torch.stack([expected[i][0] for i in order]))


def test_a_worker_that_dies_while_it_hands_a_batch_over_is_named(index):
    """What comes first is the end of its socket; what tells more is SIGCHLD. An alarm plays it."""

    class Broken:
        def __iter__(self):
            yield from ()
            raise EOFError

    def handler(signum, frame):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    sampler = EvalSampler(IMAGES, 8, (0, 1))
    batches = Batches(ImageBatches(index, SIZE, SEED, False), sampler, BadFiles(index, 0), PLACE, 0)
    batches.loader = Broken()
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(RuntimeError, match="pid 7"):
            list(batches)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_that_meets_a_starting_worker_does_not_end_it(index, monkeypatch, signum):
    """As from a terminal or scheduler, at once after the fork and once DataLoader is set up."""
    run, set_up = Worker.run, signal_handling._set_worker_signal_handlers

    def hit(call, *arguments):
        os.kill(os.getpid(), signum)
        call(*arguments)
        os.kill(os.getpid(), signum)

    monkeypatch.setattr(Worker, "run", lambda self: hit(run, self))
    monkeypatch.setattr(signal_handling, "_set_worker_signal_handlers", lambda: hit(set_up))
    sampler = EvalSampler(IMAGES, 8, (0, 1))
    batches = Batches(ImageBatches(index, SIZE, SEED, False), sampler, BadFiles(index, 0), PLACE, 2)
    assert sum(len(images) for images, _ in batches) == IMAGES
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "the training process listens again"


def test_unreadable_image_is_replaced_by_the_next_readable_one(index):
    intact, _, _ = fetch(index, range(IMAGES))
    spoil(index, 4, 5, 15, 23)
    images, targets, reading = fetch(index, range(IMAGES))
    expected = list(range(IMAGES))
    expected[4] = expected[5] = 6
    expected[15], expected[23] = 16, 0
    assert numbers(images) == expected
    assert targets.tolist() == [index.targets[i] for i in expected]
    assert {i for i, _ in reading.faults} == {4, 5, 15, 23}
    assert all(reason for _, reason in reading.faults)
    others = [i for i in range(IMAGES) if expected[i] == i]
    assert torch.equal(images[others], intact[others]), "no other sample moves"


@contextmanager
def no_longer_than(seconds):
    """Fail instead of hanging. Not by an OSError, which a reader takes for an unreadable file."""

    def handler(signum, frame):
        pytest.fail("it hangs")

    before = signal.signal(signal.SIGALRM, handler)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_pipe_a_device_or_nothing_in_place_of_an_image_is_an_unreadable_one(index):
    for image in (4, 7, 9, 11):
        os.remove(index.path(image))
    os.mkfifo(index.path(4))
    os.mkfifo(index.path(7))
    os.symlink("/dev/null", index.path(9))
    held = os.open(index.path(7), os.O_RDWR)  # a writer who writes nothing
    try:
        with no_longer_than(20):
            images, _, reading = fetch(index, [3, 4, 7, 9, 11])
    finally:
        os.close(held)
    assert numbers(images) == [3, 5, 8, 10, 12]
    assert [i for i, _ in reading.faults] == [4, 7, 9, 11]
    pipe = "it is a pipe or a device, not a file"
    assert [reason for _, reason in reading.faults[:3]] == [pipe] * 3
    assert "No such file" in reading.faults[3][1]


def test_evaluation_marks_unreadable_images(index):
    intact, _, _ = fetch(index, range(IMAGES), train=False)
    spoil(index, 0, 9, 23)
    images, targets, reading = fetch(index, range(IMAGES), train=False)
    good = [i for i in range(IMAGES) if i not in (0, 9, 23)]
    assert torch.equal(images[good], intact[good])
    expected = np.where(np.isin(np.arange(IMAGES), good), index.targets, UNREADABLE)
    assert targets.tolist() == expected.tolist()
    assert [i for i, _ in reading.faults] == [0, 9, 23]


@pytest.mark.parametrize("resize", [None, SIZE])
def test_evaluation_shows_centre_crops(index, resize):
    dataset = ImageBatches(index, SIZE, SEED, train=False, resize=resize)
    images, _, _ = dataset.__getitems__(Batch(5, np.array([2, 3])))
    for row, i in zip(images, (2, 3), strict=True):
        assert torch.equal(
            row, eval_view(im.decode(open(index.path(i), "rb").read()), SIZE, resize)
        )


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_files_are_named_once_and_limited(index, logged, workers):
    spoil(index, 4, 5, 15)
    sampler = TrainSampler(IMAGES, 12, (0, 1), 1, SEED)
    dataset = ImageBatches(index, SIZE, SEED, train=True)
    bad = BadFiles(index, 3)
    batches = Batches(dataset, sampler, bad, PLACE, workers)
    for epoch in range(2):
        sampler.start_at(epoch, 0)
        assert sum(len(images) for images, _ in batches) == IMAGES
    assert set(bad.seen) == {4, 5, 15}
    assert len(logged) == 3
    assert all(any(index.path(i) in line for line in logged) for i in (4, 5, 15))
    assert not bad.too_many
    bad.limit = 2
    assert bad.too_many
    assert re.search(r"more than 2 image files.*--max-bad-files", str(bad.error()))
    bad.seen.clear()
    logged.clear()
    list(batches)
    assert len(bad.seen) == len(logged) == 3, "past the limit nothing more is named"


def test_all_files_unreadable_ends_by_the_limit(index):
    spoil(index, *range(IMAGES))
    sampler = TrainSampler(IMAGES, 12, (0, 1), 1, SEED)
    bad = BadFiles(index, IMAGES - 1)
    with pytest.raises(UserError, match="--max-bad-files"):
        list(Batches(ImageBatches(index, SIZE, SEED, train=True), sampler, bad, PLACE, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_normalisation_is_torchvisions_rounded_once(index, layout, dtype):
    sampler = EvalSampler(IMAGES, 10, (0, 1))
    dataset = ImageBatches(index, SIZE, SEED, train=False)
    batches, exact = (
        list(Batches(dataset, sampler, BadFiles(index, 0), (CPU.device, layout, kind), 0))
        for kind in (dtype, torch.float32)
    )
    assert [len(images) for images, _ in batches] == [10, 10, 4]
    for asked, (images, _), (whole, _) in zip(sampler, batches, exact, strict=True):
        raw, _, _ = fetch(index, asked.indices, train=False)
        floats = tv.to_dtype(raw.permute(0, 3, 1, 2), torch.float32, scale=True)
        torch.testing.assert_close(whole, tv.normalize(floats, MEAN, STD), rtol=0, atol=2e-6)
        assert torch.equal(images, whole.to(dtype))
        assert images.is_contiguous(memory_format=layout)
    assert (MEAN, STD) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_is_counted(index, workers):
    sampler = TrainSampler(IMAGES, 12, (0, 1), 1, SEED)
    dataset = ImageBatches(index, SIZE, SEED, train=True)
    batches = Batches(dataset, sampler, BadFiles(index, 0), PLACE, workers)
    for _ in range(2):
        batches.start_count()
        list(batches)
        assert batches.reading.files == IMAGES
        assert batches.reading.bytes == sum(
            os.path.getsize(index.path(image)) for image in range(IMAGES)
        )
        assert 0 < batches.reading.read_seconds < batches.reading.seconds
        assert batches.waited > 0


@pytest.mark.parametrize(("policy", "erasing"), [("ra", 0.0), ("ta_wide", 0.5), (None, 1.0)])
def test_extra_augmentation_is_a_function_of_seed_epoch_and_image(index, policy, erasing):
    plain = fetch(index, range(IMAGES))[0]
    dataset = ImageBatches(index, SIZE, SEED, train=True)
    dataset.augment = augment.build(policy, erasing)
    before = torch.random.get_rng_state()
    got = dataset.__getitems__(Batch(0, np.arange(IMAGES)))[0]
    torch.rand(3)
    turned = dataset.__getitems__(Batch(0, np.arange(IMAGES)[::-1].copy()))[0].flip(0)
    assert torch.equal(got, turned)
    assert not torch.equal(got, plain)
    assert not torch.equal(got, dataset.__getitems__(Batch(1, np.arange(IMAGES)))[0])
    torch.random.set_rng_state(before)
    fetched = torch.rand(1)
    torch.random.set_rng_state(before)
    dataset.__getitems__(Batch(0, np.arange(4)))
    assert torch.equal(torch.rand(1), fetched), "the training process's own random state"
    dataset.train = False
    centre = fetch(index, range(IMAGES), train=False)[0]
    assert torch.equal(dataset.__getitems__(Batch(0, np.arange(IMAGES)))[0], centre)


def test_views_of_an_image_are_other_crops_of_it(index):
    """Repeated augmentation: index i + v x images is view v of image i."""
    dataset = ImageBatches(index, 32, 0, train=True)
    batch = Batch(0, np.array([3, 3 + len(index), 3 + 2 * len(index), 3]))
    images, targets, reading = dataset.__getitems__(batch)
    assert targets.tolist() == [index.targets[3]] * 4
    assert torch.equal(images[0], images[3])
    assert len({image.numpy().tobytes() for image in images}) == 3
    assert not reading.faults


def build(root, *line):
    """The loaders of a command line."""
    parser = options.build_parser("", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "sys.argv", ["x", "-b", "4", "-j", "0", "--image-size", "32", *line, str(root)]
        )
        return build_loaders(options.parse(parser), CPU, torch.float32)


def test_loaders_of_a_folder(folder):
    loaders = build(folder)
    assert loaders.classes == ["class_0", "class_1", "class_2"]
    assert (len(loaders.train), len(loaders.val), loaders.test) == (15, 6, None)
    two = build(folder, "--classes", "2", "-e")
    assert (two.classes, two.train, len(two.val)) == (["class_0", "class_1"], None, 4)


def test_loaders_of_a_folder_without_training_images(folder, tmp_path):
    (tmp_path / "val").symlink_to(folder / "val")
    (tmp_path / "test").symlink_to(folder / "val")
    loaders = build(tmp_path, "-e")
    assert (loaders.train, len(loaders.val), len(loaders.test)) == (None, 6, 6)
    with pytest.raises(UserError, match="train is missing"):
        build(tmp_path)


def test_too_few_images_are_refused(folder):
    with pytest.raises(UserError, match="60 training images are too few"):
        build(folder, "--accum-steps", "31")


HOLDS_AN_ITERATOR = """
import sys
from test_data import build
batches = iter(build(sys.argv[1], "-j", "2").train)
next(batches)
print("done")
"""


@pytest.mark.long
def test_a_script_that_holds_an_iterator_to_its_end_ends(folder):
    done = python(
        "-c", HOLDS_AN_ITERATOR, folder, PYTHONPATH=str(Path(__file__).parent), timeout=100
    )
    assert (done.code, done.out) == (0, "done\n"), done.err
