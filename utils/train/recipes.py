"""``--recipe``: a text file of options, as they are typed; and how large a batch optimisers bear.

A recipe's lines hold options, and comments after a #. What is typed wins. No torch needed.
"""

import argparse
import logging
import math
import re
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

from utils.errors import UserError

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "recipes"
SUFFIX = ".txt"
# The largest global batch that was published as costing no accuracy, and by whom.
HOLDS_TO = {
    "sgd": (8192, "ResNet-50: Goyal et al. 2017, arXiv:1706.02677"),
    "lars": (32768, "ResNet-50: You et al. 2017, arXiv:1708.03888"),
    "lamb": (32768, "BERT: You et al. 2020, arXiv:1904.00962"),
}
SGD = ("sgd", "nesterov")
HOLDS_TO["nesterov"] = HOLDS_TO["sgd"]
WARMUP = 5  # epochs, of Goyal et al.
REFERENCE_LR, REFERENCE_BATCH = 0.1, 256  # theirs, for ResNet-50; scaled linearly
RANGE = re.compile(r"#\s*global batch:\s*(\d+)(?:\s*to\s*(\d+))?\b", re.IGNORECASE)

log = logging.getLogger(__name__)


class Wanted(NamedTuple):
    """What a recipe wants: its ``options`` as text, what was ``typed`` instead of some of them, and
    the global ``batches`` that it is meant for (lowest, highest), or None."""

    options: str
    typed: str
    batches: tuple[int, int] | None


def add_options(parser: argparse.ArgumentParser) -> None:
    """``--recipe``."""
    group = parser.add_argument_group("recipe")
    group.add_argument(
        "--recipe",
        metavar="NAME|FILE",
        help=f"take the options of a file, or of one in scripts/recipes: {', '.join(names())}; "
        "options that are typed win",
    )


def names() -> list[str]:
    """The recipes that come with the suite."""
    return sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}"))


def find(name: str) -> Path:
    """The file of a recipe. Raises: `UserError`."""
    own = FOLDER / f"{name}{SUFFIX}"
    if Path(name).is_file():
        return Path(name)
    if "/" not in name and own.is_file():
        return own
    raise UserError(
        f"there is no recipe {name}: give a file, or one of {', '.join(names())}", alike=True
    )


def words_of(path: Path) -> list[tuple[int, list[str]]]:
    """The lines with options: (number of the line, its words). Raises: `UserError`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as fault:
        raise UserError(f"the recipe {path} cannot be read: {fault}", alike=True) from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as fault:
            raise UserError(f"{path}, line {number}: {fault}", alike=True) from None
        if words:
            found.append((number, words))
    return found


def parse(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> argparse.Namespace:
    """The command line (``sys.argv``), with the options of its ``--recipe``, if it has one.

    The result's ``wanted`` is a `Wanted`, or None. Raises: `UserError` for a recipe that cannot be
    read, or that this script does not understand.
    """
    argv = sys.argv[1:] if argv is None else argv
    name, _ = _taken(argv)
    if not name:
        args = parser.parse_args(argv)
        args.wanted = None
        return args
    start, path = argparse.Namespace(), find(name)
    words = words_of(path)
    for number, line in words:
        start = _parse_line(parser, line, start, f"{path}, line {number}")
    # What a namespace has is not set to a default, and what is typed replaces it.
    vars(start).pop("data", None)
    before = dict(vars(start))
    args = parser.parse_args(argv, start)
    all_words = [word for _, line in words for word in line]
    named = {word.partition("=")[0] for word in all_words}
    keys = [action.dest for action in parser._actions if named & {*action.option_strings}]
    typed = (
        f"--{key.replace('_', '-')} {vars(args)[key]} (not {before[key]})"
        for key in keys
        if vars(args)[key] != before[key]
    )
    args.wanted = Wanted(shlex.join(all_words), ", ".join(typed), _batches(path))
    return args


def expanded(training: list[str]) -> list[str]:
    """A script and its options, those of its ``--recipe``, if it has one, in their place.

    For tools that look at options before the script does. Raises: `UserError`.
    """
    name, rest = _taken(training)
    if not name:
        return training
    return [*rest[:1], *(word for _, line in words_of(find(name)) for word in line), *rest[1:]]


def _taken(words: list[str]) -> tuple[str | None, list[str]]:
    """The recipe that is typed among ``words``, and the others."""
    only = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    only.add_argument("--recipe", nargs="?")
    found, rest = only.parse_known_args(words)
    return found.recipe, rest


def start(args: Any, global_batch: int, lr: float) -> None:
    """Print what the recipe has set, what was typed instead, and what may go wrong.

    ``lr`` is the learning rate after warm-up, scaled to the global batch.
    """
    if args.wanted:
        typed = f"; typed instead: {args.wanted.typed}" if args.wanted.typed else ""
        log.info(f"recipe {args.recipe}: {args.wanted.options}{typed}")
    for sentence in batch_warnings(args, global_batch, lr):
        log.warning(sentence)


def _parse_line(
    parser: argparse.ArgumentParser, words: list[str], before: argparse.Namespace, place: str
) -> argparse.Namespace:
    """``before`` with the options of a line. Raises: `UserError`, with ``place`` in it."""

    def refuse(message: str) -> None:
        raise UserError(f"{place}: {message}", alike=True)

    if any(word.partition("=")[0] in ("--recipe", "--help", "-h") for word in words):
        refuse("a recipe holds the options of a training, and no other recipe")
    usual, parser.error = parser.error, refuse
    try:
        args, rest = parser.parse_known_args(words, before)
    finally:
        parser.error = usual
    if args.data != parser.get_default("data"):
        rest.append(args.data)
    if rest:
        refuse(f"{' '.join(rest)}: no option of this script")
    return args


def _batches(path: Path) -> tuple[int, int] | None:
    """What the line ``# global batch: LOW to HIGH`` of a recipe says."""
    found = RANGE.search(path.read_text(encoding="utf-8"))
    return (int(found[1]), int(found[2] or found[1])) if found else None


def batch_warnings(args: Any, global_batch: int, lr: float) -> list[str]:
    """Sentences about a global batch that the recipe or the optimiser was not shown to bear.

    ``lr`` is the learning rate after warm-up, scaled.
    """
    said = []
    low, high = (args.wanted and args.wanted.batches) or (0, math.inf)
    if not low <= global_batch <= high:
        near = high if global_batch > high else low
        rate = args.lr * global_batch / near
        advice = f"; by the linear rule its rate would be --lr {rate:.3g}"
        said.append(
            f"the recipe {args.recipe} is meant for a global batch of "
            f"{low if low == high else f'{low} to {high}'}, and this is {global_batch}"
            f"{advice if args.lr_scaling == 'none' else ''}"
        )
    optimizer = getattr(args, "optimizer", "sgd")
    most, source = HOLDS_TO.get(optimizer, (math.inf, ""))
    if global_batch > most:
        instead = ", or LARS or LAMB" if optimizer in SGD else ""
        linear = REFERENCE_LR * global_batch / REFERENCE_BATCH
        rule = f" (by the linear rule {linear:.3g})" if optimizer in SGD else ""
        said.append(
            f"{optimizer} is known to keep its accuracy up to a global batch of {most} ({source}); "
            f"this is {global_batch}, with lr {lr:.3g}{rule} and {args.warmup_epochs:g} epochs of "
            f"warm-up: expect less accuracy, and use --warmup-epochs {WARMUP} or more{instead}"
        )
    return said
