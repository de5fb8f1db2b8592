"""The parts of a data set, DATA/train, DATA/val and DATA/test: their sources and their classes."""

import os
from pathlib import Path

from utils.data.folder import Folder, Source, class_names
from utils.errors import UserError


def is_pack(root: Path) -> bool:
    """Whether ``root`` holds packed pixels (utils/data/pack.py), whole or not."""
    return (root / "pack.npz").exists() or any(root.glob("*.pixels"))


def open_source(root: Path, classes: list[str], shows: bool = False) -> Source:
    """The images of ``classes`` in DATA/train, DATA/val or DATA/test.

    ``shows``: draw a progress bar on a terminal. Raises: `UserError`.
    """
    if is_pack(root):
        from utils.data.pack import Pack

        return Pack(root, classes)
    return Folder(root, classes, shows)


def class_folders(root: Path) -> list[str]:
    """Sorted names of the classes in ``root``. Raises `UserError` if there are none."""
    if root.name == "test" and not root.is_dir():
        raise UserError(
            f"folder {root} is missing: --part test evaluates on it, --part val on DATA/val",
            alike=True,
        )
    if not root.is_dir():
        raise UserError(
            f"folder {root} is missing: DATA must hold train/CLASS/*.JPEG and val/CLASS/*.JPEG "
            "(scripts/prepare_data.py makes them of known data sets)",
            alike=True,
        )
    if is_pack(root):
        from utils.data.pack import classes_of

        names = classes_of(root)
    else:
        names = class_names(root)
    if not names:
        raise UserError(f"folder {root} has no class folders in it", alike=True)
    return names


def select_classes(choice: str | None, folders: list[str]) -> list[str]:
    """The classes named by ``--classes``: a number, a file of names, one per line, or a,b,c."""
    if not choice:
        return folders
    if choice.isdecimal():
        if not 0 < int(choice) <= len(folders):
            raise UserError(f"--classes {choice}: there are {len(folders)} classes", alike=True)
        return folders[: int(choice)]
    chosen = choice.split(",")
    if os.path.isfile(choice):
        chosen = Path(choice).read_text(encoding="utf-8", errors="replace").split("\n")
    chosen = sorted({name.strip() for name in chosen} - {""})
    unknown = [name for name in chosen if name not in folders]
    if unknown or not chosen:
        named = ", ".join(ascii(name[:60]) for name in unknown[:3]) or "nothing"
        raise UserError(f"--classes names {named}, which is not a class folder", alike=True)
    return chosen


def check_same_classes(root: Path, part: str, classes: list[str], subset: bool) -> None:
    """Raise `UserError` unless ``root/part`` has the folders ``classes``, or more for a subset."""
    present = set(class_folders(root / part))
    missing = [name for name in classes if name not in present]
    extra = [] if subset else sorted(present - set(classes))
    only = [
        f"only {where} has {', '.join(names[:3])}"
        for where, names in (("train", missing), (part, extra))
        if names
    ]
    if only:
        text = f"{root}/train and {root}/{part} have different classes: {'; '.join(only)}"
        raise UserError(text, alike=True)
