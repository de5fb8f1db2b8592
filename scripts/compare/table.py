"""The table of a comparison: its rows, notes about them, and its formats.

`text_table` and `markdown_table` print the tables of all other scripts as well.
"""

import csv
import io
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from compare.runs import RATE, STEP_TIME, Run, ratio

from utils.atomic import save_atomically
from utils.errors import UserError

NONE = "-"
UNKNOWN = (None, "")
NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?( ?%| [a-z]{1,3})?( ± .*)?$")  # 95 %, 12.3 min
# Facts that must be equal, or the ratio of two runs' speeds means nothing.
MUST_AGREE = ("arch", "image_size", "data_id", "train_sizes")
# Facts that may differ, but explain part of the difference in speed.
SHOULD_AGREE = ("batch_per_gpu", "mode", "precision", "comm", "gpu", "cpu", "torch")
STEP_PARTS = ("data", "compute", "communication")
METRICS = {  # tag: title, form of a value
    "Top1": ("top-1, %", "{:.2f}"),
    "Top5": ("top-5, %", "{:.2f}"),
    "Loss": ("loss", "{:.4f}"),
}
MACHINE = ("gpu", "driver", "cpu", "torch")


# ---- tables and Markdown of all scripts


def text_table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A table as plain text: the first column and columns of words aligned left, numbers right."""
    lines = [[str(cell) for cell in line] for line in (head, *rows)]
    columns = []
    for i, column in enumerate(zip(*lines, strict=True)):
        wide = max(map(len, column))
        adjust = str.ljust if i == 0 or holds_words(column[1:]) else str.rjust
        columns.append([adjust(cell, wide) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def markdown_table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A table as Markdown: the first column and columns of words aligned left, numbers right."""
    lines = [[str(cell) for cell in line] for line in (head, *rows)]
    columns = list(zip(*lines, strict=True))[1:]
    rule = "|---|" + "".join("---|" if holds_words(one[1:]) else "---:|" for one in columns)
    text = ["| " + " | ".join(map(escape_markdown, line)) + " |" for line in lines]
    return "\n".join([text[0], rule, *text[1:]])


def holds_words(cells: Sequence[str]) -> bool:
    """Whether most of a column's cells are words: neither numbers, with a unit or not, nor `-`."""
    known = [cell for cell in cells if cell != NONE]
    return 2 * sum(not NUMBER.match(cell) for cell in known) > len(known)


