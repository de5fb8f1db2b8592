"""Writing snapshots beside training, and reading the newest whole one.

Training stands still only while the state is copied to the host; a thread then writes it. At any
instant, also in the middle of a write, ``snapshot.pt`` or the one before it is whole on disk.
"""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.atomic import read_checkpoint, save_atomically
from utils.errors import UserError

log = logging.getLogger(__name__)

SNAPSHOT, PREVIOUS, BEST = "snapshot.pt", "snapshot_previous.pt", "best.pt"


def latest(folder: Path) -> Path | None:
    """The newest snapshot in a run directory, if there is any."""
    return next((folder / name for name in (SNAPSHOT, PREVIOUS) if (folder / name).is_file()), None)


def read_latest(path: Path) -> dict[str, Any]:
    """Read ``path`` or, if it is a run's snapshot and damaged, the one before, and say so."""
    previous = path.with_name(PREVIOUS)
    try:
        return read_checkpoint(path)
    except UserError as fault:
        if path.name != SNAPSHOT or not previous.is_file():
            raise
        log.warning(f"{fault}; continuing from the snapshot before it, {previous}")
        return read_checkpoint(previous)


def write(content: dict[str, Any], path: Path) -> None:
    """torch.save to ``path``, atomically; of ``snapshot.pt`` the one before is kept.

    Raises: `UserError`; the old file is then as it was.
    """
    previous = path.with_name(PREVIOUS) if path.name == SNAPSHOT else None
    try:
        save_atomically(lambda file: torch.save(content, file), path, previous)
    except (OSError, RuntimeError) as fault:  # torch hides the cause in a RuntimeError
        cause = fault if isinstance(fault, OSError) else fault.__context__
        reason = cause.strerror if isinstance(cause, OSError) else "is the disk full?"
        raise UserError(f"cannot write {path} ({reason}): the last saved file is intact") from fault


class SnapshotWriter:
    """Writes one set of files after the other into a folder, in a thread. For rank 0.

    A write that fails is logged, and so is the next one that succeeds. ``after`` is called with the
    path of each file that has been written, in that thread.
    """

    def __init__(self, folder: Path, after: Callable[[Path], None] = lambda path: None):
        self.folder, self.after = folder, after
        self.failure: UserError | None = None  # of the last write
        self.pauses: list[float] = []  # seconds for which training stood still, one a snapshot
        self._thread: threading.Thread | None = None
        self._buffers: dict[str, Tensor] = {}  # of the last copies: fresh memory is slower
        self._copied: dict[int, Tensor] = {}

    @property
    def busy(self) -> bool:
        """Whether the last snapshot is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, files: dict[str, dict[str, Any]], collecting: float = 0.0) -> None:
        """Copy the contents (file name -> what torch.save takes) and begin to write them.

        Waits for the write before. Returns when the copy is made: what it was made from may change.
        ``collecting``: seconds that the caller has spent on the contents.
        """
        self.wait()
        began = time.perf_counter()
        self._copied = {}  # a tensor that stands in two files is copied once
        contents = {name: self._copy(content, name) for name, content in files.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.pauses.append(collecting + time.perf_counter() - began)
        self._thread = threading.Thread(target=self._write, args=(contents,), name="snapshot")
        self._thread.start()

    def wait(self) -> str | None:
        """Return when nothing is being written any more; if the last write failed, why."""
        if self._thread is not None:
            self._thread.join()
        return str(self.failure) if self.failure else None

    def _write(self, contents: dict[str, dict[str, Any]]) -> None:
        try:
            for name, content in contents.items():
                write(content, self.folder / name)
                self.after(self.folder / name)
        except UserError as failure:
            if self.failure is None:
                log.warning(f"{failure}; training continues")
            self.failure = failure
        else:
            if self.failure is not None:
                log.info(f"{self.folder / SNAPSHOT} could be written again")
            self.failure = None

    def _copy(self, value: Any, place: str) -> Any:
        """A deep copy on the host, into the buffers of the last time."""
        if isinstance(value, dict):
            return {key: self._copy(entry, f"{place}/{key}") for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._copy(x, f"{place}/{i}") for i, x in enumerate(value))
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._copied:
            tensor, old = value.detach(), self._buffers.get(place)
            if old is None or _layout(old) != _layout(tensor):
                old = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
                self._buffers[place] = old
            self._copied[id(value)] = old.copy_(tensor, non_blocking=True)
        return self._copied[id(value)]


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype
