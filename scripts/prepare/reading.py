"""Read the images of any data set that training can read, and of folders in other layouts.

`open_images` is the one reader of all commands that copy a data set.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from prepare.folder import BATCH, SPLITS, Item, Split, Stored, read_marker

from utils import addons
from utils.errors import UserError
from utils.folder import Folder, Source, class_folders, listings, open_source


class Images(NamedTuple):
    """The images of DATA/train, say."""

    source: Source
    classes: list[str]  # those without an image, too


def open_images(data: Path) -> dict[str, Images]:
    """The images of each split of ``data``. Raises: `UserError` if there are none."""
    if not read_marker(data).get("finished", True):
        raise UserError(f"{data} is not finished; first run the command that makes it again")
    print(f"listing the images in {data}", flush=True)
    splits = {}
    for split in SPLITS:
        if (data / split).exists() and (images := _open_split(data / split)):
            splits[split] = images
    if not splits:
        raise UserError(f"{data} has no images in train/CLASS/ or val/CLASS/")
    return splits


def _open_split(root: Path) -> Images | None:
    """The images below ``root``; None if there are none."""
    kind = addons.source_kind(root)
    if kind and kind.stores_pixels:
        raise UserError(f"{root} holds decoded pixels: name the data set that it was made from")
    classes = names = class_folders(root) if kind else Folder.class_names(root)
    if not kind:
        lists = listings(root, classes, shows=True)
        names = [name for name, one in zip(classes, lists, strict=True) if one.paths]
    return Images(open_source(root, names, shows=True), classes) if names else None


class Chunks(Sequence):
    """The images of a source in chunks of ``size``, made only when they are asked for."""

    def __init__(
        self, source: Source, split: str, size: int, change: Callable[[bytes], bytes] | None = None
    ):
        self.source, self.split, self.size, self.change = source, split, size, change

    def __len__(self) -> int:
        return math.ceil(len(self.source) / self.size)

    def __getitem__(self, number: int) -> list[Item]:
        if number >= len(self):
            raise IndexError
        images = range(number * self.size, min((number + 1) * self.size, len(self.source)))
        return [
            Item(self._place(image), Stored(*self.source.stored(image)), self.change)
            for image in images
        ]

    def _place(self, image: int) -> str:
        starts, paths = self.source.starts, self.source.paths
        name = paths[starts[image] : starts[image + 1] - 1].decode("utf-8", "surrogateescape")
        return f"{self.split}/{name}"


def split_of(
    images: Images, name: str, change: Callable[[bytes], bytes] | None, chunk: int = BATCH
) -> Split:
    """What OUT/``name`` is to hold: all ``images``, each as it is or after ``change``."""
    chunks = Chunks(images.source, name, chunk, change)
    return Split(len(images.source), chunks, images.classes)


def check_apart(source: Path, out: Path) -> tuple[Path, Path]:
    """The folders in full. Raises: `UserError` if one is the other or inside it."""
    source, out = source.expanduser().resolve(), out.expanduser().resolve()
    if source in (out, *out.parents) or out in source.parents:
        raise UserError(f"{source} and {out} overlap; choose another folder for the copy")
    return source, out
