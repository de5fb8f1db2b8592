"""Measure the cases of a benchmark in interleaved rounds, and print a table of medians."""

import resource
import sys
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, TypeVar

from compare.table import NONE, markdown_table

from utils.start.errors import UserError

Case = TypeVar("Case")
Figures = dict[str, Any]


def measure(
    cases: Iterable[Case],
    rounds: int,
    figures_of: Callable[[Case], Figures],
    strict: bool = False,
) -> dict[Case, list[Figures]]:
    """Measure each case once per round, so that a change of the machine's speed affects all cases.

    Every other round runs in reverse order. A case that fails is reported and left out.
    Returns: the figures of each case, by round.
    Raises: `UserError` if no case is left, or with ``strict`` when the first case fails.
    """
    results: dict[Case, list[Figures]] = {case: [] for case in cases}
    for number in range(rounds):
        for case in list(results)[:: -1 if number % 2 else 1]:
            print(f"... round {number + 1}, {case}", file=sys.stderr, flush=True)
            try:
                results[case].append(figures_of(case))
            except UserError as error:
                if strict:
                    raise
                print(f"{case}: {error}", file=sys.stderr, flush=True)
                del results[case]
                if not results:
                    text = f"no case could be measured; the last error: {error}"
                    raise UserError(text, code=error.code) from None
    return results


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its child processes that have exited."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def add_ratio(rounds: list[Figures], base: list[Figures], key: str, name: str = "ratio") -> None:
    """Add to each round its speed relative to the same round of ``base``.

    ``key`` is a time, or a speed if it ends with ``_per_s``.
    """
    for one, other in zip(rounds, base, strict=False):
        fast, slow = (one, other) if key.endswith("_per_s") else (other, one)
        one[name] = fast[key] / slow[key]


def table(head: str, results: dict[str, list[Figures]], columns: dict[str, tuple[str, str]]) -> str:
    """Format a row of medians for each case, in Markdown; `NONE` where a figure is unknown.

    ``head`` and names may hold several cells, as in a|b. ``columns``: title: (figure, format).
    """
    rows = []
    for name, rounds in results.items():
        cells = name.split("|")
        for key, form in columns.values():
            values = [one[key] for one in rounds if key in one]
            cells.append(format(median(values), form) if values else NONE)
        rows.append(cells)
    return markdown_table([*head.split("|"), *columns], rows)
