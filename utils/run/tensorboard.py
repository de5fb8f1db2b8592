"""The event file of a run, and the points that a resumed run removes from earlier ones.

TensorBoard's SummaryWriter writes in a thread that ends at the first disk error, and puts the
options into a second run in a subfolder. Here, when a function returns, its events are in the file
or the file is unchanged.
"""

import contextlib
import io
import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from PIL import Image
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from utils.run.sinks import Sink
from utils.start.atomic import save_atomically

log = logging.getLogger(__name__)

STEP_TAGS = ("Step/", "Images/")  # x = 1000 x epoch; all other tags have x = epochs finished
TEST_TAGS = "/test"  # ending of tags that are written once, when a run ends


class EventFile(Sink):
    """A new event file in ``folder``, in rank 0."""

    def __init__(self, folder: Path, summaries: Iterable[Summary] = ()):
        """Begin with ``summaries`` about the run."""
        # TensorBoard reads a run's files in the order of their names. A clock that was set back
        # must not put this file before older ones: curves would run backward.
        stamps = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
        last = max((int(stamp) for stamp in stamps if stamp.isdecimal()), default=0)
        # Points are as far apart as in training, also if the clock is set, or the machine sleeps.
        self.boot = time.time() - time.monotonic()
        second = max(int(time.time()), last + 1)
        name = f"events.out.tfevents.{second}.{socket.gethostname()}.{os.getpid()}.0"
        self.path, self.has_gap = folder / name, False
        header = Event(file_version="brain.Event:2", wall_time=self.boot + time.monotonic())
        self._append([header, *self._events(summaries)])

    def scalars(self, tags: Mapping[str, float], x: int) -> None:
        """Add a point at ``x`` for each tag."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in tags.items()]
        self.add([Summary(value=values)], x)

    def image(self, tag: str, image: Image.Image, x: int) -> None:
        """Add a picture at ``x``."""
        buffer = io.BytesIO()
        image.save(buffer, "PNG", compress_level=1)  # ten times as fast as the default
        size = {"width": image.width, "height": image.height}
        png = Summary.Image(**size, colorspace=3, encoded_image_string=buffer.getvalue())
        self.add([Summary(value=[Summary.Value(tag=tag, image=png)])], x)

    def add(self, summaries: Iterable[Summary], x: int = 0) -> None:
        """Add summaries at ``x``."""
        self._append(self._events(summaries, x))

    def _events(self, summaries: Iterable[Summary], x: int = 0) -> list[Event]:
        now = self.boot + time.monotonic()
        return [Event(wall_time=now, step=x, summary=one) for one in summaries]

    def _append(self, events: list[Event]) -> None:
        """Append ``events``. A disk error leaves a gap in the curves, and is reported once."""
        size = None
        try:
            with open(self.path, "ab") as file:
                size = file.tell()
                file.write(_records(events))
            self.has_gap = False
        except OSError as error:
            if size is not None:  # else it could not be opened, and is as it was
                with contextlib.suppress(OSError):
                    os.truncate(self.path, size)  # readers stop at an incomplete event
            if not self.has_gap:
                log.warning(
                    f"cannot write the event file ({error.strerror}): training continues, and "
                    "its curves have a gap"
                )
            self.has_gap = True


def cut_off(folder: Path, epoch: int, step_x: int) -> None:
    """Remove the points after ``epoch`` (`STEP_TAGS`: after ``step_x``) from event files, and those
    of DATA/test at ``epoch``: the resumed run writes them again. Raises: OSError."""
    for path in sorted(folder.glob("events.out.tfevents.*")):
        kept, removed = [], 0
        with open(path, "rb") as file:  # TensorBoard opens no path that is not UTF-8
            events = [*LegacyEventFileLoader(f"/proc/self/fd/{file.fileno()}").Load()]
        for event in events:
            points = event.summary.value
            for i in reversed(range(len(points))):
                tag = points[i].tag
                last = step_x if tag.startswith(STEP_TAGS) else epoch - tag.endswith(TEST_TAGS)
                if event.step > last:
                    del points[i]
                    removed += 1
            if points or not event.HasField("summary"):
                kept.append(event)
        if removed:
            save_atomically(lambda file, kept=kept: file.write(_records(kept)), path)


def _records(events: Iterable[Event]) -> bytes:
    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for event in events:
        writer.write(event.SerializeToString())
    return buffer.getvalue()
