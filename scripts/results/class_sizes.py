"""Draw how many images each class has, as unequal classes are learned unequally."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from compare import pictures
from numpy.typing import NDArray

from utils.start.errors import printable

NAMED = 40  # classes that get a name beside their bar
COLOURS = {"train": "#2a78d6", "val": "#d95f0e", "test": "#6b7075"}


def draw(classes: Sequence[str], targets: Mapping[str, Sequence[int]], file: Path) -> str:
    """Draw a bar for each class, the largest class of training first.

    ``targets``: the class of each image, by part of the data. Returns: a sentence about the first
    part. Raises: OSError; ValueError if ``file`` is no picture's name.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    counts = {part: _counts(given, len(classes)) for part, given in targets.items()}
    first, sizes = next(iter(counts.items()))
    order = np.argsort(-sizes, kind="stable")
    named = len(classes) <= NAMED
    with matplotlib.rc_context(pictures.MATPLOTLIB):
        height = 1.6 + 0.3 * len(classes) if named else 5.0
        figure = Figure(figsize=(8, height), layout="constrained")
        axes = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
        places = np.arange(len(classes))
        for i, (axis, (part, size)) in enumerate(zip(axes, counts.items(), strict=True)):
            bars = axis.barh(places, size[order], 0.7 if named else 1.0, color=COLOURS[part])
            axis.set(title=part, xlabel="images")
            axis.xaxis.set_major_locator(MaxNLocator(3, integer=True))
            if named:
                axis.bar_label(bars, padding=4)
                axis.margins(x=0.25)
                axis.set_yticks(places, [_short(classes[int(one)]) for one in order])
            elif i == 0:
                axis.set_ylabel(f"{len(classes)} classes, by their images in {first}/")
        axes[0].set_ylim(len(classes) - 0.5, -0.5)
        pictures.save(figure, file)
    small, large = int(order[-1]), int(order[0])
    if sizes[small] == sizes[large]:
        return f"each class has {sizes[large]} images in {first}/"
    return (
        f"in {first}/, {classes[large]} has {sizes[large]} images, and {classes[small]} has "
        f"{sizes[small]}"
    )


def _counts(targets: Sequence[int], classes: int) -> NDArray[np.int64]:
    return np.bincount(np.asarray(targets, np.int64), minlength=classes)


def _short(name: str) -> str:
    name = printable(name)
    return name if len(name) <= 24 else f"{name[:23]}…"
