"""Make the diagrams of a comparison: as data for its page, and drawn as PNG for Markdown."""

import math
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from compare.comparison import Comparison
from compare.page import Chart
from compare.runs import RATE, ratio
from compare.table import NONE

# From pale to dark: runs also differ in grey, and a later curve is visible on an earlier one.
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
    "svg.fonttype": "none", "svg.hashsalt": "compare_runs",  # equal pictures give equal files
    "text.parse_math": False,  # a label may contain $
}  # fmt: skip
# Without dates, equal pictures give equal files.
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
BARS = {  # title, description, key of the row with the bars' lengths, rows written beside the bars
    "training_throughput": (
        "Training throughput",
        "images/s, x speed-up, scaling efficiency (dotted: perfect scaling)",
        "images_per_s",
        {"images_per_s": "{}", "speed_up": "x {}", "scaling_efficiency": "{}"},
    ),
    "training_time": (
        "Training time",
        "ms per step, median over epochs",
        "step_ms",
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

    out.mkdir(parents=True, exist_ok=True)
    files = {}
    with matplotlib.rc_context(MATPLOTLIB):
        for name, make in plan(comparison).items():
            if name in only or not only:
                figure, files[name] = make(), out / f"{prefix}{name}.png"
                for kind in dict.fromkeys(("png", *formats)):  # PNG first: it changes the layout
                    save(figure, files[name].with_suffix(f".{kind}"))
    return files


def save(figure: Any, file: Path) -> None:
    """Write a figure. Raises: OSError; ValueError for an unknown format."""
    # Fast compression, because the strongest takes longer than the drawing.
    more = {"pil_kwargs": {"compress_level": 4}} if file.suffix == ".png" else {}
    figure.savefig(file, metadata=NO_DATE.get(file.suffix[1:]), **more)


def plan(comparison: Comparison) -> dict[str, Callable[[], Any]]:
    """List the pictures that have data: name -> function that draws it."""
    panels: dict[str, list[Chart | None]] = {}
    for tag in CURVES:
        for over, end in (("epochs", ""), ("hours", "_hours")):
            name = tag.lower().replace("/", "_") + end
            panels[name] = [curves(comparison, tag, over)]
    for name, tags in GROUPS.items():
        panels[name] = [curves(comparison, tag, "epochs") for tag in tags]
    panels["scaling"] = [scaling(comparison)]
    drawn = {name: list(filter(None, charts)) for name, charts in panels.items()}
    plans = {name: partial(draw_charts, charts) for name, charts in drawn.items() if charts}
    bars = {name for name, (_, _, key, _) in BARS.items() if any(comparison.values.get(key, ()))}
    return plans | {name: partial(draw_bars, comparison, name) for name in BARS if name in bars}


def charts(comparison: Comparison) -> list[tuple[str, Chart]]:
    """List the page's diagrams, each with its key of `OVER`; "" shows it with both keys."""
    known = [(over, curves(comparison, tag, over)) for tag in PANELS for over in OVER]
    return [(over, chart) for over, chart in [("", scaling(comparison)), *known] if chart]


# ---- the diagrams


def curves(comparison: Comparison, tag: str, over: str) -> Chart | None:
    """Make the diagram of a tag (of `PANELS`) over an axis (of `OVER`); None without points."""
    (title, unit, factor), axis, hours, lines = PANELS[tag], OVER[over], over == "hours", []
    for run in comparison.runs:
        at = run.hours if hours else {x: x for x in run.hours}
        if points := [(at[x], factor * y) for x, y in run.points(tag).items() if x in at]:
            lines.append((run.label, points))
    if not lines:
        return None
    ends = [points[-1][0] for _, points in lines]
    logarithmic = hours and max(ends) > LOGARITHMIC * min(ends)
    if hours and max(ends) < 1:
        axis = "minutes of training"
        lines = [(label, [(60 * x, y) for x, y in points]) for label, points in lines]
    return Chart(
        title,
        unit,
        axis + " (logarithmic)" * logarithmic,
        lines,
        log="x" * logarithmic,
        zero=tag == RATE or tag.startswith(("IO/", "GPU/", "CPU/")),
        whole=not hours,
    )


def scaling(comparison: Comparison) -> Chart | None:
    """Make the diagram of images/s over GPUs; None if all runs have the same number of GPUs."""
    lines, plain = [], []
    for base in comparison.bases:
        known = [run for run in comparison.runs if run.base is base and run.efficiency]
        # Of several runs on the same number of GPUs, show the most efficient.
        best = {run.facts["gpus"]: run for run in sorted(known, key=lambda run: run.efficiency)}
        more = f", relative to {base.label}" if len(comparison.bases) > 1 else ""
        runs, perfect = sorted(best.items()), f"perfect{more}"
        lines.append((f"measured{more}", [(n, run.usual(RATE)) for n, run in runs]))
        lines.append((perfect, [(n, run.usual(RATE) / run.efficiency) for n, run in runs]))
        plain.append(perfect)
    ticks = sorted({x for _, points in lines for x, _ in points})
    if len(ticks) < 2:
        return None
    what = "Scaling: measured and perfect", "images/s", "GPUs (processes)"
    return Chart(*what, lines, log="xy", whole=True, ticks=ticks, plain=plain)


# ---- pictures by matplotlib, for Markdown


def style(i: int, runs: int) -> dict[str, Any]:
    """Return the style of curve ``i`` of ``runs`` curves: from wide and pale below to thin and dark
    on top, so that identical curves are all visible."""
    depth = i / (runs - 1) if runs > 1 else 1.0
    width = 5.0 - 3.0 * depth
    kind = round(depth * (len(COLOURS) - 1)) if runs <= len(COLOURS) else i % len(COLOURS)
    again = i // len(COLOURS)  # when colours repeat, line styles and markers differ
    return {
        "color": COLOURS[kind], "linestyle": DASHES[(i + again) % len(DASHES)], "linewidth": width,
        "marker": MARKERS[(kind + 3 * again) % len(MARKERS)], "markersize": width + 5,
        "markeredgecolor": "white", "solid_capstyle": "round",
    }  # fmt: skip


def draw_charts(charts: Sequence[Chart]) -> Any:
    """Draw diagrams in a column (four in a square), with the names of the lines below them."""
    from matplotlib.figure import Figure

    order = list(dict.fromkeys(name for chart in charts for name, _ in chart.lines))
    rows, columns = (2, 2) if len(charts) == 4 else (len(charts), 1)
    width = 8.4 if columns == 1 else 14.0  # inches
    # Put as many names into a row as fit.
    beside = max(1, min(len(order), int(width / (0.11 * max(map(len, order)) + 1.0))))
    height = (3.6 if rows > 1 else 4.2) * rows + 0.28 * math.ceil(len(order) / beside)
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.12, wspace=0.03)  # inches, share of a panel
    handles: dict[str, Any] = {}
    for axes, chart in zip(figure.subplots(rows, columns, squeeze=False).flat, charts, strict=True):
        for label, points in chart.lines:
            i, stride = order.index(label), math.ceil(len(points) / 8)
            looks = style(i, len(order))
            looks["markevery"] = (i * stride // len(order), stride)  # each run marks other epochs
            if label in chart.plain:
                looks = {"color": INK, "linestyle": "--"}
            # No point is outside the limits. Without clipping, points at a limit are drawn whole.
            (handles[label],) = axes.plot(*zip(*points, strict=True), clip_on=False, **looks)
        _set_axes(axes, chart)
    # matplotlib leaves labels that begin with "_" out of a legend, unless they are given as text.
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
    axes.locator_params(axis="x", nbins=7, integer=chart.whole, steps=[1, 2, 5, 10], min_n_ticks=1)
    if not chart.whole:
        axes.set_xlim(left=0)


def round_ticks(axis: Any, ticks: Sequence[float] = ()) -> None:
    """Set the ticks of a logarithmic axis: at ``ticks``, else at 1, 2 and 5 times powers of ten.
    Wide axes get only the powers of ten."""
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    subs = (1, 2, 5) if high < 500 * low else (1,)
    axis.set_major_locator(FixedLocator(ticks) if ticks else LogLocator(subs=subs))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def draw_bars(comparison: Comparison, name: str) -> Any:
    """Draw one bar per run, followed by cells of the table."""
    from matplotlib.figure import Figure

    (title, unit, length, forms), runs = BARS[name], comparison.runs
    figure = Figure(figsize=(8.6, 1.3 + 0.5 * len(runs)), layout="constrained")
    axes, places = figure.subplots(), range(len(runs))
    lengths = [value or 0.0 for value in comparison.values[length]]
    axes.barh(places, lengths, 0.6, color=[style(i, len(runs))["color"] for i in places])
    if length == "images_per_s":
        pairs = zip(lengths, runs, strict=True)
        lengths = [ratio(rate, run.efficiency) or rate for rate, run in pairs]
    edges = axes.barh(places, lengths, 0.6, fill=False, edgecolor=INK, linestyle=":")
    texts = [""] * len(runs)
    for key, form in forms.items():
        for i, cell in enumerate(comparison.cells.get(key, ())):
            texts[i] += f"  {form.format(cell)}" if cell != NONE else ""
    texts = [text[2:] or "not recorded" for text in texts]
    axes.bar_label(edges, texts, padding=6)
    axes.set(title=title, xlabel=unit)
    axes.set_xticks([])
    axes.set_yticks(places, [textwrap.fill(run.label, 26) for run in runs])
    axes.invert_yaxis()
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.margins(x=0.03 * max(map(len, texts)))
    axes.set_xlim(left=0)
    return figure
