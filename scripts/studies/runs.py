"""A run of a study: its command, and what its files say about it."""

import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

FINISHED = ("epochs", "desired_acc", "train_time")  # `finished_because` of complete runs
# A line of training in the log, except the last one of an epoch, after which evaluation begins.
STEP = re.compile(r"Epoch (\d+)/(\d+) step +(\d+)/(?!\3\s)(\d+)\s")


@dataclass(frozen=True)
class StudyRun:
    """One run. ``command``: script and options, as for one node."""

    name: str
    nodes: int
    group: str  # the varied options
    seed: int | None
    command: tuple[str, ...]
    folder: Path
    data: str
    epochs: int = 0  # the run is finished after so many epochs,
    hours: float | None = None  # or so much training time
    ends_with_epochs: bool = False  # the training depends on the number of epochs from the start

    def file(self, ending: str) -> Path:
        """Return the path of a study file in the run directory. ``ending``: "log", "command" (that
        started the run), or "batch" (the largest batch per GPU that --find-batch printed)."""
        return self.folder / f"study.{ending}"

    @property
    def batch(self) -> int | None:
        file = self.file("batch")
        text = file.read_text() if file.exists() else ""
        return int(text) if text else None  # a full disk has left it empty: measure again

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended by itself, and has reached the study's limits: they may have
        been raised since then."""
        with contextlib.suppress(OSError, ValueError):
            summary = json.loads((self.folder / "summary.json").read_text())
            reason = summary.get("finished_because")
            if reason == "train_time":
                # Without --hours, that was the limit of an earlier study: epochs are left.
                return self.hours is not None and summary["elapsed_seconds"] >= 3599 * self.hours
            if reason == "epochs":
                return summary.get("epochs_done", self.epochs) >= self.epochs
            return reason in FINISHED
        return False

    @property
    def has_trained(self) -> bool:
        """Whether a step was trained, here or, as the log says, on another machine."""
        log = self.file("log")
        return (self.folder / "snapshot.pt").exists() or bool(
            log.is_file() and STEP.search(log.read_text(errors="replace"))
        )

    @property
    def state(self) -> str:
        """Return "finished", or "not finished" with the last error in its log."""
        if self.is_finished:
            return "finished"
        log = self.file("log")
        text = log.read_text(errors="replace") if log.is_file() else ""
        return ": ".join(["not finished", *re.findall(r"error: (.*)", text)[-1:]])
