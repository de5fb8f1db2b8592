"""What arms have left behind: their runs, read from the runs' own files."""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare import runs
from compare.runs import Run
from study.arms import Arm

FINISHED_BECAUSE = ("epochs", "desired_acc", "train_time")


@dataclass
class Outcome:
    """An arm, or a run from elsewhere. ``run`` is None as long as no epoch of it has ended.

    ``group``: what its curve is called; ``summary``: its summary.json, {} without one.
    """

    name: str
    folder: Path
    nodes: int | None
    group: str
    seed: int | None
    run: Run | None
    summary: dict[str, Any]

    @property
    def is_finished(self) -> bool:
        """Whether the training has done all that was asked of it."""
        return self.summary.get("finished_because") in FINISHED_BECAUSE

    @property
    def units(self) -> float | None:
        """What efficiency is divided by: GPUs (processes), else nodes; None if unknown."""
        return (self.run and self.run.facts.get("gpus")) or self.nodes

    def option(self, name: str) -> Any:
        """A value of the run's options.json; None if that is not there."""
        return _json(self.folder / "options.json").get(name)


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def of_arm(arm: Arm) -> Outcome:
    """What an arm has left so far."""
    run = runs.read(arm.run) if arm.run.is_dir() else None
    if run is not None and run.epochs is None:
        run = None
    if run is not None:
        run.label = label(arm)
    found = _json(arm.run / "summary.json")
    return Outcome(arm.name, arm.run, arm.nodes, arm.group, arm.seed, run, found)


def label(arm: Arm) -> str:
    """An arm in words: 2 nodes, comm fp16, seed 1."""
    words = [count(arm.nodes, "node")]
    words += [arm.group] if arm.group else []
    words += [f"seed {arm.seed}"] if arm.seed is not None else []
    return ", ".join(words)


def of_runs(paths: Sequence[Path]) -> list[Outcome]:
    """Runs that exist already, sorted by their GPUs. Raises: `UserError` for a path without any."""
    found = [runs.read(one) for path in paths for one in runs.find(path)]
    found = runs.by_gpus(run for run in found if run.epochs is not None)
    outcomes = []
    runs.name_runs(found)
    for run in found:
        text = run.label
        group = ", ".join(str(run.facts.get(key)) for key in ("arch", "mode") if run.facts.get(key))
        folder = run.folder
        nodes = run.facts.get("nodes")
        summary = _json(folder / "summary.json")
        outcomes.append(Outcome(text, run.path, nodes and int(nodes), group, None, run, summary))
    return outcomes


def count(number: float, what: str) -> str:
    """1 node, 2 nodes."""
    return f"{number:g} {what}{'s' * (number != 1)}"


@dataclass
class Column:
    """The runs that are repeats of each other (over seeds), under one title."""

    title: str
    outcomes: list[Outcome]

    def values(self, of: Callable[[Outcome], float | None]) -> list[float]:
        """``of`` each of its runs, where it is known."""
        found = [of(one) for one in self.outcomes if one.run is not None]
        return [value for value in found if value is not None]


def columns(outcomes: Sequence[Outcome]) -> dict[str, list[Column]]:
    """Group (what the curve is called) to its columns, in the order of ``outcomes``."""
    found: dict[str, list[Column]] = {}
    for one in outcomes:
        place = found.setdefault(one.group, [])
        gpus = one.run.facts.get("gpus") if one.run else None
        title = count(one.nodes, "Node") if one.nodes else count(gpus, "GPU") if gpus else one.name
        same = next((c for c in place if c.title == title and one.seed is not None), None)
        if same:
            same.outcomes.append(one)
        elif any(c.title == title for c in place):
            place.append(Column(one.name, [one]))
        else:
            place.append(Column(title, [one]))
    return found


def spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    """The mean of repeats and, if they differ, their standard deviation; "-" of none."""
    if not values:
        return "-"
    mean = show(statistics.fmean(values))
    return mean if len(set(values)) == 1 else f"{mean} ± {show(statistics.stdev(values))}"
