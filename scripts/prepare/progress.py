"""How far a long work is."""

import sys
import time

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """How far the work is: a bar on a terminal; a line every ten seconds elsewhere."""

    def __init__(self, total: int):
        self.total, self.number = total, 0
        self.said = time.monotonic(), 0  # when the last line was printed, and its number
        self.bar = tqdm(total=total, unit=" images") if sys.stderr.isatty() else None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def advance(self) -> None:
        """Counts one image more."""
        self.number += 1
        if self.bar is not None:
            self.bar.update()
            return
        seconds = time.monotonic() - self.said[0]
        if seconds >= SECONDS_BETWEEN_LINES:
            rate = (self.number - self.said[1]) / seconds
            left = tqdm.format_interval(max(0, self.total - self.number) / rate)
            line = f"{self.number} of {self.total} images, {rate:.0f} images/s, {left} left"
            print(line, file=sys.stderr, flush=True)
            self.said = time.monotonic(), self.number
