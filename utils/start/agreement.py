"""The facts that all processes of a job must share: script, code, options, versions and images.

Interface: `compare_processes` and `compare_data` once the processes have met; `code`, `release` and
`describe_mismatch` for other comparisons of nodes.
"""

import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from utils.start.addresses import address_towards
from utils.start.errors import ROOT, UserError, printable
from utils.start.option_types import Options

SIZES = 1000  # files whose sizes are compared
PROCESSES = "number of processes per node"
PREPROCESSING = "the preprocessing that --pretrained FILE states"
REMEDY = {
    "the command line": "use the same options on every node",
    PREPROCESSING: "use the same file on every node",
    "the training script": "start the same script on every node",
    "this code": "copy it to every node again, and remove files that should be missing",
    "torch": "install the same version on every node",
    "NCCL": "install the same version on every node",
}
# Options that may differ between nodes: paths, output, choices that affect one process only, and
# the node's hardware. All others must be the same on every node.
_MAY_DIFFER = """data classes name output_dir store recipe
    workers print_freq profile spot_notice tracker memory_format
    snapshot_minutes train_time dist_url dist_timeout dist_backend gpus
    nodes node_rank local_rank preprocessing given_preprocessing defaulted_sizes
    epoch_sizes"""
MAY_DIFFER = frozenset(_MAY_DIFFER.split())
PATHS = {"resume", "pretrained"}  # paths may differ, but all nodes or none must have the option


class Group(Protocol):
    """The processes of a job, as one of them sees them: see `utils.start.world.World`."""

    @property
    def is_main(self) -> bool: ...
    @property
    def nodes(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def node_name(self) -> str: ...
    def gather(self, value: Any) -> list[Any]: ...


def compare_processes(
    args: Options, world: Group, versions: Mapping[str, str]
) -> list[tuple[str, str | None]]:
    """Raise `UserError` unless all processes of the job have the same script, code and options.

    ``versions``: those of torch and NCCL. Returns: for each rank, its node's name and its
    address as seen by the master.
    """
    script, me = Path(sys.argv[0]), world.node_name
    options = {key: value for key, value in vars(args).items() if key not in MAY_DIFFER}
    options |= {key: bool(options[key]) for key in PATHS & options.keys()}
    facts = {
        "the training script": script.name,
        "this code": code(script),
        "torch": release(versions["torch"]),
        "NCCL": versions["NCCL"],
        PROCESSES: world.local_size,
        "the command line": {f"--{key.replace('_', '-')}": str(options[key]) for key in options},
        PREPROCESSING: str(vars(args).get("given_preprocessing")),
    }
    if mismatch := describe_mismatch(world.gather((me, facts))):
        raise UserError(mismatch, on_every_rank=True)
    note = describe_mismatch(world.gather((me, {"--name": args.name})))
    if note and world.is_main:
        print(printable(f"note: {note}; rank 0's is used"), flush=True)
    return world.gather((me, address_towards(os.environ["MASTER_ADDR"])))


def compare_data(what: str, source: Any, world: Group) -> None:
    """Raise `UserError`, naming the nodes, unless ``source`` has the same images in all processes.

    It compares their names and, on several nodes, the sizes of `SIZES` evenly spaced files, which
    takes less than a second.
    """
    me = world.node_name
    if mismatch := describe_mismatch(world.gather((me, {what: source.fingerprint()}))):
        if first := first_difference(world.gather((me, source.class_fingerprints()))):
            mismatch += f" ({first})"
    elif world.nodes > 1:
        mean, sizes = source.sample_sizes(SIZES) if world.local_rank == 0 else (0.0, "")
        fact = {f"the size of files in {what}": f"{mean:.3f} bytes on average ({sizes})"}
        mismatch = describe_mismatch(world.gather((me, fact))[:: world.local_size])
    if mismatch:
        raise UserError(mismatch, on_every_rank=True)


def code(*scripts: Path) -> dict[str, str]:
    """Return a checksum of each file below utils/, each recipe and each of ``scripts``, by name."""
    ours = [path for kind in ("*.py", "*.txt") for path in (ROOT / "utils").rglob(kind)]
    files = {str(path.relative_to(ROOT)): path for path in ours}
    files |= {path.name: path for path in scripts if path.is_file()}
    return {name: f"{zlib.crc32(path.read_bytes()):08x}" for name, path in sorted(files.items())}


def release(version: str) -> str:
    """Shorten 2.14.1+cu130 to 2.14, because patches and CUDA builds may differ between nodes."""
    return ".".join(version.split(".")[:2])


def describe_mismatch(entries: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
    """Return an error message about the first fact that differs between nodes; None if all agree.

    ``entries``: for each process its node's name, and its facts by name ("this code", "torch" ...).
    A fact can also be a mapping, such as the checksums by file.
    """
    for name in entries[0][1]:
        column = [(node, facts.get(name)) for node, facts in entries]
        if not all(isinstance(value, Mapping) for _, value in column):
            column = [(node, {"": value}) for node, value in column]
        if difference := first_difference(column):
            remedy = REMEDY.get(name, "make it the same on every node")
            return f"{name} differs between the nodes: {difference}: {remedy}"
    return None


def first_difference(entries: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Describe the first difference: "NAME: VALUE on NODES, VALUE on NODES (and 2 more)"."""
    differing = []
    for name in sorted({name for _, values in entries for name in values}):
        nodes: dict[str, dict[str, None]] = {}  # by value; dict keys, so that a name occurs once
        for node, values in entries:
            nodes.setdefault(str(values.get(name, "missing")), {})[node] = None
        if len(nodes) > 1:
            has = (f"{value} on {' and '.join(list(some)[:3])}" for value, some in nodes.items())
            differing.append(f"{name}: {', '.join(has)}" if name else ", ".join(has))
    more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    return differing[0] + more if differing else ""
