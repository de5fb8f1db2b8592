"""Compares training runs: a table on stdout and pictures of their curves and their speed.

Reads the TensorBoard event files of each run, and summary.json for its number of processes. A
figure that a run did not record is printed as `-`. See `python scripts/compare_runs.py --help`.
"""

import argparse
import json
import math
import re
import statistics
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RATE, STEP_TIME = "Throughput/train", "Time/train"
PICTURES = {  # name: tag, title, axis label
    "top1_train": ("Top1/train", "Top-1 accuracy, training", "top-1 accuracy (%)"),
    "top1_val": ("Top1/val", "Top-1 accuracy, validation", "top-1 accuracy (%)"),
    "top5_train": ("Top5/train", "Top-5 accuracy, training", "top-5 accuracy (%)"),
    "top5_val": ("Top5/val", "Top-5 accuracy, validation", "top-5 accuracy (%)"),
    "loss_train": ("Loss/train", "Loss, training", "loss (nats)"),
    "loss_val": ("Loss/val", "Loss, validation", "loss (nats)"),
    "training_throughput": (RATE, "Throughput, training", "images/s, all processes"),
    "training_time": (STEP_TIME, "Time, training", "seconds a step"),
}
BARS = ("training_throughput", "training_time")
OVERLAY = ("loss_train", "loss_val", "top1_val", "training_throughput")
TAGS = {tag for tag, _, _ in PICTURES.values()}

# From pale to dark, so that the runs differ in grey too and a later curve shows on an earlier one.
COLOURS = "#f8d060", "#7fb6e0", "#f28a50", "#4a9e6c", "#a94f8a", "#2563a0", "#8e1f24", "#111428"
DASHES = "-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (2, 1))
MARKERS = "oX*PD^vs"
FONT_SIZE = 14
MATPLOTLIB = {
    "font.size": FONT_SIZE, "axes.titlesize": FONT_SIZE, "savefig.dpi": 150,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "axes.ymargin": 0.1, "legend.frameon": False, "legend.handlelength": 4,
    "figure.constrained_layout.w_pad": 0.1, "figure.constrained_layout.h_pad": 0.08,
    "text.parse_math": False,  # a label is a name, whatever signs are in it
}  # fmt: skip


class CompareError(Exception):
    """An input that cannot be compared. Its text is one sentence for the user."""


@dataclass(frozen=True)
class Run:
    """What was recorded of one run: ``scalars[tag][epochs finished]``, in the order of the epochs;
    throughput in images/s over all processes, time in seconds a step, accuracy in per cent."""

    label: str
    scalars: dict[str, dict[int, float]]

    def median(self, tag: str) -> float | None:
        """The median of ``tag`` over the epochs; None where nothing (finite) was recorded.

        Epoch 1 is set aside where there are more: caches, processes and compilers warm up in it.
        """
        points = self.scalars.get(tag, {}).items()
        finite = {epoch: value for epoch, value in points if math.isfinite(value)}
        values = [finite[epoch] for epoch in finite if epoch > 1] or list(finite.values())
        return statistics.median(values) if values else None


def _event_files(path: Path) -> list[Path]:
    files = path.iterdir() if path.is_dir() else [path]
    return sorted(f for f in files if "tfevents" in f.name and f.suffix != ".tmp" and f.is_file())


def find_runs(path: Path) -> list[Path]:
    """The runs that ``path`` stands for: itself, or the run directories in that folder.

    Raises:
        CompareError: ``path`` does not exist, or holds no event file.
    """
    if not path.exists():
        raise CompareError(f"{path} does not exist")
    runs = [path] if _event_files(path) else sorted(p for p in path.glob("*") if _event_files(p))
    if not runs:
        raise CompareError(f"{path} holds no event file (they are named events.out.tfevents.*)")
    return runs


