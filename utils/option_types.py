"""What values the options of the command line may have, and how its help is laid out."""

import argparse
import math
from collections.abc import Callable
from typing import NoReturn

from utils.errors import UserError, is_reported_by_another

AUTO = "auto"  # as a batch size: the largest that fits


class Parser(argparse.ArgumentParser):
    """Under torchrun, one process of a node prints the usage, not all that read the same line."""

    def error(self, message: str) -> NoReturn:
        """End with ``message``; raises `UserError` where another process prints it."""
        error = UserError(message, alike=True)
        if is_reported_by_another(error):
            raise error
        super().error(message)


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keep the docstring's lines, and show the defaults where there are any."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def number(
    kind: type, low: float, high: float = math.inf, *, exclusive: bool = False
) -> Callable[[str], float]:
    """The type of an option that takes an int or a float (``kind``) from ``low`` to ``high``.

    With ``exclusive``, ``low`` itself is refused: it takes more than that.
    """

    def parse(text: str) -> float:
        value = kind(text)
        if not low <= value <= high or (exclusive and value == low):
            limits = f"{'more than' if exclusive else 'at least'} {low:g}"
            if high < math.inf:
                both = f"{limits} and at most {high:g}"
                limits = both if exclusive else f"from {low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"{text} is not {limits}")
        return value

    parse.__name__ = "number" if kind is float else "whole number"
    return parse


def accuracy(text: str) -> float:
    """Per cent; up to 1 it is a share, so 0.75 and 75 mean the same, and 1 is 100 %."""
    value = float(text)
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"{text} is neither a share (0.75) nor per cent (75)")
    return value * 100 if value <= 1 else value


def batch_size(text: str) -> int | str:
    """A number of images from 1 on, or `AUTO`."""
    return text if text == AUTO else int(positive(text))


def http(text: str) -> str:
    """The URL of a service."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(
            f"{text} is not an http:// URL; the option goes after DATA"
        )
    return text


accuracy.__name__, batch_size.__name__ = "accuracy", "whole number"
count, positive = number(int, 0), number(int, 1)
share, amount = number(float, 0, 1), number(float, 0)
