"""The one place where the core takes up what it can do without: utils/extras/.

Each function here asks whether an option (or what is on the disk) calls for a file of extras/, and
imports it only then. Nothing else in the core imports from there; the scripts import the extras
that are their mode (fsdp, o2, apex). Extras import the core, not one another.
"""

import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from utils.option_types import is_url


def _is_there(name: str) -> bool:
    """Whether the file ``name`` of extras/, which no option calls for, has not been deleted."""
    return find_spec(f"utils.extras.{name}") is not None


# ---- data


def source_kind(root: Path) -> Any:
    """The subclass of `utils.folder.Source` that reads ``root`` (DATA/train, say).

    None: ``root`` is a folder of image files.
    """
    if (root / "pack.npz").exists() or any(root.glob("*.pixels")):  # finished or not
        from utils.extras.pack import Pack

        return Pack
    if _is_there("tars"):
        from utils.extras import tars

        if tars.tar_files(root):
            return tars.Tars
    return None


def list_cache() -> Any:
    """`utils.extras.list_cache`, where the list of the images is kept; or None."""
    if not _is_there("list_cache"):
        return None
    from utils.extras import list_cache

    return list_cache


def validation_label_files(folder: Path) -> list[Path]:
    """The files in ``folder`` that say of which classes ImageNet's validation images are."""
    if not _is_there("devkit"):
        return []
    from utils.extras import devkit

    return devkit.label_files(folder)


def validation_labels(folder: Path) -> dict[str, str]:
    """The class of each of ImageNet's validation images, by file name. Raises: `UserError`."""
    from utils.extras import devkit

    return devkit.val_labels(folder)


def layout_advice(data: Path) -> str | None:
    """What to do about images in a layout that training does not read; None: it is no such one."""
    if not _is_there("layouts"):
        return None
    from utils.extras import layouts

    return layouts.advice(data)


def region_decoder() -> Any:
    """`utils.extras.region_decode`, where its library is built; None: decode whole images."""
    if not _is_there("region_decode"):
        return None
    from utils.extras import region_decode

    return region_decode if region_decode.has_library() else None


def progressive(text: str) -> str:
    """The type of ``--progressive``: the text, checked."""
    from utils.extras import progressive

    return progressive.check(text)


def epoch_sizes(args: Any) -> tuple[int, ...]:
    """``--progressive``: the side of training images in each epoch, pixels; () without it."""
    if not args.progressive:
        return ()
    from utils.extras import progressive

    return progressive.sizes(args.progressive, args.epochs)


def describe_sizes(epoch_sizes: tuple[int, ...]) -> str:
    """``--progressive``: which size comes when."""
    from utils.extras import progressive

    return progressive.describe(epoch_sizes)


def repeated_augmentation(args: Any) -> Any:
    """``--repeated-aug``: a function that changes an epoch's order of images; None without it."""
    if args.repeated_aug == 1:
        return None
    from utils.extras import mixing

    return partial(mixing.repeated, views=args.repeated_aug)


def dummy_classes(args: Any) -> list[str]:
    """``--dummy``: classes without images. Raises: `UserError`."""
    from utils.extras import dummy

    return dummy.classes(args.classes)


def augmentation(args: Any) -> Any:
    """``--auto-augment`` and ``--random-erasing``: a function of a crop; None without them."""
    if not (args.auto_augment or args.random_erasing):
        return None
    from utils.extras import augment

    return augment.build(args.auto_augment, args.random_erasing)


def mixing(args: Any, sampler: Any, classes: int) -> Any:
    """``--mixup`` and ``--cutmix``: what `Batches.mix` becomes; None without them."""
    if not (args.mixup or args.cutmix):
        return None
    from utils.extras import mixing

    return mixing.build((args.mixup, args.cutmix), sampler, classes)


# ---- a run: its directory, snapshots, end


def weights_of_other_program(
    content: dict[str, Any], path: Path | None
) -> tuple[dict[str, Any], str | None]:
    """The model's weights in a file that is not ours, and a note about them."""
    from utils.extras import foreign

    return foreign.plain_weights(content, path)


