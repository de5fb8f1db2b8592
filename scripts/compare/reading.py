"""Reads a run: one history out of the event files of its sessions, in this suite's units."""

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from compare import names
from compare.records import EPOCH_TAGS, Session, read_session
from compare.runs import RATE, STEP_TIME, Run, event_files

from utils.run.figures import typical

ACCURACIES = ("Top1/train", "Top1/val", "Top5/train", "Top5/val")
WHOLE_BATCH = ("nd", "dp")  # the modes where -b is the batch of all GPUs
SAME = 0.05  # rate x time may miss the batch size by this share: both are means
# A run may be silent for this many epochs' time and still be running.
SILENCE = 3


def read_run(path: Path) -> Run:
    """Read a run's event files; where they overlap the later one counts."""
    run = Run(path)
    sessions = [read_session(file) for file in event_files(path)]
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