def read_scalars(path: Path) -> Iterator[tuple[float, str, int, float]]:
    """Yield (wall time, tag, step, value) of `TAGS` in an event file, up to where it is damaged."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
    from tensorboard.util.tensor_util import make_ndarray

    # A long run holds a hundred times as many points per step as per epoch, and TensorBoard's own
    # loader takes seconds for them. Here a record is decoded only if a wanted tag is in it.
    wanted = re.compile(b"|".join(re.escape(b"\n%c%b" % (len(t), t.encode())) for t in TAGS))
    data = path.read_bytes()
    start = 0
    while start < len(data) or not data:
        # A record: its length (8 bytes), a checksum of that (4), the event, its checksum (4).
        length = struct.unpack_from("<Q", data, start)[0] if start + 8 <= len(data) else 0
        end = start + 12 + length
        sound = length > 0 and end + 4 <= len(data)
        record = data[start + 12 : end] if sound and wanted.search(data, start + 12, end) else b""
        if record:
            sound = masked_crc32c(record) == struct.unpack_from("<I", data, end)[0]
        if not sound:
            fault = f"cut off or damaged at byte {start} of {len(data)}; used up to there"
            print(f"warning: {path} is {fault if data else 'empty'}", file=sys.stderr)
            return
        event = Event.FromString(record) if record else None
        for value in event.summary.value if event is not None else ():
            if value.tag in TAGS:
                is_tensor = value.WhichOneof("value") == "tensor"  # as TensorFlow 2 writes scalars
                number = make_ndarray(value.tensor).item() if is_tensor else value.simple_value
                yield event.wall_time, value.tag, event.step, float(number)
        start = end + 4


def read_run(path: Path, label: str) -> Run:
    """Read a run directory or an event file; of several points of a tag and step the latest."""
    newest: dict[tuple[str, int], tuple[float, float]] = {}
    for file in _event_files(path):
        for wall_time, tag, step, value in read_scalars(file):
            if wall_time >= newest.get((tag, step), (-math.inf,))[0]:
                newest[tag, step] = (wall_time, value)
    # Nothing is trained after 0 epochs: a training figure there means that x counts from 0.
    shift = int(any(step == 0 and tag.endswith("/train") for tag, step in newest))
    if shift:
        print(f"{label}: its event files count epochs from 0; they are counted from 1 here")
    scalars: dict[str, dict[int, float]] = {}
    for (tag, step), (_, value) in sorted(newest.items()):
        scalars.setdefault(tag, {})[step + shift] = value
    return Run(label, scalars)


def default_labels(paths: list[Path]) -> list[str]:
    """The runs' directory names, with the folder above where two are equal, and with the number of
    processes where summary.json has it."""
    folders = [(path.parent if path.is_file() else path).resolve() for path in paths]
    named = Counter(folder.name for folder in folders)
    labels = []
    for folder in folders:
        label = folder.name if named[folder.name] == 1 else f"{folder.parent.name}/{folder.name}"
        try:
            processes = json.loads((folder / "summary.json").read_text())["world_size"]
            label += f" ({processes:d} process{'es' if processes != 1 else ''})"
        except (OSError, ValueError, LookupError, TypeError):
            pass  # a run that was cut short has no summary
        labels.append(label)
    return labels


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _ratio(value: float | None, first: float | None) -> str:
    return f"{value / first:.2f}" if value is not None and first else "-"


def table(runs: list[Run]) -> str:
    """One line a run. Top-1 is that of the validation images; `-` where nothing was recorded."""
    head = "run|epochs|best top-1 % (epoch)|last top-1 %|images/s|s a step|images/s to first run"
    rows = [head.split("|")]
    for run in runs:
        epochs = max((max(points) for points in run.scalars.values()), default=None)
        top1 = run.scalars.get("Top1/val", {})
        real = {epoch: value for epoch, value in top1.items() if math.isfinite(value)}
        best = max(real, key=lambda epoch: real[epoch], default=None)
        accuracy = "-" if best is None else f"{real[best]:.2f} ({best})"
        last = f"{top1[max(top1)]:.2f}" if top1 else "-"
        speed = [_figure(run.median(RATE)), _figure(run.median(STEP_TIME))]
        speed.append(_ratio(run.median(RATE), runs[0].median(RATE)))
        rows.append([run.label, _figure(epochs), accuracy, last, *speed])
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(wide[0]), *map(str.rjust, row[1:], wide[1:])]) for row in rows]
    note = "images/s (all processes) and s a step: training, median over epochs, first set aside"
    return "\n".join([*lines, f"({note} where there are more)"])


def _style(i: int, runs: int) -> dict[str, Any]:
    """How the ``i``-th of ``runs`` curves is drawn: wide and pale below, thin and dark on top, so
    that of curves that lie exactly over each other every one can be seen."""
    depth = i / (runs - 1) if runs > 1 else 1.0
    width = 6.5 - 4.3 * depth
    kind = round(depth * (len(COLOURS) - 1)) if runs <= len(COLOURS) else i % len(COLOURS)
    return {
        "color": COLOURS[kind], "linestyle": DASHES[i % len(DASHES)], "linewidth": width,
        "marker": MARKERS[kind], "markersize": width + 6, "markeredgecolor": "white",
    }  # fmt: skip


def _curves(runs: list[Run], names: Sequence[str]) -> Any:
    """A figure with a panel for each of `PICTURES`' ``names`` (one, or four) and one legend."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows, columns = (2, 2) if len(names) > 1 else (1, 1)
    tags = {PICTURES[name][0] for name in names}
    # The space in front is for older matplotlibs, which leave a "_name" out of the legend.
    labels = [f" {run.label[-44:]}{'' if tags & run.scalars.keys() else ': none'}" for run in runs]
    # In points: 0.6 of the font's size a letter, and 90 for the piece of line and the gaps.
    across = (216 + 288 * columns) // (0.6 * FONT_SIZE * max(map(len, labels)) + 90)
    across = int(max(1, min(across, len(runs))))
    size = (3 + 4 * columns, 4.4 * rows + 0.32 * math.ceil(len(runs) / across))
    figure = Figure(figsize=size, layout="constrained")
    for axes, name in zip(figure.subplots(rows, columns, squeeze=False).flat, names, strict=True):
        tag, title, unit = PICTURES[name]
        curves = [run.scalars.get(tag, {}) for run in runs]
        for i, curve in enumerate(curves):
            stride = math.ceil(len(curve) / 10) or 1  # the runs' marks are at different epochs
            marks = (i * stride // len(runs), stride)
            axes.plot(list(curve), list(curve.values()), markevery=marks, **_style(i, len(runs)))
        axes.set(title=title, ylabel=unit, xlabel="epochs finished")
        axes.set_ylim(bottom=0 if tag == RATE else None)
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True, steps=[1, 2, 5], min_n_ticks=1))
        axes.grid(axis="y", color="0.88")
        if not any(curves):
            axes.set(title=f"no run has {tag}", xticks=[], yticks=[])
    figure.legend(axes.lines, labels, loc="outside upper left", ncols=across)
    return figure


