"""The pictures of a comparison, as PNG, SVG and PDF: readable in grey, on phones and dark pages."""

import io
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compare.comparison import Comparison, duration, number
from compare.drawing import MATPLOTLIB, RATE_UNIT, Panel, bars, curves, points_of, scaling
from compare.measures import device
from compare.runs import RATE, STEP_TIME

CURVES = {
    "top1_train": Panel("Top1/train", "Top-1 accuracy, training", "top-1 accuracy (%)"),
    "top1_val": Panel("Top1/val", "Top-1 accuracy, validation", "top-1 accuracy (%)"),
    "top5_train": Panel("Top5/train", "Top-5 accuracy, training", "top-5 accuracy (%)"),
    "top5_val": Panel("Top5/val", "Top-5 accuracy, validation", "top-5 accuracy (%)"),
    "loss_train": Panel("Loss/train", "Loss, training", "loss (nats)"),
    "loss_val": Panel("Loss/val", "Loss, validation", "loss (nats)"),
}
THROUGHPUT = Panel(RATE, "Throughput, training", RATE_UNIT)
OVERLAY = (CURVES["loss_train"], CURVES["loss_val"], CURVES["top1_val"], THROUGHPUT)
IO = (
    Panel("IO/wait_share", "Waiting for data", "share of the time (%)", 100.0),
    Panel("IO/read_mb_s", "Reading, all processes", "MB/s"),
    Panel("IO/files_s", "Files read, all processes", "files/s"),
)
GPU = (
    Panel("GPU/utilisation", "GPU utilisation, mean of all GPUs", "%"),
    Panel("GPU/memory_gb", "GPU memory, fullest GPU", "GiB"),
)
UNITS = (("hours", 1), ("minutes", 60), ("seconds", 3600))  # and how many of them are an hour
CPU = Panel("CPU/utilisation", "CPU utilisation, mean of all nodes", "%")


@dataclass(frozen=True)
class Picture:
    """A drawn picture: its name and title, the SVG text, and the PNG file."""

    name: str
    title: str
    svg: str
    file: Path


def _throughput(both: Comparison) -> Any:
    rows, ideal = [], []
    for i, run in enumerate(both.runs):
        rate, ratio, share = run.median(RATE), both.speed_up(i), both.efficiency(i)
        text = number(rate) if rate is not None else "not recorded"
        if ratio is not None and both.bases[i] is not run:
            text += f"  x {ratio:.2f}" + (f"  {100 * share:.0f} %" if share is not None else "")
        rows.append((rate, text))
        ideal.append(rate / share if rate and share and both.bases[i] is not run else None)
    unit = "images/s, all processes, median over epochs"
    if any(mark is not None for mark in ideal):
        unit += "\n| perfect scaling     x speed-up     % scaling efficiency"
    return bars(both, "Training throughput", unit, rows, ideal)


def _step_time(both: Comparison) -> Any:
    rows = []
    for run in both.runs:
        seconds = run.median(STEP_TIME)
        text = "not recorded" if seconds is None else f"{number(1000 * seconds)} ms"
        if seconds is not None and run.epoch_seconds:
            text += f"  ({duration(run.epoch_seconds / 3600)} per epoch)"
        rows.append((None if seconds is None else 1000 * seconds, text))
    return bars(both, "Training time", "ms per step, median over epochs", rows)


def _total_time(both: Comparison) -> Any:
    rows = []
    longest = max(run.total_hours or 0.0 for run in both.runs)
    unit, factor = next(one for one in UNITS if longest * one[1] >= 1 or one is UNITS[-1])
    for run in both.runs:
        hours = run.total_hours
        text = "not recorded" if hours is None else f"{duration(hours)}  ({run.epochs} epochs)"
        rows.append((None if hours is None else factor * hours, text))
    return bars(both, "Time of the whole run", f"{unit} of training and evaluation", rows)


