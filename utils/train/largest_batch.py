"""``-b auto``: the largest batch that fits into a GPU's memory, found before training.

The script's own training step computes forward and backward for 8, 16, 64 ... random images. Its
memory grows nearly linearly, which predicts how many fit. No optimiser step is taken: weights stay
as they are, and batch norm's buffers and random states are restored. All processes try the same
sizes, so that collectives within a step match (FSDP, SyncBatchNorm); the fullest GPU decides.
"""

import argparse
import math
import re
from collections.abc import Sequence
from contextlib import nullcontext
from logging import getLogger

import torch
from torch import Tensor

from utils.data import mixing
from utils.data.preprocessing import largest_size
from utils.errors import UserError
from utils.launch.world import from_main, gather, local, node_name
from utils.option_types import AUTO
from utils.run.snapshots import read_latest
from utils.train.session import Session, TrainStep

STEP = 8  # images per device
FASTEST = 4  # times the last size that fitted, at most
MARGIN = 0.08  # of the memory: for fragments, workspaces and what communication takes later
GIB = 2**30
# How torch, cuDNN and cuBLAS report that they are out of memory.
SHORTAGE = re.compile(
    "out of memory|ALLOC_FAILED|CUDNN_STATUS_(NOT_SUPPORTED|EXECUTION_FAILED|INTERNAL_ERROR)|"
    "[Uu]nable to find an engine|canUse32BitIndexMath"
)
log = getLogger(__name__)


def check(args: argparse.Namespace) -> None:
    """Raise `UserError` for options that do not go together."""
    if args.memory_limit is not None and args.batch_size != AUTO:
        raise UserError("--memory-limit is for -b auto, which finds the batch", alike=True)
    if args.batch_size == AUTO and not torch.cuda.is_available():
        raise UserError("-b auto measures the memory of GPUs: give -b a number here", alike=True)


def resolve(session: Session, train_step: TrainStep) -> None:
    """Find the batch size, and update everything that depends on it.

    A resumed run keeps its batch size. Raises: `UserError` when not even the smallest fits.
    """
    args, run = session.args, session.run
    size, image_size = from_main(lambda: _of_checkpoint(session), session.world)
    if size:
        how = f"as in {run.snapshot}"
    else:
        size, how = _find(session, train_step, image_size or largest_size(args))
    args.batch_size = run.options["batch_size"] = session.largest_batch = size
    session.loaders.use_batch(size)
    train = session.loaders.train
    if train is not None:
        mixing.check(args, train.sampler)
    run.open()
    log.info(f"-b auto: {size} images per process; {how}")
    if train is not None and train.sampler.steps_per_epoch == 1:
        log.info("note: the whole data set is one step; say how many with -b")
    if args.lr_scaling == "none" and not (args.evaluate or args.dummy):
        log.info("note: with --lr-scaling linear (or sqrt) the learning rate follows the batch")


def _of_checkpoint(session: Session) -> tuple[int | None, int | None]:
    """The batch size of the run that is to continue, or the image size of another checkpoint."""
    args, path = session.args, session.run.snapshot
    if path is None or args.dummy:
        return None, None
    content = read_latest(path)
    if "progress" in content and args.start_epoch is None and not args.evaluate:
        return content["options"]["batch_size"], None
    wanted = content.get("preprocessing") or {}
    return None, wanted.get("image_size") if "image_size" in args.untyped else None


