"""The log book: a Markdown page for each study, made from the runs' own files, and an index."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from compare import pictures, table
from compare.table import Comparison, duration, escape_markdown, markdown_table, number
from study import curve, published, state
from study.outcome import Column, Outcome, columns
from study.state import State

from utils.errors import UserError

TOOL = "scaling_study"
PICTURES = ("overlay", "training_throughput", "scaling", "loss_val_hours", "top1_val_hours", "gpu")


@dataclass
class Study:
    """What a page is about. ``notes``: sentences at its head; ``weak``: equal batch per process."""

    name: str
    command: str
    hours: float | None = None
    weak: bool = True
    notes: list[str] = field(default_factory=list)


def write(book: Path, study: Study, outcomes: Sequence[Outcome], kept: State) -> list[str]:
    """Bring the page ``book``/NAME.md and the index up to date.

    Returns: what is new about the curve, as lines to print. Raises: `UserError`.
    """
    groups = columns(outcomes)
    seen = [one for one in outcomes if one.run is not None]
    done = sum(one.is_finished for one in outcomes)
    what = f"{done} of {len(outcomes)} arms finished" if kept.arms else f"{len(outcomes)} runs"
    head = f"{what}; brought up to date {state.now()}."
    parts = [f"# {escape_markdown(study.name)}", " ".join([head, *study.notes])]
    lessons, said = _lessons(groups, study)
    if seen:
        parts.append("## Scaling")
        parts += _scaling(groups, study.hours)
        parts += lessons
    parts += ["## Arms", _arms(outcomes, kept)]
    if seen:
        target = next((top1 for one in seen if (top1 := one.option("desired_acc"))), None)
        both = Comparison([one.run for one in seen], study.hours, target)
        parts += ["## Metrics", both.as_markdown()]
        parts += ["\n".join(f"- {escape_markdown(note)}" for note in both.notes)]
        parts += _pictures(both, book, study.name)
    parts += _origin(study, seen, outcomes)
    parts += _dumps(outcomes, kept.folder)
    table.put(book / f"{study.name}.md", TOOL, study.name, "\n\n".join(filter(None, parts)))
    best = [b[0] for one in seen if (b := one.run.best("Top1/val"))[0] is not None]
    archs = dict.fromkeys(
        str(one.run.facts.get("arch")) for one in seen if one.run.facts.get("arch")
    )
    kept.facts = {
        "model": ", ".join(archs) or table.NONE,
        "arms": what.removesuffix(" arms finished"),
        "columns": ", ".join(dict.fromkeys(c.title for group in groups.values() for c in group)),
        "top1": f"{max(best):.2f} %" if best else table.NONE,
        "date": state.now(),
    }
    kept.save()
    index(book)
    return said


def index(book: Path) -> None:
    """Bring the list of all studies, ``book``/README.md, up to date; other text in it stays."""
    rows = []
    for file in sorted(book.glob(f"*/{state.FILE}")):
        try:
            facts = State(file.parent).facts
        except UserError:  # not for this study to complain about
            continue
        if facts:
            link = f"[{escape_markdown(file.parent.name)}]({file.parent.name}.md)"
            cells = [facts.get(key, "-") for key in ("model", "columns", "arms", "top1", "date")]
            rows.append((link, cells))
    head = ["experiment", "model", "trained on", "arms finished", "best val top-1", "up to date"]
    lines = markdown_table(head, [["-", *cells] for _, cells in rows]).split("\n")
    for place, (link, _) in enumerate(rows, 2):  # a link in a cell is not to be escaped
        lines[place] = f"| {link}{lines[place].removeprefix('| -')}"
    table.put(book / "README.md", TOOL, "index", "# Log book\n\n" + "\n".join(lines))


def _scaling(groups: dict[str, list[Column]], hours: float | None) -> list[str]:
    parts = []
    for group, found in groups.items():
        if group and len(groups) > 1:
            parts.append(f"**{escape_markdown(group)}**")
        parts.append(published.as_markdown(found, hours))
    return [*parts, published.LEGEND]


def _lessons(groups: dict[str, list[Column]], study: Study) -> tuple[list[str], list[str]]:
    """The forecast beside what was measured, and sentences; as Markdown, and to be printed."""
    parts, said = [], []
    for group, found in groups.items():
        firsts = [column.outcomes[0] for column in found]
        nodes = [one.nodes for one in firsts]
        if None in nodes or len(set(nodes)) < len(nodes):
            continue
        try:
            lesson = curve.fit(firsts, nodes, study.weak)
        except UserError as fault:
            parts.append(f"No forecast: {escape_markdown(str(fault))}.")
            continue
        if lesson is None:
            continue
        head = ["nodes", "forecast, images/s", "measured, images/s", "error"]
        rows = [_point(point) for point in lesson.points]
        fitted = (
            "The forecast (scripts/forecast_scaling.py) is fitted to the two arms with the fewest "
            f"nodes: {lesson.network}."
        )
        title = f"Forecast and measured{': ' + group if group else ''}"
        parts += [f"### {escape_markdown(title)}", markdown_table(head, rows), fitted]
        parts.append("**" + escape_markdown(" ".join(lesson.sentences)) + "**")
        said += [f"{title}:", *_in_columns([head, *rows]), *lesson.sentences]
    return (["## What the curve says", *parts] if parts else []), said


def _point(point: curve.Point) -> list[str]:
    error = table.NONE
    if point.measured:
        error = f"{100 * (point.forecast / point.measured - 1) + 0.0:+.0f} %"
        error = f"fitted ({error})" if point.fitted else error
    return [str(point.nodes), number(point.forecast), number(point.measured), error]


def _in_columns(rows: list[list[str]]) -> list[str]:
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.rjust, row, wide)) for row in rows]


def _arms(outcomes: Sequence[Outcome], kept: State) -> str:
    head = [
        "arm",
        "state",
        "nodes",
        "began",
        "trained",
        "epochs",
        "largest batch",
        "best checkpoint",
    ]
    rows = []
    for one in outcomes:
        known = kept.arms.get(one.name)
        condition = known.status if known else str(one.run.state or table.NONE)
        if known and known.why and known.status == state.FAILED:
            condition += f": {known.why}"
        seconds = one.summary.get("elapsed_seconds")
        hours = seconds / 3600 if seconds is not None else one.run and one.run.total_hours
        rows.append(
            [
                one.name,
                condition,
                ", ".join(known.hosts) if known and known.hosts else str(one.nodes or "-"),
                known.began if known and known.began else _began(one),
                duration(hours or None),
                str(one.run.epochs) if one.run else table.NONE,
                str(one.summary.get("largest_batch") or table.NONE),
                _checkpoint(one),
            ]
        )
    return markdown_table(head, rows)


def _began(one: Outcome) -> str:
    return table.origin(one.run)["date"] if one.run and one.run.facts.get("began") else table.NONE


def _checkpoint(one: Outcome) -> str:
    """Where the best model is: in the store, if there is one."""
    if store := one.option("store"):
        return f"{str(store).rstrip('/')}/{one.name}/best.pt"
    best = one.folder / "best.pt"
    return str(best) if best.is_file() else table.NONE


def _pictures(both: Comparison, book: Path, name: str) -> list[str]:
    drawn, missing = pictures.draw(both, book / name, "", PICTURES)
    parts = ["## Pictures"]
    for picture in drawn:
        link = os.path.relpath(picture.file, book).replace(os.sep, "/").replace(" ", "%20")
        parts.append(f"![{escape_markdown(picture.title)}]({link})")
    wanted = [text for text in missing if text.partition(" ")[0] in PICTURES]
    return [*parts, "\n".join(f"- {escape_markdown(text)}" for text in wanted)]


def _origin(study: Study, seen: Sequence[Outcome], outcomes: Sequence[Outcome]) -> list[str]:
    parts = ["## How it was made", table.fence(study.command)]
    if seen:
        kinds = list(table.origin(seen[0].run))
        rows = [[one.run.label, *table.origin(one.run).values()] for one in seen]
        parts.append(markdown_table(["arm", *kinds], rows))
        commands = [
            f"{o.run.label}: {o.run.facts.get('command')}"
            for o in seen
            if o.run.facts.get("command")
        ]
        parts += ["Command of each run:", table.fence("\n".join(commands))] if commands else []
        paths = ",".join(f"{one.name}:{one.folder}" for one in seen)
        line = shlex.join(["python", "-m", "tensorboard.main", "--logdir_spec", paths])
        parts += ["The curves in TensorBoard:", table.fence(line)]
    return parts


def _dumps(outcomes: Sequence[Outcome], folder: Path) -> list[str]:
    """What nvidia-smi has said on each node of each arm."""
    parts = ["## nvidia-smi"]
    for one in outcomes:
        file = folder / f"{one.name}.nvidia-smi.txt"
        text = file.read_text().rstrip() if file.is_file() else ""
        parts.append(f"{escape_markdown(one.name)}: {'' if text else table.NONE}")
        parts += [table.fence(text)] if text else []
    return parts
