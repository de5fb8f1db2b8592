#!/usr/bin/env python3
"""Train with peers that join and leave at any time, even over the internet. Experimental.

    python scripts/examples/hivemind_train.py -a resnet50 -b 32 --target-batch 2048 DATA
    python scripts/examples/hivemind_train.py -a resnet50 -b 32 --target-batch 2048 DATA \\
        --peers /ip4/203.0.113.5/tcp/4001/p2p/12D3KooW...    # printed by the first peer

`diff -u imagenet_nd.py scripts/examples/hivemind_train.py` shows the necessary changes. No process
has a rank. Each peer adds up gradients of its own images, at its own speed. When all peers together
have seen --target-batch images, they average their gradients and take a step. A peer that joins
late gets weights and optimiser state from the others. A lost peer does not stop the others.

Two promises of the other scripts do not hold here. The order of samples is not fixed: each peer
shuffles for itself, and the images of a step depend on the peers' speeds. So a run cannot be
repeated, and resume is not exact. The first peer evaluates, and its evaluation is exact.

**Anyone who can reach a peer's port can take part and send arbitrary gradients.** Needs `pip
install hivemind`; all peers need the same model, --target-batch, recipe and --seed.
"""

import itertools
import logging
import os
import secrets
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from utils.start import launch

launch.prepare()  # before torch is imported, which takes seconds

import torch
from torch import Tensor, nn

from utils import epoch, loop, options
from utils.data.loaders import build_loaders
from utils.metrics import Sums, means
from utils.model import amp, models, optim
from utils.model.options import add_amp
from utils.run.run_directory import Run
from utils.run.snapshots import TrainState
from utils.session import Session
from utils.start.errors import UserError
from utils.start.option_types import Options, non_negative, positive
from utils.start.orphans import die_with_parent
from utils.start.world import World, single_process

if TYPE_CHECKING:
    import hivemind

log = logging.getLogger("utils.beyond")  # shown and saved like the log lines of utils

AVERAGE_EVERY = 10  # steps between averages of weights, which differ after a missed step


class SwarmOptions(Options):
    """Those of imagenet_nd.py and of this example."""

    swarm: str
    peers: str | None
    listen: str
    target_batch: int  # `main` sets it, if it is omitted
    matchmaking: float


def main() -> int:
    parser = options.build_parser(__doc__, batch="images per step of this peer")
    add_amp(parser)
    add = parser.add_argument_group("peers").add_argument
    add("--swarm", default="imagenet", metavar="NAME", help="name of the group of peers")
    add("--peers", metavar="A,B,...", help="addresses of running peers; omit it for the first peer")
    text = "address at which this peer listens; /ip4/0.0.0.0/tcp/4001 for a fixed port"
    add("--listen", default="/ip4/0.0.0.0/tcp/0", metavar="ADDRESS", help=text)
    add("--target-batch", type=positive, metavar="N", help="images per step of all; default: -b")
    text = "time to find other peers before a step: 1 to 5 on one network, else 10 to 15"
    add("--matchmaking", type=non_negative, default=10.0, metavar="SECONDS", help=text)
    args = SwarmOptions(**vars(options.parse(parser)))
    # Hivemind takes tensors for vectors (view(-1)), which NHWC weights are not.
    args = args.replaced(channels_last=False, memory_format=torch.contiguous_format)
    target = args.target_batch or args.batch_size
    accum_steps, rest = divmod(target, args.batch_size)  # one process would accumulate so often
    if rest:
        raise UserError(f"--target-batch {target} is not a multiple of -b")
    if not find_spec("hivemind"):
        raise UserError(f"Hivemind is not installed for {sys.executable}: pip install hivemind")
    return train(args.replaced(target_batch=target, accum_steps=accum_steps), single_process())


