"""Plays timm, the optional package, with models that cost next to nothing to train.

A test that puts tests/stand_in into PYTHONPATH can ask a script for ``-a tiny_plain``: no batch
norm and no dropout, so that the gradient of a batch is the mean over its images; for
``-a tiny_full``, which has both; or for ``-a tiny_vit`` and ``-a tiny_resnet``, a vision
transformer for 32 pixels and two blocks of a ResNet, which imagenet_fsdp.py shards.
With SLOW_START_IN=R rank R takes minutes to build its model, and says so.
STEP_SECONDS in the environment makes a forward pass take that long, without using the CPU, so that
a signal can meet it half-way. With HOLD_AFTER=N the forward pass after N training batches waits
until the process has met a signal; in rank R alone with HOLD_RANK=R. With SEEN_IMAGES=FOLDER
each process keeps a file there, <rank>_<start>, with a line for each training batch that it has
seen: the checksums of its images, which crop and flip make different in each epoch. With
SEEN_SEEDS=FOLDER it does the same with torch's seeds. In rank R the clock jumps forward by an hour
in the second training batch with CLOCK_JUMPS_IN=R. In rank R a bit of the weights flips in
the third training batch with FLIP_BIT_IN=R. With FIRST_BATCH=FILE rank 0 saves the images of
its first training batch there.
"""

import os
import signal
import time
import zlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer
from torchvision.models.resnet import Bottleneck

MODELS = ("tiny_plain", "tiny_full", "tiny_vit", "tiny_resnet")
LONG = 10.0  # seconds
met: list[int] = []  # signals
STARTED = time.time_ns()


class Tiny(nn.Sequential):
    """Two convolutions and a linear layer; slow on request."""

    trained = 0  # training batches seen

    def forward(self, images: Tensor) -> Tensor:
        if images.device.type == "meta":  # shapes alone, for which torch would load sympy
            return images.new_empty(len(images), self[-1].out_features)
        seconds = float(os.environ.get("STEP_SECONDS", "0"))
        # The pass in which DistributedDataParallel forms its buckets is no step of the training.
        settles = not self.training and torch.is_grad_enabled()
        if not settles:
            rank = os.environ.get("RANK", "0")
            holds = os.environ.get("HOLD_RANK", rank) == rank
            if holds and self.trained == int(os.environ.get("HOLD_AFTER", "-1")):
                wait_for_a_signal()
            self.trained += self.training
            if seconds >= LONG:
                os.write(1, b"a long step begins\n")  # one write: lines of two ranks stay apart
            if self.training and "SEEN_IMAGES" in os.environ:
                pixels = (image.contiguous().numpy() for image in images.float().cpu())
                note(os.environ["SEEN_IMAGES"], *(zlib.crc32(one.tobytes()) for one in pixels))
            if self.training and self.trained == 1 and rank == "0" and "FIRST_BATCH" in os.environ:
                torch.save(images, os.environ["FIRST_BATCH"])
            if self.training and "SEEN_SEEDS" in os.environ:
                note(os.environ["SEEN_SEEDS"], torch.initial_seed())
            if self.trained == 2 and os.environ.get("CLOCK_JUMPS_IN") == rank:
                now = time.monotonic
                time.monotonic = lambda: now() + 3600
            if self.trained == 3 and os.environ.get("FLIP_BIT_IN") == rank and self.training:
                self[0].bias.data.view(torch.int32)[5] ^= 1
            time.sleep(seconds)
        return super().forward(images)


def wait_for_a_signal() -> None:
    """Say so, and return once this process has met a signal."""
    os.write(1, b"waiting for a signal: process %d\n" % os.getpid())
    while not met:
        time.sleep(0.01)


def noted(number: int, handler: Any, set_handler: Any = signal.signal) -> Any:
    """signal.signal, whose handlers note that they are called."""

    def meet(number: int, frame: Any) -> None:
        if number != signal.SIGCHLD:  # of a loader worker that has ended
            met.append(number)
        handler(number, frame)

    return set_handler(number, meet if callable(handler) else handler)


signal.signal = noted


def note(folder: str, *numbers: int) -> None:
    """Add a line to this process's file."""
    with open(f"{folder}/{os.environ.get('RANK', '0')}_{STARTED}", "a") as file:
        print(*numbers, file=file)


def list_models() -> list[str]:
    return list(MODELS)


def is_model_pretrained(name: str) -> bool:
    return name == "tiny_plain"


def get_pretrained_cfg(name: str) -> SimpleNamespace:
    """Like timm's PretrainedCfg for most of its vision transformers."""
    return SimpleNamespace(
        input_size=(3, 40, 40),
        crop_pct=0.91,  # of 40 pixels 43.96, which timm rounds down
        interpolation="lanczos",  # bicubic is the nearest that this suite has
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )


def create_model(name: str, pretrained: bool = False, num_classes: int = 1000) -> nn.Module:
    if os.environ.get("SLOW_START_IN") == os.environ.get("RANK", "0"):
        os.write(1, b"a long start begins\n")
        time.sleep(600)
    if name == "tiny_vit":
        return VisionTransformer(32, 8, 3, 2, 128, 256, num_classes=num_classes)
    if name == "tiny_resnet":
        layers = [nn.Conv2d(3, 320, 7, stride=4, bias=False), nn.BatchNorm2d(320), nn.ReLU()]
        layers += [Bottleneck(320, 80), Bottleneck(320, 80), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(320, num_classes))
    full = name == "tiny_full"
    layers = [nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8) if full else nn.Identity()]
    layers += [nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.3 if full else 0.0)]
    return Tiny(*layers, nn.Linear(64, num_classes))
