"""Addresses, ports and interfaces, checked before torch.distributed would hang on them."""

import contextlib
import fcntl
import re
import socket
import struct
import sys
import time
from collections.abc import Callable
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


def is_own(host: str) -> bool:
    """Whether ``host`` (a name, IPv4 or IPv6) is this machine. Raises: `UserError` if unknown."""
    for family, kind, protocol, _, address in resolve(host):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
        except OSError:
            continue
    return False


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


class Clock:
    """The time spent waiting, to be printed after 1 s, then every 5 s, after a minute every 15."""

    def __init__(self, limit: float):
        self.limit, self.began, self.next = limit, time.monotonic(), 1.0

    @property
    def seconds(self) -> float:
        """Since the waiting began."""
        return time.monotonic() - self.began

    def line(self, text: str) -> str | None:
        """``text`` with the seconds so far and their limit, if a line is due."""
        now = self.seconds
        if now < self.next:
            return None
        self.next = now + (5 if now < 60 else 15)
        return f"{text} ({now:.0f} s, at most {self.limit:g})"


def rendezvous(master: str) -> str:
    """For scripts/elastic_train.sh: this node's address, and whether it is ``master`` (HOST:PORT).

    As "10.0.0.1 false". On another node than the master, returns once that answers; prints that it
    waits on stderr. Raises: `UserError`.
    """
    host, _, number = master.rpartition(":")
    here, address, clock = is_own(host), address_towards(host), Clock(300.0)
    if address is None:
        raise UserError(f"no route from here to MASTER_ADDR={host}: is the link up?")
    if here:
        try:
            socket.create_server(("", int(number))).close()
        except OSError:
            raise UserError(taken(host, int(number), "MASTER_PORT")) from None
        return f"{address} true"

    def say(why: str) -> None:
        if line := clock.line(f"waiting for {master}: {why}"):
            print(line, file=sys.stderr, flush=True)

    connect(host, int(number), clock.limit, say).close()
    return f"{address} false"