def train(args: SwarmOptions, world: World) -> int:
    """Everything from the options to the last epoch. Returns the exit code."""
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "WARNING")
    import hivemind

    device = world.device
    torch.manual_seed(args.seed)

    amp_dtype = amp.autocast_dtype(args, world)

    # ---- data: all of DATA/train, shuffled by this peer; each image of DATA/val once
    own_order = args.replaced(seed=secrets.randbelow(2**31))
    loaders = build_loaders(own_order, world, dtype=amp_dtype or torch.float32)

    # ---- model
    model = models.build(args, loaders.classes)
    model = model.to(memory_format=args.memory_format).to(device)

    # ---- optimiser and mixed precision
    optimizer = optim.build(args, model)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    scaler = torch.amp.GradScaler(device.type, enabled=amp_dtype is torch.float16)

    # ---- resume before joining the other peers; Hivemind then uses the newest state
    run = Run(args, world, mode="hivemind")
    state = TrainState(model, optimizer, scaler)
    session = Session(args, world, run, loaders, state)
    loop.resume(session)
    steps = session.train.sampler.steps_per_epoch  # a step: --target-batch images of all peers

    # ---- peers: a distributed hash table (DHT), and an optimiser that steps with all of them
    os.register_at_fork(after_in_child=die_with_parent)  # Hivemind's own processes
    dht = join(args)
    swarm = hivemind.Optimizer(
        dht=dht,
        run_id=args.swarm,
        target_batch_size=args.target_batch,
        batch_size_per_step=args.batch_size,
        optimizer=optimizer,
        matchmaking_time=args.matchmaking,
        averaging_timeout=max(4 * args.matchmaking, 10.0),
        averager_opts={"request_timeout": min(3.0, args.matchmaking / 2)},
        delay_state_averaging=False,  # otherwise late averages may undo a step
        average_state_every=AVERAGE_EVERY,
        extra_tensors=[one for one in model.buffers() if one.is_floating_point()],
    )
    swarm.state_averager.local_epoch = state.epoch * steps + state.step  # Hivemind's epoch: a step

    # ---- the training step
    def train_step(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """One batch of this peer: images float [n, 3, size, size], targets int64 [n] -> loss,
        logits. Weights change when all peers together have seen enough images."""
        for group in optimizer.param_groups:
            group["lr"] = epoch.learning_rate_at(session, swarm.local_epoch / steps)
        with torch.autocast(device.type, amp_dtype, enabled=amp_dtype is not None):
            logits = model(images)
            loss = criterion(logits, targets)
        scaler.scale(loss).backward()
        if args.clip_grad:
            scaler.unscale_(swarm)
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        scaler.step(swarm, batch_size=len(targets))
        scaler.update()
        swarm.zero_grad()
        return loss, logits

    def predict(images: Tensor) -> Tensor:
        """Logits for evaluation."""
        with torch.autocast(device.type, amp_dtype, enabled=amp_dtype is not None):
            return model(images)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of this peer's own order, epoch after epoch."""
        for number in itertools.count():
            session.train.sampler.start_at(number, 0)
            yield from session.train

    def peers() -> int:
        return max(1, swarm.tracker.global_progress.num_peers)

    # ---- train; an epoch ends when all peers together have seen its number of images
    training = loop.begin(session)
    log.info("experimental: no order of samples is fixed, and resume is not exact")
    for address in dht.get_visible_maddrs():
        log.info(f"others join with --peers {address}")
    if not args.peers:
        log.info("this is the first peer of a swarm; --peers would join an existing swarm")
    own_batches, own = batches(), 0
    try:
        while loop.has_next_epoch(training):
            began, sums, first = time.monotonic(), Sums(device), swarm.local_epoch
            state.begin_epoch()
            model.train()
            while swarm.local_epoch < (state.epoch + 1) * steps and not training.stop.poll():
                before, (images, targets) = swarm.local_epoch, next(own_batches)
                loss, logits = train_step(images, targets)
                sums.add(loss * len(targets), logits, targets)
                own += len(targets)
                if before != swarm.local_epoch and swarm.local_epoch % args.print_freq == 0:
                    now, step = divmod(swarm.local_epoch - 1, steps)
                    seen = swarm.local_epoch * args.target_batch
                    log.info(
                        f"Epoch {now + 1}/{args.epochs} step {step + 1}/{steps}  peers {peers()}  "
                        f"images of all {seen}"
                    )
            if training.stop.reason:
                state.step = swarm.local_epoch - state.epoch * steps
                loop.close_epoch(training, None, None)
                break
            state.epoch, state.step = (
                swarm.local_epoch // steps - 1,
                steps,
            )  # a late peer skips some
            done = (swarm.local_epoch - first) * args.target_batch
            trained = {
                **means(sums.total(world), "train"),  # on this peer's images
                "Throughput/train": done / (time.monotonic() - began),  # of all peers
                "Lr": optimizer.param_groups[0]["lr"],
                **epoch.loss_scale(state),
            }
            # Hivemind begins a step when it expects to reach the target, so some have fewer images.
            swarm_tags = {"samples": swarm.local_epoch * args.target_batch, "peers": peers()}
            swarm_tags |= {"own_samples": own}
            run.scalars({f"Swarm/{x}": float(y) for x, y in swarm_tags.items()}, state.epoch + 1)
            if not args.peers:
                evaluated = epoch.evaluate(training, predict, session.val)
                loop.close_epoch(training, trained, evaluated)
            else:
                state.epoch, state.step = state.epoch + 1, 0
                state.tick()
                epoch.save_snapshot(training)
    finally:
        swarm.shutdown()
        dht.shutdown()
    return loop.end(training, predict)


def join(args: SwarmOptions) -> "hivemind.DHT":
    """Join the hash table of all peers. Raises: `UserError` if no peer answers."""
    import hivemind

    others = args.peers.split(",") if args.peers else None
    try:
        return hivemind.DHT(others, host_maddrs=[args.listen], start=True)
    except Exception as error:  # Hivemind's daemon raises half a dozen types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"cannot join the peers at {args.peers or '-'} from --listen {args.listen} ({reason}): "
            "are they running, and are these the addresses that they printed?"
        ) from None


if __name__ == "__main__":
    launch.run_main(main)
