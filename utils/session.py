"""The objects that a script builds from its options, and those that exist during training."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from utils import samplers
from utils.loaders import Batches, Loaders
from utils.run_directory import Run
from utils.snapshots import SnapshotWriter, TrainState
from utils.stopping import StopRequest
from utils.world import World

# train_step(images, targets, weight, update) -> (loss, logits), documented in each script.
TrainStep = Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
Predict = Callable[[Tensor], Tensor]  # images to logits, in the precision of the mode


@dataclass(frozen=True)
class Session:
    """A script's options and the objects that it builds from them."""

    args: Any
    world: World
    run: Run
    loaders: Loaders
    state: TrainState

    @property
    def train(self) -> Batches:
        """The training batches."""
        assert self.loaders.train is not None
        return self.loaders.train

    @property
    def global_batch(self) -> int:
        """Images per optimiser step over all processes; without training data, computed from -b."""
        if self.loaders.train is not None:
            return self.train.sampler.global_batch
        args = self.args
        return samplers.global_batch(args.batch_size, self.world.slices, args.accum_steps)


@dataclass(frozen=True)
class Training(Session):
    """The objects that also exist from `loop.begin` to `loop.end`."""

    stop: StopRequest
    watch: Any  # see `addons.watch`
    snapshots: SnapshotWriter | None  # only in rank 0
    show_status: Callable[..., None]  # takes (phase, figures), see `addons.status`
    print_freq: int  # steps between printed lines, the same in all ranks
    first_epoch: int  # the first one that this process trains
