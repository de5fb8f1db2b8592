"""``-b auto``: the largest batch that fits into a GPU's memory, found before training.

The script's own training step computes forward and backward for 8, 16, 64 ... random images. Its
memory grows nearly linearly, which predicts how many fit. No optimiser step is taken: weights stay
as they are, and batch norm's buffers and random states are restored. All processes try the same
sizes, so that collectives within a step match (FSDP, SyncBatchNorm); the fullest GPU decides.
"""

import math
import re
from contextlib import nullcontext
from logging import getLogger

import torch

from utils.data import mixing
from utils.data.preprocessing import largest_size
from utils.errors import UserError
from utils.launch.world import from_main, gather, local, node_name
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


def resolve(session: Session, train_step: TrainStep) -> None:
    """Find the batch size, and update everything that depends on it.

    A resumed run keeps its batch size. Raises: `UserError` when not even the smallest fits.
    """
    args, run = session.args, session.run
    size, image_size = from_main(lambda: _of_checkpoint(session), session.world)
    how = f"as in {run.snapshot}"
    if not size:
        size, how = _find(session, train_step, image_size or largest_size(args))
    args.batch_size = run.options["batch_size"] = session.largest_batch = size
    session.loaders.use_batch(size)
    if session.loaders.train is not None:
        mixing.check(args, session.train.sampler)
    run.open()
    log.info(f"-b auto: {size} images per process; {how}")
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


def _find(session: Session, train_step: TrainStep, side: int) -> tuple[int, str]:
    """The largest batch, and a description of how full it makes which GPU."""
    args, model, world = session.args, session.state.model, session.world
    count = torch.cuda.device_count() if session.run.mode == "dp" else 1
    devices = list(range(count)) if count > 1 else [torch.cuda.current_device()]
    free = [torch.cuda.mem_get_info(d)[0] + torch.cuda.memory_reserved(d) for d in devices]
    room = min(math.inf if args.memory_limit is None else args.memory_limit * GIB, *free)
    # The optimiser's state (two moments) and the averaged weights come after these steps.
    trained = sum(local(w).numel() for w in model.parameters() if w.requires_grad)
    later = 4.0 * trained * (2 + bool(args.ema))
    limit, node = min(gather((room * (1 - MARGIN) - later, node_name(world)), world))
    step, most = STEP * count, 2**31
    if session.loaders.train is not None:  # the data set has no more, but for less than a step
        share = session.loaders.train.sampler.images / world.size / args.accum_steps
        most = step * math.ceil(share / step)
    buffers = [buffer.clone() for buffer in model.buffers()]
    model.train()
    # Compiling for each size would take longer than all the rest.
    eager = torch.compiler.set_stance("force_eager") if args.compile else nullcontext()
    # Bytes by size; the largest that fits, the smallest that does not, the one to try.
    seen: dict[int, float] = {}
    low, high, size = 0, math.inf, step
    with torch.random.fork_rng(devices), eager:
        while low < size < high:
            peak = max(gather(_peak(session, train_step, (size, 3, side, side), devices), world))
            if peak <= limit:
                low, seen[size] = size, peak
            else:
                high = size
            size = min(_next(seen, limit, low, high) // step * step, most)
    with torch.no_grad():
        for buffer, copy in zip(model.buffers(), buffers, strict=True):
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


def _peak(
    session: Session, train_step: TrainStep, shape: tuple[int, ...], devices: list[int]
) -> float:
    """Bytes that forward and backward for random images take on the fullest of this process's
    GPUs; infinite if they run out of memory."""
    args, state, train = session.args, session.state, session.loaders.train
    torch.cuda.empty_cache()
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    on_device = {"device": session.world.device}
    try:
        # The second micro-batch of a step finds the gradients of the first one.
        for _ in range(min(args.accum_steps, 2)):
            images = torch.randn(shape, dtype=train.dtype if train else None, **on_device)
            images = images.contiguous(memory_format=args.memory_format)
            targets = torch.zeros(len(images), dtype=torch.int64, **on_device)
            # In training, the next batch lies beside it, as bytes and as floats.
            ahead = [torch.empty_like(images), torch.empty_like(images, dtype=torch.uint8)]
            train_step(images, targets, 1.0, False)
            del ahead, images
        peak = float(max(torch.cuda.max_memory_allocated(device) for device in devices))
    except RuntimeError as fault:
        # An exception of one process would leave the others waiting within a collective.
        tied = state.sharded or getattr(args, "sync_bn", False)
        if tied or not SHORTAGE.search(str(fault)):
            raise
        peak = math.inf
    for parameter in state.model.parameters():
        parameter.grad = None
    if state.sharded:
        from utils.comm import fsdp

        fsdp.forget_gradients(state.model)
    return peak
