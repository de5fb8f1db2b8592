"""What the nodes of a job must agree on: this code, torch, options. Needs no packages.

Compared by the pre-flight check, at the start of each distributed run, and by scripts/doctor.py.
"""

import importlib.metadata
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

# Options that may differ between nodes: paths, output, what one process alone decides, what each
# node has of its own. All others must be the same on every node.
FREE = {"data", "classes", "name", "output_dir", "store", "recipe", "command", "mode", "wanted"}
FREE |= {"workers", "print_freq", "profile", "spot_notice", "memory_format", "model_notes"}
FREE |= {"snapshot_minutes", "train_time", "dist_url", "dist_timeout", "dist_backend", "gpus"}
FREE |= {"world_size", "rank", "local_rank", "preprocessing", "untyped"}
PATHS = {"resume", "pretrained"}  # each node may have its own, but all or none


def options(args: Any) -> dict[str, str]:
    """The options that must be the same on every node, as on the command line."""
    given = {key: value for key, value in vars(args).items() if key not in FREE}
    given |= {key: bool(given[key]) for key in PATHS & given.keys()}
    return {f"--{key.replace('_', '-')}": str(value) for key, value in given.items()}


def code(*scripts: Path) -> dict[str, str]:
    """Checksum of each file below utils/, each recipe and each of ``scripts``, by name."""
    ours = [*(ROOT / "utils").rglob("*.py"), *(ROOT / "scripts/recipes").glob("*.txt")]
    files = {str(path.relative_to(ROOT)): path for path in ours}
    files |= {path.name: path for path in scripts if path.is_file()}
    return {name: f"{zlib.crc32(path.read_bytes()):08x}" for name, path in sorted(files.items())}


def installed_torch() -> str:
    """Major and minor number of the installed torch, which is not imported; "none" without one."""
    try:
        return release(importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return "none"


def release(version: str) -> str:
    """Major and minor number: 2.14 of 2.14.1+cu130. Patches and CUDA builds may differ."""
    return ".".join(version.split(".")[:2])


def unlike(found: list[tuple[str, Mapping[str, Any]]]) -> str | None:
    """An error message about the first fact on which nodes disagree; None if they agree.

    ``found``: for each process its node's name, and its facts by name ("this code", "torch" ...). A
    fact may be a mapping itself, such as each file's checksum.
    """
    for name, first in found[0][1].items():
        values = [(node, facts.get(name)) for node, facts in found]
        if any(value != first for _, value in values):
            has = first_difference(values) if isinstance(first, Mapping) else _who_has(values)
            remedy = REMEDY.get(name, "make it the same on every node")
            return f"{name} differs between the nodes: {has}: {remedy}"
    return None


def first_difference(found: list[tuple[str, Mapping[str, Any]]]) -> str:
    """The first name whose value differs: "NAME: VALUE on NODES, VALUE on NODES (and 2 more)"."""
    differing = []
    for name in sorted({name for _, values in found for name in values}):
        column = [(node, values.get(name, "missing")) for node, values in found]
        if len({value for _, value in column}) > 1:
            differing.append(f"{name}: {_who_has(column)}")
    more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    return differing[0] + more if differing else ""


def _who_has(values: list[tuple[str, Any]]) -> str:
    nodes: dict[str, list[str]] = {}
    for node, value in values:
        nodes.setdefault(str(value), []).append(node)
    return ", ".join(
        f"{value} on {' and '.join(list(dict.fromkeys(some))[:3])}" for value, some in nodes.items()
    )
