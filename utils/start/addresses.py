"""The address at which the processes of a job meet: host names and ports. Without torch."""

import contextlib
import fcntl
import os
import random
import re
import socket
import struct
from pathlib import Path
from urllib.parse import urlsplit

from utils.start.errors import BAD_INPUT, LOST_PEER, UserError

CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_PORT = 10_000  # that `free_port` chooses
PLACEHOLDERS = ("MASTER_IP", "MASTER_ADDR", "MASTER_PORT", "HOST", "IP", "PORT")  # in documents


def parse_tcp_url(url: str, name: str = "--dist-url") -> tuple[str, int]:
    """Host and port of ``tcp://HOST:PORT``, the value of ``name``. Raises: `UserError`."""
    if words := [word for word in re.split("[/:]", url) if word in PLACEHOLDERS]:
        numbers = f"put numbers in place of {' and '.join(words)}, such as tcp://172.31.0.10:8888"
        raise UserError(f"{name} {url}: {numbers}")
    with contextlib.suppress(ValueError):  # of .port, if that is not a valid number
        parts = urlsplit(url)
        if parts.scheme == "tcp" and parts.hostname and parts.port and parts.path in ("", "/"):
            return parts.hostname, parts.port
    form = "tcp://[IPV6_ADDRESS]:PORT" if url.count(":") > 2 else "tcp://HOST:PORT"
    raise UserError(f"{name} {url} is not of the form {form}")


def free_port() -> int:
    """A TCP port of this machine that was free a moment ago.

    It is none of those that Linux gives to connections: on a busy machine one of these may be taken
    before the job listens.
    """
    first, choose = 0, random.SystemRandom()  # which leaves the seeds of the training alone
    with contextlib.suppress(OSError, ValueError):
        first = int(CONNECTIONS.read_text().split()[0])
    tries = range(100 if first > 2 * LOWEST_PORT else 0)
    for port in (*(choose.randrange(LOWEST_PORT, first) for _ in tries), 0):  # 0: any
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return probe.getsockname()[1]
    raise UserError("this machine has no free TCP port")


def port_in_use(host: str, port: int, name: str = "port") -> UserError:
    """The error for a port in use; ``name`` is what the user can change.

    torchrun's elastic agents choose another port when they restart, so the exit code then allows
    a restart.
    """
    text = f"port {port} of {host} is taken by another program: choose another {name} on every node"
    return UserError(text, code=LOST_PEER if is_elastic() else BAD_INPUT)


def is_elastic() -> bool:
    """Whether torchrun restarts this job's processes when one of them fails."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


# ---- this machine as others see it


def resolve(host: str) -> list[tuple]:
    """Return `socket.getaddrinfo` of the master's name. Raises: `UserError` if it is unknown."""
    try:
        return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the latter for 172.31..10, which has an empty part
        why = getattr(error, "strerror", None) or "it is no valid name"
        text = f"the master's name {host} cannot be resolved ({why}): use its IP"
        raise UserError(text) from None


def is_own(host: str) -> bool:
    """Whether ``host`` (a name, IPv4 or IPv6) is this machine. Raises: `UserError` if unknown."""
    for family, kind, protocol, _, address in resolve(host):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def address_towards(host: str) -> str | None:
    """Return this machine's IPv4 address as seen by ``host``; None if no route, or IPv6."""
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with contextlib.suppress(OSError, UnicodeError), udp as probe:
        probe.connect((host, 9))  # UDP: this looks up the route and sends nothing
        return probe.getsockname()[0]
    return None


def interface_towards(host: str) -> str | None:
    """Return the name of the network interface towards ``host``; None if unknown (IPv6).

    On the master itself, this is the interface that the others use to reach it, not the loopback.
    """
    own = address_towards(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR of ioctl(2)
                if socket.inet_ntoa(answer[20:24]) == own:
                    return name
    return None
