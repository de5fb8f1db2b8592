"""Start, advance and finish a run; the loop itself is in the scripts, like DDP, AMP and Apex."""

import logging
import math
import time
from typing import Any

from utils import errors, report, snapshots
from utils.epoch import loss_scale, save_snapshot, test_best
from utils.errors import INTERRUPTED, UserError
from utils.preprocessing import Preprocessing
from utils.run_directory import checkpoint_file
from utils.session import Predict, Session, TrainStep, show_status, status_file
from utils.snapshots import SnapshotWriter, TrainState
from utils.stopping import Reason, StopRequest
from utils.watch import Watch
from utils.world import World, from_main

log = logging.getLogger(__name__)


def measure_step(session: Session, train_step: TrainStep) -> int:
    """``--find-batch``: the step's largest batch; ``--dummy``: its time. Returns: exit code 0."""
    from utils.extras import dummy, find_batch

    measure = find_batch.find if session.args.find_batch else dummy.time_step
    return measure(session, train_step)


def read_image_size(args: Any, world: World) -> None:
    """Take sizes that were omitted on the command line from the ``--resume`` checkpoint."""
    saved = from_main(lambda: snapshots.saved_preprocessing(checkpoint_file(args)), world)
    if saved is not None:
        args.preprocessing = _with_typed_sizes(args, Preprocessing.from_dict(saved, args.resume))
        args.image_size = args.preprocessing.image_size


def _with_typed_sizes(args: Any, saved: Preprocessing) -> Preprocessing:
    """A checkpoint's preprocessing, but in the sizes of the command line."""
    size = None if "image_size" in args.untyped else args.image_size
    return saved.resized(size, args.val_resize_size, args.val_image_size)


def resume(session: Session) -> None:
    """Load the checkpoint that ``--resume`` names, if any. Raises: `UserError`."""
    args, state, run = session.args, session.state, session.run
    state.global_batch = session.global_batch
    classes = session.loaders.classes

    def add_parts() -> None:
        if args.ema and not args.evaluate:
            from utils.extras.ema import Average

            masters = getattr(state.weights, "named_masters", dict)()
            state.ema = state.parts["ema"] = Average(state.model, args.ema, masters)

    snapshot = run.snapshot
    session.resumed = snapshots.resume(state, args, session.world, snapshot, classes, add_parts)
    if state.ema is not None:
        state.optimizer.register_step_post_hook(lambda *_: state.ema.after_step())
    if args.start_epoch is not None and not args.evaluate:
        state.epoch, state.step, state.sums, state.printed = args.start_epoch, 0, None, None
    _resolve_preprocessing(session)
    for note in () if session.resumed else args.model_notes:
        log.info(note)


def _resolve_preprocessing(session: Session) -> None:
    """Preprocess images as the checkpoint says, but in the sizes of the command line."""
    args, state, run = session.args, session.state, session.run
    wanted, source = args.preprocessing, "the pretrained weights"
    if state.preprocessing is not None:
        source = run.source
        wanted = _with_typed_sizes(args, Preprocessing.from_dict(state.preprocessing, source))
    if args.pretrained or wanted != args.typed_preprocessing:
        log.info(f"preprocessing as in {source}: {wanted}")
    session.loaders.use(wanted)
    state.preprocessing = wanted.as_dict()
    args.preprocessing, args.image_size = wanted, wanted.image_size
    run.options["image_size"] = wanted.image_size


def begin(session: Session) -> None:
    """Open the run's files, print its set-up, handle signals, start the clocks."""
    args, world, state, run = session.args, session.world, session.state, session.run
    position = state.epoch + state.step / session.train.sampler.steps_per_epoch
    # All ranks add up what a line shows, so one of them says when a line is due.
    session.print_freq = from_main(lambda: args.print_freq, world)
    run.begin(state.epoch, position, report.facts(session))
    report.start(session)
    session.watch = Watch(args, world, run.folder, state.model)
    limits = (args.train_time, state.elapsed, args.snapshot_minutes)
    session.stop = StopRequest(world, *limits, is_busy=lambda: session.snapshots.busy)
    if args.spot_notice and world.local_rank == 0:  # any of the nodes may be reclaimed
        session.stop.watch_spot(args.spot_notice)
    show_status(session, "starting")
    if world.is_main:
        session.snapshots = SnapshotWriter(run.folder, run.written)
    if state.comm is not None:
        steps = session.train.sampler.steps_per_epoch
        state.comm.start_at(state.epoch, state.step, steps, args.epochs)
    state.tick()


