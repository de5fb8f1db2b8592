"""The table that published scaling experiments have, row for row, so that both can be compared."""

import math
import statistics
from collections.abc import Callable, Sequence

from compare.table import markdown_table
from study.outcome import Column, Outcome, spread

LEGEND = (
    "Learning rate: the highest that was reached. Epoch time: evaluation included, the first epoch "
    "left out if there are others. Epochs at a time: finished by then. Scaling efficiency: epoch "
    "time x processes of the first column, divided by the same of this one. Test figures: of the "
    "best model on DATA/test."
)


def rows(columns: Sequence[Column], hours: float | None) -> list[list[str]]:
    """The table of one curve: its head, then one row per quantity; "-" for what is not recorded.

    ``hours``: the time for which epochs are counted; None: until each training ended.
    """
    power = _power(columns)
    asked: list[tuple[str, Callable[[Outcome], float | None], Callable[[float], str]]] = [
        (f"Learning Rate (e{power})", learning_rate, lambda x: f"{x / 10.0**power:.2f}"),
        ("Global Batch Size", lambda one: one.run.facts.get("global_batch"), "{:.0f}".format),
        ("Steps Per Epoch", lambda one: one.run.facts.get("steps_per_epoch"), "{:.0f}".format),
        ("Avg Epoch Time (min)", epoch_minutes, minutes),
        (
            "Epoch Num" + (f" @ {hours:g} hr" if hours is not None else ""),
            lambda one: epochs_within(one, hours),
            lambda x: f"{x:.3g}" if x % 1 else f"{x:.0f}",
        ),
        ("Scaling Efficiency", lambda one: efficiency(one, columns), "{:.2f}".format),
        ("Best Validation Loss", lambda one: _best(one, "Loss/val"), "{:.4f}".format),
        ("Test Loss", lambda one: one.run.last("Loss/test"), "{:.4f}".format),
        ("Top1 Test Accuracy", lambda one: one.run.last("Top1/test"), "{:.2f}%".format),
    ]
    table = [["", *(column.title for column in columns)]]
    for title, of, show in asked:
        table.append([title, *(spread(column.values(of), show) for column in columns)])
    return table


def as_markdown(columns: Sequence[Column], hours: float | None) -> str:
    """The table of one curve."""
    head, *body = rows(columns, hours)
    return markdown_table(head, body)


def learning_rate(one: Outcome) -> float | None:
    """The highest learning rate that the run has reached."""
    return one.run.highest("Lr")


def _power(columns: Sequence[Column]) -> int:
    """The power of ten in which learning rates are shown: that of the smallest."""
    rates = [rate for column in columns for rate in column.values(learning_rate) if rate > 0]
    # 1e-4 that went through 32 bits must not become 9.99e-5.
    return math.floor(math.log10(min(rates) * 1.0001)) if rates else 0


def epoch_minutes(one: Outcome) -> float | None:
    """Minutes per epoch, evaluation included."""
    seconds = one.run.epoch_seconds
    return None if seconds is None else seconds / 60


def minutes(value: float) -> str:
    """Two decimals, or two digits where that would be nothing."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def epochs_within(one: Outcome, hours: float | None) -> float | None:
    """Epochs finished in ``hours`` of training; None for a run that has not come so far."""
    run = one.run
    if hours is None or (one.is_finished and (run.total_hours or 0.0) <= hours):
        return run.epochs
    if not run.hours or run.total_hours < hours:
        return None
    return max((x for x, h in run.hours.items() if h <= hours), default=0)


def efficiency(one: Outcome, columns: Sequence[Column]) -> float | None:
    """How much of the first column's speed per process is left: 1 is perfect scaling."""
    base = columns[0]
    first = base.values(epoch_minutes)
    sizes = base.values(lambda other: other.units)
    own = epoch_minutes(one)
    if not (first and sizes and own and one.units):
        return None
    return statistics.fmean(first) * sizes[0] / (own * one.units)


def _best(one: Outcome, tag: str) -> float | None:
    return one.run.best(tag)[0]
