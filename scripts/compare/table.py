"""The table of a comparison as plain text, Markdown and CSV.

`text_table` and `markdown_table` print the tables of all other scripts as well.
"""

import csv
import io
import math
from collections.abc import Sequence

from compare.comparison import Comparison, Row
from compare.labels import shorten

WIDTH = 110  # characters in a line of the text table; further columns come below


def text_table(head: Sequence[object], rows: Sequence[Sequence[object]], width: int = WIDTH) -> str:
    """A table as plain text: the first column aligned left, all others right.

    Columns that do not fit into ``width`` characters come below, behind the first column again.
    """
    lines = [[str(cell) for cell in line] for line in (head, *rows)]
    wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
    blocks, columns = [], range(1, len(wide))
    while True:
        taken, used = [], wide[0]
        for column in columns:
            used += 2 + wide[column]
            if taken and used > width:
                break
            taken.append(column)
        texts = [
            line[0].ljust(wide[0]) + "".join(line[i].rjust(2 + wide[i]) for i in taken)
            for line in lines
        ]
        blocks.append("\n".join(text.rstrip() for text in texts))
        columns = columns[len(taken) :]
        if not columns:
            return "\n\n".join(blocks)


def markdown_table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A table as Markdown: the first column aligned left, all others right."""
    lines = [[escape_markdown(str(cell)) for cell in line] for line in (head, *rows)]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([text[0], "|---|" + "---:|" * (len(head) - 1), *text[1:]])


def escape_markdown(text: str) -> str:
    """``text`` as one table cell, whatever characters are in it."""
    text = " ".join(text.split())
    for sign in "\\`*_[]#|":
        text = text.replace(sign, "\\" + sign)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def shown(both: Comparison) -> list[Row]:
    """The rows that people read; the others are for programs."""
    return [row for row in both.rows if row.title]


def as_text(both: Comparison) -> str:
    """One row per quantity and one column per run; then the path of each run that the head of its
    column does not name."""
    heads = shorten([run.label for run in both.runs], 20)
    text = text_table(["", *heads], [[row.title, *row.cells] for row in shown(both)])
    pairs = zip(heads, both.runs, strict=True)
    named = [f"{head}: {run.path}" for head, run in pairs if head != run.path.name]
    return "\n\n".join([text, *(["\n".join(named)] if named else [])])


def as_markdown(both: Comparison) -> str:
    """One row per quantity and one column per run."""
    return markdown_table(
        ["", *(run.label for run in both.runs)],
        [[row.title.strip(), *row.cells] for row in shown(both)],
    )


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
