"""A progress bar in place of printed lines, where rank 0 writes to a terminal. Always on.

Interface: `utils.run_directory.Console` shows steps and lines through it.
Without this file, steps are printed as lines, as in a log file.
"""

from tqdm import tqdm


class ProgressBar:
    """The bar of an epoch or an evaluation; between them there is none."""

    def __init__(self) -> None:
        self.bar: tqdm | None = None

    def start(self, title: str, steps: int, done: int) -> None:
        """Show a bar for ``steps`` steps, of which some are ``done``."""
        self.bar = tqdm(total=steps, initial=done, desc=title, leave=False, unit="step")

    def move(self, done: int, text: str) -> None:
        """Show ``done`` steps, and from now on ``text`` behind them, unless it is empty."""
        if text:
            self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(done - self.bar.n)

    def stop(self) -> None:
        """Remove the bar."""
        self.bar.close()
        self.bar = None

    def write(self, text: str) -> None:
        """Print a line above the bar."""
        tqdm.write(text)
