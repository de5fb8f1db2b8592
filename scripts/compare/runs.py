"""Training runs: which event files belong to one, and what they say about it."""

import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from compare import names
from compare.records import EPOCH_TAGS, Session, is_event_file, read_session

from utils.errors import UserError

RATE, STEP_TIME = "Throughput/train", "Time/train"
POSITIVE = (RATE, STEP_TIME, "Throughput/val", "Time/val")
ACCURACIES = ("Top1/train", "Top1/val", "Top5/train", "Top5/val")
WHOLE_BATCH = ("nd", "dp")  # the modes where -b is the batch of all GPUs
SAME = 0.05  # rate x time may miss the batch size by this share: both are means
# A run may be silent for this many epochs' time, and still be going on.
SILENCE = 3


@dataclass
class Run:
    """What was recorded of one run.

    ``scalars[tag][epochs finished]``: throughput in images/s over all processes, time in seconds a
    step, accuracy in per cent. ``hours[epochs finished]``: training time up to there, the pauses
    between the event files of a resumed run left out; {} where the files' clocks cannot be right.
    ``facts``: options and machine, as far as known (see `_facts`). ``notes``: sentences about what
    is odd.
    """

    path: Path
    label: str = ""
    scalars: dict[str, dict[int, float]] = field(default_factory=dict)
    hours: dict[int, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    state: str = ""
    epoch_seconds: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its folder's name."""
        return folder_of(self.path).name

    @property
    def epochs(self) -> int | None:
        """Epochs finished; None where no epoch was."""
        found = [max(self.scalars[tag]) for tag in EPOCH_TAGS if self.scalars.get(tag)]
        return max(found, default=None)

    def finite(self, tag: str) -> dict[int, float]:
        """The points of ``tag`` that can be: numbers, and of speeds and times positive ones."""
        low = 0.0 if tag in POSITIVE else -math.inf
        return {x: y for x, y in self.scalars.get(tag, {}).items() if low < y < math.inf}

    def median(self, tag: str) -> float | None:
        """The median of ``tag`` over the epochs; None where nothing (finite) was recorded.

        Epoch 1 is set aside where there are more: caches, processes and compilers warm up in it.
        """
        return typical(self.finite(tag))

    def best(self, tag: str) -> tuple[float, int] | None:
        """The highest value of ``tag``, and its (first) epoch."""
        points = self.finite(tag)
        epoch = max(points, key=lambda x: (points[x], -x), default=None)
        return None if epoch is None else (points[epoch], epoch)

    def known(self, key: str) -> Any:
        """A fact, or None."""
        return self.facts.get(key)


def typical(points: dict[int, float]) -> float | None:
    """The median over the epochs after the first; of the first, if there is no other."""
    values = [points[x] for x in points if x > 1] or list(points.values())
    return statistics.median(values) if values else None


def folder_of(path: Path) -> Path:
    """The folder that a run's files are in, by its full name."""
    return (path if path.is_dir() else path.parent).resolve()


def _event_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path] if is_event_file(path) else []
    return sorted(file for file in path.iterdir() if "tfevents" in file.name and _plain(file))


def _plain(file: Path) -> bool:
    return file.suffix != ".tmp" and file.is_file()