def check_store(args: Any) -> None:
    """Raise `UserError` for a --store or a --resume URL that cannot be used here."""
    if args.store or is_url(args.resume):
        from utils.extras import store

        store.check_options(args.store, args.resume)


def follow(run: Any) -> None:
    """What gets the run's curves (``run.curves``), its files (``run.written``) and its end
    (``run.at_end``), besides TensorBoard: ``--store``. For rank 0 of a training."""
    if run.args.store:
        from utils.extras import store

        copies = store.Store(run.args.store, run.folder)
        copies.open(run.args.resume)
        run.written.append(copies.upload)
        run.at_end.append(copies.close)


def run_at(url: str, mark: str) -> str | None:
    """The name of the run that has the file at ``url`` and a file ``mark``."""
    from utils.extras import store

    return store.run_name(url, mark)


def fetch(url: str, folder: Path | None) -> Path:
    """Download a checkpoint into ``folder``, as a temporary file."""
    from utils.extras import store

    return store.fetch(url, folder)


# ---- the start of processes


def meet_nodes(*job: Any) -> None:
    """The pre-flight check of several nodes: see `utils.extras.preflight.meet`."""
    if _is_there("preflight"):
        from utils.extras import preflight

        preflight.meet(*job)


# ---- model and training step


def timm_models() -> Any:
    """`utils.extras.timm_models`, where timm is installed; else None."""
    if not (find_spec("timm") and _is_there("timm_models")):
        return None
    from utils.extras import timm_models

    return timm_models


def preprocessing_of_weights(args: Any, local: bool) -> Any:
    """The `Preprocessing` that the weights of ``--pretrained`` expect; None for new weights."""
    if not args.pretrained:
        return None
    from utils.extras import foreign

    return foreign.expected_preprocessing(args, local)


def with_published_weights(arch: str, classes: int, image_size: int) -> Any:
    """A model of torchvision with its published weights: ``--pretrained``."""
    from utils.extras import foreign

    return foreign.with_published_weights(arch, classes, image_size)


def set_drop_path(model: Any, share: float) -> None:
    """``--drop-path``, for a model of torchvision."""
    from utils.extras import blocks

    blocks.drop_path(model, share)


def change_model(model: Any, args: Any, classes: int) -> list[str]:
    """What options change in a new model. Returns: notes for the log."""
    notes = []
    if isinstance(args.pretrained, str):
        from utils.extras import foreign

        notes += foreign.load_weights(model, args.pretrained, args.arch, classes)
    if args.zero_init_gamma or args.freeze or args.activation_checkpointing:
        from utils.extras import blocks

        notes += blocks.change(model, args, classes)
    return notes


def muon(model: Any, args: Any, betas: tuple[float, ...], fused: bool) -> Any:
    """``--optimizer muon``."""
    from utils.extras import muon

    return muon.build(model, args, betas, fused)


def average(state: Any, args: Any) -> Any:
    """``--ema``: the `Average` of the model's weights, which follows each optimiser step; or None.

    It begins with the weights as they are now.
    """
    if not args.ema or args.evaluate:
        return None
    from utils.extras.ema import Average

    masters = getattr(state.weights, "named_masters", dict)()
    averages = Average(state.model, args.ema, masters)
    state.optimizer.register_step_post_hook(lambda *_: averages.after_step())
    return averages


def comm_method(text: str) -> str:
    """The type of ``--comm``: the method's full name. Raises: `UserError`."""
    if text == "fp32":
        return text
    from utils.extras import compress

    return compress.parse(text).name


def exchange(replica: Any, args: Any, world: Any, scaler: Any) -> Any:
    """``--comm``: how the processes exchange gradients; None: as DistributedDataParallel does."""
    if args.comm == "fp32" or world.size == 1:
        return None
    from utils.extras.compress import Exchange

    return Exchange(replica, args, world, scaler)


def compiled(module: Any, args: Any) -> Any:
    """``module`` for the training step: compiled with ``--compile``, else as it is."""
    if not args.compile:
        return module
    from utils.extras import compiling

    return compiling.compiled(module, args)


