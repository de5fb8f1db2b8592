"""The epoch loop around a script's own train_step.

Knows nothing of DDP, AMP or Apex: those stand in the scripts.
"""

import math
import time

import torch

from utils import schedules
from utils.errors import INTERRUPTED, UserError
from utils.instruments.status_file import Live
from utils.instruments.watch import Watch
from utils.metrics import Sums, to_metrics
from utils.processes.distributed import from_main, gather
from utils.run import checkpoint
from utils.run.checkpoint import TrainState
from utils.run.snapshots import BEST, SNAPSHOT, SnapshotWriter
from utils.training import dummy, report
from utils.training.evaluation import evaluate, evaluate_only, test_best
from utils.training.session import Job, Predict, TrainStep
from utils.training.spot import SpotWatch
from utils.training.stopping import StopRequest


def amp_dtype(choice: str, device: torch.device) -> torch.dtype | None:
    """The autocast type of ``--amp``; None for plain float32."""
    if choice == "auto":
        choice = "fp16" if device.type == "cuda" else "off"
    # is_bf16_supported() alone says yes on a T4, which emulates bf16 at a fraction of the speed.
    native = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    if choice == "bf16" and not native:
        print("warning: this GPU only emulates bf16, slowly: --amp fp16 is faster", flush=True)
    return {"fp16": torch.float16, "bf16": torch.bfloat16, "off": None}[choice]


def run(job: Job, train_step: TrainStep, predict: Predict) -> int:
    """Time, evaluate or train, as the options say. Returns the process's exit code."""
    for batches in (job.loaders.train, job.loaders.val, job.loaders.test):
        if batches is not None:
            batches.bad.log = job.run.log
    if job.world.is_main and hasattr(job.state.scaler, "log"):
        job.state.scaler.log = job.run.log  # it has to tell of the steps that it skips
    if job.args.dummy:
        return dummy.measure(job.args, job.world, job.run, train_step)
    if job.loaders.train is not None:
        job.state.global_batch = job.train.sampler.global_batch
    resumed = checkpoint.resume(
        job.state, job.args, job.world, job.run.snapshot, job.loaders.classes, job.run.log
    )
    if job.args.evaluate:
        return evaluate_only(job, predict)
    if job.args.start_epoch is not None:
        job.state.epoch, job.state.step, job.state.sums = job.args.start_epoch, 0, None
    return fit(job, train_step, predict, resumed)


def fit(job: Job, train_step: TrainStep, predict: Predict, resumed: bool = False) -> int:
    """Train until the last epoch, the desired accuracy, the time limit or a signal.

    Returns the process's exit code. Raises: `UserError` when the loss is no number any more, when
    too many images are unreadable, and when the last snapshot could not be written.
    """
    args, state, run = job.args, job.state, job.run
    position = state.epoch + state.step / job.train.sampler.steps_per_epoch
    run.begin(state.epoch, position, report.facts(job))
    report.start(job, resumed)
    job.watch = Watch(args, job.world, run, state.model)
    stop = StopRequest(job.world, args.train_time, state.elapsed, args.snapshot_minutes)
    spot = None
    if args.spot_notice and job.world.local_rank == 0:  # any of the nodes may be reclaimed
        spot = SpotWatch(args.spot_notice, lambda: stop.ask("interrupted"), run.log)
    job.live = Live(job)
    if job.world.is_main:
        job.snapshots = SnapshotWriter(run.folder, run.log, run.store.upload)

    # After an exception the process ends at once: what follows waits for the other ranks.
    reason = train_epochs(job, train_step, predict, stop)
    if spot is not None:
        spot.close()
    stop.close()
    job.live.close()
    job.watch.close()
    failure = _finish_snapshots(job)
    fault = _why_ended_badly(job, reason)
    if fault is not None:
        run.close_store()
        raise fault
    test = test_best(job, predict) if job.loaders.test and reason != "interrupted" else {}
    report.end(job, reason, test)
    if failure:
        raise UserError(f"{failure}; make room, then go on with --resume", alike=True)
    return INTERRUPTED if reason == "interrupted" else 0


