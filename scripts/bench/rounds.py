"""Measurements in interleaved rounds, and the table of all benches: medians over the rounds."""

import sys
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, TypeVar

from compare.table import NONE, markdown_table

from utils.errors import UserError

Case = TypeVar("Case")
Figures = dict[str, Any]
Cell = Callable[[list[Figures]], str]  # from a case's rounds


def measure(
    cases: Iterable[Case],
    rounds: int,
    figures_of: Callable[[Case], Figures],
    strict: bool = False,
) -> dict[Case, list[Figures]]:
    """Measure each case once per round, so that a change of the machine's speed affects all cases.

    Every other round runs in reverse order. A case that fails is reported and left out.
    Returns: the figures of each case, by round.
    Raises: `UserError` if no case is left; with ``strict`` as soon as one has failed.
    """
    results: dict[Case, list[Figures]] = {case: [] for case in cases}
    for number in range(rounds):
        for case in list(results) if number % 2 == 0 else list(results)[::-1]:
            print(f"... round {number + 1}, {case}", file=sys.stderr, flush=True)
            try:
                results[case].append(figures_of(case))
            except UserError as error:
                if strict:
                    raise
                print(f"{case}: {error}", file=sys.stderr, flush=True)
                del results[case]
                if not results:
                    text = f"no case could be measured; the last one: {error}"
                    raise UserError(text, code=error.code) from None
    return results


def middle(key: str, form: str, unit: float = 1) -> Cell:
    """A column's cells: the median of a figure, in units of ``unit``; `NONE` if unknown."""

    def cell(rounds: list[Figures]) -> str:
        values = [one[key] / unit for one in rounds if key in one]
        return format(median(values), form) if values else NONE

    return cell


def speed_up(first: list[Figures], key: str, form: str = ".2f", rate: bool = False) -> Cell:
    """A column's cells: speed relative to ``first``, as the median of the rounds' ratios.

    ``key`` is a time, or with ``rate`` a speed.
    """

    def cell(rounds: list[Figures]) -> str:
        pairs = zip(first, rounds, strict=False)
        ratios = [b[key] / a[key] if rate else a[key] / b[key] for a, b in pairs]
        return format(median(ratios), form)

    return cell


def table(head: str, results: dict[str, list[Figures]], columns: dict[str, Cell]) -> str:
    """A row for each case, in Markdown. ``head`` and names may have several cells, as a|b."""
    rows = [
        [*name.split("|"), *(cell(rounds) for cell in columns.values())]
        for name, rounds in results.items()
    ]
    return markdown_table([*head.split("|"), *columns], rows)
