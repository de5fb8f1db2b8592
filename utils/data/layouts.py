"""Recognise ImageNet layouts that training cannot read but scripts/prepare_data.py can convert.

No option: used if DATA/train or DATA/val has no class folders. Interface: `advice` completes that
error message.
"""

import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from utils.data import devkit
from utils.data.folder import class_names
from utils.data.sources import SUFFIXES, is_hidden
from utils.start.errors import command

KAGGLE = "ILSVRC/Data/CLS-LOC"
# How other programs name the parts of a data set, in lower case.
NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}


class Layout(NamedTuple):
    """The folders in which the images of a data set are."""

    name: str
    folders: dict[str, list[Path]]  # by split: the folders that contain its class folders
    flat: Path | None = None  # the folder of validation images without class folders
    labels: Path | None = None  # the folder with the devkit or table that has their classes


def find(data: Path) -> Layout | None:
    """Return the layout of the folder ``data``; None if unknown, or if training can read it."""
    parts = {split: sorted(data.glob(f"{split}.X*")) for split in ("train", "val")}
    if parts["train"]:
        return Layout("Kaggle's imagenet100 (train.X1, ...)", parts)
    for base in (data / KAGGLE, data / "Data/CLS-LOC", data):
        flat = base / "val" if _is_flat(base / "val") else None
        if flat or (base != data and (base / "train").is_dir()):
            folders = {"train": [base / "train"], "val": [] if flat else [base / "val"]}
            name = f"Kaggle's ImageNet ({base.relative_to(data)})"
            name = "validation images without class folders" if base == data else name
            return Layout(name, folders, flat, _label_folder(data, base))
    return None


def _is_flat(folder: Path) -> bool:
    """Return whether ``folder`` contains images and no folders. Hidden ones are ignored."""
    try:
        with os.scandir(folder) as entries:
            seen = [entry for entry in entries if not is_hidden(entry.name)]
    except OSError:
        return False
    images = any(entry.name.lower().endswith(SUFFIXES) for entry in seen)
    return images and not any(entry.is_dir() for entry in seen)


def _label_folder(data: Path, base: Path) -> Path | None:
    """Return the folder with the devkit or Kaggle's table: ``data``, val/ or a folder above it."""
    above = (base / "val", base, *base.resolve().parents[:3])
    return next((one for one in (data, *above) if devkit.label_files(one)), None)


def classes_at_top(data: Path, least: int = 2) -> list[str]:
    """Names of the folders with images directly in ``data``, if there are ``least``; else [].

    Folders that are data sets, with a train/ or val/ of their own, are no classes.
    """
    names = [name for name in class_names(data) if name not in ("train", "val", "test")]
    names = [n for n in names if not any((data / n / part).is_dir() for part in ("train", "val"))]
    names = [name for name in names if has_image(data / name)]
    return names if len(names) >= least else []


def no_folder(data: Path) -> str:
    """An error message about ``data``, which is no folder."""
    if data.is_file():
        return f"{data} is a file: give a folder (extract a zip file first)"
    return f"there is no folder {data}"


def has_image(folder: Path) -> bool:
    """Whether there is an image in or below ``folder``."""
    return any(
        name.lower().endswith(SUFFIXES) and not is_hidden(name)
        for _, _, names in os.walk(folder)
        for name in names
    )


def label_table(data: Path) -> Path | None:
    """The CSV file in ``data`` that lists classes: the only one, or the one named like that."""
    tables = sorted(data.glob("*.csv"))
    named = [path for path in tables if "label" in path.name.lower() or path.stem == "train"]
    tables = tables if len(tables) == 1 else named
    return tables[0] if len(tables) == 1 else None


def misplaced(data: Path) -> str | None:
    """A clause about parts that ``data`` has in another folder, as an archive has them, or under
    other names, such as Training/ and valid/, with the commands that rename them; or if ``data`` is
    such a part itself. None without.

    A part has class folders, other than a class that has such a name.
    """
    if parent := _parent_set(data):
        return f"{data} is a part of a data set: give {parent}"
    folders = [data / name for name in class_names(data)]
    whole = [one for one in folders if (one / "train").is_dir() and (one / "val").is_dir()]
    if len(whole) == 1 and not (data / "train").exists():
        return f"{whole[0]} has train/ and val/: give that folder"
    theirs = {}
    for part, names in NAMES.items():
        for folder in [] if (data / part).exists() else folders:
            if folder.name.lower() in names and classes_at_top(folder, least=1):
                theirs[data / part] = folder
    if {data / "train", data / "val"} & theirs.keys():
        lines = [shlex.join(["mv", str(folder), str(part)]) for part, folder in theirs.items()]
        return f"{data} has parts of other names: run `{' && '.join(lines)}`"
    one = folders[0] if len(folders) == 1 and folders[0].name not in NAMES else None
    if one and (classes := classes_at_top(one)):
        return f"{one} has {len(classes)} class folders: give that folder"
    return None


def _named(data: Path) -> Path:
    """``data`` with a name of its own, which "." and ".." have not."""
    return data if data.name not in ("", "..") else data.resolve()


def _parent_set(data: Path) -> Path | None:
    """The data set of which ``data`` is a part: another part beside it shares a class."""
    data = _named(data)
    parts = {name: part for part, names in NAMES.items() for name in names}
    if not (part := parts.get(data.name.lower())):
        return None
    classes = set(class_names(data))
    with suppress(OSError):  # a folder that may not be listed
        for name in class_names(data.parent):
            is_other = parts.get(name.lower(), part) != part
            if is_other and classes & {*class_names(data.parent / name)}:
                return data.parent
    return None


def split_advice(data: Path) -> str | None:
    """A clause with the command that divides a folder of one's own images; None if it has none."""
    train = data / "train"
    if found := misplaced(data):
        return found
    if not has_image(train) and (classes := classes_at_top(data)):
        what = f"{len(classes)} class folders, but {'an empty' if train.is_dir() else 'no'} train/"
    elif train.is_dir() and class_names(train) and not (data / "val").exists():
        what = "train/, but no val/"
    elif (table := label_table(data)) and any(map(has_image, (data, train))):
        what = f"images and the table {table.name}, but no class folders"
    else:
        return None
    line = command("prepare_data.py", "split", data, "--val", "0.2")
    return f"{data} has {what}: run `{line}`"


def beside(data: Path, ending: str) -> Path:
    """The folder DATA_ENDING."""
    data = _named(data)
    return data.with_name(f"{data.name}_{ending}")


def advice(data: Path) -> str | None:
    """Return a clause with the command that converts a folder in a known layout; else None."""
    layout = find(data)
    is_parquet = any(data.glob("*.parquet")) or any(data.glob("data/*.parquet"))
    if not (layout or is_parquet):
        return split_advice(data)
    out = beside(data, "folders" if layout else "shards")
    words = ("imagenet", out, "--source", data) if layout else ("parquet", data, out)
    line, first = command("prepare_data.py", *words), ""
    if layout and layout.flat and not layout.labels:
        names = "LOC_val_solution.csv or ILSVRC2012_devkit_t12.tar.gz"
        first = f"put {names} (the class of each image) into {data}, then "
    name = layout.name if layout else "Hugging Face's parquet files"
    return f"{data} contains {name}: {first}run `{line}`, and train on {out}"
