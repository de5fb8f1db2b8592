"""The table of a comparison: its rows, notes about them, and its formats.

`text_table` and `markdown_table` print the tables of all other scripts as well.
"""

import csv
import io
import itertools
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare.runs import RATE, STEP_TIME, Run, ratio

from utils.atomic import save_atomically
from utils.errors import UserError
from utils.run.provenance import typical

WIDTH = 110  # characters in a line of the text table; further columns come below
NONE = "-"
# Must be equal, or the ratio of two runs' speeds means nothing.
MUST_AGREE = {
    "arch": "arch",
    "image_size": "image size",
    "data_id": "data",
    "train_sizes": "training image sizes",
}
# May differ, but explain part of the difference in speed.
SHOULD_AGREE = {
    "batch_per_gpu": "batch per GPU",
    "mode": "mode",
    "precision": "precision",
    "comm": "gradients on the wire",
    "gpu": "GPU",
    "cpu": "CPU",
    "torch": "torch",
}
HINTS = {
    "gpus": " (give --gpus N N ...)",
    "steps_per_epoch": " (give --train-images N; ImageNet: 1281167)",
}
METRICS = {  # what it is called, and how its values are shown
    "Top1": ("top-1, %", "{:.2f}".format),
    "Top5": ("top-5, %", "{:.2f}".format),
    "Loss": ("loss", "{:.4f}".format),
}
STEP_PARTS = ("data", "compute", "communication")
OPTIONS = (
    *("recipe", "epochs", "lr", "lr_schedule", "lr_scaling", "warmup_epochs", "weight_decay"),
    *("label_smoothing", "accum_steps", "image_size", "progressive", "precision", "comm"),
    *("workers", "seed"),
)


def text_table(head: Sequence[object], rows: Sequence[Sequence[object]], width: int = WIDTH) -> str:
    """A table as plain text: the first column aligned left, all others right.

    Columns that do not fit into ``width`` characters are printed below, after the first column.
    """
    lines = [[str(cell) for cell in line] for line in (head, *rows)]
    wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
    blocks, first = [], 1
    while first < len(wide):
        last = first + 1
        while last < len(wide) and wide[0] + sum(2 + w for w in wide[first : last + 1]) <= width:
            last += 1
        texts = [
            line[0].ljust(wide[0]) + "".join(line[i].rjust(2 + wide[i]) for i in range(first, last))
            for line in lines
        ]
        blocks.append("\n".join(text.rstrip() for text in texts))
        first = last
    return "\n\n".join(blocks)


