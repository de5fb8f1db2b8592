"""The table of a comparison as plain text, Markdown, CSV and HTML cells."""

import csv
import io
import math
from collections.abc import Sequence

from compare.comparison import Comparison, Row
from compare.labels import shorten

WIDTH = 110  # characters in a line of the text table; further runs come below


def shown(both: Comparison) -> list[Row]:
    """The rows that people read; the others are for programs."""
    return [row for row in both.rows if row.title]


def as_text(both: Comparison) -> str:
    """One row per quantity and one column per run; runs that do not fit in a line come below. Then
    the path of each run that the head of its column does not name."""
    heads = shorten([run.label for run in both.runs], 20)
    titles = ["", *(row.title for row in shown(both))]
    columns = [[head, *(row.cells[i] for row in shown(both))] for i, head in enumerate(heads)]
    first = max(map(len, titles))
    blocks, taken = [], 0
    while taken < len(columns):
        wide, block = first, []
        for column in columns[taken:]:
            own = 2 + max(map(len, column))
            if block and wide + own > WIDTH:
                break
            block.append([cell.rjust(own) for cell in column])
            wide += own
        taken += len(block)
        lines = [
            title.ljust(first) + "".join(cells).rstrip()
            for title, *cells in zip(titles, *block, strict=True)
        ]
        blocks.append("\n".join(line.rstrip() for line in lines))
    pairs = zip(heads, both.runs, strict=True)
    named = [f"{head}: {run.path}" for head, run in pairs if head != run.path.name]
    return "\n\n".join([*blocks, *(["\n".join(named)] if named else [])])


def escape_markdown(text: str) -> str:
    """``text`` as one table cell, whatever characters are in it."""
    text = " ".join(text.split())
    for sign in "\\`*_[]#|":
        text = text.replace(sign, "\\" + sign)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def as_markdown(both: Comparison) -> str:
    """One row per quantity and one column per run."""
    return markdown_table(
        ["", *(run.label for run in both.runs)],
        [[row.title.strip(), *row.cells] for row in shown(both)],
    )


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, figures aligned right."""
    lines = [head, *rows]
    text = ["| " + " | ".join(escape_markdown(cell) for cell in line) + " |" for line in lines]
    text.insert(1, "|---|" + "---:|" * (len(head) - 1))
    return "\n".join(text)


def as_csv(both: Comparison) -> str:
    """One line per run and one column per quantity, full precision, empty where unknown.

    Shares are 0 to 1, accuracies in per cent, times in the unit that the column names.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["run", "label", *(row.key for row in both.rows)])
    for i, run in enumerate(both.runs):
        values = [row.values[i] for row in both.rows]
        writer.writerow([run.path, run.label, *map(_plain, values)])
    return file.getvalue()


def _plain(value: object) -> object:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, float):
        return f"{value:.10g}"
    return value
