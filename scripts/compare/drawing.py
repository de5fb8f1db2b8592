"""How a picture is drawn: colours, curves with a legend, bars, scaling.

Each figure has fixed margins: matplotlib's own layouts draw a figure several times, which would
take most of the time of a comparison.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compare.comparison import Comparison, number
from compare.labels import shorten
from compare.measures import ranks_of
from compare.runs import RATE, Run

# From pale to dark, so that the runs differ in grey too, and a later curve shows on an earlier one.
COLOURS = "#f0b030", "#5cb4e4", "#e8743c", "#38a07c", "#b44c90", "#2c66b0", "#8c1c28", "#15182c"
DASHES: tuple[Any, ...] = "-", (0, (4, 1.2)), (0, (1.2, 0.9)), (0, (6, 1.2, 1.2, 1.2))
MARKERS = "osD^vP<X"
RATE_UNIT = "images/s, all processes"
# Placeholders, which the page replaces by the colours of a light or a dark screen.
INK, GRID, PAPER = "#1a1c1e", "#dcdddf", "#fefefe"
SIZE = 13  # points
KEY = 0.62  # inches of a curve's line that are drawn beside its name
GAP = 1.2  # inches between two panels side by side
LINE = 0.29  # inches from one name to the next
BUNCHED = 0.15  # curves whose last third takes less of the panel's height get an inset
OVER = {
    "epochs": "epochs finished",
    "hours": "hours of training",
    "costs": "cost: price x nodes x hours of training",
}
LOGARITHMIC = 5  # runs whose hours or costs differ by more than this factor get a logarithmic axis
MATPLOTLIB = {
    "font.size": SIZE, "font.family": "sans-serif", "axes.titlesize": SIZE + 1,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 12,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    "text.color": INK, "figure.facecolor": PAPER, "axes.facecolor": "none",
    "savefig.facecolor": PAPER, "savefig.dpi": 144, "svg.fonttype": "none",
    "svg.hashsalt": "compare_runs",  # equal pictures are equal files
    "text.parse_math": False,  # a label is a name, whatever characters are in it
}  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """Curves of one quantity: ``tag`` as recorded, and what its panel and axis are called.

    ``over``: what the x axis shows, a key of `OVER`; None: what the picture does.
    """

    tag: str
    title: str
    unit: str
    factor: float = 1.0
    over: str | None = None


def points_of(run: Run, panel: Panel) -> dict[int, float]:
    """A run's curve in a panel: the tag's points; for devices, the mean (memory: the maximum) over
    the ranks. Points that are not finite are left out."""
    tags = ranks_of(run, panel.tag) or [panel.tag]
    curves = [run.finite(tag) for tag in tags]
    points = {}
    for x in sorted(set().union(*curves)):
        values = [curve[x] for curve in curves if x in curve]
        joined = max(values) if panel.tag.endswith("memory_gb") else sum(values) / len(values)
        points[x] = panel.factor * joined
    return points


def style(i: int, runs: int) -> dict[str, Any]:
    """How the ``i``-th of ``runs`` curves is drawn: wide and pale below, thin and dark on top, so
    that each of several identical curves can be seen."""
    depth = i / (runs - 1) if runs > 1 else 1.0
    width = 5.0 - 3.0 * depth
    kind = round(depth * (len(COLOURS) - 1)) if runs <= len(COLOURS) else i % len(COLOURS)
    again = i // len(COLOURS)  # the colours repeat, with other lines and markers
    return {
        "color": COLOURS[kind], "linestyle": DASHES[(i + again) % len(DASHES)], "linewidth": width,
        "marker": MARKERS[(kind + 3 * again) % len(MARKERS)], "markersize": width + 5,
        "markeredgecolor": PAPER, "solid_capstyle": "round",
    }  # fmt: skip


def curves(runs: list[Run], panels: Sequence[Panel], over: str = "epochs") -> Any:
    """A figure with one panel below the other (four: two by two), and right of them the runs'
    names, in their order. ``over``: what the x axes show, a key of `OVER`."""
    from matplotlib.figure import Figure

    labels = shorten([run.label for run in runs], 24)
    rows, columns = (2, 2) if len(panels) == 4 else (len(panels), 1)
    margin = KEY + 0.5 + 0.112 * max(map(len, labels))  # inches, for the names
    width = 0.9 + 5.2 * columns + GAP * (columns - 1) + margin
    height = max((3.7 if rows > 1 else 4.2) * rows, 1.3 + LINE * len(runs))
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(
        left=0.9 / width, right=1 - margin / width, top=1 - 0.55 / height, bottom=0.65 / height,
        hspace=1.2 / (height / rows - 1.2), wspace=GAP / 5.2,
    )  # fmt: skip
    axes = figure.subplots(rows, columns, squeeze=False).flat
    shown: set[int] = set()
    for one, panel in zip(axes, panels, strict=True):
        shown |= _draw_curves(one, runs, panel, panel.over or over)
    names = [(labels[i], style(i, len(runs))) for i in sorted(shown)]
    _legend(figure, names, margin)
    return figure


def _draw_curves(axes: Any, runs: list[Run], panel: Panel, over: str) -> set[int]:
    """Draw the runs' curves; returns which runs have one."""
    drawn: dict[int, tuple[list[float], list[float]]] = {}
    logarithmic = _lengths_differ(runs, over)
    for i, run in enumerate(runs):
        points = points_of(run, panel)
        x = positions(run, over) if over != "epochs" else {epoch: float(epoch) for epoch in points}
        epochs = [epoch for epoch in points if epoch in x and (x[epoch] > 0 or not logarithmic)]
        if not epochs:
            continue
        stride = math.ceil(len(epochs) / 8) or 1  # the runs' markers are at different epochs
        marks = (i * stride // len(runs), stride) if len(epochs) > 8 else None
        drawn[i] = [x[e] for e in epochs], [points[e] for e in epochs]
        # Nothing is outside the limits; what is at them (100 %) is not cut in half.
        axes.plot(*drawn[i], markevery=marks, clip_on=False, **style(i, len(runs)))
    axes.set(title=panel.title, ylabel=panel.unit)
    scale = " (logarithmic)" if logarithmic else ""
    axes.set_xlabel(f"{OVER[over]}{scale}")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.margins(x=0.02)
    axes.tick_params(length=0)
    percent = panel.unit.endswith("%") or "(%)" in panel.unit
    if panel.tag == RATE or panel.tag.startswith(("IO/", "GPU/")):
        axes.set_ylim(bottom=0)
    if percent:
        axes.set_ylim(max(axes.get_ylim()[0], 0), min(axes.get_ylim()[1], 100))
    _ticks(axes, whole=over == "epochs", logarithmic=logarithmic)
    if "accuracy" in panel.unit and not logarithmic:
        _enlarge_the_plateau(axes, drawn, len(runs))
    return set(drawn)


def positions(run: Run, over: str) -> dict[int, float]:
    """Where the end of each epoch is on an axis that shows hours or costs; {} if not known."""
    return {"hours": run.hours, "costs": run.costs}.get(over, {})


def _lengths_differ(runs: list[Run], over: str) -> bool:
    lasted = [max(x.values()) for run in runs if (x := positions(run, over))]
    return bool(lasted) and max(lasted) > LOGARITHMIC * min(lasted)


def _ticks(axes: Any, whole: bool, logarithmic: bool) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    axes.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
    if not logarithmic:
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=whole, steps=[1, 2, 5, 10]))
        return
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    ticks = [tick for tick in _decades([low, high]) if low <= tick <= high]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def _enlarge_the_plateau(
    axes: Any, drawn: dict[int, tuple[list[float], list[float]]], runs: int
) -> None:
    """Where the ends of the curves lie on each other, draw them larger in the lower right corner,
    if there is room."""
    from matplotlib.ticker import MaxNLocator

    if len(drawn) < 2:
        return
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    last = max(max(x) for x, _ in drawn.values())
    start = last - (last - min(min(x) for x, _ in drawn.values())) / 3
    late: dict[int, list[tuple[float, float]]] = {}
    for i, (x, y) in drawn.items():
        late[i] = [point for point in zip(x, y, strict=True) if point[0] >= start]
    late = {i: points for i, points in late.items() if len(points) > 1}
    values = [y for points in late.values() for _, y in points]
    if len(late) < 2 or not 0 < max(values) - min(values) < BUNCHED * (high - low):
        return
    box = (0.46, 0.13, 0.51, 0.42)  # left, bottom, width, height, as parts of the panel
    edge, top = left + (box[0] - 0.07) * (right - left), low + 0.62 * (high - low)
    if any(a > edge and b < top for x, y in drawn.values() for a, b in zip(x, y, strict=True)):
        return
    inset = axes.inset_axes(box, facecolor=PAPER)
    for i, points in late.items():
        looks = style(i, runs)
        looks |= {"linewidth": 0.6 * looks["linewidth"], "marker": ""}
        inset.plot(*zip(*points, strict=True), **looks)
    room = 0.08 * (max(values) - min(values))
    inset.set_ylim(min(values) - room, min(max(values) + room, 100))
    inset.set_xlim(start, last)
    inset.grid(axis="y", color=GRID, linewidth=0.8)
    inset.tick_params(length=0, labelsize=SIZE - 3)
    inset.xaxis.set_major_locator(MaxNLocator(4, integer=True, steps=[1, 2, 5, 10]))
    inset.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.indicate_inset_zoom(inset, edgecolor=INK, linewidth=0.8)


