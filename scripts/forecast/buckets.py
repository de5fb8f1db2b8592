#!/usr/bin/env python3
"""The buckets in which DistributedDataParallel exchanges a model's gradients, without training it.

    python scripts/forecast/buckets.py            # writes layers.json, for the usual models
    python scripts/forecast/buckets.py resnet50   # prints the buckets of one

A step forward and backward on the meta device (shapes, no numbers) tells in which order gradients
arrive, and after which share of the step's multiplications. Other operations, such as batch norm's,
count as nothing, so that readiness is an estimate. layers.json keeps both for the usual models:
they need no torch then.
"""

import functools
import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from forecast.model import FLOAT32, Bucket  # noqa: E402

TABLE = Path(__file__).with_name("layers.json")
USUAL = ("alexnet", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "vgg16", "vgg19",
         "vit_b_32")  # fmt: skip
USUAL_CLASSES, USUAL_SIZE = 1000, 224
FIRST_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20  # DistributedDataParallel's defaults

# Of each parameter, in the order in which gradients arrive: the share of the step's compute done by
# then; its first dimension; if it has more than one, the product of the others.
Layers = list[tuple[float, int, int] | tuple[float, int]]


@functools.cache
def _table() -> dict[str, Layers]:
    return json.loads(TABLE.read_text())


def layers(arch: str, classes: int = USUAL_CLASSES, image_size: int = USUAL_SIZE) -> Layers:
    """The parameters of ``arch``; asks torchvision (and timm) for models that the table lacks.

    Raises: `UserError` for an unknown arch.
    """
    if image_size == USUAL_SIZE and arch in _table():
        # Only the last layer has as many rows as there are classes, and hardly any of the compute.
        return [
            (ready, classes if rows == USUAL_CLASSES else rows, *columns)
            for ready, rows, *columns in _table()[arch]
        ]
    return trace(arch, classes, image_size)


def trace(arch: str, classes: int, image_size: int) -> Layers:
    """What `layers` returns, from the model itself. Raises: `UserError` for an unknown arch."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from utils.model import models

    with torch.device("meta"):
        model = models.create(arch, classes, image_size).train()
        images = torch.empty(2, 3, image_size, image_size)
    arrived: list[tuple[int, torch.Size]] = []
    mapping = {torch.ops.aten.convolution_backward: _convolution_backward}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p: arrived.append((counter.get_total_flops(), p.shape))
            )
        model(images).sum().backward()
        total = counter.get_total_flops()
    return [
        (round(done / total, 4), shape[0], *([math.prod(shape[1:])] if len(shape) > 1 else []))
        for done, shape in ((done, shape or (1,)) for done, shape in arrived)
    ]


def _convolution_backward(gradient, _images, weight, *rest, **_) -> int:
    """Operations of a convolution's backward, by shapes: torch's count is wrong with groups."""
    *_, wanted = rest  # gradients: of the input, of the weight, of the bias
    images, _channels, *places = gradient
    return sum(wanted[:2]) * 2 * images * math.prod(places) * math.prod(weight)


def shrink(found: Layers, times: int) -> Layers:
    """`layers` with about 1 / ``times`` of the values; the sides of matrices by its root."""
    root = math.sqrt(times)

    def smaller(shape: list[int]) -> list[int]:
        if len(shape) == 1:
            return [math.ceil(shape[0] / times)]
        rows = math.ceil(shape[0] / root)
        return [rows, math.ceil(math.prod(shape) / times / rows)]

    return [(ready, *(smaller(shape) if times > 1 else shape)) for ready, *shape in found]


def fill(found: Layers, shrunk: int = 1) -> tuple[Bucket, ...]:
    """Pack `layers` as DistributedDataParallel does after its first step.

    A bucket is closed by the tensor that brings it to its limit, 1 MiB for the first and 25 MiB for
    the others; 1 / ``shrunk`` of that for layers that are.
    """
    buckets: list[Bucket] = []
    values, matrices, ready = 0, [], 0.0
    for ready, *shape in found:
        values += math.prod(shape)
        matrices += [tuple(shape)] if len(shape) > 1 else []
        if FLOAT32 * values >= (BUCKET_BYTES if buckets else FIRST_BYTES) / shrunk:
            buckets.append(Bucket(values, ready, tuple(matrices)))
            values, matrices = 0, []
    return (*buckets, Bucket(values, ready, tuple(matrices))) if values else tuple(buckets)


def of(arch: str, classes: int = USUAL_CLASSES, image_size: int = USUAL_SIZE) -> tuple[Bucket, ...]:
    """The buckets of ``arch`` in the order of their exchange. Raises: `UserError`."""
    return fill(layers(arch, classes, image_size))


def main() -> None:
    for arch in sys.argv[1:]:
        for bucket in of(arch):
            size = FLOAT32 * bucket.values / 2**20
            print(f"{arch}: {size:.1f} MiB ready after {bucket.ready:.2f} of the compute")
    if not sys.argv[1:]:
        lines = [
            f"{json.dumps(arch)}: "
            + json.dumps(trace(arch, USUAL_CLASSES, USUAL_SIZE), separators=(",", ":"))
            for arch in USUAL
        ]
        TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
