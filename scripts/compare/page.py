"""Render HTML pages that need no other file and no network, from templates on top of `base.html`.

plotly draws the curves, and its library is part of each page (4.8 MB). Runs are shown and hidden by
the check boxes of a page, which work by keyboard and on all of its charts.
"""

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compare.palette import HUES, Style, spread

from utils.start.errors import UserError, printable

PANEL, GAP, TOP, BOTTOM = 250, 56, 40, 52  # pixels: height of a diagram, space around it
MOST_LABELS = 8  # lines with a label at their end
LABEL = 22  # characters of such a label
SOFT = "#7b828a"


class Chart(NamedTuple):
    """Curves in one diagram.

    ``log``: the logarithmic axes, such as "xy". ``zero``: y begins at 0. ``whole``: x values are
    whole numbers. ``plain``: names of lines to draw as dashed references. ``bars``: draw bars.
    """

    title: str
    unit: str  # of y
    x: str
    lines: Sequence[tuple[str, Sequence[tuple[float, float]]]]  # name, points in the order of x
    log: str = ""
    zero: bool = False
    whole: bool = False
    ticks: Sequence[float] = ()  # of x; () for round numbers
    plain: Sequence[str] = ()
    bars: bool = False


def limits(chart: Chart) -> tuple[float, float]:
    """The part of the y axis that matters: without the first, steep part of long curves."""
    values = sorted(y for _, points in chart.lines for _, y in points)
    low, high = values[0], values[-1]
    if not chart.zero and max(len(points) for _, points in chart.lines) > 20:
        cut = len(values) // 20
        inner, outer = values[cut], values[-1 - cut]
        # Leave out the steep part only if that makes the rest much larger.
        low = inner if inner - low > 0.25 * (high - low) else low
        high = outer if high - outer > 0.25 * (high - low) else high
    if "y" in chart.log:
        return low / 1.1, high * 1.1
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    floor = 0.0 if chart.zero or 0 <= low < margin else low - margin
    ceiling = high + margin
    if "%" in chart.unit and high <= 100:
        ceiling = min(ceiling, 100 + 0.2 * margin)
    return floor, ceiling


def drawing(
    panels: Sequence[tuple[Chart, Chart | None]], looks: Mapping[str, Style]
) -> dict[str, Any]:
    """Make plotly's data and layout for diagrams below each other, which share their x axis.

    ``panels``: pairs of a diagram over epochs and the same one over time, if there is one.
    """
    first, whole = panels[0][0], TOP + BOTTOM + PANEL * len(panels) + GAP * (len(panels) - 1)
    inner = whole - TOP - BOTTOM
    data, notes = [], []
    x_axis = {"title": {"text": first.x}, "anchor": "y" + _number(len(panels) - 1)}
    x_axis |= {"type": "log" if "x" in first.log else "linear", "showgrid": False}
    x_axis["zeroline"] = False
    if first.ticks:
        x_axis |= {"tickvals": list(first.ticks), "ticktext": [f"{x:g}" for x in first.ticks]}
    elif first.whole and max(x for _, points in first.lines for x, _ in points) < 10:
        x_axis["dtick"] = 1
    layout: dict[str, Any] = {"xaxis": x_axis, "height": whole, "hovermode": "closest"}
    names = list(dict.fromkeys(name for chart, _ in panels for name, _ in chart.lines))
    if len(names) <= 3 and first.whole:
        layout |= {"hovermode": "x unified"}
    ends = len(names) <= MOST_LABELS
    for i, (chart, over_time) in enumerate(panels):
        low, high = limits(chart)
        is_log = "y" in chart.log
        scale = math.log10 if is_log else float
        top = 1 - i * (PANEL + GAP) / inner
        axis = {"domain": [max(0.0, top - PANEL / inner), top], "zeroline": False}
        axis |= {"type": "log" if is_log else "linear", "range": [scale(low), scale(high)]}
        axis |= {"fixedrange": False, "nticks": 6}
        if is_log:  # else plotly labels 200 and 500 with their digit alone
            axis |= {"tickformat": "~g", "nticks": 5}
        layout["yaxis" + _number(i)] = axis
        title = f"<b>{html.escape(chart.title)}</b>  {html.escape(chart.unit)}"
        place = {"xref": "paper", "x": 0, "yref": "paper", "y": top, "showarrow": False}
        notes.append({"text": title, "yanchor": "bottom", "xanchor": "left", **place})
        times = dict(over_time.lines) if over_time else {}
        last = []
        for n, (name, points) in enumerate(chart.lines):
            line = _trace(chart, name, points, looks.get(name) or Style(HUES[n % len(HUES)]))
            line |= {"yaxis": "y" + _number(i)}
            if over_time and name in times:
                line["meta"]["times"] = [x for x, _ in times[name]]
                line["meta"]["axis"] = over_time.x
                line["meta"]["log"] = "x" in over_time.log
            data.append(line)
            last.append((min(max(points[-1][1], low), high), name, line))
        if ends and not chart.bars:
            pixel = PANEL / (scale(high) - scale(low) or 1)
            wanted = [scale(y) * pixel for y, _, _ in last]
            places = spread(wanted, 16, scale(low) * pixel, scale(high) * pixel)
            moved = zip(wanted, places, last, strict=True)
            for before, after, (y, name, line) in moved:
                notes.append({
                    "text": html.escape(_short(name), quote=False), "name": name,
                    "font": {"color": line["line"]["color"]}, "showarrow": False,
                    "xref": "paper", "x": 1, "xanchor": "left", "xshift": 6,
                    "yref": "y" + _number(i), "y": scale(y), "yshift": after - before,
                })  # fmt: skip
    room = max((len(_short(name)) for name in names), default=0) if ends else 0
    layout |= {
        "annotations": notes, "showlegend": False, "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)", "hoversubplots": "axis", "dragmode": "zoom",
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": SOFT, "activecolor": HUES[0]},
        "font": {"family": "system-ui, DejaVu Sans, sans-serif", "size": 13, "color": SOFT},
        "margin": {"l": 58, "r": 14 + 7.4 * room, "t": TOP, "b": BOTTOM},
    }  # fmt: skip
    return {"data": data, "layout": layout}


