"""Format tables as text and as Markdown, and the values in them."""

import re
from collections.abc import Sequence
from pathlib import Path

from utils.start.atomic import save_atomically
from utils.start.errors import UserError

NONE = "-"
NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?( ?%| [a-z]{1,3})?( ± .*)?$")  # 95 %, 12.3 min


def text_table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Format a table as text: the first column and columns of words left, numbers right."""
    lines = [[str(cell) for cell in line] for line in (head, *rows)]
    columns = []
    for i, column in enumerate(zip(*lines, strict=True)):
        wide = max(map(len, column))
        adjust = str.ljust if i == 0 or holds_words(column[1:]) else str.rjust
        columns.append([adjust(cell, wide) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def markdown_table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Format a table as Markdown: the first column and columns of words left, numbers right."""
    lines = [[str(cell) for cell in line] for line in (head, *rows)]
    columns = list(zip(*lines, strict=True))[1:]
    rule = "|---|" + "".join("---|" if holds_words(one[1:]) else "---:|" for one in columns)
    text = ["| " + " | ".join(map(escape_markdown, line)) + " |" for line in lines]
    return "\n".join([text[0], rule, *text[1:]])


def holds_words(cells: Sequence[str]) -> bool:
    """Whether most of a column's cells are words, not numbers; `-` does not count."""
    known = [cell for cell in cells if cell not in ("", NONE)]
    return 2 * sum(not NUMBER.match(cell) for cell in known) > len(known)


def escape_markdown(text: str) -> str:
    """Escape ``text`` so that Markdown shows it literally in a table cell."""
    text = re.sub(r"([\\`*_\[\]#|])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def fence(text: str) -> str:
    """Wrap ``text`` in a Markdown code block."""
    ticks = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return f"{ticks}text\n{text}\n{ticks}"


def put(file: Path, tool: str, title: str, section: str) -> None:
    """Write a ``section`` of Markdown into ``file``, and keep the rest of the file.

    Two comments that name ``tool`` and ``title`` enclose the section. A new section goes to the
    end. Raises: `UserError` if the file does not have exactly one pair of these comments, or has no
    folder.
    """
    if not file.parent.is_dir():
        raise UserError(f"there is no folder {file.parent} for {file.name}: make it first")
    key = re.sub(r"[^\w.]+", "-", title.lower()).strip("-") or "comparison"
    begin, end = f"<!-- {tool} begin {key} -->", f"<!-- {tool} end {key} -->"
    try:
        old = file.read_bytes().decode() if file.exists() else ""
    except (UnicodeDecodeError, IsADirectoryError):
        raise UserError(f"{file} is not a text file: name another one") from None
    sections = re.findall(f"{re.escape(begin)}.*?{re.escape(end)}", old, re.DOTALL)
    if not old.count(begin) == old.count(end) == len(sections) <= 1:
        raise UserError(
            f"{file} should hold '{begin}' and, after it, '{end}' once each: correct it by hand, "
            "or choose another --title"
        )
    section = f"{begin}\n{section}\n{end}"
    gap = "" if not old else "\n" if old.endswith("\n") else "\n\n"
    new = old.replace(sections[0], section) if sections else f"{old}{gap}{section}\n"
    save_atomically(lambda out: out.write(new.encode()), file)


# ---- values


def number(value: float | str) -> str:
    """Format a number with four digits, from 1000 on without decimals; text stays unchanged."""
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(hours: float) -> str:
    """Format hours as 35 s, 12.3 min or 5.21 h."""
    if hours < 1 / 60:
        return f"{3600 * hours:.3g} s"
    return f"{60 * hours:.3g} min" if hours < 1 else f"{number(round(hours, 2))} h"


def share(value: float) -> str:
    return f"{100 * value:.0f} %"
