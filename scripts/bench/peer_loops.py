#!/usr/bin/env python3
"""The usual training loops: what two well-known scripts do, rewritten for a comparison.

    python scripts/bench/peer_loops.py examples -a resnet18 -b 32
    python scripts/bench/peer_loops.py torchvision -a resnet18 -b 32 -j 2 --data DATA

``examples``: pytorch/examples' imagenet/main.py: float32, three numbers to the host in every step
before backward. ``torchvision``: torchvision's references/classification: cuDNN's benchmark mode,
--amp with a GradScaler, blocking uploads, and the numbers to the host after the step. Without
--data they repeat one batch, which stays on the device, and are timed as by --dummy of this suite;
the last line is JSON. Under torchrun both use DistributedDataParallel with its defaults.
"""

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision.transforms import v2

from utils import models
from utils.extras import dummy
from utils.option_types import positive
from utils.preprocessing import MEAN, STD
from utils.world import World

PRECISIONS = {"off": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("examples", "torchvision"))
    parser.add_argument("-a", "--arch", default="resnet18")
    parser.add_argument("-b", "--batch-size", type=positive, default=32)
    parser.add_argument("-j", "--workers", type=int, default=2)
    parser.add_argument("--image-size", type=positive, default=224)
    parser.add_argument("--amp", choices=tuple(PRECISIONS), default="off")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--data", type=Path, metavar="DIR", help="with train/ and val/: one epoch")
    args = parser.parse_args()
    cuda, size = torch.cuda.is_available(), int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if cuda else "cpu")
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo")
    torch.backends.cudnn.benchmark = args.kind == "torchvision"
    classes = len(os.listdir(args.data / "train")) if args.data else 1000
    loop = Loop(args, classes, device)
    if args.data:
        loop.train(_loader(args, "train"))
        loop.evaluate(_loader(args, "val"))
    else:
        control = dist.new_group(backend="gloo") if size > 1 else None
        world = World(device, rank, size, rank, size, 1, control)
        images, targets = dummy.random_batch(args.batch_size, args.image_size, world)
        layout = torch.channels_last if args.channels_last else torch.contiguous_format
        batch = images.to(memory_format=layout), targets
        figures = dummy.time_steps(
            lambda: loop.train([batch]), world, dummy.WARMUP_STEPS, dummy.TIMED_STEPS
        )
        figures["images_per_s"] = 1000 * size * args.batch_size / figures["ms_per_step"]
        if rank == 0:
            print(json.dumps(figures), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


class Loop:
    """Model, optimiser and meters of either kind."""

    def __init__(self, args: argparse.Namespace, classes: int, device: torch.device):
        self.args, self.device, self.steps = args, device, 0
        model = models.create(args.arch, classes, args.image_size).to(device)
        if args.channels_last:
            model = model.to(memory_format=torch.channels_last)
        self.model: nn.Module = model
        if dist.is_initialized():
            ids = [device.index] if device.type == "cuda" else None
            self.model = nn.parallel.DistributedDataParallel(model, device_ids=ids)
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.9, weight_decay=1e-4)
        self.dtype = PRECISIONS[args.amp]
        fp16 = self.dtype is torch.float16
        self.scaler = torch.amp.GradScaler(device.type, enabled=fp16)
        self.meters: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def train(self, batches: Iterable[Any]) -> None:
        """An epoch, or a part of it."""
        self.model.train()
        began = time.time()
        for number, batch in enumerate(batches, self.steps):
            self.steps += 1
            self._note("data", time.time() - began, 1)
            early = self.args.kind == "examples"
            images, targets = (part.to(self.device, non_blocking=early) for part in batch)
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
                logits = self.model(images)
                loss = self.criterion(logits, targets)
            if early:
                self._note_accuracy(loss, logits, targets)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if not early:
                self._note_accuracy(loss, logits, targets)
            self._note("time", time.time() - began, 1)
            began = time.time()
            if number % 10 == 0:
                means = {name: f"{total / n:.4f}" for name, (total, n) in self.meters.items()}
                print(f"step {number} " + " ".join(f"{k} {v}" for k, v in means.items()))

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any]) -> None:
        """An evaluation."""
        self.model.eval()
        for batch in batches:
            images, targets = (part.to(self.device) for part in batch)
            logits = self.model(images)
            self._note_accuracy(self.criterion(logits, targets), logits, targets)

    def _note(self, name: str, value: float, count: int) -> None:
        meter = self.meters[name]
        meter[0] += value * count
        meter[1] += count

    @torch.no_grad()
    def _note_accuracy(self, loss: Tensor, logits: Tensor, targets: Tensor) -> None:
        best = logits.topk(5, 1).indices.t()
        hits = best.eq(targets.view(1, -1).expand_as(best))
        count = len(targets)
        self._note("loss", loss.item(), count)
        for k in (1, 5):
            right = hits[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / count)
            self._note(f"top-{k}", right.item(), count)


def _loader(args: argparse.Namespace, part: str) -> DataLoader:
    size = args.image_size
    cut = (
        [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()]
        if part == "train"
        else [v2.Resize(size * 256 // 224), v2.CenterCrop(size)]
    )
    to_float = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    return DataLoader(
        datasets.ImageFolder(args.data / part, v2.Compose(cut + to_float)),
        args.batch_size,
        shuffle=part == "train",
        num_workers=args.workers,
        pin_memory=torch.cuda.is_available(),
    )


if __name__ == "__main__":
    sys.exit(main())
