"""Learning rate: golden values."""

import math

import pytest

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
        [(0, 0), (2.5, 0.2), (5, 0.4), (20, 0.2 * (1 + HALF)), (35, 0.2), (65, 0), (70, 0)],
    ),
    (  # the short recipes of ffcv-imagenet
        {"lr": 0.5, "epochs": 16, "warmup": 2, "schedule": "linear"},
        [(1, 0.25), (2, 0.5), (9, 0.25), (16, 0), (17, 0)],
    ),
    (  # as torch's: from 1/25 of the rate to it, and to 1/250,000
        {"lr": 0.4, "epochs": 100, "schedule": "onecycle"},
        [(0, 0.016), (15, 0.208), (30, 0.4), (65, 0.2 + 8e-7), (100, 1.6e-6), (101, 1.6e-6)],
    ),
    (
        {"lr": 0.4, "epochs": 100, "warmup": 50, "schedule": "onecycle"},
        [(0, 0.016), (25, 0.208), (50, 0.4), (100, 1.6e-6)],
    ),
]


@pytest.mark.parametrize(("options", "expected"), GOLDEN, ids=range(len(GOLDEN)))
def test_golden_values(options, expected):
    for position, rate in expected:
        assert learning_rate(position, **options) == pytest.approx(rate, rel=1e-12, abs=1e-12)


def test_scaling_with_the_global_batch():
    factors = {("none", 8192): 1, ("linear", 256): 1, ("linear", 8192): 32, ("sqrt", 4096): 4}
    for (rule, batch), factor in factors.items():
        assert scale_lr(0.1, batch, rule) == pytest.approx(0.1 * factor)
