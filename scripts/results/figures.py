"""The figures of a page of results, computed from `predictions.Predictions` with NumPy alone."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from results.predictions import Predictions

from utils.errors import UserError

Z = 1.959964  # of a 95 % interval
BINS = 15  # of confidence: as many as Guo et al. 2017 take
MOST_CLASSES = 100  # of a confusion matrix
MOST_CONFUSIONS = 50
IMAGENET = 1000
VAL_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")


class Estimate(NamedTuple):
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(hits: int, images: int) -> Estimate:
    """An accuracy in per cent, with Wilson's score interval (Wilson 1927)."""
    if not images:
        return Estimate(*[float("nan")] * 3)
    p, z2 = hits / images, Z**2 / images
    centre = (p + z2 / 2) / (1 + z2)
    half = Z / (1 + z2) * np.sqrt(p * (1 - p) / images + z2 / (4 * images))
    return Estimate(100 * p, max(0.0, 100 * (centre - half)), min(100.0, 100 * (centre + half)))


def mean(values: np.ndarray) -> Estimate:
    """A mean, with the interval of a normal distribution."""
    half = Z * values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0.0
    return Estimate(*(float(values.mean()) + sign * half for sign in (0, -1, 1)))


def summary(result: Predictions) -> dict[str, Estimate]:
    """Loss, top-1 and top-5 accuracy."""
    hits, images = result.hits, len(result.paths)
    return {
        "loss": mean(result.losses),
        "top-1 (%)": wilson(int(hits[:, 0].sum()), images),
        "top-5 (%)": wilson(int(hits.any(axis=1).sum()), images),
    }


def by_class(result: Predictions) -> list[dict[str, Any]]:
    """For each class of the folder: images, accuracy, and the class it is most often taken for."""
    counts, rows = confusions(result), []
    images = np.bincount(result.targets, minlength=len(result.classes)).tolist()
    taken_for: dict[int, tuple[int, int]] = {}
    for (true, predicted), count in counts.items():
        if true != predicted:
            taken_for[true] = max(taken_for.get(true, (0, 0)), (count, predicted))
    for label in result.present:
        count, other = taken_for.get(label, (0, 0))
        rows.append({
            "name": result.classes[label],
            "images": images[label],
            "accuracy": wilson(counts.get((label, label), 0), images[label]),
            "taken_for": result.classes[other] if count else "",
            "times": count,
        })  # fmt: skip
    return sorted(rows, key=lambda row: (row["accuracy"].value, row["name"]))


def confusions(result: Predictions) -> dict[tuple[int, int], int]:
    """How often (true class, predicted class) came, without those that never did."""
    pairs = np.stack([result.targets, result.top[:, 0]], axis=1)
    kinds, counts = np.unique(pairs, axis=0, return_counts=True)
    return {tuple(pair): n for pair, n in zip(kinds.tolist(), counts.tolist(), strict=True)}


def confusion_matrix(result: Predictions) -> dict[str, Any]:
    """``names`` of the folder's classes, and ``cells``: true class and predicted class (numbers
    in ``names``), how often, and as a share of the true class's images."""
    place = {number: i for i, number in enumerate(result.present)}
    totals = np.bincount(result.targets, minlength=len(result.classes))
    cells = [(place[a], place[b], n, n / totals[a]) for (a, b), n in confusions(result).items()]
    return {"names": [result.classes[number] for number in result.present], "cells": cells}


def frequent_confusions(result: Predictions) -> list[tuple[str, str, int]]:
    """The most frequent mistakes: true class, predicted class, how often."""
    wrong = [(n, pair) for pair, n in confusions(result).items() if pair[0] != pair[1]]
    wrong.sort(key=lambda one: (-one[0], one[1]))
    return [(result.classes[a], result.classes[b], n) for n, (a, b) in wrong[:MOST_CONFUSIONS]]


def calibration(result: Predictions) -> tuple[float, list[tuple[float, float]]]:
    """The expected calibration error in per cent (Guo et al. 2017, arXiv:1706.04599), and the
    reliability curve: mean confidence -> accuracy, both in per cent, for each bin with images.

    Bins of confidence (the probability of the predicted class) are (0, 1/15], (1/15, 2/15], ...
    """
    confidence, hits = result.probabilities[:, 0].astype(np.float64), result.hits[:, 0]
    bins = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    error, curve = 0.0, []
    for number in np.unique(bins):
        chosen = bins == number
        sure, right = 100 * confidence[chosen].mean(), 100 * hits[chosen].mean()
        error += chosen.mean() * abs(sure - right)
        curve.append((float(sure), float(right)))
    return float(error), curve


def confident_mistakes(result: Predictions, most: int) -> list[int]:
    """The wrongly predicted images with the highest probabilities, as rows of ``result``."""
    wrong = np.flatnonzero(~result.hits[:, 0])
    return wrong[np.argsort(-result.probabilities[wrong, 0], kind="stable")][:most].tolist()


def real_labels(file: Path) -> list[frozenset[int]]:
    """The right classes of each validation image, by the images' numbers. Raises: `UserError`."""
    try:
        return [frozenset(map(int, one)) for one in json.loads(file.read_text())]
    except (OSError, ValueError, TypeError) as error:
        text = f"--real {file}: not a list of lists of classes ({error})"
        raise UserError(text, on_every_rank=True) from None


def real_accuracy(result: Predictions, file: Path) -> Estimate:
    """Accuracy by the ReaL labels in ``file`` (Beyer et al. 2020, arXiv:2006.07159).

    Images without any label do not count. Raises: `UserError`.
    """
    sets = real_labels(file)
    if len(result.classes) != IMAGENET:
        raise UserError(f"--real is for models of ImageNet's {IMAGENET} classes")
    hits, images = 0, 0
    for path, predicted in zip(result.paths, result.top[:, 0].tolist(), strict=True):
        match = VAL_NUMBER.search(Path(path).name)
        if match is None or not 0 < int(match[1]) <= len(sets):
            raise UserError(
                f"--real: {path} is not ILSVRC2012_val_00000001 to {len(sets):08}, one of the "
                f"validation images that {file} has labels for"
            )
        right = sets[int(match[1]) - 1]
        images += bool(right)
        hits += predicted in right
    return wilson(hits, images)


def changes(one: Predictions, other: Predictions) -> dict[str, Any]:
    """What the second of two models gained and lost, on the images that both could read."""
    rows = {path: row for row, path in enumerate(one.paths)}
    pairs = np.array([(rows[p], row) for row, p in enumerate(other.paths) if p in rows])
    a, b = one.hits[pairs[:, 0], 0], other.hits[pairs[:, 1], 0]
    images, gained, lost = len(pairs), int((b & ~a).sum()), int((a & ~b).sum())
    # Of a difference of paired proportions.
    spread = Z * np.sqrt(max(0.0, gained + lost - (gained - lost) ** 2 / images)) / images
    difference = (gained - lost) / images
    estimate = Estimate(*(100 * (difference + sign * spread) for sign in (0, -1, 1)))
    before = {row["name"]: row for row in by_class(one)}
    classes = by_class(other)
    for row in classes:
        row["before"] = before[row["name"]]["accuracy"].value
        row["change"] = row["accuracy"].value - row["before"]
    classes.sort(key=lambda row: (row["change"], row["name"]))
    both, neither = int((a & b).sum()), int((~a & ~b).sum())
    counts = {"both": both, "lost": lost, "gained": gained, "neither": neither}
    return counts | {"images": images, "difference": estimate, "classes": classes}
