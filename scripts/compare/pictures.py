"""The diagrams of a comparison: as data for its page, and drawn as PNG for Markdown."""

import math
import statistics
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from compare.comparison import Comparison
from compare.page import Chart
from compare.runs import RATE, Run, ratio
from compare.table import NONE

# From pale to dark, so that the runs differ in grey too, and a later curve shows on an earlier one.
COLOURS = "#f0b030", "#5cb4e4", "#e8743c", "#38a07c", "#b44c90", "#2c66b0", "#8c1c28", "#15182c"
DASHES: tuple[Any, ...] = "-", (0, (4, 1.2)), (0, (1.2, 0.9)), (0, (6, 1.2, 1.2, 1.2))
MARKERS = "osD^vP<X"
INK, GRID = "#1a1c1e", "#dcdddf"
LOGARITHMIC = 5  # runs whose hours differ by more than this factor get a logarithmic axis
MATPLOTLIB = {
    "font.size": 13, "axes.titlesize": 14, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.titlepad": 12, "axes.spines.top": False, "axes.spines.right": False,
    "axes.axisbelow": True, "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK,
    "xtick.color": INK, "ytick.color": INK, "xtick.major.size": 0, "ytick.major.size": 0,
    "grid.color": GRID, "legend.frameon": False, "legend.handlelength": 3.5, "savefig.dpi": 144,
    "svg.fonttype": "none", "svg.hashsalt": "compare_runs",  # equal pictures are equal files
    "text.parse_math": False,  # a label is a name, whatever characters are in it
}  # fmt: skip
# Without dates equal pictures are equal files.
NO_DATE = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
CURVES = {  # tag: title of the panel, unit, factor
    "Top1/train": ("Top-1 accuracy, training", "%", 1),
    "Top1/val": ("Top-1 accuracy, validation", "%", 1),
    "Top5/train": ("Top-5 accuracy, training", "%", 1),
    "Top5/val": ("Top-5 accuracy, validation", "%", 1),
    "Loss/train": ("Loss, training", "nats", 1),
    "Loss/val": ("Loss, validation", "nats", 1),
}
PANELS = CURVES | {
    RATE: ("Throughput, training", "images/s, all processes", 1),
    "IO/wait_share": ("Waiting for data", "share of the time (%)", 100),
    "IO/read_mb_s": ("Reading, all processes", "MB/s", 1),
    "IO/files_s": ("Files read, all processes", "files/s", 1),
    "GPU/utilisation": ("GPU utilisation, mean of all GPUs", "%", 1),
    "GPU/memory_gb": ("GPU memory, fullest GPU", "GiB", 1),
    "CPU/utilisation": ("CPU utilisation, mean of all nodes", "%", 1),
}
GROUPS = {  # pictures of several panels
    "IO": ("IO/wait_share", "IO/read_mb_s", "IO/files_s"),
    "gpu": ("GPU/utilisation", "GPU/memory_gb", "CPU/utilisation"),
    "overlay": ("Loss/train", "Loss/val", "Top1/val", RATE),
}
BARS = {  # title, what the bars show, rows of the table that are written beside a bar
    "training_throughput": (
        "Training throughput",
        "images/s, x speed-up, scaling efficiency (dotted: perfect scaling)",
        {"images_per_s": "{}", "speed_up": "x {}", "scaling_efficiency": "{}"},
    ),
    "training_time": (
        "Training time",
        "ms per step, median over epochs",
        {"step_ms": "{} ms", "epoch_h": "({} per epoch)"},
    ),
}
OVER = {"epochs": "epochs finished", "hours": "hours of training"}


def draw(
    comparison: Comparison,
    out: Path,
    prefix: str = "",
    only: Collection[str] = (),
    formats: Iterable[str] = (),
) -> dict[str, Path]:
    """Draw the pictures (or ``only`` some) into the folder ``out``, as PNG and in ``formats``.

    Returns: the PNG files by the names of the pictures.
    """
    import matplotlib

    matplotlib.use("agg")
    out.mkdir(parents=True, exist_ok=True)
    files = {}
    with matplotlib.rc_context(MATPLOTLIB):
        for name, make in plan(comparison).items():
            if only and name not in only:
                continue
            figure, files[name] = make(), out / f"{prefix}{name}.png"
            for kind in dict.fromkeys(("png", *formats)):
                save(figure, files[name].with_suffix(f".{kind}"))
    return files


