"""The lines that a run prints before and after training, and the content of summary.json."""

import logging
import shlex
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from utils import addons, errors, optim, samplers
from utils.provenance import over_epochs
from utils.session import Session
from utils.snapshots import TrainState
from utils.stopping import WHY, Reason
from utils.world import KERNELS

log = logging.getLogger(__name__)

METRICS = ("Top1", "Top5", "Loss")
PARTS = ("data", "compute", "communication")  # of a step, see `utils.extras.watch`


def start(session: Session) -> None:
    """Print the set-up of the training: processes, global batch, steps, learning rate."""
    args, world, state, run = session.args, session.world, session.state, session.run
    sampler, global_batch, val = session.train.sampler, session.global_batch, session.loaders.val
    log.info(
        f"{args.arch}; processes: {world.size}, nodes: {world.nodes}, device: {world.device.type}; "
        f"run directory {run.folder}"
    )
    factors = f"{args.batch_size} per process x {world.slices}"
    factors += f" x {args.accum_steps} accumulation steps" * (args.accum_steps > 1)
    if samplers.global_batch(args.batch_size, world.slices, args.accum_steps) > global_batch:
        factors += "; the whole data set is one step"
    log.info(
        f"{sampler.images} images in {len(session.loaders.classes)} classes: "
        f"{sampler.steps_per_epoch} steps per epoch, global batch {global_batch} ({factors}); "
        f"evaluation on {val.sampler.images}"
    )
    if sampler.sizes:
        sizes = addons.extra("progressive").describe(sampler.sizes)
        log.info(f"training images of {sizes}; evaluation at {val.dataset.size}")
    if world.device.type == "cuda":
        log.info(KERNELS)
    sharding(session)
    scaled = optim.scale_lr(args.lr, global_batch, args.lr_scaling)
    if args.lr_scaling != "none":
        log.info(
            f"lr {scaled:.4g}: --lr {args.lr:g} scaled by the {args.lr_scaling} rule "
            f"from batch {optim.REFERENCE_BATCH} to {global_batch}"
        )
        if scaled > 1.5 * args.lr and not args.warmup_epochs:
            log.info("note: a scaled-up learning rate usually needs --warmup-epochs 5")
    if args.recipe:
        words = shlex.join(addons.extra("recipes").read(args.recipe))
        log.info(f"recipe {args.recipe}: {words} (options on the command line take precedence)")
    for warning in addons.batch_warnings(args, global_batch, scaled):
        log.warning(warning)
    if state.resumed:
        done = f" (all {args.epochs} epochs are done)" if state.epoch >= args.epochs else ""
        log.info(f"resumed from {run.source}: epoch {state.epoch + 1}, step {state.step}{done}")


def sharding(session: Session) -> None:
    """Print how a sharded model is sharded."""
    if session.state.sharded:
        log.info(addons.extra("fsdp").describe(session.state.model, session.args.reshard))


def setting(session: Session) -> dict[str, Any]:
    """Facts about a run, for the event file, summary.json and ``--dummy``."""
    world, comm = session.world, getattr(session.args, "comm", None)  # only DDP has it
    return {
        "arch": session.args.arch,
        "mode": session.run.mode,
        "world_size": world.size,
        "nodes": world.nodes,
        "global_batch": session.global_batch,
        "comm": "fp32" if comm and world.size == 1 else comm,
        "sent_mb_per_step": sent_mb(session),
        "device": world.device.type,
        "tensor_peak_bytes": tensor_peak(session),
    }


def ring_bytes(size: float, processes: int) -> float:
    """Bytes that each of ``processes`` sends in a ring all-reduce of ``size`` bytes.

    It sends all but its own part, once for the sums and once to distribute them.
    """
    return 2 * (processes - 1) / processes * size


def sent_mb(session: Session) -> float:
    """MB that each process sends per step, computed."""
    state, world = session.state, session.world
    if world.size == 1:
        return 0.0
    trained = [weight for weight in state.model.parameters() if weight.requires_grad]
    sent = addons.sent_bytes(session, trained)
    if sent is None:
        sent = ring_bytes(sum(weight.nbytes for weight in trained), world.size)
    return sent / 1e6