def find_runs(path: Path) -> list[Path]:
    """The runs that ``path`` stands for: an event file, or each folder in it that holds some.

    Raises:
        UserError: ``path`` does not exist, or holds no event file.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if _event_files(path):
        found = [path]
        inner = path.rglob("*tfevents*") if path.is_dir() else []
    else:
        found, inner = [], path.rglob("*tfevents*")
    folders = {file.parent for file in inner if _plain(file)} - {path}
    found += sorted(folders, key=lambda folder: names.natural(str(folder)))
    if not found:
        raise UserError(f"{path} holds no event file (they are named events.out.tfevents.*)")
    return found


def read_run(path: Path) -> Run:
    """Read a run's event files; where they overlap the later one counts."""
    run = Run(path)
    sessions = [read_session(file) for file in _event_files(path)]
    for session in sessions:
        if session.fault:
            run.notes.append(f"{session.path.name} {session.fault}")
    sessions = sorted((s for s in sessions if s.points or s.options), key=_start)
    newest: dict[str, dict[int, tuple[float, float]]] = {}
    for session in sessions:
        for tag, points in session.points.items():
            # What an earlier session did after the place where a later one begins is lost work.
            kept = {x: y for x, y in newest.get(tag, {}).items() if x < min(points)}
            newest[tag] = kept | points
    # Nothing is trained after 0 epochs: a training figure there means that x counts from 0.
    shift = int(any(0 in newest.get(tag, ()) for tag in EPOCH_TAGS if tag.endswith("/train")))
    if shift:
        run.notes.append("its event files count epochs from 0; they are counted from 1 here")
    for tag, points in newest.items():
        move = 0 if tag.startswith("Step/") else shift
        run.scalars[tag] = {x + move: points[x][1] for x in sorted(points)}
    _note_overlap(run, sessions)
    run.facts = _facts(run, sessions)
    _settle_units(run)
    _clock(run, sessions, shift)
    run.state = _state(run, sessions)
    return run


def _start(session: Session) -> float:
    """When a session began. Not always what the file's first record says: of files that were
    converted later, that is the time of the conversion."""
    times = [wall_time for points in session.points.values() for wall_time, _ in points.values()]
    return min([session.began, *times])


def _note_overlap(run: Run, sessions: Sequence[Session]) -> None:
    again: set[int] = set()
    for before, after in pairwise(session for session in sessions if session.epochs):
        again |= {x for x in before.epochs if x >= after.epochs[0]}
    if again:
        run.notes.append(
            f"{len(again)} of the epochs in its earlier event files were done again after a "
            "resume; the later ones count"
        )


def _facts(run: Run, sessions: Sequence[Session]) -> dict[str, Any]:
    """The run's options: those of the latest HParams entry, else what the folder's name tells.

    Keys, of those that are known: gpus nodes arch mode batch_per_gpu global_batch steps_per_epoch
    began (seconds since 1970), automatic (its name was made up by a training script), and all
    others that `utils.training.report.facts` writes.
    """
    entries = [session.options for session in sessions if session.options]
    told = names.facts([run.path.name, *(p.name for p in (run.path, *run.path.parents)[:3])])
    facts: dict[str, Any] = {"automatic": told.get("automatic", False)}
    if sessions:
        facts["began"] = min(map(_start, sessions))
    if entries:
        facts |= entries[-1]
        sizes = {entry.get("gpus") for entry in entries}
        if len(sizes) > 1:
            run.notes.append(
                "it was resumed on another number of GPUs "
                f"({', '.join(f'{size:g}' for size in sorted(filter(None, sizes)))}): its speed is "
                "a mixture"
            )
    else:
        facts |= {key: told[key] for key in ("gpus", "nodes", "arch", "mode") if key in told}
        if facts.get("gpus") == 1:
            facts["nodes"] = 1
        batch, gpus = told.get("batch"), facts.get("gpus")
        if batch and gpus:
            whole = str(facts.get("mode", "")).lower() in WHOLE_BATCH
            facts["global_batch"] = batch if whole else batch * gpus
            facts["batch_per_gpu"] = facts["global_batch"] / gpus
    return facts


