"""Finds the largest size that fits, where what a size takes is known only by trying it."""

import math
from collections.abc import Callable

FASTEST = 4  # times the size that fitted, at most, before any was too large
PATIENCE = 6  # sizes, until what they take is no longer believed to be linear


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
    low, high, size, tried = 0, math.inf, step, 0
    while True:
        taken, tried, last = take(size), tried + 1, size
        if taken <= limit:
            low, seen[size] = size, taken
        else:
            high = size
            if not low:
                return 0, taken
        if low >= most or high - low <= step:
            return low, seen[low]
        size = _guess(seen, limit, low)
        # What was wrong is not asked again.
        if high < math.inf and (high == last or tried > PATIENCE):
            size = (low + high) / 2
        size = min(max(size, low + step), most, high - step)
        size = step * math.floor(size / step)
        if careful and size > step and _forecast(seen, size) > limit:
            return low, seen[low]


def _guess(seen: dict[int, float], limit: float, low: int) -> float:
    """Where the limit should be, by the largest two sizes that were tried."""
    if len(seen) < 2:
        return 2 * low
    a, b = sorted(seen)[-2:]
    slope = (seen[b] - seen[a]) / (b - a)
    guess = b + (limit - seen[b]) / slope if slope > 0 else math.inf
    return min(guess, FASTEST * low)


def _forecast(seen: dict[int, float], size: int) -> float:
    """What ``size`` should take, by the largest two that were tried."""
    if len(seen) < 2:
        return 0.0
    a, b = sorted(seen)[-2:]
    return seen[b] + (size - b) * (seen[b] - seen[a]) / (b - a)
