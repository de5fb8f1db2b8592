"""A comparison of runs: the rows of its table, in groups, and its formats."""

import csv
import io
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from compare import summary
from compare.runs import RATE, STEP_LOSS, STEP_TIME, Run, ratio, worker, workers
from compare.table import NONE, duration, escape_markdown, fence, markdown_table, number, share
from compare.table import text_table as plain_table

METRICS = {  # tag: title, form of a value
    "Top1": ("top-1, %", "{:.2f}"),
    "Top5": ("top-5, %", "{:.2f}"),
    "Loss": ("loss", "{:.4f}"),
}
MANY = 6  # runs; more of them are the rows of a table, not its columns
MAIN = {  # row: short title
    "gpus": "GPUs", "global_batch": "batch", "arch": "arch", "mode": "mode", "lr": "lr",
    "images_per_s": "images/s",
    "scaling_efficiency": "efficiency", "common_top1": "", "target_h": "",
    "best_top1": "best top-1", "best_ema_top1": "averaged", "epochs": "epochs", "hours": "time",
    "speed_up": "speed-up", "step_loss": "loss by steps", "state": "state",
}  # fmt: skip
SET_UP = ("gpus", "global_batch", "arch", "mode", "lr", "state")  # left out where all are equal
MACHINE = ("gpu", "driver", "cpu", "torch")


class Row(NamedTuple):
    """A row of the table. ``of(run)``: the value (default: the fact ``key``). ``show(value)``: its
    text. ``key``: the column in the CSV file."""

    title: str
    key: str
    of: Callable[[Run], Any] | None = None
    show: Callable[[Any], str] = number


