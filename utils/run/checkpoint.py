"""What a snapshot holds, and how a run continues from it or from other programs' checkpoints.

utils/run/snapshots.py writes them. Reading runs no code that a file may hold.
"""

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from utils.atomic import read_checkpoint
from utils.comm import fsdp
from utils.errors import UserError
from utils.launch.world import World, from_main
from utils.model import weights
from utils.run import agreeing, contents, elastic
from utils.run.snapshots import candidates

log = logging.getLogger(__name__)


class Stateful(Protocol):
    """Anything that can be saved and loaded like a module."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


@dataclass
class TrainState:
    """All that the future of a run depends on.

    ``epoch`` epochs are finished, and ``step`` steps of ``global_batch`` images of the next one.
    ``sums`` are that epoch's metric sums so far (`metrics.Sums`), ``printed`` those at
    the last printed line, both of all ranks; ``elapsed`` are the seconds of training, ``history``
    is a dictionary an epoch, ``best`` that of the best one. The order
    of samples, augmentation and dropout are functions of seed and position, so no random state
    needs keeping. ``weights`` saves the model as float32 where it trains in another precision.
    ``preprocessing`` is that of its images (see `utils.data.preprocessing`), as plain values;
    ``comm`` is how the processes exchange gradients, ``ema`` the averaged weights, if any.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Stateful
    weights: Stateful | None = None
    global_batch: int = 0
    epoch: int = 0
    step: int = 0
    best: dict[str, float] = field(default_factory=dict)
    elapsed: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)
    sums: list[float] | None = None
    printed: list[float] | None = None
    preprocessing: dict[str, Any] | None = None
    comm: Any = None  # a `utils.comm.exchange.Exchange`
    ema: Any = None  # a `utils.model.ema.Average`
    clock: float | None = None  # when ``elapsed`` was brought up to date

    def tick(self) -> None:
        """Add the time since the last call to ``elapsed``; the first call starts the clock."""
        now = time.monotonic()
        self.elapsed += now - self.clock if self.clock is not None else 0.0
        self.clock = now

    @property
    def sharded(self) -> bool:
        """Whether each process has a part of the model: all must take part in saving it, and in
        each of its forward passes."""
        return fsdp.is_sharded(self.model)

    def full_weights(self) -> dict[str, Tensor]:
        """The model's state dict in float32, under plain torchvision names; of a sharded one,
        shards."""
        return (self.weights or self.model).state_dict()

    def load_weights(self, state: dict[str, Tensor]) -> None:
        """Load whole weights. Raises `UserError` when they are of another model."""
        state = fsdp.shards_like(state, self.model.state_dict()) if self.sharded else state
        try:
            (self.weights or self.model).load_state_dict(state)
        except RuntimeError as fault:
            reason = str(fault).split("\n\t")[1] if "\n\t" in str(fault) else str(fault)
            raise UserError(
                f"the snapshot does not fit this model, another arch or number of classes? "
                f"({reason[:200]})",
                alike=True,
            ) from None


