"""Mixup and CutMix: what is drawn, what becomes of pairs, and the same pairs in any slices."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from utils.data import mixing
from utils.errors import UserError
from utils.samplers import TrainSampler

SIZE, CLASSES = 8, 5
BOTH = (0.4, 1.0)
# Columns: see `mixing.draw`.
GOLDEN = [
    [0.6015625, 0, 1, 29, 0, 22],
    [0.012768755, 0.012768755, 21, 21, 11, 11],
    [0.078125, 0, 11, 21, 24, 32],
    [0.20440279, 0.20440279, 18, 18, 27, 27],
]


def test_the_draw_is_the_one_of_earlier_runs():
    """Golden: a change of NumPy or of the code would spoil the resuming of older runs."""
    assert np.allclose(mixing.draw((3, 1, 2), 4, 32, BOTH), GOLDEN, atol=1e-6)


def test_shares_are_those_of_the_beta_distribution():
    """By its mean and variance; each of the two ways gets half of the pairs."""
    pairs, alpha = 20_000, 0.4
    share = mixing.draw((0, 0, 0), pairs, 32, (alpha, 0.0))[:, 0]
    assert share.mean() == pytest.approx(0.5, abs=0.01)
    assert share.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), abs=0.005)
    plan = mixing.draw((0, 0, 0), pairs, 32, BOTH)
    boxed = (plan[:, 3] > plan[:, 2]) | (plan[:, 5] > plan[:, 4])
    assert not plan[boxed, 1].any()
    assert (plan[:, 1] > 0).mean() == pytest.approx(0.5, abs=0.02)
    assert np.allclose(plan[~boxed, 0], plan[~boxed, 1])


def pixels(indices):
    """An image for each index (float [n, 3, SIZE, SIZE]), and its target."""
    images = [
        torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(i)) for i in indices
    ]
    return torch.stack(images), torch.tensor([i % CLASSES for i in indices])


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_pairs_are_blended(dtype, layout):
    images, targets = pixels([0, 6, 2, 3, 4])  # the last one has no partner
    images = images.to(dtype=dtype, memory_format=layout)
    plan = np.array([[0.3, 0.3, 0, 0, 0, 0], [0.75, 0, 0, 8, 2, 8]], np.float32)
    mixed, soft, labels = mixing.mix(images, targets, plan, CLASSES)
    assert mixed.dtype == dtype
    assert mixed.is_contiguous(memory_format=layout)
    expected = images.clone()
    expected[0] = 0.7 * images[0].float() + 0.3 * images[1].float()
    expected[1] = 0.7 * images[1].float() + 0.3 * images[0].float()
    expected[2, :, :, 2:], expected[3, :, :, 2:] = images[3, :, :, 2:], images[2, :, :, 2:]
    torch.testing.assert_close(mixed, expected, rtol=1e-3, atol=2e-3)
    assert torch.equal(mixed[2:], expected[2:]), "CutMix copies"
    rows = [[0.7, 0.3, 0, 0, 0], [0.3, 0.7, 0, 0, 0], [0, 0, 0.25, 0.75, 0], [0, 0, 0.75, 0.25, 0]]
    torch.testing.assert_close(soft, torch.tensor([*rows, [0, 0, 0, 0, 1]]))
    assert labels.tolist() == [0, 1, 3, 2, 4]


def epoch(ranks, accum, batch=24, images=100):
    """All mixed batches of an epoch's second half: {image: (its step, pixels, target, label)}."""
    args = SimpleNamespace(mixup=BOTH[0], cutmix=BOTH[1])
    found = {}
    for rank in range(ranks):
        sampler = TrainSampler(images, batch // (ranks * accum), (rank, ranks), accum, seed=7)
        first = min(2, sampler.steps_per_epoch - 1)
        sampler.start_at(3, first)
        mixing.check(args, sampler)
        mix = mixing.build(args, sampler, CLASSES)
        for micro, part in enumerate(sampler):
            step = first + micro // accum
            parts = mix(*pixels(part.indices.tolist()), (3, step, micro % accum))
            for image, *values in zip(part.indices.tolist(), *parts, strict=True):
                assert image not in found
                found[image] = (step, *values)
    return found


@pytest.mark.parametrize(
    ("ranks", "accum", "size"),
    [(4, 1, {}), (1, 3, {}), (6, 2, {}), (3, 1, {"batch": 48, "images": 37})],
)
def test_the_same_images_are_mixed_in_any_slices(ranks, accum, size):
    """Also the odd last image of a small data set, which has no partner."""
    alone, together = epoch(1, 1, **size), epoch(ranks, accum, **size)
    assert alone.keys() == together.keys()
    for image, (step, *values) in alone.items():
        other, *theirs = together[image]
        assert step == other
        for one, two in zip(values, theirs, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)
    plain = {image: pixels([image])[0][0] for image in alone}
    changed = sum(not torch.equal(alone[image][1], plain[image]) for image in alone)
    assert changed > len(alone) / 2


@pytest.mark.parametrize(("ranks", "accum", "batch"), [(2, 1, 5), (1, 2, 3), (3, 1, 37)])
def test_slices_that_cut_pairs_are_refused_where_images_are_mixed(ranks, accum, batch):
    sampler = TrainSampler(40, batch, (0, ranks), accum, seed=0)
    off = SimpleNamespace(mixup=0.0, cutmix=0.0)
    mixing.check(off, sampler)
    batch = *pixels(range(8)), (0, 0, 0)
    assert mixing.build(off, sampler, CLASSES)(*batch) == (*batch[:2], batch[1])
    with pytest.raises(UserError, match="choose an even -b"):
        mixing.check(SimpleNamespace(mixup=0.0, cutmix=1.0), sampler)
