"""The one place where the core takes up what it can do without: utils/extras/.

Each function here asks whether an option (or what is on the disk) calls for a file of extras/, and
imports it only then. Nothing else in the core imports from there; the scripts import the extras
that are their mode (fsdp, o2, apex). Extras import the core, not one another.
"""

from functools import partial
from importlib.util import find_spec
from pathlib import Path
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
    return None


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


def open_store(run: Any) -> None:
    """With --store, copy there what the run writes. For rank 0 of a training."""
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
