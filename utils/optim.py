"""The optimiser of all modes."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def build(args: Any, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser that the options ask for, for the parameters of ``model``."""
    return sgd(model.parameters(), args.lr, args.momentum, args.weight_decay)


def sgd(
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    lr: float,
    momentum: float,
    weight_decay: float,
) -> torch.optim.SGD:
    """SGD with momentum; on a GPU by the fused kernel, which can skip a step on the device.

    Any other implementation makes a loss scaler ask the host, and wait for it, in every step. On
    the CPU there is nothing to wait for, and the plain loop is the one whose every bit is known:
    the fused kernel rounds the last elements of some tensors in another way.
    """
    parameters = list(parameters)
    first = parameters[0]["params"][0] if isinstance(parameters[0], dict) else parameters[0]
    optimizer = torch.optim.SGD(
        parameters, lr, momentum=momentum, weight_decay=weight_decay, fused=first.is_cuda
    )
    if momentum:
        # The fused kernel leaves momentum uninitialised when the very first step overflows, as it
        # often does with a fresh loss scale. From zeros, the first step is the same as without.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer
