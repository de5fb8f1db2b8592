"""The optimiser of all modes."""

from collections.abc import Iterable

import torch
from torch import nn


def sgd(
    parameters: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float
) -> torch.optim.SGD:
    """SGD with momentum by the fused kernel, which skips a step on the device after an overflow.

    Any other implementation makes a loss scaler ask the host, and wait for it, in every step.
    """
    optimizer = torch.optim.SGD(
        parameters, lr, momentum=momentum, weight_decay=weight_decay, fused=True
    )
    if momentum:
        # The fused kernel leaves momentum uninitialised when the very first step overflows, as it
        # often does with a fresh loss scale. From zeros, the first step is the same as without.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer
