"""Copies an image folder with every image reduced to a short side of at most N pixels.

Training crops are 224 pixels wide, so most of a large photograph is decoded in vain; RESULTS.md
compares the cost of reading the copy and the original. The price is that the smallest training
crops, which are enlarged, become softer.

An image that is small enough is copied byte for byte. Any other one becomes a JPEG file with the
pixels of `PIL.Image.convert("RGB")`, reduced, without EXIF and other metadata. It keeps its name,
whatever its suffix, as the order of training is the order of the names; training recognises formats
by content. What cannot be decoded is named, counted and copied as it is, so that training's own
rule for bad files applies to it as in the original folder.
"""

import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from PIL import Image, UnidentifiedImageError
from prepare.files import bytes_text, images_by_class, read, write_whole
from prepare.folder import ALL_SPLITS, PREPARING, Item, Plan, prepare
from prepare.workers import spread
from tqdm import tqdm

from utils.data.listing import class_names
from utils.data.pack import is_pack
from utils.data.rgb import to_rgb
from utils.errors import UserError

UNREADABLE = ".unreadable.txt"
Make = Callable[[bytes], bytes]  # an image file of a file; raises ValueError, see `shrink`
# Seen through the evaluation's resize to 256 and crop, bicubic images are nearer to the originals
# than Lanczos ones, and their files smaller; through training crops both are equally near.
FILTER = Image.Resampling.BICUBIC
# A JPEG decoder can halve an image for little work, but the way it does so blurs; with this many
# times the wanted size left, the filter alone determines what the image looks like.
DRAFT_MARGIN = 2


def _reduced_size(width: float, height: float, size: int) -> tuple[int, int]:
    factor = size / min(width, height)
    return round(width * factor), round(height * factor)


def reduced_shape(width: int, height: int, size: int) -> tuple[int, int]:
    """Width and height of an image after `reduce`, off by a pixel at most."""
    return (width, height) if min(width, height) <= size else _reduced_size(width, height, size)


def reduce(image: Image.Image, size: int) -> Image.Image | None:
    """Reduces one image, opened but not loaded yet.

    Args:
        image: of any format that Pillow reads.
        size: its largest short side, in pixels.

    Returns:
        the reduced image in RGB, or None for one that is small enough as it is.
    """
    if min(image.size) <= size:
        return None
    rough = _reduced_size(*image.size, size)
    drafted = image.draft(None, (DRAFT_MARGIN * rough[0], DRAFT_MARGIN * rough[1]))
    rgb = to_rgb(image)
    # A drafted image's last row and column may cover only a fraction of a pixel.
    box = drafted[1] if drafted else (0, 0, *rgb.size)
    return rgb.resize(_reduced_size(*box[2:], size), FILTER, box)


