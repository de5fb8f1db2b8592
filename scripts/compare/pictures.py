"""The pictures of a comparison."""

import math
import statistics
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from compare.runs import RATE, Run, ratio
from compare.table import NONE, Comparison, number, share

# From pale to dark, so that the runs differ in grey too, and a later curve shows on an earlier one.
COLOURS = "#f0b030", "#5cb4e4", "#e8743c", "#38a07c", "#b44c90", "#2c66b0", "#8c1c28", "#15182c"
DASHES: tuple[Any, ...] = "-", (0, (4, 1.2)), (0, (1.2, 0.9)), (0, (6, 1.2, 1.2, 1.2))
MARKERS = "osD^vP<X"
INK, GRID = "#1a1c1e", "#dcdddf"
BUNCHED = 0.15  # curves whose last third takes less of the panel's height get an inset
INSET = (0.46, 0.13, 0.51, 0.42)  # left, bottom, width, height, as parts of the panel
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
GROUPS = {  # pictures of several panels: title and tags
    "IO": ("Input", ("IO/wait_share", "IO/read_mb_s", "IO/files_s")),
    "gpu": ("Hardware", ("GPU/utilisation", "GPU/memory_gb", "CPU/utilisation")),
    "overlay": ("All in one", ("Loss/train", "Loss/val", "Top1/val", RATE)),
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
OVER = {
    "epochs": "epochs finished", "hours": "hours of training", "minutes": "minutes of training"
}  # fmt: skip


class Picture(NamedTuple):
    """A drawn picture."""

    name: str
    title: str
    file: Path


def draw(
    both: Comparison,
    out: Path,
    prefix: str = "",
    only: Collection[str] = (),
    formats: Iterable[str] = (),
) -> list[Picture]:
    """Draw the pictures (or ``only`` some) into the folder ``out``, as PNG and in ``formats``."""
    import matplotlib

    matplotlib.use("agg")
    out.mkdir(parents=True, exist_ok=True)
    drawn = []
    with matplotlib.rc_context(MATPLOTLIB):
        for name, (title, make) in plan(both).items():
            if only and name not in only:
                continue
            figure, file = make(), out / f"{prefix}{name}.png"
            for kind in dict.fromkeys(("png", *formats)):
                save(figure, file.with_suffix(f".{kind}"))
            drawn.append(Picture(name, title, file))
    return drawn


def save(figure: Any, file: Path) -> None:
    """Write a figure. Raises: OSError; ValueError for a format that is unknown."""
    # Fast compression: the strongest takes longer than the drawing.
    more = {"pil_kwargs": {"compress_level": 4}} if file.suffix == ".png" else {}
    figure.savefig(file, metadata=NO_DATE.get(file.suffix[1:]), **more)


def plan(both: Comparison) -> dict[str, tuple[str, Callable[[], Any]]]:
    """The pictures for which there are points: name -> (title, function)."""
    plans: dict[str, tuple[str, Callable[[], Any]]] = {}

    def add(name: str, title: str, *panels: tuple[str, str]) -> None:
        filled = [one for one in panels if any(line(run, *one) for run in both.runs)]
        if filled:
            plans[name] = title, partial(curves, both, filled)

    for tag in CURVES:
        name, title = tag.lower().replace("/", "_"), PANELS[tag][0]
        add(name, title, (tag, "epochs"))
        add(f"{name}_hours", f"{title}, by time", (tag, "hours"))
    for name, (title, unit, keys) in BARS.items():
        if any(both.values[next(iter(keys))]):
            plans[name] = title, partial(bars, both, title, unit, keys)
    if len({run.facts["gpus"] for run in both.runs if run.efficiency}) > 1:
        plans["scaling"] = "Scaling", partial(scaling, both)
    for name, (title, tags) in GROUPS.items():
        add(name, title, *((tag, "epochs") for tag in tags))
    return plans


def line(run: Run, tag: str, over: str) -> dict[float, float]:
    """A run's curve over a key of `OVER`; for devices, the mean (memory: the maximum) of all."""
    values: dict[int, list[float]] = {}
    for curve in run.curves(tag):
        for x, y in curve.items():
            values.setdefault(x, []).append(PANELS[tag][2] * y)
    at = run.hours if over == "hours" else {x: x for x in values}
    join = max if tag == "GPU/memory_gb" else statistics.fmean
    return {at[x]: join(values[x]) for x in sorted(values) if x in at}


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


def curves(both: Comparison, panels: Sequence[tuple[str, str]]) -> Any:
    """A figure of panels (tag, key of `OVER`): one below the other, four two by two; right of them
    the runs' names, in their order."""
    from matplotlib.figure import Figure

    rows, columns = (2, 2) if len(panels) == 4 else (len(panels), 1)
    labels = [textwrap.fill(run.label, 26) for run in both.runs]
    lines = sum(label.count("\n") + 1 for label in labels)
    height = max((3.7 if rows > 1 else 4.2) * rows, 1.3 + 0.29 * lines)
    figure = Figure(figsize=(6.0 * columns + 2.4, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.12, wspace=0.03)  # inches, share of a panel
    handles: dict[int, Any] = {}
    every = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (tag, over) in zip(every, panels, strict=True):
        found = {i: line(run, tag, over) for i, run in enumerate(both.runs)}
        lines = {i: points for i, points in found.items() if points}
        factor = 60 if over == "hours" and max(map(max, lines.values())) < 1 else 1
        for i, points in lines.items():
            stride = math.ceil(len(points) / 8)  # the runs' markers are at different epochs
            marks = (i * stride // len(both.runs), stride)
            # Nothing is outside the limits; what is at them (100 %) is not cut in half.
            looks = {"markevery": marks, "clip_on": False} | style(i, len(both.runs))
            xs = [factor * x for x in points]
            (handles[i],) = axes.plot(xs, list(points.values()), **looks)
        _set_axes(axes, tag, "minutes" if factor > 1 else over)
    shown = [(handles[i], labels[i]) for i in sorted(handles)]
    # A label that begins with "_" is left out of a legend, unless it is given as a text.
    figure.legend(*zip(*shown, strict=True), loc="outside right upper")
    return figure


def _set_axes(axes: Any, tag: str, over: str) -> None:
    title, unit, _ = PANELS[tag]
    ends = [max(one.get_xdata()) for one in axes.lines]
    first, last = min(min(one.get_xdata()) for one in axes.lines), max(ends)
    logarithmic = bool(over != "epochs" and last > LOGARITHMIC * min(ends))
    axes.set(title=title, ylabel=unit, xlabel=OVER[over] + " (logarithmic)" * logarithmic)
    axes.grid(axis="y")
    axes.margins(x=0.02)
    axes.locator_params(axis="y", nbins=7)
    if tag == RATE or tag.startswith(("IO/", "GPU/", "CPU/")):
        axes.set_ylim(bottom=0)
    if "%" in unit:
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, 0), min(high, 100))
    if logarithmic:
        axes.set_xscale("log", nonpositive="mask")
        round_ticks(axes.xaxis)
        return
    axes.locator_params(axis="x", nbins=7, integer=over == "epochs", steps=[1, 2, 5, 10])
    if over != "epochs":
        axes.set_xlim(left=0)
    elif first == last:
        axes.set(xlim=(first - 1, first + 1), xticks=[first])
    if tag.startswith("Top"):
        _enlarge_the_plateau(axes)


def round_ticks(axis: Any, ticks: Sequence[float] = ()) -> None:
    """On a logarithmic axis: ticks at 1, 2 and 5 times the powers of ten, or at ``ticks``. Where
    these do not fit, at the powers of ten alone."""
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    subs = (1, 2, 5) if high < 500 * low else (1,)
    axis.set_major_locator(FixedLocator(ticks) if ticks else LogLocator(subs=subs))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def _enlarge_the_plateau(axes: Any) -> None:
    """If the ends of the curves overlap, draw them larger in the lower right corner, where there is
    room."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    points = [tuple(point) for one in axes.lines for point in one.get_xydata()]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    start = last - (last - first) / 3  # not above last, however it is rounded
    # A curve needs two points there, or the inset shows a piece of one line.
    together = [one for one in axes.lines if sum(x >= start for x in one.get_xdata()) > 1]
    late = [y for x, y in points if x >= start]
    bottom, spread = min(late), max(late) - min(late)
    room, edge = low + 0.62 * (high - low), left + (INSET[0] - 0.07) * (right - left)
    is_free = all(y >= room for x, y in points if x > edge)
    if len(together) < 2 or not is_free or not 0 < spread < BUNCHED * (high - low):
        return
    inset = axes.inset_axes(INSET)
    for one in axes.lines:
        looks = {"color": one.get_color(), "linestyle": one.get_linestyle()}
        inset.plot(*one.get_data(), linewidth=0.6 * one.get_linewidth(), **looks)
    ends = bottom - 0.08 * spread, min(bottom + 1.08 * spread, 100)
    inset.set(xlim=(start, last), ylim=ends)
    inset.grid(axis="y")
    inset.tick_params(labelsize=10)
    inset.locator_params(nbins=4, steps=[1, 2, 2.5, 5, 10])
    axes.indicate_inset_zoom(inset, edgecolor=INK)


def bars(both: Comparison, title: str, unit: str, keys: dict[str, str]) -> Any:
    """One bar per run, followed by its figures: cells of the table."""
    from matplotlib.figure import Figure

    runs, first = both.runs, next(iter(keys))
    figure = Figure(figsize=(8.6, 1.3 + 0.5 * len(runs)), layout="constrained")
    axes = figure.subplots()
    places, lengths = range(len(runs)), [value or 0 for value in both.values[first]]
    axes.barh(places, lengths, 0.6, color=[style(i, len(runs))["color"] for i in places])
    if first == "images_per_s":
        pairs = zip(lengths, runs, strict=True)
        lengths = [ratio(rate, run.efficiency) or rate for rate, run in pairs]
    edges = axes.barh(places, lengths, 0.6, fill=False, edgecolor=INK, linestyle=":")
    texts = []
    for i in places:
        cells = [(form, both.cells[key][i]) for key, form in keys.items()]
        known = [form.format(cell) for form, cell in cells if cell != NONE]
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


def scaling(both: Comparison) -> Any:
    """Images/s against GPUs, both logarithmic, with perfect scaling as a line. The figures stand
    right of it, where no line crosses them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.4), layout="constrained")
    axes, counts, shown = figure.subplots(), set(), []
    for i, base in enumerate(both.bases):
        known = [run for run in both.runs if run.base is base and run.efficiency]
        points = {run.facts["gpus"]: run for run in sorted(known, key=lambda run: run.efficiency)}
        gpus = sorted(points)
        counts |= points.keys()
        looks = {"color": COLOURS[-3 - i % 5], "marker": MARKERS[i % len(MARKERS)]}
        (measured,) = axes.loglog(gpus, [points[n].usual(RATE) for n in gpus], **looks)
        perfect = [points[n].usual(RATE) / points[n].efficiency for n in gpus]
        axes.loglog(gpus, perfect, "--", color=INK)
        for n in gpus:
            rate, part = number(points[n].usual(RATE)), share(points[n].efficiency)
            shown.append((measured, f"{n:g}: {rate} images/s, {part}"))
    axes.set(xlabel="GPUs (processes)", ylabel=PANELS[RATE][1])
    axes.set_title("Scaling: measured (line) and perfect (dashed)")
    axes.margins(0.12)
    round_ticks(axes.xaxis, sorted(counts))
    round_ticks(axes.yaxis)
    axes.grid()
    figure.legend(*zip(*shown, strict=True), loc="outside right upper", title="GPUs (processes)")
    return figure
