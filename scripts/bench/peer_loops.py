#!/usr/bin/env python3
"""The training loops of two well-known scripts, rewritten for a comparison.

    python scripts/bench/peer_loops.py examples -a resnet18 -b 32
    python scripts/bench/peer_loops.py torchvision -a resnet18 -b 32 -j 2 --data DATA

``examples`` is pytorch/examples' imagenet/main.py: float32; every step copies three numbers to the
host before backward. ``torchvision`` is torchvision's references/classification: cuDNN's benchmark
mode, --amp with a GradScaler, blocking uploads; the step copies the numbers at its end. With --data
they train an epoch, without evaluation. Without --data they repeat one batch, which stays on the
device, and are timed as by time_step.py; the last line is JSON. Under torchrun both use
DistributedDataParallel with its defaults.
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
from bench import steps
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision.transforms import v2

from utils.data.preprocessing import MEAN, STD
from utils.model import models
from utils.start.option_types import DocstringFormatter, Parser, positive
from utils.start.world import World

PRECISIONS = {"off": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=DocstringFormatter)
    add = parser.add_argument
    add("kind", choices=("examples", "torchvision"))
    add("-a", "--arch", default="resnet18")
    add("-b", "--batch-size", type=positive, default=32)
    add("-j", "--workers", type=int, default=2)
    add("--image-size", type=positive, default=224)
    add("--amp", choices=tuple(PRECISIONS), default="off")
    add("--channels-last", action="store_true")
    add("--data", type=Path, metavar="DIR", help="folder with train/ and val/: one epoch")
    args = parser.parse_args()
    examples, dtype = args.kind == "examples", PRECISIONS[args.amp]
    torch.backends.cudnn.benchmark = not examples

    defaults = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    rank, local, size = (int(os.environ.get(name, text)) for name, text in defaults.items())
    cuda = torch.cuda.is_available()
    device = torch.device(f"cuda:{local}" if cuda else "cpu")
    classes = len(os.listdir(args.data / "train")) if args.data else 1000
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    model = models.create(args.arch, classes, args.image_size)
    model = model.to(memory_format=layout).to(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo")
        model = nn.parallel.DistributedDataParallel(model, device_ids=[local] if cuda else None)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    meters: dict[str, list[float]] = defaultdict(list)

    @torch.no_grad()
    def measure_accuracy(loss: Tensor, logits: Tensor, targets: Tensor) -> None:
        best = logits.topk(min(5, classes), 1).indices.t()
        hits = best.eq(targets.view(1, -1).expand_as(best))
        meters["loss"].append(loss.item())
        for k in (1, 5):
            right = hits[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / len(targets))
            meters[f"top-{k}"].append(right.item())

    def train(batches: Iterable[Any]) -> None:
        model.train()
        began = time.time()
        for batch in batches:
            meters["data"].append(time.time() - began)
            images, targets = (part.to(device, non_blocking=examples) for part in batch)
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                logits = model(images)
                loss = criterion(logits, targets)
            if examples:
                measure_accuracy(loss, logits, targets)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if not examples:
                measure_accuracy(loss, logits, targets)
            meters["time"].append(time.time() - began)
            began = time.time()
            if len(meters["time"]) % 10 == 1:
                print(*(f"{name} {sum(each) / len(each):.4f}" for name, each in meters.items()))

    if args.data:
        train(loader(args))
    else:
        control = dist.new_group(backend="gloo") if size > 1 else None
        world = World(device, rank, size, rank, size, 1, control)
        images, targets = steps.random_batch(args.batch_size, args.image_size, world)
        batch = images.to(memory_format=layout), targets
        warm_up, timed = steps.WARMUP_STEPS, steps.TIMED_STEPS
        figures = steps.time_steps(lambda: train([batch]), world, warm_up, timed)
        figures["images_per_s"] = 1000 * size * args.batch_size / figures["ms_per_step"]
        if rank == 0:
            print(json.dumps(figures), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def loader(args: argparse.Namespace) -> DataLoader:
    """Build the usual loader of a folder of training images."""
    crops = [v2.RandomResizedCrop(args.image_size), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    crops += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    images = datasets.ImageFolder(args.data / "train", v2.Compose(crops))
    options = {"num_workers": args.workers, "pin_memory": torch.cuda.is_available()}
    return DataLoader(images, args.batch_size, shuffle=True, **options)


if __name__ == "__main__":
    main()
