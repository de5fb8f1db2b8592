"""Start, advance and finish a run; the loop itself is in the scripts, like DDP, AMP and Apex."""

import logging
import math
from pathlib import Path
from typing import Any

from utils import advice, comparison, monitor, report, slowdown, status
from utils.data.preprocessing import Preprocessing
from utils.epoch import has_finite_weights, save_snapshot, test_best
from utils.run import audit, ledger, spot
from utils.run.resume import add_average, fingerprints, load, saved_preprocessing
from utils.run.run_directory import checkpoint_file
from utils.run.snapshots import BEST, SNAPSHOT, SnapshotWriter, TrainState
from utils.run.stopping import Reason, StopRequest
from utils.session import Predict, Session, Training, TrainStep
from utils.start import errors, progress
from utils.start.errors import INTERRUPTED, UserError
from utils.start.option_types import Options, OptionsT
from utils.start.progress import during
from utils.start.world import World, broadcast_from_rank0

log = logging.getLogger(__name__)


def find_batch(session: Session, train_step: TrainStep) -> int | None:
    """Run ``--find-batch``. Returns: the exit code; None if training is to begin.

    scripts/bench/time_step.py puts its own measurement in the place of this function.
    """
    if session.args.find_batch:
        from utils.find_batch import find

        return find(session, train_step)
    return None


def with_checkpoint_sizes(args: OptionsT, world: World) -> OptionsT:
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
    if not args.evaluate:
        state.data = broadcast_from_rank0(lambda: fingerprints(session.loaders), session.world)
    notes = []
    if (content := run.read_checkpoint()) is not None:
        notes = load(state, args, content, run.source, session.loaders.classes)
    else:
        add_average(state, args)
    if broadcast_from_rank0(lambda: bool(state.best) and run.lacks_best(), session.world):
        state.best = {}  # else the run may end without a best.pt, as no later epoch is better
        notes.append(f"note: {BEST} is missing: the best model will be that of a later epoch")
    if not main:
        state.sums = None  # those of a snapshot cover all ranks: only one rank may add them again
    if args.start_epoch is not None and not args.evaluate:
        state.epoch, state.step, state.sums, state.printed = args.start_epoch, 0, None, None
        state.history = [one for one in state.history if one["epoch"] <= state.epoch]
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
    print_freq = world.gather(args.print_freq)[0]
    # At once after `gather`, which no rank leaves before all have entered it: up to here a signal
    # ends all ranks at once, from here on all train until the next vote.
    limits = (args.train_time, state.elapsed, args.snapshot_minutes)
    stop = StopRequest(world, *limits, is_busy=lambda: writer is not None and writer.busy)
    facts = report.facts(session)
    opening = comparison.opening(run.options | facts)
    folder = run.begin_training(state.epoch, state.epoch + state.step / steps, facts, opening)
    report.start(session, folder.path)
    writer = SnapshotWriter(folder.path, run.tell_written) if world.is_main else None
    training = Training(
        **vars(session),
        folder=folder.path,
        stop=stop,
        monitor=monitor.Monitor(state.model, state.optimizer, world),
        snapshots=writer,
        status=status.Status(state, args, world, run.mode, folder.path),
        print_freq=print_freq,
        # All steps of an epoch may be done: stopped while it was evaluated.
        first_epoch=state.epoch + state.step // steps,
        audit=begin_audit(session, folder.path) if args.audit else None,
        ledger=begin_ledger(session, folder.path) if world.is_main else None,
        began=(state.epoch, state.step),
    )
    if state.comm is not None:
        state.comm.start_at(state.epoch, state.step, steps)
    if args.profile and world.is_main:
        from utils.run import profiling

        profiling.start(folder.path, state.optimizer)
    if args.spot_notice and world.local_rank == 0:  # any of the nodes may be reclaimed
        spot.poll(args.spot_notice, training.stop)
    training.status.show("starting")
    progress.main.position = lambda: (state.epoch, state.step)
    # A run whose time is used up trains no further step each time it is started again.
    is_over = broadcast_from_rank0(training.stop.is_time_over, world)
    if state.resumed and is_over and state.epoch < args.epochs:
        training.stop.reason = Reason.TRAIN_TIME
    # Nor does one that has reached its target.
    reached = any(is_enough(args, record) for record in state.history)
    if args.start_epoch is None and reached:
        training.stop.ask(Reason.DESIRED_ACC)
    state.tick()
    return training


