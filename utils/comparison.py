"""Data for comparing runs: TensorBoard's pages "custom scalars" and HParams.

Interface: summaries for the beginning and the end of an event file; scripts/compare_runs.py reads
them, too.
"""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.tensorboard.summary import custom_scalars, hparams, text

from utils.start import nvidia
from utils.start.errors import printable

ROOT = Path(__file__).resolve().parents[1]
NO_CODE = ("*.md", "figures")  # tracked files that no run depends on
# All tags, grouped by page and chart of TensorBoard's custom scalars. A chart's title explains its
# tags. Tags of the page "Hardware" are followed by _min, _mean and _max over the processes.
CHARTS = {
    "Accuracy": {
        "validation: top-1, % (ema: the averaged weights)": "Top1/val Top1/ema",
        "validation: top-5, %": "Top5/val Top5/ema",
        "validation: loss": "Loss/val Loss/ema",
        "of the best model so far: top-1, top-5, %": "Best/Top1 Best/Top5",
        "of the best model so far: loss": "Best/Loss",
        "training: top-1, %": "Top1/train",
        "training: top-5, %": "Top5/train",
        "training: loss": "Loss/train",
        "the best model on DATA/test, at the end": "Loss/test Top1/test Top5/test",
        "learning rate": "Lr",
        "loss scale": "Amp/scale",
        "steps skipped since the run began": "Amp/skipped",
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
        # Unreadable files have no chart of their own, because most runs have none.
        "reading, files/s (and the number of unreadable files)": "IO/files_s IO/bad_files",
    },
    "Steps": {  # since the last printed line
        "loss": "Step/loss",
        "images/s, all processes": "Step/throughput",
        "seconds per step of rank 0": "Step/data_s Step/compute_s Step/communication_s",
    },
    "Hardware": {  # the last page, because it has the most curves
        "GPU utilisation, %": "GPU/utilisation",
        "GPU memory, GiB": "GPU/memory_gb",
        "GPU power, W": "GPU/power_w",
        "GPU temperature, C": "GPU/temperature_c",
        "CPU utilisation, % of the cores that the process may use": "CPU/utilisation",
        "memory of the process, GiB": "CPU/memory_gb",
        "tensors, MiB": (
            "Memory/parameters_mb Memory/gradients_mb Memory/optimizer_mb Memory/activations_mb"
        ),
    },
}
# The HParams page has space for few columns: at first, it shows the first five in alphabetic order.
# The page "Text" has all options.
COLUMNS = {
    **dict.fromkeys(("arch", "mode", "precision"), ""),
    **dict.fromkeys(("epochs", "global_batch", "gpus", "lr", "nodes"), 0.0),
}
MADE = ("command", "commit", "date", "gpu", "driver", "cpu", "torch", "data_id")
# The best model's figures, not the last epoch's.
METRICS = ("Best/Top1", "Best/Top5", "Best/Loss", "Throughput/train", "Time/train", "IO/wait_share")


OVER_PROCESSES = "(_min|_mean|_max)?"  # of one process: without
LAYOUT = {
    page: {
        title: [
            "Multiline",
            [f"^{tag}{OVER_PROCESSES if page == 'Hardware' else ''}$" for tag in tags.split()],
        ]
        for title, tags in charts.items()
    }
    for page, charts in CHARTS.items()
}


# ---- an event file


def opening(options: Mapping[str, Any]) -> list[Summary]:
    """Return an event file's first summaries: the charts, and HParams' columns and values.

    scripts/compare_runs.py reads a run's options from the last one. Paths that are not UTF-8 are
    written with escapes.
    """
    options = {k: printable(v) if isinstance(v, str) else v for k, v in options.items()}
    columns, values = hparams(COLUMNS, dict.fromkeys(METRICS))[0], hparams(options, {})[1]
    return [custom_scalars(layout(options)), columns, values, text("run", _page(options))]


def layout(options: Mapping[str, Any]) -> dict[str, dict[str, list[Any]]]:
    """Return the pages of charts without those that this run leaves empty."""
    absent = set()
    if options.get("device") == "cpu":
        absent |= {"GPU utilisation, %", "GPU memory, GiB", "GPU power, W", "GPU temperature, C"}
    if options.get("precision") in ("off", "bf16"):
        absent |= {"loss scale", "steps skipped since the run began"}
    if "val_images" in options and "test_images" not in options:
        absent.add("the best model on DATA/test, at the end")
    if "progressive" in options and not options["progressive"]:
        absent.add("size of training images, with --progressive")
    return {
        page: {title: chart for title, chart in charts.items() if title not in absent}
        for page, charts in LAYOUT.items()
    }


def _page(options: Mapping[str, Any]) -> str:
    """Return TensorBoard's text page of a run in Markdown: how it was made, then all options."""
    made = [f"**{key}**: `{options[key]}`" for key in MADE if options.get(key)]
    rows = [f"| {key} | `{value}` |" for key, value in sorted(options.items()) if value is not None]
    return "\n\n".join([*made, "\n".join(["| option | value |", "|---|---|", *rows])])


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


def describe(device: torch.device) -> dict[str, str]:
    """Return the names and versions of CPU, torch, commit and, if used, GPU and driver."""
    model = re.search(r"^model name\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    facts = {"cpu": model[1].strip() if model else "", "torch": torch.__version__}
    facts["commit"] = commit()
    if device.type == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(device), "driver": nvidia.driver()}
    return {key: text for key, text in facts.items() if text}


def commit() -> str:
    """Return the commit of this code, with "+" if code has changed since; empty if unknown.

    Documents and pictures are no code: `compare_runs.py --results` edits some of them.
    """
    if not (ROOT / ".git").exists():  # avoid reporting the commit of an enclosing repository
        return ""

    def git(*words: str) -> "subprocess.CompletedProcess[str]":
        line = ["git", "-C", str(ROOT), *words]
        return subprocess.run(line, capture_output=True, text=True, timeout=10, check=False)

    try:
        name = git("describe", "--always", "--exclude=*")
        changed = git("diff", "--quiet", "HEAD", "--", ".", *(f":!{x}" for x in NO_CODE))
    except (OSError, subprocess.SubprocessError):
        return ""
    return name.stdout.strip() + "+" * (changed.returncode == 1) if not name.returncode else ""
