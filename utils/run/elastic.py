"""Restarts by ``torchrun --max-restarts`` or ``scripts/train_on_nodes.sh --elastic``.

Every attempt continues in one run directory.
"""

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from utils.errors import UserError
from utils.launch.world import World, from_main, gather
from utils.run.snapshots import latest

_NO_ID = "none"  # what torchrun calls a job whose user has given no --rdzv-id
_OURS = "IMAGENET_ELASTIC"  # JOB:ATTEMPT, set by scripts/ssh/elastic.py; attempts count from 1


def is_elastic() -> bool:
    """Whether a launcher restarts this job's processes when one of them fails."""
    by_torchrun = "LOCAL_RANK" in os.environ and _number("TORCHELASTIC_MAX_RESTARTS") > 0
    return by_torchrun or _OURS in os.environ


def job_id() -> str | None:
    """What all attempts of this elastic job have in common; None if nothing is sure to be."""
    if _OURS in os.environ:
        return os.environ[_OURS].partition(":")[0]
    name = os.environ.get("TORCHELASTIC_RUN_ID", _NO_ID)
    return name if is_elastic() and name != _NO_ID else None


class Plan(NamedTuple):
    """The name of the run directory and what to resume from; a line to log if this is a restart."""

    name: str | None
    resume: str | None
    note: str | None = None


def plan(args: Any, world: World, options: str) -> Plan:
    """``--name`` and ``--resume`` as given, or what continues the run of an earlier attempt.

    ``options`` is the name of that file in a run directory. torchrun counts a restart only where a
    process has failed: nodes that make room for one that came back, and that one itself, still
    count 0. So a run is also known by the job that its options name. Raises: `UserError` when there
    is nothing to know the run by.
    """
    given = Plan(args.name, args.resume)
    if not is_elastic() or args.evaluate or args.dummy:
        return given
    if args.start_epoch is not None:
        raise UserError(
            "--start-epoch does not go with torchrun --max-restarts or --elastic: all restarts "
            "would begin there",
            alike=True,
        )
    restarts = max(gather(_restarts(), world))
    file = Path(args.resume) if args.resume not in (None, "auto") else None
    name = args.name
    if not name:
        if file and (file.parent / options).is_file():
            return given  # that run is continued where it is, each time from its latest snapshot
        if job_id() is None:
            raise UserError(
                "restarts by torchrun --max-restarts continue in one run directory: give it a "
                "--name (or torchrun an --rdzv-id)",
                alike=True,
            )
        name = "elastic_" + re.sub(r"[^\w.-]", "_", str(job_id()))
    folder = Path(args.output_dir) / name
    known, saved = from_main(lambda: (_job_of(folder / options), latest(folder) is not None), world)
    if not restarts and (known is None or known != job_id()):
        return Plan(name, args.resume)
    found = "a snapshot" if saved else "no snapshot yet"
    why = f"restarted by torchrun (failures so far: {restarts})"
    if _OURS in os.environ:
        why = f"attempt {restarts + 1} of this job"
    note = f"{why}; {folder} has {found}"
    return Plan(name, "auto" if saved or file is None else args.resume, note)


def _job_of(path: Path) -> str | None:
    """The elastic job that wrote this options.json."""
    try:
        return json.loads(path.read_text()).get("elastic_job")
    except (OSError, ValueError):
        return None


def _restarts() -> int:
    """Attempts before this one, as far as this process knows."""
    if _OURS in os.environ:
        return int(os.environ[_OURS].partition(":")[2]) - 1
    return _number("TORCHELASTIC_RESTART_COUNT")


def _number(name: str) -> int:
    return int(os.environ.get(name, "0"))
