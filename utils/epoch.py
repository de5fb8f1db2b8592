"""An epoch: the training steps, which call a script's own train_step, and the evaluation."""

import hashlib
import logging
import math
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils import grid, report
from utils.data.batches import EvalBatches, MicroBatch, TrainBatches
from utils.metrics import UNREADABLE, Sums, means
from utils.model import compiling, optim
from utils.monitor import PARTS
from utils.run import audit, snapshots
from utils.run.console import IN_BAR, loss_text
from utils.run.snapshots import BEST, SNAPSHOT, TrainState
from utils.run.stopping import Reason
from utils.session import Predict, Session, Training, TrainStep
from utils.start.atomic import read_checkpoint
from utils.start.progress import TRAINING, during
from utils.start.world import (
    World,
    broadcast_from_rank0,
    copy_from_rank0,
    local,
    reshard,
)

log = logging.getLogger(__name__)

# ---- the steps of an epoch


def train(session: Training, train_step: TrainStep) -> dict[str, float] | None:
    """Train the rest of the current epoch. Returns its record; None if the run is to stop."""
    meter, state, world = Meter(session), session.state, session.world
    batches = session.train.rest(state.epoch, state.step)
    if meter.is_first and world.is_main:
        batches = grid.with_first_drawn(batches, session)
    if meter.is_first and session.args.compile:
        train_step = compiling.first_step_timed(train_step, session.args, world.device)
    run_steps(session, train_step, meter, batches)
    return meter.record()


@during(TRAINING)
def run_steps(
    session: Training, train_step: TrainStep, meter: "Meter", batches: Iterator[MicroBatch]
) -> None:
    """Run a step for each of ``batches``, the rest of the epoch, or until the run is to stop."""
    state, stop, steps = session.state, session.stop, session.train.sampler.steps_per_epoch
    state.model.train()
    for batch in meter.timed(batches):
        if batch.opens_step:
            lr = learning_rate_at(session, state.epoch + state.step / steps)
            for group in state.optimizer.param_groups:
                group["lr"] = lr
        # So no random state needs saving.
        seed_dropout(session, *batch.position, session.world.data_parallel_rank)
        loss, logits = train_step(batch.images, batch.targets, batch.weight, batch.ends_step)
        meter.add(loss, logits, batch)
        if session.audit:
            session.audit.add(batch.taken)
        if not batch.ends_step:
            continue
        state.step += 1
        if session.audit and state.step % audit.STEPS_BETWEEN_CHECKS == 0:
            compare_weights(session)
        meter.print_line()  # every --print-freq steps; the only wait for the device
        if stop.poll():  # all ranks vote, so that all stop at the same step
            break
        if stop.snapshot_due and state.step < steps and meter.is_finite():
            save_snapshot(session)


def learning_rate_at(session: Session, position: float) -> float:
    """Learning rate at ``position`` (epochs since the start, fractional)."""
    args = session.args
    return optim.learning_rate(
        position,
        lr=optim.scale_lr(args.lr, session.global_batch, args.lr_scaling),
        epochs=args.epochs,
        warmup=args.warmup_epochs,
        schedule=args.lr_schedule,
    )


def loss_scale(state: TrainState) -> dict[str, float]:
    """The loss scale and, if the scaler counts them, the steps skipped since the run began."""
    scaler = state.scaler.state_dict()
    return {f"Amp/{key}": float(scaler[key]) for key in ("scale", "skipped") if key in scaler}


@during("saving a snapshot")
def save_snapshot(session: Training, is_best: bool = False) -> None:
    """Begin to write ``snapshot.pt`` in rank 0, and ``best.pt`` if this is the best model.

    All processes must call it: each may have a shard of the model, or state of the gradient
    exchange.
    """
    began, state, main = time.perf_counter(), session.state, session.world.is_main
    if session.audit:
        compare_weights(session)
        taken = session.world.gather(session.audit.move_to(state.epoch, state.step))
        session.audit.write_taken(taken[: session.world.data_parallel_size])
    content = snapshots.snapshot_of(state, session.run.options, session.loaders.classes, main)
    collecting = time.perf_counter() - began
    if session.snapshots is None:
        return
    files = {SNAPSHOT: content}
    if is_best:
        # First, so that no snapshot refers to a best model that is not on disk.
        files = {BEST: snapshots.best_of(state, session.args.arch, content), **files}
    session.snapshots.save(files, collecting)


