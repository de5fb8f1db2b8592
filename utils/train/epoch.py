"""The steps of one epoch, around a script's own train_step, and what is measured meanwhile."""

import logging
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from utils.data.loaders import MicroBatch
from utils.launch.world import gather
from utils.metrics import Sums, to_metrics
from utils.model import schedules
from utils.run import checkpoint
from utils.run.checkpoint import TrainState
from utils.run.snapshots import BEST, SNAPSHOT
from utils.train import report
from utils.train.session import Session, TrainStep, show_status
from utils.train.stopping import Reason
from utils.train.watch import per_step

log = logging.getLogger(__name__)


def train(session: Session, train_step: TrainStep) -> dict[str, float] | None:
    """Train the rest of the current epoch. Returns its record; None if the run is to stop."""
    if session.args.compile and not session.epochs:
        from utils.model import compiling  # of this option alone

        train_step = compiling.first_step_timed(train_step, session.args, session.world.device)
    meter = Meter(session)
    run_steps(session, train_step, meter)
    return meter.record()


def run_steps(session: Session, train_step: TrainStep, meter: "Meter") -> None:
    """The loop over the steps that are left of the epoch, until the run is to stop."""
    state, stop, steps = session.state, session.stop, session.train.sampler.steps_per_epoch
    state.model.train()
    for batch in meter.timed(session.train.rest(state.epoch, state.step)):
        if batch.opens_step:
            set_learning_rate(state.optimizer, session, state.epoch + state.step / steps)
        seed_dropout(session, *batch.place, session.world.rank)  # so no random state needs saving
        loss, logits = train_step(batch.images, batch.targets, batch.weight, batch.ends_step)
        meter.add(loss, logits, batch)
        if not batch.ends_step:
            continue
        state.step += 1
        meter.print_line()  # every --print-freq steps; the only wait for the device
        if stop.poll():  # a vote of all ranks, which ends them at the same step
            break
        if stop.snapshot_due and state.step < steps and meter.is_finite():
            save_snapshot(session)


def set_learning_rate(optimizer: torch.optim.Optimizer, session: Session, position: float) -> None:
    """Set that of ``position`` (epochs since the start, fractional) in all parameter groups."""
    lr = learning_rate_at(session, position)
    for group in optimizer.param_groups:
        group["lr"] = lr


def compiled(module: nn.Module, args: Any) -> nn.Module:
    """``module`` for the training step: compiled with ``--compile``, else as it is."""
    if not args.compile:
        return module
    from utils.model import compiling

    return compiling.compiled(module, args)


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


def seed_dropout(session: Session, *position: int) -> None:
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


