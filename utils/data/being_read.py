"""Which image each loader worker reads, for the line that explains a hang."""

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator

from torch.utils.data import get_worker_info

from utils.start.signals import process_state

NONE = -1
_STOPPED = "is stopped, by SIGSTOP or a debugger"
STATES = {"T": _STOPPED, "t": _STOPPED, "Z": "has ended", "": "has ended"}


class BeingRead:
    """The image that each process of a loader reads now, in memory that its workers share.

    The training process makes it before it forks ``workers``; without workers it reads itself.
    """

    def __init__(self, workers: int):
        self.cells = memoryview(mmap.mmap(-1, 16 * max(workers, 1))).cast("q")  # pid, image
        self.row = 0
        for row in range(0, len(self.cells), 2):
            self.cells[row + 1] = NONE

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """In the reading process: a batch begins and ends."""
        worker = get_worker_info()
        self.row = 2 * worker.id if worker is not None else 0
        self.cells[self.row] = os.getpid()
        try:
            yield
        finally:
            self.cells[self.row + 1] = NONE

    def note(self, image: int) -> None:
        """In the reading process: it waits for this image."""
        self.cells[self.row + 1] = image

    def describe(self, path: Callable[[int], str]) -> str:
        """A sentence about the batch that does not come. ``path`` gives that of an image."""
        pairs = list(zip(self.cells[::2].tolist(), self.cells[1::2].tolist(), strict=True))
        reads = []
        for pid, image in pairs:
            who = "it" if pid == os.getpid() else f"loader worker {pid}"
            if pid and (why := STATES.get(process_state(pid))):
                return f"{who} {why}"
            if pid and image != NONE:
                reads.append(f"{who} is reading {path(image)}")
        return reads[0] if reads else "no loader worker is reading"
