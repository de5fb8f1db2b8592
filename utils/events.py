"""TensorBoard event files of a run directory, as far as SummaryWriter does not care for them."""

from functools import partial
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter

from utils.files import save_atomically

STEP_TAGS = "Step/"  # tags with x = 1000 x epoch; all others have x = epochs finished


def cut_off(folder: Path, epoch: int, step_x: int) -> None:
    """Take the points after ``epoch`` (``Step/`` curves: after ``step_x``) out of event files.

    A run that was killed after its last snapshot has written points that the resumed run writes
    again. SummaryWriter's ``purge_step`` cannot help: it is one number for all tags. A file is
    rewritten beside itself and renamed, and left alone when there is nothing to take out.
    """
    for path in sorted(folder.glob("events.out.tfevents.*")):
        kept, removed = [], 0
        for event in LegacyEventFileLoader(str(path)).Load():
            points = event.summary.value
            for i in reversed(range(len(points))):
                if event.step > (step_x if points[i].tag.startswith(STEP_TAGS) else epoch):
                    del points[i]
                    removed += 1
            if points or not event.HasField("summary"):
                kept.append(event)
        if removed:
            save_atomically(partial(_write, kept), path)


def _write(events: list[Event], file: Any) -> None:
    writer = RecordWriter(file)
    for event in events:
        writer.write(event.SerializeToString())
