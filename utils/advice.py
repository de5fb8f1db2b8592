"""Advice in the log: the first epoch's bottleneck, a risky global batch, slow float16 on a CPU."""

import logging
import math
from pathlib import Path

import torch

from utils.data import layouts, region_decode
from utils.model import optim
from utils.monitor import PARTS, StepTimes
from utils.session import Session
from utils.start import errors
from utils.start.cores import usable_cores
from utils.start.option_types import Options

# Log a note if data loading or exposed communication takes more than this share of the time.
LIMIT = 0.1
MIN_STEPS, MIN_SECONDS = 50, 20.0
BUSY = 95.0  # per cent; a GPU that is less busy could do more work
SGD_HOLDS_TO = 8192  # the largest global batch at which SGD kept its accuracy in Goyal et al. 2017
REFERENCE_LR = 0.1  # for a global batch of optim.REFERENCE_BATCH, from the same paper
WARMUP = 5  # epochs, from the same paper
PLAIN_LR = 0.01  # with which AlexNet (2012), VGG (arXiv:1409.1556) were trained
FEW_STEPS = 50  # of a whole training: RESULTS.md, "Few images"
SMALL_BATCH = 16
LARGE_FILE = 50_000  # bytes; ImageNet's files average 110,000, or 27,000 when shrunk to 256 pixels

log = logging.getLogger(__name__)


def batch_warnings(args: Options, global_batch: int, lr: float) -> list[str]:
    """Warnings about a global batch at which SGD may lose accuracy.

    ``lr`` is the scaled learning rate after warm-up.
    """
    warnings = []
    if global_batch > SGD_HOLDS_TO and args.optimizer in ("sgd", "nesterov"):
        linear = REFERENCE_LR * global_batch / optim.REFERENCE_BATCH
        warnings.append(
            f"{args.optimizer} is known to keep its accuracy up to a global batch of "
            f"{SGD_HOLDS_TO} (ResNet-50: Goyal et al. 2017, arXiv:1706.02677); this is "
            f"{global_batch}, with lr {lr:.3g} (linear rule: {linear:.3g}) and "
            f"{args.warmup_epochs:g} epochs of warm-up: expect less accuracy"
            + (", and use --warmup-epochs 5 or more" if args.warmup_epochs < WARMUP else "")
        )
    return warnings


def rate_warnings(args: Options, model: torch.nn.Module, global_batch: int, lr: float) -> list[str]:
    """Warnings about a learning rate with which a ``model`` without normalisation diverges.

    AlexNet and VGG are such models. ``lr`` is the scaled learning rate after warm-up.
    """
    highest = 3 * PLAIN_LR * max(1.0, global_batch / optim.REFERENCE_BATCH)
    if args.optimizer not in ("sgd", "nesterov") or lr <= highest:
        return []
    if any("norm" in type(layer).__name__.lower() for layer in model.modules()):
        return []
    return [
        f"{args.arch} has no normalisation layers, and such models seldom learn anything with lr "
        f"{lr:.3g}: use --lr {PLAIN_LR:g}"
    ]


def step_warnings(args: Options, global_batch: int, steps: int) -> list[str]:
    """Warnings about a training that ends after a few steps of a large batch.

    ``steps`` are those of an epoch.
    """
    if (total := steps * args.epochs) >= FEW_STEPS or global_batch <= SMALL_BATCH:
        return []
    text = f"only {total} step{'s' * (total > 1)} in all, in which a model learns little"
    return [f"{text}: use a smaller batch (-b), or more --epochs"]


def is_enough(measured: StepTimes) -> bool:
    """Whether so many steps and seconds were measured that they tell about the training, and not
    about the start of the workers."""
    seconds = sum(measured.seconds.get(part, 0.0) for part in PARTS)
    return measured.steps >= MIN_STEPS and seconds >= MIN_SECONDS


def bottleneck(session: Session, record: dict[str, float]) -> None:
    """Log whether input or short kernels limited the first epoch, and suggest remedies.

    `utils.slowdown` does so for several processes.
    """
    waiting, parts = record.get("IO/wait_share", 0.0), [record.get(f"Time/{x}", 0.0) for x in PARTS]
    communication = parts[-1] / (sum(parts) or 1.0)
    if waiting > LIMIT:
        log.info(f"note: {waiting:.0%} of the time was spent waiting for images")
        log.info(f"what helps: {'; '.join(_faster_input(session))}")
    busy = record.get("busy", math.inf)
    if busy < BUSY and max(waiting, communication) <= LIMIT:
        log.info(
            f"note: a GPU is {busy:.0f} % busy (median), not {BUSY:.0f} % or more: kernels are too "
            "short for the host that starts them: a larger -b makes them longer"
        )


def _faster_input(session: Session) -> list[str]:
    """Suggestions for a run that waits for images."""
    reading, source = session.train.reading, session.train.bad.source
    data = Path(session.args.data)
    cores = usable_cores()
    read_share = reading.read_seconds / max(reading.seconds, 1e-9)
    is_jpeg = source.path(0).lower().endswith((".jpg", ".jpeg"))
    advice = []
    if read_share > 0.5:
        mean = reading.bytes / max(reading.files, 1)
        advice.append(
            f"the workers spent {read_share:.0%} of their time reading files: a faster disk (local "
            f"NVMe), or memory that holds the {len(source) * mean / 2**30:.3g} GiB of the data set"
        )
        if source.stored(0)[2] is None:  # one file per image
            advice.append(
                "few large files, which need fewer round trips: "
                f"{_copy('shards', data, 'shards')}, then train on that"
            )
    elif is_jpeg and not region_decode.has_library():
        command = errors.command("build_region_decode.py")
        advice.append(f"faster decoding, on each node: {command}")
    if session.args.workers < cores:
        advice.append(f"more workers: -j {cores} on this node")
    if reading.bytes > LARGE_FILE * reading.files:
        advice.append(f"smaller files: {_copy('shrink', data, 'small')}, then train on that")
    return advice or ["a machine with more cores for each GPU"]


def _copy(action: str, data: Path, ending: str) -> str:
    """The command that makes another copy of ``data``, beside it."""
    return errors.command("prepare_data.py", action, data, layouts.beside(data, ending))
