"""The lines that a run prints before and after training, and the content of summary.json."""

import logging
import shlex
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from utils import advice
from utils.comparison import closing, describe
from utils.data import progressive, samplers
from utils.model import amp, flops, fsdp, optim
from utils.model.compress import ring_bytes
from utils.monitor import PARTS, tensor_peak
from utils.run import recipes
from utils.run.console import EVERY_NODE, loss_text
from utils.run.snapshots import TrainState
from utils.run.stopping import WHY, Reason
from utils.session import Session, Training
from utils.start import errors
from utils.start.option_types import Options
from utils.start.typical import over_epochs, typical
from utils.start.world import KERNELS

log = logging.getLogger(__name__)

METRICS = ("Top1", "Top5", "Loss")


def start(session: Session, folder: Path) -> None:
    """Print the set-up of the training in ``folder``: processes, steps, learning rate."""
    args, world, state, run = session.args, session.world, session.state, session.run
    sampler, global_batch, val = session.train.sampler, session.global_batch, session.val
    log.info(
        f"{args.arch}; processes: {world.size}, nodes: {world.nodes}, device: {world.device.type}; "
        f"run directory {folder}"
    )
    processes = world.data_parallel_size
    factors = f"{args.batch_size} per process x {processes}"
    if args.global_batch:
        factors = f"at most {sampler.largest} per process and micro-batch x {processes}"
    factors += f" x {sampler.accum} accumulation steps" * (sampler.accum > 1)
    if samplers.step_shape(args, processes)[0] > global_batch:
        factors += "; the whole data set is one step"
    log.info(
        f"{sampler.images} images in {len(session.loaders.classes)} classes: "
        f"{sampler.steps_per_epoch} steps per epoch, global batch {global_batch} ({factors}); "
        f"evaluation on {val.sampler.images}"
    )
    if sampler.sizes:
        sizes = progressive.describe(sampler.sizes)
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
        words = shlex.join(recipes.read(args.recipe))
        log.info(f"recipe {args.recipe}: {words} (options on the command line take precedence)")
    warnings = advice.batch_warnings(args, global_batch, scaled)
    warnings += advice.rate_warnings(args, state.model, global_batch, scaled)
    warnings += advice.step_warnings(args, global_batch, sampler.steps_per_epoch)
    for warning in warnings if world.is_main else ():
        log.warning(warning)
    if state.resumed:
        done = f" (all {args.epochs} epochs are done)" if state.epoch >= args.epochs else ""
        log.info(f"resumed from {run.source}: epoch {state.epoch + 1}, step {state.step}{done}")
    elif args.resume == "auto":
        log.info(
            "--resume auto: this run has no snapshot yet, so training starts at the first step"
        )
    if state.epoch < args.epochs:
        log.info("training begins; the first steps take longer")


def sharding(session: Session) -> None:
    """Print how a sharded model is sharded."""
    if session.state.sharded:
        log.info(fsdp.describe(session.state.model, session.args.reshard))


def setting(session: Session) -> dict[str, Any]:
    """Facts about a run, for the event file, summary.json and the benches."""
    world, comm = session.world, session.args.comm
    return {
        "arch": session.args.arch,
        "mode": session.run.mode,
        "world_size": world.size,
        "nodes": world.nodes,
        "global_batch": session.global_batch,
        "comm": "fp32" if comm and world.size == 1 else comm,
        "sent_mb_per_step": sent_mb(session),
        "device": world.device.type,
        "tensor_peak_bytes": tensor_peak(world.device),
    }


