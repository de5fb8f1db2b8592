"""What messages between nodes look like; all else is refused. Standard library only.

A shape is a type (``float`` takes whole numbers, too; no bool is a number, and none is infinite), a
function that says whether a value will do, a tuple of alternatives, ``[shape]`` for a list,
``{str: shape}`` for a dictionary with any keys, or a dictionary with these keys and no others, of
which those that end in "?" may be missing.
"""

import re
from dataclasses import dataclass
from typing import Any

from checkup.messages import Message

Shape = Any
_LARGEST = 2.0**64
_SHOWN = 40  # characters of a name that does not belong there


def one_of(*values: object) -> Shape:
    """Any of these texts and whole numbers."""
    return lambda value: isinstance(value, (str, int)) and value in values


def between(least: int, most: int) -> Shape:
    """A whole number from ``least`` to ``most``."""
    return lambda value: type(value) is int and least <= value <= most


def host(value: object) -> bool:
    """A name that can be printed."""
    return isinstance(value, str) and 0 < len(value) <= 255 and value.isprintable()


def token(value: object) -> bool:
    """What keeps strangers out of the data ports: 16 bytes as hex."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None


PORT = between(1, 65535)
TARGET = {"rank": int, "addresses": [str], "ports": [PORT]}
HELLO = {"greeting": str, "rank": int, "nodes": int, "host": host}
WELCOME = ({"welcome": str}, {"refused": str})
FAILED = {"error": str}
_WAY = {"to": int, "address": str, "port": PORT, "reason": (str, None), "seconds?": (float, None)}


@dataclass(frozen=True)
class Protocol:
    """What nodes meet for: what they may ask each other, and what the answers look like."""

    greeting: str
    name: str  # who is met, for sentences
    again: str  # what to do when a fault is corrected
    requests: dict[str, Shape]  # by what is to be done
    answers: dict[str, Shape]

    def check_request(self, message: Message) -> str:
        """What node 0 wants to be done. Raises: ValueError if it is not one of ``requests``."""
        do = message.get("do")
        if not isinstance(do, str) or do not in self.requests:
            raise ValueError("node 0 asks for something unknown")
        check(message, self.requests[do] | {"do": str}, f"the request {do!r}")
        return do


# What every meeting may ask: the time, to open ports, and to try those of the others.
REQUESTS: dict[str, Shape] = {
    "clock": {},
    "open": {"token": token},
    "probe": {"token": token, "targets": [TARGET]},
}
ANSWERS: dict[str, Shape] = {
    "clock": ({"time": float}, FAILED),
    "open": ({"ports": [PORT]}, FAILED),
    "probe": ({"ways": [_WAY]}, FAILED),
}


def check(message: Message, shape: Shape, what: str) -> Message:
    """The message itself. Raises: ValueError, which names the first place where it is wrong."""
    wrong = _wrong(message, shape, what)
    if wrong:
        raise ValueError(wrong)
    return message


def _wrong(value: Any, shape: Shape, place: str) -> str | None:
    """Why a value does not have a shape; None if it has. No deeper than the shape is."""
    if isinstance(shape, tuple):
        reasons = [_wrong(value, one, place) for one in shape]
        return None if None in reasons else reasons[0]
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{place} is not a list"
        reasons = (_wrong(one, shape[0], f"a part of {place}") for one in value)
        return next(filter(None, reasons), None)
    if isinstance(shape, dict):
        return _wrong_dict(value, shape, place)
    if shape is None:
        return None if value is None else f"{place} is not null"
    if shape is float:
        return None if is_number(value) else f"{place} is not a number"
    if shape is int:
        good = is_number(value) and isinstance(value, int)
        return None if good else f"{place} is not a whole number"
    good = isinstance(value, shape) if isinstance(shape, type) else shape(value)
    return None if good else f"{place} is not what belongs there"


def _wrong_dict(value: Any, shape: dict, place: str) -> str | None:
    if not isinstance(value, dict):
        return f"{place} is not a dictionary"
    if str in shape:
        reasons = (_wrong(one, shape[str], f"a part of {place}") for one in value.values())
        return next(filter(None, reasons), None)
    known = {key.rstrip("?"): one for key, one in shape.items()}
    for key in value:
        if key not in known:
            return f"{place} has {key[:_SHOWN]!a}, which does not belong there"
    for key in shape:
        if key not in value and not key.endswith("?"):
            return f"{place} has no {key!r}"
    reasons = (_wrong(value[key], known[key], f"{key!r} of {place}") for key in value)
    return next(filter(None, reasons), None)


def is_number(value: object) -> bool:
    """Whether it is a number with which one can calculate: no bool, NaN or infinity."""
    return type(value) in (int, float) and abs(value) < _LARGEST
