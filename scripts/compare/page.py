"""HTML pages that need no other file and no network: a template on top of `base.html`.

Their curves are drawn by a script in the page: moving over one shows its values, dragging zooms in,
a click in the legend hides a line.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from utils.errors import printable


class Chart(NamedTuple):
    """Curves in one diagram: the template turns ``_asdict()`` into JSON, see `base.html`.

    ``log``: the logarithmic axes, such as "xy". ``zero``: y begins at 0. ``whole``: x are whole
    numbers, and the curves are compared at equal x, not each at its nearest point. A line whose
    name is in ``plain`` is a dashed reference.
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
    """Fill in a ``template``. Text in ``facts`` is escaped: names of files and classes may hold
    anything.

    Raises: OSError where there is no such template.
    """
    import jinja2

    loader = jinja2.FileSystemLoader([template.parent, Path(__file__).parent])
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        # Control characters in text from files; what is HTML already (`Markup`) stays.
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    return environment.get_template(template.name).render(**facts)
