"""``--find-batch``: the largest batch that fits into a GPU's memory.

The script's own training step computes forward and backward for 8, 16, 64 ... random images. Its
memory grows nearly linearly, which predicts how many fit. No optimiser step is taken; the memory of
its state is added. All processes try the same sizes, so that collectives within a step match (FSDP,
SyncBatchNorm); the fullest GPU decides.
"""

import math
import re
from contextlib import nullcontext
from logging import getLogger

import torch
from torch import nn

from utils.errors import UserError
from utils.session import Session, TrainStep
from utils.world import gather, is_sharded, local, node_name

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


def find(session: Session, train_step: TrainStep) -> int:
    """Print the largest batch per GPU, and how full the fullest GPU then is. Returns: exit code 0.

    Raises: `UserError` when not even the smallest fits.
    """
    args, world = session.args, session.world
    log.info(f"{args.arch}: forward and backward with growing batches ...")
    size, gpus, how = search(session, train_step, session.train.dataset.size)
    log.info(f"-b {size}: {how}")
    if world.is_main:
        print(f"largest batch per GPU: {size // gpus}", flush=True)
    return 0


def search(session: Session, train_step: TrainStep, side: int) -> tuple[int, int, str]:
    """The largest -b, the number of GPUs that share it, and how full the fullest GPU then is."""
    args, model, world = session.args, session.state.model, session.world
    count = torch.cuda.device_count() if session.run.mode == "dp" else 1
    devices = list(range(count)) if count > 1 else [torch.cuda.current_device()]
    free = min(torch.cuda.mem_get_info(d)[0] + torch.cuda.memory_reserved(d) for d in devices)
    # The optimiser's state (two moments) and the averaged weights come after these steps.
    trained = sum(local(w).numel() for w in model.parameters() if w.requires_grad)
    later = 4.0 * trained * (2 + bool(args.ema))
    limit, node = min(gather((free * (1 - MARGIN) - later, node_name(world)), world))
    step = STEP * count
    share = session.train.sampler.images / world.slices / args.accum_steps
    most = step * math.ceil(share / step)  # all images of the data set, rounded up
    model.train()
    # Bytes by size; the largest that fits, the smallest that does not, the one to try.
    seen: dict[int, float] = {}
    low, high, size = 0, math.inf, step
    # Compiling for each size would take longer than all the rest.
    with torch.compiler.set_stance("force_eager") if args.compile else nullcontext():
        while low < size < high:
            peak = max(gather(_peak(session, train_step, (size, 3, side, side), devices), world))
            if peak <= limit:
                low, seen[size] = size, peak
            else:
                high = size
            size = min(_next(seen, limit, low, high) // step * step, most)
    if not low:
        raise UserError(
            f"not even {step} images fit into {(limit + later) / GIB:.3g} GiB on {node}: use a "
            "smaller model or --image-size",
            on_every_rank=True,
        )
    taken, free = (seen[low] + later) / GIB, (limit + later) / (1 - MARGIN) / GIB
    how = f"takes about {taken:.3g} of {free:.3g} GiB on {node}, which has the least"
    return low, count, how + "; the data set has no more images" * (low == most)


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
    args, state = session.args, session.state
    torch.cuda.empty_cache()
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    on_device = {"device": session.world.device}
    try:
        # In the second micro-batch of a step, the gradients of the first one take memory.
        for _ in range(min(args.accum_steps, 2)):
            images = torch.randn(shape, dtype=session.loaders.dtype, **on_device)
            images = images.contiguous(memory_format=args.memory_format)
            targets = torch.zeros(len(images), dtype=torch.int64, **on_device)
            # In training, the next batch lies beside it, as bytes and as floats.
            ahead = [torch.empty_like(images), torch.empty_like(images, dtype=torch.uint8)]
            train_step(images, targets, 1.0, False)
            del ahead, images
        peak = float(max(torch.cuda.max_memory_allocated(device) for device in devices))
    except RuntimeError as error:
        # An exception of one process would leave the others waiting within a collective.
        tied = state.sharded or getattr(args, "sync_bn", False)
        if tied or not SHORTAGE.search(str(error)):
            raise
        peak = math.inf
    for parameter in state.model.parameters():
        parameter.grad = None
    forget_gradients(state.model)
    return peak


def forget_gradients(model: nn.Module) -> None:
    """Drop the whole gradients of a sharded model, of micro-batches that have ended no step.

    By torch's private names, as there is no public way; without them, this does nothing.
    """
    for module in filter(is_sharded, model.modules()):
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch before 2.12
            groups = [getattr(state, "_fsdp_param_group", None)]
        for shard in (shard for group in groups for shard in getattr(group, "fsdp_params", ())):
            shard.unsharded_accumulated_grad = None
            if hasattr(shard, "_unsharded_param"):
                shard._unsharded_param.grad = None