def first_step_timed(train_step: Any, args: Any, device: Any) -> Any:
    """``train_step``; with ``--compile`` the time of its first call, which compiles, is logged."""
    if not args.compile:
        return train_step
    from utils.extras import compiling

    return compiling.first_step_timed(train_step, args, device)


def measurement(args: Any) -> Any:
    """What takes the place of a training, called with session and train_step; or None."""
    if args.find_batch:
        from utils.extras import find_batch

        return find_batch.find
    if args.dummy:
        from utils.extras import dummy

        return dummy.time_step
    return None


def watch(session: Any) -> Any:
    """What measures the parts of each step and the hardware: `utils.extras.watch.Watch`."""
    if not _is_there("watch"):
        nothing = {"timed": iter, "end_step": bool, "recent": dict, "end_epoch": dict}
        return SimpleNamespace(**nothing, close=lambda: None)
    from utils.extras.watch import Watch

    return Watch(session)


def step_timer(session: Any) -> Any:
    """The clock of a step, for ``--dummy``: `utils.extras.watch.StepTimer`."""
    from utils.extras.watch import StepTimer

    return StepTimer(session.state.model, session.world.device, session.world.size > 1)


def profile(session: Any) -> None:
    """``--profile``: trace some steps of rank 0."""
    if session.args.profile and session.world.is_main:
        from utils.extras import profiling

        profiling.start(session.run.folder, session.state.optimizer)


def sharding_text(model: Any, args: Any) -> str:
    """A line about what of a sharded model is sharded how."""
    from utils.extras import fsdp

    return fsdp.describe(model, args.reshard)


def sharded_bytes(session: Any, trained: list[Any]) -> float:
    """Bytes that a process of a sharded model sends per step; computed."""
    from utils.extras import fsdp

    return fsdp.sent_bytes(trained, session.args, session.world, session.loaders.dtype)


# ---- beside the training


def draw_first_batch(session: Any) -> None:
    """Have the first training batch drawn: in the event file, and by ``run.pictures``."""
    if session.run.events is not None and _is_there("grid"):
        from utils.extras import grid

        grid.draw_first_batch(session)


def watch_spot(args: Any, stop: Any, world: Any) -> None:
    """``--spot-notice``: ask for the end of the run when EC2 reclaims this node."""
    if args.spot_notice and world.local_rank == 0:  # any of the nodes may be reclaimed
        from utils.extras import spot

        spot.watch(args.spot_notice, stop)


def batch_warnings(args: Any, global_batch: int, lr: float) -> list[str]:
    """Warnings about a global batch that may cost accuracy."""
    if not _is_there("advice"):
        return []
    from utils.extras import advice

    return advice.batch_warnings(args, global_batch, lr)


def advise(session: Any, record: dict[str, float]) -> None:
    """Log what limited the first epoch, and what would help."""
    if _is_there("advice"):
        from utils.extras import advice

        advice.bottleneck(session, record)


def status(session: Any) -> Any:
    """A function of (phase, figures) that says what this process is doing: to scripts/status.sh."""
    if not _is_there("status"):
        return lambda *_, **figures: None
    from utils.extras.status import Status

    return Status(session).show


def progress_bar(world: Any) -> Any:
    """A progress bar for rank 0 on a terminal; or None."""
    if not (world.is_main and sys.stderr.isatty() and _is_there("progress_bar")):
        return None
    from utils.extras.progress_bar import ProgressBar

    return ProgressBar()


def facts(session: Any) -> dict[str, Any]:
    """Facts about a training, for its event file and summary.json."""
    if not _is_there("comparison"):
        return {}
    from utils.extras import comparison

    return comparison.facts(session)


def opening_summaries(facts: dict[str, Any]) -> list[Any]:
    """What an event file begins with: the charts of TensorBoard, and the facts about the run."""
    if not _is_there("comparison"):
        return []
    from utils.extras import comparison

    return comparison.opening(facts)


def closing_summaries(success: bool) -> list[Any]:
    """What an event file ends with."""
    if not _is_there("comparison"):
        return []
    from utils.extras import comparison

    return comparison.closing(success)
