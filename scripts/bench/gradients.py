"""Find the order in which a model's gradients become ready.

One step on the meta device (shapes, no numbers) shows the order in which gradients arrive, and
after which fraction of the step's multiplications. Other operations, such as batch norm's, are not
counted, so these fractions are estimates.
"""

import math

import torch
from torch.utils.flop_counter import FlopCounterMode

from utils.model import models

# DistributedDataParallel's default bucket sizes in bytes: the first bucket, the others.
LIMITS = (2**20, 25 * 2**20)
SIDE = 224  # of the images, pixels


def gradients(arch: str, classes: int) -> list[tuple[float, tuple[int, ...]]]:
    """Return the gradients of ``arch`` in order of arrival. For each: the fraction of the step's
    compute (0 to 1) done by then, and the shape. Raises: `UserError` (unknown arch)."""
    with torch.device("meta"):
        model = models.create(arch, classes, SIDE).train()
        images = torch.empty(2, 3, SIDE, SIDE)
    arrived: list[tuple[int, tuple[int, ...]]] = []
    mapping = {torch.ops.aten.convolution_backward: _convolution_backward}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p: arrived.append((counter.get_total_flops(), tuple(p.shape)))
            )
        model(images).sum().backward()
    return [(done / counter.get_total_flops(), shape) for done, shape in arrived]


def _convolution_backward(gradient, _images, weight, *rest, **_) -> int:
    """Count the operations of a convolution's backward: torch's count is wrong with groups."""
    *_, required = rest  # gradients: of the input, of the weight, of the bias
    images, _channels, *places = gradient
    return sum(required[:2]) * 2 * images * math.prod(places) * math.prod(weight)
