#!/usr/bin/env python3
"""Train an ImageNet classifier with one process a GPU, on any number of nodes (DDP, native AMP).

Started by hand, on every node with its own --rank (one node: no option at all):

    python imagenet_ddp.py -a resnet50 --dist-url tcp://MASTER_IP:8888 --world-size 2 --rank 0 DATA
    MASTER_ADDR=IP MASTER_PORT=8888 WORLD_SIZE=2 NODE_RANK=0 python imagenet_ddp.py DATA
    python imagenet_ddp.py -n 1 -g 1 -nr 0 --epochs 2 DATA

or by torchrun, likewise with its own --node_rank:

    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=1 --master_addr=IP --master_port=8888 \\
        imagenet_ddp.py -a resnet50 DATA

Each process trains a replica of the model on its slice of the global batch; DDP averages the
gradients while backward still computes.
"""

from argparse import Namespace
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from utils import models, optim, options
from utils.data.loaders import build_loaders
from utils.processes import launch, supervise
from utils.processes.distributed import World
from utils.run import tracking
from utils.run.checkpoint import TrainState
from utils.training import loop


def main() -> int:
    parser = options.build_parser(__doc__, batch="images a step and process (per GPU)")
    options.add_amp_options(parser)
    launch.add_options(parser)
    args = options.parse(parser)
    return launch.run(train, args)


def train(args: Namespace, world: World) -> int:
    device = world.device
    torch.manual_seed(args.seed)

    amp = loop.amp_dtype(args.amp, device)

    # ---- data: batches of this process, in the order that seed and epoch fix
    loaders = build_loaders(args, world, dtype=amp or torch.float32)

    # ---- model
    model = models.create(args.arch, len(loaders.classes), args.image_size, args.pretrained)
    model = model.to(device, memory_format=args.memory_format)

    # ---- distributed data parallelism: replicas start equal, and get equal gradients
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    replica = DistributedDataParallel(model, device_ids=world.device_ids)

    # ---- optimiser and mixed precision
    optimizer = optim.sgd(model.parameters(), args.lr, args.momentum, args.weight_decay)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    scaler = torch.amp.GradScaler(device.type, enabled=amp is torch.float16)

    # ---- the training step
    def train_step(
        images: Tensor, targets: Tensor, weight: float, update: bool
    ) -> tuple[Tensor, Tensor]:
        """One micro-batch; see `utils.training.session.TrainStep` for what the arguments mean."""
        # Only the last micro-batch of a step pays for the all-reduce.
        with nullcontext() if update else replica.no_sync():
            with torch.autocast(device.type, amp, enabled=amp is not None):
                logits = replica(images)
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
        """Logits for evaluation; of the bare model, as ranks may differ in number of batches."""
        with torch.autocast(device.type, amp, enabled=amp is not None):
            return model(images)

    # ---- resume, train, evaluate
    run = tracking.Run(args, world, mode="ddp")
    state = TrainState(model, optimizer, scaler)
    job = loop.Job(args, world, run, loaders, state)
    return loop.run(job, train_step, predict)


if __name__ == "__main__":
    supervise.run_main(main)
