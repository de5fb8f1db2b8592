"""The pictures of a comparison."""

import io
import math
import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare.runs import RATE, STEP_TIME, Run
from compare.table import Comparison, duration, number

# From pale to dark, so that the runs differ in grey too, and a later curve shows on an earlier one.
COLOURS = "#f0b030", "#5cb4e4", "#e8743c", "#38a07c", "#b44c90", "#2c66b0", "#8c1c28", "#15182c"
DASHES: tuple[Any, ...] = "-", (0, (4, 1.2)), (0, (1.2, 0.9)), (0, (6, 1.2, 1.2, 1.2))
MARKERS = "osD^vP<X"
INK, GRID = "#1a1c1e", "#dcdddf"
BUNCHED = 0.15  # curves whose last third takes less of the panel's height get an inset
INSET = (0.46, 0.13, 0.51, 0.42)  # left, bottom, width, height, as parts of the panel
OVER = {
    "epochs": "epochs finished",
    "hours": "hours of training",
    "costs": "cost: price x nodes x hours of training",
}
LOGARITHMIC = 5  # runs whose hours or costs differ by more than this factor get a logarithmic axis
UNITS = (("hours", 1), ("minutes", 60), ("seconds", 3600))  # and how many of them are an hour
MATPLOTLIB = {
    "font.size": 13, "axes.titlesize": 14, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.titlepad": 12, "axes.spines.top": False, "axes.spines.right": False,
    "axes.axisbelow": True, "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK,
    "xtick.color": INK, "ytick.color": INK, "xtick.major.size": 0, "ytick.major.size": 0,
    "grid.color": GRID, "legend.frameon": False, "legend.handlelength": 3.5, "savefig.dpi": 144,
    "svg.fonttype": "none", "svg.hashsalt": "compare_runs",  # equal pictures are equal files
    "text.parse_math": False,  # a label is a name, whatever characters are in it
}  # fmt: skip
NO_DATE = {  # the library's version and the date would make equal pictures differ
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


@dataclass(frozen=True)
class Panel:
    """Curves of one quantity: its ``tag`` in the event files, and titles of panel and axis."""

    tag: str
    title: str
    unit: str
    factor: float = 1.0


@dataclass(frozen=True)
class Picture:
    """A drawn picture; ``svg`` is its text, for the page."""

    name: str
    title: str
    svg: str
    file: Path


CURVES = {
    f"{tag.lower()}_{part}": Panel(f"{tag}/{part}", f"{title}, {name}", unit)
    for tag, title, unit in (
        ("Top1", "Top-1 accuracy", "top-1 accuracy (%)"),
        ("Top5", "Top-5 accuracy", "top-5 accuracy (%)"),
        ("Loss", "Loss", "loss (nats)"),
    )
    for part, name in (("train", "training"), ("val", "validation"))
}
THROUGHPUT = Panel(RATE, "Throughput, training", "images/s, all processes")
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
CPU = (Panel("CPU/utilisation", "CPU utilisation, mean of all nodes", "%"),)


def draw(
    both: Comparison,
    out: Path,
    prefix: str = "",
    only: Collection[str] = (),
    formats: Sequence[str] = ("png",),
) -> tuple[list[Picture], list[str]]:
    """Draw the pictures (or ``only`` some) into the folder ``out``.

    Returns them, and why others could not be drawn.
    """
    import matplotlib

    matplotlib.use("agg")
    out.mkdir(parents=True, exist_ok=True)
    drawn = []
    with matplotlib.rc_context(MATPLOTLIB):
        plans, missing = plan(both)
        for name, (title, make) in plans.items():
            if only and name not in only:
                continue
            figure, svg, file = make(), io.StringIO(), out / f"{prefix}{name}.png"
            for kind in formats:
                # Fast compression: the strongest takes longer than the drawing.
                more = {"pil_kwargs": {"compress_level": 4}} if kind == "png" else {}
                figure.savefig(file.with_suffix(f".{kind}"), metadata=NO_DATE[kind], **more)
            figure.savefig(svg, format="svg", metadata=NO_DATE["svg"])
            drawn.append(Picture(name, title, svg.getvalue(), file))
    return drawn, missing


def plan(both: Comparison) -> tuple[dict[str, tuple[str, Callable[[], Any]]], list[str]]:
    """The pictures that can be drawn, name -> (title, function), and why others cannot be."""
    runs = both.runs
    plans: dict[str, tuple[str, Callable[[], Any]]] = {}
    missing: list[str] = []

    def add(name: str, panels: Sequence[Panel], title: str) -> None:
        have = [run for run in runs if any(points_of(run, panel) for panel in panels)]
        lacking = ", ".join(run.label for run in runs if run not in have)
        tags = " or ".join(panel.tag for panel in panels)
        panels = [panel for panel in panels if any(points_of(run, panel) for run in runs)]
        if lacking and name != "overlay":
            fate = "drawn without some runs" if have else "not drawn"
            missing.append(f"{name} is {fate}: no {tags} in {lacking}")
        if have:
            plans[name] = (title, lambda: curves(both, [(panel, "epochs") for panel in panels]))
        if name in CURVES and any(run.hours for run in have):
            by_time = lambda: curves(both, [(panels[0], "hours")])  # noqa: E731
            plans[f"{name}_hours"] = (f"{title}, by time", by_time)

    for name, panel in CURVES.items():
        add(name, (panel,), panel.title)
    for name, tag, make, title in (
        ("training_throughput", RATE, _throughput, "Training throughput"),
        ("training_time", STEP_TIME, _step_time, "Training time"),
    ):
        if any(run.usual(tag) for run in runs):
            plans[name] = (title, lambda make=make: make(both))
        else:
            missing.append(f"{name} is not drawn: no {tag} in {', '.join(r.label for r in runs)}")
    if any(both.costs(run) for run in runs):
        panels = [(CURVES["top1_val"], over) for over in ("hours", "costs")]
        plans["cost"] = ("Accuracy over time and cost", lambda: curves(both, panels))
        if unknown := ", ".join(run.label for run in runs if not both.costs(run)):
            missing.append(f"cost is drawn without the nodes or hours of {unknown}")
    if any(run.total_hours for run in runs):
        plans["total_time"] = ("Time of the whole run", lambda: _total_time(both))
    if len({gpus for run in runs if (gpus := run.facts.get("gpus")) and run.usual(RATE)}) > 1:
        plans["scaling"] = ("Scaling", lambda: scaling(both))
    add("IO", IO, "Input")
    gpu = any(run.ranks(GPU[0].tag) for run in runs)
    cpu = any(run.ranks(CPU[0].tag) for run in runs) and not gpu
    add("gpu", CPU if cpu else GPU, "CPU" if cpu else "GPU")
    add("overlay", OVERLAY, "All in one")
    return plans, missing


def points_of(run: Run, panel: Panel) -> dict[int, float]:
    """A run's curve in a panel; for devices, the mean (memory: the maximum) over the ranks."""
    values: dict[int, list[float]] = {}
    for curve in run.ranks(panel.tag) or [run.points(panel.tag)]:
        for x, y in curve.items():
            values.setdefault(x, []).append(panel.factor * y)
    join = max if panel.tag.endswith("memory_gb") else lambda found: sum(found) / len(found)
    return {x: join(values[x]) for x in sorted(values)}


def style(i: int, runs: int) -> dict[str, Any]:
    """The style of the ``i``-th of ``runs`` curves: from wide and pale below to thin and dark on
    top, so that identical curves are all visible."""
    depth = i / (runs - 1) if runs > 1 else 1.0
    width = 5.0 - 3.0 * depth
    kind = round(depth * (len(COLOURS) - 1)) if runs <= len(COLOURS) else i % len(COLOURS)
    again = i // len(COLOURS)  # the colours repeat, with other lines and markers
    return {
        "color": COLOURS[kind], "linestyle": DASHES[(i + again) % len(DASHES)], "linewidth": width,
        "marker": MARKERS[(kind + 3 * again) % len(MARKERS)], "markersize": width + 5,
        "markeredgecolor": "white", "solid_capstyle": "round",
    }  # fmt: skip


def curves(both: Comparison, panels: Sequence[tuple[Panel, str]]) -> Any:
    """A figure of panels, each over a key of `OVER`: one below the other, four two by two; right
    of them the runs' names, in their order."""
    from matplotlib.figure import Figure

    rows, columns = (2, 2) if len(panels) == 4 else (len(panels), 1)
    size = (
        6.0 * columns + 2.4,
        max((3.7 if rows > 1 else 4.2) * rows, 1.3 + 0.29 * len(both.runs)),
    )
    figure = Figure(figsize=size, layout="constrained")
    handles = {}
    for axes, (panel, over) in zip(
        figure.subplots(rows, columns, squeeze=False).flat, panels, strict=True
    ):
        handles |= _draw_curves(axes, both, panel, over)
    order = sorted(handles)
    # A label that begins with "_" is left out of a legend, unless it is given as a text.
    labels = [textwrap.fill(both.runs[i].label, 26) for i in order]
    figure.legend([handles[i] for i in order], labels, loc="outside right upper")
    return figure


def _draw_curves(axes: Any, both: Comparison, panel: Panel, over: str) -> dict[int, Any]:
    """Draw the runs' curves; returns each run's line."""
    lines = {}
    places = {"hours": lambda run: run.hours, "costs": both.costs}.get(over)
    ends = [max(x.values()) for run in both.runs if places and (x := places(run))]
    logarithmic = bool(ends) and max(ends) > LOGARITHMIC * min(ends)
    for i, run in enumerate(both.runs):
        points = points_of(run, panel)
        x = places(run) if places else {epoch: epoch for epoch in points}
        epochs = [epoch for epoch in points if epoch in x and (x[epoch] > 0 or not logarithmic)]
        if not epochs:
            continue
        stride = math.ceil(len(epochs) / 8)  # the runs' markers are at different epochs
        marks = (i * stride // len(both.runs), stride) if len(epochs) > 8 else None
        # Nothing is outside the limits; what is at them (100 %) is not cut in half.
        (lines[i],) = axes.plot(
            [x[e] for e in epochs], [points[e] for e in epochs], markevery=marks, clip_on=False,
            **style(i, len(both.runs)),
        )  # fmt: skip
    axes.set(title=panel.title, ylabel=panel.unit)
    axes.set_xlabel(OVER[over] + " (logarithmic)" * logarithmic)
    axes.grid(axis="y")
    axes.margins(x=0.02)
    if panel.tag == RATE or panel.tag.startswith(("IO/", "GPU/")):
        axes.set_ylim(bottom=0)
    if "%" in panel.unit:
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, 0), min(high, 100))
    axes.locator_params(axis="y", nbins=7)
    if logarithmic:
        axes.set_xscale("log")
        _round_ticks(axes.xaxis)
    else:
        axes.locator_params(axis="x", nbins=7, integer=over == "epochs", steps=[1, 2, 5, 10])
        if "accuracy" in panel.unit:
            _enlarge_the_plateau(axes)
    return lines


