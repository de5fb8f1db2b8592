"""Start, advance and finish a run; the loop itself is in the scripts, like DDP, AMP and Apex."""

import logging
import math
from typing import Any

from utils import addons, errors, report
from utils.epoch import save_snapshot, test_best
from utils.errors import INTERRUPTED, UserError
from utils.options import Options
from utils.preprocessing import Preprocessing
from utils.resume import load, saved_preprocessing
from utils.run_directory import checkpoint_file
from utils.session import Predict, Session, Training, TrainStep
from utils.snapshots import SnapshotWriter, TrainState
from utils.stopping import Reason, StopRequest
from utils.world import World, broadcast_from_rank0

log = logging.getLogger(__name__)


def measure(session: Session, train_step: TrainStep) -> int | None:
    """Run ``--find-batch`` or ``--dummy``. Returns: the exit code; None if training is to begin."""
    measurement = addons.measurement(session.args)
    return measurement and measurement(session, train_step)


def with_checkpoint_sizes(args: Options, world: World) -> Options:
    """The options, with omitted sizes taken from the ``--resume`` checkpoint."""
    saved = broadcast_from_rank0(lambda: saved_preprocessing(checkpoint_file(args)), world)
    if saved is None:
        return args
    preprocessing = _with_given_sizes(args, saved, args.resume)
    return args.replaced(preprocessing=preprocessing, image_size=preprocessing.image_size)


def _with_given_sizes(args: Options, saved: dict[str, Any], source: Any) -> Preprocessing:
    """A checkpoint's preprocessing; sizes that the command line gives take precedence."""
    size = None if "image_size" in args.defaulted_sizes else args.image_size
    saved_one = Preprocessing.from_dict(saved, source)
    return saved_one.resized(size, args.val_resize_size, args.val_image_size)


def resume(session: Session) -> None:
    """Load the checkpoint that ``--resume`` names, if any. Raises: `UserError`."""
    args, state, run, main = session.args, session.state, session.run, session.world.is_main
    state.global_batch = session.global_batch
    notes = []
    if (content := run.read_checkpoint()) is not None:
        notes = load(state, args, content, run.source, session.loaders.classes)
    else:
        addons.add_average(state, args)
    if state.resumed and not main:
        state.sums = None  # they cover all ranks: only one rank may add them again
    if args.start_epoch is not None and not args.evaluate:
        state.epoch, state.step, state.sums, state.printed = args.start_epoch, 0, None, None
    preprocessing, source = args.preprocessing, "the pretrained weights"
    if state.preprocessing is not None:
        preprocessing, source = _with_given_sizes(args, state.preprocessing, run.source), run.source
    if args.pretrained or preprocessing != args.given_preprocessing:
        log.info(f"preprocessing as in {source}: {preprocessing}")
    session.loaders.use(preprocessing)
    state.preprocessing = preprocessing.as_dict()
    run.options["image_size"] = preprocessing.image_size
    notes += [] if state.resumed else getattr(state.model, "notes", [])
    for note in notes if main else ():
        log.info(note)


def begin(session: Session) -> Training:
    """Open the run's files, print its set-up, handle signals, start the clocks."""
    args, world, state, run = session.args, session.world, session.state, session.run
    steps = session.train.sampler.steps_per_epoch
    # A line needs sums over all ranks, so rank 0's --print-freq is used by all.
    print_freq = broadcast_from_rank0(lambda: args.print_freq, world)
    run.begin(state.epoch, state.epoch + state.step / steps, addons.facts(session))
    report.start(session)
    writer = SnapshotWriter(run.folder, run.written) if world.is_main else None
    limits = (args.train_time, state.elapsed, args.snapshot_minutes)
    training = Training(
        **vars(session),
        stop=StopRequest(world, *limits, is_busy=lambda: writer.busy),
        watch=addons.watch(session),
        snapshots=writer,
        show_status=addons.status(session),
        print_freq=print_freq,
        first_epoch=state.epoch,
    )
    addons.begin(training)
    training.show_status("starting")
    state.tick()
    return training


