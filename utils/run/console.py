"""What a run prints: log lines, also in train.log, and progress bars."""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from utils.start.errors import printable
from utils.start.world import World

LOG = "train.log"
# Of the lines that each node logs, those that the first node cannot know: shown on every node.
EVERY_NODE = {"every_node": True}
IN_BAR = {"in_bar": True}  # the progress bar shows it: for train.log alone
# The bar at 80 columns: Epoch 12/90 |###   | 600/5005 12:34 loss 2.3125  top-1 41.2   812 img/s
BAR = "{desc} |{bar}| {n_fmt}/{total_fmt} {remaining}{postfix}"

# tqdm's own lock is also a semaphore: Python would say below the error that a killed rank left it.
tqdm.set_lock(threading.RLock())


def as_line(record: logging.LogRecord) -> str:
    """The line to print for a record. Warnings and errors begin with their level."""
    text = printable(record.getMessage())
    return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


def loss_text(loss: float) -> str:
    """A loss with fixed decimals; one that is huge, with four digits."""
    return f"{loss:.4f}" if abs(loss) < 1e4 else f"{loss:.4g}"


class Bar(tqdm):
    """A bar that leaves nothing behind when its terminal becomes narrower.

    The terminal then wraps what is drawn. tqdm would redraw the last row alone, and fill it up with
    spaces to the old width, which the terminal wraps again.
    """

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        """A function that draws the bar in place of its last state, both shorter than a row."""
        drawn = 0  # columns of the last state

        def draw(text: str) -> None:
            nonlocal drawn
            columns = 0
            with contextlib.suppress(OSError):  # the terminal was closed
                columns = os.get_terminal_size(file.fileno()).columns
            above = max(0, drawn - 1) // columns if columns else 0  # rows
            clear = f"\x1b[{above}A\r\x1b[J" if above else ""
            rest = "" if above else " " * (drawn - len(text))
            file.write(f"{clear}\r{text}{rest}")
            file.flush()
            drawn = len(text)

        return draw


class Console(logging.Handler):
    """Prints the log of this package in rank 0. Other nodes print their warnings.

    Rank 0 also appends it to ``folder``/train.log. It shows progress bars if output and errors are
    a terminal: with ``| tee`` or in a file, lines are of more use.
    """

    def __init__(self, folder: Path | None, world: World):
        super().__init__(logging.INFO)
        self.path, self.world = folder and folder / LOG, world
        self.shows = world.local_rank == 0
        self.has_bar = world.is_main and sys.stdout.isatty() and sys.stderr.isatty()
        logger = logging.getLogger("utils")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Show one line. If the disk is full, training continues: the line has been printed."""
        text, is_main = as_line(record), self.world.is_main
        if self.has_bar and not hasattr(record, "in_bar"):
            tqdm.write(text)  # above the bar
        elif self.shows and is_main and not self.has_bar:
            print(text, flush=True)
        elif self.shows and (record.levelno >= logging.WARNING or hasattr(record, "every_node")):
            print(f"[rank {self.world.rank}] {text}", flush=True)
        if self.world.is_main and self.path is not None:
            line = (text + "\n").encode(errors="backslashreplace")  # names may hold any bytes
            with contextlib.suppress(OSError), open(self.path, "ab") as file:
                file.write(line)

    def progress_bar(self, title: str, steps: int, done: int = 0) -> Bar:
        """A bar for ``steps`` steps, ``done`` of them finished. It is shown only on a terminal."""
        looks = {"leave": False, "dynamic_ncols": True, "bar_format": BAR, "file": sys.stdout}
        return Bar(desc=title, total=steps, initial=done, disable=not self.has_bar, **looks)
