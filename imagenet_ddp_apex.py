#!/usr/bin/env python3
"""Train an ImageNet classifier with one process a GPU and the opt levels of NVIDIA Apex (DDP, O2).

Started by torch.distributed.launch or torchrun, on every node with its own --node_rank:

    python -m torch.distributed.launch --nproc_per_node=4 imagenet_ddp_apex.py -a resnet50 \\
        --b 208 --workers 20 --opt-level O2 DATA
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=4 --master_addr=IP --master_port=8888 \\
        imagenet_ddp_apex.py -a resnet50 --b 208 --opt-level O2 DATA

or by hand like imagenet_ddp.py. O2 keeps float16 weights and float32 masters of them, scales the
loss, and skips a step whose gradients overflow. utils/o2.py does this in plain PyTorch, so that
no Apex needs to be installed.
"""

from argparse import Namespace
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from utils import data, distributed, models, o2, optim, options, processes, tracking, training
from utils.checkpoint import TrainState
from utils.distributed import World


def main() -> int:
    parser = options.build_parser(__doc__, batch="images a step and process (per GPU)")
    o2.add_options(parser)
    options.add_launch_options(parser)
    args = options.parse(parser)
    o2.choose_level(args)  # a wrong combination is told here, before processes start
    return distributed.launch(train, args)


def train(args: Namespace, world: World) -> int:
    device = world.device
    torch.manual_seed(args.seed)

    level = o2.choose_level(args)

    # ---- data: batches of this process, in the order that seed and epoch fix
    loaders = data.build_loaders(args, world, dtype=level.input_dtype)

    # ---- model
    model = models.create(args.arch, len(loaders.classes), args.image_size, args.pretrained)
    model = model.to(device, memory_format=args.memory_format)

    # ---- Apex opt level: float16 weights and their float32 masters
    precision = o2.MixedPrecision(model, level, device)

    # ---- distributed data parallelism: replicas start equal, and get equal gradients
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    replica = DistributedDataParallel(model, device_ids=world.device_ids)

    # ---- optimiser and mixed precision
    optimizer = optim.sgd(precision.parameters(), args.lr, args.momentum, args.weight_decay)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    scaler = o2.LossScaler(device, level.loss_scale)

    # ---- the training step
    def train_step(
        images: Tensor, targets: Tensor, weight: float, update: bool
    ) -> tuple[Tensor, Tensor]:
        """One micro-batch; see `utils.job.TrainStep` for what the arguments mean."""
        # Only the last micro-batch of a step pays for the all-reduce.
        with nullcontext() if update else replica.no_sync():
            with precision.autocast():
                logits = replica(images)
                loss = criterion(logits, targets)
            scaler.scale(loss * weight).backward()
        if update:
            scaler.unscale(precision.gradients_to_masters())
            if args.clip_grad:
                nn.utils.clip_grad_norm_(precision.parameters(), args.clip_grad)
            scaler.step(optimizer)
            scaler.update()
            precision.masters_to_weights()
        return loss, logits

    def predict(images: Tensor) -> Tensor:
        """Logits for evaluation; of the bare model, as ranks may differ in number of batches."""
        with precision.autocast():
            return model(images)

    # ---- resume, train, evaluate
    run = tracking.Run(args, world, mode="apex")
    state = TrainState(model, optimizer, scaler, weights=precision)
    job = training.Job(args, world, run, loaders, state)
    return training.run(job, train_step, predict)


if __name__ == "__main__":
    processes.run_main(main)
