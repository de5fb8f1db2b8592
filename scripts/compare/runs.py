"""Reads training runs from TensorBoard event files: curves, options, and the hours of training.

The records come from TensorBoard's own loader. `EventAccumulator`, which is built on it, does not
say where a file is cut off or damaged.
"""

import math
import re
import statistics
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.provenance import typical

RATE, STEP_TIME = "Throughput/train", "Time/train"
TRAINED = ("Loss/train", "Top1/train", "Top5/train", RATE, STEP_TIME)
EPOCH_TAGS = (*TRAINED, "Loss/val", "Top1/val", "Top5/val", "Throughput/val", "Time/val", "Lr")
WHOLE_BATCH = ("nd", "dp")  # the modes where -b is the batch of all GPUs
FRAME = 16  # bytes around an event in a file: its length (8) and two checksums (4 each)
# <month><day>_<time>_<host>_<arch>_gpux<processes>_b<batch>_cpu<workers>_<mode>: the names that
# training scripts generate, now as in 2020. A host's name has no underscore.
GENERATED = re.compile(
    r"(?:[A-Z][a-z]{2}\d\d?_\d\d-\d\d-\d\d_[^_]*_)?(?P<arch>.+?)_gpux(?P<gpus>\d+)"
    r"(?:_b(?P<batch>\d+))?(?:_cpu\d+)?(?:_(?P<mode>.+))?$"
)


@dataclass
class Session:
    """The event file of one process; ``points[tag][x]`` is (wall time, value)."""

    points: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of the HParams entry
    began: float = 0.0
    ended: float = 0.0
    status: str = ""  # of a closed HParams entry

    @property
    def ends(self) -> dict[int, float]:
        """When each epoch ended."""
        found: dict[int, float] = {}
        for tag in EPOCH_TAGS:
            for x, (wall, _) in self.points.get(tag, {}).items():
                found[x] = max(found.get(x, 0.0), wall)
        return dict(sorted(found.items()))


