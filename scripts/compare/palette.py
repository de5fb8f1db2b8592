"""The colours of runs, the same on pages and in pictures, and the places of labels at line ends."""

import re
from collections.abc import Sequence
from typing import NamedTuple

# Each has a contrast of 3.4 or more on white and on the pages' dark background.
HUES = ["#2b7bd4", "#d9620f", "#1f9365", "#c24a9c", "#8460d6", "#a0711f", "#178fa3", "#7b828a"]
SEQUENCE = ["#b8860b", "#d3601f", "#c2406f", "#8a50c8", "#4470dc"]  # for numbers, from low to high
DASHES = ("solid", "dash", "dot")


class Style(NamedTuple):
    """How a run is drawn. ``dash``: one of `DASHES`."""

    colour: str
    dash: str = "solid"


def styles(labels: Sequence[str]) -> dict[str, Style]:
    """Choose a style for each run: from a sequence of colours if three or more labels differ in one
    number alone (GPUs, batch), else one of eight hues, and then other dashes."""
    numbers = [re.findall(r"\d+(?:\.\d+)?", label) for label in labels]
    words = {re.sub(r"\d+(?:\.\d+)?", "#", label).removesuffix("s") for label in labels}
    if len(labels) > 2 and len(words) == 1 and {len(one) for one in numbers} == {1}:
        order = sorted({float(one) for (one,) in numbers})
        places = [order.index(float(one)) / max(1, len(order) - 1) for (one,) in numbers]
        return {label: Style(_between(x)) for label, x in zip(labels, places, strict=True)}
    looks = [
        Style(HUES[i % len(HUES)], DASHES[i // len(HUES) % len(DASHES)]) for i in range(len(labels))
    ]
    return dict(zip(labels, looks, strict=True))


def _between(place: float) -> str:
    """The colour at ``place`` (0 to 1) of `SEQUENCE`."""
    at = place * (len(SEQUENCE) - 1)
    i = min(int(at), len(SEQUENCE) - 2)
    low, high = ([int(one[j : j + 2], 16) for j in (1, 3, 5)] for one in SEQUENCE[i : i + 2])
    mixed = [round(a + (b - a) * (at - i)) for a, b in zip(low, high, strict=True)]
    return "#" + "".join(f"{part:02x}" for part in mixed)


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move ``places`` of labels as little as needed to have ``gap`` between neighbours, and all
    between ``low`` and ``high`` if they fit there."""

    def inside(centre: float, number: int) -> float:
        half = min(gap * (number - 1) / 2, (high - low) / 2)
        return min(max(centre, low + half), high - half)

    order = sorted(range(len(places)), key=lambda i: places[i])
    groups: list[tuple[float, list[int]]] = []  # centre and members, from low to high
    for i in order:
        centre, members = inside(places[i], 1), [i]
        while groups and centre - groups[-1][0] < gap * (len(members) + len(groups[-1][1])) / 2:
            below, lower = groups.pop()
            centre = (below * len(lower) + centre * len(members)) / (len(lower) + len(members))
            members = lower + members
            centre = inside(centre, len(members))
        groups.append((centre, members))
    moved = [0.0] * len(places)
    for centre, members in groups:
        for n, i in enumerate(members):
            moved[i] = centre + gap * (n - (len(members) - 1) / 2)
    return moved
