"""What is in a checkpoint, of this suite or of other programs: each part, found and checked.

A file whose checksums are right may still hold anything: what is not of the kind that it should be
is a `UserError` that names the file and the part.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from utils.comm import fsdp
from utils.errors import UserError

PROGRESS = ("epoch", "step", "global_batch", "best", "elapsed", "history", "sums", "printed")


def _wrong(path: Path | None, part: str, kind: str) -> UserError:
    return UserError(
        f"{path} is damaged, or written by another program: its {part} is not {kind}", alike=True
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(key, str) and _is_number(entry) for key, entry in value.items()
    )


def options(content: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """The options of the run; of other programs' files, what stands beside the weights."""
    found = content.get("options", content)
    if not isinstance(found, dict):
        raise _wrong(path, "options", "a dictionary")
    return found


def classes(content: dict[str, Any], path: Path | None) -> list[str] | None:
    """The names of the classes, if the file has them."""
    found = content.get("classes")
    if found is not None and not (
        isinstance(found, (list, tuple)) and all(isinstance(name, str) for name in found)
    ):
        raise _wrong(path, "classes", "a list of names")
    return found if found is None else list(found)


def momentum(content: dict[str, Any], optimizer: Any, path: Path | None) -> dict[str, Any]:
    """The optimiser's saved state, with the hyperparameters of ``optimizer``."""
    groups = optimizer.state_dict()["param_groups"]
    saved = content["optimizer"]
    try:
        theirs = [len(group["params"]) for group in saved["param_groups"]]
        state = {number: dict(entry) for number, entry in saved["state"].items()}
        steps = [group.get("step") for group in saved["param_groups"]]
    except (TypeError, KeyError, AttributeError, ValueError):
        raise _wrong(path, "optimizer", "an optimiser's state") from None
    if theirs != [len(group["params"]) for group in groups]:
        raise UserError(
            f"the optimiser state in {path} is of another model, --optimizer, --wd-norm or "
            f"--freeze; to start from its weights alone: --pretrained {path}",
            alike=True,
        )
    for group, step in zip(groups, steps, strict=True):
        if step is not None:
            group["step"] = step  # timm's LAMB counts there
    weights = [(weight, group) for group in optimizer.param_groups for weight in group["params"]]
    for number, (weight, group) in enumerate(weights):
        entry = state.get(number, {})
        _check_kind(entry, group, path)
        for name, buffer in entry.items():
            if buffer is None or name == "step":
                continue
            if not isinstance(buffer, Tensor):
                raise _wrong(path, "momentum", "a tensor")
            if buffer.shape != weight.shape:
                raise UserError(f"the optimiser state in {path} is of another model", alike=True)
            entry[name] = fsdp.laid_out_like(buffer, weight)
    return {"state": state, "param_groups": groups}


def _check_kind(entry: dict[str, Any], group: dict[str, Any], path: Path | None) -> None:
    """Raise `UserError` unless a weight's saved state is of the optimiser of its ``group``."""
    adam = "betas" in group and not group.get("muon")
    wanted = {"exp_avg", "exp_avg_sq"} if adam else {"momentum_buffer"}
    found = entry.keys() - {"step"}
    if found and found != wanted:
        raise UserError(
            f"the optimiser state in {path} is of another --optimizer ({', '.join(sorted(found))}, "
            f"not {', '.join(sorted(wanted))}); to start from its weights alone: "
            f"--pretrained {path}",
            alike=True,
        )


def communication(content: dict[str, Any], path: Path | None) -> dict[str, Any] | None:
    """What `utils.comm.exchange.Exchange.collect` gave, in a snapshot that has it."""
    saved = content.get("comm")
    if saved is None or not isinstance(content.get("progress"), dict):
        return None
    fits = isinstance(saved, dict) and isinstance(saved.get("method"), (str, type(None)))
    if not (fits and _is_count(saved.get("nodes")) and isinstance(saved.get("states", []), list)):
        raise _wrong(path, "communication", "a method, a number of nodes and states")
    return saved


def averages(content: dict[str, Any], path: Path | None) -> dict[str, Any] | None:
    """What `utils.model.ema.Average.state_dict` gave, in a snapshot that has it."""
    saved = content.get("ema")
    if saved is None or "progress" not in content:
        return None
    fits = isinstance(saved, dict) and isinstance(saved.get("model"), dict)
    fits = fits and all(isinstance(value, Tensor) for value in saved["model"].values())
    if not (fits and _is_count(saved.get("steps")) and _is_count(saved.get("pending"))):
        raise _wrong(path, "averaged weights", "tensors and a number of steps")
    return saved


def loss_scale(content: dict[str, Any], state: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """A scaler's ``state`` with the loss scale that any script, or Apex or timm, has saved."""
    saved = content.get("scaler") or content.get("amp") or content.get("amp_scaler") or {}
    saved = saved.get("loss_scaler0", saved) if isinstance(saved, dict) else saved
    if not isinstance(saved, dict):
        raise _wrong(path, "loss scaler", "a dictionary")
    alike = {
        "scale": ("scale", "loss_scale"),
        "clean_steps": ("clean_steps", "_growth_tracker", "unskipped"),
        "_growth_tracker": ("clean_steps", "_growth_tracker", "unskipped"),
    }
    state = dict(state)
    for key in state:
        for name in alike.get(key, (key,)):
            if name in saved:
                if not _is_number(saved[name]):
                    raise _wrong(path, f"loss scaler's {name}", "a number")
                state[key] = saved[name]
    return state


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("epoch", "step", "global_batch"), ("a whole number", _is_count)),
    "best": (
        "an epoch's accuracies",
        lambda x: _is_record(x) and (not x or {"epoch", "top1", "top5"} <= x.keys()),
    ),
    "elapsed": ("a number of seconds", lambda x: _is_number(x) and 0 <= x < math.inf),
    "history": ("a list of records", lambda x: isinstance(x, list) and all(map(_is_record, x))),
    **dict.fromkeys(
        ("sums", "printed"),
        (
            "four numbers",
            lambda x: (
                x is None or (isinstance(x, list) and len(x) == 4 and all(map(_is_number, x)))
            ),
        ),
    ),
}


def progress(content: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """The position of one of our snapshots, by `TrainState`'s names (`PROGRESS`)."""
    found = content["progress"]
    if not isinstance(found, dict):
        raise _wrong(path, "progress", "a dictionary")
    known = {name: found[name] for name in PROGRESS if name in found}
    for name, value in known.items():
        kind, fits = _KINDS[name]
        if not fits(value):
            raise _wrong(path, name, kind)
    return known


def finished_epochs(content: dict[str, Any], path: Path | None) -> int:
    """How many epochs a checkpoint of another program says that it has trained.

    pytorch/examples counts finished epochs. Torchvision's references, whose files have an
    "lr_scheduler", and timm, from ``version`` 2 of its files on, number the last one from 0.
    """
    try:
        epoch = int(content.get("epoch", 0))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise _wrong(path, "epoch", "a whole number") from None
    if epoch < 0:
        raise _wrong(path, "epoch", "a whole number")
    version = content.get("version")
    return epoch + ("lr_scheduler" in content or (isinstance(version, int) and version > 1))


def accuracy(content: dict[str, Any]) -> float | None:
    """The best top-1 in per cent that a checkpoint of another program names."""
    try:
        return float(content.get("best_acc1", content.get("best_prec1")))
    except (TypeError, ValueError, RuntimeError):
        return None
