"""Read training runs from TensorBoard event files: curves, options, and the hours of training.

TensorBoard's own loader reads the records. `EventAccumulator`, which uses that loader, does not
report where a file is cut off or damaged.
"""

import json
import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from utils.start.errors import UserError
from utils.start.typical import typical

RATE, STEP_TIME = "Throughput/train", "Time/train"
STEP_RATE, STEP_LOSS = "Step/throughput", "Step/loss"  # x = 1000 x epochs
TRAINED = ("Loss/train", "Top1/train", "Top5/train", RATE, STEP_TIME)
EPOCH_TAGS = (*TRAINED, "Loss/val", "Top1/val", "Top5/val", "Throughput/val", "Time/val", "Lr")
FRAME = 16  # bytes around an event in a file: its length (8) and two checksums (4 each)
# <month><day>_<time>_<host>_<arch>_gpux<processes>_b<batch>_cpu<workers>_<mode>: run names that
# training scripts generate, unchanged since 2020. A host name has no underscore.
GENERATED = re.compile(
    r"(?:[A-Z][a-z]{2}\d\d?_\d\d-\d\d-\d\d_[^_]*_)?(?P<arch>.+?)_gpux(?P<gpus>\d+)"
    r"(?:_b(?P<batch>\d+))?(?:_cpu\d+)?(?:_(?P<mode>.+))?$"
)


@dataclass(eq=False)
class Run:
    """A run. ``scalars[tag][epochs finished]``: rates in images/s over all processes, times in
    seconds per step, accuracies in per cent. The curves of all ranks (GPU/..._rank0, _rank1, ...)
    are joined under the tag without _rankN: their mean, or for memory their maximum.

    ``hours[epochs finished]``: training time without the pauses between sessions. ``facts``: the
    recorded options and machine. ``base``: the run that its speed is divided by; None if it cannot
    be compared with any.
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
        """The number of finished epochs, 0 if there are only steps; None if there is nothing."""
        return max(self.hours, default=0 if self.points(STEP_RATE) else None)

    @property
    def position(self) -> float:
        """The epochs done, with the part of the last one that the curves by steps cover."""
        return max([self.epochs or 0, *(x / 1000 for x in self.points(STEP_RATE))])

    @property
    def size(self) -> str:
        """The number of its GPUs in words, or on a CPU of its processes."""
        count = self.facts["gpus"]
        return f"{count:g} {worker([self]) if count == 1 else workers([self])}"

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
        return ratio(
            self.speed_up, ratio(self.facts.get("gpus"), self.base and self.base.facts.get("gpus"))
        )

    def points(self, tag: str) -> dict[int, float]:
        return self.scalars.get(tag, {})

    def usual(self, tag: str) -> float | None:
        """Return the median over the epochs after the first; without an epoch, that of the images/s
        of its steps."""
        points = self.points(tag)
        return typical(points or (self.points(STEP_RATE) if tag == RATE else {}))

    def highest(self, tag: str) -> float | None:
        return max(self.points(tag).values(), default=None)

    def last(self, tag: str) -> float | None:
        points = self.points(tag)
        return points[max(points)] if points else None

    def best(self, tag: str) -> tuple[float, int] | tuple[None, None]:
        """Return a curve's best value and its first epoch. For a loss, the lowest is best."""
        points, sign = self.points(tag), -1 if tag.startswith("Loss/") else 1
        epoch = max(points, key=lambda x: (sign * points[x], -x), default=None)
        return (None, None) if epoch is None else (points[epoch], epoch)

    def highest_top1(self) -> tuple[float, int] | tuple[None, None]:
        """Return the highest validation top-1, of the plain or averaged weights, and its epoch."""
        plain, averaged = self.best("Top1/val"), self.best("Top1/ema")
        return averaged if (averaged[0] or 0.0) > (plain[0] or 0.0) else plain

    def lowest_loss(self) -> float | None:
        """Return the lowest validation loss of any epoch, of the plain or averaged weights."""
        curves = (self.points("Loss/val"), self.points("Loss/ema"))
        return min((y for curve in curves for y in curve.values()), default=None)

    def loss_at(self, x: int) -> float | None:
        """Return the training loss of the last printed line up to ``x`` (1000 x epochs)."""
        points = self.points(STEP_LOSS)
        at = max((one for one in points if one <= x), default=None)
        return None if at is None else points[at]

    def reached(self, top1: float | None) -> int | None:
        """Return the first epoch with this validation top-1, of the plain or averaged weights."""
        if top1 is None:
            return None
        curves = (self.points("Top1/val"), self.points("Top1/ema"))
        return min((x for curve in curves for x, y in curve.items() if y >= top1), default=None)

    def done_within(self, hours: float) -> int | None:
        """Return the number of epochs finished within ``hours``."""
        done = [x for x, h in self.hours.items() if h <= hours * (1 + 1e-6)]
        return max(done, default=0) if self.hours else None


