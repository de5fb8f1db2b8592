"""Reads training runs from TensorBoard event files: curves, options, and the hours of training.

The records come from TensorBoard's own loader. `EventAccumulator`, which is built on it, does not
say where a file is cut off or damaged.
"""

import math
import re
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.run.provenance import typical

RATE, STEP_TIME = "Throughput/train", "Time/train"
SPEEDS = (RATE, "Throughput/val", STEP_TIME, "Time/val")
ACCURACIES = ("Top1/train", "Top1/val", "Top5/train", "Top5/val")
EPOCH_TAGS = ("Loss/train", "Loss/val", *ACCURACIES, *SPEEDS, "Lr")
WHOLE_BATCH = ("nd", "dp")  # the modes where -b is the batch of all GPUs
SAME = 0.05  # rate x time may differ from the batch size by this share: both are means
SILENCE = 3  # a run may be silent for the time of this many epochs and still be running
FRAME = 16  # bytes around an event in a file: its length (8) and two checksums (4 each)
# <month><day>_<time>_<host>_<arch>_gpux<processes>_b<batch>_cpu<workers>_<mode>: the names that
# training scripts generate, now as in 2020. A host's name has no underscore.
GENERATED = re.compile(
    r"(?:[A-Z][a-z]{2}\d\d?_\d\d-\d\d-\d\d_[^_]*_)?(?P<arch>.+?)_gpux\d+"
    r"(?:_bs?(?P<batch>\d+))?(?:_cpu\d+)?(?:_\d+nodes?)?(?:_(?P<mode>.+))?$"
)
COUNTS = re.compile(
    r"(?:^|[_-])(?:(\d+)[_-]?(gpu|node)s?|(gpu|node)s?[_x-]?(\d+))(?=$|[_-])", re.IGNORECASE
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
    def start(self) -> float:
        """When it began. A file that was converted later begins with a later time."""
        return min([self.began, *self.ends.values()])

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

    ``hours[epochs finished]``: training time without the pauses between sessions; {} where the
    clocks in the files cannot be right. ``facts``: options and machine, as far as recorded.
    ``base``: the run that its speed is divided by; None if it cannot be compared with any.
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
        low = 0.0 if tag in SPEEDS else -math.inf
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

    def last(self, tag: str) -> float | None:
        points = self.points(tag)
        return points[max(points)] if points else None

    def reached(self, top1: float) -> int | None:
        """The first epoch with this validation top-1; best.pt may hold the averaged weights."""
        both = (self.points("Top1/val"), self.points("Top1/ema"))
        return min((x for points in both for x, y in points.items() if y >= top1), default=None)

    def done_within(self, hours: float) -> int | None:
        """Epochs finished by then; None if that is unknown, or not known yet."""
        if not self.hours or (self.total_hours < hours and self.state == "running"):
            return None
        return max((x for x, h in self.hours.items() if h <= hours * (1 + 1e-9)), default=0)


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
    """The run at ``path``; where its event files overlap, the later one counts."""
    run, sessions = Run(path), []
    for file in sorted(filter(_is_event_file, path.iterdir())) if path.is_dir() else [path]:
        session, fault = _read_session(file)
        sessions += [session] if session.points or session.options else []
        run.notes += [f"{file.name} {fault}"] if fault else []
    sessions.sort(key=lambda session: session.start)
    _count_epochs_from_1(run, sessions)
    repeated: set[int] = set()
    before: dict[int, float] = {}
    for session in sessions:
        first = min(session.ends, default=math.inf)
        repeated |= {x for x in before if x >= first}
        before = session.ends or before
        for tag, points in session.points.items():
            # A session's work after the point from which a later session resumed is lost.
            kept = {x: y for x, y in run.scalars.get(tag, {}).items() if x < min(points)}
            run.scalars[tag] = kept | {x: points[x][1] for x in sorted(points)}
    if repeated:
        run.notes.append(f"{len(repeated)} epochs were repeated after a resume; the later count")
    _find_facts(run, sessions)
    _convert_units(run)
    _count_hours(run, sessions)
    run.state = _state(run, sessions)
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
            elif (number := _number(value)) is not None:
                session.points.setdefault(value.tag, {})[event.step] = (event.wall_time, number)
    # The loader ends without a message, at the end of the file or where a checksum is wrong.
    fault = f"is cut off or damaged at byte {place} of {size}; read up to there"
    return session, "is empty" if not size else fault if place < size else ""


def _number(value: Any) -> float | None:
    """A scalar as torch or as TensorFlow 2 (a tensor) writes it; None for anything else."""
    if value.HasField("simple_value"):
        return value.simple_value
    from tensorboard.util.tensor_util import make_ndarray

    array = make_ndarray(value.tensor) if value.HasField("tensor") else None
    return (
        float(array)
        if array is not None and array.shape == () and array.dtype.kind in "fiu"
        else None
    )


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
    tags = [tag for tag in EPOCH_TAGS if tag.endswith("/train")]
    if not any(0 in session.points.get(tag, ()) for session in sessions for tag in tags):
        return
    run.notes.append("its event files count epochs from 0; they are counted from 1 here")
    for session in sessions:
        for tag, points in session.points.items():
            if not tag.startswith("Step/"):
                session.points[tag] = {x + 1: point for x, point in points.items()}


def from_name(name: str) -> dict[str, Any]:
    """The facts about a run in its folder's name; {} if there are none."""
    found: dict[str, Any] = {}
    for before, of_before, of_after, after in COUNTS.findall(name):
        found[f"{(of_before or of_after).lower()}s"] = int(before or after)
    gpus = found.get("gpus")
    if gpus == 1:
        found["nodes"] = 1
    if match := GENERATED.search(name):
        found |= {key: match[key] for key in ("arch", "mode") if match[key]} | {"generated": True}
        if match["batch"]:
            whole = int(match["batch"]) * (1 if match["mode"] in WHOLE_BATCH else gpus)
            found |= {"global_batch": whole, "batch_per_gpu": whole / gpus}
    return found


def _find_facts(run: Run, sessions: list[Session]) -> None:
    """Take the options of the latest HParams entry; without one, the facts in the folder's name."""
    named = next(filter(None, (from_name(p.name) for p in (run.path, *run.path.parents)[:3])), {})
    entries = [session.options for session in sessions if session.options]
    run.facts = entries[-1] if entries else named
    run.facts |= {"generated": "generated" in named}
    if sessions:
        run.facts["began"] = sessions[0].start
    if len(sizes := {entry.get("gpus") for entry in entries}) > 1:
        listed = ", ".join(f"{size:g}" for size in sorted(filter(None, sizes)))
        run.notes.append(f"it was resumed on another number of GPUs ({listed}): its speed is mixed")


def _convert_units(run: Run) -> None:
    """Convert the units of older suites, where the figures themselves show their unit.

    Throughput x time is the number of images per step. Where that is the batch of one GPU of
    several, throughput was counted in one process; where it is many batches, time is per epoch.
    """

    def multiply(factor: float, *tags: str) -> None:
        for tag in tags:
            run.scalars[tag] = {x: factor * y for x, y in run.scalars.get(tag, {}).items()}

    top = [value for tag in ACCURACIES for value in run.points(tag).values()]
    if len(top) >= 20 and 0.05 < max(top) <= 1:
        multiply(100, *ACCURACIES)
        run.notes.append("its accuracies are shares of 1; they are per cent here")
    rates, seconds = run.points(RATE), run.points(STEP_TIME)
    images = typical({x: rates[x] * seconds[x] for x in rates if x in seconds})
    gpus, batch, whole = (run.facts.get(k) for k in ("gpus", "batch_per_gpu", "global_batch"))
    if not (images and gpus and batch and whole) or abs(images / whole - 1) < SAME:
        return
    found = f"throughput x time is {images:.0f} images, its batch {whole:g}"
    if gpus > 1 and abs(images / batch - 1) < SAME:
        multiply(gpus, RATE, "Throughput/val")
        found += f": its throughput is that of one process, and is multiplied by {gpus:g} here"
    elif images > 20 * whole:
        multiply(whole / images, STEP_TIME)
        steps = run.facts.setdefault("steps_per_epoch", round(images / whole))
        found += f": its Time/train is that of an epoch, and is divided by {steps:g} steps here"
    else:
        found += ": one of the three is wrong, so its images/s may be wrong too"
    run.notes.append(found)


def _count_hours(run: Run, sessions: list[Session]) -> None:
    """Find the hours of training at the end of each epoch, and the usual time per epoch."""
    lasted: dict[int, float] = {}  # seconds of each epoch, evaluation and saving included
    at: dict[int, float] = {}  # seconds of training up to the end of an epoch
    open_end = 0.0  # seconds that the previous session ran on after its last epoch
    for session in sessions:
        ends = session.ends
        if not ends:
            open_end += session.ended - session.began if session.options else 0.0
            continue
        first, last = min(ends), max(ends)
        kept = {x: seconds for x, seconds in at.items() if x < first}
        offset = max(kept.values(), default=0.0) + (open_end if len(kept) == len(at) else 0.0)
        steps = {b: (ends[b] - ends[a]) / (b - a) for a, b in pairwise(ends)}
        lasted |= steps
        # Of a converted file the beginning is not known.
        known = session.began <= ends[first]
        began = session.began if known else ends[first] - (typical(steps) or 0.0)
        at = kept | {x: offset + end - began for x, end in ends.items()}
        open_end = max(0.0, session.ended - ends[last]) if session.options else 0.0
    usual = typical(lasted)
    # An epoch holds all its steps, or at least two where their number is not known.
    least = (run.usual(STEP_TIME) or 0.0) * (run.facts.get("steps_per_epoch") or 4) / 2
    runs_back = any(later < earlier for earlier, later in pairwise(at.values()))
    if runs_back or (usual is not None and usual <= least):
        run.notes.append(
            "the times in its event files cannot be those of training (rewritten?): it has no hours"
        )
        return
    run.hours = {x: seconds / 3600 for x, seconds in at.items()}
    # Of a single epoch: from the start of the process.
    run.epoch_seconds = at[1] if usual is None and list(at) == [1] == [len(sessions)] else usual


def _state(run: Run, sessions: list[Session]) -> str:
    if not sessions or sessions[-1].status:
        return sessions[-1].status if sessions else ""
    silent = time.time() - max(session.ended for session in sessions)
    if silent < SILENCE * max(run.epoch_seconds or 0.0, 60.0):
        return "running"
    return "not finished" if sessions[-1].options else ""


def name_runs(runs: list[Run]) -> None:
    """Label each run: by its folder's name or, if a training script generated the name, by the
    facts that differ between the runs (16 GPUs, O2, b208)."""
    generated = [run for run in runs if run.facts.get("generated") and run.facts.get("gpus")]
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
