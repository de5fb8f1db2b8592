"""Compute the figures of a results page from `predictions.Predictions`, with NumPy alone."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from compare.page import Chart, drawing
from compare.palette import styles
from results.predictions import Best, Predictions

from utils.run.run_folder import SUMMARY
from utils.start.errors import UserError

Z = 1.959964  # quantile for a 95 % interval
BINS = 15  # of confidence, as in Guo et al. 2017
MOST_CLASSES = 100  # limit for a confusion matrix
MOST_CONFUSIONS = 50
MOST_MISTAKES = 24
IMAGENET = 1000
VAL_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")


class Estimate(NamedTuple):
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(hits: np.ndarray) -> Estimate:
    """Return the percentage of true ``hits`` (bool [n]), with Wilson's score interval (1927)."""
    if not (images := len(hits)):
        return Estimate(*[float("nan")] * 3)
    p, z2 = float(hits.mean()), Z**2 / images
    centre = (p + z2 / 2) / (1 + z2)
    half = Z / (1 + z2) * np.sqrt(p * (1 - p) / images + z2 / (4 * images))
    return Estimate(100 * p, max(0.0, 100 * (centre - half)), min(100.0, 100 * (centre + half)))


def mean(values: np.ndarray) -> Estimate:
    """Return the mean, with the interval of a normal distribution."""
    half = Z * values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0.0
    return Estimate(*(float(values.mean()) + sign * half for sign in (0, -1, 1)))


def summary(result: Predictions) -> dict[str, Estimate]:
    """Loss, top-1 and top-5 accuracy."""
    top1, top5 = wilson(result.hits[:, 0]), wilson(np.any(result.hits, axis=1))
    return {"loss": mean(result.losses), "top-1 (%)": top1, "top-5 (%)": top5}


def by_class(result: Predictions) -> list[dict[str, Any]]:
    """List the classes of the folder of which an image could be read, worst first: number of
    images, accuracy, and the class that is most often predicted instead."""
    taken_for: dict[int, tuple[str, int]] = {}
    for true, predicted, count in confusions(result):
        if true != predicted:
            taken_for.setdefault(true, (result.classes[predicted], count))
    rows = []
    for label in result.present:
        hits = result.hits[result.targets == label, 0]
        if not len(hits):  # none could be read; NaN has no place in an order
            continue
        other, times = taken_for.get(label, ("", 0))
        row = {"name": result.classes[label], "images": len(hits), "accuracy": wilson(hits)}
        rows.append(row | {"taken_for": other, "times": times})
    return sorted(rows, key=lambda row: (row["accuracy"].value, row["name"]))


