"""What a script hands to `utils.training.loop.run`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from utils.data.loaders import Batches, Loaders
from utils.instruments.watch import Watch
from utils.processes.distributed import World
from utils.run.checkpoint import TrainState
from utils.run.snapshots import SnapshotWriter
from utils.run.tracking import Run


class TrainStep(Protocol):
    """A script's training step on one micro-batch.

    images float [n, 3, size, size], targets int64 [n]. The loss is to be multiplied by ``weight``
    before ``backward``, so that gradients, averaged over ranks and summed over micro-batches, are
    those of the mean loss of the global batch. With ``update`` the step ends: the optimiser moves.
    Returns the unweighted mean loss (scalar) and the logits [n, classes].
    """

    def __call__(
        self, images: Tensor, targets: Tensor, weight: float, update: bool
    ) -> tuple[Tensor, Tensor]: ...


Predict = Callable[[Tensor], Tensor]  # images to logits, with the mode's precision


@dataclass
class Job:
    """A script's options and what it has built with them."""

    args: Any
    world: World
    run: Run
    loaders: Loaders
    state: TrainState
    live: Any = None  # utils.live.Live, while it trains
    watch: Watch | None = None  # while it trains
    snapshots: SnapshotWriter | None = None  # in rank 0, while it trains

    @property
    def train(self) -> Batches:
        """The training batches."""
        assert self.loaders.train is not None
        return self.loaders.train
