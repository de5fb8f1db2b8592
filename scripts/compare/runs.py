"""Training runs: what is known of one, and which event files belong to it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare import names
from compare.records import EPOCH_TAGS, is_event_file

from utils.errors import UserError
from utils.run.figures import typical

RATE, STEP_TIME = "Throughput/train", "Time/train"
POSITIVE = (RATE, STEP_TIME, "Throughput/val", "Time/val")


@dataclass
class Run:
    """What was recorded of one run.

    ``scalars[tag][epochs finished]``: throughput in images/s over all processes, time in seconds
    per step, accuracy in per cent. ``hours[epochs finished]``: training time up to there, without
    the pauses between the event files of a resumed run; {} where the files' clocks cannot be right.
    ``price``: of a node for an hour, if it is known.
    ``facts``: options and machine, as far as known (see `reading`). ``notes``: sentences about
    what is odd.
    """

    path: Path
    label: str = ""
    scalars: dict[str, dict[int, float]] = field(default_factory=dict)
    hours: dict[int, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    state: str = ""
    epoch_seconds: float | None = None
    price: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its folder's name."""
        return folder_of(self.path).name

    @property
    def epochs(self) -> int | None:
        """Epochs finished; None if none was."""
        found = [max(self.scalars[tag]) for tag in EPOCH_TAGS if self.scalars.get(tag)]
        return max(found, default=None)

    def finite(self, tag: str) -> dict[int, float]:
        """The plausible points of ``tag``: finite, and positive where it is a speed or a time."""
        low = 0.0 if tag in POSITIVE else -math.inf
        return {x: y for x, y in self.scalars.get(tag, {}).items() if low < y < math.inf}

    def median(self, tag: str) -> float | None:
        """The median of ``tag`` over the epochs (see `typical`); None if nothing was recorded."""
        return typical(self.finite(tag))

    def best(self, tag: str) -> tuple[float, int] | None:
        """The best value of ``tag`` (the highest; of a loss, the lowest) and the first epoch that
        has it; None if nothing has."""
        points = self.finite(tag)
        sign = -1 if tag.startswith("Loss/") else 1
        epoch = max(points, key=lambda x: (sign * points[x], -x), default=None)
        return None if epoch is None else (points[epoch], epoch)

    def last(self, tag: str) -> float | None:
        """The value of ``tag`` at the last of its epochs; None if nothing was recorded."""
        points = self.finite(tag)
        return points[max(points)] if points else None

    @property
    def total_hours(self) -> float | None:
        """Hours of training up to the end of the last epoch; None where they are not known."""
        return max(self.hours.values(), default=None)

    @property
    def costs(self) -> dict[int, float]:
        """What the training up to the end of each epoch cost; {} where that is not known."""
        nodes = self.known("nodes")
        if self.price is None or not nodes:
            return {}
        return {epoch: hours * nodes * self.price for epoch, hours in self.hours.items()}

    def known(self, key: str) -> Any:
        """A fact, or None."""
        return self.facts.get(key)


def folder_of(path: Path) -> Path:
    """The folder of a run's files, as an absolute path."""
    return (path if path.is_dir() else path.parent).resolve()


def event_files(path: Path) -> list[Path]:
    """The event files of the run in folder ``path``, or ``path`` itself if it is one."""
    if not path.is_dir():
        return [path] if is_event_file(path) else []
    return sorted(file for file in path.iterdir() if "tfevents" in file.name and _plain(file))


def _plain(file: Path) -> bool:
    return file.suffix != ".tmp" and file.is_file()


def find_runs(path: Path) -> list[Path]:
    """The runs at ``path``: an event file, or every folder from ``path`` down that holds some.

    Raises:
        UserError: ``path`` does not exist, or holds no event file.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist")
    found = [path] if event_files(path) else []
    inner = path.rglob("*tfevents*") if path.is_dir() else []
    folders = {file.parent for file in inner if _plain(file)} - {path}
    found += sorted(folders, key=lambda folder: names.natural(str(folder)))
    if not found:
        raise UserError(f"{path} holds no event file (they are named events.out.tfevents.*)")
    return found


def order(runs: Iterable[Run]) -> list[Run]:
    """Sort runs by their number of GPUs (unknown last), then by name."""
    return sorted(runs, key=lambda run: (run.known("gpus") or math.inf, names.natural(run.name)))
