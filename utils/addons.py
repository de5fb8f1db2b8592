"""The one place where the core takes up what it can do without: utils/extras/.

Each function here asks whether an option (or what is on the disk) calls for a file of extras/, and
imports it only then. Nothing else in the core imports from there; the scripts import the extras
that are their mode (fsdp, o2, apex). Extras import the core, not one another.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any


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


# ---- the start of processes


def meet_nodes(*job: Any) -> None:
    """The pre-flight check of several nodes: see `utils.extras.preflight.meet`."""
    if _is_there("preflight"):
        from utils.extras import preflight

        preflight.meet(*job)


# ---- model and training step
