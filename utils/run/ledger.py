"""What a run has used so far: GPU-hours, energy and cost, over all processes and all its starts.

`ledger.json` in the run directory has one entry for each start of the run. Rank 0 writes it in each
minute and at the end of each epoch, so a run that was killed has paid for the work that it lost.
"""

import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from utils.start.atomic import save_atomically

FILE = "ledger.json"
SECONDS = 60.0  # between two writes
KWH = 3.6e6  # joules
log = logging.getLogger(__name__)


@dataclass
class Entry:
    """One start of a run."""

    nodes: int
    gpus: int  # of all nodes; 0 on a CPU
    seconds: float = 0.0  # since the process was started
    images: int = 0  # trained, repeated ones included
    joules: float | None = None  # of all GPUs; None without sensors


class Ledger:
    """The entries of a run, in rank 0. ``path``: the file; earlier entries are read from it."""

    def __init__(self, path: Path, entry: Entry):
        self.path, self.entry = path, entry
        self.before = _read(path)
        self.written = time.monotonic()

    def is_due(self) -> bool:
        """Whether the file is older than `SECONDS`."""
        return time.monotonic() - self.written > SECONDS

    def write(self, images: int, joules: float | None) -> None:
        """Write what this start has used so far. If that fails, the entry comes later, or never."""
        entry, self.written = self.entry, time.monotonic()
        entry.seconds, entry.images, entry.joules = process_seconds(), images, joules
        text = json.dumps([asdict(one) for one in self.entries()], indent=1) + "\n"
        try:
            save_atomically(lambda file: file.write(text.encode()), self.path)
        except OSError as error:
            log.warning(f"cannot write {self.path} ({error.strerror})")

    def entries(self) -> list[Entry]:
        """Those of all starts."""
        return [*self.before, self.entry]

    def totals(self) -> dict[str, float]:
        """For summary.json: "node_hours" and, on GPUs, "gpu_hours", "energy_kwh" and
        "images_per_joule". What is not known is left out: energy, if one start had no sensors."""
        entries = self.entries()
        totals = {"node_hours": sum(one.nodes * one.seconds for one in entries) / 3600}
        if any(one.gpus for one in entries):
            totals["gpu_hours"] = sum(one.gpus * one.seconds for one in entries) / 3600
        joules = [one.joules for one in entries if one.joules is not None]
        if len(joules) == len(entries) and (total := sum(joules)):
            totals["energy_kwh"] = total / KWH
            totals["images_per_joule"] = sum(one.images for one in entries) / total
        return totals


def _read(path: Path) -> list[Entry]:
    try:
        return [Entry(**one) for one in json.loads(path.read_text())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        log.warning(f"{path} cannot be read ({error}): earlier starts of the run do not count")
        return []


def process_seconds() -> float:
    """Seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class EnergyMeter:
    """Integrates a GPU's power over time."""

    def __init__(self) -> None:
        self.joules: float | None = None
        self.last: tuple[float, float] | None = None  # clock, W

    def add(self, watts: float) -> None:
        """Add a reading of the power, taken now; between two readings it changes linearly."""
        now = time.monotonic()
        if self.last is not None:
            before, old = self.last
            self.joules = (self.joules or 0.0) + (now - before) * (watts + old) / 2
        self.last = (now, watts)
