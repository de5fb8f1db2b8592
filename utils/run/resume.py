"""Continue from a checkpoint: load its weights, then all other parts of a snapshot."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from utils.data.loaders import Loaders
from utils.model import pretrained_weights
from utils.model.blocks import scale_input_as
from utils.model.ema import Average
from utils.model.options import TO_THE_END
from utils.run import recipes
from utils.run.snapshots import PREVIOUS, TrainState
from utils.start.atomic import read_checkpoint
from utils.start.errors import UserError
from utils.start.option_types import Options

# Changes to these would break the order of samples, the learning-rate schedule or the optimiser.
_OPTIMISER = ("optimizer", "wd_norm", "freeze")
_FIXED = ("seed", "lr_schedule", "warmup_epochs", "progressive", *_OPTIMISER)
SIZES = 1000  # files whose sizes are compared, which takes less than a second
_PLACES = ("name", "output_dir", "resume", "data", "store", "dist_url", "node_rank")
# Names of options in snapshots of earlier versions.
_RENAMED = {"world_size": "nodes", "rank": "node_rank", "desired_acc": "target_top1"}


def saved_preprocessing(path: Path | None) -> dict[str, Any] | None:
    """The preprocessing in a checkpoint, without reading its weights; None if it has none.

    A file that cannot be read has none either: its error is reported when it is loaded.
    """
    for file in (path, path.with_name(PREVIOUS)) if path else ():
        with contextlib.suppress(UserError):
            return read_checkpoint(file, lazily=True).get("preprocessing")
    return None


def add_average(state: TrainState, args: Options) -> None:
    """``--ema``: average the weights after each step, beginning with the current ones."""
    if args.ema and not args.evaluate:
        masters = state.apex_weights.named_masters() if state.apex_weights else None
        average = state.ema = Average(state.model, args.ema, masters)
        state.optimizer.register_step_post_hook(lambda *_: average.after_step())


def load(
    state: TrainState, args: Options, content: dict[str, Any], path: Any, classes: list[str]
) -> list[str]:
    """Load the ``content`` of a checkpoint: the model's weights and, to continue training, all
    other parts of a snapshot. It also loads weights of other programs.

    ``path`` is its name in messages. Returns: notes for the log. Raises: `UserError` if the model,
    the classes, the schedule or another part does not match.
    """
    notes = []
    try:
        if "options" in content:
            content["options"] = _with_new_names(content["options"])
        _check(content, args, path, classes)
        data_changes = _check_data(content, state, args, path)
        if "preprocessing" in content:  # as in snapshot.pt and best.pt
            weights = content["model" if "model" in content else "state_dict"]
        else:
            weights, note = pretrained_weights.plain_weights(content, path)
            notes += [note] if note else []
        state.preprocessing = content.get("preprocessing")
        state.load_weights(weights)
        scale_input_as(content, state.model)
        add_average(state, args)
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
        if args.start_epoch is not None:  # the position in the snapshot's epoch does not matter
            content["progress"] |= {"step": 0}
        content["scaler"] = _loss_scale(content["scaler"], state.scaler.state_dict())
        for name, part in state.parts().items():
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
        return notes + data_changes + describe_changes(state, args, content)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        # The file's checksums are right, so another program wrote this content.
        raise UserError(
            f"{path} does not fit this program ({error!r:.200}): resume from another file, or "
            "start over with another --name",
            on_every_rank=True,
        ) from error


def _with_new_names(saved: Any) -> Any:
    """The options of a checkpoint, under today's names; another program may have saved a list."""
    if not isinstance(saved, dict):
        return saved
    return {_RENAMED.get(name, name): value for name, value in saved.items()}


def _check(content: dict[str, Any], args: Options, path: Any, classes: list[str]) -> None:
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
    if gone := recipes.removed_feature(saved):
        raise UserError(
            f"{path} was made with {gone}, which was removed: begin a new schedule from its "
            "weights with --start-epoch 0, or resume it with the version that made it",
            on_every_rank=True,
        )
    changed = changed_options(saved, args)
    fixed = [key for key in changed if key in _FIXED]
    # The step schedule does not depend on the last epoch.
    if "epochs" in changed and (saved.get("lr_schedule") in TO_THE_END or saved.get("progressive")):
        fixed.append("epochs")
    if fixed:
        options = ", ".join(as_option(key, saved[key]) for key in fixed)
        raise UserError(
            f"{path} was made with {options}: do the same, or begin a new schedule from its "
            "weights with --start-epoch 0",
            on_every_rank=True,
        )


