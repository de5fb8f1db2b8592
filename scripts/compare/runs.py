"""Reads training runs from TensorBoard event files: curves, options, and the hours of training.

The records come from TensorBoard's own loader. `EventAccumulator`, which is built on it, does not
say where a file is cut off or damaged.
"""

import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterable
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
    r"(?:^|[_-])(?:(?P<n>\d+)[_-]?(?P<of>gpu|node)s?|(?P<of2>gpu|node)s?[_x-]?(?P<n2>\d+))(?=$|[_-])",
    re.IGNORECASE,
)


@dataclass
class Session:
    """The event file of one process; ``points[tag][x]`` is (wall time, value)."""

    path: Path
    points: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of the HParams entry
    began: float = 0.0
    ended: float = 0.0
    status: str = ""  # of a closed HParams entry
    fault: str = ""  # why the file was not read to its end

    @property
    def start(self) -> float:
        """When it began. A file that was converted later begins with a later time."""
        walls = (wall for points in self.points.values() for wall, _ in points.values())
        return min([self.began, *walls])


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

    def points(self, tag: str) -> dict[int, float]:
        """The plausible points of a curve: finite, and positive where it is a speed or a time."""
        low = 0.0 if tag in SPEEDS else -math.inf
        return {x: y for x, y in self.scalars.get(tag, {}).items() if low < y < math.inf}

    def ranks(self, family: str) -> list[dict[int, float]]:
        """The curves of a device (GPU/utilisation, say), one per rank."""
        return [self.points(t) for t in sorted(self.scalars) if t.startswith(f"{family}_rank")]

    def usual(self, tag: str) -> float | None:
        """The median over the epochs after the first."""
        return typical(self.points(tag))

    def highest(self, tag: str) -> float | None:
        """The highest value of a curve, or of the curves of all ranks."""
        curves = self.ranks(tag) or [self.points(tag)]
        return max((y for curve in curves for y in curve.values()), default=None)

    def device(self, tag: str) -> float | None:
        """The mean over the ranks of each one's median."""
        medians = [m for curve in self.ranks(tag) if (m := typical(curve)) is not None]
        return statistics.fmean(medians) if medians else None

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


def find(path: Path) -> list[Path]:
    """The runs at ``path``: an event file, or each folder from ``path`` down that holds some.

    Raises: `UserError`.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist")
    files = path.rglob("*") if path.is_dir() else [path]
    files = [file for file in files if _is_event_file(file)]
    if not files:
        raise UserError(f"{path} holds no event file (they are named events.out.tfevents.*)")
    return sorted({file.parent for file in files}, key=natural) if path.is_dir() else [path]


def _is_event_file(path: Path) -> bool:
    return "tfevents" in path.name and path.suffix != ".tmp" and path.is_file()


def natural(path: Path) -> list[Any]:
    """Sort key by which run10 comes after run9."""
    return [int(p) if p.isdecimal() else p for p in re.split(r"(\d+)", str(path))]


def by_gpus(runs: Iterable[Run]) -> list[Run]:
    """Runs in the order of their GPUs (unknown last), then of their names."""
    key = lambda run: (run.facts.get("gpus") or math.inf, natural(run.folder.name))  # noqa: E731
    return sorted(runs, key=key)


def read(path: Path) -> Run:
    """The run at ``path``; where its event files overlap, the later one counts."""
    files = sorted(filter(_is_event_file, path.iterdir())) if path.is_dir() else [path]
    sessions = [_read_session(file) for file in files]
    run = Run(path, notes=[f"{s.path.name} {s.fault}" for s in sessions if s.fault])
    sessions = sorted((s for s in sessions if s.points or s.options), key=lambda s: s.start)
    newest: dict[str, dict[int, tuple[float, float]]] = {}
    again: set[int] = set()
    before: set[int] = set()  # epochs of the session before
    for session in sessions:
        epochs = {x for tag in EPOCH_TAGS for x in session.points.get(tag, ())}
        again |= {x for x in before if x >= min(epochs, default=math.inf)}
        before = epochs or before
        for tag, points in session.points.items():
            # A session's work after the point from which a later session resumed is lost.
            kept = {x: y for x, y in newest.get(tag, {}).items() if x < min(points)}
            newest[tag] = kept | points
    # Nothing is trained after 0 epochs: a training figure there means that x counts from 0.
    shift = int(any(0 in newest.get(t, ()) for t in EPOCH_TAGS if t.endswith("/train")))
    if shift:
        run.notes.append("its event files count epochs from 0; they are counted from 1 here")
    for tag, points in newest.items():
        move = 0 if tag.startswith("Step/") else shift
        run.scalars[tag] = {x + move: points[x][1] for x in sorted(points)}
    if again:
        run.notes.append(
            f"{len(again)} of the epochs in its earlier event files were repeated after a "
            "resume; the later ones count"
        )
    _find_facts(run, sessions)
    _convert_units(run)
    _count_hours(run, sessions, shift)
    run.state = _state(run, sessions)
    return run


def _read_session(file: Path) -> Session:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    session, place = Session(file), 0
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
    if not size:
        session.fault = "is empty"
    elif place < size:
        session.fault = f"is cut off or damaged at byte {place} of {size}; read up to there"
    return session


def _number(value: Any) -> float | None:
    """A scalar as torch or as TensorFlow 2 (a tensor) writes it; None for anything else."""
    from tensorboard.util.tensor_util import make_ndarray

    if value.HasField("simple_value"):
        return value.simple_value
    array = make_ndarray(value.tensor) if value.HasField("tensor") else None
    is_number = array is not None and array.shape == () and array.dtype.kind in "fiu"
    return float(array.item()) if is_number else None


def _take_options(value: Any, session: Session) -> None:
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = HParamsPluginData.FromString(value.metadata.plugin_data.content)
    if value.tag == metadata.SESSION_END_INFO_TAG:
        status = content.session_end_info.status
        session.status = {1: "finished", 2: "stopped"}.get(status, "")
    for name, item in content.session_start_info.hparams.items():
        session.options[name] = getattr(item, item.WhichOneof("kind"))


def from_name(name: str) -> dict[str, Any]:
    """The facts about a run in its folder's name; {} if there are none."""
    found: dict[str, Any] = {}
    for match in COUNTS.finditer(name):
        found[f"{(match['of'] or match['of2']).lower()}s"] = int(match["n"] or match["n2"])
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
        run.facts["began"] = min(session.start for session in sessions)
    sizes = {entry.get("gpus") for entry in entries}
    if len(sizes) > 1:
        run.notes.append(
            "it was resumed on another number of GPUs "
            f"({', '.join(f'{size:g}' for size in sorted(filter(None, sizes)))}): its speed is a "
            "mixture"
        )


