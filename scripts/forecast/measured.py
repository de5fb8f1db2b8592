"""Size and seconds per step of a finished run, for `forecast_scaling.py --from`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def read_run(path: Path) -> MeasuredRun:
    """Read summary.json; without one, the event files and the directory's name.

    Raises: `UserError` when neither gives size and speed.
    """
    if not path.is_dir():
        raise UserError(f"{path} is not a run directory")
    file = path / "summary.json"
    try:
        found = json.loads(file.read_text()) if file.exists() else _from_events(path)
        gpus, batch = int(found["world_size"]), int(found["global_batch"])
        size = round(batch / gpus), gpus, int(found["nodes"])
        step_s = batch / float(found["images_per_s"])
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError):
        where = (
            file if file.exists() else f"{path} has no summary.json; its event files or its name"
        )
        raise UserError(f"{where} has no speed or size: did an epoch end?") from None
    return MeasuredRun(path, found.get("arch"), found.get("classes"), *size, step_s)


def _from_events(path: Path) -> dict[str, Any]:
    run = runs.read(path)
    return {
        "arch": run.facts.get("arch"),
        "classes": int(run.facts.get("class_count") or 1000),
        "world_size": run.facts.get("gpus"),
        # Older suites did not record the number of nodes; --gpus-per-node gives it.
        "nodes": run.facts.get("nodes") or 1,
        "global_batch": run.facts.get("global_batch"),
        "images_per_s": run.usual(RATE),
    }
