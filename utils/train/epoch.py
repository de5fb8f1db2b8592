"""The steps of one epoch, around a script's own train_step."""

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from utils.data import mixing
from utils.launch.world import from_main, gather
from utils.metrics import Sums, to_metrics
from utils.model import schedules
from utils.run import checkpoint
from utils.run.checkpoint import TrainState
from utils.run.snapshots import BEST, SNAPSHOT
from utils.train import compiling, report
from utils.train.progress import Lines
from utils.train.session import Session, TrainStep
from utils.train.stopping import Reason

log = logging.getLogger(__name__)


def train(session: Session, train_step: TrainStep) -> dict[str, float] | None:
    """Train the rest of the current epoch. Returns its record, or None when asked to stop."""
    args, state, world, run = session.args, session.state, session.world, session.run
    batches, stop, watch = session.train, session.stop, session.watch
    steps, first = batches.sampler.steps_per_epoch, state.step
    session.epoch_began = time.monotonic()
    batches.sampler.start_at(state.epoch, first)
    sums, seed_dropout = Sums(world.device, state.sums), _dropout_seeder(session)
    batches.start_count()
    state.model.train()
    run.console.start_bar(f"Epoch {state.epoch + 1}/{args.epochs}", steps, first)
    watch.start_epoch()
    stop.begin_phase()
    if args.compile and not session.epochs:
        train_step = compiling.first_step_timed(train_step, args, world.device)
    if not first:
        state.printed = None
    began = time.perf_counter()
    lines = Lines(session)
    mix = mixing.build(args, batches.sampler, len(session.loaders.classes))
    for micro, (images, targets) in enumerate(batches if first < steps else ()):
        watch.timer.begin()
        if micro % args.accum_steps == 0:
            lr = learning_rate_at(session, state.epoch + state.step / steps)
            for group in state.optimizer.param_groups:
                group["lr"] = lr
            if state.comm is not None:
                _begin_exchange(session, steps)
        update = (micro + 1) % args.accum_steps == 0
        place = (state.epoch, state.step, micro % args.accum_steps)
        seed_dropout(*place, world.rank)
        weight = len(targets) * world.size / session.global_batch
        shown, wanted, labels = mix(images, targets, place)
        loss, logits = train_step(shown, wanted, weight, update)
        sums.add(loss * len(labels), logits, labels)
        watch.end_step(update)
        if not update:
            continue
        state.step += 1
        if state.ema is not None:
            state.ema.after_step()
        lines.after_step(sums)
        if getattr(state.scaler, "lost", False):
            stop.ask(Reason.DIVERGED)
        if batches.bad.too_many:
            stop.ask(Reason.BAD_FILES)
        if stop.poll():
            break
        if stop.snapshot_due and state.step < steps:
            lines.flush()
            state.sums = sums.total(world)  # of all ranks
            state.tick()
            if not math.isfinite(state.sums[0]):  # no line has shown it yet
                stop.ask(Reason.DIVERGED)
            elif not _busy(session):
                save_snapshot(session)  # on a slow disk: the next time
        watch.timer.wait()
    lines.flush()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    seconds, done = time.perf_counter() - began, state.step - first
    run.console.stop_bar()
    total = sums.total(world)
    batches.bad.share(world)
    state.sums = total  # if evaluation is stopped, the epoch is not closed, and they are needed
    if batches.bad.too_many:
        stop.reason = stop.reason or Reason.BAD_FILES
    if stop.reason:
        return None
    state.printed = None
    metrics = to_metrics(total)
    return {
        "Loss/train": metrics.loss,
        "Top1/train": metrics.top1,
        "Top5/train": metrics.top5,
        "Throughput/train": done * session.global_batch / seconds if done else math.nan,
        "Time/train": seconds / done if done else math.nan,
        "Lr": learning_rate_at(session, state.epoch + (steps - 1) / steps),
        **({"Size/train": float(size)} if (size := batches.sampler.size) else {}),
        **loss_scale(state),
        "IO/bad_files": float(len(batches.bad.seen)),
        **(_input_rates(session, seconds) if done else {}),
        **watch.end_epoch(),
        **report.memory_tags(session),
    }


