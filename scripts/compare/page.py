"""HTML pages that need no other file and no network: a template on top of `base.html`.

Their curves are drawn by a script in the page: moving over one shows its values, dragging zooms in,
a click in the legend hides a line.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from utils.errors import printable

Points = Mapping[float, float]  # x -> y


class Chart(NamedTuple):
    """Curves in one diagram: the template turns ``as_dict()`` into JSON, see `base.html`.

    ``log``: the logarithmic axes, such as "xy". ``zero``: y begins at 0. ``whole``: x are whole
    numbers. ``shared``: the curves are compared at equal x, not each at its nearest point. A line
    whose name is in ``plain`` is a dashed reference.
    """

    title: str
    unit: str  # of y
    x: str
    lines: Sequence[tuple[str, Points]]
    log: str = ""
    zero: bool = False
    whole: bool = False
    shared: bool = True
    ticks: tuple[float, ...] = ()  # of x; () for round numbers
    plain: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        lines = [
            {"name": name, "points": sorted(points.items()), "plain": name in self.plain}
            for name, points in self.lines
        ]
        return self._asdict() | {"lines": lines, "ticks": self.ticks or None}


def render(template: Path, **facts: Any) -> str:
    """The page that a ``template`` makes of ``facts``. Their text is escaped: names of files and
    classes may hold anything.

    Raises: OSError where there is no such template.
    """
    import jinja2

    loader = jinja2.FileSystemLoader([template.parent, Path(__file__).parent])
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, finalize=_without_control_characters
    )
    return environment.get_template(template.name).render(**facts)


def _without_control_characters(value: object) -> object:
    """Escape them in text from files; what is HTML already (`Markup`) stays."""
    return printable(value) if type(value) is str else value
