"""What the doctors of two nodes may say to each other. Standard library only."""

from checkup import message_shapes as shapes
from checkup.message_shapes import (
    FAILED,
    PORT,
    TARGET,
    Protocol,
    Shape,
    between,
    host,
    is_number,
    one_of,
    token,
)


def _some(value: object) -> bool:
    return bool(value) and isinstance(value, list) and all(isinstance(one, str) for one in value)


def _matrix(value: object) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and all(between(1, 1 << 40)(n) for n in value)
    )


def _share(value: object) -> bool:
    return is_number(value) and 0 <= value <= 1


_FINDING = {
    "name": str,
    "level": one_of("ok", "warning", "fault"),
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
    **shapes.REQUESTS,
    "facts": {},
    "transfer": {
        "token": token,
        "target": TARGET,
        "streams": between(1, 64),
        "seconds": lambda value: is_number(value) and 0 < value <= 60,
    },
    "torch": {"ring": (_GROUP, None), "data": bool},
    "end": {"findings": [_FINDING], "code": one_of(0, 1, 2), "verdict": str},
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
_BUCKET = {"values": between(1, 1 << 40), "ready": _share, "matrices": [_matrix]}
_NAMELESS = {"host": host, "addresses": [str], "error": str}
_FACTS = {
    "versions": {
        "python": str,
        "torch": (str, None),
        "nccl": (str, None),
        "code": {str: str},
        "commit": (str, None),
    },
    "gpus": {"names": [str], "driver": (str, None), "error?": str},
    "name": ({"host": host, "addresses": _some}, _NAMELESS),
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
        "cores": between(1, 1 << 20),
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
ANSWERS: dict[str, Shape] = {
    **shapes.ANSWERS,
    "facts": (_FACTS, FAILED),
    "transfer": ({"bytes_per_s": float}, FAILED),
    "torch": {
        "torch?": {"cuda": bool, "gpus": int, "built_for": (str, None), "nccl": (str, None)},
        "model?": {"gradient_bytes": int, "gflops": (float, None), "buckets": [_BUCKET]},
        "decode?": {"images_per_s_core": float},
        "gloo?": _ALL_REDUCE,
        "nccl?": _ALL_REDUCE,
        "error?": str,
    },
}

DOCTOR = Protocol(
    "imagenet doctor, protocol 3", "the doctor", "run the doctor again", REQUESTS, ANSWERS
)