def fingerprints(loaders: Loaders) -> dict[str, list[str]]:
    """For each part of the data set: its number of images with a checksum of their names, and a
    checksum of the sizes of at most `SIZES` evenly spaced files."""
    parts = {"train": loaders.train, "val": loaders.val, "test": loaders.test}
    return {
        part: [batches.bad.source.fingerprint(), batches.bad.source.sample_sizes(SIZES)[1]]
        for part, batches in parts.items()
        if batches is not None
    }


def _check_data(content: dict[str, Any], state: TrainState, args: Options, path: Any) -> list[str]:
    """Compare the data set with that of the snapshot. Returns: notes for the log.

    The order of samples depends on the list of training images. So in the middle of an epoch other
    images are an error: some of the epoch's images would be repeated, and others left out.
    """
    saved = content.get("data") or {}  # absent in snapshots of older versions
    if args.evaluate or args.start_epoch is not None or "progress" not in content:
        return []
    changes = []
    for part in [part for part in state.data if part in saved]:
        (names, sizes), (old_names, old_sizes) = state.data[part], saved[part]
        now, before = (text.partition(" (")[0] for text in (names, old_names))
        if now != before:
            changes.append(f"DATA/{part} has {now} (was {before})")
        elif names != old_names:
            changes.append(f"DATA/{part} has {now}, as before, but other names of files")
        elif sizes != old_sizes:
            changes.append(f"DATA/{part} has files of other sizes under the same names")
    if not changes:
        return []
    text, position = ", ".join(changes), content["progress"]
    train = [(data["train"][0]) for data in (state.data, saved) if "train" in data]
    if position["step"] and len({*train}) > 1:
        raise UserError(
            f"{path} was written in the middle of an epoch of other training images: {text}. Train "
            f"on the images of that time, or begin epoch {position['epoch'] + 1} again with "
            f"--start-epoch {position['epoch']}",
            on_every_rank=True,
        )
    return [f"note: the data set has changed since the snapshot: {text}"]


def changed_options(saved: dict[str, Any], args: Options) -> list[str]:
    """Names of options that differ from ``saved``, except places and sizes set by the snapshot."""
    now = vars(args)
    free = (*_PLACES, *args.defaulted_sizes)
    return [key for key in saved if key in now and key not in free and saved[key] != now[key]]


def as_option(key: str, value: Any) -> str:
    """An option with its value, as on a command line; "no --freeze" if it is not given."""
    option = f"--{key.replace('_', '-')}"
    if value is None or value is False:
        return f"no {option}"
    return option if value is True else f"{option} {value}"


def _loss_scale(saved: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """A scaler's ``state`` with the loss scale in ``saved``, the state of any script's scaler."""
    clean = ("clean_steps", "_growth_tracker")  # Apex's and torch's names of one value
    names = {key: clean if key in clean else (key,) for key in state}
    return state | {key: saved[name] for key in state for name in names[key] if name in saved}


def describe_changes(state: TrainState, args: Options, content: dict[str, Any]) -> list[str]:
    """Return notes for the log about everything that has changed since the snapshot."""
    saved, before, notes = content["options"], content["progress"], []
    batch, now = before["global_batch"], state.global_batch
    if (images := before["step"] * batch - state.step * now) > 0:
        notes.append(
            f"note: the global batch is {now} now, so {images} images of this epoch are repeated, "
            f"from step {state.step} on"
        )
    changes = []
    commands = (sys.argv[0], *str(saved.get("command")).split()[:1])
    scripts = [name for name in map(os.path.basename, commands) if name.startswith("imagenet_")]
    if len(set(scripts)) > 1:
        changes.append(f"the script is {scripts[0]} (was {scripts[1]})")
    if batch != now:
        changes.append(f"the global batch is {now} (was {batch})")
    for key in changed_options(saved, args):
        changes.append(f"{as_option(key, vars(args)[key])} (was {saved[key]})")
    if changes:
        notes.append(f"changed since the snapshot: {', '.join(changes)}")
    return notes
