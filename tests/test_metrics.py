"""Loss and accuracy as sums and counts; over several processes see test_modes.py."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from utils.launch.world import World
from utils.metrics import UNREADABLE, Sums, to_metrics

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("classes", [2, 6])
def test_sums_of_batches_are_the_naive_ones(classes):
    """With few classes every image is a top-5 hit. float32 could not count on from 2^24."""
    torch.manual_seed(0)
    logits, targets = torch.randn(50, classes), torch.randint(classes, (50,))
    targets[::7] = UNREADABLE
    wanted = naive(logits, targets)
    assert (wanted[2] == wanted[3]) == (classes <= 5)
    sums = Sums(CPU, [0.0] + [2.0**24] * 3)
    for first, end in pairwise((0, 1, 30, 50)):
        one, labels = logits[first:end].requires_grad_(), targets[first:end]
        loss = F.cross_entropy(one, labels, reduction="sum", ignore_index=UNREADABLE)
        sums.add(loss, one, labels)
    loss, *counts = sums.total(World(CPU))
    assert loss == pytest.approx(wanted[0], rel=1e-6)
    assert counts == [2**24 + count for count in wanted[1:]]


def test_metrics_are_means_and_percentages_and_of_no_image_nan():
    assert to_metrics([30.0, 5.0, 15.0, 20.0]) == (1.5, 25.0, 75.0, 20)
    *means, images = to_metrics([0.0] * 4)
    assert images == 0
    assert all(math.isnan(value) for value in means)
