"""The order of samples: the same on any number of processes, exact for evaluation, resumable."""

import zlib
from itertools import chain

import numpy as np
import pytest

from utils.data.samplers import EvalSampler, TrainSampler, epoch_order

SEED, EPOCH = 7, 3


def test_order_is_the_one_of_earlier_runs():
    """Golden: a change of NumPy or of the code would spoil the resuming of older runs."""
    order = epoch_order(1_281_167, seed=0, epoch=89)
    assert order.dtype == np.int64
    assert zlib.crc32(order.tobytes()) == 3755318792


def steps_of(images, batch, ranks=1, accum=1, first=0):
    """The images of each step: a list for each micro-batch of each rank, in turn."""
    shards = []
    for rank in range(ranks):
        sampler = TrainSampler(images, batch, (rank, ranks), accum, SEED)
        sampler.start_at(EPOCH, first)
        shards.append([part.indices.tolist() for part in sampler])
        assert len(shards[-1]) == len(sampler)
        assert [part.indices.tolist() for part in sampler] == shards[-1], "again"
        assert {(part.epoch, part.size) for part in sampler} == {(EPOCH, 0)}
        assert max(map(len, shards[-1])) <= sampler.largest <= batch
    parts = [part for micro in zip(*shards, strict=True) for part in micro]
    each = ranks * accum
    return [parts[start : start + each] for start in range(0, len(parts), each)]


@pytest.mark.parametrize(
    ("images", "batch", "ranks", "accum", "first"),
    [(1000, 48, 1, 1, 13), (1000, 24, 2, 1, 1), (1000, 8, 3, 2, 0), (1000, 2, 8, 3, 0)]
    + [(37, 100, *parts, 0) for parts in ((1, 1), (3, 1), (2, 2), (8, 1))],
)
def test_steps_are_consecutive_parts_of_the_order(images, batch, ranks, accum, first):
    """Nothing is left out or shifted; a small data set is one step, divided evenly."""
    order, size = epoch_order(images, SEED, EPOCH).tolist(), min(images, 48)
    steps = steps_of(images, batch, ranks, accum, first)
    expected = [order[k * size : (k + 1) * size] for k in range(first, images // size)]
    assert [[*chain(*step)] for step in steps] == expected
    for step in steps:
        sizes = [len(part) for part in step]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("ranks", [1, 3, 8, 64])
@pytest.mark.parametrize(("images", "batch"), [(10007, 32), (64, 1), (5, 2), (1, 8)])
def test_evaluation_takes_every_image_exactly_once(images, batch, ranks):
    """In the same batches at any world size, so that sums agree to the last bit."""
    samplers = [EvalSampler(images, batch, (rank, ranks)) for rank in range(ranks)]
    shards = [[part.indices.tolist() for part in sampler] for sampler in samplers]
    expected = [list(range(images))[start : start + batch] for start in range(0, images, batch)]
    assert sorted(part for shard in shards for part in shard) == expected
    assert [len(sampler) for sampler in samplers] == [len(shard) for shard in shards]
    assert {sampler.rounds for sampler in samplers} == {max(map(len, shards))}
    assert {sampler.largest for sampler in samplers} == {min(images, batch)}