def facts(session: Session) -> dict[str, Any]:
    """Sizes, data and machine, which the event file and summary.json add to the options.

    On a CPU, ``gpus`` is the number of processes.
    """
    args, world, sampler = session.args, session.world, session.train.sampler
    gpus, test = gpu_count(session), session.loaders.test
    return setting(session) | {
        "gpus": gpus,
        "precision": args.opt_level or amp.NAMES[session.loaders.dtype],
        "batch_per_gpu": session.global_batch / gpus,
        "train_sizes": args.progressive or str(session.run.options["image_size"]),
        "steps_per_epoch": sampler.steps_per_epoch,
        "train_images": sampler.images,
        "val_images": session.val.sampler.images,
        **({"test_images": test.sampler.images} if test else {}),
        "class_count": len(session.loaders.classes),
        "data_id": session.train.bad.source.fingerprint(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        **describe(world.device),
    }


def gpu_count(session: Session) -> int:
    """GPUs of the job; on a CPU, its processes."""
    world = session.world
    is_gpu_dp = world.device.type == "cuda" and session.run.mode == "dp"
    return torch.cuda.device_count() if is_gpu_dp else world.size


def used(session: Session) -> dict[str, float]:
    """What the run has used: `Ledger.totals` and, on a GPU that is known, "mfu"."""
    if not isinstance(session, Training) or session.ledger is None:
        return {}
    totals, device = session.ledger.totals(), session.world.device
    if device.type == "cuda" and not session.state.sharded:
        precision = session.args.opt_level or amp.NAMES[session.loaders.dtype]
        is_float32 = precision in ("fp32", "off", "O0")
        name = torch.cuda.get_device_name(device)
        peak = flops.peak(name, "fp32" if is_float32 else precision)
        if peak and (forward := _forward_operations(session)):
            gpus, freeze = gpu_count(session), session.args.freeze
            totals["mfu"] = flops.utilisation(forward, gpus, peak, freeze)
    return totals


def _forward_operations(session: Session) -> float | None:
    """Operations of forward passes per second, over the epochs; None before the first one ends."""
    history, tag = session.state.history, "Size/train"  # which only --progressive has
    sides = {int(record.get(tag, 0)) for record in history}
    model, blank = session.state.model, session.train.blank
    each = {x: flops.of_image(model, blank(x).float()) for x in sides}
    rates = [(x["epoch"], each[int(x.get(tag, 0))] * x["Throughput/train"]) for x in history]
    return typical(dict(rates))


def sent_mb(session: Session) -> float:
    """MB that each process sends per step, computed."""
    state, world = session.state, session.world
    if world.size == 1:
        return 0.0
    trained = [weight for weight in state.model.parameters() if weight.requires_grad]
    if state.comm is not None:
        sent = state.comm.sent_bytes(sum(weight.numel() for weight in trained))
    elif state.sharded:
        weights = [*state.model.parameters()]
        accum = session.train.sampler.accum if session.loaders.train else 1
        sent = fsdp.sent_bytes(weights, session.args, world, session.loaders.dtype, accum)
    else:
        sent = ring_bytes(sum(weight.nbytes for weight in trained), world.size)
    return sent / 1e6


def evaluation(part: str, result: dict[str, float]) -> None:
    """Print the metrics of an evaluation of DATA/``part``."""
    log.info(
        f"{part}: loss {loss_text(result['Loss/val'])}  top-1 {result['Top1/val']:.3f} %  "
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
    # best_loss is that of best.pt; with --best-by top1, another epoch may have a lower one.
    losses = [x[tag] for x in state.history for tag in ("Loss/val", "Loss/ema") if tag in x]
    results["lowest_val_loss"] = min(losses, default=None)
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
    totals = used(session)
    results |= totals
    if state.ema is not None:
        results["best_weights"] = "ema" if best.get("ema") else "model"
        results |= metrics("val_ema", "ema", last)
    if test:
        run.scalars({f"{name}/test": test[f"{name}/val"] for name in METRICS}, state.epoch)
        results |= metrics("test", "val", test) | {"test_images": int(test["images"])}
    success = reason not in (Reason.INTERRUPTED, Reason.UNSAVED)
    run.finish(results, closing(success))
    if reason is Reason.EVALUATED:
        return
    outcome = "no epoch finished"
    if best:
        loss = f"loss {loss_text(best['loss'])}, " if by == "loss" else ""
        averaged = ", averaged weights" if best.get("ema") else ""
        outcome = f"best {loss}top-1 {best['top1']:.2f} % (epoch {best['epoch']}{averaged})"
    if rate := mean.get("Throughput/train"):
        outcome += f", {rate:.1f} images/s"
    if "energy_kwh" in totals:
        outcome += f", {totals['energy_kwh']:.3g} kWh"
    why = WHY.get(reason, reason.value)
    if reason is Reason.INTERRUPTED:
        why += errors.how_to_continue
    if reason is Reason.TRAIN_TIME:  # torchrun starts nothing again that has ended well
        why += errors.how_to_continue.removesuffix(errors.BY_ITSELF)
    # It may be the signal of any node, and all of them end.
    where = EVERY_NODE if reason is Reason.INTERRUPTED else None
    log.info(f"Training time {_duration(state.elapsed)}, {outcome}: {why}", extra=where)


def time_left(args: Options, state: TrainState) -> str:
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
