#!/usr/bin/env python3
"""Train an ImageNet classifier with one process per GPU, on any number of nodes.

DistributedDataParallel with native mixed precision. On one node:

    python imagenet_ddp.py -a resnet50 DATA
    python imagenet_ddp.py -n 1 -g 1 -nr 0 --epochs 2 DATA

On several nodes, start it on each of them with its own rank, by hand:

    python imagenet_ddp.py -a resnet50 --dist-url tcp://MASTER_IP:8888 \\
        --nodes 2 --node-rank 0 DATA
    MASTER_ADDR=IP MASTER_PORT=8888 WORLD_SIZE=2 NODE_RANK=0 \\
        python imagenet_ddp.py DATA

or with torchrun:

    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=1 \\
        --master_addr=IP --master_port=8888 imagenet_ddp.py -a resnet50 DATA

Each process trains a replica of the model on its share of the global batch.
DDP averages the gradients while backward still computes.
"""

from contextlib import nullcontext

from utils.start import launch

launch.prepare(__name__)  # end with the launcher; report a failed import in one line

from utils import options
from utils.model.options import add_amp, add_comm
from utils.start.option_types import Options, Parser


def parser() -> Parser:
    """The command line of this script."""
    parser = options.build_parser(__doc__, batch="images per step and process (per GPU)")
    add_amp(parser)
    add_comm(parser)
    launch.add_options(parser)
    return parser


if __name__ == "__main__":
    options.check(parser())  # before torch is imported, which takes seconds

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from utils import epoch, loop
from utils.data.loaders import build_loaders
from utils.model import amp, blocks, compiling, compress, models, optim
from utils.run.run_directory import Run
from utils.run.snapshots import TrainState
from utils.session import Session
from utils.start.world import World, form_buckets, process_group


def main() -> int:
    args = options.parse(parser())
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

    amp_dtype = amp.autocast_dtype(args, world)

    # ---- data: the order of images is a function of seed and epoch (utils/data/samplers.py).
    # Each rank takes its share of every global batch of DATA/train. Each image of DATA/val is
    # evaluated once.
    loaders = build_loaders(args, world, dtype=amp_dtype or torch.float32)

    # ---- model
    model = models.build(args, loaders.classes)
    model = model.to(memory_format=args.memory_format).to(device)

    # ---- distributed data parallelism: replicas start with equal weights and get equal gradients
    if args.sync_bn:
        model = blocks.with_activations(nn.SyncBatchNorm.convert_sync_batchnorm(model))
    replica = DistributedDataParallel(
        model,
        device_ids=world.device_ids,
        gradient_as_bucket_view=True,
    )
    replica.broadcast_buffers = False  # evaluation copies rank 0's buffers

    # ---- optimiser and mixed precision
    optimizer = optim.build(args, model)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    scaler = torch.amp.GradScaler(device.type, enabled=amp_dtype is torch.float16)

    # ---- gradient compression
    form_buckets(replica, world, args)
    comm = compress.exchange(replica, args, world)  # --comm; None: DDP's all-reduce

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
            with torch.autocast(device.type, amp_dtype, enabled=amp_dtype is not None):
                logits = forward(images)
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
        """Logits for evaluation, from the bare model: ranks may have unequal numbers of batches."""
        with torch.autocast(device.type, amp_dtype, enabled=amp_dtype is not None):
            return model(images)

    # ---- resume, then train and evaluate, epoch by epoch
    run = Run(args, world, mode="ddp")
    state = TrainState(model, optimizer, scaler, comm=comm)
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
