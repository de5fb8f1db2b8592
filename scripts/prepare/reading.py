"""Read the images of any data set that training can read, and of folders in other layouts.

`open_images` is the one reader of all commands that copy a data set.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from prepare.folder import BATCH, SPLITS, Item, Split, Stored, read_marker

from utils import addons
from utils.errors import UserError
from utils.extras import layouts
from utils.folder import (
    SUFFIXES,
    Folder,
    Source,
    class_folders,
    has_part,
    list_class,
    listings,
    open_source,
)


class Images(NamedTuple):
    """The images of DATA/train, say."""

    source: Source
    classes: list[str]  # those without an image, too


class Files(Source):
    """Images whose files are elsewhere than their CLASS/NAME says."""

    def __init__(self, root: Path, files: dict[str, str]):
        """``files``: the file of each CLASS/NAME."""
        names = sorted(files, key=lambda name: (name.partition("/")[0], os.fsencode(name)))
        self.files = [files[name] for name in names]
        counts = Counter(name.partition("/")[0] for name in names)
        paths = b"".join(os.fsencode(name) + b"\0" for name in names)
        super().__init__(root, list(counts), paths, list(counts.values()))

    def path(self, image: int) -> str:
        """The file of ``image``."""
        return self.files[image]


def open_images(data: Path, splits: Sequence[str] = SPLITS) -> dict[str, Images]:
    """The images of each of ``splits`` that ``data`` has. Raises: `UserError` if it has none."""
    if not read_marker(data).get("finished", True):
        raise UserError(f"{data} is not finished; first run the command that makes it again")
    print(f"listing the images in {data}", flush=True)
    opened = {}
    layout = layouts.find(data)
    for split in splits:
        images = _open_layout(data, layout, split) if layout and split != "test" else None
        if images is None and has_part(data / split):
            images = _open_split(data / split)
        if images:
            opened[split] = images
    if not opened:
        text = "has no images in train/CLASS/ or val/CLASS/, no tar files of them"
        raise UserError(f"{data} {text}, and no layout of ImageNet that is known")
    return opened


def _open_layout(data: Path, layout: layouts.Layout, split: str) -> Images | None:
    """The images of a split in ``layout``; None if there are none."""
    folders = [folder for folder in layout.folders[split] if folder.is_dir()]
    if split == "val" and layout.flat:
        source = _label_flat(data, layout)
    elif len(folders) < 2:
        return _open_split(folders[0]) if folders else None
    else:
        files = {}
        for folder in folders:
            for class_name in Folder.class_names(folder):
                for path in os.fsdecode(list_class(folder, class_name).paths).split("\0")[:-1]:
                    if path in files:
                        raise UserError(f"{path} is in {folder} and is {files[path]}: remove one")
                    files[path] = str(folder / path)
        source = Files(data, files)
    return Images(source, source.classes)


def _label_flat(data: Path, layout: layouts.Layout) -> Files:
    """The validation images that lie in one folder. Raises: `UserError`."""
    left = dict(addons.extra("devkit").val_labels(layout.labels or data))
    files = {}
    for name in os.listdir(layout.flat):
        if name[0] == "." or not name.lower().endswith(SUFFIXES):
            continue
        if name not in left:
            raise UserError(f"{layout.flat} holds {name}, which the list of classes does not name")
        files[f"{left.pop(name)}/{name}"] = str(layout.flat / name)
    if left:
        raise UserError(f"{layout.flat} lacks {len(left)} of the images, such as {min(left)}")
    return Files(layout.flat, files)


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
    images: Images, name: str, change: Callable[[bytes], bytes] | None = None, chunk: int = BATCH
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
