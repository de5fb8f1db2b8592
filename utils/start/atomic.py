"""Writing files atomically, and reading those that torch.save has written."""

import os
import re
import shutil
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from utils.start.errors import UserError

UNNAMED = f".{'[0-9a-f]' * 16}.tmp"  # pattern of the temporary files' names, see `_temporary`
FETCHED = ".from_store.tmp"  # ending of a download's name, see `utils.run.store.fetch`


def save_atomically(
    write: Callable[[Any], None], path: Path, previous: Path | None = None, durable: bool = True
) -> None:
    """Let ``write(file)`` fill a temporary file, flush it to disk, then rename it.

    At any instant ``path`` is either the old file or the whole new one. The old one is kept as
    ``previous`` if that is given. Without ``durable`` nothing is flushed: a killed process still
    leaves only whole files, but a crash of the whole system may leave an empty one. Raises:
    OSError, and any error of ``write``; ``path`` is then unchanged.
    """
    with _temporary(path) as temporary:
        with open(temporary, "wb") as file:
            write(file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if previous is not None and path.exists():
            link_atomically(path, previous)
        os.replace(temporary, path)
        if durable:  # so that the file names survive a power cut, too
            handle = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def link_atomically(source: Path, path: Path) -> None:
    """Make ``path`` a hard link to the file ``source``, or a copy where that is impossible.

    Nothing is flushed, as without ``durable`` above. Raises: OSError; ``path`` is then unchanged.
    """
    with _temporary(path) as temporary:
        try:
            # Resolve it first: a hard link to a symbolic link would be a symbolic link as well.
            os.link(source.resolve(), temporary)
        except OSError:
            shutil.copyfile(source, temporary)
        os.replace(temporary, path)
        temporary.unlink(missing_ok=True)  # replace() leaves it if both were the same file


def read_checkpoint(path: Path, lazily: bool = False) -> dict[str, Any]:
    """Load what torch.save has written to ``path``, on the CPU. Code in the file is not run.

    First verify the zip archive's checksums, which torch.load ignores (files of torch before 1.6
    have none). ``lazily``: do not verify them, and read tensors only when they are used. Raises:
    `UserError`, also if an entry of a snapshot or best.pt has another type than this suite writes.
    """
    import torch  # not at the top: most programs of this suite write files without torch

    if path.is_dir():
        raise UserError(f"{path} is a folder: name a checkpoint in it, as {path / 'snapshot.pt'}")
    if not path.is_file():  # reading a pipe would wait for its writer
        raise UserError(f"there is no file {path}")
    content, rejected = None, None
    try:
        with open(path, "rb") as file:
            is_zip = file.read(2) == b"PK"
            if is_zip and not lazily and zipfile.ZipFile(file).testzip() is not None:
                raise zipfile.BadZipFile
        # torchvision's reference scripts keep their command line in the file: a plain Namespace.
        safe = torch.serialization.safe_globals([Namespace, *_numpy_scalars()])
        with safe, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(path, "cpu", weights_only=True, mmap=lazily and is_zip)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from error
    except Exception as error:  # torch and zipfile raise many types for a damaged file
        rejected = re.search(r"(?i)unsupported (?:global: )?GLOBAL (\S+)", str(error))
    if rejected:
        raise UserError(
            f"{path} contains {rejected[1]}, which is not loaded, as it could run code: only "
            "tensors, numbers, texts, lists and dictionaries are. Save the weights alone: "
            "torch.save(model.state_dict(), FILE)"
        )
    if not isinstance(content, dict):
        raise UserError(
            f"{path} is not a checkpoint: it is damaged, was not written by torch.save, or holds "
            "more than tensors and plain values (code in a checkpoint is never run)"
        )
    if "progress" in content or "preprocessing" in content:
        _check_types(content, path)
    return content


def _numpy_scalars() -> list[Any]:
    """What torch.load must know to load NumPy's numbers and texts, such as a best accuracy."""
    import numpy as np

    scalar = np.float64().__reduce__()[0]  # its module has another name in each version
    names = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")  # before, since 2.0
    kinds = {type(np.dtype(code)) for code in "?bBhHiIlLqQefdSU"}
    return [np.dtype, *kinds, *((scalar, name) for name in names)]


def _check_types(content: dict[str, Any], path: Path) -> None:
    """Raise `UserError` unless the entries of our own checkpoint have the types that we write."""

    def is_number(value: Any) -> bool:
        return isinstance(value, (int, float))

    def is_count(value: Any) -> bool:
        return isinstance(value, int) and value >= 0

    def are_sums(value: Any) -> bool:
        return value is None or (
            isinstance(value, list) and len(value) == 4 and all(map(is_number, value))
        )

    def are_figures(value: Any) -> bool:
        return isinstance(value, dict) and all(x is None or is_number(x) for x in value.values())

    def are_texts(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(x, str) for x in value)

    def are_fingerprints(value: Any) -> bool:
        return isinstance(value, dict) and all(are_texts(x) and len(x) == 2 for x in value.values())

    checks: dict[str, Callable[[Any], bool]] = {
        "arch": lambda value: isinstance(value, str),
        "classes": are_texts,
        "options": lambda value: isinstance(value, dict),
        "data": are_fingerprints,
        "progress": lambda value: isinstance(value, dict),
    }
    of_progress: dict[str, Callable[[Any], bool]] = {
        "epoch": is_count,
        "step": is_count,
        "global_batch": is_count,
        "elapsed": is_number,
        "epoch_began": is_number,
        "best": are_figures,
        "history": lambda value: isinstance(value, list) and all(map(are_figures, value)),
        "sums": are_sums,
        "printed": are_sums,
    }
    for name, check in (checks | of_progress).items():
        entries = content.get("progress") if name in of_progress else content
        if isinstance(entries, dict) and name in entries and not check(entries[name]):
            raise UserError(
                f"{path} does not fit this program (its {name} is {entries[name]!r:.100}): resume "
                "from another file, or start over with another --name"
            )


def unnamed_files(folder: Path) -> list[Path]:
    """Files in ``folder`` that a killed process had not yet renamed, the newest first."""
    names = folder.glob(UNNAMED)
    return sorted(names, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def remove_leftovers(folder: Path, recursive: bool = False) -> None:
    """Remove the temporary files that a killed process has left in ``folder``.

    ``recursive``: also in all folders below it. Raises: OSError.
    """
    for path in folder.glob("**/.*.tmp" if recursive else ".*.tmp"):
        if path.match(UNNAMED) or path.name.endswith(FETCHED):  # others may be the user's
            path.unlink(missing_ok=True)


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A temporary name next to ``path``. If the block raises, the file is removed."""
    # Random, so that no two threads, processes or nodes share it. It does not contain the name of
    # ``path``, which may already be as long as the file system allows.
    temporary = path.with_name(f".{os.urandom(8).hex()}.tmp")
    try:
        yield temporary
    except BaseException as error:
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = str(path)  # the name that means something to people
        with suppress(OSError):
            temporary.unlink()
        raise