def _legend(figure: Any, names: Sequence[tuple[str, dict[str, Any]]], margin: float) -> None:
    """Write the runs' names, from the top down, into the last ``margin`` inches of a figure."""
    width, height = figure.get_size_inches()
    # A label is a name, even if it begins with "_", which matplotlib's own legend would leave out.
    axes = figure.add_axes((1 - margin / width, 0, margin / width, 1))
    axes.set(xlim=(0, margin), ylim=(0, height))
    axes.set_axis_off()
    for place, (label, looks) in enumerate(names):
        y = height - 0.7 - LINE * place
        key = {**looks, "linewidth": min(looks["linewidth"], 3.2), "markersize": 8}
        axes.plot([0.25, 0.25 + KEY / 2, 0.25 + KEY], [y] * 3, markevery=[1], **key)
        axes.text(0.25 + KEY + 0.1, y, label, va="center_baseline")


def bars(both: Comparison, title: str, unit: str, rows: Sequence[tuple[float | None, str]],
          ideal: Sequence[float | None] = ()) -> Any:  # fmt: skip
    """One bar per run with its figure behind it; ``ideal`` places a mark on or beyond a bar."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    runs = both.runs
    labels = shorten([run.label for run in runs], 60)
    below = 0.65 + 0.25 * unit.count("\n")
    height = 0.7 + below + 0.62 * len(runs)
    figure = Figure(figsize=(7.2, height))
    figure.subplots_adjust(left=0.03, right=0.96, top=1 - 0.5 / height, bottom=below / height)
    axes = figure.subplots()
    longest = max([v or 0 for v, _ in rows] + [v or 0 for v in ideal]) or 1.0
    for i, (value, text) in enumerate(rows):
        looks = style(i, len(runs))
        axes.barh(i, value or 0, 0.42, color=looks["color"])
        axes.text(0, i - 0.26, labels[i], va="bottom", fontsize=SIZE - 1)
        mark = ideal[i] if ideal else None
        right = value or 0.0
        if mark is not None:
            axes.plot([mark, mark], [i - 0.27, i + 0.27], color=INK, linewidth=2)
            right = max(right, mark)
        axes.text(right + 0.012 * longest, i, text, va="center", fontsize=SIZE - 1)
    room = 1.1 + 0.018 * max(len(text) for _, text in rows)
    axes.set(xlim=(0, room * longest), ylim=(len(runs) - 0.6, -0.75), yticks=[])
    axes.spines["left"].set_visible(False)
    axes.tick_params(length=0)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_title(title)
    axes.set_xlabel(unit)
    return figure


def scaling(both: Comparison) -> Any:
    """Images/s against GPUs, both logarithmic, with perfect scaling as a line."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure = Figure(figsize=(7.2, 5.4))
    figure.subplots_adjust(left=0.14, right=0.95, top=0.9, bottom=0.13)
    axes = figure.subplots()
    known = [
        (run.known("gpus"), run.median(RATE), i)
        for i, run in enumerate(both.runs)
        if run.known("gpus") and run.median(RATE)
    ]
    counts = sorted({gpus for gpus, _, _ in known})
    for base in {id(b): b for b in both.bases if b}.values():
        first, rate = base.known("gpus"), base.median(RATE)
        if not first or not rate:
            continue
        fastest = {g: r for g, r, i in sorted(known) if both.bases[i] is base}
        axes.plot([first, counts[-1]], [rate, rate * counts[-1] / first], color=INK,
                  linewidth=1, linestyle=(0, (4, 3)))  # fmt: skip
        axes.plot(fastest.keys(), fastest.values(), color=INK, linewidth=1.6)
    behind = {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.8, "pad": 1}
    for gpus, rate, i in known:
        looks = style(i, len(both.runs))
        axes.plot(gpus, rate, marker=looks["marker"], markersize=11, color=looks["color"])
        share = both.efficiency(i)
        slower = any(g == gpus and r < rate for g, r, _ in known)
        below = 4 if slower else -15
        text = number(rate) + (f", {100 * share:.0f} %" if share is not None else "")
        axes.annotate(text, (gpus, rate), xytext=(9, below), textcoords="offset points",
                      fontsize=SIZE - 1, bbox=behind)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="GPUs (processes)", ylabel=RATE_UNIT)
    axes.set_title("Scaling: measured (line) and perfect (dashed)")
    # Room for the figures to the right of the last point.
    widest = counts[-1] / counts[0]
    axes.set_xlim(counts[0] / widest**0.1, counts[-1] * widest**0.3)
    axes.margins(y=0.12)
    axes.xaxis.set_major_locator(FixedLocator(counts))
    axes.yaxis.set_major_locator(FixedLocator(_decades([rate for _, rate, _ in known])))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(color=GRID, linewidth=0.8)
    axes.tick_params(length=0)
    return figure


def _decades(values: Sequence[float]) -> list[float]:
    """Round figures (1, 2, 5 times a power of ten) around ``values``."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    ticks = [k * 10.0**power for power in range(low, high + 1) for k in (1, 2, 5)]
    return [t for t in ticks if min(values) / 2.5 <= t <= max(values) * 2.5]