def learning_rate_at(session: Session, position: float) -> float:
    """Learning rate at ``position`` (epochs since the start, fractional)."""
    args = session.args
    return schedules.learning_rate(
        position,
        lr=schedules.scale_lr(args.lr, session.global_batch, args.lr_scaling),
        epochs=args.epochs,
        warmup=args.warmup_epochs,
        schedule=args.lr_schedule,
    )


def loss_scale(state: TrainState) -> dict[str, float]:
    """The loss scale and, where they are counted, the steps skipped since the run began."""
    scaler = state.scaler.state_dict()
    names = {"scale": "Amp/scale", "skipped": "Amp/skipped"}
    return {names[key]: float(value) for key, value in scaler.items() if key in names}


def why_diverged(session: Session) -> str:
    """The error message for a loss that is not finite, or a loss scale that keeps falling."""
    state = session.state
    where = f"in epoch {state.epoch + 1}, step {state.step}"
    if getattr(state.scaler, "lost", False):
        scale = loss_scale(state)["Amp/scale"]
        fault = f"gradients overflow without end {where}, now at a loss scale of {scale:.3g}"
    else:
        fault = f"the loss is nan or infinite {where}"
    return f"{fault}: lower --lr, add --warmup-epochs or --clip-grad; the last snapshot is intact"


def save_snapshot(session: Session, is_best: bool = False) -> None:
    """Begin to write ``snapshot.pt``, and ``best.pt`` if this is the best model; in rank 0.

    To be called in all processes: each may have a part of the model, or of the exchange of
    gradients.
    """
    state, classes = session.state, session.loaders.classes
    comm = state.comm.collect() if state.comm is not None else None
    if session.snapshots is None and not state.sharded:
        return
    weights = state.full_weights()
    files = {SNAPSHOT: checkpoint.snapshot_of(state, session.run.options, classes, weights, comm)}
    if is_best:
        # First, so that no snapshot ever speaks of a best model that is not there.
        files = {BEST: checkpoint.best_of(state, session.args.arch, classes, weights), **files}
    if session.snapshots is None:
        from utils.comm import fsdp

        fsdp.gather_for_main(files)
    else:
        session.snapshots.save(files)


def _busy(session: Session) -> bool:
    """Whether the last snapshot is still being written; where it matters, the same in all ranks."""
    state = session.state
    if state.sharded or (state.comm is not None and state.comm.has_states):
        return from_main(lambda: session.snapshots.busy, session.world)
    return session.snapshots is not None and session.snapshots.busy


def _begin_exchange(session: Session, steps: int) -> None:
    """Tell the gradient exchange which step begins; log the method that --comm auto has chosen."""
    state = session.state
    why = state.comm.begin_step(state.epoch, state.step, steps, session.args.epochs)
    if why:
        log.info(why)
        session.run.describe(report.facts(session))


def _dropout_seeder(session: Session) -> Callable[..., None]:
    """A function that seeds randomness inside the model by the position (integers): no random state
    needs saving.

    torch.manual_seed asks every kind of device first: a tenth of a millisecond or more where one is
    not initialised.
    """
    seeders: list[Callable[[int], Any]] = [torch.default_generator.manual_seed]
    if session.world.device.type == "cuda":
        all_gpus = session.run.mode == "dp"
        seeders.append(torch.cuda.manual_seed_all if all_gpus else torch.cuda.manual_seed)

    def seed(*position: int) -> None:
        key = session.args.seed
        for number in position:
            key = (key * 1_000_003 + number) % 2**63
        for seeder in seeders:
            seeder(key)

    return seed


def _input_rates(session: Session, seconds: float) -> dict[str, float]:
    """Rates over ``seconds`` of training: reading of all ranks, waiting of the slowest."""
    train = session.train
    mine = (train.waited, train.reading.bytes, train.reading.files)
    waited, size, files = zip(*gather(mine, session.world), strict=True)
    return {
        # One rank that waits for its data makes all others wait for its gradients.
        "IO/wait_share": min(1.0, max(waited) / seconds),
        "IO/read_mb_s": sum(size) / seconds / 1e6,
        "IO/files_s": sum(files) / seconds,
    }