def has_next_epoch(session: Training) -> bool:
    """Whether there is another epoch to train."""
    if session.state.epoch >= session.args.epochs:
        session.stop.ask(Reason.EPOCHS)
    return session.stop.reason is None


def close_epoch(
    session: Training, trained: dict[str, float] | None, evaluated: dict[str, float] | None
) -> None:
    """Record an epoch: curves, best model, snapshot. None: training or evaluation was stopped."""
    args, state, stop = session.args, session.state, session.stop
    state.tick()
    if trained is None or evaluated is None:
        if stop.reason is Reason.DIVERGED:
            problem = state.problem() or "the loss is nan or infinite"
            text = f"{problem} in epoch {state.epoch + 1}, step {state.step}: lower --lr, add "
            text += "--warmup-epochs or --clip-grad; the last snapshot is intact"
            stop.ask(Reason.DIVERGED, UserError(text, on_every_rank=True))
        else:  # a resumed run begins with the evaluation, if that was stopped
            save_snapshot(session)
        return
    seconds, is_first = state.elapsed - state.epoch_began, state.epoch == session.first_epoch
    is_best = add_to_history(state, {**trained, **evaluated, "Seconds": seconds}, args.best_by)
    session.run.epoch(state.history[-1], report.time_left(args, state))
    if is_first:
        addons.advise(session, trained)
    save_snapshot(session, is_best)
    top1 = max(evaluated["Top1/val"], evaluated.get("Top1/ema", 0.0))
    if args.desired_acc is not None and top1 >= args.desired_acc:
        stop.ask(Reason.DESIRED_ACC)


def add_to_history(state: TrainState, record: dict[str, float], best_by: str) -> bool:
    """Add an epoch's record and move on to the next. Returns whether it has the best model so far.

    Of an epoch's two models, the plain one and the averaged one, the better one counts.
    ``best_by``: "top1", the highest validation top-1, or "loss", the lowest validation loss.
    """
    state.epoch, state.step, state.sums, state.printed = state.epoch + 1, 0, None, None
    state.history.append({"epoch": state.epoch, **record})
    names, is_best = {"top1": "Top1", "top5": "Top5", "loss": "Loss"}, False
    models = [model for model in ("val", "ema") if f"Top1/{model}" in record]
    for model in models:
        figures = {key: record[f"{name}/{model}"] for key, name in names.items()}
        if best_by == "top1":
            is_better = figures["top1"] > state.best.get("top1", -1.0)
        else:
            is_better = figures["loss"] < state.best.get("loss", math.inf)
        if is_better:
            is_best, state.best = True, {"epoch": state.epoch, **figures}
            if "ema" in models:
                state.best["ema"] = int(model == "ema")
    return is_best


def end(session: Training, predict: Predict) -> int:
    """Wait for the last snapshot, evaluate DATA/test if there is one, write the summary.

    Returns: the process's exit code. Raises: `UserError` when the loss is no longer a finite
    number, when too many images are unreadable, or when the last snapshot could not be written. It
    waits for the other ranks, so do not call it after any other exception.
    """
    run, stop, writer = session.run, session.stop, session.snapshots
    failure = broadcast_from_rank0(writer and writer.wait, session.world)
    if stop.error is not None:
        run.close()
        raise stop.error
    reason, test = stop.end_training(), None
    if session.loaders.test and reason is not Reason.INTERRUPTED:
        test = test_best(session, predict)
    stop.reason = stop.reason or reason
    session.watch.close()
    report.end(session, stop.reason, test=test, pauses=writer.pauses if writer else ())
    stop.close()
    if failure:
        advice = f"free disk space, then {errors.how_to_continue}"
        raise UserError(f"{failure}; {advice}", on_every_rank=True)
    return INTERRUPTED if stop.reason is Reason.INTERRUPTED else 0
