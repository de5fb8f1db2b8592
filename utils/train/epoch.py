"""The steps of one epoch, around a script's own train_step, and the lines printed meanwhile."""

import logging
import math
import time
from typing import Any, NamedTuple

import torch
from torch import nn

from utils.data import mixing
from utils.data.preprocessing import training_sizes
from utils.errors import UserError
from utils.launch.world import from_main, gather, is_sharded
from utils.metrics import Sums, Total, to_metrics
from utils.model import schedules
from utils.run import checkpoint
from utils.run.checkpoint import TrainState
from utils.run.snapshots import BEST, SNAPSHOT
from utils.train import report
from utils.train.session import Session, TrainStep, show_status
from utils.train.stopping import Reason
from utils.train.watch import Times, per_step

log = logging.getLogger(__name__)


def train(session: Session, train_step: TrainStep) -> dict[str, float] | None:
    """Train the rest of the current epoch. Returns its record, or None when asked to stop."""
    args, state, world, run = session.args, session.state, session.world, session.run
    batches, stop, watch = session.train, session.stop, session.watch
    steps, first = batches.sampler.steps_per_epoch, state.step
    session.epoch_began = time.monotonic()
    batches.sampler.start_at(state.epoch, first)
    sums = Sums(world.device, state.sums)
    batches.start_count()
    state.model.train()
    run.console.start_bar(f"Epoch {state.epoch + 1}/{args.epochs}", steps, first)
    watch.start_epoch()
    stop.begin_phase()
    if args.compile and not session.epochs:
        train_step = first_step_timed(train_step, args, world.device)
    began = time.perf_counter()
    lines = Lines(session)
    mix = mixing.build(args, batches.sampler, len(session.loaders.classes))
    for micro, (images, targets) in enumerate(batches if first < steps else ()):
        watch.timer.begin()
        if micro % args.accum_steps == 0:
            lr = learning_rate_at(session, state.epoch + state.step / steps)
            for group in state.optimizer.param_groups:
                group["lr"] = lr
        update = (micro + 1) % args.accum_steps == 0
        place = (state.epoch, state.step, micro % args.accum_steps)
        _seed_dropout(session, *place, world.rank)
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
            elif not from_main(lambda: session.snapshots.busy, world):
                save_snapshot(session)  # on a slow disk: the next time
        watch.timer.wait()
    lines.flush()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    seconds, done = time.perf_counter() - began, state.step - first
    run.console.stop_bar()
    # If evaluation is stopped, the epoch is not closed, and they are needed.
    state.sums = sums.total(world)
    batches.bad.share(world)
    if batches.bad.too_many:
        session.fault, stop.reason = batches.bad.error(), stop.reason or Reason.BAD_FILES
    if stop.reason:
        return None
    record = {
        **to_metrics(state.sums).tags("train"),
        "Throughput/train": done * session.global_batch / seconds if done else math.nan,
        "Time/train": seconds / done if done else math.nan,
        "Lr": learning_rate_at(session, state.epoch + (steps - 1) / steps),
        "IO/bad_files": float(len(batches.bad.seen)),
    }
    if batches.sampler.size:
        record["Size/train"] = float(batches.sampler.size)
    if done:
        record |= _input_rates(session, seconds)
    return record | loss_scale(state) | watch.end_epoch() | report.memory_tags(session)


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
    return {f"Amp/{key}": float(scaler[key]) for key in ("scale", "skipped") if key in scaler}


def save_snapshot(session: Session, is_best: bool = False) -> None:
    """Begin to write ``snapshot.pt``, and ``best.pt`` if this is the best model; in rank 0.

    To be called in all processes: each may have a part of the model, or of the exchange of
    gradients.
    """
    began, state, main = time.perf_counter(), session.state, session.world.is_main
    content = checkpoint.snapshot_of(state, session.run.options, session.loaders.classes, main)
    collecting = time.perf_counter() - began
    if session.snapshots is None:
        return
    files = {SNAPSHOT: content}
    if is_best:
        # First, so that no snapshot ever speaks of a best model that is not there.
        files = {BEST: checkpoint.best_of(state, session.args.arch, content), **files}
    session.snapshots.save(files, collecting)


def _seed_dropout(session: Session, *position: int) -> None:
    """Seed randomness inside the model by the position: no random state needs saving.

    torch.manual_seed asks every kind of device first: a tenth of a millisecond or more where one is
    not initialised.
    """
    key = session.args.seed
    for number in position:
        key = (key * 1_000_003 + number) % 2**63
    torch.default_generator.manual_seed(key)
    if session.world.device.type == "cuda":
        torch.cuda.manual_seed_all(key)


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


# ---- --compile


