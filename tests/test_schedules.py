"""Learning rate: golden values."""

import math

import pytest
import torch

from utils.model.schedules import learning_rate, scale_lr


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (0, 0.1),
        (29.99, 0.1),
        (30, 0.01),
        (59.99, 0.01),
        (60, 1e-3),
        (79.99, 1e-3),
        (80, 1e-4),
        (89, 1e-4),
        (90, 1e-5),
    ],
)
def test_step_decays_every_30_epochs_and_once_more_at_80(position, expected):
    assert learning_rate(position, lr=0.1, epochs=90) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (0, 0.0),
        (1, 0.08),
        (2.5, 0.2),
        (5, 0.4),  # warm-up is over
        (20, 0.4 * (1 + math.sqrt(0.5)) / 2),
        (35, 0.2),
        (50, 0.4 * (1 - math.sqrt(0.5)) / 2),
        (65, 0.0),
        (70, 0.0),  # past the end it does not rise again
    ],
)
def test_cosine_after_warmup(position, expected):
    got = learning_rate(position, lr=0.4, epochs=65, warmup=5, schedule="cosine")
    assert got == pytest.approx(expected, abs=1e-12)


def test_cosine_without_warmup_starts_at_the_top():
    rates = [learning_rate(p / 10, lr=1.0, epochs=5, schedule="cosine") for p in range(51)]
    assert (rates[0], rates[25], rates[50]) == pytest.approx((1.0, 0.5, 0.0))
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(
    ("position", "expected"),
    [(0, 0), (1, 0.25), (2, 0.5), (9, 0.25), (15.5, 0.25 / 14), (16, 0), (17, 0)],
)
def test_linear_to_zero_after_warmup(position, expected):
    """The short recipes of ffcv-imagenet: sixteen epochs, two of them warm-up."""
    got = learning_rate(position, lr=0.5, epochs=16, warmup=2, schedule="linear")
    assert got == pytest.approx(expected)


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


@pytest.mark.parametrize(("position", "expected"), [(0, 0), (1.25, 0.025), (5, 0.1), (30, 0.01)])
def test_step_with_warmup(position, expected):
    assert learning_rate(position, lr=0.1, epochs=90, warmup=5) == pytest.approx(expected)


def test_warmup_longer_than_the_training():
    rates = [learning_rate(p, lr=1.0, epochs=2, warmup=4, schedule="cosine") for p in range(3)]
    assert rates == pytest.approx([0.0, 0.25, 0.5])


def test_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="exponential"):
        learning_rate(0, lr=0.1, epochs=90, schedule="exponential")


@pytest.mark.parametrize(
    ("rule", "batch", "factor"),
    [
        ("none", 8192, 1),
        ("linear", 256, 1),
        ("linear", 8192, 32),
        ("linear", 64, 0.25),
        ("sqrt", 256, 1),
        ("sqrt", 4096, 4),
        ("sqrt", 64, 0.5),
    ],
)
def test_scaling_with_the_global_batch(rule, batch, factor):
    assert scale_lr(0.1, batch, rule) == pytest.approx(0.1 * factor)
