"""Make the diagrams of a comparison: as data for its page, and drawn as PNG for Markdown."""

import math
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from compare import page, palette
from compare.comparison import Comparison
from compare.page import Chart
from compare.palette import Style
from compare.runs import RATE, Run, ratio
from compare.table import NONE

DASHES: dict[str, str] = dict(
    zip(palette.DASHES, ("-", "--", ":"), strict=True)
)  # matplotlib's names
INK, GRID, SOFT = "#1a1c1e", "#dcdddf", page.SOFT
LOGARITHMIC = 5  # runs whose hours differ by more than this factor get a logarithmic axis
DECADES = 50  # losses that differ by more than this factor get a logarithmic axis
MATPLOTLIB: dict[Any, Any] = {  # its type of keys is younger than matplotlib 3.10
    "font.size": 13, "axes.titlesize": 14, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.titlepad": 12, "axes.spines.top": False, "axes.spines.right": False,
    "axes.axisbelow": True, "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK,
    "xtick.color": INK, "ytick.color": INK, "xtick.major.size": 0, "ytick.major.size": 0,
    "grid.color": GRID, "legend.frameon": False, "legend.handlelength": 2, "savefig.dpi": 144,
    "svg.fonttype": "none", "svg.hashsalt": "compare_runs",  # equal pictures give equal files
    "text.parse_math": False,  # a label may contain $
}  # fmt: skip
MARK = "compare_runs.py"  # in PNG files
# Without dates, equal pictures give equal files.
NO_DATE = {"png": {"Software": MARK}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
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
    "Step/loss": ("Loss, training, by steps", "nats", 1),
    "Step/throughput": ("Throughput, by steps", "images/s, all processes", 1),
}
GROUPS = {  # pictures of several panels
    "IO": ("IO/wait_share", "IO/read_mb_s", "IO/files_s"),
    "gpu": ("GPU/utilisation", "GPU/memory_gb", "CPU/utilisation"),
    "overlay": ("Loss/train", "Loss/val", "Top1/val", RATE),
}
BARS = {  # title, description, key of the row with the bars' lengths, rows written beside the bars
    "training_throughput": (
        "Training throughput",
        "images/s, x speed-up, throughput efficiency (dotted: perfect scaling)",
        "images_per_s",
        {"images_per_s": "{}", "speed_up": "x {}", "scaling_efficiency": "{}"},
    ),
    "training_time": (
        "Training time",
        "time per epoch (median over epochs), and of all epochs",
        "epoch_h",
        {"epoch_h": "{}", "hours": "{} in all"},
    ),
}
NAMES = [tag.lower().replace("/", "_") + end for tag in CURVES for end in ("", "_hours")]
NAMES += [*GROUPS, "scaling", *BARS]  # of all pictures
DRAWINGS = (  # of the page: heading, whether it is folded, panels
    ("Validation", False, ("Top1/val", "Loss/val")),
    ("Speed and waiting", False, (RATE, "IO/wait_share")),
    ("Loss by steps", False, ("Step/loss", "Step/throughput")),
    ("Training, top-5", True, ("Top1/train", "Loss/train", "Top5/val", "Top5/train")),
    ("Machine", True, ("GPU/utilisation", "GPU/memory_gb", "CPU/utilisation", "IO/read_mb_s",
                       "IO/files_s")),
)  # fmt: skip
OVER = {"epochs": "epochs finished", "hours": "hours of training"}


def draw(
    comparison: Comparison,
    out: Path,
    prefix: str = "",
    only: Collection[str] = (),
    formats: Iterable[str] = (),
) -> dict[str, Path]:
    """Draw the pictures (or ``only`` some) into the folder ``out``, as PNG and in ``formats``.

    Those of an earlier comparison are removed. Returns: the PNG files by the names of the pictures.
    """
    import matplotlib

    out.mkdir(parents=True, exist_ok=True)
    for name in only or NAMES:
        remove_old(out / f"{prefix}{name}.png")
    files = {}
    with matplotlib.rc_context(MATPLOTLIB):
        for name, make in plan(comparison).items():
            if name in only or not only:
                figure, files[name] = make(), out / f"{prefix}{name}.png"
                for kind in dict.fromkeys(("png", *formats)):  # PNG first: it changes the layout
                    save(figure, files[name].with_suffix(f".{kind}"))
    return files


def remove_old(file: Path) -> None:
    """Remove a PNG file that `save` wrote, and the same picture in other formats."""
    if file.is_file() and MARK.encode() in file.read_bytes()[:1000]:
        for kind in NO_DATE:
            file.with_suffix(f".{kind}").unlink(missing_ok=True)


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
    looks = looks_of(comparison)
    plans = {name: partial(draw_charts, charts, looks) for name, charts in drawn.items() if charts}
    bars = {name for name, (_, _, key, _) in BARS.items() if any(comparison.values.get(key, ()))}
    return plans | {name: partial(draw_bars, comparison, name) for name in BARS if name in bars}


def looks_of(comparison: Comparison) -> dict[str, Style]:
    """The style of each run, the same on the page and in all pictures."""
    return palette.styles([run.label for run in comparison.runs])