def markdown_table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A table as Markdown: the first column aligned left, all others right."""
    lines = [[escape_markdown(str(cell)) for cell in line] for line in (head, *rows)]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([text[0], "|---|" + "---:|" * (len(head) - 1), *text[1:]])


def escape_markdown(text: str) -> str:
    """``text`` as one table cell, whatever characters are in it."""
    text = re.sub(r"([\\`*_\[\]#|])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def fence(text: str) -> str:
    """A block of Markdown that shows ``text`` as it is."""
    ticks = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return f"{ticks}text\n{text}\n{ticks}"


def put(file: Path, tool: str, title: str, section: str) -> bool:
    """Write a ``section`` of Markdown into ``file``; nothing else in it is touched.

    Two comments that name ``tool`` and ``title`` enclose it; a new section goes to the end. Returns
    whether the file has changed. Raises `UserError` for markers that do not make a pair.
    """
    key = re.sub(r"[^\w.]+", "-", title.lower()).strip("-") or "comparison"
    begin, end = f"<!-- {tool} begin {key} -->", f"<!-- {tool} end {key} -->"
    try:
        old = file.read_bytes().decode() if file.exists() else ""
    except (OSError, UnicodeDecodeError) as fault:
        raise UserError(f"cannot read {file}: {fault}") from None
    newline = "\r\n" if "\r\n" in old else "\n"
    section = "\n".join([begin, section, end]).replace("\n", newline)
    found = re.findall(f"{re.escape(begin)}.*?{re.escape(end)}", old, re.DOTALL)
    if not old.count(begin) == old.count(end) == len(found) <= 1:
        raise UserError(
            f"{file} should hold '{begin}' and, after it, '{end}' once each: correct it by hand, "
            "or choose another --title"
        )
    gap = newline * (0 if not old else 1 if old.endswith("\n") else 2)
    new = old.replace(found[0], section) if found else old + gap + section + newline
    if new != old:
        save_atomically(lambda out: out.write(new.encode()), file)
    return new != old


@dataclass
class Row:
    """One quantity of all runs: ``cells`` to print, ``values`` for the CSV file.

    A row without a title is only for the CSV file.
    """

    title: str
    key: str
    cells: list[str]
    values: list[Any]


@dataclass
class Comparison:
    """Runs and their table. ``bases``: the runs that speeds are divided by."""

    runs: list[Run]
    within: float | None = None  # hours
    target: float | None = None  # per cent
    price: float | None = None  # of a node for an hour
    bases: list[Run] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self):
        find_bases(self.runs)
        self.bases = list(dict.fromkeys(run.base for run in self.runs if run.base))
        if self.within is None and all(run.hours for run in self.runs):
            self.within = min(run.total_hours for run in self.runs)
        tops = [top for run in self.runs if (top := run.best("Top1/val")[0]) is not None]
        if self.target is None and tops:
            self.target = float(math.floor(min(tops)))
        _fill(self)
        self.notes += _notes(self)

    def costs(self, run: Run) -> dict[int, float]:
        """What the training up to the end of each epoch cost; {} where that is not known."""
        nodes = run.facts.get("nodes")
        if self.price is None or not nodes:
            return {}
        return {epoch: hours * nodes * self.price for epoch, hours in run.hours.items()}

    @property
    def shown(self) -> list[Row]:
        return [row for row in self.rows if row.title]

    def as_text(self) -> str:
        """One column per run; below, the path of each run whose head is not its folder's name."""
        heads = shorten([run.label for run in self.runs], 20)
        text = text_table(["", *heads], [[row.title, *row.cells] for row in self.shown])
        pairs = zip(heads, self.runs, strict=True)
        named = [f"{head}: {run.path}" for head, run in pairs if head != run.path.name]
        return "\n".join([text, *([""] if named else []), *named])

    def as_markdown(self) -> str:
        rows = [[row.title.strip(), *row.cells] for row in self.shown]
        return markdown_table(["", *(run.label for run in self.runs)], rows)

    def as_csv(self) -> str:
        """One line per run, full precision, empty where unknown. Shares are 0 to 1, accuracies in
        per cent, times in the unit that the column names."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["run", "label", *(row.key for row in self.rows)])
        for run, *values in zip(self.runs, *(row.values for row in self.rows), strict=True):
            cells = [f"{v:.10g}" if isinstance(v, float) else v for v in values]
            writer.writerow([run.path, run.label, *cells])
        return file.getvalue()

    def section(self, file: Path, title: str, command: str, pictures: Sequence[Path]) -> str:
        """The comparison as a section of a Markdown ``file``."""
        parts = [f"## {escape_markdown(title)}", fence(command), self.as_markdown()]
        parts.append("\n".join(f"- {escape_markdown(note)}" for note in self.notes))
        for picture in pictures:
            link = os.path.relpath(picture, file.parent).replace(os.sep, "/").replace(" ", "%20")
            parts.append(f"![{escape_markdown(picture.stem.replace('_', ' '))}]({link})")
        rows = [[run.label, *origin(run).values()] for run in self.runs]
        head = ["run", *origin(self.runs[0])]
        parts += ["How each run was made:", markdown_table(head, rows)]
        commands = [(run.label, run.facts.get("command")) for run in self.runs]
        lines = "\n".join(f"{label}: {command}" for label, command in commands if command)
        return "\n\n".join(filter(None, [*parts, lines and fence(lines)]))


def origin(run: Run) -> dict[str, str]:
    """Where a run comes from."""

    def listed(keys: Sequence[str]) -> str:
        known = [(key, run.facts[key]) for key in keys if run.facts.get(key) not in (None, "")]
        words = [f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in known]
        return ", ".join(words) or "not recorded"

    began = run.facts.get("began")
    day = time.strftime("%Y-%m-%d", time.gmtime(began)) if began else "not recorded"
    return {
        "folder": run.folder.name,
        "date": str(run.facts.get("date") or day),
        "commit": str(run.facts.get("commit") or "not recorded"),
        "machine": listed(("gpu", "driver", "cpu", "torch")),
        "data": str(run.facts.get("data_id") or "not recorded"),
        "options": listed(OPTIONS),
    }


def shorten(labels: Sequence[str], limit: int) -> list[str]:
    """Labels of at most ``limit`` characters: without their common beginning, else numbered."""
    if max(map(len, labels)) <= limit:
        return list(labels)
    ends = zip(min(labels), max(labels), strict=False)
    front = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], ends))
    short = [f"…{label[front:]}" if front else label for label in labels]
    if all(1 < len(label) <= limit for label in short):
        return short
    return [f"{i}: {label[: limit - 5]}…" for i, label in enumerate(labels, 1)]


def number(value: float | None) -> str:
    """A figure with four significant digits; from 1000 on without decimals."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(hours: float | None) -> str:
    """Hours as 35 s, 12.3 min or 5.21 h."""
    if hours is None:
        return NONE
    if hours < 1 / 60:
        return f"{3600 * hours:.3g} s"
    return f"{60 * hours:.3g} min" if hours < 1 else f"{number(round(hours, 2))} h"


