"""Shared by all command lines: types of values, one-line errors, the layout of --help."""

import argparse
import difflib
import math
import os
import re
from collections.abc import Callable
from typing import Any, NoReturn

from utils.errors import BAD_INPUT, UserError, is_reported_by_another, printable, tell_torchrun


class Parser(argparse.ArgumentParser):
    """A wrong option is a one-line error; under torchrun, one process of a node prints it."""

    @property
    def option_names(self) -> list[str]:
        """All options that this parser knows."""
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        """Exit with ``message``; raises `UserError` if another process prints it."""
        if unknown := re.match(r"unrecognized arguments: (?:[^-]\S* )*(--?[\w-]+)", message):
            message = f"unknown option {unknown[1]}"
            if similar := difflib.get_close_matches(unknown[1], self.option_names, 1):
                message += f": did you mean {similar[0]}?"
        text = f"error: {printable(message)} (see --help)"
        error = UserError(text, on_every_rank=True)
        if is_reported_by_another(error):
            raise error
        tell_torchrun(text)
        self.exit(BAD_INPUT, f"{self.prog}: {text}\n")


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keep the docstring's line breaks, and show defaults if there are any."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def number(
    kind: type, low: float, high: float = math.inf, *, exclusive: bool = False
) -> Callable[[str], Any]:
    """The type of an option that takes a finite int or float (``kind``) from ``low`` to ``high``.

    With ``exclusive``, ``low`` itself is rejected.
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
    """The environment variable ``name``, parsed by ``kind``, a type of this module; or ``default``.

    Raises: `UserError` for a value that is not of this kind.
    """
    text = os.environ.get(name)
    try:
        return default if text is None else kind(text)
    except (argparse.ArgumentTypeError, ValueError) as error:
        reason = f"{text!r} is not a {kind.__name__}" if isinstance(error, ValueError) else error
        message = f"the environment variable {name}={text} is wrong: {reason}"
        raise UserError(message, on_every_rank=True) from None


def accuracy(text: str) -> float:
    """An accuracy in per cent. Up to 1 it is a fraction: 0.75 and 75 are the same, 1 is 100 %."""
    value = float(text)
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"{text} is neither a share (0.75) nor per cent (75)")
    return value * 100 if value <= 1 else value


def beta_shape(text: str) -> float:
    """Parameter A of Beta(A, A), or 0. Below 0.001 its random numbers would be NaN."""
    value = number(float, 0, 1000)(text)
    if 0 < value < 0.001:
        raise argparse.ArgumentTypeError(f"{text} is neither 0 nor 0.001 to 1000")
    return value


def betas(text: str) -> str:
    """Two numbers, at least 0 and below 1; kept as text, as options.json holds no lists."""
    values = [float(part) for part in text.split(",")]
    if len(values) != 2 or not all(0 <= value < 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text} is not two numbers below 1, such as 0.9,0.95")
    return text


def batch_range(text: str) -> str:
    """A range of global batch sizes, LOW:HIGH; kept as text."""
    limits = re.fullmatch(r"(\d+):(\d+)", text)
    if not limits or not 0 < int(limits[1]) <= int(limits[2]):
        raise argparse.ArgumentTypeError(f"{text} is not LOW:HIGH, such as 512:4096")
    return text


def http(text: str) -> str:
    """The URL of a service."""
    if not text.startswith(("http://", "https://")):
        problem = f"{text} is not an http:// URL: to omit it, put the option after DATA"
        raise argparse.ArgumentTypeError(problem)
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
beta_shape.__name__ = accuracy.__name__ = "number"
# Larger numbers would overflow or take all memory, with errors that do not name the option.
count, positive = number(int, 0, 2**31 - 1), number(int, 1, 2**31 - 1)
epochs, pixels = number(int, 0, 1_000_000), number(int, 1, 10_000)
fraction, non_negative = number(float, 0, 1), number(float, 0, 1e9)
ema_decay = number(float, 0, 0.9999999, exclusive=True)  # 1 would keep the first weights
seed = number(int, 0, 2**63 - 1)  # torch.manual_seed
port, seconds = number(int, 1, 65535), number(float, 1, 1_000_000)
