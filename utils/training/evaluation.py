"""One evaluation for all scripts: exact at any world size."""

import time

import torch
import torch.nn.functional as F

from utils.data.loaders import Batches
from utils.metrics import UNREADABLE, Sums, to_metrics
from utils.processes.distributed import copy_from_main
from utils.run import checkpoint
from utils.run.snapshots import BEST
from utils.training import report
from utils.training.session import Job, Predict
from utils.training.stopping import StopRequest


@torch.no_grad()
def evaluate(
    job: Job, predict: Predict, batches: Batches, stop: StopRequest | None = None
) -> dict[str, float] | None:
    """Evaluate over all ranks; every image counts once. Returns None when asked to stop.

    The loss is plain cross entropy, whatever label smoothing training uses. Keys of the result:
    the ``.../val`` tags, "images" evaluated, and "unreadable", how many could not be.
    """
    world, sampler = job.world, batches.sampler
    # Each rank has seen other batches since DDP last shared the running statistics of batch norm.
    copy_from_main(job.state.model, world, parameters=False)
    job.state.model.eval()
    job.run.start_bar("Evaluation", sampler.rounds)
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
        job.run.move_bar(number + 1)
        if stop is not None and stop.poll():
            break
    total = sums.total(world)
    seconds = time.perf_counter() - began
    job.run.stop_bar()
    batches.bad.share(world)
    if batches.bad.too_many and stop is None:
        raise batches.bad.error()
    if stop is not None and (stop.reason or batches.bad.too_many):
        return None
    metrics = to_metrics(total)
    unreadable = sampler.images - metrics.images
    if unreadable:
        job.run.log(
            f"warning: {unreadable} of {sampler.images} images in {batches.bad.index.root} could "
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


def evaluate_only(job: Job, predict: Predict) -> int:
    """``-e``: evaluate the model that was loaded, and write the summary. Returns exit code 0."""
    job.run.begin(job.state.epoch, job.state.epoch)
    val = evaluate(job, predict, job.loaders.val)
    report.evaluation(job, "val", val)
    report.end(job, "evaluated", {}, val)
    return 0


def test_best(job: Job, predict: Predict) -> dict[str, float]:
    """Evaluate DATA/test with the best model of the run."""
    best = job.run.folder / BEST
    if job.world.is_main and best.is_file():
        job.state.load_weights(checkpoint.read(best)["state_dict"])
    copy_from_main(job.state.model, job.world)
    test = evaluate(job, predict, job.loaders.test)
    report.evaluation(job, "test", test)
    return test