def share(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.0f} %"


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


def differ(one: Run, other: Run, keys: dict[str, str]) -> list[str]:
    """Those of ``keys`` (fact: its name) that both runs recorded and that differ, with values."""
    pairs = [(name, one.facts.get(key), other.facts.get(key)) for key, name in keys.items()]
    return [
        f"{name} ({a}, not {b})".replace(".0", "")
        for name, a, b in pairs
        if a not in (None, "") and b not in (None, "") and a != b
    ]


def _fill(both: Comparison) -> None:
    runs = both.runs

    def add(title: str, key: str, of: Callable, show: Callable = number, rare: bool = False):
        """``of(run)`` is the value; ``rare``: leave the row out if no run has one."""
        values = [of(run) for run in runs]
        if not rare or any(value not in (None, "") for value in values):
            cells = [NONE if value in (None, "") else show(value) for value in values]
            both.rows.append(Row(title, key, cells, values))

    def fact(title: str, key: str, rare: bool = False) -> None:
        text = lambda value: value if isinstance(value, str) else number(value)  # noqa: E731
        add(title, key, lambda run: run.facts.get(key), text, rare)

    fact("nodes", "nodes")
    fact("GPUs (processes)", "gpus")
    fact("arch", "arch")
    fact("mode", "mode")
    fact("recipe", "recipe", rare=True)
    fact("training image sizes", "progressive", rare=True)
    add("learning rate (highest)", "lr", lambda run: run.highest("Lr"))
    fact("batch per GPU", "batch_per_gpu")
    fact("global batch", "global_batch")
    fact("steps per epoch", "steps_per_epoch")
    add("images/s", "images_per_s", lambda run: run.usual(RATE))
    per_gpu = lambda run: ratio(run.usual(RATE), run.facts.get("gpus"))  # noqa: E731
    add("images/s per GPU", "images_per_s_per_gpu", per_gpu)
    add(f"speed-up{_to_base(both)}", "speed_up", lambda run: run.speed_up, "{:.2f}".format)
    add("scaling efficiency", "scaling_efficiency", lambda run: run.efficiency, share)
    add("time per step, ms", "step_ms", lambda run: ratio(run.usual(STEP_TIME), 0.001))
    add("time per epoch", "epoch_h", lambda run: ratio(run.epoch_seconds, 3600), duration)
    add("epochs finished", "epochs", lambda run: run.epochs)
    if both.within is not None:
        title = f"epochs in {duration(both.within)}"
        add(title, "epochs_within", lambda run: run.done_within(both.within))
    add("total time", "hours", lambda run: run.total_hours, duration)
    for tag, (name, show) in METRICS.items():
        _add_best(both, add, tag, name, show)
    for tag, (name, show) in METRICS.items():
        last = lambda run, tag=tag: run.last(f"{tag}/test")  # noqa: E731
        add(f"test {name}", f"test_{tag.lower()}", last, show, rare=True)
    if both.target is not None:
        to = f"to top-1 of {both.target:g} %"
        epoch = lambda run: run.reached(both.target)  # noqa: E731
        add(f"time {to}", "target_h", lambda run: run.hours.get(epoch(run)), duration)
        add("  epochs needed", "target_epochs", epoch)
        if both.price is not None:
            add(f"cost {to}", "target_cost", lambda run: both.costs(run).get(epoch(run)))
    if both.price is not None:
        cost = lambda run: max(both.costs(run).values(), default=None)  # noqa: E731
        add("cost of the whole run", "cost", cost)
    add("waiting for data", "data_wait_share", lambda run: run.usual("IO/wait_share"), share)
    for part in STEP_PARTS:
        of = lambda run, part=part: step_parts(run).get(part)  # noqa: E731
        add(f"  share of step: {part}", f"step_{part}_share", of, share, rare=True)
    for part in ("parameters", "gradients", "optimizer", "activations"):
        most = lambda run, part=part: _of_ranks(run, f"Memory/{part}_mb")  # noqa: E731
        add(f"{part}, MiB per process", f"{part}_mb", most, rare=True)
    if any(run.facts.get("sent_mb_per_step") for run in runs):
        fact("sent per step, MB per process", "sent_mb_per_step")
    add("GPU utilisation, %", "gpu_utilisation", lambda run: run.device("GPU/utilisation"))
    add("GPU memory, GiB", "gpu_memory_gb", lambda run: _of_ranks(run, "GPU/memory_gb"))
    add("GPU power, W", "gpu_w", lambda run: run.device("GPU/power_w"), rare=True)
    cpu = lambda run: run.device("CPU/utilisation")  # noqa: E731
    add("CPU utilisation, %", "cpu_utilisation", cpu, rare=True)
    add("state", "state", lambda run: run.state, str, rare=True)


