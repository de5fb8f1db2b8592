"""What a run must have in common with the snapshot that it continues."""

from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.model.schedules import TO_THE_END


def check_classes(saved: Any, classes: list[str] | None, path: Path | None) -> None:
    """Raise `UserError` unless a checkpoint's classes, if it says any, are those of the data."""
    if saved is None or classes is None or list(saved) == list(classes):
        return
    if len(saved) != len(classes):
        what = f"has {len(saved)} classes, the data {len(classes)}"
    else:
        number, one, other = next(
            (i, a, b) for i, (a, b) in enumerate(zip(saved, classes, strict=True)) if a != b
        )
        what = f"has {one} as class {number}, the data {other}"
    raise UserError(f"{path} {what}: choose the same with DATA and --classes", alike=True)


# The run's order of samples and its learning rate curve: another value would break them off.
OPTIMISER = ("optimizer", "wd_norm", "freeze")  # what is in its state
_FIXED = ("seed", "repeated_aug", "lr_schedule", "warmup_epochs", "progressive", *OPTIMISER)
_PLACES = ("name", "output_dir", "resume", "data", "command", "mode", "store", "dist_url", "rank")


def changed_options(saved: dict[str, Any], args: Any) -> list[str]:
    """Names of the options that are others now, places and what the snapshot decides left out."""
    now = vars(args)
    free = (*_PLACES, *getattr(args, "untyped", ()))  # where the snapshot decides
    return [key for key in saved if key in now and key not in free and saved[key] != now[key]]


def check_options(changed: list[str], saved: dict[str, Any], path: Path | None) -> None:
    """Refuse options that contradict the snapshot."""
    fixed = [key for key in changed if key in _FIXED]
    # Step after step, the last epoch does not matter.
    if "epochs" in changed and (saved.get("lr_schedule") in TO_THE_END or saved.get("progressive")):
        fixed.append("epochs")
    if fixed:
        wishes = " ".join(f"--{key.replace('_', '-')} {saved[key]}" for key in fixed)
        raise UserError(
            f"{path} was made with {wishes}: continue with that, or begin a new schedule from its "
            "weights with --start-epoch 0",
            alike=True,
        )