@contextmanager
def opened(data: bytes) -> Iterator[Image.Image]:
    """Opens an image file of any format that Pillow reads; while it is being decoded, too.

    Raises:
        ValueError: it cannot be decoded, or what is made of it be encoded; says why.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd metadata and images near the size limit
            with Image.open(io.BytesIO(data)) as image:
                yield image
    except UnidentifiedImageError as error:
        raise ValueError("it is not an image, or of an unknown format") from error
    except MemoryError as error:
        raise UserError("out of memory; use fewer --workers") from error
    except Exception as error:  # damaged data makes the decoders raise nearly anything
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(reason or type(error).__name__) from error


def shrink(data: bytes, size: int, quality: int) -> bytes:
    """Reduces one image.

    Args:
        data: an image file of any format that Pillow reads.
        size: its largest short side, in pixels.
        quality: of the JPEG file, 1 to 100, on libjpeg's scale.

    Returns:
        `data` itself when the image is small enough, else a JPEG file.

    Raises:
        ValueError: it cannot be decoded, or is too long for a JPEG file; says why.
    """
    with opened(data) as image:
        small = reduce(image, size)
        if small is None:
            image.load()
            return data
        small.info.clear()
        file = io.BytesIO()
        # So that training need not decode the rows above a crop (utils/data/jpeg_rows.py).
        small.save(file, "JPEG", quality=quality, restart_marker_rows=1)
        return file.getvalue()


def _copy_file(make: Make, job: tuple[str, str]) -> tuple[str, str, str] | None:
    """Writes what is made of an image; if it cannot be read, returns source, target and reason."""
    source, target = job
    data = read(source)
    try:
        data = make(data)
    except ValueError as error:
        return source, target, str(error)
    write_whole(Path(target), data)
    return None


def _write(
    out: Path, make: Make, workers: int, missing: Iterator[tuple[Path, Item]]
) -> Iterator[None]:
    jobs = ((str(item.content), str(path)) for path, item in missing)
    for fault in spread(partial(_copy_file, make), jobs, workers):
        if fault:
            source, target, reason = fault
            tqdm.write(f"copied as it is: {source}: {reason}", file=sys.stderr)
            # Noted before it is copied: an interruption between the two repeats both.
            with (out / UNREADABLE).open("a", errors="surrogateescape") as notes:
                notes.write(f"{os.path.relpath(target, out)}\n")
            write_whole(Path(target), Path(source).read_bytes())
        yield


def _images(folder: Path) -> Iterator[tuple[str, str]]:
    return ((label, name) for label, names in images_by_class(folder) for name in names)


def _size(folder: Path) -> tuple[int, int]:
    """Number and bytes of the images in the class folders of `folder`."""
    sizes = [os.stat(folder / label / name).st_size for label, name in _images(folder)]
    return len(sizes), sum(sizes)


def _items(source: Path, out: Path, splits: tuple[str, ...]) -> Iterator[Item]:
    for split in splits:
        # Also those without images: the numbers of the classes must not change.
        for label in class_names(source / split):
            (out / split / label).mkdir(parents=True, exist_ok=True)
        for label, name in _images(source / split):
            yield Item(split, label, name, source / split / label / name)


def _unreadable(out: Path) -> int:
    try:
        with (out / UNREADABLE).open("rb") as notes:
            return len(set(notes))
    except FileNotFoundError:
        return 0


def check_places(source: Path, out: Path) -> tuple[Path, Path, tuple[str, ...]]:
    """The folders in full, and the splits of `source` that have images.

    Raises:
        UserError: `source` has no images, holds packed pixels, or is not finished, or one folder
            is inside the other.
    """
    source, out = source.expanduser().resolve(), out.expanduser().resolve()
    if source == out:
        raise UserError(f"{source} and the copy are the same folder; choose another for the copy")
    for one, other in ((source, out), (out, source)):
        if one in other.parents:
            raise UserError(f"{other} is inside {one}; choose another folder for the copy")
    if (source / PREPARING).exists():
        raise UserError(f"{source} is not finished; first run the command that makes it again")
    if not source.is_dir():
        raise UserError(f"there is no folder {source}")
    if any(is_pack(source / split) for split in ALL_SPLITS):
        raise UserError(
            f"{source} holds packed pixels; give the folder of images that it was made from"
        )
    splits = tuple(split for split in ALL_SPLITS if next(_images(source / split), None))
    if not splits:
        raise UserError(f"{source} has no images in train/CLASS/ or val/CLASS/")
    return source, out, splits


def shrink_folder(source: Path, out: Path, size: int, quality: int, workers: int) -> None:
    """Writes the shrunk copy of an image folder.

    Args:
        source: the folder of train/CLASS/, val/CLASS/ and test/CLASS/, or of some of them.
        out: the folder to make.
        size: the largest short side of its images, in pixels.
        quality: of the JPEG files, 1 to 100.
        workers: the number of processes.

    Raises:
        UserError: one of the images cannot be opened; and whatever `check_places` and `prepare`
            raise it for.
    """
    make = partial(shrink, size=size, quality=quality)
    copy_folder(source, out, "shrink", {"size": size, "quality": quality}, make, workers)


def copy_folder(
    source: Path, out: Path, command: str, options: dict[str, int], make: Make, workers: int
) -> None:
    """Writes ``make`` of each image into a copy of the folder, as ``command`` with ``options``.

    Raises:
        UserError: as `shrink_folder` does.
    """
    source, out, splits = check_places(source, out)
    before: dict[str, tuple[int, int]] = {}

    def open_plan(done: tuple[str, ...]) -> Plan:
        print(f"counting the images in {source}", flush=True)
        before.update({split: _size(source / split) for split in splits if split not in done})
        full = {split: number for split, (number, _) in before.items()}
        return Plan(
            _items(source, out, tuple(full)), tuple(full), full, notes=[], same_classes=False
        )

    write = partial(_write, out, make, workers)
    prepare(out, command, {"source": str(source), **options}, open_plan, write, splits)
    if before:
        number, old = (sum(values) for values in zip(*before.values(), strict=True))
        new = sum(_size(out / split)[1] for split in before)
        share = 100 * (old - new) / max(1, old)
        print(
            f"{number} images: {bytes_text(old)} before, {bytes_text(new)} after, "
            f"{bytes_text(old - new)} ({share:.1f} %) saved"
        )
    if faults := _unreadable(out):
        print(f"{faults} images cannot be read, and were copied as they are: {out / UNREADABLE}")
