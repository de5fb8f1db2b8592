"""Addresses, ports and interfaces; and what the nodes of a job must agree on. Needs no packages.

Both are checked before torch.distributed would hang or train something else.
"""

import contextlib
import fcntl
import re
import socket
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from utils.errors import UserError

PLACEHOLDERS = ("MASTER_IP", "MASTER_ADDR", "MASTER_PORT", "HOST", "IP", "PORT")  # of documents
_SIOCGIFADDR = 0x8915  # ioctl(2): the IPv4 address of an interface


def parse_tcp_url(url: str) -> tuple[str, int]:
    """Return host and port of ``tcp://HOST:PORT``. Raises `UserError` for any other text."""
    if words := [word for word in re.split("[/:]", url) if word in PLACEHOLDERS]:
        numbers = f"put numbers in place of {' and '.join(words)}, such as tcp://172.31.0.10:8888"
        raise UserError(f"--dist-url {url}: {numbers}")
    with contextlib.suppress(ValueError):  # of .port, for what is not a port
        parts = urlsplit(url)
        if parts.scheme == "tcp" and parts.hostname and parts.port and parts.path in ("", "/"):
            return parts.hostname, parts.port
    raise UserError(f"--dist-url {url} is not of the form tcp://HOST:PORT")


def free_port() -> int:
    """A TCP port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def address_towards(host: str) -> str | None:
    """This machine's IPv4 address as ``host`` sees it; None if unknown (no route, or IPv6)."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # UDP: this looks up the route and sends nothing
            return probe.getsockname()[0]
    except OSError:
        return None


def interfaces() -> dict[str, str]:
    """IPv4 address of each interface that has one, by its name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_towards(host: str) -> str | None:
    """Name of the network interface that leads to ``host``; None if unknown (IPv6).

    On the master itself: the interface by which the others reach it, not the loopback.
    """
    own_ip = address_towards(host)
    return next((name for name, ip in interfaces().items() if ip == own_ip), None)


def resolve(host: str) -> list[tuple]:
    """What `socket.getaddrinfo` finds for the master's name. Raises: `UserError` if nothing."""
    try:
        return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as fault:
        raise UserError(
            f"the master's name {host} cannot be resolved ({fault.strerror}): use its IP"
        ) from None


def connect(
    host: str,
    port: int,
    seconds: float,
    waiting: Callable[[str], None] = lambda reason: None,
) -> socket.socket:
    """A connection to ``host:port``, which is tried again until ``seconds`` are over.

    ``waiting(reason)`` is called after each failed attempt. Raises: `UserError`: unknown host name,
    or nothing there in time.
    """
    resolve(host)
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection((host, port), timeout=2.0)
        except OSError as fault:
            why = reason(fault)
        if time.monotonic() >= deadline:
            raise UserError(
                f"the master {host}:{port} cannot be reached after {seconds:g} s ({why}): "
                "is node 0 started, is the address right, is the port open in the firewall?"
            )
        waiting(why)
        time.sleep(0.2)


def reason(fault: OSError) -> str:
    """Why a connection failed, in a few words."""
    if isinstance(fault, TimeoutError):
        return "no answer"
    return (fault.strerror or str(fault)).lower()


def taken(host: str, port: int, name: str = "port") -> str:
    """The error message for a port in use, which the user has given as ``name``."""
    return f"port {port} of {host} is taken by another program: choose another {name} on every node"


# ---- what the nodes must agree on

ROOT = Path(__file__).resolve().parents[1]

REMEDY = {
    "the command line": "type the same options on every node",
    "the training script": "start the same script on every node",
    "this code": "copy it to every node again",
    "torch": "install the same version on every node",
    "NCCL": "install the same version on every node",
}

# Options that may differ between nodes: paths, output, what one process alone decides, what each
# node has of its own. All others must be the same on every node.
_MAY_DIFFER = """data classes name output_dir store recipe command mode wanted
    workers print_freq profile spot_notice tracker memory_format model_notes
    snapshot_minutes train_time dist_url dist_timeout dist_backend gpus
    world_size rank local_rank preprocessing defaulted_sizes epoch_sizes"""
MAY_DIFFER = frozenset(_MAY_DIFFER.split())
PATHS = {"resume", "pretrained"}  # each node may have its own, but all or none


def options(args: Any) -> dict[str, str]:
    """The options that must be the same on every node, as on the command line."""
    given = {key: value for key, value in vars(args).items() if key not in MAY_DIFFER}
    given |= {key: bool(given[key]) for key in PATHS & given.keys()}
    return {f"--{key.replace('_', '-')}": str(value) for key, value in given.items()}


def code(*scripts: Path) -> dict[str, str]:
    """Checksum of each file below utils/, each recipe and each of ``scripts``, by name."""
    ours = [*(ROOT / "utils").rglob("*.py"), *(ROOT / "scripts/recipes").glob("*.txt")]
    files = {str(path.relative_to(ROOT)): path for path in ours}
    files |= {path.name: path for path in scripts if path.is_file()}
    return {name: f"{zlib.crc32(path.read_bytes()):08x}" for name, path in sorted(files.items())}


def release(version: str) -> str:
    """Major and minor number: 2.14 of 2.14.1+cu130. Patches and CUDA builds may differ."""
    return ".".join(version.split(".")[:2])


def describe_mismatch(found: list[tuple[str, Mapping[str, Any]]]) -> str | None:
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
