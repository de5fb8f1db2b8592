#!/usr/bin/env python3
"""Train an ImageNet classifier with one process on one device.

    python imagenet_nd.py -a resnet50 DATA
    python imagenet_nd.py -a alexnet --lr 0.01 DATA
    python imagenet_nd.py -a resnet50 --resume runs/NAME/snapshot.pt DATA
    python imagenet_nd.py -a resnet50 --resume runs/NAME/best.pt --evaluate DATA

The plain loop that the other scripts start from: `diff -u imagenet_nd.py imagenet_ddp.py` shows
what several processes change. It uses the first GPU, or the CPU if there is none.
"""

from argparse import Namespace

import torch
from torch import Tensor, nn

from utils import models, optim, options
from utils.data.loaders import build_loaders
from utils.processes import launch, supervise
from utils.processes.distributed import World
from utils.run import tracking
from utils.run.checkpoint import TrainState
from utils.training import loop


def main() -> int:
    parser = options.build_parser(__doc__, batch="images a step")
    options.add_amp_options(parser)
    args = options.parse(parser)
    return train(args, launch.single_process())


def train(args: Namespace, world: World) -> int:
    device = world.device
    torch.manual_seed(args.seed)

    amp = loop.amp_dtype(args.amp, device)

    # ---- data: batches of this process, in the order that seed and epoch fix
    loaders = build_loaders(args, world, dtype=amp or torch.float32)

    # ---- model
    model = models.create(args.arch, len(loaders.classes), args.image_size, args.pretrained)
    model = model.to(device, memory_format=args.memory_format)

    # ---- optimiser and mixed precision
    optimizer = optim.sgd(model.parameters(), args.lr, args.momentum, args.weight_decay)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    scaler = torch.amp.GradScaler(device.type, enabled=amp is torch.float16)

    # ---- the training step
    def train_step(
        images: Tensor, targets: Tensor, weight: float, update: bool
    ) -> tuple[Tensor, Tensor]:
        """One micro-batch; see `utils.training.session.TrainStep` for what the arguments mean."""
        with torch.autocast(device.type, amp, enabled=amp is not None):
            logits = model(images)
            loss = criterion(logits, targets)
        scaler.scale(loss * weight).backward()
        if update:
            if args.clip_grad:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return loss, logits

    def predict(images: Tensor) -> Tensor:
        """Logits for evaluation."""
        with torch.autocast(device.type, amp, enabled=amp is not None):
            return model(images)

    # ---- resume, train, evaluate
    run = tracking.Run(args, world, mode="nd")
    state = TrainState(model, optimizer, scaler)
    job = loop.Job(args, world, run, loaders, state)
    return loop.run(job, train_step, predict)


if __name__ == "__main__":
    supervise.run_main(main)
