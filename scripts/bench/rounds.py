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
    """The figures of each case, round by round: a change of the machine's speed affects all.

    Every other round goes backwards. A case that fails is named and left out. Raises: `UserError`
    if no case is left; with ``strict`` once one has failed.
    """
    found: dict[Case, list[Figures]] = {case: [] for case in cases}
    for number in range(rounds):
        for case in list(found) if number % 2 == 0 else list(found)[::-1]:
            print(f"... round {number + 1}, {case}", file=sys.stderr, flush=True)
            try:
                found[case].append(figures_of(case))
            except UserError as fault:
                if strict:
                    raise
                print(f"{case}: {fault}", file=sys.stderr, flush=True)
                del found[case]
                if not found:
                    text = f"no case could be measured; the last one: {fault}"
                    raise UserError(text, code=fault.code) from None
    return found


def middle(key: str, form: str, unit: float = 1) -> Cell:
    """A column's cells: the median of a figure, in units of ``unit``; `NONE` if unknown."""

    def cell(rounds: list[Figures]) -> str:
        values = [one[key] / unit for one in rounds if key in one]
        return format(median(values), form) if values else NONE

    return cell


def speed_up(first: list[Figures], key: str, form: str = ".2f", rate: bool = False) -> Cell:
    """A column's cells: how many times as fast as ``first``, by a time or a ``rate``. The median of
    the rounds' ratios."""

    def cell(rounds: list[Figures]) -> str:
        pairs = zip(first, rounds, strict=False)
        ratios = [b[key] / a[key] if rate else a[key] / b[key] for a, b in pairs]
        return format(median(ratios), form)

    return cell


def table(head: str, found: dict[str, list[Figures]], columns: dict[str, Cell]) -> str:
    """A row for each case, in Markdown. ``head`` and names may have several cells, as a|b."""
    rows = [
        [*name.split("|"), *(cell(rounds) for cell in columns.values())]
        for name, rounds in found.items()
    ]
    return markdown_table([*head.split("|"), *columns], rows)
