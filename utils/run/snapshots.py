"""Snapshots: their content, and how they are written while training continues.

Training pauses only while the state is copied to the host. A thread then writes the copy. At any
instant, also during a write, ``snapshot.pt`` or the snapshot before it is complete on disk.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from utils.model.compress import Exchange
from utils.model.ema import Average
from utils.model.o2 import Weights
from utils.start import progress
from utils.start.addresses import is_elastic
from utils.start.atomic import link_atomically, read_checkpoint, save_atomically, unnamed_files
from utils.start.errors import UserError
from utils.start.world import as_state_dict, is_sharded, shard_like, whole

log = logging.getLogger(__name__)

SNAPSHOT, PREVIOUS, BEST = "snapshot.pt", "snapshot_previous.pt", "best.pt"
DAMAGED = "snapshot_damaged.pt"

# ---- files


def latest(folder: Path) -> Path | None:
    """The newest snapshot in a run directory; None if there is none.

    Raises: `UserError` for a broken link: if its disk is not mounted, training would start over.
    """
    for path in (folder / SNAPSHOT, folder / PREVIOUS):
        if path.is_file():
            return path
        if os.path.lexists(path):
            raise UserError(
                f"{path} is a broken link, or not a file: mount its disk, or "
                "train with another --name"
            )
    return None


def read_whole(path: Path, set_aside: bool = False) -> tuple[Path, dict[str, Any]]:
    """Read ``path``. If it is a run's snapshot and damaged, warn and read the one before it.

    ``set_aside``: rename the damaged file, as the run continues in this folder. Otherwise the next
    save would keep it as the previous snapshot, in place of the intact one. Returns: the path that
    was read, and its content. Raises: `UserError`.
    """
    previous = path.with_name(PREVIOUS)
    try:
        return path, read_checkpoint(path)
    except UserError as damage:
        if path.name != SNAPSHOT or not previous.is_file():
            raise
        try:
            content = read_checkpoint(previous)
        except UserError as error:
            text = f"{damage}; {error}: nothing is left to resume; start over with another --name"
            raise UserError(text) from None
        log.warning(f"{damage}; continuing from the snapshot before it, {previous}")
    if set_aside and path.exists():
        path.replace(path.with_name(DAMAGED))
    return previous, content


def name_newer_snapshot(folder: Path) -> None:
    """If a killed process wrote a newer snapshot completely but did not rename it, rename it.

    A damaged ``snapshot.pt`` is never kept as the previous one.
    """
    path, last = folder / SNAPSHOT, latest(folder)
    for file in unnamed_files(folder):
        if last and file.stat().st_mtime_ns <= last.stat().st_mtime_ns:
            return
        if _is_snapshot(file):
            if _is_snapshot(path):
                link_atomically(path, folder / PREVIOUS)
            file.replace(path)
            log.info(f"note: {path} was written completely when its process was killed: using it")
            return


def _is_snapshot(path: Path) -> bool:
    """Whether ``path`` is a whole snapshot of a run."""
    try:
        return "progress" in read_checkpoint(path)
    except UserError:
        return False


def write(content: dict[str, Any], path: Path) -> None:
    """torch.save to ``path``, atomically. The previous ``snapshot.pt`` is kept as `PREVIOUS`.

    Raises: `UserError`; the old file is then unchanged.
    """
    previous = path.with_name(PREVIOUS) if path.name == SNAPSHOT else None
    try:
        save_atomically(lambda file: torch.save(content, file), path, previous)
    except (OSError, RuntimeError) as error:  # torch hides the cause in a RuntimeError
        cause = error if isinstance(error, OSError) else error.__context__
        reason = cause.strerror if isinstance(cause, OSError) else "is the disk full?"
        kept = "the last saved file is intact" if path.exists() else "none was written before"
        raise UserError(f"cannot write {path} ({reason}): {kept}") from error


class SnapshotWriter:
    """Writes sets of files into a folder, one after the other, in a thread. Only in rank 0.

    A failed write is logged, and so is the next one that succeeds. What could not be written is
    written with the next set, unless that has a file of the same name. The thread calls ``written``
    with the path of each file that it has written.
    """

    def __init__(self, folder: Path, written: Callable[[Path], None] = lambda path: None):
        self.folder, self.written = folder, written
        self.failure: UserError | None = None  # of the last write
        self.unwritten: dict[str, dict[str, Any]] = {}  # because of it
        self.pauses: list[float] = []  # seconds that training paused, one entry per snapshot
        self._thread = threading.Thread()  # the last one
        self._buffers: dict[str, Tensor] = {}  # of the last copies; new memory would be slower

    @property
    def busy(self) -> bool:
        """Whether the last snapshot is still being written."""
        return self._thread.is_alive()

    def save(self, files: dict[str, dict[str, Any]], collecting: float = 0.0) -> None:
        """Copy the contents (file name -> object for torch.save) and begin to write them.

        Waits for the previous write. Returns once the copy is made: the originals may then change.
        ``collecting``: seconds that the caller has spent on the contents.
        """
        self.wait()
        began = time.perf_counter()
        copied: dict[int, Tensor] = {}  # a tensor that is in two files is copied once

        def copy(tensor: Tensor, key: str) -> Tensor:
            """A copy on the host, in the last snapshot's buffer if that has the same layout."""
            if id(tensor) not in copied:
                values, buffer = tensor.detach(), self._buffers.get(key)
                if buffer is None or _layout(buffer) != _layout(values):
                    buffer = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
                    self._buffers[key] = buffer
                copied[id(tensor)] = buffer.copy_(values, non_blocking=True)
            return copied[id(tensor)]

        copies = _map_tensors(copy, files)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.pauses.append(collecting + time.perf_counter() - began)
        self._thread = threading.Thread(target=self._write, args=(copies,), name="snapshot")
        self._thread.start()

    def wait(self) -> str | None:
        """Wait until nothing is being written. Returns: why the last write failed, or None."""
        if self.busy:
            with progress.during("waiting until a snapshot is written"):
                self._thread.join()
        return str(self.failure) if self.failure else None

    def _write(self, contents: dict[str, dict[str, Any]]) -> None:
        # Perhaps no later epoch is better than one whose best.pt has failed. It comes first.
        old = {name: one for name, one in self.unwritten.items() if name not in contents}
        self.unwritten = old | contents
        if not self.folder.exists():
            with contextlib.suppress(OSError):  # then the write fails, and says why
                self.folder.mkdir()  # not its parents: a network disk may be away
                text = "is gone, as if it was renamed or removed: it was made again, without the "
                log.warning(f"{self.folder} {text}files from before")
        try:
            for name, content in list(self.unwritten.items()):
                write(content, self.folder / name)
                del self.unwritten[name]
                self.written(self.folder / name)
        except UserError as failure:
            if self.failure is None:
                log.warning(f"{failure}; training continues")
            self.failure = failure
        else:
            if self.failure is not None:
                log.info(f"{self.folder / SNAPSHOT} was saved, after earlier failures")
            self.failure = None


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _map_tensors(change: Callable[[Tensor, str], Any], value: Any, key: str = "") -> Any:
    """``value`` with ``change(tensor, key)`` for each tensor in its dictionaries and lists."""
    if isinstance(value, dict):
        made = {name: _map_tensors(change, x, f"{key}/{name}") for name, x in value.items()}
        return as_state_dict(made, value) if hasattr(value, "_metadata") else made
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(change, x, f"{key}/{i}") for i, x in enumerate(value))
    return change(value, key) if isinstance(value, Tensor) else value


