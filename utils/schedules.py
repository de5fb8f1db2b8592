"""Learning rate as a pure function of progress, and its scaling with the global batch."""

import math

REFERENCE_BATCH = 256  # the global batch that published ImageNet learning rates are meant for
STEP_EPOCHS = 30
LAST_STEP_EPOCH = 80


def scale_lr(lr: float, global_batch: int, rule: str) -> float:
    """Scale a learning rate given for 256 images per step to ``global_batch`` images.

    ``rule``: "none"; "linear", Goyal et al. 2017 (arXiv:1706.02677); "sqrt", Krizhevsky 2014
    (arXiv:1404.5997).
    """
    ratio = global_batch / REFERENCE_BATCH
    return lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def learning_rate(
    position: float, *, lr: float, epochs: int, warmup: float = 0.0, schedule: str = "step"
) -> float:
    """Learning rate at ``position``, in epochs since the start (1.5: in the middle of the second).

    During the first ``warmup`` epochs it grows linearly from 0 to what the schedule gives.
    "step": x0.1 every 30 epochs and once more at epoch 80. "cosine": half a cosine from the end of
    warm-up to 0 at ``epochs`` (Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts).
    """
    if schedule == "step":
        decays = int(position // STEP_EPOCHS) + (position >= LAST_STEP_EPOCH)
        planned = lr * 0.1**decays
    elif schedule == "cosine":
        done = min(1.0, max(0.0, position - warmup) / max(epochs - warmup, 1e-9))
        planned = lr * 0.5 * (1.0 + math.cos(math.pi * done))
    else:
        raise ValueError(f"unknown schedule {schedule!r}")
    return planned * min(1.0, position / warmup) if warmup > 0 else planned
