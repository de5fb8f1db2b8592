#!/usr/bin/env python3
"""Train an ImageNet classifier with one process on one device.

    python imagenet_nd.py -a resnet50 DATA
    python imagenet_nd.py -a alexnet --lr 0.01 DATA
    python imagenet_nd.py -a resnet50 --resume runs/NAME/snapshot.pt DATA
    python imagenet_nd.py -a resnet50 --resume runs/NAME/best.pt -e DATA

The other scripts are based on this plain loop. To see what several processes
change: `diff -u imagenet_nd.py imagenet_ddp.py`. It uses the first GPU, or the
CPU if there is none.
"""

from utils.start import launch

launch.prepare(__name__)  # end with the launcher; report a failed import in one line

from utils import options
from utils.model.options import add_amp
from utils.start.option_types import Options, Parser


def parser() -> Parser:
    """The command line of this script."""
    parser = options.build_parser(__doc__, batch="images per step")
    add_amp(parser)
    return parser


if __name__ == "__main__":
    options.check(parser())  # before torch is imported, which takes seconds

import torch
from torch import Tensor, nn

from utils import epoch, loop
from utils.data.loaders import build_loaders
from utils.model import amp, compiling, models, optim
from utils.run.run_directory import Run
from utils.run.snapshots import TrainState
from utils.session import Session
from utils.start.world import World, single_process


def main() -> int:
    args = options.parse(parser())
    return train(args, single_process())


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
        """Logits for evaluation."""
        with torch.autocast(device.type, amp_dtype, enabled=amp_dtype is not None):
            return model(images)

    # ---- resume, then train and evaluate, epoch by epoch
    run = Run(args, world, mode="nd")
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
