"""Optimisers by name, parameter groups, and learning-rate schedules, for all modes."""

import math
from typing import Any

import torch
from torch import nn

from utils.model import fsdp
from utils.start.option_types import Options

# Position embeddings in torchvision and timm: added to activations, like biases.
_TABLES = ("pos_embedding", "pos_embed", "relative_position_bias_table")


def build(args: Options, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser that the options ask for, for the trained parameters of ``model``.

    None of its steps makes the host wait for the device, not even with a loss scaler.
    """
    name, lr, momentum, decay = args.optimizer, args.lr, args.momentum, args.weight_decay
    first, second = (float(beta) for beta in args.betas.split(","))
    fused = next(model.parameters()).is_cuda  # not on the CPU, see `sgd`
    groups = parameter_groups(model, decay, args.wd_norm)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr, betas=(first, second), weight_decay=decay, fused=fused)
    return sgd(groups, lr, momentum, decay, nesterov=name == "nesterov")


def parameter_groups(
    model: nn.Module, decay: float, decay_of_norms: float | None
) -> list[dict[str, Any]]:
    """The trained parameters of ``model``, in groups with different options.

    ``decay_of_norms`` applies to position embeddings, and to parameters with at most one dimension
    above 1: norms, biases, layer scales and class tokens.
    """
    others: dict[str, Any] = {"params": [], "weight_decay": decay}
    small: dict[str, Any] = {"params": [], "weight_decay": decay_of_norms}
    for name, p in model.named_parameters():
        is_small = sum(n > 1 for n in p.shape) <= 1 or name.endswith(_TABLES)
        group = small if is_small and decay_of_norms is not None else others
        if p.requires_grad:
            group["params"].append(p)
    return [group for group in (others, small) if group["params"]]


def sgd(
    groups: list[dict[str, Any]],
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool = False,
) -> torch.optim.SGD:
    """SGD with momentum. On a GPU it uses the fused kernel, which can skip a step on the device.

    With any other implementation a loss scaler needs a host-device sync in every step. The CPU
    needs no sync, and uses the plain loop: the fused kernel would round the last elements of some
    tensors differently from the rest.
    """
    weights = [weight for group in groups for weight in group["params"]]
    fused = weights[0].is_cuda
    if fused and hasattr(weights[0], "to_local"):  # shards
        fused = fsdp.let_fused_sgd_take_shards()
    optimizer = torch.optim.SGD(
        groups, lr, momentum, weight_decay=weight_decay, nesterov=nesterov, fused=fused
    )
    # The fused kernel leaves momentum uninitialised when the very first step overflows, which is
    # common with a new loss scale. Starting from zeros gives the same first step.
    for weight in weights if momentum else ():
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return optimizer


# ---- the learning rate, a function of progress

REFERENCE_BATCH = 256  # the global batch that published ImageNet learning rates are meant for
STEP_EPOCHS = 30
LAST_STEP_EPOCH = 80
# One-cycle, as in torch.optim.lr_scheduler.OneCycleLR: fraction of training in which the rate
# rises, first rate / highest rate, and last rate / first rate.
RISE, FIRST, LAST = 0.3, 1 / 25, 1e-4


def scale_lr(lr: float, global_batch: float, rule: str) -> float:
    """Scale a learning rate given for 256 images per step to ``global_batch`` images.

    ``rule``: "none"; "linear", Goyal et al. 2017 (arXiv:1706.02677); "sqrt", Krizhevsky 2014
    (arXiv:1404.5997).
    """
    ratio = global_batch / REFERENCE_BATCH
    return lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def learning_rate(
    position: float, *, lr: float, epochs: int, warmup: float, schedule: str
) -> float:
    """Learning rate at ``position``, in epochs since the start (1.5: halfway through the second).

    During the first ``warmup`` epochs it grows linearly from 0 to the schedule's rate. "step": x0.1
    every 30 epochs and once more at epoch 80. "constant": lr in all epochs. "cosine": half a cosine
    from the end of warm-up to 0 at ``epochs`` (Loshchilov and Hutter 2017, arXiv:1608.03983,
    without restarts). "linear": a straight line from there to 0 (Li et al. 2020, arXiv:1905.04753;
    the short recipes of ffcv-imagenet). "onecycle": half a cosine up from lr / 25 in the first 30 %
    of the epochs, or in those of ``warmup`` instead, and half a cosine down to lr / 250,000 at
    ``epochs`` (Smith and Topin 2017, arXiv:1708.07120, in torch's form; momentum does not change).
    """
    rise = warmup or RISE * epochs if schedule == "onecycle" else warmup
    done = min(1.0, max(0.0, position - rise) / max(epochs - rise, 1e-9))
    if schedule == "onecycle":
        start, end = lr, lr * FIRST * LAST
        if position < rise:
            start, end, done = lr * FIRST, lr, position / rise
        return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * done))
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
