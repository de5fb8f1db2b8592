"""What a run prints before and after training, and what summary.json holds."""

import logging
import math
import shlex
import time
from datetime import timedelta
from typing import Any

import torch

from utils import addons, errors, launch, optim, provenance, samplers
from utils.option_types import recipe_words
from utils.provenance import over_epochs
from utils.session import Session
from utils.snapshots import TrainState
from utils.stopping import Reason
from utils.watch import PARTS, shares
from utils.world import KERNELS, gather, local

log = logging.getLogger(__name__)

# Above this share of the time for waiting for data, or for communication that compute does not
# hide, a run says so.
LIMIT = 0.1
BUSY = 95.0  # per cent; below, the GPU could do more
SGD_HOLDS_TO = 8192  # the largest global batch that was published as costing SGD no accuracy
REFERENCE_LR = 0.1  # for a global batch of optim.REFERENCE_BATCH, by the same paper
METRICS = ("Top1", "Top5", "Loss")
WHY = {
    Reason.EPOCHS: "all epochs done",
    Reason.DESIRED_ACC: "desired accuracy reached",
    Reason.TRAIN_TIME: "time limit reached; to train on, raise --train-time and ",
    Reason.INTERRUPTED: "interrupted by a signal; to continue, ",
}
LARGE_FILE = 50_000  # bytes; ImageNet's files have 110,000 on average, shrunk to 256 pixels 27,000


def start(session: Session) -> None:
    """Print what is about to be trained: processes, global batch, steps, learning rate."""
    args, world, state, run = session.args, session.world, session.state, session.run
    sampler, global_batch = session.train.sampler, session.global_batch
    log.info(
        f"{args.arch}; processes: {world.size}, nodes: {world.nodes}, device: {world.device.type}; "
        f"run directory {run.folder}"
    )
    factors = f"{args.batch_size} per process x {world.size}"
    factors += f" x {args.accum_steps} accumulation steps" * (args.accum_steps > 1)
    if samplers.global_batch(args.batch_size, world.size, args.accum_steps) > global_batch:
        factors += "; the whole data set is one step"
    log.info(
        f"{sampler.images} images in {len(session.loaders.classes)} classes: "
        f"{sampler.steps_per_epoch} steps per epoch, global batch {global_batch} ({factors}); "
        f"evaluation on {session.loaders.val.sampler.images}"
    )
    if sampler.sizes:
        sizes = addons.describe_sizes(sampler.sizes)
        log.info(f"training images of {sizes}; evaluation at {args.preprocessing.crop}")
    if world.device.type == "cuda":
        log.info(KERNELS)
    sharding(session)
    scaled = optim.scale_lr(args.lr, global_batch, args.lr_scaling)
    if args.lr_scaling != "none":
        log.info(
            f"lr {scaled:.4g}: --lr {args.lr:g} by the {args.lr_scaling} rule for "
            f"{global_batch}/{optim.REFERENCE_BATCH}"
        )
        if scaled > 1.5 * args.lr and not args.warmup_epochs:
            log.info("note: a scaled-up learning rate usually needs --warmup-epochs 5")
    if args.recipe:
        words = shlex.join(recipe_words(args.recipe))
        log.info(f"recipe {args.recipe}: {words} (options on the command line take precedence)")
    for warning in batch_warnings(args, global_batch, scaled):
        log.warning(warning)
    if session.resumed:
        done = f" (all {args.epochs} epochs are done)" if state.epoch >= args.epochs else ""
        log.info(f"resumed from {run.source}: epoch {state.epoch + 1}, step {state.step}{done}")


def batch_warnings(args: Any, global_batch: int, lr: float) -> list[str]:
    """Warnings about a global batch outside ``--batch-range``, or at which SGD may lose accuracy.

    ``lr`` is the learning rate after warm-up, scaled.
    """
    said = []
    low, high = map(int, (args.batch_range or f"0:{global_batch}").split(":"))
    if not low <= global_batch <= high:
        rate = args.lr * global_batch / (high if global_batch > high else low)
        advice = f"; by the linear rule its rate would be --lr {rate:.3g}"
        said.append(
            f"the options are meant for a global batch of {low} to {high} (--batch-range), and "
            f"this is {global_batch}{advice * (args.lr_scaling == 'none')}"
        )
    if global_batch > SGD_HOLDS_TO and args.optimizer in ("sgd", "nesterov"):
        linear = REFERENCE_LR * global_batch / optim.REFERENCE_BATCH
        said.append(
            f"{args.optimizer} is known to keep its accuracy up to a global batch of "
            f"{SGD_HOLDS_TO} (ResNet-50: Goyal et al. 2017, arXiv:1706.02677); this is "
            f"{global_batch}, with lr {lr:.3g} (by the linear rule {linear:.3g}) and "
            f"{args.warmup_epochs:g} epochs of warm-up: expect less accuracy, and use "
            "--warmup-epochs 5 or more"
        )
    return said


def sharding(session: Session) -> None:
    """Print what of a sharded model is sharded how."""
    if session.state.sharded:
        from utils.extras import fsdp

        log.info(fsdp.describe(session.state.model, session.args.reshard))