def goes_on(session: Session) -> bool:
    """Whether there is another epoch to train."""
    if session.state.epoch >= session.args.epochs:
        session.stop.ask(Reason.EPOCHS)
    return session.stop.reason is None


def close_epoch(
    session: Session, trained: dict[str, float] | None, evaluated: dict[str, float] | None
) -> None:
    """Record an epoch: curves, best model, snapshot. None: training or evaluation was cut short."""
    args, state = session.args, session.state
    state.tick()
    if trained is None or evaluated is None:
        if session.stop.reason is Reason.DIVERGED:
            session.stop.ask(Reason.DIVERGED, _diverged(session))
        else:  # in the middle of evaluation, it is of the moment after the epoch's last step
            save_snapshot(session)
        return
    seconds = time.monotonic() - session.epoch_began
    record = {**trained, **evaluated, "Seconds": seconds}
    is_best = add_to_history(state, record, args.best_by)
    session.run.epoch(state.history[-1], report.time_left(args, state))
    session.epochs += 1
    if session.epochs == 1:
        report.bottleneck(session, trained)
    save_snapshot(session, is_best)
    top1 = max(evaluated["Top1/val"], evaluated.get("Top1/ema", 0.0))
    if args.desired_acc is not None and top1 >= args.desired_acc:
        session.stop.ask(Reason.DESIRED_ACC)


def add_to_history(state: TrainState, record: dict[str, float], best_by: str) -> bool:
    """Add an epoch's record and move on to the next. Returns whether it has the best model so far.

    Of an epoch's two models, the plain one and the averaged one, the better one counts.
    ``best_by``: "top1", the highest validation top-1, or "loss", the lowest validation loss.
    """
    state.epoch, state.step, state.sums, state.printed = state.epoch + 1, 0, None, None
    state.history.append({"epoch": state.epoch, **record})
    is_best = False
    for model in ("val", "ema"):
        if f"Top1/{model}" not in record:
            continue
        names = {"top1": "Top1", "top5": "Top5", "loss": "Loss"}
        found = {key: record[f"{name}/{model}"] for key, name in names.items()}
        if best_by == "top1":
            is_better = found["top1"] > state.best.get("top1", -1.0)
        else:
            is_better = found["loss"] < state.best.get("loss", math.inf)
        if is_better:
            is_best, state.best = True, {"epoch": state.epoch, **found}
            if state.ema is not None:
                state.best["ema"] = int(model == "ema")
    return is_best


def end(session: Session, predict: Predict) -> int:
    """Wait for the last snapshot, evaluate DATA/test if there is one, write the summary.

    Returns: the process's exit code. Raises: `UserError` when the loss is no longer a finite
    number, when too many images are unreadable, or when the last snapshot could not be written.
    After any exception the process ends at once instead: what is done here waits for other ranks.
    """
    run, stop = session.run, session.stop
    failure = from_main(session.snapshots.wait if session.snapshots else None, session.world)
    if stop.error is not None:
        status_file().unlink(missing_ok=True)
        run.close()
        raise stop.error
    reason, test = stop.end_training(), None
    if session.loaders.test and reason is not Reason.INTERRUPTED:
        test = test_best(session, predict)
    stop.reason = stop.reason or reason
    session.watch.close()
    status_file().unlink(missing_ok=True)
    report.end(session, test=test)
    stop.close()
    if failure:
        advice = f"free disk space, then {errors.how_to_continue}"
        raise UserError(f"{failure}; {advice}", alike=True)
    return INTERRUPTED if stop.reason is Reason.INTERRUPTED else 0


def _diverged(session: Session) -> UserError:
    """The error for a loss that is not finite, or a loss scale that keeps falling."""
    state = session.state
    where = f"in epoch {state.epoch + 1}, step {state.step}"
    fault = f"the loss is nan or infinite {where}"
    if getattr(state.scaler, "lost", False):
        scale = loss_scale(state)["Amp/scale"]
        fault = f"gradients overflow without end {where}, now at a loss scale of {scale:.3g}"
    advice = "lower --lr, add --warmup-epochs or --clip-grad; the last snapshot is intact"
    return UserError(f"{fault}: {advice}", alike=True)
