"""Evaluation, for all scripts: exact at any world size."""

import argparse
import logging
import time
from typing import Any

import torch
import torch.nn.functional as F

from utils.atomic import read_checkpoint
from utils.data.loaders import Batches
from utils.errors import UserError
from utils.launch.world import copy_from_main, from_main, reshard
from utils.metrics import UNREADABLE, Sums, to_metrics
from utils.option_types import positive
from utils.run.snapshots import BEST
from utils.train import report
from utils.train.session import Predict, Session
from utils.train.stopping import Reason

log = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    """``--val-image-size`` and ``--val-flip``."""
    group = parser.add_argument_group("evaluation")
    group.add_argument(
        "--val-image-size",
        type=positive,
        metavar="PX",
        help="side of the crop in evaluation; default: --image-size. Somewhat larger crops often "
        "score better (Touvron et al. 2019, arXiv:1906.06423)",
    )
    group.add_argument(
        "--val-flip",
        action="store_true",
        help="average the logits of each image and its mirror image in evaluation",
    )


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
    if averaged is None:
        return None
    return found | {f"{name}/ema": averaged[f"{name}/val"] for name in ("Loss", "Top1", "Top5")}


@torch.no_grad()
def measure(session: Session, predict: Predict, batches: Batches) -> dict[str, float] | None:
    """Evaluate over all ranks; every image counts once. Returns None when asked to stop.

    The loss is plain cross entropy, whatever label smoothing training uses. Keys of the result:
    the ``.../val`` tags, "images" evaluated, and "unreadable", how many could not be. Raises:
    `UserError` when too many images are unreadable, or all of them, unless a training is under way,
    which stops.
    """
    world, sampler, stop = session.world, batches.sampler, session.stop
    if stop is not None and stop.reason:  # the epoch was cut short
        return None
    if stop is not None:
        stop.begin_phase()
    if session.status is not None:
        session.status.show("evaluating")
    # Each rank has seen other batches since DDP last shared the running statistics of batch norm.
    copy_from_main(session.state.model, world, parameters=False)
    session.state.model.eval()
    predict = _of_both_views(predict) if session.args.val_flip else predict
    session.run.console.start_bar("Evaluation", sampler.rounds)
    sums = Sums(world.device)
    began = time.perf_counter()
    iterator = iter(batches)
    for number in range(sampler.rounds):
        batch = next(iterator, None)  # the last round may not reach all ranks
        if batch is not None:
            images, targets = batch
            logits = predict(images).float()
            loss = F.cross_entropy(logits, targets, reduction="sum", ignore_index=UNREADABLE)
            sums.add(loss, logits, targets)
        elif session.state.sharded:
            predict(batches.blank())  # the other ranks gather their weights with this one
        session.run.console.move_bar(number + 1)
        if stop is not None and stop.poll():
            break
    reshard(session.state.model)
    total = sums.total(world)
    seconds = time.perf_counter() - began
    session.run.console.stop_bar()
    batches.bad.share(world)
    stopped = stop is not None and stop.reason
    if batches.bad.too_many or not (total[3] or stopped):
        if stop is None:
            raise why_useless(batches)
        stop.reason = stop.reason or Reason.BAD_FILES
    if stop is not None and stop.reason:
        return None
    metrics = to_metrics(total)
    unreadable = sampler.images - metrics.images
    if unreadable:
        log.warning(
            f"{unreadable} of {sampler.images} images in {batches.bad.index.root} could "
            "not be read; the accuracy is that of the others"
        )
    return {
        "Loss/val": metrics.loss,
        "Top1/val": metrics.top1,
        "Top5/val": metrics.top5,
        "Throughput/val": sampler.images / seconds,
        "Time/val": seconds / sampler.rounds,
        "images": float(metrics.images),
        "unreadable": float(unreadable),
    }


def _of_both_views(predict: Predict) -> Predict:
    """The mean of the logits of the images and of their mirror images."""
    return lambda images: (predict(images).float() + predict(images.flip(3)).float()) / 2


def why_useless(batches: Batches) -> UserError:
    """The error in every rank for too many unreadable images, or when none is readable."""
    bad = batches.bad
    if bad.too_many:
        return bad.error()
    return UserError(
        f"none of the {len(bad.index)} images in {bad.index.root} could be read, the last one "
        f"{bad.index.path(max(bad.seen))}: check the disk and the copy of the data set",
        alike=True,
    )


def evaluate_only(session: Session, predict: Predict) -> int:
    """``-e``: evaluate the model that was loaded, and write the summary. Returns exit code 0."""
    session.run.begin(session.state.epoch, session.state.epoch)
    val = evaluate(session, predict, session.loaders.val)
    report.evaluation(session, "val", val)
    session.ended_because = Reason.EVALUATED
    report.end(session, {}, val)
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
    if session.stop.reason is Reason.BAD_FILES:
        raise why_useless(session.loaders.test)
    if test is not None:
        report.evaluation(session, "test", test)
    return test
