"""Evaluation, for all scripts: exact at any world size."""

import logging
import time
from typing import Any

import torch
import torch.nn.functional as F

from utils.atomic import read_checkpoint
from utils.data.loaders import BadFiles, Batches
from utils.errors import UserError
from utils.launch.world import copy_from_main, from_main, reshard
from utils.metrics import UNREADABLE, Sums, to_metrics
from utils.run.snapshots import BEST
from utils.train import report
from utils.train.session import Predict, Session, show_status
from utils.train.stopping import Reason

log = logging.getLogger(__name__)


def evaluate(session: Session, predict: Predict, batches: Batches) -> dict[str, float] | None:
    """Evaluate the model and, in a training with ``--ema``, the averaged weights beside it.

    Returns None when asked to stop, else what `measure` does; the averaged ones' tags end in
    ``/ema``.
    """
    found, ema = measure(session, predict, batches), session.state.ema
    if found is None or ema is None or session.stop is None:
        return found
    with ema.in_model():
        averaged = measure(session, predict, batches)
    names = ("Loss", "Top1", "Top5")
    return averaged and found | {f"{name}/ema": averaged[f"{name}/val"] for name in names}


@torch.no_grad()
def measure(session: Session, predict: Predict, batches: Batches) -> dict[str, float] | None:
    """Evaluate over all ranks; every image counts once. Returns None when asked to stop.

    The loss is plain cross entropy, whatever label smoothing training uses. Keys of the result:
    the ``.../val`` tags, "images" evaluated, and "unreadable", how many could not be. Raises:
    `UserError` when too many images are unreadable, or all of them, unless a training is under way,
    which stops.
    """
    world, sampler, stop = session.world, batches.sampler, session.stop
    console, model = session.run.console, session.state.model
    if stop is not None:
        if stop.reason:  # the epoch was cut short
            return None
        stop.begin_phase()
        show_status(session, "evaluating")
    # Each rank has seen other batches since DDP last shared the running statistics of batch norm.
    copy_from_main(model, world, parameters=False)
    model.eval()
    console.start_bar("Evaluation", sampler.rounds)
    sums, began, iterator = Sums(world.device), time.perf_counter(), iter(batches)
    for number in range(sampler.rounds):
        batch = next(iterator, None)  # the last round may not reach all ranks
        if batch is not None:
            images, targets = batch
            logits = predict(images).float()
            if session.args.val_flip:  # the mean over each image and its mirror image
                logits = (logits + predict(images.flip(3)).float()) / 2
            loss = F.cross_entropy(logits, targets, reduction="sum", ignore_index=UNREADABLE)
            sums.add(loss, logits, targets)
        elif session.state.sharded:  # the other ranks gather their weights with this one
            for _ in range(1 + session.args.val_flip):
                predict(batches.blank())
        console.move_bar(number + 1)
        if stop is not None and stop.poll():
            break
    reshard(model)
    metrics, seconds = to_metrics(sums.total(world)), time.perf_counter() - began
    console.stop_bar()
    bad = batches.bad
    bad.share(world)
    if bad.too_many or not (metrics.images or (stop is not None and stop.reason)):
        fault = bad.error() if bad.too_many else _all_bad(bad)
        if stop is None:
            raise fault
        stop.ask(Reason.BAD_FILES, fault)
    if stop is not None and stop.reason:
        return None
    unreadable = sampler.images - metrics.images
    if unreadable:
        log.warning(
            f"{unreadable} of {sampler.images} images in {bad.source.root} could not be read; the "
            "accuracy is that of the others"
        )
    return {
        **metrics.tags("val"),
        "Throughput/val": sampler.images / seconds,
        "Time/val": seconds / sampler.rounds,
        "images": float(metrics.images),
        "unreadable": float(unreadable),
    }


def _all_bad(bad: BadFiles) -> UserError:
    return UserError(
        f"none of the {len(bad.source)} images in {bad.source.root} could be read, the last one "
        f"{bad.source.path(max(bad.seen))}: check the disk and the copy of the data set",
        alike=True,
    )


def evaluate_only(session: Session, predict: Predict) -> int:
    """``-e``: evaluate the model that was loaded, and write the summary. Returns exit code 0."""
    session.run.begin(session.state.epoch, session.state.epoch)
    part = session.args.part
    found = evaluate(session, predict, getattr(session.loaders, part))
    report.evaluation(part, found)
    report.end(session, **{part: found})
    return 0


def test_best(session: Session, predict: Predict) -> dict[str, float] | None:
    """Evaluate DATA/test with the best model of the run. Returns None when asked to stop."""
    best = session.run.folder / BEST

    def read() -> Any:
        return read_checkpoint(best)["state_dict"] if best.is_file() else None

    weights = from_main(read, session.world)
    if weights is not None:
        session.state.load_weights(weights)
    test = measure(session, predict, session.loaders.test)
    if session.stop.error is not None:
        raise session.stop.error
    if test is not None:
        report.evaluation("test", test)
    return test
