"""Learning rate as a pure function of progress, and its scaling with the global batch."""

import math

REFERENCE_BATCH = 256  # the global batch that published ImageNet learning rates are meant for
STEP_EPOCHS = 30
LAST_STEP_EPOCH = 80
# One-cycle: share of the training in which the rate rises, what part of the highest rate it begins
# with, and what part of that it ends with; as in torch.optim.lr_scheduler.OneCycleLR.
RISE, FIRST, LAST = 0.3, 1 / 25, 1e-4
# The optimisers, and their --lr where none is given.
USUAL_LR = {"sgd": 0.1, "nesterov": 0.1, "adamw": 1e-3, "muon": 1e-3}
# Schedules that end with the last epoch, so that a run that is under way cannot change it.
TO_THE_END = ("cosine", "linear", "onecycle")
NAMES = ("step", "constant", *TO_THE_END)


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
    "step": x0.1 every 30 epochs and once more at epoch 80. "constant": lr in all epochs.
    "cosine": half a cosine from the end of warm-up to 0 at ``epochs`` (Loshchilov and Hutter 2017,
    arXiv:1608.03983, without restarts).
    "linear": a straight line from there to 0 (Li et al. 2020, arXiv:1905.04753; the short recipes
    of ffcv-imagenet). "onecycle": half a cosine up from lr / 25 in the first 30 % of the epochs, or
    in those of ``warmup`` instead, and half a cosine down to lr / 250,000 at ``epochs`` (Smith and
    Topin 2017, arXiv:1708.07120, in torch's form; momentum stays as it is).
    """
    if schedule == "onecycle":
        return _one_cycle(position, lr, epochs, warmup or RISE * epochs)
    done = min(1.0, max(0.0, position - warmup) / max(epochs - warmup, 1e-9))
    if schedule == "step":
        decays = int(position // STEP_EPOCHS) + (position >= LAST_STEP_EPOCH)
        planned = lr * 0.1**decays
    elif schedule == "cosine":
        planned = lr * 0.5 * (1.0 + math.cos(math.pi * done))
    elif schedule == "linear":
        planned = lr * (1.0 - done)
    elif schedule == "constant":
        planned = lr
    else:
        raise ValueError(f"there is no learning-rate schedule {schedule!r}")
    return planned * min(1.0, position / warmup) if warmup > 0 else planned


def _one_cycle(position: float, lr: float, epochs: int, rise: float) -> float:
    if position < rise:
        low, high, done = lr * FIRST, lr, position / rise
    else:
        done = min(1.0, (position - rise) / max(epochs - rise, 1e-9))
        low, high = lr, lr * FIRST * LAST
    return high + (low - high) * 0.5 * (1.0 + math.cos(math.pi * done))
