#!/usr/bin/env python3
"""Train an ImageNet classifier with a shard of the model in each process (FSDP2).

One process per GPU. On one node:

    python imagenet_fsdp.py -a vit_b_32 DATA
    python imagenet_fsdp.py -a vit_b_32 --reshard none DATA

On several nodes, start it on each of them with its own rank, by hand:

    python imagenet_fsdp.py -a vit_b_32 --dist-url tcp://MASTER_IP:8888 \\
        --nodes 2 --node-rank 0 DATA

or with torchrun:

    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=4 \\
        --master_addr=IP --master_port=8888 \\
        imagenet_fsdp.py -a vit_b_32 --reshard node DATA

Each process keeps a shard of every weight, gradient and momentum, and trains
on its share of the global batch. Weights of a block are gathered just before
it computes; its gradients are scattered after.
"""

from utils.start import launch

launch.prepare(__name__)  # end with the launcher; report a failed import in one line

from utils import options
from utils.model.options import add_amp, add_sharding
from utils.start.option_types import Options, Parser


def parser() -> Parser:
    """The command line of this script."""
    parser = options.build_parser(__doc__, batch="images per step and process (per GPU)")
    add_amp(parser)
    add_sharding(parser)
    launch.add_options(parser)
    return parser


if __name__ == "__main__":
    options.check(parser())  # before torch is imported, which takes seconds

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from utils import epoch, loop
from utils.data.loaders import build_loaders
from utils.model import amp, blocks, compiling, fsdp, models, optim
from utils.run.run_directory import Run
from utils.run.snapshots import TrainState
from utils.session import Session
from utils.start.world import World, copy_from_rank0, process_group


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

    # ---- fully sharded data parallelism: processes start with equal weights and keep a shard each
    copy_from_rank0(model, world)
    if args.sync_bn:
        model = blocks.with_activations(nn.SyncBatchNorm.convert_sync_batchnorm(model))
    mesh = fsdp.mesh(args, world)
    for part, policy in fsdp.parts(model, amp_dtype):  # each block, then the rest of the model
        fully_shard(
            part,  # also moved to the device: no GPU ever holds the whole model
            mesh=mesh,
            reshard_after_forward=False if args.reshard == "none" else None,
            mp_policy=policy,
        )
    sharded = model
    assert isinstance(sharded, FSDPModule)  # `fully_shard` has changed its class

    # ---- optimiser and mixed precision
    optimizer = optim.build(args, model)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    scaler = torch.amp.GradScaler(device.type, enabled=amp_dtype is torch.float16)

    forward = compiling.compiled(model, args)  # unchanged without --compile

    # ---- the training step
    def train_step(
        images: Tensor, targets: Tensor, weight: float, update: bool
    ) -> tuple[Tensor, Tensor]:
        """One micro-batch: images float [n, 3, size, size], targets int64 [n] -> loss, logits.

        Targets of mixed images are float [n, classes]. ``weight`` scales its mean loss: gradients
        averaged over ranks and summed over micro-batches are then those of the global batch.
        ``update`` ends the step: the weights change.
        """
        # Only the last micro-batch of a step scatters the gradients.
        sharded.set_requires_gradient_sync(update)
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
        """Logits for evaluation. All ranks must call it equally often, as it gathers weights."""
        with torch.autocast(device.type, amp_dtype, enabled=amp_dtype is not None):
            return model(images)

    # ---- resume, then train and evaluate, epoch by epoch
    run = Run(args, world, mode="fsdp")
    state = TrainState(model, optimizer, scaler)
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