def _convert_units(run: Run) -> None:
    """Convert the units of older suites, where the figures themselves show their unit.

    Throughput x time is the number of images per step. Where that is the batch of one GPU of
    several, throughput was counted in one process; where it is many batches, time is per epoch.
    """
    top = [value for tag in ACCURACIES for value in run.points(tag).values()]
    if len(top) >= 20 and 0.05 < max(top) <= 1:
        for tag in ACCURACIES:
            run.scalars[tag] = {x: 100 * y for x, y in run.scalars.get(tag, {}).items()}
        run.notes.append("its accuracies are shares of 1; they are per cent here")
    rates, seconds = run.points(RATE), run.points(STEP_TIME)
    images = typical({x: rates[x] * seconds[x] for x in rates if x in seconds})
    gpus, batch, whole = (run.facts.get(k) for k in ("gpus", "batch_per_gpu", "global_batch"))
    if not (images and gpus and batch and whole) or abs(images / whole - 1) < SAME:
        return
    if gpus > 1 and abs(images / batch - 1) < SAME:
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
            f"throughput x time is {images:.0f} images per step, but its batch is {whole:g}: one "
            "of the three is wrong, so its images/s may be wrong too"
        )


def _count_hours(run: Run, sessions: list[Session], shift: int) -> None:
    """Find the hours of training at the end of each epoch, and the usual time per epoch."""
    lasted: dict[int, float] = {}  # seconds of each epoch, evaluation and saving included
    at: dict[int, float] = {}  # seconds of training up to the end of an epoch
    open_end = 0.0  # seconds that the previous session ran on after its last epoch
    for session in sessions:
        times: dict[int, float] = {}
        for tag in EPOCH_TAGS:
            for x, (wall, _) in session.points.get(tag, {}).items():
                times[x + shift] = max(times.get(x + shift, 0.0), wall)
        epochs = sorted(times)
        if not epochs:
            open_end += session.ended - session.began if session.options else 0.0
            continue
        kept = {x: seconds for x, seconds in at.items() if x < epochs[0]}
        offset = max(kept.values(), default=0.0) + (open_end if len(kept) == len(at) else 0.0)
        steps = {b: (times[b] - times[a]) / (b - a) for a, b in pairwise(epochs)}
        lasted |= steps
        began = session.began
        if began > times[epochs[0]]:
            began = times[epochs[0]] - (typical(steps) or 0.0)
            run.notes.append(
                "the beginning of its training is not recorded; it is assumed to be one "
                "epoch's time before the end of the first"
            )
        at = kept | {x: offset + times[x] - began for x in epochs}
        open_end = max(0.0, session.ended - times[epochs[-1]]) if session.options else 0.0
    usual = typical(lasted)
    # An epoch holds all its steps, or at least two where their number is not known.
    least = (run.usual(STEP_TIME) or 0.0) * (run.facts.get("steps_per_epoch") or 4) / 2
    runs_back = any(at[b] < at[a] for a, b in pairwise(sorted(at)))
    if runs_back or (usual is not None and usual <= least):
        run.notes.append(
            "the times in its event files cannot be those of training (were they rewritten "
            "later?), so it has no hours"
        )
        return
    run.hours = {x: at[x] / 3600 for x in sorted(at)}
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
    for run in runs:
        run.label = run.folder.name
    for run in generated:
        run.label = f"{run.facts['gpus']:g} GPU{'s' * (run.facts['gpus'] != 1)}"
    for key, form in (("arch", " {}"), ("mode", " {}"), ("batch_per_gpu", " b{:g}")):
        several = len({run.facts.get(key) for run in generated}) > 1
        clash = Counter(run.label for run in generated)
        for run in generated if several else ():
            if run.facts.get(key) is not None and (key == "arch" or clash[run.label] > 1):
                run.label += form.format(run.facts[key])
    clash = Counter(run.label for run in runs)
    for run in runs:
        if clash[run.label] > 1:
            parent = run.folder.parent if run.path.is_dir() else run.folder
            run.label = f"{parent.name}/{run.path.resolve().name}"