def _of_ranks(run: Run, family: str) -> float | None:
    return run.highest(family) if run.ranks(family) else None


def step_parts(run: Run) -> dict[str, float]:
    """The shares of a step spent on data, compute and communication."""
    seconds = {}
    for part in STEP_PARTS:
        each = {x / 1000: y for x, y in run.points(f"Step/{part}_s").items()}
        seconds[part] = value if (value := run.usual(f"Time/{part}")) is not None else typical(each)
    whole = sum(value or 0.0 for value in seconds.values())
    return {part: ratio(value, whole) for part, value in seconds.items()}


def _add_best(both: Comparison, add: Callable, tag: str, name: str, show: Callable) -> None:
    key, val = f"best_{tag.lower()}", f"{tag}/val"
    add(f"best val {name}", key, lambda run: run.best(val)[0], show)
    epochs = [run.best(val)[1] for run in both.runs]
    hours = [run.hours.get(epoch) for run, epoch in zip(both.runs, epochs, strict=True)]
    cells = [
        NONE if epoch is None else str(epoch) if hour is None else f"{epoch} ({duration(hour)})"
        for epoch, hour in zip(epochs, hours, strict=True)
    ]
    both.rows.append(Row("  in epoch (after)", f"{key}_epoch", cells, epochs))
    both.rows.append(Row("", f"{key}_h", [], hours))
    ema = lambda run: run.best(f"{tag}/ema")[0]  # noqa: E731
    add("  of averaged weights", f"best_ema_{tag.lower()}", ema, show, rare=True)


