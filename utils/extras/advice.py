"""Advice in the log: the first epoch's bottleneck, a risky global batch, slow float16 on a CPU.

Always on. Interface: functions that addons.py calls. Without this file, the log has no advice.
"""

import logging
import math
import time
from typing import Any

import torch

from utils import addons, launch, optim
from utils.report import PARTS
from utils.session import Session

# Log a note if data loading or exposed communication takes more than this share of the time.
LIMIT = 0.1
SLOW = 2.0  # warn if float16 takes this many times as long as float32
BUSY = 95.0  # per cent; a GPU that is less busy could do more work
SGD_HOLDS_TO = 8192  # the largest global batch at which SGD kept its accuracy in Goyal et al. 2017
REFERENCE_LR = 0.1  # for a global batch of optim.REFERENCE_BATCH, from the same paper
LARGE_FILE = 50_000  # bytes; ImageNet's files average 110,000, or 27,000 when shrunk to 256 pixels

log = logging.getLogger(__name__)


def batch_warnings(args: Any, global_batch: int, lr: float) -> list[str]:
    """Warnings about a global batch outside ``--batch-range``, or at which SGD may lose accuracy.

    ``lr`` is the scaled learning rate after warm-up.
    """
    warnings = []
    low, high = map(int, (args.batch_range or f"0:{global_batch}").split(":"))
    if not low <= global_batch <= high:
        rate = args.lr * global_batch / (high if global_batch > high else low)
        advice = f"; the linear scaling rule gives --lr {rate:.3g}"
        warnings.append(
            f"the options are meant for a global batch of {low} to {high} (--batch-range), and "
            f"this is {global_batch}{advice * (args.lr_scaling == 'none')}"
        )
    if global_batch > SGD_HOLDS_TO and args.optimizer in ("sgd", "nesterov"):
        linear = REFERENCE_LR * global_batch / optim.REFERENCE_BATCH
        warnings.append(
            f"{args.optimizer} is known to keep its accuracy up to a global batch of "
            f"{SGD_HOLDS_TO} (ResNet-50: Goyal et al. 2017, arXiv:1706.02677); this is "
            f"{global_batch}, with lr {lr:.3g} (linear rule: {linear:.3g}) and "
            f"{args.warmup_epochs:g} epochs of warm-up: expect less accuracy, and use "
            "--warmup-epochs 5 or more"
        )
    return warnings


def bottleneck(session: Session, record: dict[str, float]) -> None:
    """Log whether input, network or short kernels limited the first epoch, and suggest remedies."""
    waiting, parts = record.get("IO/wait_share", 0.0), [record.get(f"Time/{x}", 0.0) for x in PARTS]
    communication = parts[-1] / (sum(parts) or 1.0)
    if waiting > LIMIT:
        log.info(f"note: {waiting:.0%} of the time was spent waiting for images")
        log.info(f"what helps: {'; '.join(_faster_input(session))}")
    if communication > LIMIT:
        # fp16 halves the bytes; assume that it halves the exposed time as well.
        gain = 1 / (1 - communication / 2) - 1
        link = ", or a faster link between the nodes" * (session.world.nodes > 1)
        advice = f"a larger -b, --accum-steps{link}"
        if getattr(session.args, "comm", None) == "fp32":
            advice = f"--comm fp16 (about {gain:.0%} more images/s), {advice}"
            if session.world.nodes > 1:
                advice = f"the option that scripts/bench_network.py recommends, or {advice}"
        log.info(f"note: communication takes {communication:.0%} of each step; try {advice}")
    busy = record.get("busy", math.inf)
    if busy < BUSY and max(waiting, communication) <= LIMIT:
        log.info(
            f"note: a GPU is {busy:.0f} % busy (median), not {BUSY:.0f} % or more: kernels are too "
            "short for the host that starts them: raise -b, try --amp or --compile"
        )


def _faster_input(session: Session) -> list[str]:
    """Suggestions for a run that waits for images."""
    reading, source = session.train.reading, session.train.bad.source
    data, prepare = session.args.data.rstrip("/"), "python scripts/prepare_data.py"
    cores = launch.usable_cores()
    read_share = reading.read_seconds / max(reading.seconds, 1e-9)
    packed = source.stores_pixels
    is_jpeg = not packed and source.path(0).lower().endswith((".jpg", ".jpeg"))
    advice = []
    if slow_disk := read_share > 0.5:
        mean = reading.bytes / max(reading.files, 1)
        if packed:
            mean = source.sample_sizes()[0]
        advice.append(
            f"the workers spent {read_share:.0%} of their time reading files: a faster disk (local "
            f"NVMe), or memory that holds the {len(source) * mean / 2**30:.3g} GiB of the data set"
        )
        if source.stored(0)[2] is None:  # one file per image
            advice.append(
                f"few large files, which need fewer round trips: {prepare} shards {data} "
                f"{data}_shards, then train on that"
            )
    elif is_jpeg and addons.region_decoder() is None:
        advice.append("faster decoding, on each node: python scripts/build_region_decode.py")
    if session.args.workers < cores:
        advice.append(f"more workers: -j {cores} on this node")
    if not packed and reading.bytes > LARGE_FILE * reading.files:
        advice.append(f"smaller files: {prepare} shrink {data} {data}_small, then train on that")
    elif not packed and not slow_disk:
        advice.append(f"no decoding: {prepare} pack {data} {data}_packed, then train on that")
    return advice or ["a machine with more cores for each GPU"]


def note_slow_float16(option: str) -> None:
    """Print a warning if float16 is slow on this CPU. It recommends ``option``: float32."""

    def seconds(dtype: torch.dtype) -> float:
        images = torch.ones(8, 32, 32, 32, dtype=dtype)  # randn would change the random state
        weights = torch.ones(32, 32, 3, 3, dtype=dtype, requires_grad=True)
        times = []
        for _ in range(3):
            began = time.perf_counter()
            torch.conv2d(images, weights).sum().backward()
            times.append(time.perf_counter() - began)
        return min(times)

    base = seconds(torch.float32)
    half, brain = (seconds(dtype) / base for dtype in (torch.float16, torch.bfloat16))
    if half > SLOW:
        print(
            f"warning: float16 is slow on this CPU: a convolution takes {half:.0f} times as long "
            f"as in float32 (bfloat16: {brain:.1f} times). To train here, use {option}",
            flush=True,
        )
