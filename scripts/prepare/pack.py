"""Decodes an image folder once and for all: uint8 pixels in a few large files, with an index.

The pixels are those of the careful reduction that `shrink` makes, without its second loss by JPEG,
so training's crops are those from the shrunk copy. Reading them takes no decoder, but ten times the
space. The format, and how training reads it: utils/data/pack.py.

What cannot be decoded is named, counted and stored as it is, so that training's own rule for bad
files applies to it as in the original folder. Each file gets its name when it is whole; running
an interrupted command again makes those that are missing.
"""

import json
import os
import shutil
import sys
import zlib
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from prepare.files import bytes_text, read, write_whole
from prepare.folder import ALL_SPLITS, PREPARED, PREPARING, Progress, check_own, made_by_one
from prepare.shrink import check_places, opened, reduce, reduced_shape
from prepare.workers import spread
from tqdm import tqdm

from utils.atomic import remove_leftovers, save_atomically
from utils.data import pack
from utils.data.listing import Listing, class_names, list_class
from utils.data.rgb import to_rgb
from utils.errors import UserError

SAMPLE = 256  # images whose size is asked for, to know what the pack will take


class Stored(NamedTuple):
    """One image of a pack: ``height`` and ``width`` are 0 for the bytes of a file."""

    split: str
    image: int  # its number in the split
    height: int
    width: int
    content: bytes
    crc: int
    reason: str | None  # why it could not be decoded


@dataclass
class Part:
    """A split of the source, and the folder for its pack."""

    name: str
    source: Path
    out: Path
    classes: list[str]
    listings: list[Listing]

    def __post_init__(self) -> None:
        self.paths = b"".join(listing.paths for listing in self.listings)
        self.lengths = np.concatenate([listing.lengths for listing in self.listings])
        self.ends = np.concatenate([[0], np.cumsum(self.lengths)])

    def __len__(self) -> int:
        return len(self.lengths)

    def path(self, image: int) -> str:
        """The file of an image."""
        name = self.paths[self.ends[image] : self.ends[image + 1]]
        return os.path.join(self.source, os.fsdecode(name))

    def fingerprint(self) -> str:
        """Changes when files are added, removed or renamed."""
        return f"{self.name} {len(self)} images ({zlib.crc32(self.paths):08x})"

    def files(self) -> list[range]:
        """The images of each of the pack's files."""
        step = pack.IMAGES_PER_FILE
        return [range(i, min(i + step, len(self))) for i in range(0, len(self), step)]

    def missing(self) -> list[int]:
        """Images of files that are not there, or not whole."""
        return [
            image
            for number, images in enumerate(self.files())
            if not _holds(self.out / pack.file_name(number), images)
            for image in images
        ]


def _holds(path: Path, images: range) -> bool:
    found = pack.read_end(path)
    return found is not None and found["image"].tolist() == list(images)


def _part(source: Path, out: Path, split: str) -> Part:
    classes = class_names(source / split)
    listings = [list_class(source / split, name) for name in classes]
    return Part(split, source / split, out / split, classes, listings)


def _stored(size: int, job: tuple[str, int, str]) -> Stored:
    """Decodes and reduces one image. In a worker process."""
    split, image, path = job
    data, shape, reason = read(path), (0, 0), None
    try:
        with opened(data) as picture:
            small = reduce(picture, size)
            pixels = np.asarray(to_rgb(picture) if small is None else small)
        data, shape = pixels.tobytes(), pixels.shape[:2]
    except ValueError as error:
        reason = str(error)
    return Stored(split, image, *shape, data, zlib.crc32(data), reason)


class Writer:
    """Puts images that come in any order into the files of a pack."""

    def __init__(self, part: Part):
        self.part = part
        # By number: the file, open, with its temporary name, and the records of its images.
        self.open: dict[int, tuple[BinaryIO, Path, list[tuple[int, ...]]]] = {}

    def add(self, one: Stored) -> None:
        """Append an image; the file's last one gives it its name. Raises: OSError."""
        number = one.image // pack.IMAGES_PER_FILE
        if number not in self.open:
            path = self.part.out / f".{os.urandom(8).hex()}.tmp"
            self.open[number] = path.open("wb"), path, []
        file, path, records = self.open[number]
        record = one.image, file.tell(), len(one.content), one.height, one.width, one.crc
        file.write(one.content)
        records.append(record)
        if len(records) == len(self.part.files()[number]):
            file.write(pack.end_of_file(np.array(sorted(records), pack.RECORD)))
            file.flush()
            os.fsync(file.fileno())
            file.close()
            del self.open[number]
            os.replace(path, self.part.out / pack.file_name(number))

    def close(self) -> None:
        """Remove the files that are not whole."""
        for file, path, _ in self.open.values():
            with suppress(OSError):
                file.close()
            path.unlink(missing_ok=True)


def _expected_bytes(part: Part, images: list[int], size: int) -> float:
    """About how many bytes the pixels of ``images`` take, by a sample of them."""
    chosen = np.linspace(0, len(images) - 1, min(SAMPLE, len(images))).astype(int)
    found = []
    for number in chosen:
        data = read(part.path(images[number]))
        try:
            with opened(data) as picture:
                found.append(3 * np.prod(reduced_shape(*picture.size, size)))
        except ValueError:
            found.append(len(data))
    return len(images) * float(np.mean(found)) if found else 0.0


