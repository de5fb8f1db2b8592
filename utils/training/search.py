"""Finds the largest size that fits, where what a size takes is known only by trying it."""

import math
from collections.abc import Callable

FASTEST = 4  # times the size that fitted, at most, before any was too large
PATIENCE = 6  # sizes that fit, until what they took is no longer believed to be linear


def search(
    take: Callable[[int], float],
    limit: float,
    step: int,
    most: float = math.inf,
    careful: bool = False,
) -> tuple[int, float]:
    """The largest multiple of ``step`` up to ``most`` for which ``take`` is at most ``limit``.

    ``take(size)`` is about linear. Tries ``step`` first. ``careful`` never tries a size that should
    be too large by those before. Returns: the size (0 if none fits), and what it took.
    """
    seen: dict[int, float] = {}
    low, high, size = 0, math.inf, step
    while True:
        taken = take(size)
        if taken <= limit:
            low, seen[size] = size, taken
        else:
            high = size
            if not low:
                return 0, taken
        if low >= most or high - low <= step:
            return low, seen[low]
        size = _next(seen, limit, step, (low, min(high, most + step)), most)
        if careful and size > step and _forecast(seen, size) > limit:
            return low, seen[low]


def _next(
    seen: dict[int, float], limit: float, step: int, between: tuple[int, float], most: float
) -> int:
    low, high = between
    if len(seen) < 2:
        guess: float = 2 * low
    else:
        a, b = sorted(seen)[-2:]
        slope = (seen[b] - seen[a]) / (b - a)
        guess = b + (limit - seen[b]) / slope if slope > 0 else math.inf
        guess = min(guess, FASTEST * low)
    if len(seen) > PATIENCE and high <= most:  # not as linear as it should be
        guess = (low + high) / 2
    if not math.isfinite(guess):
        guess = FASTEST * low
    guess = step * math.floor(guess / step)
    return int(min(max(guess, low + step), high - step))


def _forecast(seen: dict[int, float], size: int) -> float:
    """What ``size`` should take, by the largest two that were tried."""
    if len(seen) < 2:
        return 0.0
    a, b = sorted(seen)[-2:]
    return seen[b] + (size - b) * (seen[b] - seen[a]) / (b - a)