def escape_markdown(text: str) -> str:
    """``text`` as one table cell, whatever characters are in it."""
    text = re.sub(r"([\\`*_\[\]#|])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def fence(text: str) -> str:
    """A block of Markdown that shows ``text`` as it is."""
    ticks = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return f"{ticks}text\n{text}\n{ticks}"


def put(file: Path, tool: str, title: str, section: str) -> None:
    """Write a ``section`` of Markdown into ``file``; nothing else in it is touched.

    Two comments that name ``tool`` and ``title`` enclose it; a new section goes to the end. Raises
    `UserError` for markers that do not make a pair.
    """
    key = re.sub(r"[^\w.]+", "-", title.lower()).strip("-") or "comparison"
    begin, end = f"<!-- {tool} begin {key} -->", f"<!-- {tool} end {key} -->"
    try:
        old = file.read_bytes().decode() if file.exists() else ""
    except UnicodeDecodeError:
        raise UserError(f"{file} is not a text file: name another one") from None
    found = re.findall(f"{re.escape(begin)}.*?{re.escape(end)}", old, re.DOTALL)
    if not old.count(begin) == old.count(end) == len(found) <= 1:
        raise UserError(
            f"{file} should hold '{begin}' and, after it, '{end}' once each: correct it by hand, "
            "or choose another --title"
        )
    section = f"{begin}\n{section}\n{end}"
    gap = "" if not old else "\n" if old.endswith("\n") else "\n\n"
    new = old.replace(found[0], section) if found else f"{old}{gap}{section}\n"
    save_atomically(lambda out: out.write(new.encode()), file)


# ---- how values are shown


def number(value: float | str) -> str:
    """A figure with four significant digits; from 1000 on without decimals. Words as they are."""
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(hours: float) -> str:
    """Hours as 35 s, 12.3 min or 5.21 h."""
    if hours < 1 / 60:
        return f"{3600 * hours:.3g} s"
    return f"{60 * hours:.3g} min" if hours < 1 else f"{number(round(hours, 2))} h"


def share(value: float) -> str:
    return f"{100 * value:.0f} %"


# ---- the comparison


class Row(NamedTuple):
    """A quantity: ``of(run)`` is its value, ``show(value)`` its text. A ``rare`` one is left out
    if no run has it."""

    title: str
    key: str
    of: Callable[[Run], Any]
    show: Callable[[Any], str] = number
    rare: bool = False


class Comparison:
    """Runs and their table. ``bases``: the runs that speeds are divided by; ``values`` and
    ``cells``: by the keys of ``rows``, one of each run."""

    def __init__(
        self,
        runs: list[Run],
        within: float | None = None,
        target: float | None = None,
        price: float | None = None,
    ):
        """``within``: hours; ``target``: per cent; ``price``: of a node for an hour."""
        self.runs, self.within, self.target, self.price = runs, within, target, price
        find_bases(runs)
        self.bases = list(dict.fromkeys(run.base for run in runs if run.base))
        if within is None and all(run.hours for run in runs):
            self.within = min(run.total_hours for run in runs)
        tops = [top for run in runs if (top := run.best("Top1/val")[0]) is not None]
        if target is None and tops:
            self.target = float(math.floor(min(tops)))
        self.rows: list[Row] = []
        self.values: dict[str, list[Any]] = {}
        self.cells: dict[str, list[str]] = {}
        for row in _rows(self):
            values = [row.of(run) for run in runs]
            if not row.rare or any(value not in UNKNOWN for value in values):
                self.rows.append(row)
                self.values[row.key] = values
                self.cells[row.key] = [NONE if v in UNKNOWN else row.show(v) for v in values]
        self.notes = _notes(self)

    def as_text(self) -> str:
        """One column per run; long labels stand below, with the path of each run."""
        labels = [run.label for run in self.runs]
        short = max(map(len, labels)) <= 20
        heads = labels if short else [f"({i})" for i, _ in enumerate(labels, 1)]
        text = text_table(["", *heads], [[row.title, *self.cells[row.key]] for row in self.rows])
        named = [
            f"{head}: {run.path}" if short else f"{head} {run.label}: {run.path}"
            for head, run in zip(heads, self.runs, strict=True)
        ]
        return "\n".join([text, "", *named])

    def as_markdown(self) -> str:
        rows = [[row.title.strip(), *self.cells[row.key]] for row in self.rows]
        return markdown_table(["", *(run.label for run in self.runs)], rows)

    def as_csv(self) -> str:
        """One line per run, full precision, empty where unknown. Shares are 0 to 1, accuracies in
        per cent, times in the unit that the column names."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["run", "label", *self.values])
        for run, *values in zip(self.runs, *self.values.values(), strict=True):
            cells = [f"{v:.10g}" if isinstance(v, float) else v for v in values]
            writer.writerow([run.path, run.label, *cells])
        return file.getvalue()

    def section(self, file: Path, title: str, command: str, pictures: Iterable[Path]) -> str:
        """The comparison as a section of a Markdown ``file``."""
        parts = [f"## {escape_markdown(title)}", fence(command), self.as_markdown()]
        parts.append("\n".join(f"- {escape_markdown(note)}" for note in self.notes))
        for picture in pictures:
            link = os.path.relpath(picture, file.parent).replace(" ", "%20")
            parts.append(f"![{escape_markdown(picture.stem.replace('_', ' '))}]({link})")
        head = ["run", *origin(self.runs[0])]
        rows = [[run.label, *origin(run).values()] for run in self.runs]
        parts += ["How each run was made:", markdown_table(head, rows)]
        return "\n\n".join(filter(None, parts))


def origin(run: Run) -> dict[str, str]:
    """Where a run comes from. Its command is shown without the folder of the script."""
    facts = run.facts
    found = {
        "folder": run.folder.name,
        "date": facts.get("date") or time.strftime("%Y-%m-%d", time.gmtime(facts["began"])),
        "commit": facts.get("commit"),
        "machine": ", ".join(f"{key} {facts[key]}" for key in MACHINE if facts.get(key)),
        "data": facts.get("data_id"),
        "command": re.sub(r"^\S*/", "", facts.get("command") or ""),
    }
    return {key: str(value or "not recorded") for key, value in found.items()}


def find_bases(runs: list[Run]) -> None:
    """Set the base of each run: the comparable run with the fewest GPUs."""
    groups: list[list[Run]] = []
    for run in runs:
        alike = (g for g in groups if not any(differ(run, other, MUST_AGREE) for other in g))
        group = next(alike, None)
        groups.append([run]) if group is None else group.append(run)
    for group in groups:
        fast = [run for run in group if run.usual(RATE)]
        if fast and (len(group) > 1 or len(runs) == 1):
            base = min(fast, key=lambda run: run.facts.get("gpus") or math.inf)
            for run in group:
                run.base = base


def differ(one: Run, other: Run, keys: Sequence[str]) -> str:
    """Those of the facts ``keys`` that both runs recorded and that differ, with their values."""
    pairs = [(key.replace("_", " "), one.facts.get(key), other.facts.get(key)) for key in keys]
    return " and ".join(
        f"{name} ({number(a)}, not {number(b)})"
        for name, a, b in pairs
        if a not in UNKNOWN and b not in UNKNOWN and a != b
    )


def _rows(both: Comparison) -> list[Row]:
    """All quantities. The keys are columns of the CSV file."""
    target, price, within = both.target, both.price, both.within

    def fact(title: str, key: str, rare: bool = False) -> Row:
        return Row(title, key, lambda run: run.facts.get(key), rare=rare)

    def usual(title: str, key: str, tag: str, show: Callable = number, rare: bool = False) -> Row:
        return Row(title, key, lambda run: run.usual(tag), show, rare)

    def highest(title: str, key: str, tag: str, rare: bool = False) -> Row:
        return Row(title, key, lambda run: run.highest(tag), rare=rare)

    def cost(run: Run, hours: float | None) -> float | None:
        nodes = run.facts.get("nodes")
        return hours * nodes * price if hours and nodes else None

    def until_target(run: Run) -> float | None:
        return run.hours.get(run.reached(target))

    to = f" to {both.bases[0].label}" if len(both.bases) == 1 else ""
    per_gpu = lambda run: ratio(run.usual(RATE), run.facts.get("gpus"))  # noqa: E731
    rows = [
        fact("nodes", "nodes"),
        fact("GPUs (processes)", "gpus"),
        fact("arch", "arch"),
        fact("mode", "mode"),
        fact("recipe", "recipe", rare=True),
        fact("training image sizes", "progressive", rare=True),
        highest("learning rate (highest)", "lr", "Lr"),
        fact("batch per GPU", "batch_per_gpu"),
        fact("global batch", "global_batch"),
        fact("steps per epoch", "steps_per_epoch"),
        usual("images/s", "images_per_s", RATE),
        Row("images/s per GPU", "images_per_s_per_gpu", per_gpu),
        Row(f"speed-up{to}", "speed_up", lambda run: run.speed_up, "{:.2f}".format),
        Row("scaling efficiency", "scaling_efficiency", lambda run: run.efficiency, share),
        Row("time per step, ms", "step_ms", lambda run: ratio(run.usual(STEP_TIME), 0.001)),
        Row("time per epoch", "epoch_h", lambda run: ratio(run.epoch_seconds, 3600), duration),
        Row("epochs finished", "epochs", lambda run: run.epochs),
    ]
    if within is not None:
        title = f"epochs in {duration(within)}"
        rows.append(Row(title, "epochs_within", lambda run: run.done_within(within)))
    rows.append(Row("total time", "hours", lambda run: run.total_hours, duration))
    for tag, (title, form) in METRICS.items():
        rows += _best(tag, title, form.format)
    for tag, (title, form) in METRICS.items():
        last = partial(Run.last, tag=f"{tag}/test")
        rows.append(Row(f"test {title}", f"test_{tag.lower()}", last, form.format, rare=True))
    if target is not None:
        rows.append(Row(f"time to top-1 of {target:g} %", "target_h", until_target, duration))
        rows.append(Row("  epochs needed", "target_epochs", lambda run: run.reached(target)))
        if price is not None:
            title = f"cost to top-1 of {target:g} %"
            rows.append(Row(title, "target_cost", lambda run: cost(run, until_target(run))))
    if price is not None:
        rows.append(Row("cost of the whole run", "cost", lambda run: cost(run, run.total_hours)))
    rows.append(usual("waiting for data", "data_wait_share", "IO/wait_share", share))
    for name in STEP_PARTS:
        of = partial(step_share, name=name)
        rows.append(Row(f"  share of step: {name}", f"step_{name}_share", of, share, rare=True))
    for name in ("parameters", "gradients", "optimizer", "activations"):
        key = f"{name}_mb"
        rows.append(highest(f"{name}, MiB per process", key, f"Memory/{key}", rare=True))
    return [
        *rows,
        fact("sent per step, MB per process", "sent_mb_per_step", rare=True),
        usual("GPU utilisation, %", "gpu_utilisation", "GPU/utilisation"),
        highest("GPU memory, GiB", "gpu_memory_gb", "GPU/memory_gb"),
        usual("GPU power, W", "gpu_w", "GPU/power_w", rare=True),
        usual("CPU utilisation, %", "cpu_utilisation", "CPU/utilisation", rare=True),
        Row("state", "state", lambda run: run.state, rare=True),
    ]


def _best(tag: str, title: str, show: Callable) -> list[Row]:
    """The best validation value, and when it was reached."""
    key, val, ema = tag.lower(), f"{tag}/val", f"{tag}/ema"
    hours = lambda run: run.hours.get(run.best(val)[1])  # noqa: E731
    return [
        Row(f"best val {title}", f"best_{key}", lambda run: run.best(val)[0], show),
        Row("  in epoch", f"best_{key}_epoch", lambda run: run.best(val)[1]),
        Row("  after", f"best_{key}_h", hours, duration),
        Row("  of averaged weights", f"best_ema_{key}", lambda run: run.best(ema)[0], show, True),
    ]


def step_share(run: Run, name: str) -> float | None:
    """The share of a step spent on one of `STEP_PARTS`.

    None for compute where communication is not measured (FSDP): it is in it.
    """
    if name != "data" and run.usual("Time/communication") is None:
        return None
    whole = sum(run.usual(f"Time/{part}") or 0.0 for part in STEP_PARTS)
    return ratio(run.usual(f"Time/{name}"), whole)


def _notes(both: Comparison) -> list[str]:
    """Notes: problems of single runs, runs that cannot be compared and why, and the kind of scaling
    that the efficiency measures."""
    runs = both.runs
    notes = [
        f"{', '.join(run.label for run in runs if text in run.notes)}: {text}"
        for text in dict.fromkeys(text for run in runs for text in run.notes)
    ]
    reference = both.bases[0] if both.bases else runs[0]
    for run in runs:
        if strange := differ(run, reference, MUST_AGREE):
            fate = f"its base is {run.base.label}" if run.base else "it has no speed-up"
            notes.append(
                f"NOT COMPARABLE: {run.label} differs from {reference.label} in {strange}; {fate}"
            )
        elif run.base and (what := differ(run, run.base, SHOULD_AGREE)):
            notes.append(
                f"{run.label} differs from its base {run.base.label} in {what}: the efficiency "
                "is not that of scaling alone"
            )
    for base in both.bases:
        group = [run for run in runs if run.base is base]
        gpus, per_gpu, whole = (
            {run.facts.get(key) for run in group}
            for key in ("gpus", "batch_per_gpu", "global_batch")
        )
        kind = "at different batches per GPU"
        if None in per_gpu:
            kind = "the batches per GPU are not recorded"
        elif len(per_gpu) == 1:
            kind = "at an equal batch per GPU (weak scaling)"
        elif len(whole) == 1:
            kind = "at an equal global batch (strong scaling)"
        if len(gpus - {None}) > 1:
            notes.append(f"speed-up and efficiency: images/s relative to {base.label}, {kind}")
    return notes
