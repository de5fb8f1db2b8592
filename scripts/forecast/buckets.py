"""The buckets in which DistributedDataParallel exchanges a model's gradients, without training it.

One step on the meta device (shapes, no numbers) shows in which order the gradients arrive, and
after which share of the step's multiplications. Other operations, such as batch norm's, are not
counted, so that readiness is an estimate.
"""

import math

import torch
from forecast.model import Bucket
from torch.utils.flop_counter import FlopCounterMode

from utils import models

FIRST_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20  # DistributedDataParallel's defaults


def trace(arch: str, classes: int = 1000, image_size: int = 224) -> tuple[Bucket, ...]:
    """The buckets of ``arch`` in the order of their exchange. Raises: `UserError` (unknown arch).

    As after DDP's first step, the tensor that brings a bucket to its limit closes it.
    """
    with torch.device("meta"):
        model = models.create(arch, classes, image_size).train()
        images = torch.empty(2, 3, image_size, image_size)
    arrived: list[tuple[int, tuple[int, ...]]] = []
    mapping = {torch.ops.aten.convolution_backward: _convolution_backward}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p: arrived.append((counter.get_total_flops(), tuple(p.shape)))
            )
        model(images).sum().backward()
    buckets: list[Bucket] = []
    shapes: list[tuple[int, ...]] = []
    for position, (done, shape) in enumerate(arrived, start=1):
        shapes.append(shape)
        full = 4 * sum(map(math.prod, shapes)) >= (BUCKET_BYTES if buckets else FIRST_BYTES)
        if full or position == len(arrived):
            buckets.append(Bucket(done / counter.get_total_flops(), tuple(shapes)))
            shapes = []
    return tuple(buckets)


def _convolution_backward(gradient, _images, weight, *rest, **_) -> int:
    """Operations of a convolution's backward, from shapes: torch's count is wrong with groups."""
    *_, wanted = rest  # gradients: of the input, of the weight, of the bias
    images, _channels, *places = gradient
    return sum(wanted[:2]) * 2 * images * math.prod(places) * math.prod(weight)
