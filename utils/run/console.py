"""What a run prints: log lines, also kept in train.log, and a progress bar on a terminal.

Modules log by `logging.getLogger(__name__)`, below the logger "utils"; until a `Console` is there
to show them, warnings go to stderr and the rest nowhere.
"""

import contextlib
import logging
import sys
from pathlib import Path

from tqdm import tqdm

from utils.launch.world import World

LOG = "train.log"


def as_line(record: logging.LogRecord) -> str:
    """What is printed of a record: its message; of a warning, behind that word."""
    text = record.getMessage()
    return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


class Console(logging.Handler):
    """Prints a line in the first process of each node, and keeps it in train.log of rank 0."""

    def __init__(self, folder: Path, world: World):
        super().__init__(logging.INFO)
        self.path, self.world = folder / LOG, world
        self.shows = world.local_rank == 0
        self.bar: tqdm | None = None

    def attach(self) -> None:
        """Show from now on what any module of this package logs."""
        logger = logging.getLogger("utils")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Show one line. A full disk must not end a training: the line has been printed."""
        text = as_line(record)
        if self.bar is not None:
            tqdm.write(text)
        elif self.shows:
            print(text if self.world.is_main else f"[rank {self.world.rank}] {text}", flush=True)
        if self.world.is_main:
            with contextlib.suppress(OSError), open(self.path, "a") as file:
                file.write(text + "\n")

    def start_bar(self, title: str, steps: int, done: int = 0) -> None:
        """Show a progress bar for ``steps`` steps if rank 0 sits at a terminal."""
        if self.world.is_main and sys.stderr.isatty():
            self.bar = tqdm(total=steps, initial=done, desc=title, leave=False, unit="step")

    def move_bar(self, done: int, text: str | None = None) -> None:
        """Let the bar, if there is one, show ``done`` steps, and ``text`` behind it."""
        if self.bar is not None:
            if text is not None:
                self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(done - self.bar.n)

    def stop_bar(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
