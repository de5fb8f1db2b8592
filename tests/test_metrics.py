"""Loss and accuracy as sums and counts, over all processes."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from joined import in_processes

from utils.launch.world import World
from utils.metrics import UNREADABLE, Sums, to_metrics

CPU = torch.device("cpu")


def draw(n, classes, seed=0):
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, generator=source)
    targets = torch.randint(classes, (n,), generator=source)
    targets[::7] = UNREADABLE
    return logits, targets


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


def summed(rank, size, classes=8, cuts=(0, 1, 30, 50)):
    """The total, twice; batches alternate between the processes, which begin at 2^24 each."""
    logits, targets = draw(50, classes)
    sums = Sums(CPU, [0.0] + [2.0**24] * 3)
    for number, (first, end) in enumerate(pairwise(cuts)):
        if number % size == rank:
            one, labels = logits[first:end].requires_grad_(), targets[first:end]
            loss = F.cross_entropy(one, labels, reduction="sum", ignore_index=UNREADABLE)
            sums.add(loss, one, labels)
    world = World(CPU, rank, size)
    return sums.total(world), sums.total(world)


@pytest.mark.parametrize("classes", [2, 5, 6, 100])
def test_sums_are_the_naive_ones(classes):
    """With five classes or fewer every image is a top-5 hit."""
    wanted = naive(*draw(50, classes))
    assert (wanted[2] == wanted[3]) == (classes <= 5)
    for loss, *counts in summed(0, 1, classes):
        assert loss == pytest.approx(wanted[0], rel=1e-6)
        assert counts == [2**24 + count for count in wanted[1:]]


def test_sums_are_of_all_processes():
    wanted = naive(*draw(50, 8))
    for totals in in_processes(2, summed):
        for loss, *counts in totals:
            assert loss == pytest.approx(wanted[0], rel=1e-6)
            assert counts == [2 * 2**24 + count for count in wanted[1:]]


def test_metrics_are_means_and_percentages_and_of_no_image_nan():
    assert to_metrics([30.0, 5.0, 15.0, 20.0]) == (1.5, 25.0, 75.0, 20)
    *means, images = to_metrics([0.0] * 4)
    assert images == 0
    assert all(math.isnan(value) for value in means)