@dataclass(eq=False)
class Run:
    """A run: ``scalars[tag][epochs finished]``, rates in images/s over all processes, times in
    seconds per step, accuracies in per cent.

    ``hours[epochs finished]``: training time without the pauses between sessions. ``facts``:
    options and machine, as far as recorded. ``base``: the run that its speed is divided by; None if
    it cannot be compared with any.
    """

    path: Path
    label: str = ""
    scalars: dict[str, dict[int, float]] = field(default_factory=dict)
    hours: dict[int, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    state: str = ""
    epoch_seconds: float | None = None
    notes: list[str] = field(default_factory=list)
    base: "Run | None" = None

    @property
    def folder(self) -> Path:
        return (self.path if self.path.is_dir() else self.path.parent).resolve()

    @property
    def epochs(self) -> int | None:
        """Epochs finished; None if none was."""
        return max((max(self.scalars[t]) for t in EPOCH_TAGS if self.scalars.get(t)), default=None)

    @property
    def total_hours(self) -> float | None:
        return max(self.hours.values(), default=None)

    @property
    def speed_up(self) -> float | None:
        """Images/s relative to the base."""
        return ratio(self.usual(RATE), self.base and self.base.usual(RATE))

    @property
    def efficiency(self) -> float | None:
        """Images/s per GPU relative to the base: 1 is perfect scaling."""
        more = ratio(self.facts.get("gpus"), self.base and self.base.facts.get("gpus"))
        return ratio(self.speed_up, more)

    def curves(self, tag: str) -> list[dict[int, float]]:
        """The curve of a tag, or those of all ranks (GPU/..._rankN): their plausible points, which
        are finite, and positive where it is a speed or a time."""
        low = 0.0 if tag.startswith(("Throughput/", "Time/")) else -math.inf
        found = [t for t in sorted(self.scalars) if t == tag or t.startswith(f"{tag}_rank")]
        return [{x: y for x, y in self.scalars[t].items() if low < y < math.inf} for t in found]

    def points(self, tag: str) -> dict[int, float]:
        return next(iter(self.curves(tag)), {})

    def usual(self, tag: str) -> float | None:
        """The median over the epochs after the first; the mean of these over the ranks."""
        medians = [m for curve in self.curves(tag) if (m := typical(curve)) is not None]
        return statistics.fmean(medians) if medians else None

    def highest(self, tag: str) -> float | None:
        return max((y for curve in self.curves(tag) for y in curve.values()), default=None)

    def best(self, tag: str) -> tuple[float, int] | tuple[None, None]:
        """The best value of a curve (of a loss, the lowest), and the first epoch that has it."""
        points, sign = self.points(tag), -1 if tag.startswith("Loss/") else 1
        epoch = max(points, key=lambda x: (sign * points[x], -x), default=None)
        return (None, None) if epoch is None else (points[epoch], epoch)

    def of_best(self, name: str) -> float | None:
        """``name`` (Loss, Top1 or Top5) on the validation images, of the model in best.pt."""
        by_loss = self.facts.get("best_by") == "loss"
        by, sign = ("Loss", -1) if by_loss else ("Top1", 1)
        # Of equal ones the first epoch's, and there the plain model before the averaged one.
        places = [
            (sign * value, -epoch, model == "val", f"{name}/{model}")
            for model in ("val", "ema")
            for epoch, value in self.points(f"{by}/{model}").items()
        ]
        if not places:
            return None
        _, epoch, _, tag = max(places)
        return self.points(tag).get(-epoch)

    def last(self, tag: str) -> float | None:
        points = self.points(tag)
        return points[max(points)] if points else None

    def reached(self, top1: float) -> int | None:
        """The first epoch with this validation top-1; best.pt may hold the averaged weights."""
        both = (self.points("Top1/val"), self.points("Top1/ema"))
        return min((x for points in both for x, y in points.items() if y >= top1), default=None)

    def done_within(self, hours: float) -> int | None:
        """Epochs finished by then."""
        done = [x for x, h in self.hours.items() if h <= hours * (1 + 1e-6)]
        return max(done, default=0) if self.hours else None


def ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None


def find(path: Path) -> list[Run]:
    """The runs at ``path``: an event file, or each folder from ``path`` down that holds some.

    In the order of their GPUs (unknown last), then of their names, run9 before run10. Raises:
    `UserError`.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist")
    files = list(filter(_is_event_file, path.rglob("*") if path.is_dir() else [path]))
    if not files:
        raise UserError(f"{path} holds no event file (they are named events.out.tfevents.*)")

    def place(run: Run) -> tuple[float, list[int | str]]:
        parts = re.split(r"(\d+)", f"{run.folder.name}/{run.path}")
        return run.facts.get("gpus") or math.inf, [int(p) if p.isdecimal() else p for p in parts]

    found = {file.parent for file in files} if path.is_dir() else files
    return sorted(map(read, found), key=place)


def _is_event_file(path: Path) -> bool:
    return "tfevents" in path.name and path.suffix != ".tmp" and path.is_file()


def read(path: Path) -> Run:
    """The run at ``path``; where event files overlap, the later one (by name) counts."""
    run, sessions = Run(path), []
    for file in sorted(filter(_is_event_file, path.iterdir())) if path.is_dir() else [path]:
        session, fault = _read_session(file)
        sessions += [session] if session.points or session.options else []
        run.notes += [f"{file.name} {fault}"] if fault else []
    _count_epochs_from_1(run, sessions)
    for session in sessions:
        for tag, points in session.points.items():
            # A session's work after the point from which a later session resumed is lost.
            kept = {x: y for x, y in run.scalars.get(tag, {}).items() if x < min(points)}
            run.scalars[tag] = kept | {x: points[x][1] for x in sorted(points)}
    _find_facts(run, sessions)
    _count_hours(run, sessions)
    return run


def _read_session(file: Path) -> tuple[Session, str]:
    """What an event file holds, and why it was not read to its end."""
    # Here and below, so that --help and tables do without TensorBoard, which takes a second.
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    session, place = Session(), 0
    size = file.stat().st_size  # before reading: the file may be growing
    for record in RawEventFileLoader(str(file)).Load():
        event = Event.FromString(record)
        place += FRAME + len(record)
        session.began = session.began or event.wall_time
        session.ended = max(session.ended, event.wall_time)
        for value in event.summary.value:
            if value.tag.startswith("_hparams_/"):
                _take_options(value, session)
            elif value.HasField("simple_value"):
                points = session.points.setdefault(value.tag, {})
                points[event.step] = (event.wall_time, value.simple_value)
    # The loader ends without a message, at the end of the file or where a checksum is wrong.
    fault = f"is cut off or damaged at byte {place} of {size}; read up to there"
    return session, "is empty" if not size else fault if place < size else ""


def _take_options(value: Any, session: Session) -> None:
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = HParamsPluginData.FromString(value.metadata.plugin_data.content)
    if value.tag == metadata.SESSION_END_INFO_TAG:
        status = content.session_end_info.status
        session.status = {1: "finished", 2: "stopped"}.get(status, "")
    for name, item in content.session_start_info.hparams.items():
        session.options[name] = getattr(item, item.WhichOneof("kind"))


def _count_epochs_from_1(run: Run, sessions: list[Session]) -> None:
    """Nothing is trained after 0 epochs: a training figure there means that x counts from 0."""
    if not any(0 in session.points.get(tag, ()) for session in sessions for tag in TRAINED):
        return
    run.notes.append("its event files count epochs from 0; they are counted from 1 here")
    for session in sessions:
        for tag, points in session.points.items():
            session.points[tag] = {x + 1: point for x, point in points.items()}


def from_name(name: str) -> dict[str, Any]:
    """The facts about a run in its folder's name, if a training script generated it; else {}."""
    match = GENERATED.search(name)
    if not match:
        return {}
    gpus = int(match["gpus"])
    found = {key: match[key] for key in ("arch", "mode") if match[key]} | {"gpus": gpus}
    if gpus == 1:
        found["nodes"] = 1
    if match["batch"]:
        whole = int(match["batch"]) * (1 if match["mode"] in WHOLE_BATCH else gpus)
        found |= {"global_batch": whole, "batch_per_gpu": whole / gpus}
    return found


def _find_facts(run: Run, sessions: list[Session]) -> None:
    """Take the options of the latest HParams entry, and what it lacks from the folder's name."""
    entries = [session.options for session in sessions if session.options]
    run.facts = from_name(run.folder.name) | (entries[-1] if entries else {})
    if entries:
        run.state = sessions[-1].status or "not finished"
    if sessions:
        run.facts["began"] = sessions[0].began
    if len(sizes := {entry.get("gpus") for entry in entries}) > 1:
        listed = ", ".join(f"{size:g}" for size in sorted(filter(None, sizes)))
        run.notes.append(f"it was resumed on another number of GPUs ({listed}): its speed is mixed")


def _count_hours(run: Run, sessions: list[Session]) -> None:
    """Find the hours of training at the end of each epoch, and the usual time per epoch."""
    lasted: dict[int, float] = {}  # seconds of each epoch, evaluation and saving included
    at: dict[int, float] = {}  # seconds of training up to the end of an epoch
    before = 0.0  # seconds of training in the sessions before
    for session in sessions:
        ends = session.ends
        kept = {x: seconds for x, seconds in at.items() if x < min(ends, default=math.inf)}
        if len(kept) < len(at):  # it resumed before the end of the previous session
            before = max(kept.values(), default=0.0)
        at = kept | {x: before + end - session.began for x, end in ends.items()}
        lasted |= {b: (ends[b] - ends[a]) / (b - a) for a, b in pairwise(ends)}
        # Our runs resume within an epoch; older suites began the unfinished epoch again.
        ended = session.ended if session.options else max(ends.values(), default=session.began)
        before += ended - session.began
    run.hours = {x: seconds / 3600 for x, seconds in at.items()}
    # Of a single epoch: from the start of the process.
    run.epoch_seconds = at[1] if not lasted and list(at) == [1] else typical(lasted)


def name_runs(runs: list[Run]) -> None:
    """Label each run: by its folder's name or, if a training script generated the name, by the
    facts that differ between the runs (16 GPUs, O2, b208)."""
    generated = [run for run in runs if GENERATED.search(run.folder.name)]
    several = [
        (key, form)
        for key, form in (("arch", " {}"), ("mode", " {}"), ("batch_per_gpu", " b{:g}"))
        if len({run.facts.get(key) for run in generated}) > 1
    ]
    for run in runs:
        run.label = run.folder.name
        if run in generated:
            gpus = run.facts["gpus"]
            known = [form.format(v) for key, form in several if (v := run.facts.get(key))]
            run.label = "".join([f"{gpus:g} GPU{'s' * (gpus != 1)}", *known])
    clash = Counter(run.label for run in runs)
    for run in runs:
        if clash[run.label] > 1:
            parent = run.folder.parent if run.path.is_dir() else run.folder
            run.label = f"{parent.name}/{run.path.resolve().name}"
