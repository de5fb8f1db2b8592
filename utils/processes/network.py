"""Small questions to the network, asked before torch.distributed hangs on them."""

import fcntl
import re
import socket
import struct
import time

from utils.errors import UserError

LOOPBACK = "lo"
_SIOCGIFADDR = 0x8915  # ioctl(2): the IPv4 address of an interface


def parse_tcp_url(url: str) -> tuple[str, int]:
    """Return host and port of ``tcp://HOST:PORT``. Raises `UserError` for any other text."""
    match = re.fullmatch(r"tcp://\[?([^/]+?)\]?:(\d{1,5})/?", url)
    if not match or not 0 < int(match[2]) < 65536:
        raise UserError(f"--dist-url {url} is not of the form tcp://HOST:PORT")
    return match[1], int(match[2])


def free_port() -> int:
    """A TCP port that was free on the loopback interface a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def address_towards(host: str) -> str | None:
    """This machine's IPv4 address as ``host`` sees it; None if unknown (no route, IPv6)."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # UDP: only a route is looked up, nothing is sent
            return probe.getsockname()[0]
    except OSError:
        return None


def is_here(host: str) -> bool:
    """Whether the name or IPv4 address ``host`` is one of this machine's own."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
            return True
    except OSError:
        return False


def interface_towards(host: str) -> str | None:
    """Name of the network interface that packets to ``host`` leave by; None if unknown (IPv6)."""
    own_ip = address_towards(host)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                try:
                    answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                except OSError:
                    continue  # an interface without an IPv4 address
                if socket.inet_ntoa(answer[20:24]) == own_ip:
                    # The master reaches itself by loopback, but the others cannot reach that.
                    return name
    except OSError:
        pass
    return None


def wait_for_master(host: str, port: int, seconds: float) -> None:
    """Return when ``host:port`` accepts connections.

    Nodes are started by hand, in any order, so a refused connection is tried again until
    ``seconds`` are over. Raises `UserError`: unknown host name, or nothing there in time.
    """
    deadline = time.monotonic() + seconds
    reason = "no answer"
    while True:
        try:
            socket.create_connection((host, port), timeout=min(5.0, max(seconds, 0.1))).close()
            return
        except socket.gaierror as fault:
            raise UserError(
                f"the master's name {host} cannot be resolved ({fault.strerror}): use its IP"
            ) from None
        except OSError as fault:
            reason = fault.strerror or str(fault)
        if time.monotonic() >= deadline:
            raise UserError(
                f"the master {host}:{port} cannot be reached after {seconds:g} s ({reason}): "
                "is node 0 started, is the address right, is the port open in the firewall?"
            )
        time.sleep(0.2)
