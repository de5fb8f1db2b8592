"""What the nodes of a job must agree on: this code, torch, NCCL. Pure Python, no torch needed.

`utils.launch.launch` compares it at the start of each distributed run, scripts/doctor.py before.
"""

import ctypes
import importlib.util
import re
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

REMEDY = {
    "the command line": "type the same options on every node",
    "this code": "copy it to every node again",
    "torch": "install the same version on every node",
    "NCCL": "install the same version on every node",
}

# Options on which the result does not depend: paths, what is printed and traced, what one process
# alone decides, what each node has of its own. All others must be the same on every node.
FREE = {"data", "classes", "name", "output_dir", "store", "recipe", "command", "mode", "wanted"}
FREE |= {"workers", "print_freq", "profile", "spot_notice", "memory_format", "model_notes"}
FREE |= {"snapshot_minutes", "train_time", "dist_url", "dist_timeout", "dist_backend", "gpus"}
FREE |= {"world_size", "rank", "local_rank", "preprocessing", "untyped"}
PATHS = {"resume", "pretrained"}  # of which it counts whether they are given


def options(args: Any) -> dict[str, str]:
    """The options on which the result depends, as they are typed."""
    given = {key: value for key, value in vars(args).items() if key not in FREE}
    given |= {key: bool(given[key]) for key in PATHS & given.keys()}
    return {f"--{key.replace('_', '-')}": str(value) for key, value in given.items()}


def code(*scripts: Path) -> dict[str, str]:
    """Checksum of each file below utils/, each recipe and each of ``scripts``, by name; no git."""
    ours = [*(ROOT / "utils").rglob("*.py"), *(ROOT / "scripts/recipes").glob("*.txt")]
    files = {str(path.relative_to(ROOT)): path for path in ours}
    files |= {path.name: path for path in scripts if path.is_file()}
    return {name: f"{zlib.crc32(path.read_bytes()):08x}" for name, path in sorted(files.items())}


def torch_version() -> str | None:
    """torch.__version__ of the torch that an import would take, without importing it; or None."""
    if version := getattr(sys.modules.get("torch"), "__version__", None):  # None: being imported
        return str(version)
    folder = _torch_folder()
    try:
        text = (folder / "version.py").read_text() if folder else ""
    except OSError:
        return None
    found = re.search(r"""^__version__ *(?::.*)?= *['"](.+?)['"]""", text, re.MULTILINE)
    return found[1] if found else None


def nccl_version() -> str | None:
    """Version of the NCCL library that torch's wheel came with, as the library itself reports it.

    None if there is no such file (torch built in another way).
    """
    folder = _torch_folder()
    for path in folder.parent.glob("nvidia/nccl/lib/libnccl.so*") if folder else ():
        number = ctypes.c_int()
        try:
            ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(number))
        except (OSError, AttributeError):
            continue
        major, rest = divmod(number.value, 10_000)
        return f"{major}.{rest // 100}.{rest % 100}"
    return None


def _torch_folder() -> Path | None:
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def release(version: str | None) -> str:
    """Major and minor number: 2.14 of 2.14.1+cu130. Patches and CUDA builds may differ."""
    return ".".join(version.split(".")[:2]) if version else "none"


def unlike(found: list[tuple[str, Mapping[str, Any]]]) -> str | None:
    """An error message about the first fact on which nodes disagree; None if they agree.

    ``found``: for each process its node's name, and its facts by name ("this code", "torch" ...). A
    fact may be a mapping itself, such as each file's checksum.
    """
    for name in found[0][1]:
        values = [(node, facts.get(name)) for node, facts in found]
        if any(value != values[0][1] for _, value in values):
            parts = all(isinstance(value, Mapping) for _, value in values)
            has = first_difference(values) if parts else _who_has_what(values)
            remedy = REMEDY.get(name, "make it the same on every node")
            return f"{name} differs between the nodes: {has}: {remedy}"
    return None


def first_difference(found: list[tuple[str, Mapping[str, Any]]]) -> str:
    """The first name whose value differs: "NAME: VALUE on NODES, VALUE on NODES (and 2 more)"."""
    names = sorted({name for _, values in found for name in values})
    differing = [
        name for name in names if any(v.get(name) != found[0][1].get(name) for _, v in found)
    ]
    if not differing:
        return ""
    name = differing[0]
    has = _who_has_what([(node, values.get(name, "missing")) for node, values in found])
    more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    return f"{name}: {has}{more}"


def _who_has_what(values: list[tuple[str, Any]]) -> str:
    nodes: dict[str, list[str]] = {}
    for node, value in values:
        nodes.setdefault(str(value), []).append(node)
    return ", ".join(
        f"{value} on {' and '.join(list(dict.fromkeys(some))[:3])}" for value, some in nodes.items()
    )
