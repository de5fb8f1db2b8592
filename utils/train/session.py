"""One process's part in a run, from its start or resume to its end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from utils import samplers
from utils.data.loaders import Batches, Loaders
from utils.launch.world import World
from utils.run.checkpoint import TrainState
from utils.run.directory import Run
from utils.run.snapshots import SnapshotWriter
from utils.train.hardware import Watch
from utils.train.status import StatusFile
from utils.train.stopping import Reason, StopRequest

# train_step(images, targets, weight, update) -> (loss, logits), documented in each script.
TrainStep = Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
Predict = Callable[[Tensor], Tensor]  # images to logits, with the mode's precision


@dataclass
class Session:
    """A script's options and what it has built with them.

    The fields after ``largest_batch`` are set from `loop.begin` to `loop.end`.
    """

    args: Any
    world: World
    run: Run
    loaders: Loaders
    state: TrainState
    resumed: bool = False  # from a full snapshot
    largest_batch: int | None = None  # images per process, where -b auto has found it
    stop: StopRequest | None = None
    watch: Watch | None = None
    status: StatusFile | None = None
    snapshots: SnapshotWriter | None = None  # in rank 0 alone
    print_freq: int = 0  # steps between printed lines, the same in all ranks
    epochs: int = 0  # finished in this session
    epoch_began: float = 0.0  # time.monotonic()
    ended_because: Reason | None = None

    @property
    def train(self) -> Batches:
        """The training batches."""
        assert self.loaders.train is not None
        return self.loaders.train

    @property
    def global_batch(self) -> int:
        """Images per optimiser step over all processes; without training data, what -b asks for."""
        if self.loaders.train is not None:
            return self.train.sampler.global_batch
        args = self.args
        return samplers.global_batch(args.batch_size, self.world.size, args.accum_steps)
