"""``--recipe``, and hints for options that were removed or that only another script has.

Interface: `expand` receives the arguments of each training command before they are parsed.
"""

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.start.errors import UserError, typed

RECIPES = Path(__file__).resolve().parents[1] / "recipes"

# Removed options (or option values), and what to use instead.
_FIND_BATCH = "run the command once with --find-batch, then give -b the number that it prints"
REMOVED = {
    "--comm auto": f"`python {typed('scripts/bench_network.py')} --nodes 2 --master IP --rank R -- "
    "-a resnet50 -b 64` on each node recommends a method for your network",
    **dict.fromkeys(("-b auto", "--b auto", "--batch-size auto"), _FIND_BATCH),
    "--memory-limit": "give -b a smaller number than --find-batch prints",
    "--comm localsgd": "--comm int4 sends least, --accum-steps N sends N times less often",
    "--comm powersgd": "--comm int4 sends least",
    "--allreduce": "gradients are summed, then divided, as Apex does: leave it out",
    "--bucket-mb": "torch's buckets of 1, then 25 MiB are used: leave it out",
    "--delay-allreduce": "the all-reduce overlaps with backward: leave it out",
    "--drop-path": "models keep their own stochastic depth: leave it out",
    "--zero-init-gamma": "blocks begin as the library makes them: leave it out",
    "--repeated-aug": "each image comes once in an epoch: leave it out",
    "--ema-every": "the average is now updated in every step: leave it out",
    "--batch-range": "each recipe names its global batch in a comment: leave it out",
    "--val-flip": "evaluate each image once: leave it out",
    "--optimizer lamb": "use adamw",
    "--optimizer lars": "use sgd or nesterov",
    "--optimizer muon": "use adamw or nesterov",
}

# Removed options that the training of a snapshot depends on: the values that change nothing.
_WITHOUT_EFFECT = {"drop_path": None, "repeated_aug": 1, "allreduce": "sum-divide"}

# Options that not all scripts have, and a script that has them.
_DDP = (
    "-n --nodes --world-size -nr --node-rank --rank -g --gpus --dist-url --dist-backend --sync-bn"
)
_DDP += " --dist-timeout --comm --amp"
_APEX = "--opt-level --keep-batchnorm-fp32 --loss-scale --amp-impl"
ELSEWHERE = {
    **dict.fromkeys(_DDP.split(), "imagenet_ddp.py"),
    **dict.fromkeys(_APEX.split(), "imagenet_ddp_apex.py"),
    "--reshard": "imagenet_fsdp.py",
}


def expand(words: Sequence[str], own: Sequence[str]) -> list[str]:
    """Return the arguments in the ``--recipe``, if given, followed by the command line's ``words``.

    If an option occurs twice, the last one counts, so the command line takes precedence. ``own``:
    the options of this script. Raises: `UserError` if the recipe cannot be read, or if an option
    was removed or only another script has it.
    """
    only = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    only.add_argument("--recipe", nargs="?")
    name = only.parse_known_args(words)[0].recipe
    words = [*(read(name) if name else ()), *words]
    for number, word in enumerate(words):
        option, _, value = word.partition("=")
        # Compare only the part of the value before its first colon.
        value = (value or " ".join(words[number + 1 : number + 2])).partition(":")[0]
        for gone in (option, f"{option} {value}"):
            if gone in REMOVED:
                raise UserError(f"{gone} was removed: {REMOVED[gone]}", on_every_rank=True)
        if option in ELSEWHERE and option not in own:
            text = f"{option} is an option of {ELSEWHERE[option]}, not of this script (see --help)"
            raise UserError(text, on_every_rank=True)
    return words


def removed_feature(saved: Mapping[str, Any]) -> str | None:
    """Return the removed option without which a snapshot's training cannot continue, or None.

    ``saved``: the options in the snapshot.
    """
    used = [key for key, value in _WITHOUT_EFFECT.items() if saved.get(key, value) != value]
    used += ["optimizer"] * (f"--optimizer {saved.get('optimizer')}" in REMOVED)
    return next((f"--{key.replace('_', '-')} {saved[key]}" for key in used), None)


def names() -> list[str]:
    """Return the names of the recipes in utils/recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.txt"))


def read(name: str) -> list[str]:
    """Return the options in a recipe: a file, or a name in utils/recipes. # begins a comment.

    Raises: `UserError`.
    """
    files = [
        path for path in (Path(os.path.expanduser(name)), RECIPES / f"{name}.txt") if path.is_file()
    ]
    if not files:
        text = f"there is no recipe {name}: give a file, or one of {', '.join(names())}"
        raise UserError(text, on_every_rank=True)
    try:
        return shlex.split(files[0].read_text(encoding="utf-8-sig"), comments=True)
    except (OSError, ValueError) as error:  # ValueError also means: not UTF-8
        text = f"the recipe {files[0]} cannot be read: {error}"
        raise UserError(text, on_every_rank=True) from None
