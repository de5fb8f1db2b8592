"""What values the options of the command line may have, and how its help is laid out."""

import argparse
import math
from collections.abc import Callable
from typing import NoReturn

from utils.errors import UserError, is_told_by_another


class Parser(argparse.ArgumentParser):
    """Under torchrun, one process of a node prints the usage, not all that read the same line."""

    def error(self, message: str) -> NoReturn:
        """End with ``message``; raises `UserError` where another process prints it."""
        error = UserError(message, alike=True)
        if is_told_by_another(error):
            raise error
        super().error(message)


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keep the docstring's lines, and show the defaults where there are any."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def number(kind: type, low: float, high: float = math.inf) -> Callable[[str], float]:
    """The type of an option whose value is an int or float (``kind``) from ``low`` to ``high``."""

    def parse(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            limits = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
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


def http(text: str) -> str:
    """The URL of a service."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text} is no http:// URL; the option goes after DATA")
    return text


accuracy.__name__ = "accuracy"
count, positive = number(int, 0), number(int, 1)
share, amount = number(float, 0, 1), number(float, 0)
