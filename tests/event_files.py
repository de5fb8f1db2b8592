"""Event files as suites of 2020 left them, written record by record, without any SummaryWriter;
and scripts/compare_runs.py without its pictures."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import compare_runs
from compare.comparison import Comparison
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from utils.comparison import closing, opening

SCRIPT = "scripts/compare_runs.py"
BEGAN = 1_596_976_425.0  # 9 August 2020
# Published for ResNet-50 on a cluster of V100: images/s by number of GPUs.
HAL = {2: 1582, 4: 3003, 8: 5819, 16: 11257, 32: 19490, 64: 32619}


def folder_name(gpus: int, batch: int = 208, mode: str = "O2", arch: str = "resnet50") -> str:
    """A run's name as the scripts of 2020 generated it."""
    return f"Aug09_12-33-45_hal_{arch}_gpux{gpus}_b{batch}_cpu20_{mode}"


def write(
    folder: Path,
    epochs: Mapping[int, Mapping[str, float]],
    began: float = BEGAN,
    seconds: float = 100.0,
    options: Mapping[str, object] | None = None,
    success: bool | None = None,
) -> Path:
    """Write one event file: ``epochs[x][tag]``, each epoch ``seconds`` after the one before. With
    ``options``, as a run of this suite: killed, or ended well or not (``success``)."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"events.out.tfevents.{began:.0f}.hal01.1234.0"
    with open(path, "wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=began, file_version="brain.Event:2").SerializeToString())
        for summary in opening(options) if options else ():
            writer.write(Event(wall_time=began, summary=summary).SerializeToString())
        now = began
        for x, values in epochs.items():
            now += seconds
            for tag, number in values.items():
                summary = Summary(value=[Summary.Value(tag=tag, simple_value=number)])
                event = Event(wall_time=now, step=x, summary=summary)
                writer.write(event.SerializeToString())
        for summary in () if success is None else closing(success):
            writer.write(Event(wall_time=now, summary=summary).SerializeToString())
    return path


def epochs_of(
    rate: float, batch: int, top1: Sequence[float] = (20, 40, 60, 75), first: int = 1
) -> dict[int, dict[str, float]]:
    """The tags of 2020 for some epochs of ``rate`` images/s with a global ``batch``; the first
    epoch is slow."""
    epochs = {}
    for e, accuracy in enumerate(top1):
        speed = rate / 3 if e == 0 else rate * (1.01, 1.0, 0.99)[e % 3]
        epochs[first + e] = {
            "Loss/train": 5.0 - accuracy / 20,
            "Loss/val": 5.1 - accuracy / 20,
            "Top1/train": accuracy - 3.0,
            "Top1/val": accuracy,
            "Top5/train": (accuracy + 100) / 2 - 2,
            "Top5/val": (accuracy + 100) / 2,
            "Throughput/train": speed,
            "Time/train": batch / speed,
            "Lr": 0.1 * 10.0 ** -(e // 2),
        }
    return epochs


def table(*arguments: object) -> tuple[dict[str, list[str]], list[str], Comparison]:
    """Compare without drawing: the cells by their rows' keys, the notes, the comparison."""
    comparison = compare_runs.compare(compare_runs.parse(list(map(str, arguments))))
    return comparison.cells, comparison.notes, comparison


def note(notes: list[str], pattern: str) -> str:
    """The one note with this pattern."""
    (text,) = [text for text in notes if re.search(pattern, text)]
    return text