def save(figure: Any, file: Path) -> None:
    """Write a figure. Raises: OSError; ValueError for a format that is unknown."""
    # Fast compression: the strongest takes longer than the drawing.
    more = {"pil_kwargs": {"compress_level": 4}} if file.suffix == ".png" else {}
    figure.savefig(file, metadata=NO_DATE.get(file.suffix[1:]), **more)


def plan(comparison: Comparison) -> dict[str, Callable[[], Any]]:
    """The pictures for which there are points: name -> function that draws it."""
    panels = {}
    for tag in CURVES:
        name = tag.lower().replace("/", "_")
        panels |= {name: [(tag, "epochs")], f"{name}_hours": [(tag, "hours")]}
    panels |= {name: [(tag, "epochs") for tag in tags] for name, tags in GROUPS.items()}
    found = {
        name: [chart for pair in pairs if (chart := curves(comparison, *pair))]
        for name, pairs in panels.items()
    }
    found["scaling"] = [chart] if (chart := scaling(comparison)) else []
    plans = {name: partial(draw_charts, comparison, some) for name, some in found.items() if some}
    for name, (title, unit, keys) in BARS.items():
        if any(comparison.values.get(next(iter(keys)), ())):
            plans[name] = partial(draw_bars, comparison, title, unit, keys)
    return plans


def charts(comparison: Comparison) -> list[tuple[str, Chart]]:
    """The diagrams of the page, each with its key of `OVER`; "" stays with comparison of them."""
    found = [(over, curves(comparison, tag, over)) for tag in PANELS for over in OVER]
    return [(over, chart) for over, chart in [("", scaling(comparison)), *found] if chart]


# ---- what is drawn


def curves(comparison: Comparison, tag: str, over: str) -> Chart | None:
    """The curves of a key of `PANELS` over one of `OVER`; None if no run has points."""
    found = [(run.label, line(run, tag, over)) for run in comparison.runs]
    found = [(label, points) for label, points in found if points]
    if not found:
        return None
    title, unit, _ = PANELS[tag]
    ends = [max(points) for _, points in found]
    logarithmic = over == "hours" and max(ends) > LOGARITHMIC * min(ends)
    if over == "hours" and max(ends) < 1:
        over = "minutes"
        found = [(label, {60 * x: y for x, y in points.items()}) for label, points in found]
    return Chart(
        title,
        unit,
        OVER.get(over, "minutes of training") + " (logarithmic)" * logarithmic,
        found,
        log="x" * logarithmic,
        zero=tag == RATE or tag.startswith(("IO/", "GPU/", "CPU/")),
        whole=over == "epochs",
        shared=over == "epochs",
    )


def line(run: Run, tag: str, over: str) -> dict[float, float]:
    """A run's curve over a key of `OVER`; for devices, the mean (memory: the maximum) of all."""
    values: dict[int, list[float]] = {}
    for curve in run.curves(tag):
        for x, y in curve.items():
            values.setdefault(x, []).append(PANELS[tag][2] * y)
    at = run.hours if over == "hours" else {x: x for x in values}
    join = max if tag == "GPU/memory_gb" else statistics.fmean
    return {at[x]: join(values[x]) for x in sorted(values) if x in at}


def scaling(comparison: Comparison) -> Chart | None:
    """Images/s against GPUs, measured and perfect; None for runs on equal numbers of GPUs."""
    lines: list[tuple[str, dict[float, float]]] = []
    for base in comparison.bases:
        known = [run for run in comparison.runs if run.base is base and run.efficiency]
        known.sort(key=lambda run: run.efficiency)  # of several with equal GPUs, the best counts
        points = {run.facts["gpus"]: run for run in known}
        more = f", relative to {base.label}" if len(comparison.bases) > 1 else ""
        lines.append((f"measured{more}", {n: run.usual(RATE) for n, run in points.items()}))
        perfect = {n: run.usual(RATE) / run.efficiency for n, run in points.items()}
        lines.append((f"perfect{more}", perfect))
    ticks = tuple(sorted({x for _, points in lines for x in points}))
    if len(ticks) < 2:
        return None
    plain = tuple(label for label, _ in lines[1::2])
    what = "Scaling: measured and perfect", "images/s", "GPUs (processes)"
    return Chart(*what, lines, log="xy", ticks=ticks, plain=plain)


# ---- pictures by matplotlib, for Markdown


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


