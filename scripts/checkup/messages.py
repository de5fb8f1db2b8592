"""Messages between the doctors of two nodes, and the sockets they travel on. Standard library only.

A message is JSON behind its length (4 bytes).
"""

import json
import socket
import struct
import time
from typing import Any

LARGEST = 64 << 20  # bytes of a message; the facts about 20,000 class folders need one

Message = dict[str, Any]


def send(link: socket.socket, message: Message) -> None:
    """Send one message."""
    data = json.dumps(message).encode()
    link.sendall(struct.pack("!I", len(data)) + data)


def receive(link: socket.socket, largest: int = LARGEST, seconds: float | None = None) -> Message:
    """Receive one message of at most ``largest`` bytes, all of it within ``seconds``.

    Raises: OSError (closed, too late), ValueError (not one of ours).
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    (length,) = struct.unpack("!I", read_exactly(link, 4, deadline))
    if length > largest:
        raise ValueError("not a message from the doctor (too long)")
    try:
        message = json.loads(read_exactly(link, length, deadline))
    except (ValueError, RecursionError):  # the latter: nested too deeply
        raise ValueError("not a message from the doctor (not its kind of JSON)") from None
    if not isinstance(message, dict):
        raise ValueError("not a message from the doctor (not a dictionary)")
    return message


def read_exactly(link: socket.socket, count: int, deadline: float | None = None) -> bytes:
    """The next ``count`` bytes, until ``deadline`` (time.monotonic()).

    Without one, the socket's own time-out holds for each part. Raises: ConnectionError if the other
    side closes first, TimeoutError.
    """
    data = bytearray()
    while len(data) < count:
        if deadline is not None:  # a time-out for each part would let a slow sender stay for hours
            link.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = link.recv(min(count - len(data), 1 << 20))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return bytes(data)


def listen(port: int) -> socket.socket:
    """A listening socket on all addresses, IPv6 included where the machine has it."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256
            )
        except OSError as fault:
            if "in use" in str(fault):
                raise
    return socket.create_server(("", port), backlog=256)


def plain(address: str) -> str:
    """An IP address without the prefix of an IPv4 address on an IPv6 socket."""
    return address.removeprefix("::ffff:")


def notice_death(link: socket.socket) -> None:
    """Let the kernel notice within half a minute that the other machine is gone."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
