"""The directory of a run and its files. Rank 0 makes it and writes all of them."""

import contextlib
import json
import logging
import math
import multiprocessing.util
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary

from utils.run.console import LOG
from utils.run.ledger import FILE as LEDGER
from utils.run.run_lock import Lock
from utils.run.sinks import Sink
from utils.run.snapshots import BEST, SNAPSHOT, latest
from utils.run.tensorboard import EventFile, cut_off
from utils.start.atomic import remove_leftovers, save_atomically

OPTIONS, SUMMARY = "options.json", "summary.json"

log = logging.getLogger(__name__)


class RunFolder:
    """The directory ``path`` of a run. Rank 0 makes it, and passes what it writes to ``sinks``.

    ``lock``: only of a training. An evaluation leaves options.json and summary.json, no curves.
    ``missing``: folders above it that did not exist before this command, the innermost first.
    """

    def __init__(self, path: Path, lock: Lock | None, missing: Sequence[Path] = ()):
        self.path, self.lock, self.missing = path, lock, missing
        self.sinks: list[Sink] = []
        self.events: EventFile | None = None  # one of the sinks

    def make(self) -> bool:
        """Make the directory and, to train, try to acquire its lock. Returns: whether it is held.

        Raises: OSError; `UserError` while another run holds it.
        """
        is_new = not self.path.exists() or not any(self.path.iterdir())
        self.path.mkdir(parents=True, exist_ok=True)
        if is_new:  # before the lock is released; after errors as well, see `Lock`
            multiprocessing.util.Finalize(None, self._remove_unused, exitpriority=1)
        return self.lock is None or self.lock.poll()

    def is_trained(self) -> bool:
        """Whether there is something that a training which starts over would overwrite."""
        return latest(self.path) is not None or (self.path / BEST).exists()

    def holds(self, file: Path) -> bool:
        """Whether ``file``, which may be missing, is in the directory, by whatever path."""
        return file.parent.is_dir() and os.path.samefile(file.parent, self.path)

    def _remove_unused(self) -> None:
        """Remove the directory if the run has not begun, such as after a wrong ``--resume``."""
        if (self.path / OPTIONS).exists() or (self.lock is not None and not self.lock.is_held):
            return
        with contextlib.suppress(OSError):  # another run waits for the lock
            for name in (LOG, SNAPSHOT, BEST, LEDGER):  # the last three are copies
                (self.path / name).unlink(missing_ok=True)
            if self.lock is not None:
                self.lock.release()
            for folder in (self.path, *self.missing):
                folder.rmdir()

    def open_store(self, url: str, resume: str | None) -> None:
        """``--store``: copy each file that is written from now on. Raises: `UserError`."""
        from utils.run.store import Store

        copies = Store(url, self.path)
        copies.open(resume)
        self.sinks.append(copies)

    def open_tracker(self, options: dict[str, Any], record: dict[str, Any]) -> None:
        """``--tracker``. Call it before `cut_off`: it reads the points that are cut off."""
        from utils.run.tracker import Tracker

        self.sinks.append(Tracker(self.path, options, record))

    def write_options(self, options: dict[str, Any]) -> None:
        """Write options.json, and remove what a killed process has left. Raises: OSError."""
        remove_leftovers(self.path)
        _save_json(options, self.path / OPTIONS)

    def open_event_file(self, epoch: int, position: float, opening: Iterable[Summary]) -> None:
        """Begin a new event file with the summaries ``opening``.

        Remove points after ``epoch`` (finished) and ``position`` (epochs, fractional) that a killed
        run left in older ones, so that curves never run backward. Raises: OSError.
        """
        cut_off(self.path, epoch, round(1000 * position))
        # The store may have older files, if the last process died while it sent these.
        for name in (OPTIONS, BEST, SNAPSHOT):
            self.tell_written(self.path / name)
        self.events = EventFile(self.path, opening)
        self.sinks.append(self.events)

    def tell_written(self, path: Path) -> None:
        """A file of the directory was written."""
        for sink in self.sinks:
            sink.file(path)

    def write_summary(self, record: dict[str, Any], closing: Iterable[Summary]) -> None:
        """Write summary.json, and the summaries ``closing`` into the event file."""
        path = self.path / SUMMARY
        # JSON has neither NaN nor infinity, and other programs read this file: write null instead.
        clean = {key: x if _is_json(x) else None for key, x in record.items()}
        try:
            _save_json(clean, path)
        except OSError as error:
            log.warning(f"cannot write {path} ({error.strerror})")
        if self.events is not None:
            self.events.add(closing)
        self.tell_written(path)


def _is_json(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _save_json(content: dict[str, Any], path: Path) -> None:
    text = json.dumps(content, indent=1) + "\n"
    save_atomically(lambda file: file.write(text.encode()), path)
