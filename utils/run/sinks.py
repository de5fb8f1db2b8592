"""Where a run's curves, pictures and files go: the event file, a tracker, a store."""

from collections.abc import Mapping
from pathlib import Path

from PIL import Image


class Sink:
    """Receives what a run produces, in rank 0. Each sink overrides what it is interested in."""

    def scalars(self, tags: Mapping[str, float], x: int) -> None:
        """Points at ``x`` for some tags; see `utils.run.tensorboard.STEP_TAGS` for its unit."""

    def image(self, tag: str, image: Image.Image, x: int) -> None:
        """A picture at ``x``, in thousandths of an epoch."""

    def file(self, path: Path) -> None:
        """A file of the run directory that was written; it may be missing. Called by a thread."""

    def close(self) -> None:
        """The run ends."""
