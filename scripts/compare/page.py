"""Render HTML pages that need no other file and no network, from templates on top of `base.html`.

A script in the page draws the curves. Point at a curve to see its values, drag to zoom in, and
click on the legend to hide a curve.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from utils.errors import printable


class Chart(NamedTuple):
    """Curves in one diagram. The template turns ``_asdict()`` into JSON, see `base.html`.

    ``log``: the logarithmic axes, such as "xy". ``zero``: y begins at 0. ``whole``: x values are
    whole numbers, and pointing shows all curves at the same x, not each at its nearest point.
    ``plain``: names of lines to draw as dashed references.
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


def render(template: Path, **facts: Any) -> str:
    """Fill in a ``template``. Text in ``facts`` is escaped, because names of files and classes may
    contain any character.

    Raises: OSError if the template does not exist.
    """
    import jinja2

    loader = jinja2.FileSystemLoader([template.parent, Path(__file__).parent])
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        # Escape control characters in text; HTML that is ready (`Markup`) stays unchanged.
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    return environment.get_template(template.name).render(**facts)