def workers(runs: Iterable[Run]) -> str:
    """Return what the runs' counts are of: GPUs, or on a CPU, processes."""
    devices = {run.facts.get("device") for run in runs}
    if devices == {"cpu"}:
        return "processes"
    return "GPUs and processes" if "cpu" in devices else "GPUs"


def worker(runs: Iterable[Run]) -> str:
    """Return the singular of `workers`, for what is said "per" one."""
    return "process" if workers(runs) == "processes" else "GPU"


def ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None


def find(path: Path) -> list[Run]:
    """Find the runs at ``path``: an event file, or all folders with event files in and below it.

    They are sorted by number of GPUs (unknown last), then by name, run9 before run10. Raises:
    `UserError`.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist")
    files = list(filter(is_event_file, files_below(path) if path.is_dir() else [path]))
    if not files:
        raise UserError(f"{path} has no TensorBoard event file (events.out.tfevents.*)")
    for file in files:
        if os.fsencode(file).decode(errors="replace") != str(file):
            # TensorBoard does not open it, and pages and tables could not name it.
            raise UserError(f"the name {file.parent} is not UTF-8: rename it")

    def place(run: Run) -> tuple[float, list[int | str]]:
        parts = re.split(r"(\d+)", f"{run.folder.name}/{run.path}")
        return run.facts.get("gpus") or math.inf, [int(p) if p.isdecimal() else p for p in parts]

    return sorted(map(read, {file.parent for file in files} if path.is_dir() else files), key=place)


def files_below(folder: Path) -> Iterator[Path]:
    """Yield all files below ``folder``. Links to folders are followed, to each folder once."""
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(real)
        yield from (Path(place, name) for name in names)


def is_event_file(path: Path) -> bool:
    return "tfevents" in path.name and path.suffix != ".tmp" and path.is_file()


def read(path: Path) -> Run:
    """Read the run at ``path``. Where event files overlap, the later one (by name) counts."""
    run = Run(path)
    run.facts = facts = _facts_of_name(run.folder.name)
    curves: dict[str, dict[int, float]] = {}
    at: dict[int, float] = {}  # seconds of training until the end of each epoch
    lasted: dict[int, float] = {}  # seconds of each epoch, evaluation and saving included
    before, sizes = 0.0, set()  # seconds of training in earlier sessions
    for file in sorted(filter(is_event_file, path.iterdir())) if path.is_dir() else [path]:
        points, options, ends, began, ended = {}, {}, {}, 0.0, 0.0
        for event in _events(file, run.notes):
            began = began or event.wall_time
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    points.setdefault(value.tag, {})[event.step] = value.simple_value
                    if value.tag in EPOCH_TAGS:
                        ends[event.step] = max(ends.get(event.step, 0.0), event.wall_time - began)
                elif value.tag.startswith("_hparams_/"):
                    run.state = _take_options(value, options) or "not finished"
            if run.state != "finished":  # that is written after the evaluation of DATA/test
                ended = max(ended, event.wall_time - began)
        for tag, curve in points.items():
            # If a later session resumed from an earlier epoch, the work after that epoch is lost.
            kept = {x: y for x, y in curves.get(tag, {}).items() if x < min(curve)}
            curves[tag] = kept | curve
        kept = {x: seconds for x, seconds in at.items() if x < min(ends, default=math.inf)}
        if len(kept) < len(at):
            before = max(kept.values(), default=0.0)
        at = kept | {x: before + ends[x] for x in sorted(ends)}
        lasted |= {b: (ends[b] - ends[a]) / (b - a) for a, b in pairwise(sorted(ends))}
        # Our runs resume within an epoch. Older suites restarted the unfinished epoch.
        before += ended if options else max(ends.values(), default=0.0)
        if began:
            facts.setdefault("began", began)
        if options:
            run.facts = facts | options
            sizes.add(options.get("gpus"))
    if run.state != "not finished":  # else summary.json is of before the run was continued
        run.facts |= _ledger(run.folder)
    if len(sizes) > 1:
        listed = ", ".join(f"{size:g}" for size in sorted(filter(None, sizes)))
        run.notes.append(
            f"it resumed on another number of {workers([run])} ({listed}), so its speed is mixed"
        )
    # A training value at x = 0 means that the file counts epochs from 0.
    if shift := any(0 in curves.get(tag, ()) for tag in TRAINED):
        run.notes.append("its event files count epochs from 0; they are counted from 1 here")
    run.hours = {x + shift: seconds / 3600 for x, seconds in at.items()}
    # A single epoch counts from the start of the process. If each was the first of its session, the
    # starts of these count.
    lasted = lasted or {b: (at[b] - at[a]) / (b - a) for a, b in pairwise(sorted(at))}
    lasted = lasted or (at if list(run.hours) == [1] else {})
    run.epoch_seconds = typical({x + shift: seconds for x, seconds in lasted.items()})
    ranks: dict[str, dict[int, list[float]]] = {}
    for tag, curve in curves.items():
        over = OVER_PROCESSES.match(tag)
        if over and over[2] != ("max" if "memory" in tag.lower() else "mean"):
            continue
        low = 0.0 if tag.startswith(("Throughput/", "Time/")) else -math.inf
        values = ranks.setdefault(over[1] if over else re.sub(r"_rank\d+$", "", tag), {})
        for x, y in curve.items():
            if low < y < math.inf:  # leave out implausible values
                values.setdefault(x + shift, []).append(y)
    for tag, values in ranks.items():
        join = max if "memory" in tag.lower() else statistics.fmean
        run.scalars[tag] = {x: join(values[x]) for x in sorted(values)}
    return run


# In older runs, each process has tags of its own, which end in _rank0, _rank1, ...
OVER_PROCESSES = re.compile(r"((?:GPU|CPU|Memory)/.*)_(min|mean|max)$")
LEDGER = ("node_hours", "gpu_hours", "energy_kwh", "images_per_joule", "mfu")


def _ledger(folder: Path) -> dict[str, float]:
    """What the run has used, from its summary.json; empty if it has none."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        return {}
    known = summary if isinstance(summary, dict) else {}
    return {key: known[key] for key in LEDGER if isinstance(known.get(key), (int, float))}


