"""The parts of a data set (DATA/train, DATA/val, DATA/test): what they are, and their images."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.data import folder, layouts, tars
from utils.data.sources import SUFFIXES, Source
from utils.start.errors import UserError


class Kind(NamedTuple):
    """What a part of a data set can be. Both functions raise `UserError`."""

    class_names: Callable[[Path], list[str]]  # the sorted names of all classes in a folder
    open: Callable[[Path, list[str], bool], Source]  # see `open_source`


FOLDER = Kind(folder.class_names, folder.open_folder)
TARS = Kind(tars.class_names, tars.open_tars)


def source_kind(root: Path) -> Kind:
    """What ``root`` (DATA/train, say) is. Raises: `UserError`."""
    try:
        is_pack = (root / "pack.npz").exists() or any(root.glob("*.pixels"))
    except OSError as error:  # before Python 3.14: it may not be entered, or has too long a name
        text = f"cannot read the folder {root!s:.200}: {error.strerror}"
        raise UserError(text, on_every_rank=True) from None
    if is_pack:
        text = f"{root} holds decoded pixels (a pack), which are no longer read: train on the "
        text += "images that it was made from, or make shards of them (prepare_data.py shards)"
        raise UserError(text, on_every_rank=True)
    return TARS if tars.tar_files(root) else FOLDER


def open_source(root: Path, classes: list[str], shows: bool = False) -> Source:
    """The images of ``classes`` in DATA/train, DATA/val or DATA/test.

    ``shows``: draw a progress bar on a terminal. Raises: `UserError`, also for an empty class.
    """
    kind = source_kind(root)
    source = kind.open(root, classes, shows)
    counts = np.bincount(source.targets, minlength=len(classes))
    if not counts.all():
        name = classes[int(counts.argmin())]
        what = f"class folder {root}/{name}" if kind is FOLDER else f"class {name} of {root}"
        raise UserError(f"{what} has no images ({' '.join(SUFFIXES)})", on_every_rank=True)
    return source


def has_part(root: Path) -> bool:
    """Whether DATA/train, DATA/val or DATA/test exists, as a folder or as tar files next to it."""
    return root.is_dir() or source_kind(root) is not FOLDER


def has_classes(root: Path) -> bool:
    """Whether a part exists and has classes. A contest's test images have none: training does
    without them."""
    return source_kind(root) is not FOLDER or bool(folder.class_names(root))


def class_folders(root: Path) -> list[str]:
    """Sorted names of the classes in ``root``. Raises `UserError` if there are none."""
    if names := source_kind(root).class_names(root):
        return names
    why = layouts.advice(root.parent)
    if root.name == "test":
        why = "move its images into test/CLASS/; --part val uses DATA/val"
    if root.is_dir():
        text = f"folder {root} has no class folders in it{(why and f': {why}') or ''}"
    elif root.name == "test":
        text = f"folder {root} is missing: --part test needs it; --part val uses DATA/val"
    else:
        usual = "DATA must hold train/CLASS/*.JPEG and val/CLASS/*.JPEG, or train.tar and val.tar "
        usual += "(scripts/prepare_data.py converts known data sets)"
        text = f"folder {root} is missing: {why or usual}"
    raise UserError(text, on_every_rank=True)


def check_parts(root: Path, parts: Iterable[str]) -> None:
    """Raise the error of `class_folders` if DATA (``root``) lacks one of ``parts``.

    It takes no time: the headers of tar files are not read.
    """
    for part in parts:
        if source_kind(root / part) is FOLDER:
            class_folders(root / part)


def check_same_classes(root: Path, part: str, classes: list[str], subset: bool) -> None:
    """Raise `UserError` unless ``root/part`` has ``classes`` and, without ``subset``, no others."""
    present, known = set(class_folders(root / part)), set(classes)
    differences = {"train": known - present, part: set() if subset else present - known}
    if only := [f"only {k} has {', '.join(sorted(v)[:3])}" for k, v in differences.items() if v]:
        text = f"{root}/train and {root}/{part} have different classes: {'; '.join(only)}"
        text += ". Give both the same, or choose classes with --classes"
        raise UserError(text, on_every_rank=True)
