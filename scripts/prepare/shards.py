"""Write images into tar files of a few hundred MB, which training and WebDataset read.

OUT/train/ holds train-00000-of-00147.tar and so on, and classes.txt: one class per line, sorted;
the line's number, from 0, is the label. A shard holds CLASS/NAME.JPEG with the bytes of the image
file and CLASS/NAME.cls with the label. Names are percent-encoded where WebDataset needs it: there a
key ends at the first dot of a file name and must be unique. classes.txt is written last.
"""

import io
import os
import tarfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from prepare.writing import Item, Split, check_place, work

from utils.start.atomic import save_atomically
from utils.start.errors import UserError

MEGABYTES = 500  # size of a shard


def images_per_shard(image_bytes: float, megabytes: int) -> int:
    """Return the number of images in a shard of ``megabytes``, if each has ``image_bytes``."""
    return max(1, round(megabytes * 1e6 / (image_bytes + 2048)))  # headers, label and padding


def write_shards(out: Path, name: str, split: Split, workers: int) -> tuple[int, int]:
    """Write OUT/``name``, a shard per chunk. Returns: numbers of new files, undecodable images."""
    if broken := [one for one in split.classes if "\n" in one or "\r" in one]:
        raise UserError(f"the name of class {broken[0]!r} has a line break: rename its folder")
    count = len(split.chunks)
    paths = [out / name / f"{name}-{i:05d}-of-{count:05d}.tar" for i in range(count)]
    missing = [i for i, path in enumerate(paths) if not path.exists()]
    write = partial(_write_shard, out, split._replace(chunks=()))
    jobs = ((paths[i], split.chunks[i]) for i in missing)
    messages = work(write, jobs, workers, len(missing), " shards")
    lines = os.fsencode("".join(f"{class_name}\n" for class_name in split.classes))
    save_atomically(lambda file: file.write(lines), out / name / "classes.txt")
    return len(missing), len(messages)


def _write_shard(
    out: Path, split: Split, job: tuple[Path, Iterable[Item]]
) -> tuple[int, list[str]]:
    """Write one shard, in a worker. Returns 1, and a message for each undecodable image."""
    path, items = job
    labels = {class_name: number for number, class_name in enumerate(split.classes)}
    messages: list[str] = []
    keys: set[str] = set()

    def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))

    def write(file: io.BufferedWriter) -> None:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for item in items:
                name = check_place(out, item.place).partition("/")[2]
                key, suffix = _key(name, keys)
                add(tar, key + suffix, split.data(item, messages))
                add(tar, f"{key}.cls", b"%d" % labels[name.partition("/")[0]])

    save_atomically(write, path)
    return 1, messages


def _key(name: str, keys: set[str]) -> tuple[str, str]:
    """Split CLASS/NAME.JPEG into its key in a shard and the suffix; add the key to ``keys``.

    `urllib.parse.unquote` restores the name. For images that differ only in the suffix, another
    character is encoded, so that keys differ. Raises: `UserError` if that is impossible.
    """
    escaped = name.replace("%", "%25").replace("\n", "%0A").replace("\r", "%0D")
    if escaped.startswith("__"):  # WebDataset skips __NAME__
        escaped = f"%5F{escaped[1:]}"
    folder, file = os.path.split(escaped)
    stem, suffix = os.path.splitext(file)
    stem = stem.replace(".", "%2E")
    plain = [i for i, c in enumerate(stem) if c.isascii() and c.isalnum() and "%" not in stem[:i]]
    for key in (stem, *(f"{stem[:i]}%{ord(stem[i]):02X}{stem[i + 1 :]}" for i in plain)):
        if f"{folder}/{key}" not in keys:
            keys.add(f"{folder}/{key}")
            return f"{folder}/{key}", suffix
    raise UserError(f"several images differ from {name} only in the suffix: rename one of them")