def snapshot_of(
    state: TrainState,
    options: dict[str, Any],
    classes: list[str],
    weights: dict[str, Tensor],
    comm: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of ``snapshot.pt``; ``weights`` are ``state.full_weights()``, ``comm`` what
    ``state.comm.collect()`` gave."""
    return {
        "model": weights,
        "optimizer": state.optimizer.state_dict(),
        "scaler": state.scaler.state_dict(),
        "progress": {name: getattr(state, name) for name in contents.PROGRESS},
        "options": options,
        "classes": classes,
        "preprocessing": state.preprocessing,
        "comm": comm,
        "ema": state.ema.state_dict() if state.ema is not None else None,
    }


def best_of(
    state: TrainState, arch: str, classes: list[str], weights: dict[str, Tensor]
) -> dict[str, Any]:
    """The content of ``best.pt``, which torchvision can load without this code.

    ``weights`` are the model's; the averaged ones take their places where those were better.
    """
    averaged = bool(state.best.get("ema"))
    return {
        "state_dict": {**weights, **state.ema.weights()} if averaged else weights,
        "weights": "ema" if averaged else "model",
        "arch": arch,
        "classes": classes,
        "epoch": state.best["epoch"],
        "top1": state.best["top1"],
        "top5": state.best["top5"],
        "preprocessing": state.preprocessing,
    }


def read_latest(path: Path) -> dict[str, Any]:
    """Read ``path`` or, if it is a run's snapshot and damaged, the one before, and say so."""
    failure: UserError | None = None
    for candidate in candidates(path):
        try:
            content = read_checkpoint(candidate)
        except UserError as fault:
            failure = failure or fault
            continue
        if failure is not None:
            log.warning(f"{failure}; going on from the one before, {candidate}")
        return content
    assert failure is not None
    raise failure


def resume(
    state: TrainState,
    args: Any,
    world: World,
    path: Path | None,
    classes: list[str] | None = None,
) -> bool:
    """Load ``path`` (as rank 0 finds it) into every process's ``state``.

    Takes our snapshots and best models, checkpoints of pytorch/examples, of the Apex example and of
    torchvision's references, and bare state dicts. ``args`` and ``classes`` are checked against
    what the file says of itself. Returns: whether it was a full snapshot of ours. Raises:
    `UserError`.
    """
    content = from_main(lambda: read_latest(path) if path else None, world)
    if content is None:
        return False
    saved = contents.options(content, path)
    if isinstance(arch := content.get("arch", saved.get("arch")), str) and arch != args.arch:
        raise UserError(f"{path} is a {arch}: use -a {arch} to load it", alike=True)
    agreeing.check_classes(contents.classes(content, path), classes, path)
    changed = agreeing.changed_options(saved, args)
    whole = "progress" in content
    if whole and not args.evaluate and args.start_epoch is None:
        agreeing.check_options(changed, saved, path)
    state.preprocessing = content.get("preprocessing")
    named, note = weights.plain(content, path)
    if note and world.is_main:
        log.info(note)
    _load_weights(state, named, args)
    if args.evaluate:
        return False
    if state.ema is not None:
        averages = contents.averages(content, path)
        if averages is not None:
            averages |= {"model": fsdp.shards_like(averages["model"], state.ema.weights())}
        state.ema.restore(averages)
    progress = contents.progress(content, path) if whole else {}
    scaler = contents.loss_scale(content, state.scaler.state_dict(), path)
    other = args.start_epoch is not None and {*changed} & {*agreeing.OPTIMISER}
    if "optimizer" in content and not other:
        state.optimizer.load_state_dict(contents.momentum(content, state.optimizer, path))
    state.scaler.load_state_dict(scaler)
    if state.comm is not None and (comm := contents.communication(content, path)):
        state.comm.restore(comm)
    if not whole:
        _read_foreign_progress(state, content, path, world)
        return False
    global_batch = state.global_batch
    # Snapshots of earlier versions do not have it: the next line is of the steps after the resume.
    state.printed = progress.get("sums")
    for name, value in progress.items():
        setattr(state, name, value)
    repeated = _rescale_position(state, global_batch)
    if repeated and world.is_main:
        log.info(
            f"note: the global batch is {global_batch} now, so {repeated} images of this epoch are "
            f"trained on again, from step {state.step} on"
        )
    if changed and world.is_main:
        changes = (
            f"--{key.replace('_', '-')} {vars(args)[key]} (was {saved[key]})" for key in changed
        )
        log.info(f"changed since the snapshot: {', '.join(changes)}")
    if not world.is_main:
        state.sums = None  # they are of all ranks: only one may bring them in again
    return True


def _load_weights(state: TrainState, named: dict[str, Tensor], args: Any) -> None:
    try:
        state.load_weights(named)
    except UserError as fault:
        # Some models have weights for each place of the image.
        size = (state.preprocessing or {}).get("image_size")
        if size in (None, getattr(args, "image_size", None)):
            raise
        raise UserError(f"{fault}; it was trained with --image-size {size}", alike=True) from None


def _read_foreign_progress(
    state: TrainState, content: dict[str, Any], path: Path | None, world: World
) -> None:
    if "optimizer" not in content:
        return  # weights only: a start, not a continuation
    state.epoch = contents.finished_epochs(content, path)
    best = contents.accuracy(content)
    if best is not None and world.is_main:
        # Perhaps of other images, and then no epoch here might ever be better.
        log.info(
            f"note: {path} names a best top-1 of {best:.2f} %, measured elsewhere; best.pt will be "
            "the best epoch from here on"
        )


def _rescale_position(state: TrainState, global_batch: int) -> int:
    """Express the position within the epoch in steps of this run's global batch.

    Where a launcher restarts the job on the nodes that are left, nobody is there to choose another
    batch size: it continues at the last step boundary before. Returns how many images are repeated.
    """
    images = state.step * state.global_batch
    repeated = images % global_batch
    if repeated and not elastic.is_elastic():
        raise UserError(
            f"the snapshot was taken in the middle of an epoch, after {images} images, which is no "
            f"whole number of global batches of {global_batch}: resume with the global batch "
            f"{state.global_batch} that it was made with",
            alike=True,
        )
    if repeated and state.sums:  # the means stay what they are, and each image counts once
        part = (images - repeated) / images
        state.sums = [value * part for value in state.sums]
        state.printed = state.printed and [value * part for value in state.printed]
    state.step, state.global_batch = images // global_batch, global_batch
    return repeated