def draw_charts(comparison: Comparison, charts: Sequence[Chart]) -> Any:
    """A figure of diagrams: one below the other, four two by two; below them the lines' names."""
    from matplotlib.figure import Figure

    names = {name for chart in charts for name, _ in chart.lines}
    order = [run.label for run in comparison.runs if run.label in names]
    if len(order) < len(names):  # the lines are not runs
        order = [name for name, _ in charts[0].lines]
    rows, columns = (2, 2) if len(charts) == 4 else (len(charts), 1)
    width = 8.4 if columns == 1 else 14.0  # inches
    # As many names in a line as fit.
    beside = max(1, min(len(order), int(width / (0.11 * max(map(len, order)) + 1.0))))
    height = (3.6 if rows > 1 else 4.2) * rows + 0.28 * math.ceil(len(order) / beside)
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.12, wspace=0.03)  # inches, share of a panel
    handles: dict[str, Any] = {}
    for axes, chart in zip(figure.subplots(rows, columns, squeeze=False).flat, charts, strict=True):
        for label, points in chart.lines:
            i, (xs, ys) = order.index(label), zip(*sorted(points.items()), strict=True)
            stride = math.ceil(len(xs) / 8)  # the runs' markers are at different epochs
            # Nothing is outside the limits; what is at them (100 %) is not cut in half.
            looks = {"markevery": (i * stride // len(order), stride), "clip_on": False}
            looks |= style(i, len(order))
            if label in chart.plain:
                looks = {"color": INK, "linestyle": "--"}
            (handles[label],) = axes.plot(xs, ys, **looks)
        _set_axes(axes, chart)
    # A label that begins with "_" is left out of a legend, unless it is given as a text.
    texts = [textwrap.fill(label, int(width / 0.12)) for label in order]
    lines = [handles[label] for label in order]
    figure.legend(lines, texts, loc="outside lower center", ncols=beside)
    return figure


def _set_axes(axes: Any, chart: Chart) -> None:
    axes.set(title=chart.title, ylabel=chart.unit, xlabel=chart.x)
    axes.grid(axis="y")
    axes.margins(x=0.02)
    axes.locator_params(axis="y", nbins=7)
    if chart.zero:
        axes.set_ylim(bottom=0)
    if "%" in chart.unit:
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, 0), min(high, 100))
    if chart.log:
        axes.set_xscale("log", nonpositive="mask")
        round_ticks(axes.xaxis, chart.ticks)
        if "y" in chart.log:
            axes.set_yscale("log")
            round_ticks(axes.yaxis)
        return
    axes.locator_params(axis="x", nbins=7, integer=chart.whole, steps=[1, 2, 5, 10])
    xs = {x for _, points in chart.lines for x in points}
    if not chart.whole:
        axes.set_xlim(left=0)
    elif len(xs) == 1:
        (x,) = xs
        axes.set(xlim=(x - 1, x + 1), xticks=[x])


def round_ticks(axis: Any, ticks: Sequence[float] = ()) -> None:
    """On a logarithmic axis: ticks at 1, 2 and 5 times the powers of ten, or at ``ticks``. Where
    these do not fit, at the powers of ten alone."""
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    subs = (1, 2, 5) if high < 500 * low else (1,)
    axis.set_major_locator(FixedLocator(ticks) if ticks else LogLocator(subs=subs))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def draw_bars(comparison: Comparison, title: str, unit: str, keys: dict[str, str]) -> Any:
    """One bar per run, followed by its figures: cells of the table."""
    from matplotlib.figure import Figure

    runs, first = comparison.runs, next(iter(keys))
    figure = Figure(figsize=(8.6, 1.3 + 0.5 * len(runs)), layout="constrained")
    axes = figure.subplots()
    places, lengths = range(len(runs)), [value or 0 for value in comparison.values[first]]
    axes.barh(places, lengths, 0.6, color=[style(i, len(runs))["color"] for i in places])
    if first == "images_per_s":
        pairs = zip(lengths, runs, strict=True)
        lengths = [ratio(rate, run.efficiency) or rate for rate, run in pairs]
    edges = axes.barh(places, lengths, 0.6, fill=False, edgecolor=INK, linestyle=":")
    texts = []
    for i in places:
        cells = {key: comparison.cells[key][i] for key in keys if key in comparison.cells}
        known = [keys[key].format(cell) for key, cell in cells.items() if cell != NONE]
        texts.append("  ".join(known) or "not recorded")
    axes.bar_label(edges, texts, padding=6)
    axes.set(title=title, xlabel=unit)
    axes.set_xticks([])
    axes.set_yticks(places, [textwrap.fill(run.label, 26) for run in runs])
    axes.invert_yaxis()
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.margins(x=0.03 * max(map(len, texts)))
    axes.set_xlim(left=0)
    return figure
