"""Loss and accuracy as sums and counts."""

import math

import pytest
import torch
import torch.nn.functional as F

from utils.launch.world import World
from utils.metrics import UNREADABLE, Sums, to_metrics

CPU = torch.device("cpu")
WORLD = World(CPU)


def draw(n, classes, seed=0):
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, generator=source)
    return logits, torch.randint(classes, (n,), generator=source)


def naive(logits, targets):
    """[loss, top-1, top-5, images], image by image."""
    sums = [0.0, 0, 0, 0]
    for row, target in zip(logits.double(), targets.tolist(), strict=True):
        if target == UNREADABLE:
            continue
        better = int((row > row[target]).sum())
        loss = float(row.exp().sum().log() - row[target])
        sums = [sums[0] + loss, sums[1] + (better < 1), sums[2] + (better < 5), sums[3] + 1]
    return sums


def add(sums, logits, targets):
    loss = F.cross_entropy(logits, targets, reduction="sum", ignore_index=UNREADABLE)
    sums.add(loss, logits, targets)


@pytest.mark.parametrize("classes", [2, 3, 5, 6, 100])
def test_sums_are_the_naive_ones(classes):
    """With five classes or fewer every image is a top-5 hit."""
    logits, targets = draw(50, classes)
    targets[::7] = UNREADABLE
    sums = Sums(CPU)
    for rows in (slice(0, 1), slice(1, 30), slice(30, 50)):
        add(sums, logits[rows], targets[rows])
    assert sums.total(WORLD) == pytest.approx(naive(logits, targets), rel=1e-6)
    assert sums.total(WORLD)[1:] == naive(logits, targets)[1:]
    if classes <= 5:
        assert to_metrics(sums.begin_total(WORLD).read()).top5 == 100.0


def test_half_precision_logits_and_losses_with_gradients():
    logits, targets = draw(32, 10)
    sums = Sums(CPU)
    loss = F.cross_entropy(logits.requires_grad_(), targets, reduction="sum")
    sums.add(loss, logits.half(), targets)
    assert sums.values.requires_grad is False
    assert sums.values.dtype == torch.float64
    assert sums.total(WORLD)[1:] == naive(logits.detach().half(), targets)[1:]


def test_counts_stay_exact_beyond_float32():
    sums = Sums(CPU, [0.0, 2.0**24, 2.0**24, 2.0**24])
    add(sums, torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    assert sums.total(WORLD)[1:] == [2.0**24 + 1] * 3


def test_sums_go_on_from_a_start():
    logits, targets = draw(40, 8)
    first, whole = Sums(CPU), Sums(CPU)
    add(first, logits[:15], targets[:15])
    second = Sums(CPU, first.total(WORLD))
    add(second, logits[15:], targets[15:])
    for rows in (slice(15), slice(15, 40)):
        add(whole, logits[rows], targets[rows])
    assert second.total(WORLD) == whole.total(WORLD)


def test_metrics_are_means_and_percentages_and_of_no_image_nan():
    assert to_metrics([30.0, 5.0, 15.0, 20.0]) == (1.5, 25.0, 75.0, 20)
    *means, images = to_metrics([0.0] * 4)
    assert images == 0
    assert all(math.isnan(value) for value in means)
