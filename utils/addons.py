"""The only core file that imports from utils/extras/, the optional features.

An extra is imported when an option or a file on disk needs it. The scripts import the extras of
their own mode (fsdp, o2, apex). Extras import the core, but not one another.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any

from utils.option_types import is_url

TRACKERS = {"wandb": "tracker"}  # --tracker: the extra that has `check` and `Tracker`


def extra(name: str) -> Any:
    """The module utils/extras/``name``.py, for an option that needs it.

    Raises: ModuleNotFoundError, which `known_error` reports with the name of the file.
    """
    return import_module(f"utils.extras.{name}")


def extra_if_there(name: str) -> Any:
    """The module utils/extras/``name``.py, if no option requires it; None if it was deleted."""
    return extra(name) if find_spec(f"utils.extras.{name}") else None


def always_on(name: str, function: str, empty: type = NoneType) -> Callable[..., Any]:
    """A wrapper of ``function`` in utils/extras/``name``.py, which is imported by the call.

    If the file was deleted, the call returns None, or an ``empty`` list, dict or str.
    """

    def call(*args: Any, **options: Any) -> Any:
        module = extra_if_there(name)
        return getattr(module, function)(*args, **options) if module else empty()

    return call


# ---- used without an option; documented in the extras

preflight = partial(extra_if_there, "preflight")  # used where processes start and join
list_cache = partial(extra_if_there, "list_cache")
known_error = always_on("known_errors", "explain")
check_gpus = always_on("gpu_check", "check_gpus")
unused_gpus = always_on("gpu_check", "unused", str)
expand_recipe = always_on("recipes", "expand")
validation_label_files = always_on("devkit", "label_files", list)
layout_advice = always_on("layouts", "advice")
run_lock = always_on("run_lock", "Lock")
describe_changes = always_on("resume_notes", "describe", list)
note_slow_float16 = always_on("advice", "note_slow_float16")
batch_warnings = always_on("advice", "batch_warnings", list)
advise = always_on("advice", "bottleneck")
facts = always_on("comparison", "facts", dict)
opening_summaries = always_on("comparison", "opening", list)
closing_summaries = always_on("comparison", "closing", list)
draw_first_batch = always_on("grid", "draw_first_batch")
_make_temporary_folder = always_on("temporary", "make")


def make_temporary_folder() -> None:
    """Make this process's temporary folder; remove those of killed runs."""
    with suppress(OSError):  # a full disk is reported by the first write that matters
        _make_temporary_folder()


def explain_lost_peer(error: Exception, rank: int, processes: list[Any], seconds: float) -> str:
    """The error message for a collective that failed in a process of the job."""
    if lost_peer := extra_if_there("lost_peer"):
        return lost_peer.explain(error, rank, processes, seconds)
    return f"rank {rank} lost touch with another process of the job ({error})"


def watch(session: Any) -> Any:
    """A `utils.extras.watch.Watch`, which measures the parts of each step and the hardware."""
    if module := extra_if_there("watch"):
        return module.Watch(session)
    nothing = {"timed": iter, "end": bool, "recent": dict, "end_epoch": dict}
    return SimpleNamespace(**nothing, close=lambda: None)


def status(session: Any) -> Any:
    """A function of (phase, figures) that reports this process's progress to scripts/status.sh."""
    module = extra_if_there("status")
    return module.Status(session).show if module else lambda *_, **figures: None


# ---- options


def progressive(text: str) -> str:
    """The argparse type of ``--progressive``: check ``text`` and return it."""
    return extra("progressive").check(text)


def epoch_sizes(args: Any) -> tuple[int, ...]:
    """``--progressive``: the side of training images in each epoch, pixels; () without it."""
    return extra("progressive").sizes(args.progressive, args.epochs) if args.progressive else ()


def comm_method(text: str) -> str:
    """The argparse type of ``--comm``: return the method's full name. Raises: `UserError`."""
    return text if text == "fp32" else extra("compress").parse(text).name


def check_options(args: Any, local: bool) -> None:
    """Raise `UserError` if the store, or the tracker's package, cannot be used here."""
    if args.store or is_url(args.resume):
        extra("store").check_options(args.store, args.resume)
    if args.tracker and local:
        extra(TRACKERS[args.tracker]).check()


# ---- data


def source_kind(root: Path) -> Any:
    """The subclass of `utils.folder.Source` that reads ``root`` (DATA/train, say).

    None: ``root`` is a folder of image files.
    """
    if (root / "pack.npz").exists() or any(root.glob("*.pixels")):  # also an unfinished one
        return extra("pack").Pack
    tars = extra_if_there("tars")
    return tars.Tars if tars and tars.tar_files(root) else None


def sources(args: Any) -> dict[str, Any] | None:
    """``--dummy``: synthetic images in place of DATA/train; None: read DATA."""
    return {"train": extra("dummy").Dummy(args.classes)} if args.dummy else None


def select_classes(choice: str | None, folders: list[str]) -> list[str]:
    """``--classes``: the class ``folders`` to train on. Raises: `UserError`."""
    return extra("classes").select(choice, folders) if choice else folders


