#!/usr/bin/env python3
"""Train an ImageNet classifier with one process a GPU and the opt levels of NVIDIA Apex (DDP, O2).

Started by torch.distributed.launch or torchrun, on every node with its own --node_rank:

    python -m torch.distributed.launch --nproc_per_node=4 imagenet_ddp_apex.py -a resnet50 \\
        --b 208 --workers 20 --opt-level O2 DATA
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=4 --master_addr=IP --master_port=8888 \\
        imagenet_ddp_apex.py -a resnet50 --b 208 --opt-level O2 DATA

or by hand like imagenet_ddp.py. O2 keeps float16 weights and float32 masters of them, scales the
loss, and skips a step whose gradients overflow. Apex had amp until its tag 25.04: where that is
installed it is used, and utils/amp/plain.py computes the same in plain PyTorch everywhere else.
"""

from argparse import Namespace
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from utils import models, optim, options
from utils.amp import choice
from utils.data.loaders import build_loaders
from utils.processes import launch, supervise
from utils.processes.distributed import World
from utils.run import tracking
from utils.run.checkpoint import TrainState
from utils.training import loop


def main() -> int:
    parser = options.build_parser(__doc__, batch="images a step and process (per GPU)")
    choice.add_options(parser)
    launch.add_options(parser)
    args = options.parse(parser)
    choice.check(args)  # what does not go together is told before processes start
    return launch.run(train, args)


def train(args: Namespace, world: World) -> int:
    device = world.device
    torch.manual_seed(args.seed)

    amp = choice.create(args, world)  # that of NVIDIA Apex, or the same in plain PyTorch

    # ---- data: batches of this process, in the order that seed and epoch fix
    loaders = build_loaders(args, world, dtype=amp.level.input_dtype)

    # ---- model
    model = models.create(args.arch, len(loaders.classes), args.image_size, args.pretrained)
    model = model.to(device, memory_format=args.memory_format)
    if args.sync_bn:
        model = amp.sync_bn(model)

    # ---- optimiser and mixed precision: float16 weights, of which it gets float32 masters
    optimizer = optim.sgd(model.parameters(), args.lr, args.momentum, args.weight_decay)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    model, optimizer = amp.initialize(model, optimizer)

    # ---- distributed data parallelism: replicas start equal, and get equal gradients
    replica = amp.parallel(model, args.allreduce, args.delay_allreduce)

    # ---- the training step
    def train_step(
        images: Tensor, targets: Tensor, weight: float, update: bool
    ) -> tuple[Tensor, Tensor]:
        """One micro-batch; see `utils.training.session.TrainStep` for what the arguments mean."""
        # Only the last micro-batch of a step pays for the all-reduce.
        with nullcontext() if update else amp.accumulate(replica):
            logits = replica(images)
            loss = criterion(logits, targets)
            with amp.scale_loss(loss * weight, optimizer, delay_unscale=not update) as scaled_loss:
                scaled_loss.backward()
        if update:
            if args.clip_grad:
                nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.clip_grad)
            optimizer.step()
            optimizer.zero_grad()
        return loss, logits

    def predict(images: Tensor) -> Tensor:
        """Logits for evaluation; of the bare model, as ranks may differ in number of batches."""
        return model(images)

    # ---- resume, train, evaluate
    run = tracking.Run(args, world, mode="apex")
    state = TrainState(model, optimizer, amp.scaler, weights=amp.weights)
    job = loop.Job(args, world, run, loaders, state)
    return loop.run(job, train_step, predict)


if __name__ == "__main__":
    supervise.run_main(main)
