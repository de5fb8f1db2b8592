"""What the messages between the doctors look like; all else is refused. Standard library only.

A shape is a type (``float`` takes whole numbers, too; no bool is a number, and none is infinite), a
function that says whether a value will do, a tuple of alternatives, ``[shape]`` for a list,
``{str: shape}`` for a dictionary with any keys, or a dictionary with these keys and no others, of
which those that end in "?" may be missing.
"""

import re
from typing import Any

from checkup.messages import Message

Shape = Any
_LARGEST = 2.0**64
_SHOWN = 40  # characters of a name that does not belong there


def _one_of(*values: object) -> Shape:
    return lambda value: isinstance(value, (str, int)) and value in values


def _from(least: int, most: int) -> Shape:
    return lambda value: type(value) is int and least <= value <= most


def _host(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 255 and value.isprintable()


def _some(value: object) -> bool:
    return bool(value) and isinstance(value, list) and all(isinstance(one, str) for one in value)


def _token(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None


PORT = _from(1, 65535)
HELLO = {"greeting": str, "rank": int, "nodes": int, "host": _host}
WELCOME = ({"welcome": str}, {"refused": str})

_TARGET = {"rank": int, "addresses": [str], "ports": [PORT]}
_FINDING = {
    "name": str,
    "level": _one_of("ok", "warning", "fault"),
    "what": str,
    "why": str,
    "remedy": str,
    "nodes": [int],
}
_GROUP = {
    "rank": int,
    "nodes": int,
    "master": str,
    "port": PORT,
    "port2": PORT,
    "interface": (str, None),
    "nccl": bool,
}
REQUESTS: dict[str, Shape] = {
    "clock": {},
    "facts": {},
    "open": {"token": _token},
    "probe": {"token": _token, "targets": [_TARGET]},
    "transfer": {
        "token": _token,
        "target": _TARGET,
        "streams": _from(1, 64),
        "seconds": lambda value: _is_number(value) and 0 < value <= 60,
    },
    "torch": {"ring": (_GROUP, None), "data": bool},
    "end": {"findings": [_FINDING], "code": _one_of(0, 1, 2), "verdict": str},
}

_CHOICE = {"variable": str, "value": str, "interface": str}
_PART = {
    "images": int,
    "classes": int,
    "fingerprint": str,
    "of_classes": {str: str},
    "bytes": int,
    "sizes": str,
}
_READ = {"files_per_s": float, "bytes_per_s": float}
_ALL_REDUCE = {"latency_s": float, "bytes_per_s": float}
_NAMELESS = {"host": _host, "addresses": [str], "error": str}
_FACTS = {
    "versions": {
        "python": str,
        "torch": (str, None),
        "nccl": (str, None),
        "code": {str: str},
        "commit": (str, None),
    },
    "gpus": {"names": [str], "driver": (str, None), "error?": str},
    "name": ({"host": _host, "addresses": _some}, _NAMELESS),
    "ways": {
        "interfaces": {str: str},
        "default": (str, None),
        "address": (str, None),
        "mtu": (int, None),
        "gloo?": (_CHOICE | {"address": str}, _CHOICE | {"error": str}),
        "nccl?": (_CHOICE | {"address": str}, _CHOICE | {"error": str}),
    },
    "limits": {
        "shm_bytes": int,
        "disk_bytes": int,
        "disk": str,
        "open_files": int,
        "cores": _from(1, 1 << 20),
        "data_ports": str,
    },
    "data": (
        {"root": str, "parts": {"train": _PART, "val": _PART}, "read": _READ},
        {"root": str, "parts": {str: _PART}, "read?": _READ, "error": str},
    ),
    "seen_from": str,
    "owns_master?": bool,
    "master_is?": (str, None),
}
_WAY = {"to": int, "address": str, "port": PORT, "reason": (str, None), "seconds?": (float, None)}
_FAILED = {"error": str}
ANSWERS: dict[str, Shape] = {
    "clock": ({"time": float}, _FAILED),
    "facts": (_FACTS, _FAILED),
    "open": ({"ports": [PORT]}, _FAILED),
    "probe": ({"ways": [_WAY]}, _FAILED),
    "transfer": ({"bytes_per_s": float}, _FAILED),
    "torch": {
        "torch?": {"cuda": bool, "gpus": int, "built_for": (str, None), "nccl": (str, None)},
        "model?": {"gradient_bytes": int, "gflops": (float, None)},
        "decode?": {"images_per_s_core": float},
        "gloo?": _ALL_REDUCE,
        "nccl?": _ALL_REDUCE,
        "error?": str,
    },
}


def check(message: Message, shape: Shape, what: str) -> Message:
    """The message itself. Raises: ValueError, which names the first place where it is wrong."""
    wrong = _wrong(message, shape, what)
    if wrong:
        raise ValueError(wrong)
    return message


def check_request(message: Message) -> str:
    """What node 0 wants to be done. Raises: ValueError if it is not one of `REQUESTS`."""
    do = message.get("do")
    if not isinstance(do, str) or do not in REQUESTS:
        raise ValueError("node 0 asks for something unknown")
    check(message, REQUESTS[do] | {"do": str}, f"the request {do!r}")
    return do


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
        return None if _is_number(value) else f"{place} is not a number"
    if shape is int:
        good = _is_number(value) and isinstance(value, int)
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


def _is_number(value: object) -> bool:
    """Whether it is a number with which one can calculate: no bool, NaN or infinity."""
    return type(value) in (int, float) and abs(value) < _LARGEST