# ---- the content of a snapshot


class Part(Protocol):
    """A part of a snapshot. All ranks call both methods; the result in rank 0 is saved."""

    def state_dict(self) -> Any:
        """Tensors (whole ones, or shards as torch's DTensor) and plain values."""

    def load_state_dict(self, state: Any, /) -> None:
        """Continue from a `state_dict`, whose tensors are whole and on the CPU."""


class ApexScaler(Part, Protocol):
    """A loss scaler that ends the training when its scale is lost; torch's own does not."""

    @property
    def failure(self) -> str | None:
        """A message why training cannot continue, or None."""


class ModelPart:
    """A model's weights under their torchvision names, also if the model is sharded."""

    def __init__(self, model: nn.Module):
        self.model = model

    def state_dict(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Raises: RuntimeError for the weights of another model."""
        own, sharded = self.model.state_dict(), is_sharded(self.model)
        if sharded:
            state = {name: shard_like(full, own.get(name, full)) for name, full in state.items()}
        self.model.load_state_dict(as_state_dict(state, own))


class OptimizerPart:
    """An optimiser's state. The hyperparameters come from the command line instead."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give each moment the memory layout of its weight, which fused optimisers need.

        Raises: ValueError if the state belongs to other weights.
        """
        groups = self.optimizer.state_dict()["param_groups"]
        saved = [len(group["params"]) for group in state["param_groups"]]
        if saved != [len(group["params"]) for group in groups]:
            raise ValueError("different parameter groups")
        weights = [w for group in self.optimizer.param_groups for w in group["params"]]
        moments = {
            number: {name: _moment_like(value, weights[number]) for name, value in entry.items()}
            for number, entry in state["state"].items()
        }
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})


def _moment_like(value: Any, weight: Tensor) -> Any:
    """``value``; a moment gets the memory layout of its ``weight``."""
    if not isinstance(value, Tensor) or value.ndim == 0:  # a count of steps
        return value
    # Adafactor keeps sums over rows and columns: 1 in that dimension.
    fits = value.ndim == weight.ndim
    if not fits or any(a not in (1, b) for a, b in zip(value.shape, weight.shape, strict=True)):
        raise ValueError(f"a moment of {list(value.shape)} for {list(weight.shape)} weights")
    return shard_like(value, weight)


PROGRESS = ("epoch", "step", "global_batch", "best", "elapsed", "epoch_began")
PROGRESS += ("history", "sums", "printed")


@dataclass
class TrainState:
    """Everything needed to resume. Order of samples, augmentation and dropout are functions of seed
    and position, so no random state is saved.

    To save one more thing, add a field and its line in `parts`.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | ApexScaler
    comm: Exchange | None = None  # --comm
    apex_weights: Weights | None = None  # opt levels: the model's weights in float32
    ema: Average | None = None  # --ema, see `resume.add_average`
    global_batch: int = 0
    epoch: int = 0  # epochs that are finished
    step: int = 0  # finished steps of the next epoch, of ``global_batch`` images
    best: dict[str, float] = field(default_factory=dict)  # the best epoch's figures
    elapsed: float = 0.0  # seconds of training
    history: list[dict[str, float]] = field(default_factory=list)  # one record per epoch
    sums: list[float] | None = None  # of the epoch so far, over all ranks, see `metrics.Sums`
    printed: list[float] | None = None  # the same at the last printed line
    preprocessing: dict[str, Any] | None = None  # `Preprocessing.as_dict`
    data: dict[str, list[str]] = field(default_factory=dict)  # see `resume.fingerprints`
    resumed: bool = False  # from a snapshot of this suite
    clock: float | None = None  # time of the last update of ``elapsed``
    epoch_began: float = 0.0  # ``elapsed`` when the epoch began, perhaps before a resume

    @property
    def weights(self) -> Part:
        """The model's weights, in float32 and under its usual names."""
        return self.apex_weights or ModelPart(self.model)

    def parts(self) -> dict[str, Part]:
        """The parts of a snapshot by name; "progress" is this object with the position."""
        parts: dict[str, Part | None] = {
            "model": self.weights,
            "optimizer": OptimizerPart(self.optimizer),
            "scaler": self.scaler,
            "comm": self.comm,
            "progress": self,
            "ema": self.ema,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def tick(self) -> None:
        """Add the time since the last call to ``elapsed``; the first call starts the clock."""
        now = time.monotonic()
        self.elapsed += now - self.clock if self.clock is not None else 0.0
        self.clock = now

    def begin_epoch(self) -> None:
        """An epoch begins now, or continues after a resume."""
        self.tick()
        if not self.step:
            self.epoch_began = self.elapsed

    def problem(self) -> str | None:
        """Why training cannot continue: the loss scale is lost; None if it can."""
        return None if isinstance(self.scaler, torch.amp.GradScaler) else self.scaler.failure

    @property
    def sharded(self) -> bool:
        """Whether the model is sharded: then all processes must take part in each forward pass."""
        return is_sharded(self.model)

    def state_dict(self) -> dict[str, Any]:
        """The position and the history."""
        return {name: getattr(self, name) for name in PROGRESS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict` at a step boundary of this run. Raises: `UserError`.

        A restart on fewer nodes changes the global batch: the job continues at the nearest earlier
        step, and some images are repeated.
        """
        global_batch = self.global_batch
        state = {"epoch_began": state["elapsed"]} | state  # older snapshots do not say it
        for name in PROGRESS:
            setattr(self, name, state[name])
        images = self.step * self.global_batch
        repeated = images % global_batch
        if repeated and not is_elastic():
            raise UserError(
                f"the snapshot was taken in the middle of an epoch, after {images} images, which "
                f"is not a multiple of the global batch of {global_batch}: resume with the "
                f"snapshot's global batch {self.global_batch}",
                on_every_rank=True,
            )
        if repeated and self.sums:  # keep the means, and count each image once
            part = (images - repeated) / images
            self.sums = [value * part for value in self.sums]
            self.printed = self.printed and [value * part for value in self.printed]
        self.step, self.global_batch = images // global_batch, global_batch

    def load_weights(self, state: dict[str, Tensor]) -> None:
        """Load weights that are not sharded. Raises: `UserError` for those of another model."""
        try:
            self.weights.load_state_dict(state)
        except RuntimeError as error:
            # The weights of some models depend on the image size.
            size = (self.preprocessing or {}).get("image_size")
            hint = f"; it was trained with --image-size {size}" if size else ""
            raise UserError(
                f"the snapshot does not fit this model: another arch or number of classes? "
                f"({' '.join(str(error).split())[:250]}){hint}",
                on_every_rank=True,
            ) from None


def snapshot_of(
    state: TrainState, options: dict[str, Any], classes: list[str], main: bool = True
) -> dict[str, Any]:
    """The content of ``snapshot.pt``. Collective: ranks that are not ``main`` get no tensor of a
    sharded model."""

    def gather_shards(tensor: Tensor, _: str) -> Tensor | None:
        if not hasattr(tensor, "full_tensor"):
            return tensor
        full = whole(tensor)
        return full.cpu() if main else None  # one by one, so that no GPU holds the whole model

    content = {
        name: _map_tensors(gather_shards, part.state_dict()) for name, part in state.parts().items()
    }
    facts = {
        "options": options,
        "classes": classes,
        "preprocessing": state.preprocessing,
        "data": state.data,
        "model_args": getattr(state.model, "constructor_args", {}),
    }
    return {"ema": None, "comm": None} | content | facts  # readers may expect these two keys


def best_of(state: TrainState, arch: str, snapshot: dict[str, Any]) -> dict[str, Any]:
    """The content of ``best.pt``, which torchvision can load without this code.

    The weights are those of ``snapshot``: the averaged ones where those were better.
    """
    averaged = bool(state.best.get("ema"))
    weights = snapshot["model"]
    averages = snapshot["ema"]["model"] if averaged else {}
    return {
        "state_dict": as_state_dict(weights | averages, weights),
        "weights": "ema" if averaged else "model",
        "arch": arch,
        **{name: state.best.get(name) for name in ("epoch", "top1", "top5", "loss")},
        **{name: snapshot[name] for name in ("classes", "preprocessing", "model_args")},
    }
