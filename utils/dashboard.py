"""What TensorBoard shows of a run without a click: the HParams entry and a layout of charts.

Both are summaries in the run's own event file: SummaryWriter.add_hparams would make a run of its
own, in a folder below, without the curves. scripts/compare_runs.py, too, reads a run's options from
the entry.
"""

import time
from collections.abc import Mapping

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

Value = int | float | str | bool | None

# The columns of the HParams page, which has room for few; the entry itself has all options.
NUMBERS = ("nodes", "gpus", "batch_per_gpu", "global_batch", "lr", "epochs", "image_size")
TEXTS = ("arch", "mode", "precision")
METRICS = {
    "Top1/val": "top-1, %",
    "Top5/val": "top-5, %",
    "Loss/val": "loss",
    "Throughput/train": "images/s",
    "Time/train": "s a step",
    "IO/wait_share": "waiting for data",
}
# Tags are regular expressions to the custom scalars page; a chart shows all runs that are ticked.
LAYOUT = {
    "Accuracy": {
        "top-1 of validation, %": ["Multiline", ["^Top1/val$"]],
        "top-1 of training, %": ["Multiline", ["^Top1/train$"]],
        "top-5 of validation, %": ["Multiline", ["^Top5/val$"]],
        "top-5 of training, %": ["Multiline", ["^Top5/train$"]],
        "loss of validation": ["Multiline", ["^Loss/val$"]],
        "loss of training": ["Multiline", ["^Loss/train$"]],
        "learning rate": ["Multiline", ["^Lr$"]],
    },
    "Speed": {
        "images/s, all processes": ["Multiline", ["^Throughput/train$"]],
        "time of a step, s": [
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
    },
}


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
    """The summary that closes an entry. A run without it is going on, or was killed."""
    status = STATUS_SUCCESS if success else STATUS_FAILURE
    end = SessionEndInfo(status=status, end_time_secs=time.time())
    return _summary(metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=end))


def _summary(tag: str, content: HParamsPluginData) -> Summary:
    content.version = metadata.PLUGIN_DATA_VERSION
    data = SummaryMetadata.PluginData(
        plugin_name=metadata.PLUGIN_NAME, content=content.SerializeToString()
    )
    return Summary(value=[Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=data))])
