"""Batches: the same pixels on any number of workers and ranks, and what unreadable files do."""

import itertools
import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import SEED, SIZE, TO, batches_of, fetch, noise_index
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from utils import options
from utils.data import augment, loaders
from utils.data import images as im
from utils.data.dummy import Dummy
from utils.data.images import ImageBatches
from utils.data.samplers import Batch, EvalSampler, TrainSampler
from utils.metrics import UNREADABLE
from utils.start.errors import UserError
from utils.start.world import World

IMAGES = 24
EVERY = range(IMAGES)


@pytest.fixture
def index(tmp_path):
    return noise_index(tmp_path / "train", IMAGES)


def spoil(index, *images):
    """Make files unreadable, each in another way; the last one is gone."""
    for number, image in enumerate(images):
        os.truncate(index.path(image), (0, 60, 400)[number % 3])
    os.remove(index.path(images[-1]))


def training(index, **more):
    return ImageBatches(index, SIZE, SEED, train=True, **more)


def evaluated(index, resize=SIZE):
    return ImageBatches(index, SIZE, SEED, train=False, resize=resize)


def epoch_pixels(index, ranks=1, workers=0, start=0):
    """Image -> (its float pixels, its target) in the first epoch, over all ranks."""
    seen = {}
    for rank in range(ranks):
        sampler = TrainSampler(IMAGES, 12 // ranks, (rank, ranks), 1, SEED)
        sampler.start_at(0, start)
        batches = batches_of(index, sampler, workers)
        for asked, (images, targets) in zip(sampler, batches, strict=True):
            seen |= zip(asked.indices.tolist(), zip(images, targets, strict=True), strict=True)
    return seen


@pytest.mark.parametrize(("seconds", "slow"), [(2e-4, False), (4e-4, True)])
def test_a_worker_reads_ahead_after_reads_that_took_long(index, monkeypatch, seconds, slow):
    """By the mean of a batch: a read here takes as long as its two looks at the clock."""
    ticks = itertools.count(0.0, seconds)
    monkeypatch.setattr(im, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    dataset = training(index)
    fetch(dataset, EVERY)
    assert dataset.slow == slow


def test_pixels_are_the_same_for_any_workers_ranks_and_first_step(index):
    expected = epoch_pixels(index)
    assert sorted(expected) == list(EVERY)
    for ranks, workers, start in ((1, 3, 0), (4, 0, 0), (2, 1, 1)):
        got = epoch_pixels(index, ranks, workers, start)
        assert got.keys() == {*[*expected][12 * start :]}
        for image, (pixels, target) in got.items():
            assert torch.equal(pixels, expected[image][0]), "bit for bit"
            assert target == index.targets[image]
    whole, other = fetch(training(index), EVERY)[0], training(index)
    other.seed += 1
    larger = training(index, crop_scale=1.0)
    for dataset, epoch in ((training(index), 1), (other, 0), (larger, 0)):
        changed = fetch(dataset, EVERY, epoch=epoch)[0]
        assert (whole != changed).flatten(1).any(1).all()


def test_unreadable_image_is_replaced_by_the_next_readable_one(index):
    intact, targets, _ = fetch(training(index), EVERY)
    expected = torch.tensor(EVERY)
    expected[[4, 5, 15, 23]] = torch.tensor([6, 6, 16, 0])
    spoil(index, 4, 5, 15, 23)
    images, labels, reading = fetch(training(index), EVERY)
    assert torch.equal(images[:, 0, 0, 2], 10 * expected), "the blue tells which file it is"
    assert torch.equal(labels, targets[expected])
    assert [i for i, reason in reading.unreadable if reason] == [4, 5, 5, 15, 23]
    others = expected == torch.tensor(EVERY)
    assert torch.equal(images[others], intact[others]), "no other sample moves"


def test_a_broken_disk_is_not_searched_without_end(index, monkeypatch):
    monkeypatch.setattr(im, "LONGEST_SEARCH", 30)
    spoil(index, *EVERY)
    images, labels, reading = fetch(training(index), EVERY)
    assert [i for i, _ in reading.unreadable] == [*EVERY, *range(1, 7)]
    assert not images.any() and set(labels.tolist()) == {UNREADABLE}


def test_the_rest_of_an_epoch_has_its_size_and_its_place(index):
    sampler = TrainSampler(IMAGES, 4, (0, 1), 2, SEED)
    sampler.sizes = (8, 12)
    batches = batches_of(index, sampler)
    for epoch, size in ((0, 8), (1, 12), (2, 12)):
        rest = [(tuple(one.images.shape), one.position) for one in batches.rest(epoch, 1)]
        places = [(epoch, step, number) for step in (1, 2) for number in (0, 1)]
        assert rest == [((4, 3, size, size), place) for place in places]


def test_a_pipe_and_a_device_are_no_images(index):
    """A pipe would wait for its writer, and a device may never end."""
    for image in (4, 15):
        os.remove(index.path(image))
    os.mkfifo(index.path(4))
    os.symlink("/dev/zero", index.path(15))
    _, _, reading = fetch(training(index), EVERY)
    assert reading.unreadable == [(image, "not a regular file") for image in (4, 15)]


def test_evaluation_shows_centre_crops_and_marks_unreadable_images(index):
    bad = [0, 9, 23]
    spoil(index, *bad)
    images = torch.full((IMAGES, SIZE, SIZE, 3), 7, dtype=torch.uint8)  # of the slot's last batch
    targets = torch.empty(IMAGES, dtype=torch.int64)
    reading = evaluated(index, 18).fill(images, targets, Batch(5, np.array(EVERY)))
    assert [i for i, _ in reading.unreadable] == bad
    for i, (image, target) in enumerate(zip(images, targets, strict=True)):
        if i in bad:
            assert target == UNREADABLE and not image.any()
            continue
        pixels = im.decode(Path(index.path(i)).read_bytes())
        assert target == index.targets[i]
        crop = im.eval_crop(pixels.shape[1:], SIZE, 18)
        assert torch.equal(image, im.resized_crop(pixels, crop))


def test_files_are_counted_and_bad_ones_named_and_limited(index, logged, monkeypatch):
    batches = batches_of(index, TrainSampler(IMAGES, 12, (0, 1), 1, SEED), 2, bad_files=3)
    bad = batches.bad
    list(batches)
    assert batches.reading.files == IMAGES
    assert batches.reading.bytes == sum(os.path.getsize(index.path(i)) for i in EVERY)
    spoil(index, 4, 5, 15)
    for _ in range(2):
        batches.start_count()
        assert (batches.waited, batches.reading.files) == (0, 0)
        assert sum(len(images) for images, _ in batches) == IMAGES
        assert 0 < batches.reading.read_seconds < batches.reading.seconds
        assert batches.waited > 0
    total = im.Reading()
    for _ in range(2):
        total.add(im.Reading(1, 2, 3.0, 4.0))
    assert (total.files, total.bytes, total.read_seconds, total.seconds) == (2, 4, 6.0, 8.0)
    clock = SimpleNamespace(now=0.0)
    batches.start_count()
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: clock.now)
        for _ in batches:
            clock.now += 5.0  # a step: nobody waits for images meanwhile
    assert batches.waited == 0
    assert set(bad.seen) == {4, 5, 15} and not bad.too_many and len(logged) == 3
    assert all(any(index.path(i) in line for line in logged) for i in (4, 5, 15))
    monkeypatch.setattr(World, "gather", lambda _, seen: [seen, {0: "of another rank"}])
    bad.share(World(TO[0]))
    assert bad.too_many and index.path(0) in logged[-1]
    spoil(index, *set(EVERY) - {15})
    last = re.escape(index.path(0))
    with pytest.raises(UserError, match=rf"more than 3 image files .*--max-bad-files.*{last}:"):
        list(batches)
    assert len(logged) == 4, "past the limit nothing more is named"
    few = batches_of(index, TrainSampler(IMAGES, 12, (0, 1), 1, SEED), bad_files=IMAGES)
    with pytest.raises(UserError, match=rf"none of the {IMAGES} images in .*: check the disk"):
        next(iter(few))


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(torch.contiguous_format, torch.float32), (torch.channels_last, torch.bfloat16)],
)
def test_normalisation_is_torchvisions_rounded_once(index, layout, dtype):
    to = (TO[0], layout, dtype)
    ((images, _),) = batches_of(index, EvalSampler(IMAGES, IMAGES, (0, 1)), to=to)
    raw = fetch(evaluated(index), EVERY)[0].permute(0, 3, 1, 2)
    expected = tv.normalize(raw / 255, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    tolerance = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 1.9
    torch.testing.assert_close(images.double(), expected.double(), rtol=tolerance, atol=2e-6)
    assert images.dtype == dtype and images.is_contiguous(memory_format=layout)


AUGMENTATIONS = {"ra": v2.RandAugment, "ta_wide": v2.TrivialAugmentWide, "aa": v2.AutoAugment}
AUGMENTATIONS |= {"augmix": v2.AugMix, None: v2.RandomErasing}


@pytest.mark.parametrize("policy", AUGMENTATIONS)
def test_extra_augmentation_is_a_function_of_seed_epoch_and_image(index, policy):
    dataset = training(index, augment=augment.build(policy, erasing=float(not policy)))
    assert isinstance(dataset.augment.transforms[0], AUGMENTATIONS[policy])
    state = torch.get_rng_state()
    got, plain = fetch(dataset, EVERY)[0], fetch(training(index), EVERY)[0]
    assert torch.equal(torch.get_rng_state(), state), "the training process's own"
    assert torch.equal(got, fetch(dataset, EVERY[::-1])[0].flip(0))
    assert not torch.equal(got, plain)
    assert not torch.equal(got, fetch(dataset, EVERY, epoch=1)[0])
    if not policy:
        grey, again = (
            (images == torch.tensor([124, 116, 104])).all(-1)  # 0 after normalisation
            for images in (got, fetch(dataset, EVERY, epoch=1)[0])
        )
        assert grey.any((1, 2)).all() and torch.equal(got[~grey], plain[~grey])
        assert (grey != again).any((1, 2)).sum() > IMAGES / 2
    dataset.train, dataset.resize = False, SIZE
    assert torch.equal(fetch(dataset, EVERY)[0], fetch(evaluated(index), EVERY)[0])


def build(root, *words, **world):
    """The loaders of a command line."""
    line = ["x", "-b", "4", "--image-size", "32", *words, str(root)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", line)
        patch.setattr(loaders, "first_on_node", lambda call, _: call())
        patch.setattr(loaders, "broadcast_from_rank0", lambda call, _: call())
        patch.setattr(loaders.agreement, "compare_data", lambda *_: None)
        args = options.parse(options.build_parser("", ""))
        return loaders.build_loaders(args, World(TO[0], **world), torch.float32)


def test_loaders_of_a_folder(folder, tmp_path, capsys):
    made = build(folder)
    assert made.classes == ["class_0", "class_1", "class_2"]
    assert (len(made.train.sampler), len(made.val.sampler), made.test) == (15, 6, None)
    evaluate = ("-e", "--resume", "best.pt")
    two = build(folder, "--classes", "2", *evaluate)
    assert (two.classes, two.train, len(two.val.sampler)) == (["class_0", "class_1"], None, 4)
    build(folder, "--accum-steps", "30")
    for line, remedy in (
        ("--accum-steps 31", "fewer, or"),
        ("--global-batch 31 -b 1", "larger -b"),
    ):
        with pytest.raises(UserError, match=f"60 training images are too few .*: .*{remedy}"):
            build(folder, *line.split())
    with pytest.raises(UserError, match="has a multiple of 4 images"):
        build(folder, "-b", "5", "--mixup", "0.2", rank=1, size=2)
    (tmp_path / "val").symlink_to(folder / "val")  # without training images
    shutil.copytree(folder / "val", tmp_path / "test")
    made = build(tmp_path, *evaluate)
    assert (made.train, len(made.val.sampler), made.test) == (None, 6, None)
    made = build(tmp_path, *evaluate, "--part", "test")
    assert (made.train, made.val, len(made.test.sampler)) == (None, None, 6)
    (tmp_path / "train").symlink_to(folder / "train")
    (tmp_path / "test" / "other").mkdir()
    with pytest.raises(
        UserError, match=r"different classes: only test has other. Give both the same"
    ):
        build(tmp_path)
    assert len(build(tmp_path, "--classes", "2").test.sampler) == 4
    shutil.rmtree(tmp_path / "test" / "class_1")
    for words in (("--classes", "2"), (*evaluate, "--part", "test")):
        with pytest.raises(UserError, match=r"different classes: only train has class_1"):
            build(tmp_path, *words)
    shutil.rmtree(tmp_path / "test")  # as a contest's, whose classes are secret
    shutil.copytree(folder / "val/class_0", tmp_path / "test")
    assert build(tmp_path).test is None
    assert f"note: {tmp_path}/test has no class folders" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"test has no class folders.* move its images into test/C"):
        build(tmp_path, *evaluate, "--part", "test")
    build(tmp_path, *evaluate)
    assert "note: " not in capsys.readouterr().out, "an evaluation of val/ does not use it"
    shutil.rmtree(tmp_path / "test")
    shutil.make_archive(str(tmp_path / "test"), "tar", folder / "val")
    assert len(build(tmp_path).test.sampler) == 6


def test_synthetic_images_are_divided_equally_among_1000_classes():
    assert np.bincount(Dummy("val", None).targets).tolist() == [50] * 1000


def test_loaders_do_as_the_options_say(folder):
    words = "-j 5 --seed 9 --crop-scale 0.5 --max-bad-files 7 --random-erasing 0.25 --accum-steps 2"
    words += " --epochs 2 --progressive 24,32 --val-image-size 40"
    made = build(folder, *words.split(), rank=1, size=4, local_rank=1, local_size=2)
    train, dataset, order = made.train, made.train.dataset, made.train.sampler
    slots = [len(part.loader.ring.uploads) for part in (train, made.val)]
    assert slots == [2 * 3 + 2] * 2, "3 workers per process"
    assert (dataset.seed, dataset.crop_scale, dataset.size) == (9, 0.5, 32)
    assert (train.bad.limit, made.val.bad.limit) == (7, 7)
    assert dataset.augment.transforms[0].p == 0.25
    assert (order.seed, order.rank, order.num_replicas, order.accum) == (9, 1, 4, 2)
    assert order.sizes == (24, 32)
    assert order.global_batch == 32
    assert (made.val.dataset.size, made.val.dataset.resize) == (40, 46)
    assert (made.val.sampler.rank, made.val.sampler.num_replicas) == (1, 4)
