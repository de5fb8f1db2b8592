"""Files: reading damaged ones, writing whole ones, finding images."""

import csv
import gzip
import io
import os
import pickle
import struct
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from utils.atomic import link_atomically, save_atomically
from utils.data.listing import class_names, image_files
from utils.errors import UserError


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Turns the errors of reading damaged data into a UserError that names `what` was read."""
    try:
        yield
    except (tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError, struct.error) as error:
        raise UserError(f"{what} is damaged ({error})") from error
    except (
        *(csv.Error, pickle.UnpicklingError, ValueError, TypeError, LookupError),
        *(AttributeError, OverflowError, MemoryError),
    ) as error:
        raise UserError(f"{what} does not hold what it should ({error})") from error


def png_bytes(pixels: np.ndarray) -> bytes:
    """A PNG file of a uint8 array: height x width (greyscale) or height x width x 3 (RGB)."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_whole(path: Path, content: bytes | Path) -> None:
    """Writes bytes, or links or copies a file, so that `path` never exists half-written.

    Raises UserError if it cannot be written.
    """
    try:
        if isinstance(content, Path):
            link_atomically(content, path)
        else:
            # Not flushed: that would take longer than all the rest, and what a crash of the whole
            # system leaves empty is written again.
            save_atomically(lambda file: file.write(content), path, durable=False)
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}); once that is put right, run the same "
            "command again to finish the work"
        ) from error


def images_by_class(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Each class folder in `folder`, and the sorted paths of its images relative to it.

    They are what the training finds; nothing where `folder` does not exist. Raises UserError for
    a folder that cannot be read.
    """
    for label in class_names(folder):
        found = map(os.fsdecode, image_files(folder, label, {}))
        yield label, sorted(path.removeprefix(f"{label}/") for path in found)


def read(source: str) -> bytes:
    """All bytes of the file `source`. Raises UserError if it cannot be read."""
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {source} ({error.strerror})") from error


def bytes_text(number: float) -> str:
    """A number of bytes as people say it."""
    for unit, name in ((10**9, "GB"), (10**6, "MB")):
        if abs(number) >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number / 1000:.1f} kB"
