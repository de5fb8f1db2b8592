"""What the doctor finds."""

from typing import NamedTuple

OK, WARNING, ERROR = 0, 1, 2
MARKS = "✓!✗"


class Finding(NamedTuple):
    """A problem also has a reason and a remedy in ``why``, unless ``text`` names them."""

    level: int  # `OK`, `WARNING` or `ERROR`
    text: str
    why: str = ""