def drawings(comparison: Comparison) -> list[tuple[str, bool, dict[str, Any]]]:
    """List the page's drawings: heading, whether it is folded, and plotly's data."""
    looks, found = looks_of(comparison), []
    for heading, is_folded, tags in DRAWINGS:
        pairs = [tuple(curves(comparison, tag, over) for over in OVER) for tag in tags]
        if panels := [(chart, over_time) for chart, over_time in pairs if chart]:
            found.append((heading, is_folded, page.drawing(panels, looks)))
    if chart := scaling(comparison):
        found.append(("Scaling", True, page.drawing([(chart, None)], looks)))
    return found


# ---- the diagrams


def curves(comparison: Comparison, tag: str, over: str) -> Chart | None:
    """Make the diagram of a tag (of `PANELS`) over an axis (of `OVER`); None without points.

    The curves by steps are made only if a run has not finished an epoch.
    """
    (title, unit, factor), axis, hours, lines = PANELS[tag], OVER[over], over == "hours", []
    by_steps = tag.startswith("Step/")
    if by_steps and (hours or all(run.epochs for run in comparison.shown)):
        return None
    for run in comparison.shown:
        at = run.hours if hours else {x: x for x in run.hours}
        points = [(at[x], factor * y) for x, y in run.points(tag).items() if x in at]
        if by_steps:
            points, axis = [(x / 1000, factor * y) for x, y in run.points(tag).items()], "epochs"
        if points:
            lines.append((run.label, points))
    if not lines:
        return None
    # Of all runs, as diagrams below each other share this axis.
    ends = [end for run in comparison.shown if (end := run.total_hours) is not None]
    logarithmic = hours and max(ends) > LOGARITHMIC * min(ends)
    if hours and max(ends) < 1:
        axis = "minutes of training"
        lines = [(label, [(60 * x, y) for x, y in points]) for label, points in lines]
    values = [y for _, points in lines for _, y in points]
    zero = tag == RATE or tag.startswith(("IO/", "GPU/", "CPU/", "Step/throughput"))
    spans = unit == "nats" and min(values) > 0 and max(values) > DECADES * min(values)
    return Chart(
        title,
        unit,
        axis + " (logarithmic)" * logarithmic,
        lines,
        log="x" * logarithmic + "y" * spans,
        zero=zero,
        whole=not (hours or by_steps),
    )


def scaling(comparison: Comparison) -> Chart | None:
    """Make the diagram of images/s over GPUs; None if all runs have the same number of GPUs, or
    differ in both the batch per GPU and the global batch."""
    lines, plain = [], []
    for base in comparison.bases:
        known = {
            run: (efficiency, rate)
            for run in comparison.runs
            if run.base is base and (efficiency := run.efficiency) and (rate := run.usual(RATE))
        }
        if not same_batches(known):
            continue
        # Of several runs on the same number of GPUs, show the most efficient.
        order = sorted(known, key=lambda run: known[run][0])
        best = sorted({run.facts["gpus"]: known[run] for run in order}.items())
        more = f", relative to {base.label}" if len(comparison.bases) > 1 else ""
        perfect = f"perfect{more}"
        lines.append((f"measured{more}", [(n, rate) for n, (_, rate) in best]))
        lines.append((perfect, [(n, rate / efficiency) for n, (efficiency, rate) in best]))
        plain.append(perfect)
    ticks = sorted({x for _, points in lines for x, _ in points})
    if len(ticks) < 2:
        return None
    apart: list[float] = []  # ticks that do not touch each other
    for tick in reversed(ticks):
        if not apart or apart[-1] - tick > 0.045 * ticks[-1]:
            apart.append(tick)
    what = "Scaling", "images/s", comparison.workers
    return Chart(*what, lines, zero=True, ticks=apart[::-1], plain=plain)


def same_batches(runs: Collection[Run]) -> bool:
    """Whether the recorded batches per GPU are equal, or the recorded global batches."""
    sizes = [
        {run.facts.get(key) for run in runs} - {None} for key in ("batch_per_gpu", "global_batch")
    ]
    return min(map(len, sizes)) <= 1


# ---- pictures by matplotlib, for Markdown


