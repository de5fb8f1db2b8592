"""Shared by all command lines: types of values, recipes, removed options, the layout of --help."""

import argparse
import difflib
import math
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from utils.errors import BAD_INPUT, UserError, is_reported_by_another, tell_torchrun

RECIPES = Path(__file__).resolve().parents[1] / "scripts" / "recipes"


class Parser(argparse.ArgumentParser):
    """A wrong option is a one-line error; under torchrun, one process of a node prints it."""

    elsewhere: Mapping[str, str] = {}  # options of other programs: the program that has it

    def error(self, message: str) -> NoReturn:
        """End with ``message``; raises `UserError` where another process prints it."""
        if found := re.match(r"unrecognized arguments: (?:[^-]\S* )*(--?[\w-]+)", message):
            message = f"unknown option {found[1]}"
            if found[1] in self.elsewhere:
                message = (
                    f"{found[1]} is an option of {self.elsewhere[found[1]]}, not of this script"
                )
            elif similar := difflib.get_close_matches(found[1], self._option_string_actions, 1):
                message += f": did you mean {similar[0]}?"
        error = UserError(message, on_every_rank=True)
        if is_reported_by_another(error):
            raise error
        tell_torchrun(f"error: {message} (see --help)")
        self.exit(BAD_INPUT, f"{self.prog}: error: {message} (see --help)\n")


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keep the docstring's lines, and show the defaults where there are any."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def number(
    kind: type, low: float, high: float = math.inf, *, exclusive: bool = False
) -> Callable[[str], Any]:
    """The type of an option that takes a finite int or float (``kind``) from ``low`` to ``high``.

    With ``exclusive``, ``low`` itself is refused.
    """

    limits = f"{'more than' if exclusive else 'at least'} {low}"
    limits += f" and at most {high:.12g}" if high < math.inf else ""

    def parse(text: str) -> Any:
        value = kind(text)
        if value == math.inf:
            raise ValueError
        if not low <= value <= high or (exclusive and value == low):
            raise argparse.ArgumentTypeError(f"{text} is not {limits}")
        return value

    parse.__name__ = "number" if kind is float else "whole number"
    return parse


def list_of(kind: Callable[[str], int]) -> Callable[[str], list[int]]:
    """The type of an option such as 1,2,4: sorted values of a ``kind``."""

    def parse(text: str) -> list[int]:
        return sorted(map(kind, text.split(",")))

    parse.__name__ = "list of numbers"
    return parse


def from_environment(name: str, kind: Callable[[str], Any], default: Any = None) -> Any:
    """The environment variable ``name``, of a ``kind`` of this module; ``default`` if unset.

    Raises: `UserError` for a value that is not of this kind.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return kind(text)
    except argparse.ArgumentTypeError as fault:
        reason = str(fault)
    except ValueError:
        reason = f"{text!r} is not a {kind.__name__}"
    raise UserError(
        f"the environment variable {name}={text} is wrong: {reason}", on_every_rank=True
    )


def accuracy(text: str) -> float:
    """Per cent; up to 1 it is a share, so 0.75 and 75 mean the same, and 1 is 100 %."""
    value = float(text)
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"{text} is neither a share (0.75) nor per cent (75)")
    return value * 100 if value <= 1 else value


def beta_shape(text: str) -> float:
    """A of a distribution Beta(A, A), or 0. Below 0.001 its random numbers are no numbers."""
    value = number(float, 0, 1000)(text)
    if 0 < value < 0.001:
        raise argparse.ArgumentTypeError(f"{text} is neither 0 nor 0.001 to 1000")
    return value


def betas(text: str) -> str:
    """Two numbers from 0 to below 1; kept as text, like all values in options.json."""
    values = [float(part) for part in text.split(",")]
    if len(values) != 2 or not all(0 <= value < 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text} is not two numbers below 1, such as 0.9,0.95")
    return text


def batch_range(text: str) -> str:
    """Global batches from LOW to HIGH; kept as text."""
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if not found or not 0 < int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text} is not LOW:HIGH, such as 512:4096")
    return text


def http(text: str) -> str:
    """The URL of a service."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(
            f"{text} is not an http:// URL; the option goes after DATA"
        )
    return text


def is_url(text: str | None) -> bool:
    return text is not None and "://" in text


def run_name(text: str) -> str:
    """The name of a run, which names its folder and its objects in a store."""
    if not text or text in (".", "..") or "/" in text or not text.isprintable():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a plain name: the parent folder is --output-dir"
        )
    if len(text.encode(errors="surrogateescape")) > 200:  # file names have 255 bytes at most
        raise argparse.ArgumentTypeError(f"{text[:20]}... is longer than 200 bytes")
    return text


betas.__name__ = "pair of numbers"
# Upper limits, as numbers beyond them overflow or take all memory, with errors far from the option.
count, positive = number(int, 0, 2**31 - 1), number(int, 1, 2**31 - 1)
epochs, pixels = number(int, 0, 1_000_000), number(int, 1, 10_000)
fraction, non_negative = number(float, 0, 1), number(float, 0, 1e9)
ema_decay = number(float, 0, 0.9999999, exclusive=True)  # 1 would keep the first weights
seed = number(int, 0, 2**63 - 1)  # torch.manual_seed
port, seconds = number(int, 1, 65535), number(float, 1, 1_000_000)


def reject_removed(words: Sequence[str], gone: Mapping[str, str]) -> None:
    """Raise `UserError` for an option, or its value, that a program no longer has.

    ``gone`` has what to use instead of "--option" or of "--option value"; a value is compared up to
    its first colon.
    """
    for number, word in enumerate(words):
        name, _, value = word.partition("=")
        value = (value or " ".join(words[number + 1 : number + 2])).partition(":")[0]
        for wanted in (name, f"{name} {value}"):
            if wanted in gone:
                raise UserError(f"{wanted} was removed: {gone[wanted]}", on_every_rank=True)


def recipe_names() -> list[str]:
    """The recipes that come with the suite."""
    return sorted(path.stem for path in RECIPES.glob("*.txt"))


def recipe_file(name: str) -> Path:
    """The file of a recipe: ``name`` itself, or one in scripts/recipes. Raises: `UserError`."""
    for path in (Path(name), RECIPES / f"{name}.txt"):
        if path.is_file():
            return path
    raise UserError(
        f"there is no recipe {name}: give a file, or one of {', '.join(recipe_names())}",
        on_every_rank=True,
    )


def recipe_words(name: str) -> list[str]:
    """The options of a recipe; # begins a comment. Raises: `UserError`."""
    path = recipe_file(name)
    try:
        return shlex.split(path.read_text(encoding="utf-8"), comments=True)
    except (OSError, ValueError) as fault:  # ValueError: not UTF-8 either
        raise UserError(f"the recipe {path} cannot be read: {fault}", on_every_rank=True) from None


def with_recipe(words: Sequence[str]) -> list[str]:
    """``words`` of a command line behind those of its ``--recipe``, if it has one.

    Of options given twice the last one counts: the command line takes precedence. Raises:
    `UserError`.
    """
    only = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    only.add_argument("--recipe", nargs="?")
    name = only.parse_known_args(words)[0].recipe
    return [*(recipe_words(name) if name else ()), *words]