def train_epochs(job: Job, train_step: TrainStep, predict: Predict, stop: StopRequest) -> str:
    """Train, evaluate and save, epoch by epoch. Returns why it ended, a word of summary.json."""
    args, state = job.args, job.state
    first = True
    state.tick()
    while state.epoch < args.epochs:
        began = time.monotonic()
        record = train_epoch(job, train_step, stop)
        job.live.show("evaluating")
        val = evaluate(job, predict, job.loaders.val, stop) if record else None
        state.tick()
        if record is None or val is None:
            # Stopped. In the middle of evaluation, the snapshot stands after the last step.
            if stop.reason != "diverged":
                _save_snapshot(job)
            return str(stop.reason)
        is_best = _close_epoch(state, {**record, **val, "Seconds": time.monotonic() - began})
        job.run.epoch(state.history[-1])
        if first:
            report.input_path(job, record)
            first = False
        _save_snapshot(job, is_best)
        if args.desired_acc is not None and val["Top1/val"] >= args.desired_acc:
            return "desired_acc"
    return "epochs"


def train_epoch(job: Job, train_step: TrainStep, stop: StopRequest) -> dict[str, float] | None:
    """Train the rest of the current epoch. Returns its record, or None when asked to stop."""
    args, state, world, run = job.args, job.state, job.world, job.run
    sampler = job.train.sampler
    steps, first = sampler.steps_per_epoch, state.step
    sampler.start_at(state.epoch, first)
    sums = Sums(world.device, state.sums)
    job.train.start_count()
    state.model.train()
    run.start_bar(f"Epoch {state.epoch + 1}/{args.epochs}", steps, first)
    job.watch.start_epoch()
    began = time.perf_counter()
    for micro, (images, targets) in enumerate(job.train if first < steps else ()):
        job.watch.timer.begin()
        if micro % args.accum_steps == 0:
            _set_learning_rate(job, state.epoch + state.step / steps)
        update = (micro + 1) % args.accum_steps == 0
        _seed_dropout(args.seed, (state.epoch, state.step, micro % args.accum_steps, world.rank))
        weight = len(targets) * world.size / sampler.global_batch
        loss, logits = train_step(images, targets, weight, update)
        sums.add(loss * len(targets), logits, targets)
        job.watch.end_step(update)
        if not update:
            continue
        state.step += 1
        if state.step % args.print_freq == 0 or state.step == steps:
            seconds = time.perf_counter() - began
            job.live.training(seconds, state.step - first)
            _report_step(job, stop, sums, seconds, state.step - first)
        if getattr(state.scaler, "lost", False):
            stop.ask("diverged")
        if job.train.bad.too_many:
            stop.ask("bad_files")
        if stop.poll():
            break
        if stop.snapshot_due and state.step < steps:
            state.sums = sums.total(world)  # of all ranks
            state.tick()
            if not math.isfinite(state.sums[0]):  # no line has shown it yet
                stop.ask("diverged")
            elif job.snapshots is not None and not job.snapshots.busy:  # a slow disk: the next time
                _save_snapshot(job)
        job.watch.timer.wait()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    seconds, done = time.perf_counter() - began, state.step - first
    run.stop_bar()
    total = sums.total(world)
    job.train.bad.share(world)
    state.sums = total  # if evaluation is stopped, the epoch is not closed, and they are needed
    if stop.reason or job.train.bad.too_many:
        return None
    metrics = to_metrics(total)
    return {
        "Loss/train": metrics.loss,
        "Top1/train": metrics.top1,
        "Top5/train": metrics.top5,
        "Throughput/train": done * sampler.global_batch / seconds if done else math.nan,
        "Time/train": seconds / done if done else math.nan,
        "Lr": learning_rate_at(job, state.epoch + (steps - 1) / steps),
        **loss_scale(state),
        "IO/bad_files": float(len(job.train.bad.seen)),
        **(input_rates(job, seconds) if done else {}),
        **job.watch.end_epoch(),
    }


def input_rates(job: Job, seconds: float) -> dict[str, float]:
    """What the input path did in ``seconds`` of training: all ranks' reading, the worst waiting."""
    train = job.train
    mine = (train.waited, train.reading.bytes, train.reading.files)
    waited, size, files = zip(*gather(mine, job.world), strict=True)
    return {
        # One rank that waits for its data makes all others wait for its gradients.
        "IO/wait_share": min(1.0, max(waited) / seconds),
        "IO/read_mb_s": sum(size) / seconds / 1e6,
        "IO/files_s": sum(files) / seconds,
    }


def learning_rate_at(job: Job, position: float) -> float:
    """Learning rate at ``position`` (epochs since the start, fractional)."""
    args = job.args
    global_batch = args.batch_size * job.world.size * args.accum_steps
    return schedules.learning_rate(
        position,
        lr=schedules.scale_lr(args.lr, global_batch, args.lr_scaling),
        epochs=args.epochs,
        warmup=args.warmup_epochs,
        schedule=args.lr_schedule,
    )