def begin_audit(session: Session, folder: Path) -> audit.Log:
    """``--audit``: open the log in ``folder``; rank 0 writes it."""
    world, state, sampler = session.world, session.state, session.train.sampler
    path = folder / audit.FILE if world.is_main else None
    accum, shards = sampler.accum, world.data_parallel_size
    setup = audit.Setup(sampler.images, sampler.seed, sampler.global_batch, shards, accum)
    return audit.Log(path, setup, state.epoch, state.step)


def begin_ledger(session: Session, folder: Path) -> ledger.Ledger:
    """The ledger of a run, with those of its earlier starts."""
    world = session.world
    gpus = report.gpu_count(session) if world.device.type == "cuda" else 0
    return ledger.Ledger(folder / ledger.FILE, ledger.Entry(world.nodes, gpus))


def has_next_epoch(session: Training) -> bool:
    """Whether there is another epoch to train."""
    if session.state.epoch >= session.args.epochs:
        session.stop.ask(Reason.EPOCHS)
    return session.stop.reason is None


@during("closing an epoch")
def close_epoch(
    session: Training, trained: dict[str, float] | None, evaluated: dict[str, float] | None
) -> None:
    """Record an epoch: curves, best model, snapshot. None: training or evaluation was stopped."""
    args, state, stop = session.args, session.state, session.stop

    def kept() -> str:
        if session.snapshots is not None:
            session.snapshots.wait()
        is_there = (session.folder / SNAPSHOT).exists()
        return "the last snapshot is intact" if is_there else "no snapshot was written yet"

    state.tick()
    if (by_loss := stop.reason is Reason.DIVERGED) or not has_finite_weights(session):
        what = "the loss is" if by_loss else "some weights are"
        problem = state.problem() or f"{what} nan or infinite"
        text = f"{problem} in epoch {state.epoch + 1}, step {state.step}: lower --lr, add "
        text += f"--warmup-epochs or --clip-grad; {broadcast_from_rank0(kept, session.world)}"
        stop.ask(Reason.DIVERGED, UserError(text, on_every_rank=True))
        return
    if trained is None or evaluated is None:
        save_snapshot(session)  # a resumed run begins with the evaluation, if that was stopped
        return
    seconds, is_first = state.elapsed - state.epoch_began, state.epoch == session.first_epoch
    is_best = add_to_history(state, {**trained, **evaluated, "Seconds": seconds}, args.best_by)
    best = {f"Best/{x}": state.best[x.lower()] for x in report.METRICS if x.lower() in state.best}
    session.run.epoch(state.history[-1] | best, report.time_left(args, state))
    if is_first and broadcast_from_rank0(
        lambda: advice.is_enough(session.monitor.total), session.world
    ):
        advice.bottleneck(session, trained)
        if session.world.size > 1 and not state.sharded:
            times = session.monitor.of_ranks
            if why := slowdown.explain(times, slowdown.time_exchange(session)):
                log.info(f"note: {why}")
    save_snapshot(session, is_best)
    session.write_ledger()
    if is_enough(args, evaluated):
        stop.ask(Reason.DESIRED_ACC)


def is_enough(args: Options, record: dict[str, float]) -> bool:
    """Whether the better of an epoch's models has the accuracy of ``--target-top1``."""
    best = max(record.get(tag, 0.0) for tag in ("Top1/val", "Top1/ema"))
    return args.target_top1 is not None and best >= args.target_top1


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


@during("ending the run")
def end(session: Training, predict: Predict) -> int:
    """Wait for the last snapshot, evaluate DATA/test if there is one, write the summary.

    Returns: the process's exit code. Raises: `UserError` when the loss is no longer a finite
    number, when too many images are unreadable, or when the last snapshot could not be written. It
    waits for the other ranks, so do not call it after any other exception.
    """
    run, stop, writer = session.run, session.stop, session.snapshots
    failure = broadcast_from_rank0(lambda: writer.wait() if writer else None, session.world)
    if stop.error is not None:
        run.close()
        raise stop.error
    reason, test = stop.end_training(), None
    if failure:
        reason = Reason.UNSAVED  # best.pt may be missing, too, so nothing may take it for the end
    if session.loaders.test is not None and reason not in (Reason.INTERRUPTED, Reason.UNSAVED):
        test = test_best(session, predict, session.loaders.test)
    stop.reason = stop.reason or reason
    session.monitor.close()
    session.write_ledger()
    report.end(session, stop.reason, test=test, pauses=writer.pauses if writer else ())
    stop.close()
    if failure:
        advice = f"free disk space, then {errors.how_to_continue}"
        text = f"{session.world.where_rank0_is}{failure}; {advice}"
        raise UserError(text, on_every_rank=True)
    return INTERRUPTED if stop.reason is Reason.INTERRUPTED else 0
