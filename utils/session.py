"""The objects that a script builds from its options, and those that exist during training."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from utils.data import samplers
from utils.data.batches import EvalBatches, TrainBatches
from utils.data.loaders import Loaders
from utils.monitor import Monitor
from utils.run import audit
from utils.run.ledger import Ledger
from utils.run.run_directory import Run
from utils.run.snapshots import SnapshotWriter, TrainState
from utils.run.stopping import StopRequest
from utils.start.option_types import Options
from utils.start.world import World
from utils.status import Status

# train_step(images, targets, weight, update) -> (loss, logits), documented in each script.
TrainStep = Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
Predict = Callable[[Tensor], Tensor]  # images to logits, in the precision of the mode


@dataclass(frozen=True)
class Session:
    """A script's options and the objects that it builds from them."""

    args: Options
    world: World
    run: Run
    loaders: Loaders
    state: TrainState

    @property
    def train(self) -> TrainBatches:
        """The training batches."""
        assert self.loaders.train is not None
        return self.loaders.train

    @property
    def val(self) -> EvalBatches:
        """The validation batches."""
        assert self.loaders.val is not None
        return self.loaders.val

    @property
    def global_batch(self) -> int:
        """Images per optimiser step over all processes; without training data, computed from -b."""
        if self.loaders.train is not None:
            return self.train.sampler.global_batch
        return samplers.step_shape(self.args, self.world.data_parallel_size)[0]


@dataclass(frozen=True)
class Training(Session):
    """The objects that also exist from `loop.begin` to `loop.end`."""

    folder: Path  # the run directory
    stop: StopRequest
    monitor: Monitor
    snapshots: SnapshotWriter | None  # only in rank 0
    status: Status
    print_freq: int  # steps between printed lines, the same in all ranks
    first_epoch: int  # the first one that this process trains
    audit: audit.Log | None  # with --audit
    ledger: Ledger | None  # only in rank 0
    began: tuple[int, int]  # finished epochs, and steps of the next one, when this process began

    def write_ledger(self) -> None:
        """Write what this start of the run has used so far, in rank 0."""
        if self.ledger is None:
            return
        (epoch, step), steps = self.began, self.train.sampler.steps_per_epoch
        done = (self.state.epoch - epoch) * steps + self.state.step - step
        measured = self.ledger.entry.gpus == self.world.size  # not by one process for several
        joules = self.monitor.joules() if measured else None
        self.ledger.write(done * self.global_batch, joules)
        self.run.tell_written(self.ledger.path)