def facts(session: Session) -> dict[str, Any]:
    """What the event file records besides the options: sizes, data, machine, date.

    ``gpus`` counts processes where there is no GPU.
    """
    args, world, sampler = session.args, session.world, session.train.sampler
    on_gpu = world.device.type == "cuda"
    gpus = torch.cuda.device_count() if on_gpu and session.run.mode == "dp" else world.size
    return setting(session) | {
        "gpus": gpus,
        "precision": getattr(args, "opt_level", None) or args.precision,
        "batch_per_gpu": session.global_batch / gpus,
        "train_sizes": args.progressive or str(args.image_size),
        "steps_per_epoch": sampler.steps_per_epoch,
        "train_images": sampler.images,
        "val_images": session.loaders.val.sampler.images,
        "class_count": len(session.loaders.classes),
        "data_id": session.train.bad.source.fingerprint(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        **provenance.describe(world.device),
    }


def setting(session: Session) -> dict[str, Any]:
    """Facts of the run in both the event file and summary.json."""
    state, world = session.state, session.world
    return {
        "arch": session.args.arch,
        "mode": session.run.mode,
        "world_size": world.size,
        "nodes": world.nodes,
        "global_batch": session.global_batch,
        "comm": state.comm.method if state.comm is not None else None,
        "sent_mb_per_step": sent_mb(session),
        "device": world.device.type,
        "tensor_peak_bytes": tensor_peak(session),
    }


def sent_mb(session: Session) -> float:
    """MB that each process sends per step, computed."""
    state, world = session.state, session.world
    if world.size == 1:
        return 0.0
    from utils.extras import compress, fsdp  # of several processes

    trained = [weight for weight in state.model.parameters() if weight.requires_grad]
    if state.sharded:
        return fsdp.sent_bytes(trained, session.args, world) / 1e6
    if state.comm is None:  # Apex sums gradients in the precision of their weights
        size = _bytes(trained)
    else:
        method = compress.parse(state.comm.method)
        size = compress.wire_bytes([weight.shape for weight in trained], method)
    return compress.sent_bytes(size, world.size) / 1e6


def tensor_peak(session: Session) -> float | None:
    """Peak bytes of this process's tensors on its GPU."""
    device = session.world.device
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None


def memory_tags(session: Session) -> dict[str, float]:
    """Memory of each process's tensors in MiB, as tags. Collective.

    ``optimizer`` is its state and, where it has them, the float32 masters of the parameters;
    ``activations``, on a GPU, are the rest of the peak.
    """
    model, optimizer = session.state.model, session.state.optimizer
    weights = list(model.parameters())
    known = {id(weight) for weight in weights}
    masters = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    kept = [x for entry in optimizer.state.values() for x in entry.values() if torch.is_tensor(x)]
    mine = {
        "parameters": _bytes([*weights, *model.buffers()]),
        "gradients": _bytes([weight for weight in weights if weight.requires_grad]),
        "optimizer": _bytes([*masters, *kept]),
    }
    if (peak := tensor_peak(session)) is not None:
        mine["activations"] = max(0.0, peak - sum(mine.values()))
    return {
        f"Memory/{part}_mb_rank{rank}": size / 2**20
        for rank, sizes in enumerate(gather(mine, session.world))
        for part, size in sizes.items()
    }


def _bytes(tensors: list[torch.Tensor]) -> float:
    """Bytes that this process holds of ``tensors``, each counted once."""
    mine = {id(tensor): local(tensor) for tensor in tensors}
    return float(sum(tensor.numel() * tensor.element_size() for tensor in mine.values()))


def bottleneck(session: Session, record: dict[str, float]) -> None:
    """Report what limited the first epoch: input, network or small kernels; and what would help."""
    waiting, communication = record.get("IO/wait_share", 0.0), shares(record)["Time/communication"]
    if waiting > LIMIT:
        log.info(f"note: {waiting:.0%} of the time was spent waiting for images")
        log.info(f"what helps: {'; '.join(_faster_input(session))}")
    if communication > LIMIT:
        # What is sent halves, and what of it compute hides stays hidden: so does the rest.
        gain = 1 / (1 - communication / 2) - 1
        link = ", or a faster link between the nodes" * (session.world.nodes > 1)
        advice = f"a larger -b, --accum-steps{link}"
        if getattr(session.args, "comm", None) == "fp32":
            advice = f"--comm fp16: by this share {gain:.0%} more images/s; also {advice}"
            if session.world.nodes > 1:
                advice = f"the option that scripts/bench_network.py recommends, or {advice}"
        log.info(f"note: communication takes {communication:.0%} of each step; try {advice}")
    busy = record.get("busy", math.inf)
    if busy < BUSY and max(waiting, communication) <= LIMIT:
        log.info(
            f"note: a GPU is {busy:.0f} % busy (median), not {BUSY:.0f} % or more: kernels are too "
            "short for the host that starts them: raise -b, try --amp or --compile"
        )


def _faster_input(session: Session) -> list[str]:
    """What would help a run that waits for images."""
    reading, source = session.train.reading, session.train.bad.source
    data, prepare = session.args.data.rstrip("/"), "python scripts/prepare_data.py"
    cores = launch.usable_cores()
    of_reading = reading.read_seconds / max(reading.seconds, 1e-9)
    packed = source.stores_pixels
    is_jpeg = not packed and source.path(0).lower().endswith((".jpg", ".jpeg"))
    advice = []
    if slow_disk := of_reading > 0.5:
        mean = reading.bytes / max(reading.files, 1)
        if packed:
            mean = source.sample_sizes()[0]
        advice.append(
            f"the workers spent {of_reading:.0%} of their time reading files: a faster disk (local "
            f"NVMe), or memory that holds the {len(source) * mean / 2**30:.3g} GiB of the data set"
        )
    elif is_jpeg and addons.region_decoder() is None:
        advice.append("faster decoding, on each node: python scripts/build_region_decode.py")
    if session.args.workers < cores:
        advice.append(f"more workers: -j {cores} on this node")
    if not packed and reading.bytes > LARGE_FILE * reading.files:
        advice.append(f"smaller files: {prepare} shrink {data} {data}_small, then train on that")
    elif not packed and not slow_disk:
        advice.append(f"no decoding: {prepare} pack {data} {data}_packed, then train on that")
    return advice or ["a machine with more cores for each GPU"]


def evaluation(part: str, result: dict[str, float]) -> None:
    """Print the metrics of an evaluation of DATA/``part``."""
    log.info(
        f"{part}: loss {result['Loss/val']:.4f}  top-1 {result['Top1/val']:.3f} %  "
        f"top-5 {result['Top5/val']:.3f} %  ({result['images']:.0f} images)"
    )


def end(
    session: Session, val: dict[str, float] | None = None, test: dict[str, float] | None = None
) -> None:
    """Print the closing line and write summary.json. ``val`` defaults to the last epoch's."""
    state, run = session.state, session.run
    reason = session.stop.reason if session.stop else Reason.EVALUATED
    last: dict[str, float] = val or (state.history[-1] if state.history else {})
    tags = sorted({tag for record in state.history for tag in record})
    mean = {tag: over_epochs(state.history, tag) for tag in tags}
    pauses = session.snapshots.pauses if session.snapshots else []
    results = setting(session) | {
        "classes": len(session.loaders.classes),
        **{f"best_{name}": state.best.get(name) for name in ("top1", "top5", "loss", "epoch")},
        "best_by": session.args.best_by,
        "epochs_done": state.epoch,
        "images_per_s": mean.get("Throughput/train"),
        "epoch_seconds": mean.get("Seconds"),
        "elapsed_seconds": state.elapsed,
        "val_images": int(last.get("images", 0)),
        "val_unreadable": int(last.get("unreadable", 0)),
        **{f"val_{name.lower()}": last.get(f"{name}/val") for name in METRICS},
        "finished_because": reason,
        # The longest time for which training stood still for a snapshot.
        "snapshot_pause_seconds": max(pauses, default=None),
        **{f"{part.removeprefix('Time/')}_s": mean.get(part) for part in PARTS},
        "hardware": {tag: mean[tag] for tag in tags if tag.startswith(("GPU/", "CPU/"))},
    }
    if state.ema is not None:
        results["best_weights"] = "ema" if state.best.get("ema") else "model"
        results |= {f"val_ema_{name.lower()}": last.get(f"{name}/ema") for name in METRICS}
    if test:
        run.scalars({f"{name}/test": test[f"{name}/val"] for name in METRICS}, state.epoch)
        results |= {f"test_{name.lower()}": test[f"{name}/val"] for name in METRICS}
        results["test_images"] = int(test["images"])
    run.finish(results)
    if reason is Reason.EVALUATED:
        return
    best = "no epoch finished"
    if state.best:
        averaged = ", averaged weights" * bool(state.best.get("ema"))
        best = f"best top-1 {state.best['top1']:.2f} %"
        if session.args.best_by == "loss":
            best = f"best loss {state.best['loss']:.4f}, top-1 {state.best['top1']:.2f} %"
        best += f" (epoch {state.best['epoch']}{averaged})"
    rate = mean.get("Throughput/train")
    speed = "" if rate is None else f", {rate:.1f} images/s"
    why = WHY[reason]
    if reason in (Reason.TRAIN_TIME, Reason.INTERRUPTED):
        why += errors.how_to_continue
    log.info(f"Training time {_duration(state.elapsed)}, {best}{speed}: {why}")


def time_left(args: Any, state: TrainState) -> str:
    """The remaining time as 1:02:03, by --epochs and --train-time; "" for none.

    An epoch lasts as long as it typically did, evaluation included.
    """
    epoch = over_epochs(state.history, "Seconds") or 0.0
    seconds = epoch * max(args.epochs - state.epoch, 0)
    if args.train_time is not None:
        seconds = min(seconds, 3600 * args.train_time - state.elapsed)
    return _duration(seconds) if seconds > 0 else ""


def _duration(seconds: float) -> str:
    """Seconds as 1:02:03."""
    return str(timedelta(seconds=round(seconds)))