def _events(file: Path, notes: list[str]) -> Iterator[Any]:
    """Yield the events of a file. Adds a note if the file could not be read to its end."""
    # Not at the top: importing TensorBoard takes a second, and --help and tables do not need it.
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    size, place = file.stat().st_size, 0  # before reading: the file may be growing
    for record in RawEventFileLoader(str(file)).Load():
        place += FRAME + len(record)
        yield Event.FromString(record)
    if not size:
        notes.append(f"{file.name} is empty")
    elif place < size:  # the loader ends without a message where a checksum is wrong
        text = f"is cut off or damaged at byte {place} of {size}; only the part before was read"
        notes.append(f"{file.name} {text}")


def _take_options(value: Any, options: dict[str, Any]) -> str:
    """Add the options of an HParams summary. Returns its end status, or "" if it has none."""
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = HParamsPluginData.FromString(value.metadata.plugin_data.content)
    for name, item in content.session_start_info.hparams.items():
        options[name] = getattr(item, item.WhichOneof("kind"))
    is_end = value.tag == metadata.SESSION_END_INFO_TAG
    return {1: "finished", 2: "stopped"}.get(content.session_end_info.status, "") if is_end else ""


def _facts_of_name(name: str) -> dict[str, Any]:
    """Parse the facts in a folder's name, if a training script generated it; else {}."""
    match = GENERATED.search(name)
    if not match:
        return {}
    gpus = int(match["gpus"])
    facts = {key: match[key] for key in ("arch", "mode") if match[key]} | {"gpus": gpus}
    if gpus == 1:
        facts["nodes"] = 1
    if match["batch"]:  # with nd and dp, it is the batch of all GPUs
        whole = int(match["batch"]) * (1 if match["mode"] in ("nd", "dp") else gpus)
        facts |= {"global_batch": whole, "batch_per_gpu": whole / gpus}
    return facts


def name_runs(runs: list[Run]) -> None:
    """Label each run by its folder's name. If a training script generated the name, label it by the
    facts that differ between the runs (16 GPUs, O2, b208)."""
    generated = [run for run in runs if GENERATED.search(run.folder.name)]
    for run in runs:
        run.label = run.folder.name
    for run in generated:
        run.label = run.size
        for key, form in (("arch", " {}"), ("mode", " {}"), ("batch_per_gpu", " b{:g}")):
            if len({one.facts.get(key) for one in generated}) > 1 and (fact := run.facts.get(key)):
                run.label += form.format(fact)
    clash = Counter(run.label for run in runs)
    for run in runs:
        if clash[run.label] > 1:
            parent = run.folder.parent if run.path.is_dir() else run.folder
            run.label = f"{parent.name}/{run.path.resolve().name}"
