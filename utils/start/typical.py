"""The typical figures of a run. Without torch."""

import math
import statistics
from collections.abc import Mapping, Sequence


def typical(points: Mapping[int, float] | Mapping[float, float]) -> float | None:
    """The median of ``points`` (epochs finished: value) over the epochs after the first.

    Caches, processes and compilers warm up in the first epoch: it counts only if there is no other.
    NaN (not measured) is left out. None if nothing remains.
    """
    measured = {x: value for x, value in points.items() if not math.isnan(value)}
    values = [value for x, value in measured.items() if x > 1] or list(measured.values())
    return statistics.median(values) if values else None


def over_epochs(history: Sequence[Mapping[str, float]], tag: str) -> float | None:
    """`typical` of ``tag`` over a run's epoch records (see `TrainState.history`)."""
    return typical({record["epoch"]: record[tag] for record in history if tag in record})