def _settle_units(run: Run) -> None:
    """Bring older writers' units to ours where the figures themselves show what they are.

    Throughput x Time is the number of images a step. Where it is the batch of one GPU of several,
    throughput was counted in one process; where it is many batches, the time is that of an epoch.
    """
    top = [value for tag in ACCURACIES for value in run.finite(tag).values()]
    if len(top) >= 20 and 0.05 < max(top) <= 1:
        for tag in ACCURACIES:
            run.scalars[tag] = {x: 100 * y for x, y in run.scalars.get(tag, {}).items()}
        run.notes.append("its accuracies are shares of 1; they are per cent here")
    rates, seconds = run.finite(RATE), run.finite(STEP_TIME)
    images = typical({x: rates[x] * seconds[x] for x in rates if x in seconds})
    gpus, batch, whole = (run.known(key) for key in ("gpus", "batch_per_gpu", "global_batch"))
    if not (images and gpus and batch and whole):
        return

    def is_about(other: float) -> bool:
        return abs(images / other - 1) < SAME

    if is_about(whole):
        return
    if gpus > 1 and is_about(batch):
        for tag in (RATE, "Throughput/val"):
            run.scalars[tag] = {x: gpus * y for x, y in run.scalars.get(tag, {}).items()}
        run.notes.append(
            f"its throughput is that of one process (throughput x time = {images:.0f}, one GPU's "
            f"batch); it is multiplied by {gpus:g} here"
        )
    elif images > 20 * whole:
        steps = images / whole
        run.scalars[STEP_TIME] = {x: y / steps for x, y in run.scalars[STEP_TIME].items()}
        run.notes.append(
            f"its Time/train is that of an epoch (throughput x time = {images:.0f} images); it is "
            f"divided by {steps:.0f} steps here"
        )
        run.facts.setdefault("steps_per_epoch", round(steps))
    else:
        run.notes.append(
            f"throughput x time is {images:.0f} images a step, but its batch is {whole:g}: one of "
            "the three is not what it says, so trust its images/s with care"
        )


def _clock(run: Run, sessions: Sequence[Session], shift: int) -> None:
    """Find the hours of training at the end of each epoch, and the time of an epoch."""
    lasted: dict[int, float] = {}  # seconds of single epochs, evaluation and saving included
    at: dict[int, float] = {}  # seconds of training up to the end of an epoch
    open_end = 0.0  # seconds that the session before has gone on after its last epoch
    for session in sessions:
        times: dict[int, float] = {}
        for tag in EPOCH_TAGS:
            for x, (wall_time, _) in session.points.get(tag, {}).items():
                times[x + shift] = max(times.get(x + shift, 0.0), wall_time)
        epochs = sorted(times)
        if not epochs:
            open_end += session.ended - session.began if session.options else 0.0
            continue
        before = max((x for x in at if x < epochs[0]), default=None)
        on_time = before is None or before == max(at)
        offset = (at[before] if before is not None else 0.0) + (open_end if on_time else 0.0)
        at = {x: seconds for x, seconds in at.items() if x < epochs[0]}
        steps = {two: (times[two] - times[one]) / (two - one) for one, two in pairwise(epochs)}
        lasted |= steps
        began = session.began
        if began > times[epochs[0]]:
            began = times[epochs[0]] - (typical(steps) or 0.0)
            run.notes.append(
                "the beginning of its training is not recorded; it is taken to be one epoch's "
                "time before the end of the first"
            )
        at |= {x: offset + times[x] - began for x in epochs}
        open_end = max(0.0, session.ended - times[epochs[-1]]) if session.options else 0.0
    order = sorted(at)
    runs_back = any(at[b] < at[a] for a, b in pairwise(order))
    usual = typical(lasted)
    # All steps are in it, or two at least where their number is not known.
    least = (run.median(STEP_TIME) or 0.0) * (run.known("steps_per_epoch") or 4) / 2
    if runs_back or (usual is not None and usual <= least):
        run.notes.append(
            "the times in its event files cannot be those of training (they were copied or "
            "written anew?), so it has no hours"
        )
        return
    run.hours = {x: at[x] / 3600 for x in order}
    run.epoch_seconds = usual
    if usual is None and order == [1] and len(sessions) == 1:
        run.epoch_seconds = at[1]  # its only epoch, from the start of the process


def _state(run: Run, sessions: Sequence[Session]) -> str:
    if not sessions:
        return ""
    last = sessions[-1]
    if last.status == "success":
        return "finished"
    if last.status == "failure":
        return "stopped"
    silent = time.time() - max(session.ended for session in sessions)
    if silent < SILENCE * max(run.epoch_seconds or 0.0, 60.0):
        return "going on"
    return "not finished" if last.options else ""


def order(runs: Iterable[Run]) -> list[Run]:
    """Sort runs by their number of GPUs (unknown last), then by name."""
    return sorted(runs, key=lambda run: (run.known("gpus") or math.inf, names.natural(run.name)))
