"""Data for comparing runs: TensorBoard's pages "custom scalars" and HParams. Always on.

Interface: summaries for the beginning and the end of an event file; scripts/compare_runs.py reads
them, too. Without this file, event files contain only curves, and no charts, options or versions.
"""

import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.tensorboard.summary import custom_scalars, hparams

from utils import amp, provenance, report
from utils.session import Session

ROOT = Path(__file__).resolve().parents[2]
# All tags, grouped by page and chart of TensorBoard's custom scalars. A chart's title explains its
# tags. A tag that ends in _rank exists once per process: _rank0, _rank1, ...
CHARTS = {
    "Accuracy": {
        "validation: top-1, % (ema: the averaged weights)": "Top1/val Top1/ema",
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
        # Communication is the part not overlapped by compute; it includes waiting for slower
        # processes. FSDP's communication counts as compute.
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
# The HParams page has space for few columns; each run's entry there lists all options.
COLUMNS = {
    **dict.fromkeys(("arch", "mode", "precision", "comm"), ""),
    **dict.fromkeys(
        ("nodes", "gpus", "batch_per_gpu", "global_batch", "lr", "epochs", "image_size"), 0.0
    ),
}
METRICS = ("Top1/val", "Top5/val", "Loss/val", "Throughput/train", "Time/train", "IO/wait_share")


LAYOUT = {
    page: {
        title: [
            "Multiline",
            [f"^{tag}" + "$" * (not tag.endswith("_rank")) for tag in tags.split()],
        ]
        for title, tags in charts.items()
    }
    for page, charts in CHARTS.items()
}


# ---- an event file


def opening(options: Mapping[str, Any]) -> list[Summary]:
    """Return an event file's first summaries: the charts, and HParams' columns and values.

    scripts/compare_runs.py reads a run's options from the last one.
    """
    columns, values = hparams(COLUMNS, dict.fromkeys(METRICS))[0], hparams(dict(options), {})[1]
    return [custom_scalars(LAYOUT), columns, values]


def closing(success: bool) -> list[Summary]:
    """Return an event file's last summary. A file without it belongs to a running or killed job."""
    end = hparams({}, {})[2]
    if not success:
        data = end.value[0].metadata.plugin_data
        content = HParamsPluginData.FromString(data.content)
        content.session_end_info.status = STATUS_FAILURE
        data.content = content.SerializeToString()
    return [end]


# ---- facts about a run


def facts(session: Session) -> dict[str, Any]:
    """Return sizes, data and machine, which the event file and summary.json add to the options.

    On a CPU, ``gpus`` is the number of processes.
    """
    args, world, sampler = session.args, session.world, session.train.sampler
    is_gpu_dp = world.device.type == "cuda" and session.run.mode == "dp"
    gpus = torch.cuda.device_count() if is_gpu_dp else world.size
    return report.setting(session) | {
        "gpus": gpus,
        "precision": getattr(args, "opt_level", None) or amp.NAMES[session.loaders.dtype],
        "batch_per_gpu": session.global_batch / gpus,
        "train_sizes": args.progressive or str(session.state.preprocessing["image_size"]),
        "steps_per_epoch": sampler.steps_per_epoch,
        "train_images": sampler.images,
        "val_images": session.loaders.val.sampler.images,
        "class_count": len(session.loaders.classes),
        "data_id": session.train.bad.source.fingerprint(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        **describe(world.device),
    }


def describe(device: torch.device) -> dict[str, str]:
    """Return the names and versions of CPU, torch, commit and, if used, GPU and driver."""
    model = re.search(r"^model name\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    facts = {"cpu": model[1].strip() if model else "", "torch": torch.__version__}
    facts["commit"] = commit()
    if device.type == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(device), "driver": provenance.driver()}
    return {key: text for key, text in facts.items() if text}


def commit() -> str:
    """Return the commit of this code, with "+" if files have changed since; empty if unknown."""
    if not (ROOT / ".git").exists():  # avoid reporting the commit of an enclosing repository
        return ""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