def _find(session: Session, train_step: TrainStep, image_size: int) -> tuple[int, str]:
    """The largest batch, and a description of how full it makes which GPU."""
    args, state, world = session.args, session.state, session.world
    count = torch.cuda.device_count() if session.run.mode == "dp" else 1
    devices = range(count) if count > 1 else [torch.cuda.current_device()]
    step, later, most = STEP * count, _later(session), 2**31
    if session.loaders.train is not None:  # the data set has no more, but for less than a step
        parts = world.size * args.accum_steps
        most = step * math.ceil(session.loaders.train.sampler.images / parts / step)
    limit, node = min(gather((_room(args, devices) - later, node_name(world)), world))
    # An exception of one process would leave the others waiting within a collective.
    tied = state.sharded or getattr(args, "sync_bn", False)
    buffers = [buffer.clone() for buffer in state.model.buffers()]
    seen: dict[int, float] = {}

    def take(size: int) -> float:
        """Bytes that a step takes on the fullest GPU of all; infinite if it runs out of memory."""
        torch.cuda.empty_cache()
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
        try:
            # The second micro-batch of a step finds the gradients of the first one.
            for _ in range(min(args.accum_steps, 2)):
                _compute(session, train_step, size, image_size)
            peak = float(max(torch.cuda.max_memory_allocated(device) for device in devices))
        except RuntimeError as fault:
            if tied or not SHORTAGE.search(str(fault)):
                raise
            peak = math.inf
        for parameter in state.model.parameters():
            parameter.grad = None
        if state.sharded:
            from utils.comm import fsdp

            fsdp.forget_gradients(state.model)
        return max(gather(peak, world))

    state.model.train()
    # Compiling for each size would take longer than all the rest.
    eager = torch.compiler.set_stance("force_eager") if args.compile else nullcontext()
    # The largest that fits, the smallest that does not, the one to try.
    low, high, size = 0, math.inf, step
    with torch.random.fork_rng(list(devices)), eager:
        while low < size < high:
            if (peak := take(size)) <= limit:
                low, seen[size] = size, peak
            else:
                high = size
            size = min(_next(seen, limit, low, high) // step * step, most)
    with torch.no_grad():
        for buffer, copy in zip(state.model.buffers(), buffers, strict=True):
            buffer.copy_(copy)
    torch.cuda.empty_cache()
    if not low:
        raise UserError(
            f"not even {step} images fit into {(limit + later) / GIB:.3g} GiB on {node}: use a "
            "smaller model or --image-size",
            alike=True,
        )
    taken, room = (seen[low] + later) / GIB, (limit + later) / (1 - MARGIN) / GIB
    return low, f"they take about {taken:.3g} of {room:.3g} GiB on {node}, which has the least"


def _next(seen: dict[int, float], limit: float, low: int, high: float) -> int:
    """The size to try after those in ``seen``; below ``low`` or equal to it if there is none."""
    if high < math.inf:
        return (low + int(high)) // 2
    if len(seen) < 2:
        return 2 * low
    (a, less), (b, more) = sorted(seen.items())[-2:]
    fitting = b + (limit - more) * (b - a) / max(more - less, 1.0)
    return int(min(fitting, FASTEST * low))


def _room(args: argparse.Namespace, devices: Sequence[int]) -> float:
    """Bytes that tensors may take on each device."""
    free = [torch.cuda.mem_get_info(d)[0] + torch.cuda.memory_reserved(d) for d in devices]
    given = math.inf if args.memory_limit is None else args.memory_limit * GIB
    return min(given, *free) * (1 - MARGIN)


def _later(session: Session) -> float:
    """Bytes that come after these steps: the optimiser's state (two moments), averaged weights."""
    weights = session.state.model.parameters()
    mine = sum(local(weight).numel() for weight in weights if weight.requires_grad)
    return 4.0 * mine * (2 + bool(session.args.ema))


def _compute(session: Session, train_step: TrainStep, size: int, side: int) -> None:
    """Forward and backward for a random batch; beside it lies the next one, as in training."""
    train, device = session.loaders.train, session.world.device
    images = torch.randn(size, 3, side, side, device=device, dtype=train.dtype if train else None)
    images = images.contiguous(memory_format=session.args.memory_format)
    ahead: list[Tensor] = [torch.empty_like(images), torch.empty_like(images, dtype=torch.uint8)]
    train_step(images, torch.zeros(size, dtype=torch.int64, device=device), 1.0, False)
    del ahead
