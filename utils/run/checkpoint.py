"""What a snapshot holds, and how a run continues from it or from other programs' checkpoints.

utils/run/snapshots.py writes and finds the files; their checksums prove what is in them.
"""

import logging
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from utils.errors import UserError
from utils.launch.world import World, from_main, is_elastic, is_sharded
from utils.model.foreign import plain_weights
from utils.model.models import scale_input_as
from utils.model.schedules import TO_THE_END
from utils.run.snapshots import read_latest

log = logging.getLogger(__name__)

PROGRESS = ("epoch", "step", "global_batch", "best", "elapsed", "history", "sums", "printed")
# Another value would break off the order of samples, the learning-rate schedule or the optimiser.
_OPTIMISER = ("optimizer", "wd_norm", "freeze")
_FIXED = ("seed", "repeated_aug", "lr_schedule", "warmup_epochs", "progressive", *_OPTIMISER)
_PLACES = ("name", "output_dir", "resume", "data", "command", "mode", "store", "dist_url", "rank")


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
    scaler: Any  # with state_dict and load_state_dict, like the next
    weights: Any = None
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
        return is_sharded(self.model)

    def full_weights(self) -> dict[str, Tensor]:
        """The model's state dict in float32, under plain torchvision names; of a sharded one,
        shards."""
        return (self.weights or self.model).state_dict()

    def load_weights(self, state: dict[str, Tensor]) -> None:
        """Load whole weights. Raises `UserError` when they are of another model."""
        if self.sharded:
            from utils.comm import fsdp

            state = fsdp.shards_like(state, self.model.state_dict())
        try:
            (self.weights or self.model).load_state_dict(state)
        except RuntimeError as fault:
            # Some models have weights for each place of the image.
            size = (self.preprocessing or {}).get("image_size")
            hint = f"; it was trained with --image-size {size}" if size else ""
            raise UserError(
                f"the snapshot does not fit this model, another arch or number of classes? "
                f"({' '.join(str(fault).split())[:250]}){hint}",
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
        "progress": {name: getattr(state, name) for name in PROGRESS},
        "options": options,
        "classes": classes,
        "preprocessing": state.preprocessing,
        "model_args": getattr(state.model, "constructor_args", {}),
        "comm": comm,
        "ema": state.ema.state_dict() if state.ema is not None else None,
    }


def best_of(
    state: TrainState, arch: str, classes: list[str], weights: dict[str, Tensor]
) -> dict[str, Any]:
    """The content of ``best.pt``, which torchvision can load without this code.

    ``weights`` are the model's; the averaged ones replace them where those were better.
    """
    averaged = bool(state.best.get("ema"))
    return {
        "state_dict": {**weights, **state.ema.averages} if averaged else weights,
        "weights": "ema" if averaged else "model",
        "arch": arch,
        "classes": classes,
        "epoch": state.best["epoch"],
        "top1": state.best["top1"],
        "top5": state.best["top5"],
        "loss": state.best.get("loss"),
        "preprocessing": state.preprocessing,
        "model_args": getattr(state.model, "constructor_args", {}),
    }


def saved_preprocessing(path: Path | None) -> dict[str, Any] | None:
    """The preprocessing in a checkpoint, without reading its weights; None if it has none.

    A file that cannot be read has none either: what is wrong with it is said when it is loaded.
    """
    try:
        return torch.load(path, "cpu", mmap=True, weights_only=True).get("preprocessing")
    except Exception:
        return None


def resume(
    state: TrainState, args: Any, world: World, path: Path | None, classes: list[str] | None = None
) -> bool:
    """Load ``path`` (as rank 0 finds it) into every process's ``state``.

    Of any other file than our snapshots, the weights alone are loaded (see `utils.model.foreign`).
    ``args`` and ``classes`` are compared with what the file says of itself. Returns: whether it was
    a full snapshot of ours.
    Raises: `UserError`.
    """
    content = from_main(lambda: read_latest(path) if path else None, world)
    if content is None:
        return False
    try:
        return _restore(state, args, world, content, path, classes)
    # Its checksums were right, so it was written like that: by another program.
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as fault:
        raise UserError(f"{path} does not fit this program ({fault!r:.200})", alike=True) from fault