def _check_space(parts: list[Part], missing: dict[str, list[int]], out: Path, size: int) -> None:
    """Says what the pack will take. Raises UserError if the disk has not that much."""
    count = sum(map(len, missing.values()))
    wanted = sum(_expected_bytes(part, missing[part.name], size) for part in parts)
    files = sum(len({i // pack.IMAGES_PER_FILE for i in missing[part.name]}) for part in parts)
    free = shutil.disk_usage(out).free
    print(
        f"{count} images to pack: about {bytes_text(wanted)} in {files} files, "
        f"{bytes_text(wanted / count)} an image; {bytes_text(free)} are free in {out}",
        flush=True,
    )
    if wanted > free:
        raise UserError(
            f"the pack needs about {bytes_text(wanted - free)} more than the disk of {out} has: "
            "make room, choose another folder or a smaller --size"
        )


def _write(parts: list[Part], missing: dict[str, list[int]], size: int, workers: int) -> None:
    for part in parts:
        part.out.mkdir(exist_ok=True)
        remove_leftovers(part.out)
    writers = {part.name: Writer(part) for part in parts}
    jobs = ((part.name, i, part.path(i)) for part in parts for i in missing[part.name])
    try:
        with (
            Progress(sum(map(len, missing.values()))) as progress,
            closing(spread(partial(_stored, size), jobs, workers)) as done,
        ):
            for one in done:
                if one.reason:
                    path = next(p for p in parts if p.name == one.split).path(one.image)
                    tqdm.write(f"stored as it is: {path}: {one.reason}", file=sys.stderr)
                writers[one.split].add(one)
                progress.advance()
    except OSError as error:
        raise UserError(
            f"cannot write the pack ({error.strerror}); once that is put right, run the same "
            "command again to finish the work"
        ) from error
    finally:
        for writer in writers.values():
            writer.close()


def _join(part: Part, size: int) -> pack.Contents:
    """Writes the index of a part whose files are all there."""
    paths = [part.out / pack.file_name(number) for number in range(len(part.files()))]
    contents = pack.Contents(
        size,
        part.classes,
        np.array([len(listing.lengths) for listing in part.listings], np.int64),
        part.paths,
        part.lengths,
        np.concatenate([pack.read_end(path) for path in paths]),
        np.array([path.stat().st_size for path in paths], np.int64),
    )
    save_atomically(contents.save, part.out / pack.INDEX)
    return contents


def _is_whole(part: Part) -> bool:
    try:
        pack.load(part.out)
    except UserError:
        return False
    return True


def pack_folder(source: Path, out: Path, size: int, workers: int) -> None:
    """Writes the packed copy of an image folder.

    Args:
        source: the folder of train/CLASS/, val/CLASS/ and test/CLASS/, or of some of them.
        out: the folder to make.
        size: the largest short side of its images, in pixels.
        workers: the number of processes.

    Raises:
        UserError: one of the images cannot be opened, the disk is too small, `out` holds something
            else or is being written; and whatever `check_places` raises it for.
    """
    source, out, splits = check_places(source, out)
    print(f"listing the images in {source}", flush=True)
    parts = [_part(source, out, split) for split in splits]
    images = ", ".join(part.fingerprint() for part in parts)
    options = {"source": str(source), "size": size, "images": images}
    wanted: dict[str, Any] = {"source": "pack", "options": options}
    with made_by_one(out):
        check_own(out, wanted)
        missing = {part.name: part.missing() for part in parts}
        if any(missing.values()):
            _check_space(parts, missing, out, size)
            write_whole(out / PREPARING, json.dumps(wanted, indent=2).encode())
            _write(parts, missing, size, workers)
        elif (out / PREPARED).exists() and all(map(_is_whole, parts)):
            print(f"nothing to do: {out} already holds this pack")
            return
        found = [_join(part, size) for part in parts]
        write_whole(out / PREPARED, json.dumps(wanted, indent=2).encode())
        (out / PREPARING).unlink(missing_ok=True)
    _report(out, found)


def _report(out: Path, found: list[pack.Contents]) -> None:
    images = sum(len(contents.records) for contents in found)
    files = sum(len(contents.file_bytes) for contents in found)
    total = sum(int(contents.file_bytes.sum()) for contents in found)
    print(f"done: {out}: {images} images in {files} files, {bytes_text(total)}")
    if faults := sum(int((contents.records["height"] == 0).sum()) for contents in found):
        print(f"{faults} images cannot be decoded, and are stored as they are")


def _damaged(path: str) -> tuple[str, bool]:
    """Whether something in a file of a pack is not as it was written."""
    records = pack.read_end(Path(path))
    if records is None:
        return path, True
    with open(path, "rb") as file:
        for record in np.sort(records, order="place"):
            if zlib.crc32(file.read(int(record["bytes"]))) != record["crc"]:
                return path, True
    return path, False


def verify(out: Path, workers: int) -> None:
    """Reads a whole pack and compares checksums. Raises UserError, naming damaged files."""
    splits = [split for split in ALL_SPLITS if pack.is_pack(out / split)]
    if not splits:
        raise UserError(f"{out} holds no packed pixels")
    paths = [
        str(out / split / pack.file_name(number))
        for split in splits
        for number in range(len(pack.load(out / split).file_bytes))
    ]
    damaged = []
    with Progress(len(paths), " files") as progress:
        for path, is_damaged in spread(_damaged, iter(paths), min(workers, len(paths))):
            progress.advance()
            damaged += [path] * is_damaged
    if damaged:
        raise UserError(
            f"{len(damaged)} of {len(paths)} files are damaged ({', '.join(sorted(damaged)[:3])}): "
            "remove them, and run the command that made the pack again"
        )
    print(f"{out}: {len(paths)} files are as they were written")
