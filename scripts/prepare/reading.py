"""Read the images of any data set that training can read, and of folders in other layouts.

`open_images` is the one reader of all commands that copy a data set.
"""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from prepare.writing import (
    BATCH,
    SPLITS,
    Item,
    Lazy,
    Split,
    Stored,
    images_by_class,
    read_marker,
)

from utils.data import devkit, layouts
from utils.data.folder import class_names, listings
from utils.data.opening import FOLDER, class_folders, has_part, source_kind
from utils.data.sources import SUFFIXES, Source, is_hidden
from utils.start.errors import UserError


class Images(NamedTuple):
    """The images of a split, such as DATA/train."""

    source: Source
    classes: list[str]  # including classes without images

    def split(self, name: str, size: int = BATCH) -> Split:
        """Return the split OUT/``name`` with all images, in chunks of ``size``."""
        source = self.source

        def item(image: int) -> Item:
            path = source.paths[source.starts[image] : source.starts[image + 1] - 1]
            return Item(f"{name}/{os.fsdecode(path)}", Stored(*source.stored(image)))

        return Split(len(source), Lazy(len(source), size, item), self.classes)


class Files(Source):
    """Images whose files are not at ROOT/CLASS/NAME."""

    def __init__(self, root: Path, files: dict[str, Path]):
        """``files``: CLASS/NAME: path of the file."""
        names = sorted(files, key=lambda name: (name.partition("/")[0], os.fsencode(name)))
        self.files = [str(files[name]) for name in names]
        counts = Counter(name.partition("/")[0] for name in names)
        paths = b"".join(os.fsencode(name) + b"\0" for name in names)
        super().__init__(root, [*counts], paths, [*counts.values()])

    def path(self, image: int) -> str:
        """The file of ``image``."""
        return self.files[image]


def open_images(data: Path, splits: Sequence[str] = SPLITS) -> dict[str, Images]:
    """Open those of ``splits`` that ``data`` has. Raises: `UserError` if it has none."""
    if not data.is_dir():
        raise UserError(layouts.no_folder(data))
    if not read_marker(data).get("finished", True):
        raise UserError(f"{data} is not finished: first run again the command that makes it")
    print(f"listing the images in {data}", flush=True)
    layout = layouts.find(data)
    opened = {split: _open_split(data, layout, split) for split in splits}
    lacks = any(opened.get(split, True) is None for split in ("train", "val"))
    if lacks and layout is None and (found := layouts.misplaced(data)):
        raise UserError(found)
    if not any(opened.values()):
        text = "has no images in train/CLASS/ or val/CLASS/, no tar files with images"
        why = None if layout else layouts.advice(data)
        raise UserError(why or f"{data} {text}, and no known layout of ImageNet")
    return {split: images for split, images in opened.items() if images}


def _open_split(data: Path, layout: layouts.Layout | None, split: str) -> Images | None:
    """Open the images of a split. Returns None if there are none. Raises: `UserError`."""
    folders = [one for one in layout.folders.get(split, ()) if one.is_dir()] if layout else []
    files = None
    if layout and layout.flat and split == "val":
        files = _labelled(layout.flat, layout.labels or data)
    elif len(folders) > 1:
        files = _joined(folders)
    if files is not None:
        source = Files(data, files)
        return Images(source, source.classes)
    root = folders[0] if folders else data / split
    if not has_part(root):
        return None
    if (kind := source_kind(root)) is not FOLDER:
        classes = class_folders(root)
        source = kind.open(root, classes, True)  # also with a class that has no images
        return Images(source, classes) if len(source) else None
    classes = class_names(root)
    lists = zip(classes, listings(root, classes, shows=True), strict=True)
    paths = {name: listing.paths for name, listing in lists if listing.paths}
    counts = [one.count(b"\0") for one in paths.values()]
    if not paths:
        return None
    return Images(Source(root, [*paths], b"".join(paths.values()), counts), classes)


def _joined(folders: list[Path]) -> dict[str, Path]:
    """Join the images of several folders of class folders. Raises: `UserError`."""
    files: dict[str, Path] = {}
    for folder in folders:
        for _, paths in images_by_class(folder):
            if double := next((path for path in paths if path in files), None):
                text = f"{double} is in {folder} and is {files[double]}"
                raise UserError(f"{text}: remove one of them")
            files |= {path: folder / path for path in paths}
    return files


def _labelled(flat: Path, lists: Path) -> dict[str, Path]:
    """Assign classes to the validation images in ``flat``, from the devkit or table in ``lists``.

    Raises: `UserError`.
    """
    labels = devkit.val_labels(lists)
    names = {n for n in os.listdir(flat) if not is_hidden(n) and n.lower().endswith(SUFFIXES)}
    if unknown := names - labels.keys():
        text = f"{flat} holds {min(unknown)}, which is not in the list of classes"
        raise UserError(f"{text}: remove it, or get the list again")
    if missing := labels.keys() - names:
        raise UserError(f"{flat} lacks {len(missing)} of the images, such as {min(missing)}")
    return {f"{labels[name]}/{name}": flat / name for name in names}


def check_apart(source: Path, out: Path) -> tuple[Path, Path]:
    """Resolve both paths. Raises: `UserError` if they are equal or one contains the other."""
    source, out = source.resolve(), out.resolve()
    if source in (out, *out.parents) or out in source.parents:
        raise UserError(f"{source} and {out} overlap; choose another folder for the copy")
    return source, out