def _restore(
    state: TrainState,
    args: Any,
    world: World,
    content: dict[str, Any],
    path: Path | None,
    classes: list[str] | None,
) -> bool:
    from utils.comm import fsdp

    is_ours = "progress" in content
    saved, theirs = content.get("options", content), content.get("classes")
    if (arch := content.get("arch", saved.get("arch", args.arch))) != args.arch:
        raise UserError(f"{path} is a {arch}: use -a {arch} to load it", alike=True)
    if classes and theirs and list(theirs) != classes:
        raise UserError(
            f"{path} has other classes than the data ({len(theirs)}: {theirs[0]}, ...): choose the "
            "same with DATA and --classes",
            alike=True,
        )
    continues = is_ours and not args.evaluate and args.start_epoch is None
    changed = changed_options(saved, args, path if continues else None)
    tell = log.info if world.is_main else log.debug
    named, note = plain_weights(content, path)
    if note:
        tell(note)
    state.preprocessing = content.get("preprocessing")
    state.load_weights(named)
    scale_input_as(content, state.model)
    if args.evaluate:
        return False
    if state.ema is not None:
        averages = content.get("ema") if is_ours else None
        if averages is not None:
            averages["model"] = fsdp.shards_like(averages["model"], state.ema.averages)
        state.ema.restore(averages)
    if not is_ours:
        tell(
            f"note: {path} is not a snapshot: only its weights are loaded, and training begins at "
            f"epoch {args.start_epoch or 0}"
        )
        return False
    begins_anew = args.start_epoch is not None and {*changed} & {*_OPTIMISER}
    if not begins_anew:
        moments = _optimizer_state(content["optimizer"], state.optimizer, path)
        state.optimizer.load_state_dict(moments)
    state.scaler.load_state_dict(_loss_scale(content["scaler"], state.scaler.state_dict()))
    if state.comm is not None and content.get("comm"):
        state.comm.restore(content["comm"])
    global_batch = state.global_batch
    for name in PROGRESS:
        setattr(state, name, content["progress"][name])
    if repeated := _rescale_position(state, global_batch):
        tell(
            f"note: the global batch is {global_batch} now, so {repeated} images of this epoch are "
            f"repeated, from step {state.step} on"
        )
    changes = [f"{_typed(key, vars(args))} (was {saved[key]})" for key in changed]
    if (before := content["progress"]["global_batch"]) != global_batch:
        changes.insert(0, f"the global batch is {global_batch} (was {before})")
    commands = (sys.argv[0], *str(saved.get("command")).split()[:1])
    scripts = [name for name in map(os.path.basename, commands) if name.startswith("imagenet_")]
    if len(set(scripts)) > 1:
        changes.insert(0, f"the script is {scripts[0]} (was {scripts[1]})")
    if changes:
        tell(f"changed since the snapshot: {', '.join(changes)}")
    if not world.is_main:
        state.sums = None  # they are of all ranks: only one may bring them in again
    return True


def changed_options(saved: dict[str, Any], args: Any, path: Path | None = None) -> list[str]:
    """Names of the options that differ now, without places and what the snapshot decides.

    Raises: `UserError` for those that contradict the snapshot ``path``, if it is given.
    """
    now = vars(args)
    free = (*_PLACES, *getattr(args, "untyped", ()))
    changed = [key for key in saved if key in now and key not in free and saved[key] != now[key]]
    fixed = [key for key in changed if key in _FIXED]
    # Step after step, the last epoch does not matter.
    if "epochs" in changed and (saved.get("lr_schedule") in TO_THE_END or saved.get("progressive")):
        fixed.append("epochs")
    if fixed and path is not None:
        raise UserError(
            f"{path} was made with {' '.join(_typed(key, saved) for key in fixed)}: use these "
            "options, or begin a new schedule from its weights with --start-epoch 0",
            alike=True,
        )
    return changed


def _typed(key: str, options: dict[str, Any]) -> str:
    return f"--{key.replace('_', '-')} {options[key]}"


def _optimizer_state(
    saved: dict[str, Any], optimizer: torch.optim.Optimizer, path: Path | None
) -> dict[str, Any]:
    """The saved state, with the hyperparameters and the memory layout of ``optimizer``."""
    from utils.comm import fsdp

    other = UserError(
        f"the optimiser state in {path} is of another model, --optimizer, --wd-norm or --freeze; "
        f"to start from its weights alone: --pretrained {path}",
        alike=True,
    )
    groups = optimizer.state_dict()["param_groups"]
    if [len(g["params"]) for g in saved["param_groups"]] != [len(g["params"]) for g in groups]:
        raise other
    trained = [(weight, group) for group in optimizer.param_groups for weight in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for number, entry in saved["state"].items():
        weight, group = trained[number]
        adam = "betas" in group and not group.get("muon")
        wanted = {"exp_avg", "exp_avg_sq"} if adam else {"momentum_buffer"}
        buffers = {name: x for name, x in entry.items() if name != "step" and x is not None}
        same_shapes = all(buffer.shape == weight.shape for buffer in buffers.values())
        if buffers.keys() not in (wanted, set()) or not same_shapes:
            raise other
        laid_out = {name: fsdp.shard_like(x, weight) for name, x in buffers.items()}
        state[number] = {**entry, **laid_out}
    return {"state": state, "param_groups": groups}


def _loss_scale(saved: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """A scaler's ``state`` with the loss scale that any of our scripts has ``saved``."""
    clean = ("clean_steps", "_growth_tracker")
    alike = {"clean_steps": clean, "_growth_tracker": clean}
    found = {key: saved[name] for key in state for name in alike.get(key, (key,)) if name in saved}
    return {**state, **found}


def _rescale_position(state: TrainState, global_batch: int) -> int:
    """Express the position within the epoch in steps of this run's global batch.

    A job that a launcher restarts on the nodes that are left has another global batch: it continues
    at the last step boundary before. Returns how many images are repeated.
    """
    images = state.step * state.global_batch
    repeated = images % global_batch
    if repeated and not is_elastic():
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