def draw_charts(charts: Sequence[Chart], looks: Mapping[str, Style]) -> Any:
    """Draw diagrams in a column (four in a square). Up to eight lines are named at their ends, more
    in a legend below. ``looks``: of those lines that are runs."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    plain = {name for chart in charts for name in chart.plain}
    order = list(dict.fromkeys(name for chart in charts for name, _ in chart.lines))
    others = [name for name in order if name not in plain and name not in looks]
    looks = {**looks, **palette.styles(others)}
    rows, columns = (2, 2) if len(charts) == 4 else (len(charts), 1)
    longest = max(map(len, order))
    at_ends = len(order) <= page.MOST_LABELS and (columns == 1 or longest <= page.LABEL)
    # Inches. GitHub shows the square 800 pixels wide, and two single diagrams beside each other.
    width = 7.0 if columns == 1 else 11.5
    beside = max(1, min(len(order), int(width / (0.11 * longest + 0.8))))
    height = (3.6 if rows == 1 else 2.8 if columns == 1 else 3.5) * rows
    height += 0 if at_ends else 0.28 * math.ceil(len(order) / beside)
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.12, wspace=0.03)  # inches, share of a panel
    figure = Figure(figsize=(width, height), layout=layout)
    handles: dict[str, Any] = {}
    for axes, chart in zip(figure.subplots(rows, columns, squeeze=False).flat, charts, strict=True):
        for label, points in chart.lines:
            few = 4 if len(points) <= 20 else 0
            look = {"color": SOFT, "linestyle": "--", "linewidth": 1.3}
            if label not in plain:
                look = {"color": looks[label].colour, "linestyle": DASHES[looks[label].dash]}
                look |= {
                    "linewidth": 1.6,
                    "marker": "o",
                    "markersize": few + 3 * (few and len(points) == 1),
                }
            (handles[label],) = axes.plot(*zip(*points, strict=True), **look)
        _set_axes(axes, chart)
        if at_ends:
            name_ends(axes, chart, {label: handles[label].get_color() for label, _ in chart.lines})
    if not at_ends:
        # matplotlib leaves out labels that begin with "_", unless they are given as text.
        texts = [textwrap.fill(label, int(width / 0.12)) for label in order]
        lines = [handles[label] for label in order]
        figure.legend(lines, texts, loc="outside lower center", ncols=beside)
    return figure


def name_ends(axes: Any, chart: Chart, colours: dict[str, str]) -> None:
    """Write the name of each line beside its end."""
    low, high = axes.get_ylim()
    gap = 0.2 / (axes.figure.get_figheight() / axes.get_gridspec().nrows - 1.2)  # 0.2 inches
    scale = math.log10 if axes.get_yscale() == "log" else float
    low, high = scale(low), scale(high)
    ends = [scale(points[-1][1]) for _, points in chart.lines]
    places = [min(max((end - low) / (high - low), 0.0), 1.0) for end in ends]
    for place, (label, _) in zip(palette.spread(places, gap, 0.0, 1.0), chart.lines, strict=True):
        text = textwrap.shorten(label, 26, placeholder="…") or label[:26]
        how = {"color": colours[label], "va": "center", "fontsize": 12}
        axes.annotate(text, (1.015, place), xycoords="axes fraction", **how)


def _set_axes(axes: Any, chart: Chart) -> None:
    axes.set(title=chart.title, ylabel=chart.unit, xlabel=chart.x)
    axes.grid(axis="y")
    axes.margins(x=0.02)
    if "x" in chart.log:
        axes.set_xscale("log", nonpositive="mask")
        round_ticks(axes.xaxis, chart.ticks)
    elif chart.ticks:
        axes.set_xticks(chart.ticks, [f"{x:g}" for x in chart.ticks])
        axes.set_xlim(left=0)
    else:
        axes.locator_params(
            axis="x", nbins=7, integer=chart.whole, min_n_ticks=1, steps=[1, 2, 5, 10]
        )
        if not chart.whole:
            axes.set_xlim(left=0)
    if "y" in chart.log:
        axes.set_yscale("log")
        axes.set_ylim(*page.limits(chart))
        round_ticks(axes.yaxis)
    else:
        axes.locator_params(axis="y", nbins=7)
        axes.set_ylim(*page.limits(chart))


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
    looks = looks_of(comparison)
    how = {"max_lines": 2, "placeholder": "…"}  # more would touch the names of other bars
    width, names = 7.0, [textwrap.fill(run.label, 22, **how) for run in runs]
    figure = Figure(figsize=(width, 1.3 + 0.5 * len(runs)), layout="constrained")
    axes, places = figure.subplots(), range(len(runs))
    lengths = [value or 0.0 for value in comparison.values[length]]
    axes.barh(places, lengths, 0.6, color=[look.colour for look in looks.values()])
    shows_perfect = length == "images_per_s" and comparison.scales
    if shows_perfect:
        pairs = zip(lengths, runs, strict=True)
        # Above 100 % it would lie within the bar, with the text beside it.
        lengths = [max(rate, ratio(rate, run.efficiency) or rate) for rate, run in pairs]
    outline = ":" if shows_perfect else "none"
    edges = axes.barh(places, lengths, 0.6, fill=False, edgecolor=SOFT, linestyle=outline)
    texts = [""] * len(runs)
    for key, form in forms.items():
        for i, cell in enumerate(comparison.cells.get(key, ())):
            texts[i] += f"  {form.format(cell)}" if cell != NONE else ""
    texts = [text[2:] or "not recorded" for text in texts]
    axes.bar_label(edges, texts, padding=6)
    axes.set(title=title, xlabel=textwrap.fill(unit, 46))
    axes.set_xticks([])
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.spines[["left", "bottom"]].set_visible(False)
    # Beside the longest bar there is space for the longest text, at 0.11 inches per character.
    line = max(len(line) for name in names for line in name.splitlines())
    room = 0.11 * max(map(len, texts)) / (width - 0.11 * line)
    axes.set_xlim(0, (max(lengths) or 1.0) / (1 - min(room, 0.8)))
    return figure