def tensor_peak(session: Session) -> float | None:
    """Peak bytes of this process's tensors on its GPU."""
    device = session.world.device
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None


def evaluation(part: str, result: dict[str, float]) -> None:
    """Print the metrics of an evaluation of DATA/``part``."""
    log.info(
        f"{part}: loss {result['Loss/val']:.4f}  top-1 {result['Top1/val']:.3f} %  "
        f"top-5 {result['Top5/val']:.3f} %  ({result['images']:.0f} images)"
    )


def end(
    session: Session,
    reason: Reason,
    val: dict[str, float] | None = None,
    test: dict[str, float] | None = None,
    pauses: Sequence[float] = (),
) -> None:
    """Print the closing line and write summary.json.

    ``val`` defaults to the metrics of the last epoch. ``pauses`` are the seconds for which each
    snapshot paused training.
    """
    state, run, best, by = session.state, session.run, session.state.best, session.args.best_by
    last: dict[str, float] = val or (state.history[-1] if state.history else {})
    tags = sorted({tag for record in state.history for tag in record})
    mean = {tag: over_epochs(state.history, tag) for tag in tags}

    def metrics(name: str, tag: str, values: dict[str, float]) -> dict[str, float | None]:
        return {f"{name}_{x.lower()}": values.get(f"{x}/{tag}") for x in METRICS}

    results = setting(session) | metrics("val", "val", last)
    results |= {f"best_{name}": best.get(name) for name in ("top1", "top5", "loss", "epoch")}
    results |= {f"{part}_s": mean.get(f"Time/{part}") for part in PARTS}
    results |= {
        "classes": len(session.loaders.classes),
        "best_by": by,
        "epochs_done": state.epoch,
        "images_per_s": mean.get("Throughput/train"),
        "epoch_seconds": mean.get("Seconds"),
        "elapsed_seconds": state.elapsed,
        "val_images": int(last.get("images", 0)),
        "val_unreadable": int(last.get("unreadable", 0)),
        "finished_because": reason,
        "snapshot_pause_seconds": max(pauses, default=None),
        "hardware": {tag: mean[tag] for tag in tags if tag.startswith(("GPU/", "CPU/"))},
    }
    if "ema" in state.parts:
        results["best_weights"] = "ema" if best.get("ema") else "model"
        results |= metrics("val_ema", "ema", last)
    if test:
        run.scalars({f"{name}/test": test[f"{name}/val"] for name in METRICS}, state.epoch)
        results |= metrics("test", "val", test) | {"test_images": int(test["images"])}
    run.finish(results)
    if reason is Reason.EVALUATED:
        return
    outcome = "no epoch finished"
    if best:
        loss = f"loss {best['loss']:.4f}, " if by == "loss" else ""
        averaged = ", averaged weights" if best.get("ema") else ""
        outcome = f"best {loss}top-1 {best['top1']:.2f} % (epoch {best['epoch']}{averaged})"
    if rate := mean.get("Throughput/train"):
        outcome += f", {rate:.1f} images/s"
    why = WHY.get(reason, reason.value)
    if reason in (Reason.TRAIN_TIME, Reason.INTERRUPTED):
        why += errors.how_to_continue
    log.info(f"Training time {_duration(state.elapsed)}, {outcome}: {why}")


def time_left(args: Any, state: TrainState) -> str:
    """The remaining time as 1:02:03, from --epochs and --train-time; "" if there is none.

    It assumes the median duration of the epochs so far, evaluation included.
    """
    epoch = over_epochs(state.history, "Seconds") or 0.0
    seconds = epoch * max(args.epochs - state.epoch, 0)
    if args.train_time is not None:
        seconds = min(seconds, 3600 * args.train_time - state.elapsed)
    return _duration(seconds) if seconds > 0 else ""


def _duration(seconds: float) -> str:
    """Seconds as 1:02:03."""
    return str(timedelta(seconds=round(seconds)))