def confusions(result: Predictions) -> list[tuple[int, int, int]]:
    """List (true class, predicted class, count), most frequent first."""
    pairs = np.stack([result.targets, result.top[:, 0]], axis=1)
    kinds, counts = np.unique(pairs, axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return [
        (*pair, n) for pair, n in zip(kinds[order].tolist(), counts[order].tolist(), strict=True)
    ]


def frequent_confusions(result: Predictions) -> list[tuple[str, str, int]]:
    """List the most frequent mistakes: (true class, predicted class, count)."""
    wrong = [(a, b, n) for a, b, n in confusions(result) if a != b][:MOST_CONFUSIONS]
    return [(result.classes[a], result.classes[b], n) for a, b, n in wrong]


def confusion_matrix(result: Predictions) -> tuple[list[str], list[tuple[int, int, int, float]]]:
    """Return the names of the folder's classes, and the cells: indices of true and predicted class
    among these names, count, and fraction of the true class's images."""
    place = {number: i for i, number in enumerate(result.present)}
    totals = np.bincount(result.targets)
    cells = [(place[a], place[b], n, n / totals[a]) for a, b, n in confusions(result)]
    return [result.classes[number] for number in result.present], cells


def about(best: Best) -> dict[str, Any]:
    """Facts about a model, for the top of a page."""
    preprocessing, content = best.preprocessing, best.content
    try:
        options = json.loads((best.path.parent / SUMMARY).read_text())
    except (OSError, ValueError):
        options = {}
    return {
        "model": best.arch,
        "classes": len(best.classes),
        "epoch": content.get("epoch"),
        "image size": f"{preprocessing.crop} (resized to {preprocessing.val_resize_size})",
        "commit": options.get("commit"),
        "file": str(best.path),
    }


def reliability(curves: Mapping[str, Sequence[tuple[float, float, int]]]) -> dict[str, Any]:
    """Make plotly's data: reliability curves by the runs' labels, and below them the images of
    each bin."""
    perfect = [("perfect", [(0.0, 0.0), (100.0, 100.0)])]
    lines = [(label, [(x, y) for x, y, _ in curve]) for label, curve in curves.items()]
    counts = [(label, [(x, n) for x, _, n in curve]) for label, curve in curves.items()]
    panels = [
        Chart(
            "Reliability",
            "accuracy, %",
            "confidence, %",
            [*perfect, *lines],
            zero=True,
            plain=["perfect"],
        )
    ]
    panels += [Chart("Images", "in each bin", "confidence, %", counts, zero=True, bars=True)]
    return drawing([(panel, None) for panel in panels], styles(list(curves))) if curves else {}


def calibration(result: Predictions) -> tuple[float, list[tuple[float, float, int]]]:
    """Return the expected calibration error in per cent (Guo et al. 2017, arXiv:1706.04599), and
    the reliability curve: mean confidence and accuracy in per cent, and the number of images, of
    each bin that has images.

    Bins of confidence (the probability of the predicted class) are (0, 1/15], (1/15, 2/15], ...
    """
    confidence, hits = result.probabilities[:, 0].astype(np.float64), result.hits[:, 0]
    bins = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    error, curve = 0.0, []
    for chosen in (bins == number for number in np.unique(bins)):
        sure, right = 100 * float(confidence[chosen].mean()), 100 * float(hits[chosen].mean())
        error += float(chosen.mean()) * abs(sure - right)
        curve.append((sure, right, int(chosen.sum())))
    return error, curve


def confident_mistakes(result: Predictions) -> list[int]:
    """Return the mistakes with the highest probabilities, as row numbers of ``result``."""
    wrong = np.flatnonzero(~result.hits[:, 0])
    return wrong[np.argsort(-result.probabilities[wrong, 0], kind="stable")][
        :MOST_MISTAKES
    ].tolist()


def real_labels(file: Path) -> list[set[int]]:
    """Read the correct classes of each validation image, in order. Raises: `UserError`."""
    try:
        return [set(map(int, one)) for one in json.loads(file.read_text())]
    except (OSError, ValueError, TypeError) as error:
        text = f"--real {file}: not a list of lists of classes ({error})"
        raise UserError(text, on_every_rank=True) from None


def real_accuracy(result: Predictions, file: Path) -> Estimate:
    """Compute accuracy by the ReaL labels in ``file`` (Beyer et al. 2020, arXiv:2006.07159).

    Images without any label do not count. Raises: `UserError`.
    """
    if len(result.classes) != IMAGENET:
        raise UserError(f"--real is for models of ImageNet's {IMAGENET} classes")
    labels, hits = dict(enumerate(real_labels(file), 1)), []
    for path, predicted in zip(result.paths, result.top[:, 0].tolist(), strict=True):
        match = VAL_NUMBER.search(Path(path).name)
        if match is None or int(match[1]) not in labels:
            raise UserError(
                f"--real: {path} is not ILSVRC2012_val_00000001 to {len(labels):08}, one of the "
                f"validation images that {file} has labels for"
            )
        if right := labels[int(match[1])]:
            hits.append(predicted in right)
    return wilson(np.array(hits))


def changes(one: Predictions, other: Predictions) -> dict[str, Any]:
    """Compare two models on the images that both could read: what ``other`` gained and lost."""
    rows = {path: row for row, path in enumerate(one.paths)}
    pairs = np.array([(rows[p], row) for row, p in enumerate(other.paths) if p in rows])
    a, b = one.hits[pairs[:, 0], 0], other.hits[pairs[:, 1], 0]
    counts = {"both": a & b, "lost": a & ~b, "gained": b & ~a, "neither": ~a & ~b}
    before = {row["name"]: row["accuracy"].value for row in by_class(one)}
    classes = by_class(other)
    for row in classes:
        row["before"] = before[row["name"]]
        row["change"] = row["accuracy"].value - row["before"]
    classes.sort(key=lambda row: (row["change"], row["name"]))
    difference = mean(100.0 * b - 100.0 * a)  # paired: the mean of each image's difference
    facts = {"images": len(pairs), "difference": difference, "classes": classes}
    return facts | {key: int(chosen.sum()) for key, chosen in counts.items()}