class Meter:
    """What an epoch measures: sums of loss and hits, the parts of a step, the lines printed."""

    def __init__(self, session: Session):
        """The epoch begins."""
        self.session, self.state, self.watch = session, session.state, session.watch
        self.steps, self.first = session.train.sampler.steps_per_epoch, session.state.step
        self.sums = Sums(session.world.device, self.state.sums)
        session.epoch_began = time.monotonic()
        title = f"Epoch {self.state.epoch + 1}/{session.args.epochs}"
        session.run.console.start_bar(title, self.steps, self.first)
        session.train.start_count()
        session.stop.begin_phase()
        self.watch.start_epoch()
        self.began = time.perf_counter()
        self.last = (self.began, self.first, 0.0)  # of the last line: clock, step, seconds waited

    def timed(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """The same batches, with the clock of a step around each."""
        for batch in batches:
            self.watch.timer.begin()
            yield batch
            if batch.ends_step:  # what came after the step itself is no part of it
                self.watch.timer.wait()

    def add(self, loss: Tensor, logits: Tensor, batch: MicroBatch) -> None:
        """Count a micro-batch that has been started. Nothing here waits for the device."""
        self.sums.add(loss * len(batch.labels), logits, batch.labels)
        self.watch.end_step(batch.ends_step)
        if getattr(self.state.scaler, "lost", False):
            self.session.stop.ask(Reason.DIVERGED)
        if self.session.train.bad.too_many:
            self.session.stop.ask(Reason.BAD_FILES)

    def is_finite(self) -> bool:
        """Add up over all ranks, for a snapshot; a loss that is not finite ends the run."""
        self.state.sums = self.sums.total(self.session.world)
        self.state.tick()
        return self._check(self.state.sums)

    def _check(self, sums: list[float]) -> bool:
        if not math.isfinite(sums[0]):
            self.session.stop.ask(Reason.DIVERGED)
        return math.isfinite(sums[0])

    def print_line(self) -> None:
        """Every --print-freq steps, print what has come since the last line and draw its curves.

        Loss and accuracy are those of all ranks, and after a resume they include the steps before
        it; speed and waiting are this process's own, since the resume. The first step of a run or
        of a resumed one has a line as well, which counts for the next line, too.
        """
        session, state, step = self.session, self.state, self.state.step
        session.run.console.move_bar(step)
        is_due = step % session.print_freq == 0 or step == self.steps
        is_first = step == self.first + 1 and not session.epochs
        if not (is_due or is_first):
            return
        sums, before = self.sums.total(session.world), state.printed or [0.0] * 4
        self._check(sums)
        metrics = to_metrics([b - a for a, b in zip(before, sums, strict=True)])
        now = (time.perf_counter(), step, session.train.waited)
        seconds, done, waited = (b - a for a, b in zip(self.last, now, strict=True))
        rate = done * session.global_batch / seconds
        if is_due:
            self.last, state.printed = now, sums
            self._draw(metrics.loss, rate)
        place = f"Epoch {state.epoch + 1}/{session.args.epochs}"
        place += f" step {step:{len(str(self.steps))}}/{self.steps}"
        values = {"loss": metrics.loss, "top-1": metrics.top1, "top-5": metrics.top5}
        values |= {"images/s": rate, "s/step": seconds / done, "waiting %": 100 * waited / seconds}
        session.run.step(place, step, values)

    def _draw(self, loss: float, rate: float) -> None:
        """Per-step curves, and the figures of scripts/ssh/status.py."""
        session, state, times = self.session, self.state, self.watch.timer.recent()
        curves = {"Step/loss": loss, "Step/throughput": rate} | per_step(times, "Step/", "_s")
        session.run.scalars(curves, round(1000 * (state.epoch + state.step / self.steps)))
        status = {"steps": self.steps, "images_per_s": rate}
        if times["steps"]:  # in synchronous training, a process's own parts tell which is slow
            status["data_seconds"] = times["data"] / times["steps"]
            status["compute_seconds"] = (times["own"] or times["compute"]) / times["steps"]
        show_status(session, "training", **status)

    def record(self) -> dict[str, float] | None:
        """The epoch has ended: its record for curves and history; None if it was cut short."""
        session, state, stop = self.session, self.state, self.session.stop
        sampler, bad = session.train.sampler, session.train.bad
        if session.world.device.type == "cuda":
            torch.cuda.synchronize(session.world.device)
        seconds, done = time.perf_counter() - self.began, state.step - self.first
        session.run.console.stop_bar()
        # If evaluation is stopped, the epoch is not closed, and they are needed.
        state.sums = self.sums.total(session.world)
        bad.share(session.world)
        if bad.too_many:
            stop.ask(Reason.BAD_FILES, bad.error())
        if stop.reason:
            return None
        record = {
            **to_metrics(state.sums).tags("train"),
            "Throughput/train": done * session.global_batch / seconds if done else math.nan,
            "Time/train": seconds / done if done else math.nan,
            "Lr": learning_rate_at(session, state.epoch + (self.steps - 1) / self.steps),
            "IO/bad_files": float(len(bad.seen)),
        }
        if sampler.size:
            record["Size/train"] = float(sampler.size)
        if done:
            record |= _input_rates(session, seconds)
        return record | loss_scale(state) | self.watch.end_epoch() | report.memory_tags(session)
