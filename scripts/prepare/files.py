"""Files: reading damaged ones, writing whole ones, finding images; and the error for all of it."""

import csv
import gzip
import io
import os
import pickle
import shutil
import struct
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from PIL import Image

from utils.data.listing import SUFFIXES


class PrepareError(Exception):
    """What stops a preparation, as one sentence for the user."""


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Turns what reading damaged data raises into a PrepareError that names `what` is read."""
    try:
        yield
    except (tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError, struct.error) as error:
        raise PrepareError(f"{what} is damaged ({error})") from error
    except (
        *(csv.Error, pickle.UnpicklingError, ValueError, TypeError, LookupError),
        *(AttributeError, OverflowError, MemoryError),
    ) as error:
        raise PrepareError(f"{what} does not hold what it should ({error})") from error


def png_bytes(pixels: np.ndarray) -> bytes:
    """A PNG file of a uint8 array: height x width (greyscale) or height x width x 3 (RGB)."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_whole(path: Path, content: bytes | Path) -> None:
    """Writes bytes, or links or copies a file, so that `path` never exists half-written.

    Raises PrepareError where it cannot be written.
    """
    # One name a process, so that two that write the same image cannot damage each other's.
    part = path.with_name(f".{os.getpid()}.part")
    try:
        if isinstance(content, bytes):
            part.write_bytes(content)
        else:
            try:
                # The resolved path, as a link to a symbolic link would not be an image of its own.
                os.link(content.resolve(), part)
            except OSError:
                shutil.copyfile(content, part)
        os.replace(part, path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink()
        if not isinstance(error, OSError):
            raise
        raise PrepareError(
            f"cannot write {path} ({error.strerror}); once that is put right, run the same "
            "command again to finish the work"
        ) from error


def remove_parts(folder: Path) -> None:
    """Removes what processes that were killed left half-written below `folder`."""
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.startswith(".") and name.endswith(".part"):
                os.unlink(os.path.join(parent, name))


def image_files(folder: str | Path, prefix: str = "") -> Iterator[str]:
    """Paths of the images below `folder`, relative to it, in the way the training finds them."""
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.name.startswith("."):
            continue
        if entry.name.lower().endswith(SUFFIXES):
            yield prefix + entry.name
        elif entry.is_dir():
            yield from image_files(entry.path, f"{prefix}{entry.name}/")


def class_folders(folder: Path) -> list[str]:
    """The sorted names of the class folders in `folder`; none where it does not exist."""
    if not folder.is_dir():
        return []
    return sorted(e.name for e in os.scandir(folder) if e.is_dir() and e.name[0] != ".")