def compare_weights(session: Training) -> None:
    """``--audit``: raise `UserError` in all ranks if one has other weights. Shards all differ."""
    state, world = session.state, session.world
    if session.audit is None or state.sharded:
        return
    checksums = world.gather(weights_checksum(state.model))
    audit.check_equal(checksums, state.epoch, state.step)
    position = {"epoch": state.epoch, "step": state.step}
    session.audit.write({**position, "weights": checksums[0]})


def weights_checksum(model: nn.Module) -> str:
    """16 hexadecimal digits that change with any bit of the model's parameters."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = [weight.detach().flatten() for weight in model.parameters()]
    sums = [x.view(kinds[x.element_size()]).sum(dtype=torch.int64) for x in bits]
    numbers = torch.stack(sums).tolist() if sums else []  # the only wait for the device
    return hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]


def has_finite_weights(session: Training) -> bool:
    """Whether all weights are finite; a step with a finite loss may spoil them. Collective."""
    finite = [local(weight).isfinite().all() for weight in session.state.model.parameters()]
    return all(session.world.gather(bool(torch.stack(finite).all()) if finite else True))


def seed_dropout(session: Session, *position: int) -> None:
    """Seed the randomness inside the model with the position in the training.

    torch.manual_seed would query every kind of device first, which takes 0.1 ms or more.
    """
    key = session.args.seed
    for number in position:
        key = (key * 1_000_003 + number) % 2**63
    torch.default_generator.manual_seed(key)
    if session.world.device.type == "cuda":
        torch.cuda.manual_seed_all(key)


class Meter:
    """The measurements of an epoch: sums of loss and hits, parts of a step, printed lines."""

    def __init__(self, session: Training):
        """The epoch begins."""
        self.session, self.state, self.monitor = session, session.state, session.monitor
        self.timed = session.monitor.timed  # iterates over batches and times each step
        self.state.begin_epoch()
        self.steps, self.first = session.train.sampler.steps_per_epoch, session.state.step
        self.sums = Sums(session.world.device, self.state.sums)
        self.title = f"Epoch {self.state.epoch + 1}/{session.args.epochs}"
        self.bar = session.run.console.progress_bar(self.title, self.steps, self.first)
        session.train.start_count()
        session.stop.begin_phase()
        self.is_first = self.state.epoch == session.first_epoch  # in this process
        self.began = time.perf_counter()
        self.last = (self.began, self.first, 0.0)  # at the last line: clock, step, seconds waited

    def add(self, loss: Tensor, logits: Tensor, batch: MicroBatch) -> None:
        """Count a micro-batch that may still be computing. Nothing here waits for the device."""
        self.sums.add(loss * len(batch.labels), logits, batch.labels)
        self.monitor.end(batch.ends_step)
        if self.state.problem():
            self.session.stop.ask(Reason.DIVERGED)
        if self.session.train.bad.too_many:
            self.session.stop.ask(Reason.BAD_FILES)

    def is_finite(self) -> bool:
        """Sum over all ranks for a snapshot. Returns False, and ends the run, if the loss is not
        finite."""
        self.state.sums = sums = self._total()
        self.state.tick()
        return math.isfinite(sums[0])

    def _total(self) -> list[float]:
        sums = self.sums.total(self.session.world)
        if not math.isfinite(sums[0]):
            self.session.stop.ask(Reason.DIVERGED)
        return sums

    def print_line(self) -> None:
        """Every --print-freq steps, print a line about the steps since the last line; draw curves.

        Loss and accuracy cover all ranks and, after a resume, also the steps before it. Speed and
        waiting time are measured in this process alone, since it started. Its first step has a line
        as well, and counts again in the next line.
        """
        session, state, step, monitor = self.session, self.state, self.state.step, self.monitor
        self.bar.update()
        is_due = step % session.print_freq == 0 or step == self.steps
        if not (is_due or (self.is_first and step == self.first + 1)):
            return
        sums, before = self._total(), state.printed or [0.0] * 4
        since = means([b - a for a, b in zip(before, sums, strict=True)], "train").values()
        values = dict(zip(("loss", "top-1", "top-5"), since, strict=True))
        now = (time.perf_counter(), step, session.train.waited)
        seconds, done, waited = (b - a for a, b in zip(self.last, now, strict=True))
        rate = done * session.global_batch / seconds
        if is_due:
            self.last, state.printed, parts = now, sums, monitor.recent()
            curves = {"Step/loss": values["loss"], "Step/throughput": rate}
            curves |= {f"Step/{part}_s": parts[part] for part in PARTS if part in parts}
            session.run.scalars(curves, round(1000 * (state.epoch + step / self.steps)))
            session.status.show("training", steps=self.steps, images_per_s=rate, parts=parts)
        if session.ledger is not None and session.ledger.is_due():
            session.write_ledger()
        loss, top1, top5 = loss_text(values["loss"]), values["top-1"], values["top-5"]
        text = f"loss {loss}  top-1 {top1:.2f}  top-5 {top5:.2f}  images/s {rate:.1f}  "
        text += f"s/step {seconds / done:.4f}  waiting % {100 * waited / seconds:.1f}"
        text = f"{self.title} step {step:{len(str(self.steps))}}/{self.steps}  {text}"
        log.info(text, extra=None if self.bar.disable else IN_BAR)
        self.bar.set_postfix_str(f"loss {loss}  top-1 {top1:4.1f}  {rate:4.0f} img/s")

    def record(self) -> dict[str, float] | None:
        """End the epoch. Returns: its record for curves and history; None if it was stopped."""
        session, state, train = self.session, self.state, self.session.train
        if session.world.device.type == "cuda":
            torch.cuda.synchronize(session.world.device)
        seconds, done = time.perf_counter() - self.began, state.step - self.first
        self.bar.close()
        # A snapshot needs these sums if evaluation is stopped.
        state.sums = self._total()
        if not math.isfinite(state.sums[0]):  # all ranks see it: it overrides a signal
            session.stop.reason = Reason.DIVERGED
        train.bad.share(session.world)
        if train.bad.too_many:
            session.stop.ask(Reason.BAD_FILES, train.bad.error())
        if session.stop.reason:
            return None
        record = {
            **means(state.sums, "train"),
            "Throughput/train": done * session.global_batch / seconds if done else math.nan,
            "Time/train": seconds / done if done else math.nan,
            "Lr": learning_rate_at(session, state.epoch + (self.steps - 1) / self.steps),
        }
        if train.bad.seen:
            record["IO/bad_files"] = float(len(train.bad.seen))
        if train.sampler.size:
            record["Size/train"] = float(train.sampler.size)
        if done:
            record |= input_record(train, seconds, session.world)
        return record | loss_scale(state) | self.monitor.end_epoch()


def input_record(train: TrainBatches, seconds: float, world: World) -> dict[str, float]:
    """The ``IO/...`` tags of all ranks after ``seconds`` of training. Collective."""
    mine = (train.waited, train.reading.bytes, train.reading.files)
    waited, size, files = zip(*world.gather(mine), strict=True)
    return {
        # One rank that waits for its data makes all others wait for its gradients.
        "IO/wait_share": min(1.0, max(waited) / seconds),
        "IO/read_mb_s": sum(size) / seconds / 1e6,
        "IO/files_s": sum(files) / seconds,
    }


# ---- evaluation


def evaluate(session: Session, predict: Predict, batches: EvalBatches) -> dict[str, float] | None:
    """Evaluate the model and, with ``--ema``, its averaged weights.

    Returns: the result of `evaluate_weights`, and the metrics of the averaged weights
    (``Top1/ema``); None if the run is to stop.
    """
    result = evaluate_weights(session, predict, batches)
    if (average := session.state.ema) is not None and result is not None:
        with average.in_model():
            metrics = evaluate_weights(session, predict, batches)
        tags = {f"{tag}/ema": f"{tag}/val" for tag in report.METRICS}
        result = metrics and result | {tag: metrics[own] for tag, own in tags.items()}
    return result


@during("evaluating")
@torch.no_grad()
def evaluate_weights(
    session: Session, predict: Predict, batches: EvalBatches
) -> dict[str, float] | None:
    """Evaluate over all ranks; every image counts once. Returns None if the run is to stop.

    The loss is plain cross entropy, without label smoothing. Keys of the result: the ``.../val``
    tags, "images" (how many were evaluated), and "unreadable" (how many could not be read). If too
    many images or all are unreadable, it raises `UserError`; during training, the run stops
    instead.
    """
    world, sampler, model, bad = session.world, batches.sampler, session.state.model, batches.bad
    stop = None
    if isinstance(session, Training):
        stop = session.stop
        if stop.reason:  # the epoch was cut short
            return None
        stop.begin_phase()
        session.status.show("evaluating")
    # Ranks have seen different batches, so their running statistics of batch norm differ.
    copy_from_rank0(model, world, parameters=False)
    model.eval()
    bar = session.run.console.progress_bar("Evaluation", sampler.rounds)
    sums, began, iterator = Sums(world.device), time.perf_counter(), iter(batches)
    for _ in range(sampler.rounds):
        batch = next(iterator, None)  # some ranks may have no batch in the last round
        if batch is not None:
            images, targets = batch
            logits = predict(images).float()
            loss = F.cross_entropy(logits, targets, reduction="sum", ignore_index=UNREADABLE)
            sums.add(loss, logits, targets)
        elif session.state.sharded:  # all ranks must take part in gathering the weights
            predict(batches.blank())
        bar.update()
        if stop and stop.poll():
            break
    reshard(model)
    total, seconds = sums.total(world), time.perf_counter() - began
    count = int(total[3])
    bar.close()
    bad.share(world)
    is_whole = not (stop and stop.reason)
    error = bad.error() if bad.too_many or (is_whole and not count) else None
    if error:
        if stop is None:
            raise error
        stop.ask(Reason.BAD_FILES, error)
    if stop and stop.reason:
        return None
    if unreadable := sampler.images - count:
        log.warning(
            f"{unreadable} of {sampler.images} images in {bad.source.root} could not be read; the "
            "accuracy is over the rest"
        )
    return {
        **means(total, "val"),
        "Throughput/val": sampler.images / seconds,
        "Time/val": seconds / sampler.rounds,
        "images": float(count),
        "unreadable": float(unreadable),
    }


def evaluate_only(session: Session, predict: Predict) -> int:
    """``-e``: evaluate the model that was loaded, and write the summary. Returns exit code 0."""
    session.run.begin_evaluation()
    batches = session.loaders.test if session.args.part == "test" else session.loaders.val
    assert batches is not None  # the one part that was opened
    result = evaluate(session, predict, batches)
    assert result is not None  # only a training is asked to stop
    report.evaluation(session.args.part, result)
    val, test = (None, result) if session.args.part == "test" else (result, None)
    report.end(session, Reason.EVALUATED, val, test)
    return 0


def test_best(session: Training, predict: Predict, batches: EvalBatches) -> dict[str, float] | None:
    """Evaluate DATA/test (``batches``) with the best model. Returns None if the run is to stop."""
    best = session.folder / BEST
    weights = broadcast_from_rank0(
        lambda: read_checkpoint(best)["state_dict"] if best.is_file() else None, session.world
    )
    if weights is not None:
        session.state.load_weights(weights)
    else:
        log.warning(f"{best} is missing: DATA/test is evaluated with the last model")
    test = evaluate_weights(session, predict, batches)
    if session.stop.error is not None:
        session.run.close()
        raise session.stop.error
    if test is not None:
        report.evaluation("test", test)
    return test