def _round_ticks(axis: Any, ticks: Sequence[float] = ()) -> None:
    """On a logarithmic axis: ticks at 1, 2 and 5 times the powers of ten, or at ``ticks``."""
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    axis.set_major_locator(FixedLocator(ticks) if ticks else LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def _enlarge_the_plateau(axes: Any) -> None:
    """If the ends of the curves overlap, draw them larger in the lower right corner, where there is
    room."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    points = [list(zip(*line.get_data(), strict=True)) for line in axes.lines]
    xs = [x for curve in points for x, _ in curve]
    start = max(xs, default=0.0) * 2 / 3 + min(xs, default=0.0) / 3
    late = [[y for x, y in curve if x >= start] for curve in points]
    values = [y for curve in late if len(curve) > 1 for y in curve]
    edge, top = left + (INSET[0] - 0.07) * (right - left), low + 0.62 * (high - low)
    bunched = values and 0 < max(values) - min(values) < BUNCHED * (high - low)
    taken = any(x > edge and y < top for curve in points for x, y in curve)
    if sum(len(curve) > 1 for curve in late) < 2 or not bunched or taken:
        return
    inset = axes.inset_axes(INSET)
    for line in axes.lines:
        looks = {"color": line.get_color(), "linestyle": line.get_linestyle()}
        inset.plot(*line.get_data(), linewidth=0.6 * line.get_linewidth(), **looks)
    room = 0.08 * (max(values) - min(values))
    inset.set(xlim=(start, max(xs)), ylim=(min(values) - room, min(max(values) + room, 100)))
    inset.grid(axis="y")
    inset.tick_params(labelsize=10)
    inset.locator_params(nbins=4, steps=[1, 2, 2.5, 5, 10])
    axes.indicate_inset_zoom(inset, edgecolor=INK)


def bars(
    both: Comparison,
    title: str,
    unit: str,
    rows: Sequence[tuple[float | None, str]],
    ideal: Sequence[float | None] = (),
) -> Any:
    """One bar per run, followed by its figure; ``ideal`` are the places of marks, one per bar."""
    from matplotlib.figure import Figure

    runs = both.runs
    figure = Figure(figsize=(8.6, 1.5 + 0.5 * len(runs)), layout="constrained")
    axes = figure.subplots()
    places, colours = range(len(runs)), [style(i, len(runs))["color"] for i in range(len(runs))]
    axes.barh(places, [value or 0 for value, _ in rows], 0.6, color=colours)
    for i, (value, text) in enumerate(rows):
        mark = ideal[i] if ideal else None
        if mark is not None:
            axes.plot([mark, mark], [i - 0.38, i + 0.38], color=INK, linewidth=2)
        right = max(value or 0, mark or 0)
        axes.annotate(text, (right, i), (5, 0), textcoords="offset points", va="center")
    axes.set(title=title, xlabel=unit)
    axes.set_yticks(places, [textwrap.fill(run.label, 26) for run in runs])
    axes.invert_yaxis()
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.03 * max(len(text) for _, text in rows))
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", nbins=5)
    return figure


def _throughput(both: Comparison) -> Any:
    rows, ideal = [], []
    for run in both.runs:
        rate, more, share = run.usual(RATE), run.speed_up, run.efficiency
        text, mark = number(rate) if rate else "not recorded", None
        if more is not None and run.base is not run:
            text += f"  x {more:.2f}" + (f"  {100 * share:.0f} %" if share is not None else "")
            mark = rate / share if share else None
        rows.append((rate, text))
        ideal.append(mark)
    unit = "images/s, all processes, median over epochs"
    if any(ideal):
        unit += "\n| perfect scaling     x speed-up     % scaling efficiency"
    return bars(both, "Training throughput", unit, rows, ideal)


def _step_time(both: Comparison) -> Any:
    rows = []
    for run in both.runs:
        ms = None if (seconds := run.usual(STEP_TIME)) is None else 1000 * seconds
        text = "not recorded" if ms is None else f"{number(ms)} ms"
        if ms is not None and run.epoch_seconds:
            text += f"  ({duration(run.epoch_seconds / 3600)} per epoch)"
        rows.append((ms, text))
    return bars(both, "Training time", "ms per step, median over epochs", rows)


def _total_time(both: Comparison) -> Any:
    longest = max(run.total_hours or 0.0 for run in both.runs)
    unit, factor = next(one for one in UNITS if longest * one[1] >= 1 or one is UNITS[-1])
    rows = []
    for run in both.runs:
        text = f"{duration(run.total_hours)}  ({run.epochs} epochs)"
        known = run.total_hours is not None
        rows.append((factor * run.total_hours, text) if known else (None, "not recorded"))
    return bars(both, "Time of the whole run", f"{unit} of training and evaluation", rows)


def scaling(both: Comparison) -> Any:
    """Images/s against GPUs, both logarithmic, with perfect scaling as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 5.4), layout="constrained")
    axes = figure.subplots()
    known = [
        (run.facts["gpus"], run.usual(RATE), i)
        for i, run in enumerate(both.runs)
        if run.facts.get("gpus") and run.usual(RATE)
    ]
    counts = sorted({gpus for gpus, _, _ in known})
    for base in both.bases:
        first, rate = base.facts.get("gpus"), base.usual(RATE)
        if first:
            perfect = [rate, rate * counts[-1] / first]
            axes.plot([first, counts[-1]], perfect, color=INK, linewidth=1, linestyle="--")
            fastest = {g: r for g, r, i in sorted(known) if both.runs[i].base is base}
            axes.plot(fastest.keys(), fastest.values(), color=INK, linewidth=1.6)
    behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
    for gpus, rate, i in known:
        looks = style(i, len(both.runs))
        axes.plot(gpus, rate, marker=looks["marker"], markersize=11, color=looks["color"])
        share = both.runs[i].efficiency
        slower = any(g == gpus and r < rate for g, r, _ in known)
        text = number(rate) + (f", {100 * share:.0f} %" if share is not None else "")
        place = (9, 4 if slower else -15)
        axes.annotate(text, (gpus, rate), place, textcoords="offset points", bbox=behind)
    axes.set(xscale="log", yscale="log", xlabel="GPUs (processes)", ylabel=THROUGHPUT.unit)
    axes.set_title("Scaling: measured (line) and perfect (dashed)")
    # Room for the figures to the right of the last point.
    widest = counts[-1] / counts[0]
    axes.set_xlim(counts[0] / widest**0.1, counts[-1] * widest**0.3)
    axes.margins(y=0.12)
    _round_ticks(axes.xaxis, counts)
    _round_ticks(axes.yaxis)
    axes.grid()
    return figure
