"""The section of a comparison in RESULTS.md: between markers, so that it can be rewritten."""

import os
import re
from pathlib import Path

from compare.comparison import Comparison, date_of
from compare.runs import Run
from compare.table import as_markdown, escape_markdown, markdown_table

from utils.atomic import save_atomically
from utils.errors import UserError


def update(file: Path, both: Comparison, title: str, command: str, pictures: list[Path]) -> bool:
    """Write the section called ``title`` into ``file``; nothing else in it is touched.

    Returns whether the file has changed. Raises: `UserError`.
    """
    return put(file, "compare_runs", title, _section(file, both, title, command, pictures))


def put(file: Path, tool: str, title: str, section: str) -> bool:
    """Write a ``section`` of Markdown into ``file``; nothing else in it is touched.

    The section is between two comments that name ``tool`` and ``title``; without them it goes to
    the end. Returns whether the file has changed. Raises `UserError` for markers that do not make
    a pair.
    """
    key = re.sub(r"[^\w.]+", "-", title.lower()).strip("-") or "comparison"
    begin, end = f"<!-- {tool} begin {key} -->", f"<!-- {tool} end {key} -->"
    try:
        old = file.read_bytes().decode() if file.exists() else ""
    except (OSError, UnicodeDecodeError) as fault:
        raise UserError(f"cannot read {file}: {fault}") from None
    section = "\n".join([begin, section, end])
    newline = "\r\n" if "\r\n" in old else "\n"
    section = section.replace("\n", newline)
    places = old.count(begin), old.count(end)
    if places == (0, 0):
        gap = newline * (0 if not old else 1 if old.endswith("\n") else 2)
        new = old + gap + section + newline
    elif places == (1, 1) and old.index(begin) < old.index(end):
        new = old[: old.index(begin)] + section + old[old.index(end) + len(end) :]
    else:
        raise UserError(
            f"{file} should hold '{begin}' and, after it, '{end}' once each: correct it by hand, "
            "or choose another --title"
        )
    if new == old:
        return False
    save_atomically(lambda out: out.write(new.encode()), file)
    return True


def _section(file: Path, both: Comparison, title: str, command: str, pictures: list[Path]) -> str:
    parts = [f"## {escape_markdown(title)}", fence(command), as_markdown(both)]
    if both.notes:
        parts.append("\n".join(f"- {escape_markdown(note)}" for note in both.notes))
    for picture in pictures:
        link = os.path.relpath(picture, file.parent).replace(os.sep, "/").replace(" ", "%20")
        name = picture.stem.replace("_", " ")
        parts.append(f"![{escape_markdown(name)}]({link})")
    parts.append("How each run was made:")
    rows = [[run.label, *origin(run).values()] for run in both.runs]
    parts.append(markdown_table(["run", *origin(both.runs[0])], rows))
    commands = [f"{run.label}: {run.known('command')}" for run in both.runs if run.known("command")]
    if commands:
        parts.append(fence("\n".join(commands)))
    return "\n\n".join(parts)


def fence(text: str) -> str:
    """A block of Markdown that shows ``text`` as it is."""
    ticks = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return f"{ticks}text\n{text}\n{ticks}"


def origin(run: Run) -> dict[str, str]:
    """Where a run comes from: folder, date, commit, machine, options ("not recorded": unknown)."""
    wanted = ("gpu", "driver", "cpu", "torch")
    machine = [f"{key} {run.known(key)}" for key in wanted if run.known(key)]
    return {
        "folder": run.name,
        "date": str(run.known("date") or date_of(run)),
        "commit": str(run.known("commit") or "not recorded"),
        "machine": ", ".join(machine) or "not recorded",
        "data": str(run.known("data_id") or "not recorded"),
        "options": _options(run) or "not recorded",
    }


def _options(run: Run) -> str:
    wanted = (
        *("recipe", "epochs", "lr", "lr_schedule", "lr_scaling", "warmup_epochs", "weight_decay"),
        *(
            "label_smoothing",
            "accum_steps",
            "image_size",
            "progressive",
            "precision",
            "comm",
            "workers",
            "seed",
        ),
    )
    known = [(key, run.known(key)) for key in wanted if run.known(key) is not None]
    return ", ".join(f"{key} {x:g}" if isinstance(x, float) else f"{key} {x}" for key, x in known)
