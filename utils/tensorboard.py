"""Parts of a run's TensorBoard files that SummaryWriter does not handle.

The HParams entry and a layout of charts stand in the run's own event file:
SummaryWriter.add_hparams would make a second run, in a folder below, without the curves.
scripts/compare_runs.py reads a run's options from the entry, too. And points that a resumed run
will write again are cut off.
"""

import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from utils.atomic import save_atomically

# The columns of the HParams page, which has room for few; the entry itself has all options.
COLUMNS = {
    **dict.fromkeys(("arch", "mode", "precision", "comm"), ""),
    **dict.fromkeys(
        ("nodes", "gpus", "batch_per_gpu", "global_batch", "lr", "epochs", "image_size"), 0.0
    ),
}
METRICS = ("Top1/val", "Top5/val", "Loss/val", "Throughput/train", "Time/train", "IO/wait_share")
# The charts of the custom scalars page, each with its tags; it shows all runs that are ticked.
_CHARTS = {
    "Accuracy": {
        "top-1 of validation, %": "Top1/val$ Top1/ema$",
        "top-1 of training, %": "Top1/train$",
        "top-5 of validation, %": "Top5/val$",
        "top-5 of training, %": "Top5/train$",
        "loss of validation": "Loss/val$",
        "loss of training": "Loss/train$",
        "learning rate": "Lr$",
    },
    "Speed": {
        "images/s, all processes": "Throughput/train$",
        "time per step, s": "Time/train$ Time/data$ Time/compute$ Time/communication$",
        "share of the time waiting for data": "IO/wait_share$",
        "reading, MB/s": "IO/read_mb_s$",
    },
    "Hardware": {
        "GPU utilisation, %": "GPU/utilisation",
        "GPU memory, GiB": "GPU/memory",
        "CPU utilisation, %": "CPU/utilisation",
        "tensors, MiB": "Memory/",
    },
}
LAYOUT = {
    page: {title: ["Multiline", [f"^{tag}" for tag in tags.split()]] for title, tags in of.items()}
    for page, of in _CHARTS.items()
}
_show_fault = threading.excepthook
STEP_TAGS = "Step/"  # tags with x = 1000 x epoch; all others have x = epochs finished
TEST_TAGS = "/test"  # the ends of the tags that are written once, when a run ends


def open_writer(folder: Path) -> SummaryWriter:
    """A writer of an event file in ``folder``. Raises: OSError, as its methods do.

    Its thread ends with the first fault of the disk, which the next method raises again. That the
    thread also prints a traceback is prevented here.
    """
    threading.excepthook = _show_other_faults
    return SummaryWriter(str(folder))


def _show_other_faults(fault: threading.ExceptHookArgs) -> None:
    of_writer = type(fault.thread).__module__.startswith("tensorboard.")
    if not (of_writer and issubclass(fault.exc_type, OSError)):
        _show_fault(fault)


def entry(options: Mapping[str, Any]) -> list[Summary]:
    """The summaries that open a run's HParams entry: which columns there are, and its values."""
    return [hparams(COLUMNS, dict.fromkeys(METRICS))[0], hparams(dict(options), {})[1]]


def closing(success: bool) -> Summary:
    """The summary that closes an entry. A run without it is still running, or was killed."""
    end = hparams({}, {})[2]
    if not success:
        data = end.value[0].metadata.plugin_data
        content = HParamsPluginData.FromString(data.content)
        content.session_end_info.status = STATUS_FAILURE
        data.content = content.SerializeToString()
    return end


def cut_off(folder: Path, epoch: int, step_x: int) -> None:
    """Remove the points after ``epoch`` (``Step/`` curves: after ``step_x``) from event files,
    and those of DATA/test at ``epoch``, too.

    A run that was killed after its last snapshot has written points that the resumed run writes
    again. SummaryWriter's ``purge_step`` cannot help: it is one number for all tags. A file is
    rewritten beside itself and renamed, and left alone when there is nothing to take out.
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
            save_atomically(partial(_write, kept), path)


def _write(events: list[Event], file: Any) -> None:
    writer = RecordWriter(file)
    for event in events:
        writer.write(event.SerializeToString())
