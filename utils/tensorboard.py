"""The event file of a run: its curves, its options, the charts that TensorBoard shows.

TensorBoard's SummaryWriter writes in a thread, which ends with the first fault of the disk, and
would make a second run, in a folder below, of the options. Here an event is in the file when a
function returns, or the file is as it was.
"""

import contextlib
import io
import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import custom_scalars, hparams

from utils.atomic import save_atomically

log = logging.getLogger(__name__)

# All tags, by page and chart of TensorBoard's custom scalars; the title says what they mean. Of a
# tag that ends in _rank there is one for each process: _rank0, _rank1, ...
CHARTS = {
    "Accuracy": {
        "validation: top-1, % (ema: of the averaged weights)": "Top1/val Top1/ema",
        "validation: top-5, %": "Top5/val Top5/ema",
        "validation: loss": "Loss/val Loss/ema",
        "training: top-1, %": "Top1/train",
        "training: top-5, %": "Top5/train",
        "training: loss": "Loss/train",
        "the best model on DATA/test, at the end": "Loss/test Top1/test Top5/test",
        "learning rate": "Lr",
        "size of training images, with --progressive": "Size/train",
    },
    "Speed": {
        "images/s, all processes": "Throughput/train Throughput/val",
        # Communication: what compute does not hide, waiting for slower processes included. FSDP's
        # is part of compute.
        "seconds per step, and its parts (means over all processes)": (
            "Time/train Time/val Time/data Time/compute Time/communication"
        ),
        "share of the time that training waits for data": "IO/wait_share",
        "reading, MB/s": "IO/read_mb_s",
        "reading, files/s": "IO/files_s",
        "unreadable files": "IO/bad_files",
    },
    "Steps": {  # since the last printed line
        "loss": "Step/loss",
        "images/s, all processes": "Step/throughput",
        "seconds per step of rank 0": "Step/data_s Step/compute_s Step/communication_s",
    },
    "Hardware": {
        "GPU utilisation, %": "GPU/utilisation_rank",
        "GPU memory, GiB": "GPU/memory_gb_rank",
        "GPU power, W": "GPU/power_w_rank",
        "GPU temperature, C": "GPU/temperature_c_rank",
        "CPU utilisation, % of the cores that the process may use": "CPU/utilisation_rank",
        "memory of the process, GiB": "CPU/memory_gb_rank",
        "tensors, MiB": (
            "Memory/parameters_mb_rank Memory/gradients_mb_rank Memory/optimizer_mb_rank "
            "Memory/activations_mb_rank"
        ),
        "loss scale": "Amp/scale",
        "steps skipped since the run began": "Amp/skipped",
    },
}
STEP_TAGS = "Step/"  # tags with x = 1000 x epoch; all others have x = epochs finished
TEST_TAGS = "/test"  # the ends of the tags that are written once, when a run ends
# The columns of the HParams page, which has room for few; the entry itself has all options.
COLUMNS = {
    **dict.fromkeys(("arch", "mode", "precision", "comm"), ""),
    **dict.fromkeys(
        ("nodes", "gpus", "batch_per_gpu", "global_batch", "lr", "epochs", "image_size"), 0.0
    ),
}
METRICS = ("Top1/val", "Top5/val", "Loss/val", "Throughput/train", "Time/train", "IO/wait_share")


def _patterns(tags: str) -> list[str]:
    return [f"^{tag}" if tag.endswith("_rank") else f"^{tag}$" for tag in tags.split()]


LAYOUT = {
    page: {title: ["Multiline", _patterns(tags)] for title, tags in charts.items()}
    for page, charts in CHARTS.items()
}


class EventFile:
    """A new event file in ``folder``. For rank 0; `write` is one of `Run.curves`."""

    def __init__(self, folder: Path, facts: Mapping[str, Any]):
        """Write the ``facts`` about the run (HParams) and the charts. Raises: OSError."""
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.0"
        self.path, self.has_gap = folder / name, False
        header = Event(file_version="brain.Event:2", wall_time=time.time())
        self._append([header, *_events([custom_scalars(LAYOUT), *entry(facts)])])

    def write(self, tags: Mapping[str, float], x: int) -> None:
        """Add a point at ``x`` for each tag. What the disk refuses is a gap, reported once."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in tags.items()]
        try:
            self._append(_events([Summary(value=values)], x))
            self.has_gap = False
        except OSError as fault:
            if not self.has_gap:
                log.warning(
                    f"cannot write the event file ({fault.strerror}): training continues, and "
                    "its curves have a gap"
                )
            self.has_gap = True

    def close(self, success: bool) -> None:
        """Note that the run has ended. Without it, it is still running, or was killed."""
        end = hparams({}, {})[2]
        if not success:
            data = end.value[0].metadata.plugin_data
            content = HParamsPluginData.FromString(data.content)
            content.session_end_info.status = STATUS_FAILURE
            data.content = content.SerializeToString()
        self._append(_events([end]))

    def _append(self, events: list[Event]) -> None:
        """Raises: OSError; the file is then as it was, as readers stop at half an event."""
        size = 0
        try:
            with open(self.path, "ab") as file:
                size = file.tell()
                file.write(_records(events))
        except OSError:
            with contextlib.suppress(OSError):
                if size:
                    os.truncate(self.path, size)
                else:
                    self.path.unlink()  # it was made here, and is empty
            raise


def _events(summaries: Iterable[Summary], x: int = 0) -> list[Event]:
    return [Event(wall_time=time.time(), step=x, summary=one) for one in summaries]


def entry(options: Mapping[str, Any]) -> list[Summary]:
    """The summaries that open a run's HParams entry: which columns there are, and its values.

    scripts/compare_runs.py reads a run's options from it.
    """
    return [hparams(COLUMNS, dict.fromkeys(METRICS))[0], hparams(dict(options), {})[1]]


def cut_off(folder: Path, epoch: int, step_x: int) -> None:
    """Remove the points after ``epoch`` (``Step/`` curves: after ``step_x``) from event files,
    and those of DATA/test at ``epoch``, too.

    A run that was killed after its last snapshot has written points that the resumed run writes
    again. A file is rewritten beside itself and renamed, and left alone when there is nothing to
    take out.
    """
    for path in sorted(folder.glob("events.out.tfevents.*")):
        kept, removed = [], 0
        for event in LegacyEventFileLoader(str(path)).Load():
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
