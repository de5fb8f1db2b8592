"""``--find-batch``: print the largest batch that fits into a GPU's memory.

Interface: `find` calls the script's `train_step`, without optimiser steps, for 8, 16, 64 ...
random images. Memory use grows nearly linearly, which predicts how many images fit; the memory
for the optimiser's state is added. All processes try the same sizes, so that collectives within a
step match (FSDP, SyncBatchNorm), and the fullest GPU decides.
"""

import math
import re
from contextlib import nullcontext, suppress
from logging import getLogger

import torch
from torch import nn

from utils.session import Session, TrainStep
from utils.start.errors import UserError
from utils.start.world import is_sharded, local

STEP = 8  # images per device
FASTEST = 4  # largest factor from one size to the next
MARGIN = 0.08  # share of memory kept free for fragmentation, workspaces and communication
GIB = 2**30
# How torch, cuDNN and cuBLAS report that they are out of memory.
SHORTAGE = re.compile(
    "out of memory|ALLOC_FAILED|CUDNN_STATUS_(NOT_SUPPORTED|EXECUTION_FAILED|INTERNAL_ERROR)|"
    "[Uu]nable to find an engine|canUse32BitIndexMath"
)
log = getLogger(__name__)


def find(session: Session, train_step: TrainStep) -> int:
    """Print the largest batch per GPU, and how full it makes the fullest GPU. Returns: exit code 0.

    Raises: `UserError` if even the smallest batch does not fit.
    """
    args, world = session.args, session.world
    log.info(f"{args.arch}: forward and backward with growing batches ...")
    size, gpus, how = search(session, train_step, session.train.dataset.size)
    log.info(f"-b {size}: {how}")
    if world.is_main:
        print(f"largest batch per GPU: {size // gpus}", flush=True)
    return 0


def search(session: Session, train_step: TrainStep, side: int) -> tuple[int, int, str]:
    """Return the largest -b, how many GPUs share it, and a text: how full the fullest GPU gets."""
    args, model, world = session.args, session.state.model, session.world
    count = torch.cuda.device_count() if session.run.mode == "dp" else 1
    devices = list(range(count)) if count > 1 else [torch.cuda.current_device()]
    free = min(torch.cuda.mem_get_info(d)[0] + torch.cuda.memory_reserved(d) for d in devices)
    # The optimiser's state (two moments) and the averaged weights are allocated only in training.
    trained = sum(local(w).numel() for w in model.parameters() if w.requires_grad)
    later = 4.0 * trained * (2 + bool(args.ema))
    limit, node = min(world.gather((free * (1 - MARGIN) - later, world.node_name)))
    step = STEP * count
    images = args.global_batch or session.train.sampler.images / args.accum_steps
    share = images / world.data_parallel_size
    most = step * math.ceil(share / step)  # all images of the data set, rounded up
    model.train()
    # Bytes by size; the largest size that fits, the smallest that does not, the next one to try.
    seen: dict[int, float] = {}
    low, high, size = 0, math.inf, step
    # Do not compile for each size: that would take longer than everything else.
    with torch.compiler.set_stance("force_eager") if args.compile else nullcontext():
        while low < size < high:
            peak = max(world.gather(_peak(session, train_step, (size, 3, side, side), devices)))
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
    how = f"takes about {taken:.3g} of {free:.3g} GiB on {node}, which has the least memory"
    return low, count, how + "; the data set has no more images" * (low == most)


def _next(seen: dict[int, float], limit: float, low: int, high: float) -> int:
    """Return the next size to try, given those in ``seen``; at most ``low`` if none is left."""
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
    """Return the peak memory of forward and backward for random images, in bytes, on the fullest
    GPU of this process; infinite if a GPU runs out of memory."""
    args, state, where = session.args, session.state, session.world.device
    torch.cuda.empty_cache()
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    try:
        # The second micro-batch of a step also needs memory for the gradients of the first.
        for _ in range(2 if args.global_batch else min(args.accum_steps, 2)):
            images = torch.randn(shape, dtype=session.loaders.dtype, device=where)
            images = images.contiguous(memory_format=args.memory_format)
            targets = torch.zeros(len(images), dtype=torch.int64, device=where)
            # Training also keeps the next batch in memory, as bytes and as floats.
            ahead = [torch.empty_like(images), torch.empty_like(images, dtype=torch.uint8)]
            train_step(images, targets, 1.0, False)
            del ahead, images
        peak = float(max(torch.cuda.max_memory_allocated(device) for device in devices))
    except RuntimeError as error:
        # If one process skipped a collective, the others would wait for it.
        tied = state.sharded or args.sync_bn
        if tied or not SHORTAGE.search(str(error)):
            raise
        peak = math.inf
    for parameter in state.model.parameters():
        parameter.grad = None
    forget_gradients(state.model)
    return peak


def forget_gradients(model: nn.Module) -> None:
    """Free the unsharded gradients that a sharded model keeps until a step's last micro-batch.

    torch has no public function for this; if its private names change, this does nothing.
    """
    for module in filter(is_sharded, model.modules()):
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch before 2.12
            groups = [getattr(state, "_fsdp_param_group", None)]
        for shard in (shard for group in groups for shard in getattr(group, "fsdp_params", ())):
            with suppress(AttributeError):  # torch 2.15 has no setter
                shard.unsharded_accumulated_grad = None
            if hasattr(shard, "_unsharded_param"):
                shard._unsharded_param.grad = None
