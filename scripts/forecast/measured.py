"""What a finished run tells `forecast_scaling.py`: its size, and the seconds of a step."""

import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forecast.scaling import Measured

from utils.errors import UserError

# <date>_<time>_<host>_<arch>_gpux<processes>_b<batch>_...: ours, and those of older suites.
_NAME = re.compile(r"(?:[^_]+_){3}(?P<arch>.+)_gpux(?P<gpus>\d+)_b(?P<batch>\d+)_")


@dataclass(frozen=True)
class MeasuredRun:
    """A run of ``batch`` images a process and step on ``gpus`` processes of ``nodes`` nodes."""

    path: Path
    arch: str | None
    classes: int | None
    batch: int
    gpus: int
    nodes: int
    step_s: float
    compute_s: float | None = None  # of its step, where the run has measured that

    @property
    def measured(self) -> Measured:
        """What the forecast can be compared with."""
        return Measured(self.gpus, self.step_s)


def read_run(path: Path) -> MeasuredRun:
    """Read summary.json; without one, the event files and the directory's name.

    Raises: `UserError` when neither tells size and speed.
    """
    if not path.is_dir():
        raise UserError(f"{path} is not a run directory")
    try:
        found = json.loads((path / "summary.json").read_text())
        gpus, rate = int(found["world_size"]), float(found["images_per_s"])
        batch = int(found["global_batch"]) / gpus
        nodes, arch, classes = int(found["nodes"]), found.get("arch"), found.get("classes")
        compute, step = found.get("compute_s"), gpus * batch / rate
    except FileNotFoundError:
        return _from_events(path)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError):
        raise UserError(f"{path}/summary.json has no speed: did an epoch end?") from None
    return MeasuredRun(path, arch, classes, round(batch), gpus, nodes, step, compute)


def _from_events(path: Path) -> MeasuredRun:
    named = _NAME.search(path.name)
    rates = _throughput(path)
    if not named or not rates:
        lacking = "no Throughput/train points" if named else "no ..._gpuxN_bN_... in its name"
        raise UserError(f"{path} has no summary.json, and {lacking}: its speed is not known")
    gpus, batch = int(named["gpus"]), int(named["batch"])
    rate = statistics.median(rates[1:] or rates)
    # How many nodes they were on is not recorded; --gpus-per-node tells.
    return MeasuredRun(path, named["arch"], None, batch, gpus, 1, gpus * batch / rate)


def _throughput(path: Path) -> list[float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    tag = "Throughput/train"
    return [p.value for p in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []
