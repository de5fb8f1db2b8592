#!/usr/bin/env python3
"""Train an ImageNet classifier with NVIDIA Apex's opt levels (DDP, O2).

One process per GPU. Start it on every node with its own --node_rank:

    python -m torch.distributed.launch --nproc_per_node=4 \\
        imagenet_ddp_apex.py -a resnet50 --b 208 --workers 20 \\
        --opt-level O2 DATA
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=4 \\
        --master_addr=IP --master_port=8888 \\
        imagenet_ddp_apex.py -a resnet50 --b 208 --opt-level O2 DATA

or by hand like imagenet_ddp.py. O2 keeps float16 weights and float32 masters
of them, scales the loss, and skips a step whose gradients overflow. NVIDIA's
Apex (25.04 is the last tag with amp) is used if it is installed. Otherwise
utils/model/o2.py computes the same in plain PyTorch.
"""

from contextlib import nullcontext

from utils.start import launch

launch.prepare(__name__)  # end with the launcher; report a failed import in one line

from utils import options
from utils.model.options import add_apex
from utils.start.option_types import Options, Parser


def parser() -> Parser:
    """The command line of this script."""
    parser = options.build_parser(__doc__, batch="images per step and process (per GPU)")
    add_apex(parser)
    launch.add_options(parser)
    return parser


if __name__ == "__main__":
    options.check(parser())  # before torch is imported, which takes seconds

import torch
from torch import Tensor, nn

from utils import epoch, loop
from utils.data.loaders import build_loaders
from utils.model import apex, blocks, compiling, models, o2, optim
from utils.run.run_directory import Run
from utils.run.snapshots import TrainState
from utils.session import Session
from utils.start.world import World, form_buckets, process_group


def main() -> int:
    args = options.parse(parser())
    apex.check(args)  # report wrong options before processes start
    return launch.run(worker, args)  # in each process of this node


def worker(args: Options) -> int:
    """One process of the job: join the process group, train, leave it."""
    with process_group(args) as world:  # torch.distributed.init_process_group
        return train(args, world)


def train(args: Options, world: World) -> int:
    """Build everything from the options and train to the last epoch. Returns the exit code."""
    device = world.device
    torch.manual_seed(args.seed)
    args = loop.with_checkpoint_sizes(args, world)  # from --resume; the model depends on them

    amp, parallel = apex.amp_and_parallel(args, world)  # from apex import amp, parallel

    # ---- data: the order of images is a function of seed and epoch (utils/data/samplers.py).
    # Each rank takes its share of every global batch of DATA/train. Each image of DATA/val is
    # evaluated once.
    loaders = build_loaders(args, world, dtype=o2.from_args(args).input_dtype)

    # ---- model
    model = models.build(args, loaders.classes)
    model = model.to(memory_format=args.memory_format).to(device)
    if args.sync_bn:
        model = blocks.with_activations(parallel.convert_syncbn_model(model))

    # ---- optimiser and mixed precision: float16 weights with float32 masters
    optimizer = optim.build(args, model)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )

    # ---- distributed data parallelism: replicas start with equal weights and get equal gradients
    replica = parallel.DistributedDataParallel(model)
    form_buckets(replica, world, args)

    forward = compiling.compiled(replica, args)  # unchanged without --compile

    # ---- the training step
    def train_step(
        images: Tensor, targets: Tensor, weight: float, update: bool
    ) -> tuple[Tensor, Tensor]:
        """One micro-batch: images float [n, 3, size, size], targets int64 [n] -> loss, logits.

        Targets of mixed images are float [n, classes]. ``weight`` scales its mean loss: gradients
        averaged over ranks and summed over micro-batches are then those of the global batch.
        ``update`` ends the step: the weights change.
        """
        # Only the last micro-batch of a step all-reduces the gradients.
        with nullcontext() if update else replica.no_sync():
            logits = forward(images)
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
        """Logits for evaluation, from the bare model: ranks may have unequal numbers of batches."""
        return model(images)

    # ---- resume, then train and evaluate, epoch by epoch
    run = Run(args, world, mode="apex")
    state = TrainState(model, optimizer, amp.scaler, apex_weights=amp.weights)
    session = Session(args, world, run, loaders, state)
    if (code := loop.find_batch(session, train_step)) is not None:
        return code  # --find-batch
    loop.resume(session)
    if args.evaluate:
        return epoch.evaluate_only(session, predict)
    training = loop.begin(session)
    while loop.has_next_epoch(training):
        trained = epoch.train(training, train_step)
        evaluated = epoch.evaluate(training, predict, training.val)
        loop.close_epoch(training, trained, evaluated)  # curves, best model, snapshot
    return loop.end(training, predict)


if __name__ == "__main__":
    launch.run_main(main)