def _set_learning_rate(job: Job, position: float) -> None:
    lr = learning_rate_at(job, position)
    for group in job.state.optimizer.param_groups:
        group["lr"] = lr


def _seed_dropout(seed: int, place: tuple[int, ...]) -> None:
    # Randomness inside the model as a function of the position: no random state needs saving.
    key = seed
    for number in place:
        key = (key * 1_000_003 + number) % 2**63
    torch.manual_seed(key)


def loss_scale(state: TrainState) -> dict[str, float]:
    """The loss scale and, where they are counted, the steps skipped since the run began."""
    scaler = state.scaler.state_dict()
    names = {"scale": "Amp/scale", "skipped": "Amp/skipped"}
    return {names[key]: float(value) for key, value in scaler.items() if key in names}


def _report_step(job: Job, stop: StopRequest, sums: Sums, seconds: float, steps: int) -> None:
    """Print a line and draw the per-step curves. The one place where a step waits for the device.

    A loss that is not a finite number ends the run.

    ``sums`` are this rank's over the epoch so far, so a line shows running means; this process
    has done ``steps`` steps of it in ``seconds``.
    """
    state, sampler = job.state, job.train.sampler
    if not (job.run.shows or job.world.is_main):
        return
    metrics = sums.mine()
    if not math.isfinite(metrics.loss):
        stop.ask("diverged")
    position = state.epoch + state.step / sampler.steps_per_epoch
    rate = steps * sampler.global_batch / seconds
    curves = {"Step/loss": metrics.loss, "Step/throughput": rate, **job.watch.recent()}
    job.run.scalars(curves, round(1000 * position))
    place = (
        f"Epoch {state.epoch + 1}/{job.args.epochs}"
        f" step {state.step:{len(str(sampler.steps_per_epoch))}}/{sampler.steps_per_epoch}"
    )
    values = {
        "loss": metrics.loss,
        "top-1": metrics.top1,
        "top-5": metrics.top5,
        "images/s": rate,
        "s/step": seconds / steps,
        "waiting %": 100 * job.train.waited / seconds,
    }
    job.run.step(place, state.step, values)


def _why_ended_badly(job: Job, reason: str) -> UserError | None:
    """The error with which a training ends that ``reason`` has stopped; None if there is none."""
    if reason == "diverged":
        return UserError(_why_diverged(job), alike=True)
    bad = [batches.bad for batches in (job.train, job.loaders.val) if batches.bad.too_many]
    return bad[0].error() if bad else None


def _why_diverged(job: Job) -> str:
    state = job.state
    where = f"in epoch {state.epoch + 1}, step {state.step}"
    if getattr(state.scaler, "lost", False):
        scale = loss_scale(state)["Amp/scale"]
        fault = f"gradients overflow without end {where}, now at a loss scale of {scale:.3g}"
    else:
        fault = f"the loss is nan or infinite {where}"
    return f"{fault}: lower --lr, add --warmup-epochs or --clip-grad; the last snapshot is intact"


def _close_epoch(state: TrainState, record: dict[str, float]) -> bool:
    """Add an epoch to the history and go on to the next. Returns whether it is the best so far."""
    state.epoch, state.step, state.sums = state.epoch + 1, 0, None
    state.history.append({"epoch": state.epoch, **record})
    if record["Top1/val"] <= state.best.get("top1", -1.0):
        return False
    state.best = {"epoch": state.epoch, "top1": record["Top1/val"], "top5": record["Top5/val"]}
    return True


def _save_snapshot(job: Job, is_best: bool = False) -> None:
    if job.snapshots is None:
        return
    state, classes = job.state, job.loaders.classes
    weights = state.full_weights()
    files = {SNAPSHOT: checkpoint.snapshot_of(state, job.run.options, classes, weights)}
    if is_best:
        # First, so that no snapshot ever speaks of a best model that is not there.
        files = {BEST: checkpoint.best_of(state, job.args.arch, classes, weights), **files}
    job.snapshots.save(files)


def _finish_snapshots(job: Job) -> str | None:
    """Wait until the last snapshot is on disk. Returns, in every process, why it is not."""

    def finish() -> str | None:
        job.snapshots.wait()
        return str(job.snapshots.failure) if job.snapshots.failure else None

    return from_main(finish, job.world)