def _to_base(both: Comparison) -> str:
    if len(both.bases) != 1:
        return ""
    gpus, label = both.bases[0].facts.get("gpus"), both.bases[0].label
    return f" to {label}" if gpus is None else f" to {gpus:g} GPU{'s' * (gpus != 1)}"


def _notes(both: Comparison) -> list[str]:
    """Notes: problems of single runs, runs that cannot be compared and why, the kind of scaling
    that the efficiency measures, and values that were not recorded."""
    runs, notes = both.runs, []
    for note in dict.fromkeys(note for run in runs for note in run.notes):
        notes.append(f"{_names([run for run in runs if note in run.notes], runs)}: {note}")
    reference = both.bases[0] if both.bases else runs[0]
    for run in runs:
        base = run.base
        if (strange := differ(run, reference, MUST_AGREE)) and run is not reference:
            fate = "it has no speed-up" if base is None else f"its base is {base.label}"
            fate = "it is a base itself" if base is run else fate
            notes.append(
                f"NOT COMPARABLE: {run.label} differs from {reference.label} in "
                f"{' and '.join(strange)}; {fate}"
            )
        elif base not in (None, run) and (what := differ(run, base, SHOULD_AGREE)):
            notes.append(
                f"{run.label} differs from its base {base.label} in {' and '.join(what)}: the "
                "efficiency shows that too, not only the scaling"
            )
    return notes + _lengths(runs) + _kinds_of_scaling(both) + _missing(both)


def _names(some: Sequence[Run], runs: Sequence[Run]) -> str:
    everybody = 1 < len(some) == len(runs)
    return "all runs" if everybody else ", ".join(run.label for run in some)


def _lengths(runs: list[Run]) -> list[str]:
    lengths: dict[str, list[str]] = {}
    for run in runs:
        planned = run.facts.get("epochs") or run.epochs
        text = f"{run.epochs}" + (f" of {planned:g}" if planned != run.epochs else "")
        lengths.setdefault(text, []).append(run.label)
    each = "; ".join(f"{', '.join(labels)}: {text}" for text, labels in lengths.items())
    text = (
        f"the numbers of epochs differ ({each}): total times, best values and test figures are of "
        "runs of different lengths"
    )
    return [text] if len(lengths) > 1 else []


def _kinds_of_scaling(both: Comparison) -> list[str]:
    found = []
    for base in both.bases:
        group = [run for run in both.runs if run.base is base]
        gpus, per_gpu, whole = (
            {run.facts.get(key) for run in group}
            for key in ("gpus", "batch_per_gpu", "global_batch")
        )
        if len(gpus - {None}) < 2:
            continue
        what = "; neither the batch per GPU nor the global batch is equal"
        if None in per_gpu:
            what = "; whether the batch per GPU is equal is not recorded"
        elif len(per_gpu) == 1:
            what = ", at an equal batch per GPU (weak scaling)"
        elif len(whole) == 1:
            what = ", at an equal global batch (strong scaling)"
        found.append(f"speed-up and efficiency: images/s relative to {base.label}{what}")
    return found


def _missing(both: Comparison) -> list[str]:
    """Values that were not recorded, one line per group of runs."""
    by_runs: dict[str, list[str]] = {}
    for row in both.shown:
        if row.title.startswith(" ") or row.key in ("state", "target_h"):
            continue
        if row.key in ("speed_up", "scaling_efficiency") and both.bases:
            continue  # said above
        pairs = zip(both.runs, row.values, strict=True)
        if lacking := [run for run, value in pairs if value in (None, "")]:
            title = row.title.partition(" to ")[0].partition(", ")[0] + HINTS.get(row.key, "")
            by_runs.setdefault(_names(lacking, both.runs), []).append(title)
    if all(run.facts.get("image_size") is None for run in both.runs) and len(both.runs) > 1:
        by_runs.setdefault("all runs", []).append("image size and data (assumed to be equal)")
    return [f"not recorded by {whose}: {', '.join(what)}" for whose, what in by_runs.items()]
