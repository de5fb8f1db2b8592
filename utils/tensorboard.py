"""A run's TensorBoard files, as far as SummaryWriter does not care for them.

What TensorBoard shows of a run without a click, the HParams entry and a layout of charts, are
summaries in the run's own event file: SummaryWriter.add_hparams would make a run of its own, in a
folder below, without the curves. scripts/compare_runs.py reads a run's options from the entry, too.
And points that a resumed run will write again are cut off.
"""

import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import (
    DATA_TYPE_FLOAT64,
    DATA_TYPE_STRING,
    STATUS_FAILURE,
    STATUS_SUCCESS,
    Experiment,
    HParamInfo,
    MetricInfo,
    MetricName,
)
from tensorboard.plugins.hparams.plugin_data_pb2 import (
    HParamsPluginData,
    SessionEndInfo,
    SessionStartInfo,
)
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter

from utils.atomic import save_atomically

Value = int | float | str | bool | None

# The columns of the HParams page, which has room for few; the entry itself has all options.
NUMBERS = ("nodes", "gpus", "batch_per_gpu", "global_batch", "lr", "epochs", "image_size")
TEXTS = ("arch", "mode", "precision", "comm")
METRICS = {
    "Top1/val": "top-1, %",
    "Top5/val": "top-5, %",
    "Loss/val": "loss",
    "Throughput/train": "images/s",
    "Time/train": "s per step",
    "IO/wait_share": "waiting for data",
}
# Tags are regular expressions to the custom scalars page; a chart shows all runs that are ticked.
LAYOUT = {
    "Accuracy": {
        "top-1 of validation, %": ["Multiline", ["^Top1/val$", "^Top1/ema$"]],
        "top-1 of training, %": ["Multiline", ["^Top1/train$"]],
        "top-5 of validation, %": ["Multiline", ["^Top5/val$"]],
        "top-5 of training, %": ["Multiline", ["^Top5/train$"]],
        "loss of validation": ["Multiline", ["^Loss/val$"]],
        "loss of training": ["Multiline", ["^Loss/train$"]],
        "learning rate": ["Multiline", ["^Lr$"]],
    },
    "Speed": {
        "images/s, all processes": ["Multiline", ["^Throughput/train$"]],
        "time per step, s": [
            "Multiline",
            ["^Time/train$", "^Time/data$", "^Time/compute$", "^Time/communication$"],
        ],
        "share of the time waiting for data": ["Multiline", ["^IO/wait_share$"]],
        "reading, MB/s": ["Multiline", ["^IO/read_mb_s$"]],
    },
    "Hardware": {
        "GPU utilisation, %": ["Multiline", ["^GPU/utilisation"]],
        "GPU memory, GiB": ["Multiline", ["^GPU/memory"]],
        "CPU utilisation, %": ["Multiline", ["^CPU/utilisation"]],
        "tensors, MiB": ["Multiline", ["^Memory/"]],
    },
}
_show_fault = threading.excepthook
STEP_TAGS = "Step/"  # tags with x = 1000 x epoch; all others have x = epochs finished
TEST_TAGS = "/test"  # the ends of the tags that are written once, when a run ends


def open_writer(folder: Path) -> SummaryWriter:
    """A writer of an event file in ``folder``. Raises: OSError, as its methods do.

    Its thread, which ends with the first fault of the disk, hands that over to whoever calls the
    next method, and then lets it go: without this, a traceback would stand beside our sentence.
    """
    threading.excepthook = _show_other_faults
    return SummaryWriter(str(folder))


def _show_other_faults(fault: threading.ExceptHookArgs) -> None:
    of_writer = type(fault.thread).__module__.startswith("tensorboard.")
    if not (of_writer and issubclass(fault.exc_type, OSError)):
        _show_fault(fault)


def entry(options: Mapping[str, Value], group: str) -> list[Summary]:
    """The summaries that open a run's HParams entry: which columns there are, and its values.

    ``group`` names the run; its sessions, before and after a resume, are one line of the page
    (which shows the options of the first).
    """
    experiment = Experiment(
        hparam_infos=[HParamInfo(name=name, type=DATA_TYPE_STRING) for name in TEXTS]
        + [HParamInfo(name=name, type=DATA_TYPE_FLOAT64) for name in NUMBERS],
        metric_infos=[
            MetricInfo(name=MetricName(tag=tag), display_name=name) for tag, name in METRICS.items()
        ],
    )
    start = SessionStartInfo(group_name=group, start_time_secs=time.time())
    for name, value in options.items():
        if isinstance(value, bool):
            start.hparams[name].bool_value = value
        elif isinstance(value, str):
            start.hparams[name].string_value = value
        elif value is not None:
            start.hparams[name].number_value = value
    return [
        _summary(metadata.EXPERIMENT_TAG, HParamsPluginData(experiment=experiment)),
        _summary(metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=start)),
    ]


def closing(success: bool) -> Summary:
    """The summary that closes an entry. A run without it is still running, or was killed."""
    status = STATUS_SUCCESS if success else STATUS_FAILURE
    end = SessionEndInfo(status=status, end_time_secs=time.time())
    return _summary(metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=end))


def _summary(tag: str, content: HParamsPluginData) -> Summary:
    content.version = metadata.PLUGIN_DATA_VERSION
    data = SummaryMetadata.PluginData(
        plugin_name=metadata.PLUGIN_NAME, content=content.SerializeToString()
    )
    return Summary(value=[Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=data))])


def cut_off(folder: Path, epoch: int, step_x: int) -> None:
    """Take the points after ``epoch`` (``Step/`` curves: after ``step_x``) out of event files,
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