def _bars(runs: list[Run], names: Sequence[str]) -> Any:
    """A figure of the one picture in ``names``: a bar a run, its median and ratio to the first."""
    from matplotlib.figure import Figure

    tag, _, unit = PICTURES[names[0]]
    figure = Figure(figsize=(7, 1.5 + 0.85 * len(runs)), layout="constrained")
    axes = figure.subplots()
    medians = [run.median(tag) for run in runs]
    for i, (run, median) in enumerate(zip(runs, medians, strict=True)):
        axes.barh(i, median or 0, 0.5, color=_style(i, len(runs))["color"], edgecolor="black")
        axes.text(0, i - 0.3, run.label[-44:], va="bottom")
        ratio = f" (x{_ratio(median, medians[0])})" if median and medians[0] else ""
        axes.text(median or 0, i, f" {_figure(median)}{ratio}", va="center")
    # Room for the figures right of the longest bar, and for the first label above its bar.
    longest = max(median or 0 for median in medians) or 1
    axes.set(xlim=(0, 1.45 * longest), ylim=(len(runs) - 0.6, -0.75), yticks=[])
    axes.spines["left"].set_visible(False)
    note = "median over epochs, first set aside where\nthere are more; x: ratio to the first run"
    axes.set_xlabel(f"{unit}, training\n({note})")
    return figure


def draw(runs: list[Run], out: Path, prefix: str) -> list[str]:
    """Draw the pictures into the folder ``out``, print what is missing, return the file names."""
    import matplotlib.style

    drawn = []
    out.mkdir(parents=True, exist_ok=True)
    with matplotlib.style.context(["default", MATPLOTLIB]):
        for name in (*PICTURES, "overlay"):
            panels = OVERLAY if name == "overlay" else (name,)
            tags = [PICTURES[panel][0] for panel in panels]
            lacking = [run.label for run in runs if not run.scalars.keys() & set(tags)]
            file = f"{prefix}{name}.png"
            if lacking:
                fate = "not drawn" if len(lacking) == len(runs) else "drawn without some runs"
                print(f"{file} is {fate}: no {' or '.join(tags)} in {', '.join(lacking)}")
            if len(lacking) < len(runs):
                figure = (_bars if name in BARS else _curves)(runs, panels)
                # The library's version, there by default, would make equal pictures differ.
                figure.savefig(out / file, metadata={"Software": None})
                drawn.append(file)
    return drawn


def main(argv: list[str] | None = None) -> int:
    """Compare the runs that ``argv`` names and return the exit code: 0, or 2 after an error."""
    parser = argparse.ArgumentParser(description="Compares training runs in a table and pictures.")
    text = "a run directory, a folder of run directories, or one event file"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=text)
    parser.add_argument("--labels", nargs="+", metavar="LABEL", help="one a run (default: names)")
    text = "folder for the pictures (default: %(default)s)"
    parser.add_argument("--out", type=Path, default=Path("figures"), metavar="DIR", help=text)
    parser.add_argument("--prefix", default="", metavar="NAME_", help="of the pictures' names")
    args = parser.parse_args(argv)
    try:
        paths = [run for path in args.runs for run in find_runs(path)]
        labels = args.labels or default_labels(paths)
        if len(labels) != len(paths):
            raise CompareError(f"{len(labels)} labels for {len(paths)} runs; give one label a run")
        runs = [read_run(path, label) for path, label in zip(paths, labels, strict=True)]
        print(table(runs))
        drawn = draw(runs, args.out, args.prefix)
    except (CompareError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(drawn)} pictures in {args.out}: {' '.join(drawn)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
