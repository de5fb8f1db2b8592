"""Size and seconds per step of a finished run, for `forecast_scaling.py --from`."""

import json
from dataclasses import dataclass
from pathlib import Path

from compare import runs
from compare.runs import RATE

from utils.errors import UserError


@dataclass(frozen=True)
class MeasuredRun:
    """A run with ``batch`` images per process and step on ``gpus`` processes of ``nodes`` nodes."""

    path: Path
    arch: str | None
    classes: int | None
    batch: int
    gpus: int
    nodes: int
    step_s: float
    compute_s: float | None = None  # of each step, where the run has measured it


def read_run(path: Path) -> MeasuredRun:
    """Read summary.json; without one, the event files and the directory's name.

    Raises: `UserError` when neither gives size and speed.
    """
    if not path.is_dir():
        raise UserError(f"{path} is not a run directory")
    try:
        found = json.loads((path / "summary.json").read_text())
        gpus, batch = int(found["world_size"]), int(found["global_batch"])
        size = round(batch / gpus), gpus, int(found["nodes"])
        step, compute = batch / float(found["images_per_s"]), found.get("compute_s")
    except FileNotFoundError:
        return _from_events(path)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError):
        raise UserError(f"{path}/summary.json has no speed: did an epoch end?") from None
    return MeasuredRun(path, found.get("arch"), found.get("classes"), *size, step, compute)


def _from_events(path: Path) -> MeasuredRun:
    run = runs.read(path)
    rate, gpus, batch = run.usual(RATE), run.facts.get("gpus"), run.facts.get("global_batch")
    if not (rate and gpus and batch):
        lacking = "no ..._gpuxN_bN_... in its name" if rate else f"no {RATE} points"
        raise UserError(f"{path} has no summary.json, and {lacking}: its speed is not known")
    # Older suites did not record the number of nodes; --gpus-per-node gives it.
    nodes, classes = run.facts.get("nodes") or 1, run.facts.get("class_count")
    size = round(batch / gpus), int(gpus), int(nodes)
    return MeasuredRun(path, run.facts.get("arch"), classes and int(classes), *size, batch / rate)
