"""A model that sleeps in place of computing, and gives gradients of a real model's shapes in order.

With it a few cores can play many GPUs: DistributedDataParallel sees the real buckets become ready
at the real times, and exchanges them.
"""

import math
import time
from itertools import groupby

import torch
from forecast.buckets import BUCKET_BYTES, FIRST_BYTES, Layers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

FORWARD = 1 / 3  # of the compute: one product per layer, where backward has two


class Naps:
    """Sleeps whose sum is exact: what one takes too long, the next ones take less."""

    def __init__(self) -> None:
        self.owed = 0.0

    def sleep(self, seconds: float) -> None:
        self.owed += seconds
        began = time.perf_counter()
        if self.owed > 0:
            time.sleep(self.owed)
            self.owed -= time.perf_counter() - began


class _Layer(torch.autograd.Function):
    """Passes a number on; backward sleeps, and then has gradients for the parameters."""

    @staticmethod
    def forward(ctx, number: Tensor, layer: "Layer", *parameters: Tensor) -> Tensor:
        ctx.layer, ctx.shapes = layer, [parameter.shape for parameter in parameters]
        return number.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.layer.naps.sleep(ctx.layer.seconds)
        pool = ctx.layer.pool
        made = [pool[: shape.numel()].view(shape) for shape in ctx.shapes]
        return gradient, None, *made


class Layer(nn.Module):
    """Parameters whose gradients come ``seconds`` after those of the layer behind it."""

    def __init__(self, parameters: list[nn.Parameter], seconds: float, naps: Naps, pool: Tensor):
        super().__init__()
        self.own, self.seconds = nn.ParameterList(parameters), seconds
        self.naps, self.pool = naps, pool

    def forward(self, number: Tensor) -> Tensor:
        return _Layer.apply(number, self, *self.own)


class Sleeping(nn.Module):
    """``layers`` in the order of their gradients; a step takes ``compute_s``.

    Parameters are float32 views of ``weights``, gradients of ``pool``, one-dimensional tensors with
    as many values as all layers, and as the largest parameter.
    """

    def __init__(self, layers: Layers, compute_s: float, weights: Tensor, pool: Tensor):
        super().__init__()
        self.naps, self.forward_s = Naps(), FORWARD * compute_s
        found, before, first = [], FORWARD, 0
        for ready, together in groupby(layers, key=lambda one: one[0]):
            parameters = []
            for _, *shape in together:
                size = math.prod(shape)
                parameters.append(nn.Parameter(weights[first : first + size].view(shape)))
                first += size
            seconds = max(ready - before, 0) * compute_s
            found.append(Layer(parameters, seconds, self.naps, pool))
            before = max(ready, before)
        self.layers = nn.Sequential(*reversed(found))

    def forward(self, images: Tensor) -> Tensor:
        """A number, for any images; it needs a gradient."""
        self.naps.sleep(self.forward_s)
        return self.layers(torch.zeros((), requires_grad=True))


def replica(model: Sleeping, shrunk: int) -> DistributedDataParallel:
    """The model as the training script wraps it, with buckets ``shrunk`` as its tensors are."""
    caps = {}
    if shrunk > 1:
        caps["bucket_cap_mb_list"] = [b / shrunk / 2**20 for b in (FIRST_BYTES, BUCKET_BYTES)]
    return DistributedDataParallel(model, init_sync=False, gradient_as_bucket_view=True, **caps)