class Comparison:
    """Runs and their table. ``bases``: the runs that other runs' speeds are divided by. ``groups``:
    group title: rows for which some run has a value. ``values`` and ``cells``: row key: one entry
    per run. ``sentences``: a summary in at most five sentences. ``notes``: remarks.
    """

    def __init__(
        self,
        runs: list[Run],
        within: float | None = None,
        target: float | None = None,
        price: float | None = None,
    ):
        """``within``: hours; ``target``: top-1 in per cent; ``price``: per node and hour."""
        self.runs, self.price = runs, price
        summary.find_bases(runs)
        self.bases = list(dict.fromkeys(run.base for run in runs if run.base))
        self.workers = workers(runs)
        # Common charts and pictures have only runs that can be compared.
        self.shown = [
            run for run in runs if not summary.differ(run, self.first, summary.MUST_AGREE)
        ]
        finished = [run.total_hours for run in runs if run.total_hours is not None]
        # With one number of GPUs, a faster run has no efficiency above 100 %.
        self.scales = len({run.facts.get("gpus") for run in runs if run.base} - {None}) > 1
        self.within = min(finished, default=0.0) if within is None else within
        # After so many epochs the accuracies of all runs are known.
        known = [run for run in self.shown if run.epochs and run.points("Top1/val")]
        self.common = min((run.epochs or 0 for run in known), default=0)
        ends = [max(run.points(STEP_LOSS), default=0) for run in self.shown]
        self.common_step = min(ends) if any(not run.epochs for run in self.shown) else 0
        tops = [top for run in runs if (top := run.best("Top1/val")[0]) is not None]
        self.target = float(math.floor(min(tops))) if target is None and tops else target
        self.groups: dict[str, list[Row]] = {}
        self.values: dict[str, list[Any]] = {}
        self.cells: dict[str, list[str]] = {}
        for group, rows in _rows(self).items():
            for row in rows:
                values = [row.of(run) if row.of else run.facts.get(row.key) for run in runs]
                cells = [NONE if x in summary.UNKNOWN else row.show(x) for x in values]
                if any(cell != NONE for cell in cells):
                    self.groups.setdefault(group, []).append(row)
                    self.values[row.key], self.cells[row.key] = values, cells
        self.sentences = summary.sentences(runs, self.target)
        self.notes = summary.notes(runs)

    @property
    def first(self) -> Run:
        """The first base, or without any, the first run."""
        return (self.bases or self.runs)[0]

    def _lines(self) -> Iterator[list[str]]:
        """Yield the lines of the table. A line with dashes and a title begins each group."""
        for group, rows in self.groups.items():
            yield [f"--- {group}", *[""] * len(self.runs)]
            yield from ([row.title, *self.cells[row.key]] for row in rows)

    def as_text(self, width: int = 100) -> str:
        """Format one column per run, or where that is too wide, one row per run with the main
        values. Long labels follow below, with the path of each run."""
        labels = [run.label for run in self.runs]
        heads, named = labels, labels
        if max(map(len, labels)) > 20:
            heads = [f"({i})" for i, _ in enumerate(labels, 1)]
            named = [f"{head} {label}" for head, label in zip(heads, labels, strict=True)]
        paths = [f"{name}: {run.path}" for name, run in zip(named, self.runs, strict=True)]
        text = plain_table(["", *heads], [*self._lines()])
        if len(self.runs) > MANY or len(text.splitlines()[0]) > max(width, 60):
            head, rows = self.by_runs()
            rows = [[name, *cells] for name, (_, *cells) in zip(heads, rows, strict=True)]
            while len(head) > 2 and len(plain_table(head, rows).splitlines()[0]) > width:
                head, rows = head[:-1], [row[:-1] for row in rows]
            text = plain_table(head, rows)
        return "\n".join([text, "", *paths])

    def by_runs(self) -> tuple[list[str], list[list[str]]]:
        """The main values as a table with a row for each run: head and rows."""
        keys = [key for key in MAIN if key in self.cells]
        keys = [key for key in keys if key not in SET_UP or len(set(self.cells[key])) > 1]
        head = ["run", *(MAIN[key] for key in keys)]
        if "common_top1" in keys:
            head[1 + keys.index("common_top1")] = f"top-1 at {self.common}"
        if "target_h" in keys:
            head[1 + keys.index("target_h")] = f"to {self.target:g} %"
        columns = zip(*(self.cells[key] for key in keys), strict=True)
        return head, [[run.label, *cells] for run, cells in zip(self.runs, columns, strict=True)]

    def as_markdown(self) -> str:
        rows = [[title.strip(), *cells] for title, *cells in self._lines()]
        text = markdown_table(["", *(run.label for run in self.runs)], rows)
        return re.sub(r"(?m)^\| --- (.*?) \|", r"| **\1** |", text)  # a group's title

    def as_csv(self) -> str:
        """Format one line per run, in full precision. Unknown values are empty, shares are 0 to 1,
        accuracies in per cent, times in the unit that the column names."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["run", "label", *self.values])
        for run, *values in zip(self.runs, *self.values.values(), strict=True):
            cells = [f"{v:.10g}" if isinstance(v, float) else v for v in values]
            writer.writerow([run.path, run.label, *cells])
        return file.getvalue()

    def lead(self) -> str:
        """Return the sentences as Markdown."""
        return escape_markdown(" ".join(self.sentences))

    def section(self, file: Path, title: str, command: str, pictures: Iterable[Path]) -> str:
        """Format the comparison as a section of a Markdown ``file``. If ``title`` is empty, leave
        out title and sentences."""
        parts = [f"## {escape_markdown(title)}\n\n{self.lead()}"] if title else []
        parts += [fence(command), self.as_markdown()]
        parts.append("\n".join(f"- {escape_markdown(note)}" for note in self.notes))
        for picture in pictures:
            link = quote(os.path.relpath(picture, file.parent))
            parts.append(f"![{escape_markdown(picture.stem.replace('_', ' '))}]({link})")
        # Commands have lines of their own: in cells they would be columns of single words.
        head, rows, commands = ["run", *list(origin(self.runs[0]))[:-1]], [], []
        for run in self.runs:
            *cells, command = origin(run).values()
            rows.append([run.label, *cells])
            commands.append(f"- {escape_markdown(f'{run.label}: {command}')}")
        parts += ["How each run was made:", markdown_table(head, rows), "\n".join(commands)]
        return "\n\n".join(filter(None, parts))


def origin(run: Run) -> dict[str, str]:
    """Describe how a run was made. The command is shown without the script's folder."""
    facts = run.facts
    known = {
        "folder": run.folder.name,
        "date": facts.get("date") or time.strftime("%Y-%m-%d", time.gmtime(facts["began"])),
        "commit": facts.get("commit"),
        "machine": ", ".join(f"{key} {facts[key]}" for key in MACHINE if facts.get(key)),
        "data": facts.get("data_id"),
        "command": re.sub(r"^\S*/", "", facts.get("command") or ""),
    }
    return {key: str(value or "not recorded") for key, value in known.items()}


def _rows(comparison: Comparison) -> dict[str, list[Row]]:
    """Return all rows, by the titles of their groups."""
    target, price, within = comparison.target, comparison.price, comparison.within
    to = f" to {comparison.bases[0].label}" if len(comparison.bases) == 1 else ""
    each = worker(comparison.runs)
    common, step = comparison.common, comparison.common_step
    goal = f"top-1 of {target or 0:g} %"

    def cost(run: Run, hours: float | None) -> float | None:
        nodes = run.facts.get("nodes")
        return hours * nodes * price if price and hours and nodes else None

    def whole_cost(run: Run) -> float | None:
        """That of all starts, if the run has ended and says how long they took."""
        hours = run.facts.get("node_hours")
        return hours * price if price and hours else cost(run, run.total_hours)

    def best(tag: str) -> list[Row]:
        (title, form), key, val = METRICS[tag], f"best_{tag.lower()}", f"{tag}/val"
        return [
            Row(f"best val {title}", key, lambda run: run.best(val)[0], form.format),
            Row("  in epoch", f"{key}_epoch", lambda run: run.best(val)[1]),
            Row("  after", f"{key}_h", lambda run: run.hours.get(run.best(val)[1]), duration),
            Row("  of averaged weights", f"best_ema_{tag.lower()}",
                lambda run: run.best(f"{tag}/ema")[0], form.format),
        ]  # fmt: skip

    return {
        "set-up": [
            Row("nodes", "nodes"), Row(comparison.workers, "gpus"), Row("arch", "arch"),
            Row("mode", "mode"), Row("recipe", "recipe"),
            Row("training image sizes", "progressive"),
            Row("learning rate (highest)", "lr", lambda run: run.highest("Lr")),
            Row(f"batch per {each}", "batch_per_gpu"), Row("global batch", "global_batch"),
            Row("steps per epoch", "steps_per_epoch"), Row("state", "state", lambda run: run.state),
        ],
        "speed": [
            Row("images/s", "images_per_s", lambda run: run.usual(RATE)),
            Row(f"images/s per {each}", "images_per_s_per_gpu",
                lambda run: ratio(run.usual(RATE), run.facts.get("gpus"))),
            Row(f"speed-up{to}", "speed_up", lambda run: run.speed_up, "{:.2f}".format),
            Row("throughput efficiency", "scaling_efficiency",
                lambda run: run.efficiency if comparison.scales else None, share),
            Row(f"  top-1 after epoch {common}, %", "common_top1",
                lambda run: run.points("Top1/val").get(common), "{:.2f}".format),
            Row(f"  time to {goal}", "target_h", lambda run: run.hours.get(run.reached(target)),
                duration),
            Row(f"training loss after {step / 1000:.2f} epochs", "step_loss",
                lambda run: run.loss_at(step) if step else None, "{:.4f}".format),
            Row("time per step, ms", "step_ms", lambda run: ratio(run.usual(STEP_TIME), 0.001)),
        ],
        "time": [
            Row("time per epoch", "epoch_h", lambda run: ratio(run.epoch_seconds, 3600), duration),
            Row("epochs finished", "epochs", lambda run: run.epochs or run.position,
                lambda x: f"{x:.2f} (no whole one)" if isinstance(x, float) else number(x)),
            Row(f"epochs in {duration(within)}", "epochs_within",
                lambda run: run.done_within(within)),
            Row("total time", "hours", lambda run: run.total_hours, duration),
            Row(f"epochs to {goal}", "target_epochs", lambda run: run.reached(target)),
            Row(f"cost to {goal}", "target_cost",
                lambda run: cost(run, run.hours.get(run.reached(target)))),
            Row("cost of the whole run", "cost", whole_cost),
            Row("GPU-hours, all starts", "gpu_hours"), Row("energy, kWh", "energy_kwh"),
            Row("images per joule", "images_per_joule"),
            Row("model FLOPs utilisation", "mfu", lambda run: run.facts.get("mfu"), share),
        ],
        "accuracy": [
            *best("Top1"), *best("Top5"), *best("Loss"),
            *(Row(f"test {title}", f"test_{tag.lower()}",
                  methodcaller("last", f"{tag}/test"), form.format)
              for tag, (title, form) in METRICS.items()),
        ],
        "where the time goes": [
            Row("waiting for data", "data_wait_share", methodcaller("usual", "IO/wait_share"),
                share),
            *(Row(f"share of step: {part}", f"step_{part}_share",
                  partial(summary.step_share, part=part), share)
              for part in summary.STEP_PARTS),
            Row("sent per step, MB per process", "sent_mb_per_step"),
            Row("GPU utilisation, %", "gpu_utilisation", methodcaller("usual", "GPU/utilisation")),
            Row("GPU power, W", "gpu_w", methodcaller("usual", "GPU/power_w")),
            Row("CPU utilisation, %", "cpu_utilisation", methodcaller("usual", "CPU/utilisation")),
        ],
        "memory": [
            Row("GPU memory, GiB", "gpu_memory_gb", methodcaller("highest", "GPU/memory_gb")),
            *(Row(f"{name}, MiB per process", f"{name}_mb",
                  methodcaller("highest", f"Memory/{name}_mb"))
              for name in ("parameters", "gradients", "optimizer", "activations")),
        ],
    }  # fmt: skip
