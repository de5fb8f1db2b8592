"""Learning rate: golden values."""

import math

import pytest
import torch

from utils.model.schedules import learning_rate, scale_lr

HALF = math.sqrt(0.5)
GOLDEN = [
    (  # x0.1 every 30 epochs and once more at 80
        {"lr": 0.1, "epochs": 90},
        [(0, 0.1), (29.99, 0.1), (30, 0.01), (60, 1e-3), (79.99, 1e-3), (80, 1e-4), (89, 1e-4)],
    ),
    ({"lr": 0.1, "epochs": 90, "warmup": 5}, [(0, 0), (1.25, 0.025), (5, 0.1), (30, 0.01)]),
    (  # past the end it does not rise again
        {"lr": 0.4, "epochs": 65, "warmup": 5, "schedule": "cosine"},
        [(0, 0), (1, 0.08), (2.5, 0.2), (5, 0.4), (20, 0.2 * (1 + HALF)), (35, 0.2)]
        + [(50, 0.2 * (1 - HALF)), (65, 0), (70, 0)],
    ),
    (  # the short recipes of ffcv-imagenet
        {"lr": 0.5, "epochs": 16, "warmup": 2, "schedule": "linear"},
        [(0, 0), (1, 0.25), (2, 0.5), (9, 0.25), (15.5, 0.25 / 14), (16, 0), (17, 0)],
    ),
]


@pytest.mark.parametrize(("options", "expected"), GOLDEN, ids=range(len(GOLDEN)))
def test_golden_values(options, expected):
    for position, rate in expected:
        assert learning_rate(position, **options) == pytest.approx(rate, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("warmup", [0, 50])
def test_one_cycle_is_that_of_torch(warmup):
    """torch counts from the first step to the last one, 0 to 99 here."""
    steps, weight = 100, torch.zeros(1, requires_grad=True)
    rise = (warmup or 0.3 * (steps - 1)) + 1
    optimizer = torch.optim.SGD([weight], 1.0)
    torchs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.4, steps, pct_start=rise / steps)
    for step in range(steps):
        got = learning_rate(step, lr=0.4, epochs=steps - 1, warmup=warmup, schedule="onecycle")
        assert got == pytest.approx(torchs.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        torchs.step()
    past = learning_rate(steps + 1, lr=0.4, epochs=steps - 1, warmup=warmup, schedule="onecycle")
    assert past == pytest.approx(0.4 / 25 * 1e-4)


def test_scaling_with_the_global_batch():
    factors = {("none", 8192): 1, ("linear", 256): 1, ("linear", 8192): 32, ("sqrt", 4096): 4}
    for (rule, batch), factor in factors.items():
        assert scale_lr(0.1, batch, rule) == pytest.approx(0.1 * factor)