def compiled(module: nn.Module, args: Any) -> nn.Module:
    """``module`` for the training step: compiled with ``--compile``, sharing its parameters.

    Training batches have one size, and evaluation, whose last batch is smaller, calls the module
    itself: nothing is compiled twice. ``--progressive`` compiles once for each image size: kernels
    for any size would be slower in every step. Raises: `UserError` where compiling is impossible.
    """
    if not args.compile:
        return module
    if isinstance(module, nn.DataParallel) or is_sharded(module):
        what = "sharded models" if is_sharded(module) else "DataParallel"
        raise UserError(f"--compile does not support {what}: use imagenet_ddp.py", alike=True)
    # Beyond this limit, steps would no longer be compiled.
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, len(set(training_sizes(args))))
    mode = None if args.compile == "default" else args.compile
    return torch.compile(module, mode=mode, dynamic=False)


def first_step_timed(train_step: Any, args: Any, device: torch.device) -> Any:
    """``train_step``, whose first call, which compiles, is timed.

    That call raises `UserError` where torch.compile fails.
    """
    from torch._dynamo.exc import TorchDynamoException  # seconds to import

    is_compiled = False

    def step(*batch: Any) -> Any:
        nonlocal is_compiled
        if is_compiled:
            return train_step(*batch)
        is_compiled, began = True, time.perf_counter()
        try:
            result = train_step(*batch)
        except TorchDynamoException as fault:
            text = str(fault).strip().splitlines()
            raise UserError(
                f"--compile {args.compile} does not work here ({text[0] if text else fault!r}): "
                "install what is missing, or leave it out",
                alike=True,
            ) from fault
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
        log.info(f"--compile {args.compile}: the first step took {seconds:.1f} s, to compile it")
        return result

    return step


# ---- printed lines


class _Line(NamedTuple):
    """A line that is due: what is known when its step has been started.

    ``at`` is a mark of the step timer's clock, ``step`` one of the epoch, ``waited`` the seconds
    spent waiting for data. ``total`` is kept until the ranks have surely added it up.
    """

    at: Any
    step: int
    waited: float = 0.0
    total: Total | None = None
    times: Times | None = None  # of the steps since the last line


class Lines:
    """An epoch's printed lines; each shows what has come since the last one.

    On a GPU a line is printed some steps later than it is due, when its numbers have come to the
    host: no step waits for the device.
    """

    def __init__(self, session: Session):
        self.session, self.clock = session, session.watch.timer.clock
        self.last = _Line(self.clock.mark(), session.state.step)
        self.due: _Line | None = None

    def after_step(self, sums: Sums) -> None:
        """To be called after every step, in all ranks: they add up what a line shows."""
        session = self.session
        step, steps = session.state.step, session.train.sampler.steps_per_epoch
        if step % session.print_freq == 0 or step == steps:
            self.flush()  # of an older line, if its numbers are that late
            at = self.clock.mark()  # before the sums: the device has passed it when they have come
            total, times = sums.begin_total(session.world), session.watch.timer.recent()
            self.due = _Line(at, step, session.train.waited, total, times)
        if self.due is not None and (step == steps or self.due.total.ready()):
            self.flush()

    def flush(self) -> None:
        """Print the line that is due, if there is one, and draw its per-step curves. Waits for its
        numbers.

        Loss and accuracy are those of all ranks, and after a resume they include the steps before
        it; speed and waiting are this process's own, since the resume. A loss that is not finite
        ends the run.
        """
        if self.due is None:
            return
        line, last, session, state = self.due, self.last, self.session, self.session.state
        self.due, self.last = None, self.due
        sums = line.total.read()
        if not math.isfinite(sums[0]):
            session.stop.ask(Reason.DIVERGED)
        before, state.printed = state.printed or [0.0] * len(sums), sums
        metrics = to_metrics([b - a for a, b in zip(before, sums, strict=True)])
        seconds, steps = self.clock.seconds(last.at, line.at), line.step - last.step
        of_epoch, times = session.train.sampler.steps_per_epoch, line.times
        rate = steps * session.global_batch / seconds
        curves = {"Step/loss": metrics.loss, "Step/throughput": rate}
        curves |= per_step(times, "Step/", "_s")
        session.run.scalars(curves, round(1000 * (state.epoch + line.step / of_epoch)))
        status = {"steps": of_epoch, "images_per_s": rate}
        if times["steps"]:  # in synchronous training, a process's own parts tell which is slow
            status["data_seconds"] = times["data"] / times["steps"]
            status["compute_seconds"] = (times["own"] or times["compute"]) / times["steps"]
        show_status(session, "training", **status)
        place = f"Epoch {state.epoch + 1}/{session.args.epochs}"
        place += f" step {line.step:{len(str(of_epoch))}}/{of_epoch}"
        values = {
            "loss": metrics.loss,
            "top-1": metrics.top1,
            "top-5": metrics.top5,
            "images/s": rate,
            "s/step": seconds / steps,
            "waiting %": 100 * (line.waited - last.waited) / seconds,
        }
        session.run.step(place, line.step, values)
