"""The order of samples: the same on any number of processes, exact for evaluation, resumable."""

import zlib

import numpy as np
import pytest

from utils.samplers import EvalSampler, TrainSampler, epoch_order

GLOBAL = 48  # images a step; divisible by every number of ranks and micro-batches below
# fmt: off
GOLDEN = {
    (0, 0): [1, 11, 4, 10, 9, 5, 16, 0, 13, 17, 7, 3, 19, 15, 12, 8, 18, 6, 2, 14],
    (0, 1): [13, 3, 19, 16, 5, 7, 6, 2, 11, 17, 9, 8, 0, 15, 4, 1, 12, 14, 10, 18],
    (1, 0): [1, 10, 8, 16, 15, 17, 5, 3, 11, 9, 7, 2, 13, 0, 19, 6, 14, 4, 12, 18],
}
# fmt: on


def global_batches(images, ranks, accum=1, start=(0, 0), batch=None, seed=7, views=1):
    """Each step's images: [step][micro-batch][rank] -> list of indices."""
    batch = batch or GLOBAL // (ranks * accum)
    shards = []
    for rank in range(ranks):
        sampler = TrainSampler(images, batch, (rank, ranks), accum, seed)
        sampler.views = views
        sampler.start_at(*start)
        found = list(sampler)
        assert len(found) == len(sampler)
        assert all(part.epoch == start[0] for part in found)
        shards.append([part.indices.tolist() for part in found])
    micros = [list(parts) for parts in zip(*shards, strict=True)]
    return [micros[i : i + accum] for i in range(0, len(micros), accum)]


def flat(step):
    """All images of a step."""
    return [image for micro in step for part in micro for image in part]


@pytest.mark.parametrize(("seed", "epoch"), GOLDEN)
def test_order_is_the_one_of_earlier_runs(seed, epoch):
    """Golden: a change of NumPy or of the code would spoil the resuming of older runs."""
    assert epoch_order(20, seed, epoch).tolist() == GOLDEN[seed, epoch]


def test_order_of_imagenet_is_the_one_of_earlier_runs():
    order = epoch_order(1_281_167, 0, 89)
    assert order.dtype == np.int64
    assert zlib.crc32(order.tobytes()) == 3755318792


@pytest.mark.parametrize("first", [0, 1, 13])
@pytest.mark.parametrize(("ranks", "accum"), [(1, 1), (2, 1), (3, 2), (8, 3)])
def test_steps_are_consecutive_slices_of_the_order(ranks, accum, first):
    """Nothing is left out or shifted between steps, micro-batches and ranks."""
    order = epoch_order(1000, 7, 3).tolist()
    steps = global_batches(1000, ranks, accum, start=(3, first))
    expected = [order[k * GLOBAL : (k + 1) * GLOBAL] for k in range(first, 1000 // GLOBAL)]
    assert [flat(step) for step in steps] == expected


def test_epoch_has_no_image_twice_and_leaves_out_another_rest_each_time():
    rests = []
    for epoch in range(3):
        seen = [image for step in global_batches(1000, 4, start=(epoch, 0)) for image in flat(step)]
        assert len(set(seen)) == len(seen) == 960
        rests.append(frozenset(range(1000)) - set(seen))
    assert len(set(rests)) == 3


def test_second_iteration_repeats_the_epoch_until_told_otherwise():
    sampler = TrainSampler(100, 10, (0, 1), 1, 0)
    first, second = ([part.indices.tolist() for part in sampler] for _ in range(2))
    sampler.start_at(1, 0)
    assert first == second != [part.indices.tolist() for part in sampler]


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("views", [2, 3, 5])
def test_repeated_augmentation_has_several_views_of_fewer_images(views, ranks):
    steps = [flat(step) for step in global_batches(1000, ranks, start=(2, 0), views=views)]
    assert steps == [flat(step) for step in global_batches(1000, 1, start=(2, 0), views=views)]
    assert [len(step) for step in steps] == [GLOBAL] * (1000 // GLOBAL)
    own = -(-GLOBAL // views)
    order = epoch_order(1000, 7, 2).tolist()
    for number, step in enumerate(steps):
        assert len(set(step)) == GLOBAL, "each view of an image is another one"
        assert [index % 1000 for index in step[:own]] == order[number * own : (number + 1) * own]
        counts = np.bincount([index % 1000 for index in step], minlength=1000)
        assert set(counts[counts > 0]) <= {views, views - 1}
        # --mixup blends neighbours.
        assert all(a % 1000 != b % 1000 for a, b in zip(step[::2], step[1::2], strict=True))


@pytest.mark.parametrize(("ranks", "accum"), [(1, 1), (3, 1), (2, 2), (8, 1)])
def test_small_data_set_makes_one_step_of_all_its_images(ranks, accum):
    steps = global_batches(37, ranks, accum, batch=100)
    assert len(steps) == 1
    assert sorted(flat(steps[0])) == list(range(37))
    sizes = [len(part) for micro in steps[0] for part in micro]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("ranks", [1, 3, 8, 64])
@pytest.mark.parametrize(("images", "batch"), [(10007, 32), (50_000, 256), (64, 1), (5, 2), (1, 8)])
def test_evaluation_takes_every_image_exactly_once(images, batch, ranks):
    samplers = [EvalSampler(images, batch, (rank, ranks)) for rank in range(ranks)]
    shards = [[part.indices.tolist() for part in sampler] for sampler in samplers]
    assert sorted(i for shard in shards for part in shard for i in part) == list(range(images))
    assert [len(sampler) for sampler in samplers] == [len(shard) for shard in shards]
    assert {sampler.rounds for sampler in samplers} == {max(map(len, shards))}
    assert all(0 < len(part) <= batch for shard in shards for part in shard)


def test_evaluation_batches_are_the_same_at_any_world_size():
    """The same images go through batch norm's kernels together, so sums agree to the last bit."""

    def batches(ranks):
        samplers = (EvalSampler(1003, 10, (rank, ranks)) for rank in range(ranks))
        return {tuple(part.indices) for sampler in samplers for part in sampler}

    assert batches(1) == batches(3) == batches(8)