def worker_class() -> Any:
    """A subclass of `utils.loaders.Worker` that retries a fork that hangs; None: not needed."""
    forks = extra_if_there("forks") if sys.version_info < (3, 12) else None
    return forks and forks.CheckedWorker


def region_decoder() -> Any:
    """`utils.extras.region_decode`, if its library is built; None: decode whole images."""
    decoder = extra_if_there("region_decode")
    return decoder if decoder and decoder.has_library() else None


def change_training_batches(batches: Any, args: Any, classes: int) -> None:
    """Apply the options that change training crops, the order of images, or whole batches."""
    if args.auto_augment or args.random_erasing:
        batches.dataset.augment = extra("augment").build(args.auto_augment, args.random_erasing)
    if args.repeated_aug > 1:
        batches.sampler.reorder = partial(extra("mixing").repeated, views=args.repeated_aug)
    if args.mixup or args.cutmix:
        batches.mix = extra("mixing").build((args.mixup, args.cutmix), batches.sampler, classes)


# ---- model and training step


def timm_models() -> Any:
    """`utils.extras.timm_models` if timm is installed, else None."""
    return extra_if_there("timm_models") if find_spec("timm") else None


def preprocessing_of_weights(args: Any, local: bool) -> Any:
    """The `Preprocessing` that the weights of ``--pretrained`` expect; None without them."""
    return extra("foreign").expected_preprocessing(args, local) if args.pretrained else None


def change_model(model: Any, args: Any, classes: int) -> list[str]:
    """Apply the options that change a new model. Returns: notes for the log."""
    notes = []
    if isinstance(args.pretrained, str):
        notes += extra("foreign").load_weights(model, args.pretrained, args.arch, classes)
    if args.zero_init_gamma or args.freeze or args.activation_checkpointing:
        notes += extra("blocks").change(model, args, classes)
    return notes


def add_average(state: Any, args: Any) -> None:
    """``--ema``: add the part "ema", an average of the weights that each step updates.

    It starts from the current weights.
    """
    if args.ema and not args.evaluate:
        masters = getattr(state.parts["model"], "named_masters", dict)()
        average = state.parts["ema"] = extra("ema").Average(state.model, args.ema, masters)
        state.optimizer.register_step_post_hook(lambda *_: average.after_step())


def other_weights(state: Any) -> dict[str, Any]:
    """Context managers that give the model other weights to evaluate, by tag."""
    return {"ema": state.parts["ema"].in_model()} if "ema" in state.parts else {}


def exchange(replica: Any, args: Any, world: Any, scaler: Any) -> Any:
    """``--comm``: the gradient exchange; None: DistributedDataParallel's own all-reduce."""
    if args.comm == "fp32" or world.size == 1:
        return None
    return extra("compress").Exchange(replica, args, world, scaler)


def compiled(module: Any, args: Any) -> Any:
    """``module`` for the training step: compiled with ``--compile``, else unchanged."""
    return extra("compiling").compiled(module, args) if args.compile else module


def first_step_timed(train_step: Any, args: Any, device: Any) -> Any:
    """``train_step``; with ``--compile``, its first call, which compiles, logs its duration."""
    if args.compile:
        return extra("compiling").first_step_timed(train_step, args, device)
    return train_step


def measures(args: Any) -> bool:
    """Whether a `measurement` runs in place of training."""
    return args.find_batch or args.dummy


def measurement(args: Any) -> Any:
    """The function of (session, train_step) that runs in place of training; or None."""
    if args.find_batch:
        return extra("find_batch").find
    return extra("dummy").time_step if args.dummy else None


def sent_bytes(session: Any, trained: list[Any]) -> float | None:
    """Computed bytes that a process sends per step; None: those of a plain all-reduce."""
    state, dtype = session.state, session.loaders.dtype
    if "comm" in state.parts:
        return state.parts["comm"].sent_bytes([weight.shape for weight in trained])
    if state.sharded:
        return extra("fsdp").sent_bytes(trained, session.args, session.world, dtype)
    return None


# ---- alongside training


def open_store(run: Any) -> None:
    """``--store``: copy each written file of the run. Call it in rank 0 of a training."""
    if run.args.store:
        copies = extra("store").Store(run.args.store, run.folder)
        copies.open(run.args.resume)
        run.written.append(copies.upload)
        run.at_end.append(copies.close)


def open_tracker(run: Any) -> None:
    """``--tracker``: copy the run's curves and pictures. Call it in rank 0 of a training."""
    if run.args.tracker:
        extra(TRACKERS[run.args.tracker]).Tracker(run)


def begin(training: Any) -> None:
    """Start the optional parts of a training (profiler, spot notice) before its first step."""
    args, world, state = training.args, training.world, training.state
    if "comm" in state.parts:
        steps = training.train.sampler.steps_per_epoch
        state.parts["comm"].start_at(state.epoch, state.step, steps, args.epochs)
    if args.profile and world.is_main:
        extra("profiling").start(training.run.folder, state.optimizer)
    if training.run.events is not None:
        draw_first_batch(training)  # into the event file and ``run.pictures``
    if args.spot_notice and world.local_rank == 0:  # any of the nodes may be reclaimed
        extra("spot").watch(args.spot_notice, training.stop)