def plan(both: Comparison) -> tuple[dict[str, tuple[str, Callable[[], Any]]], list[str]]:
    """The pictures that can be drawn: name -> (title, function); and why others cannot be."""
    runs = both.runs
    plans: dict[str, tuple[str, Callable[[], Any]]] = {}
    said: list[str] = []

    def add(name: str, panels: Sequence[Panel], title: str) -> None:
        """Curves over epochs and, where a run has them, over hours; empty panels are left out."""
        have = [run for run in runs if any(points_of(run, panel) for panel in panels)]
        lacking = [run.label for run in runs if run not in have]
        tags = " or ".join(panel.tag for panel in panels)
        panels = [panel for panel in panels if any(points_of(run, panel) for run in runs)]
        if lacking:
            fate = "drawn without some runs" if have else "not drawn"
            said.append(f"{name} is {fate}: no {tags} in {', '.join(lacking)}")
        if have:
            plans[name] = (title, lambda: curves(runs, panels))
        if name in CURVES and any(run.hours for run in have):
            plans[f"{name}_hours"] = (f"{title}, by time", lambda: curves(runs, panels, "hours"))

    for name, panel in CURVES.items():
        add(name, (panel,), panel.title)
    for name, tag, draw_it, title in (
        ("training_throughput", RATE, _throughput, "Training throughput"),
        ("training_time", STEP_TIME, _step_time, "Training time"),
    ):
        if any(run.median(tag) for run in runs):
            plans[name] = (title, lambda draw_it=draw_it: draw_it(both))
        else:
            said.append(f"{name} is not drawn: no {tag} in {', '.join(r.label for r in runs)}")
    if any(run.costs for run in runs):
        top1 = CURVES["top1_val"]
        panels = (
            replace(top1, title="Top-1 accuracy over time", over="hours"),
            replace(top1, title="Top-1 accuracy over cost", over="costs"),
        )
        plans["cost"] = ("Accuracy over time and cost", lambda: curves(runs, panels))
        unknown = [run.label for run in runs if not run.costs]
        if unknown:
            said.append(f"cost is drawn without the nodes or hours of {', '.join(unknown)}")
    if any(run.total_hours for run in runs):
        plans["total_time"] = ("Time of the whole run", lambda: _total_time(both))
    counts = {run.known("gpus") for run in runs if run.known("gpus") and run.median(RATE)}
    if len(counts) > 1:
        plans["scaling"] = ("Scaling", lambda: scaling(both))
    add("IO", IO, "Input")
    gpu = any(device(run, "GPU/utilisation") is not None for run in runs)
    cpu = any(device(run, "CPU/utilisation") is not None for run in runs)
    add("gpu", (CPU,) if cpu and not gpu else GPU, "GPU" if gpu or not cpu else "CPU")
    filled = [panel for panel in OVERLAY if any(points_of(run, panel) for run in runs)]
    if filled:
        plans["overlay"] = ("All in one", lambda: curves(runs, filled))
    return plans, said


def draw(
    both: Comparison, out: Path, prefix: str, only: Collection[str] | None = None
) -> tuple[list[Picture], list[str]]:
    """Draw the pictures into the folder ``out`` as PNG, SVG and PDF; with ``only``, those of these
    names, as PNG. Returns them, and sentences about those that could not be drawn."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.style

    out.mkdir(parents=True, exist_ok=True)
    drawn = []
    with matplotlib.style.context(["default", MATPLOTLIB]):
        plans, said = plan(both)
        for name, (title, make) in plans.items():
            if only is not None and name not in only:
                continue
            figure = make()
            file = out / f"{prefix}{name}.png"
            svg = _save_vectors(figure, file) if only is None else ""
            # Fast compression: the strongest takes longer than the drawing.
            figure.savefig(file, metadata={"Software": None}, pil_kwargs={"compress_level": 4})
            drawn.append(Picture(name, title, svg, file))
    return drawn, said


def _save_vectors(figure: Any, file: Path) -> str:
    """Save SVG and PDF beside ``file``. Returns the SVG text."""
    text = io.StringIO()
    # The library's version and the date, there by default, would make equal pictures differ
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    file.with_suffix(".svg").write_text(svg, encoding="utf-8")
    nothing = {"CreationDate": None, "Creator": None, "Producer": None}
    figure.savefig(file.with_suffix(".pdf"), metadata=nothing)
    return svg
