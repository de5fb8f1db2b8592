"""What the main thread of this process does, noted for `utils.start.hang`, whose threads read it.

A note is one assignment: it costs no time in a training step.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass
class Progress:
    """The notes of one process."""

    count: int = 0  # grows with each batch that has arrived
    phase: str = "starting"
    # The epochs that are finished, and the finished steps of the next one; None before training.
    position: Callable[[], tuple[int, int]] | None = None
    awaited: Callable[[], str] | None = None  # says who makes the batch that it waits for

    def where(self) -> str:
        """The position in the training: "in step 812 of epoch 3", "while evaluating (epoch 3)"."""
        epoch, step = self.position() if self.position else (0, 0)
        if self.phase == TRAINING:
            return f"in step {step + 1} of epoch {epoch + 1}"
        return f"while {self.phase}" + (f" (epoch {epoch + 1})" if self.position else "")


TRAINING = "training"
main = Progress()


@contextlib.contextmanager
def during(phase: str) -> Iterator[None]:
    """Note the ``phase`` of a block, or of a function that this decorates.

    An exception leaves the note: it says where the error came from.
    """
    before, main.phase = main.phase, phase
    yield
    main.phase = before
