"""Continue from a checkpoint: load its weights, then all other parts of a snapshot."""

import contextlib
from pathlib import Path
from typing import Any

from utils import addons
from utils.atomic import read_checkpoint
from utils.errors import UserError
from utils.models import scale_input_as
from utils.optim import TO_THE_END
from utils.snapshots import PREVIOUS, TrainState

# Changes to these would break the order of samples, the learning-rate schedule or the optimiser.
_OPTIMISER = ("optimizer", "wd_norm", "freeze")
_FIXED = ("seed", "repeated_aug", "lr_schedule", "warmup_epochs", "progressive", *_OPTIMISER)
_PLACES = ("name", "output_dir", "resume", "data", "command", "mode", "store", "dist_url", "rank")


def saved_preprocessing(path: Path | None) -> dict[str, Any] | None:
    """The preprocessing in a checkpoint, without reading its weights; None if it has none.

    A file that cannot be read has none either: its error is reported when it is loaded.
    """
    for file in (path, path.with_name(PREVIOUS)) if path else ():
        with contextlib.suppress(UserError):
            return read_checkpoint(file, lazily=True).get("preprocessing")
    return None


def load(
    state: TrainState, args: Any, content: dict[str, Any], path: Any, classes: list[str]
) -> list[str]:
    """Load the ``content`` of a checkpoint: the model's weights and, to continue training, all
    other parts of a snapshot. It also loads weights of other programs.

    ``path`` is its name in messages. Returns: notes for the log. Raises: `UserError` if the model,
    the classes, the schedule or another part does not match.
    """
    notes = []
    try:
        _check(content, args, path, classes)
        if "preprocessing" in content:  # as in snapshot.pt and best.pt
            weights = content.get("model", content.get("state_dict"))
        else:
            weights, note = addons.extra("foreign").plain_weights(content, path)
            notes += [note] if note else []
        state.preprocessing = content.get("preprocessing")
        state.load_weights(weights)
        scale_input_as(content, state.model)
        addons.add_average(state, args)
        if args.evaluate:
            return notes
        if "progress" not in content:
            return [
                *notes,
                f"note: {path} is not a snapshot: only its weights are loaded, and training begins "
                f"at epoch {args.start_epoch or 0}",
            ]
        changed, restarted = changed_options(content["options"], args), {"model"}
        if args.start_epoch is not None and {*changed} & {*_OPTIMISER}:
            restarted.add("optimizer")
        content["scaler"] = _loss_scale(content["scaler"], state.scaler.state_dict())
        for name, part in state.parts.items():
            if name in restarted or content.get(name) is None:
                continue
            try:
                part.load_state_dict(content[name])
            except ValueError as error:
                raise UserError(
                    f"the {name} state in {path} does not fit this run ({error}): is it of another "
                    "model, --optimizer, --wd-norm or --freeze? To start from its weights alone: "
                    f"--pretrained {path}",
                    on_every_rank=True,
                ) from error
        state.resumed = True
        return notes + addons.describe_changes(state, args, content)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        # The file's checksums are right, so another program wrote this content.
        raise UserError(
            f"{path} does not fit this program ({error!r:.200}): resume from another file, or "
            "start over with another --name",
            on_every_rank=True,
        ) from error


def _check(content: dict[str, Any], args: Any, path: Any, classes: list[str]) -> None:
    """Raise `UserError` if the model, the classes or the schedule of the file do not match."""
    is_snapshot, theirs = "progress" in content, content.get("classes")
    saved = content["options"] if is_snapshot else content.get("options", content)
    if (arch := content.get("arch", saved.get("arch", args.arch))) != args.arch:
        raise UserError(f"{path} is a {arch}: use -a {arch} to load it", on_every_rank=True)
    if classes and theirs and list(theirs) != classes:
        raise UserError(
            f"{path} has other classes than the data ({len(theirs)}: {theirs[0]}, ...): choose the "
            "same classes with DATA and --classes",
            on_every_rank=True,
        )
    if not is_snapshot or args.evaluate or args.start_epoch is not None:
        return
    changed = changed_options(saved, args)
    fixed = [key for key in changed if key in _FIXED]
    # The step schedule does not depend on the last epoch.
    if "epochs" in changed and (saved.get("lr_schedule") in TO_THE_END or saved.get("progressive")):
        fixed.append("epochs")
    if fixed:
        options = " ".join(as_option(key, saved[key]) for key in fixed)
        raise UserError(
            f"{path} was made with {options}: use these options, or begin a new schedule from its "
            "weights with --start-epoch 0",
            on_every_rank=True,
        )


def changed_options(saved: dict[str, Any], args: Any) -> list[str]:
    """Names of options that differ from ``saved``, except places and sizes set by the snapshot."""
    now = vars(args)
    free = (*_PLACES, *getattr(args, "defaulted_sizes", ()))
    return [key for key in saved if key in now and key not in free and saved[key] != now[key]]


def as_option(key: str, value: Any) -> str:
    """An option with its value, as on a command line."""
    return f"--{key.replace('_', '-')} {value}"


def _loss_scale(saved: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """A scaler's ``state`` with the loss scale in ``saved``, the state of any script's scaler."""
    clean = ("clean_steps", "_growth_tracker")  # Apex's and torch's names of one value
    names = {key: clean if key in clean else (key,) for key in state}
    return state | {key: saved[name] for key in state for name in names[key] if name in saved}
