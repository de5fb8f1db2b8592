"""Batches: the same pixels on any number of workers and ranks, and what unreadable files do."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from batches import PLACE, SEED, SIZE, batches_of, noise_index
from batches import fetch as fetch_of
from conftest import eval_view, python
from torch.utils.data._utils import signal_handling
from torchvision.transforms.v2 import functional as tv

from utils import options
from utils.data import augment
from utils.data import images as im
from utils.data.dataset import ImageBatches
from utils.data.loaders import build_loaders
from utils.data.preprocessing import MEAN, STD
from utils.data.ring import Worker
from utils.errors import UserError
from utils.launch.world import World
from utils.metrics import UNREADABLE
from utils.samplers import EvalSampler, TrainSampler

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
IMAGES = 24
EVERY = range(IMAGES)


@pytest.fixture
def index(tmp_path):
    return noise_index(tmp_path / "train", IMAGES)


def sampler(rank=0, ranks=1, seed=SEED):
    return TrainSampler(IMAGES, 12 // ranks, (rank, ranks), 1, seed)


def spoil(index, *images):
    """Make files unreadable, each in another way."""
    for number, image in enumerate(images):
        os.truncate(index.path(image), (0, 60, 400)[number % 3])


def numbers(images):
    """Which files the rows of a uint8 batch [n, s, s, 3] come from."""
    blue = images[..., 2].flatten(1)
    assert (blue == blue[:, :1]).all()
    return (blue[:, 0] // 10).tolist()


def fetch(index, wanted, train=True, epoch=0):
    return fetch_of(ImageBatches(index, SIZE, SEED, train), wanted, epoch)


def epoch_pixels(index, ranks=1, workers=0, epoch=0, seed=SEED, start=0):
    """Image -> (its float pixels, its target) in a training epoch, as all ranks together see it."""
    seen = {}
    for rank in range(ranks):
        one = sampler(rank, ranks, seed)
        one.start_at(epoch, start)
        batches = batches_of(index, one, workers)
        batches.dataset.seed = seed
        for asked, (images, targets) in zip(one, batches, strict=True):
            for image, *found in zip(asked.indices.tolist(), images, targets.tolist(), strict=True):
                seen[image] = found
    return seen


def equal(one, other):
    return [torch.equal(one[i][0], other[i][0]) and one[i][1] == other[i][1] for i in one]


@pytest.mark.parametrize(
    ("ranks", "workers", "start"), [(1, 3, 0), (2, 0, 0), (4, 1, 0), (2, 1, 1)]
)
def test_pixels_are_the_same_for_any_workers_ranks_and_first_step(index, ranks, workers, start):
    expected, got = epoch_pixels(index), epoch_pixels(index, ranks, workers, start=start)
    assert sorted(expected) == list(EVERY)
    assert len(got) == IMAGES - 12 * start
    assert all(equal(got, expected)), "bit for bit"
    assert all(target == index.targets[i] for i, (_, target) in got.items())


@pytest.mark.parametrize("change", [{"epoch": 1}, {"seed": SEED + 1}])
def test_pixels_differ_between_epochs_and_seeds(index, change):
    assert not any(equal(epoch_pixels(index), epoch_pixels(index, **change)))


def test_images_of_a_batch_are_cropped_independently(index):
    """Sixteen times the same picture under other numbers: sixteen different crops, of any area."""
    for i in range(16):
        Path(index.path(i)).write_bytes(Path(index.path(0)).read_bytes())
    images = fetch(index, range(16))[0]
    assert len({row.numpy().tobytes() for row in images}) == 16
    whole = ImageBatches(index, SIZE, SEED, train=True, crop_scale=1.0)
    assert not torch.equal(fetch_of(whole, range(16))[0], images)


def test_views_of_an_image_are_other_crops_of_it(index):
    """Repeated augmentation: index i + v x images is view v of image i."""
    images, targets, reading = fetch(index, [3, 3 + IMAGES, 3 + 2 * IMAGES, 3])
    assert targets.tolist() == [index.targets[3]] * 4
    assert torch.equal(images[0], images[3])
    assert len({image.numpy().tobytes() for image in images}) == 3
    assert not reading.faults


def test_a_worker_that_dies_while_it_hands_a_batch_over_is_named(index, monkeypatch):
    """What comes first is the end of its socket; SIGCHLD, which tells more, comes in the wait."""

    class Broken:
        def __iter__(self):
            yield from ()
            raise EOFError

    def sigchld(seconds):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    batches = batches_of(index, EvalSampler(IMAGES, 8, (0, 1)))
    batches.loader = Broken()
    monkeypatch.setattr("time.sleep", sigchld)
    with pytest.raises(RuntimeError, match="pid 7"):
        list(batches)


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
    batches = batches_of(index, EvalSampler(IMAGES, 8, (0, 1)), workers=2)
    assert sum(len(images) for images, _ in batches) == IMAGES
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "the training process listens again"


def test_unreadable_image_is_replaced_by_the_next_readable_one(index):
    intact = fetch(index, EVERY)[0]
    spoil(index, 4, 5, 15)
    os.remove(index.path(23))
    images, targets, reading = fetch(index, EVERY)
    expected = list(EVERY)
    expected[4] = expected[5] = 6
    expected[15], expected[23] = 16, 0
    assert numbers(images) == expected
    assert targets.tolist() == [index.targets[i] for i in expected]
    assert {i for i, _ in reading.faults} == {4, 5, 15, 23}
    assert all(reason for _, reason in reading.faults)
    others = [i for i in EVERY if expected[i] == i]
    assert torch.equal(images[others], intact[others]), "no other sample moves"


def test_evaluation_marks_unreadable_images(index):
    intact = fetch(index, EVERY, train=False)[0]
    bad = [0, 9, 23]
    spoil(index, *bad)
    images, targets, reading = fetch(index, EVERY, train=False)
    good = [i for i in EVERY if i not in bad]
    assert torch.equal(images[good], intact[good]) and not images[bad].any()
    assert (targets[good] == index.targets[good]).all() and (targets[bad] == UNREADABLE).all()
    assert [i for i, _ in reading.faults] == bad


@pytest.mark.parametrize("resize", [None, SIZE])
def test_evaluation_shows_centre_crops(index, resize):
    dataset = ImageBatches(index, SIZE, SEED, train=False, resize=resize)
    images, _, _ = fetch_of(dataset, [2, 3], epoch=5)
    for row, i in zip(images, (2, 3), strict=True):
        pixels = im.decode(Path(index.path(i)).read_bytes())
        assert torch.equal(row, eval_view(pixels, SIZE, resize))


@pytest.mark.parametrize("workers", [0, 2])
def test_files_are_counted_and_bad_ones_named_once_and_limited(index, logged, workers):
    one = sampler()
    batches = batches_of(index, one, workers, bad_files=3)
    list(batches)
    assert batches.reading.files == IMAGES
    assert batches.reading.bytes == sum(os.path.getsize(index.path(i)) for i in EVERY)
    spoil(index, 4, 5, 15)
    bad = batches.bad
    for epoch in range(2):
        one.start_at(epoch, 0)
        batches.start_count()
        assert sum(len(images) for images, _ in batches) == IMAGES
        reading = batches.reading
        assert reading.files >= IMAGES, "and those in place of bad ones"
        assert 0 < reading.read_seconds < reading.seconds
        assert batches.waited > 0
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
    spoil(index, *EVERY)
    with pytest.raises(UserError, match="--max-bad-files"):
        list(batches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_normalisation_is_torchvisions_rounded_once(index, layout, dtype):
    one = EvalSampler(IMAGES, 10, (0, 1))
    batches, exact = (
        list(batches_of(index, one, place=(PLACE[0], layout, kind)))
        for kind in (dtype, torch.float32)
    )
    assert [len(images) for images, _ in batches] == [10, 10, 4]
    for asked, (images, _), (whole, _) in zip(one, batches, exact, strict=True):
        raw, _, _ = fetch(index, asked.indices, train=False)
        floats = tv.to_dtype(raw.permute(0, 3, 1, 2), torch.float32, scale=True)
        torch.testing.assert_close(whole, tv.normalize(floats, MEAN, STD), rtol=0, atol=2e-6)
        assert torch.equal(images, whole.to(dtype))
        assert images.is_contiguous(memory_format=layout)
    assert (MEAN, STD) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize(("policy", "erasing"), [("ra", 0.0), ("ta_wide", 0.5), (None, 1.0)])
def test_extra_augmentation_is_a_function_of_seed_epoch_and_image(index, policy, erasing):
    dataset = ImageBatches(index, SIZE, SEED, train=True)
    dataset.augment = augment.build(policy, erasing)
    torch.manual_seed(1)
    got = fetch_of(dataset, EVERY)[0]
    drawn = torch.rand(3)
    turned = fetch_of(dataset, EVERY[::-1])[0].flip(0)
    assert torch.equal(got, turned)
    assert not torch.equal(got, fetch(index, EVERY)[0])
    assert not torch.equal(got, fetch_of(dataset, EVERY, epoch=1)[0])
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), drawn), "the training process's own random state"
    dataset.train = False
    assert torch.equal(fetch_of(dataset, EVERY)[0], fetch(index, EVERY, train=False)[0])


def build(root, *line):
    """The loaders of a command line."""
    line = ["x", "-b", "4", "-j", "0", "--image-size", "32", *line, str(root)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", line)
        args = options.parse(options.build_parser("", ""))
        return build_loaders(args, World(PLACE[0]), torch.float32)


def test_loaders_of_a_folder(folder, tmp_path):
    loaders = build(folder)
    assert loaders.classes == ["class_0", "class_1", "class_2"]
    assert (len(loaders.train), len(loaders.val), loaders.test) == (15, 6, None)
    two = build(folder, "--classes", "2", "-e")
    assert (two.classes, two.train, len(two.val)) == (["class_0", "class_1"], None, 4)
    with pytest.raises(UserError, match="60 training images are too few"):
        build(folder, "--accum-steps", "31")
    for part in ("val", "test"):  # without training images
        (tmp_path / part).symlink_to(folder / "val")
    loaders = build(tmp_path, "-e")
    assert (loaders.train, len(loaders.val), len(loaders.test)) == (None, 6, 6)
    with pytest.raises(UserError, match="train is missing"):
        build(tmp_path)


HOLDS_AN_ITERATOR = """
import sys
from test_data import build
batches = iter(build(sys.argv[1], "-j", "2").train)
next(batches)
print("done")
"""


@pytest.mark.long
def test_a_script_that_holds_an_iterator_to_its_end_ends(folder):
    here = str(Path(__file__).parent)
    done = python("-c", HOLDS_AN_ITERATOR, folder, PYTHONPATH=here, timeout=100)
    assert (done.code, done.out) == (0, "done\n"), done.err
