"""``-b auto``: the largest batch that fits into memory, found by real steps before the training.

A step (forward, backward, optimiser) and an evaluation are tried with more and more images, in
multiples of 8, until the memory is full; they leave no trace (`utils.train.rehearsal`). What
they took grows nearly linearly with the images, which says where to try next: about eight steps
find the number. Each process tries for itself, and all take the least that any of them has found.

Processes that hold parts of one model (FSDP) try the same sizes together, and only such as should
fit into the memory of all by what smaller ones took: none of them may fail within an exchange.
"""

import argparse
import gc
import logging
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from utils.data import mixing, progressive
from utils.data.preprocessing import Preprocessing
from utils.errors import UserError
from utils.launch.world import from_main, gather, node_name
from utils.option_types import AUTO, number
from utils.run.snapshots import read_latest
from utils.train import memory
from utils.train.rehearsal import existing, is_sharded, recover, rehearsal
from utils.train.search import search
from utils.train.session import Predict, Session, TrainStep

STEP = 8  # images, per device
MARGIN = 0.05  # of the memory, for fragments, workspaces and what communication takes later
log = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What belongs to ``-b auto``."""
    group = parser.add_argument_group("the largest batch (-b auto)")
    group.add_argument(
        "--memory-limit",
        type=number(float, 0, exclusive=True),
        metavar="GIB",
        help=f"fill at most this much memory of each process's device, less {MARGIN:.0%}%; "
        "default: what is free of a GPU. On a CPU, where it is needed, the bytes of tensors are "
        "counted",
    )


def check(args: argparse.Namespace) -> None:
    """Raise `UserError` for options that do not go together."""
    if args.memory_limit is not None and args.batch_size != AUTO:
        raise UserError("--memory-limit is for -b auto, which finds the batch", alike=True)
    if args.batch_size == AUTO and args.memory_limit is None and not torch.cuda.is_available():
        raise UserError(
            "-b auto needs --memory-limit GIB without a GPU: a CPU's memory overflows too late, "
            "when the system ends processes",
            alike=True,
        )


@dataclass(frozen=True)
class Found:
    """What one process has found: ``size`` images took ``peak`` bytes of at most ``limit``."""

    size: int
    peak: float
    limit: float
    trials: int


def settle(session: Session, train_step: TrainStep, predict: Predict) -> None:
    """With ``-b auto`` find the batch size, and let all that depends on it know.

    A run that continues keeps its own. Raises: `UserError` when not even the smallest fits.
    """
    args, run, world = session.args, session.run, session.world
    if args.batch_size != AUTO:
        return
    began = time.monotonic()
    kept, image_size = from_main(lambda: _of_checkpoint(session), world)
    if kept:
        _use(session, kept)
        log.info(f"-b auto: {kept} images per process, as in {run.snapshot}")
        return
    mine = _find(session, train_step, predict, image_size or progressive.largest(args))
    all_found = gather((mine, node_name(world)), world)
    least, node = min(all_found, key=lambda pair: pair[0].size)
    if not least.size:
        raise UserError(
            f"not even {_multiple(session)} images fit into {_gib(least.limit)} on {node}: use a "
            "smaller model or --image-size"
            + (", or a larger --memory-limit" if args.memory_limit else ""),
            alike=True,
        )
    _use(session, least.size)
    if world.device.type == "cpu" and mine.size == least.size:
        session.counted_peak = mine.peak
    _say(session, [found for found, _ in all_found], time.monotonic() - began)
    if len({found.size for found, _ in all_found}) > 1:
        most = max(found.size for found, _ in all_found)
        log.info(f"note: {node} has the least room; others could take up to {most} images")


def _use(session: Session, size: int) -> None:
    session.largest_batch = size
    session.args.batch_size = session.run.options["batch_size"] = size
    session.loaders.use_batch(size)
    if session.loaders.train is not None:
        mixing.check(session.args, session.train.sampler)
    session.run.open()


def _say(session: Session, found: list[Found], seconds: float) -> None:
    args, least = session.args, min(found, key=lambda one: one.size)
    kind = "of tensors" if session.world.device.type == "cpu" else "of GPU memory"
    log.info(
        f"-b auto: {least.size} images per process; with them a step takes {_gib(least.peak)} "
        f"{kind} ({least.peak / least.limit * (1 - MARGIN):.0%} of "
        f"{_gib(least.limit / (1 - MARGIN))}); found in {seconds:.1f} s by {least.trials} trials"
    )
    train = session.loaders.train
    if train is not None and train.sampler.steps_per_epoch == 1:
        log.info("note: the whole data set is one step; say how many with -b")
    if args.lr_scaling == "none" and not (args.evaluate or args.dummy):
        log.info("note: with --lr-scaling linear (or sqrt) the learning rate follows the batch")


def _gib(size: float) -> str:
    return f"{size / memory.GIB:.3g} GiB"


def _of_checkpoint(session: Session) -> tuple[int | None, int | None]:
    """The batch size of the run that is to continue, and the image size of other checkpoints."""
    args, path = session.args, session.run.snapshot
    if path is None or args.dummy:
        return None, None
    content = read_latest(path)
    size = content.get("options", content).get("batch_size")
    goes_on = "progress" in content and args.start_epoch is None and not args.evaluate
    if goes_on and isinstance(size, int) and size > 0:
        return size, None
    wanted = content.get("preprocessing")
    if wanted is None or "image_size" not in args.untyped:
        return None, None
    try:
        return None, Preprocessing.of(wanted).image_size
    except ValueError:  # `loop.resume` will say so
        return None, None


def _multiple(session: Session) -> int:
    """What batch sizes are multiples of."""
    on_gpus = session.world.device.type == "cuda" and session.run.mode == "dp"
    return STEP * (torch.cuda.device_count() if on_gpus else 1)


def _find(session: Session, train_step: TrainStep, predict: Predict, image_size: int) -> Found:
    """The largest batch of this process; of a sharded model, of all."""
    args, state, world = session.args, session.state, session.world
    together = is_sharded(state.model)
    averages = _averages(session)
    gauge = _gauge(session, averages, strict=not together)
    hold = args.accum_steps == 1  # else the first micro-batch's gradients lie beside the buckets
    limit, trials = gauge.limit, 0
    rehearse = _Rehearsal(session, train_step, predict, image_size)

    def take(size: int) -> float:
        """Bytes that a step of ``size`` images takes; infinite if there are not so many."""
        nonlocal trials
        trials += 1
        try:
            with gauge:
                rehearse(size)
            peak = gauge.peak
        except Exception as fault:
            if together or not memory.is_shortage(fault):
                raise
            peak = math.inf
        recover(state)
        gc.collect()
        return max(gather(peak, world)) if together else peak

    def with_buckets(replica: torch.nn.parallel.DistributedDataParallel) -> None:
        gauge.add_buckets(replica, hold and replica.gradient_as_bucket_view)

    if together:
        limit = min(gather(limit, world))
    try:
        with rehearsal(state, with_buckets, compiled=bool(args.compile)):
            size, peak = search(take, limit, _multiple(session), _most(session), together)
    finally:
        gauge.close()
    return Found(size, peak, limit, trials)


def _averages(session: Session) -> list[Tensor]:
    """What ``--ema`` will take: made after this search."""
    if not session.args.ema:
        return []
    weights = (memory.local(weight.detach()) for weight in session.state.model.parameters())
    return [torch.empty_like(weight, dtype=torch.float32) for weight in weights]


def _gauge(session: Session, averages: list[Tensor], strict: bool) -> memory.Gauge:
    args, device = session.args, session.world.device
    limit = math.inf if args.memory_limit is None else args.memory_limit * memory.GIB
    if device.type == "cpu":
        there = [*existing(session.state), *averages]
        return memory.Counter(limit * (1 - MARGIN), strict, there)
    every = range(torch.cuda.device_count())
    devices = every if session.run.mode == "dp" else [torch.cuda.current_device()]
    gauge = memory.Allocator(devices, limit, strict)
    gauge.limit *= 1 - MARGIN
    return gauge


def _most(session: Session) -> float:
    """The batch beyond which there are no images: in multiples, so that it may be a few more."""
    args, step = session.args, _multiple(session)
    loaders, parts = session.loaders, session.world.size
    batches = loaders.val if args.evaluate else loaders.train
    if batches is None:
        return math.inf
    if not args.evaluate:
        parts *= args.accum_steps
    return step * math.ceil(batches.sampler.images / parts / step)


class _Rehearsal:
    """A step and an evaluation of a number of images, as the training will have them."""

    def __init__(self, session: Session, train_step: TrainStep, predict: Predict, image_size: int):
        self.session, self.train_step, self.predict = session, train_step, predict
        self.image_size, self.is_first = image_size, True
        # With it, nothing after the first step of the training is new.
        self.micro_batches = min(session.args.accum_steps, 2)

    def __call__(self, size: int) -> None:
        args, model = self.session.args, self.session.state.model
        if not args.evaluate:
            model.train()
            # The first step makes the optimiser's state, which the others find.
            for _ in range(1 + self.is_first):
                self._step(size)
            self.is_first = False
        model.eval()
        with torch.no_grad():
            self.predict(self._images(self.session.loaders.val, size)).float()
        model.train()

    def _step(self, size: int) -> None:
        train = self.session.loaders.train
        for micro in range(self.micro_batches):
            images = self._images(train, size)
            targets = torch.zeros(size, dtype=torch.int64, device=images.device)
            ahead = self._next_batch(images)
            update = micro + 1 == self.micro_batches
            self.train_step(images, targets, 1 / self.micro_batches, update)
            del ahead

    def _images(self, batches: Any, size: int) -> Tensor:
        """``size`` images as ``batches`` gives them."""
        args, world = self.session.args, self.session.world
        side = max(self.image_size, batches.dataset.size if batches is not None else 0)
        dtype = batches.dtype if batches is not None else torch.float32
        shape = (size, 3, side, side)
        images = torch.empty(
            shape, dtype=dtype, device=world.device, memory_format=args.memory_format
        )
        return images.normal_()

    def _next_batch(self, images: Tensor) -> list[Tensor]:
        """What lies on a GPU beside a batch: the next one, before and after normalisation."""
        if images.device.type == "cpu":
            return []
        return [torch.empty_like(images, dtype=torch.uint8), torch.empty_like(images)]
