"""Mixup and CutMix: what is drawn, what becomes of pairs, and the same pairs on all world sizes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from utils.data import loaders, mixing
from utils.data.samplers import TrainSampler, epoch_order
from utils.start.errors import UserError

SIZE, CLASSES = 8, 5
# Columns: see `mixing.draw`.
GOLDEN = {
    (0.4, 1.0): [
        [0.6015625, 0, 1, 29, 0, 22],
        [0.012768755, 0.012768755, 21, 21, 11, 11],
        [0.078125, 0, 11, 21, 24, 32],
    ],
    (0.4, 0.0): [[share] * 2 for share in (0.25723746, 0.012768755, 0.66937012)],
    (0.0, 1.0): [[0.140625, 0, 9, 21, 2, 14]],
}


@pytest.mark.parametrize("alphas", GOLDEN)
def test_the_draw_is_the_one_of_earlier_runs(alphas):
    """Golden: a change of NumPy or of the code would spoil the resuming of older runs."""
    drawn, golden = mixing.draw((3, 1, 2), 4, 32, alphas), GOLDEN[alphas]
    assert np.allclose(drawn[: len(golden)], golden, atol=1e-6)


def test_with_both_half_of_the_pairs_get_cutmix():
    plan = mixing.draw((3, 1, 2), 1000, 32, (0.4, 1.0))
    assert 450 < np.count_nonzero(plan[:, 3] > plan[:, 2]) < 530


def pixels(indices):
    """An image for each index (float [n, 3, SIZE, SIZE]), and its target."""
    seeds = (torch.Generator().manual_seed(index) for index in indices)
    images = [torch.randn(3, SIZE, SIZE, generator=seed) for seed in seeds]
    return torch.stack(images), torch.tensor([i % CLASSES for i in indices])


def test_pairs_are_blended():
    dtype, layout = torch.float16, torch.channels_last
    images, targets = pixels([0, 6, 2, 3, 4])  # the last one has no partner
    images = images.to(dtype=dtype, memory_format=layout)
    plan = np.array([[0.3, 0.3, 0, 0, 0, 0], [0.75, 0, 1, 6, 2, 7]], np.float32)
    mixed, soft, labels = mixing.mix(images, targets, plan, CLASSES)
    assert mixed.dtype == dtype
    assert mixed.is_contiguous(memory_format=layout)
    one, other = images[:2].float()
    blended = torch.stack([0.7 * one + 0.3 * other, 0.7 * other + 0.3 * one])
    torch.testing.assert_close(mixed[:2].float(), blended, rtol=1e-3, atol=2e-3)
    pasted = images[2:].clone()
    pasted[:2, :, 1:6, 2:7] = images[[3, 2], :, 1:6, 2:7]
    assert torch.equal(mixed[2:], pasted), "CutMix copies"
    rows = [[0.7, 0.3, 0, 0, 0], [0.3, 0.7, 0, 0, 0], [0, 0, 0.25, 0.75, 0], [0, 0, 0.75, 0.25, 0]]
    torch.testing.assert_close(soft, torch.tensor([*rows, [0, 0, 0, 0, 1]]))
    assert labels.tolist() == [0, 1, 3, 2, 4]


@pytest.mark.parametrize(("images", "batch", "ranks", "accum"), [(100, 2, 6, 2), (37, 16, 3, 1)])
def test_the_same_images_are_mixed_on_any_number_of_ranks(images, batch, ranks, accum):
    """By seed, epoch and step; also the odd last image of a small data set, without a partner."""
    alphas, seed, epoch, order = (0.4, 1.0), 7, 3, epoch_order(images, 7, 3).tolist()
    for rank in range(ranks):
        sampler = TrainSampler(images, batch, (rank, ranks), accum, seed)
        first, size = sampler.steps_per_epoch // 2, sampler.global_batch
        sampler.start_at(epoch, first)
        mix = mixing.build(alphas, sampler, CLASSES)
        for number, part in enumerate(sampler):
            step, micro = first + number // accum, number % accum
            whole = order[step * size : (step + 1) * size]
            plan = mixing.draw((seed, epoch, step), size // 2, SIZE, alphas)
            expected = mixing.mix(*pixels(whole), plan, CLASSES)
            low = whole.index(part.indices[0])
            mixed = mix(*pixels(part.indices.tolist()), (epoch, step, micro))
            for one, other in zip(mixed, expected, strict=True):
                torch.testing.assert_close(one, other[low : low + len(one)], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("ranks", "accum", "batch"), [(2, 1, 5), (1, 2, 3), (3, 1, 37)])
def test_ranks_that_separate_pairs_are_rejected_where_images_are_mixed(ranks, accum, batch):
    sampler = TrainSampler(40, batch, (0, ranks), accum, seed=0)
    for alphas in ((0.0, 1.0), (0.4, 0.0)):
        with pytest.raises(UserError, match=f"a multiple of {2 * ranks * accum} images"):
            mixing.build(alphas, sampler, CLASSES)


def changed_by(**options: float) -> SimpleNamespace:
    """Training batches with these options, as far as they are changed."""
    usual = {"mixup": 0.0, "cutmix": 0.0, "auto_augment": None, "random_erasing": 0.0}
    sampler, dataset = TrainSampler(8, 8, (0, 1), 1, seed=0), SimpleNamespace(augment=None)
    batches = SimpleNamespace(sampler=sampler, dataset=dataset, mix=None)
    loaders.change_training_batches(batches, SimpleNamespace(**usual | options), CLASSES)
    return batches


@pytest.mark.parametrize(("option", "blends"), [("mixup", True), ("cutmix", False)])
def test_mixup_blends_and_cutmix_pastes(option, blends):
    images = (torch.arange(8) % 2).float().view(8, 1, 1, 1).expand(8, 3, SIZE, SIZE).clone()
    changed = changed_by(**{option: 1.0})
    mixed, *_ = changed.mix(images, torch.arange(8) % CLASSES, (0, 0, 0))
    assert bool(((mixed > 0) & (mixed < 1)).any()) == blends
    assert changed.dataset.augment is None


def test_crops_are_changed_if_an_option_says_so():
    changed = changed_by(random_erasing=1.0)
    assert changed.mix is None
    assert changed.dataset.augment(torch.zeros(3, SIZE, SIZE, dtype=torch.uint8)).any()