def _number(i: int) -> str:
    """plotly's suffix of the axis of diagram ``i``: "", 2, 3, ..."""
    return str(i + 1) if i else ""


def _short(name: str) -> str:
    return name if len(name) <= LABEL else f"{name[: LABEL - 1]}…"


def _trace(
    chart: Chart, name: str, points: Sequence[tuple[float, float]], look: Style
) -> dict[str, Any]:
    """plotly's data of one line."""
    is_plain, unit = name in chart.plain, " %" if "%" in chart.unit else ""
    shown = html.escape(name, quote=False)
    xs, ys = ([float(f"{value:.6g}") for value in one] for one in zip(*points, strict=True))
    trace = {
        "x": xs, "y": ys, "name": shown, "xaxis": "x", "type": "bar" if chart.bars else "scatter",
        "hovertemplate": f"{shown}: %{{y:.5~g}}{unit}<extra></extra>",
        "meta": {"name": name, "plain": is_plain, "epochs": xs, "axis0": chart.x},
    }  # fmt: skip
    if not (chart.whole and len(chart.lines) <= 3):
        text = f"<b>{shown}</b><br>%{{y:.5~g}}{unit} at %{{x:.4~g}}<extra></extra>"
        trace["hovertemplate"] = text
    if chart.bars:
        return trace | {"marker": {"color": look.colour}, "line": {"color": look.colour}}
    dots = 9 if len(points) == 1 else 5 if len(points) <= 20 else 0
    trace |= {
        "mode": "lines+markers" if dots and not is_plain else "lines",
        "line": {"color": SOFT if is_plain else look.colour, "width": 1.7},
        "marker": {"size": dots},
        "cliponaxis": len(points) > 1,  # a single dot is whole, also at the edge
    }
    trace["line"]["dash"] = "dash" if is_plain else look.dash
    return trace


def library() -> str:
    """plotly's JavaScript library, for a script element. Raises: `UserError` if it is missing."""
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise UserError("pages of curves need a package: pip install plotly") from None
    return get_plotlyjs()


def render(template: Path, **facts: Any) -> str:
    """Fill in a ``template``. Text in ``facts`` is escaped, because names of files and classes may
    contain any character.

    Raises: `UserError` if plotly is missing; OSError if the template does not exist.
    """
    import jinja2
    from markupsafe import Markup

    loader = jinja2.FileSystemLoader([template.parent, Path(__file__).parent])
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        # Escape control characters in text; HTML that is ready (`Markup`) stays unchanged.
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    return environment.get_template(template.name).render(**facts, library=Markup(library()))
