"""Messages between the doctors of two nodes, and the sockets they travel on. Standard library only.

A message is JSON behind its length (4 bytes).
"""

import json
import socket
import struct
from typing import Any

LARGEST = 64 << 20  # bytes of a message; the facts about 20,000 class folders need one

Message = dict[str, Any]


def send(link: socket.socket, message: Message) -> None:
    """Send one message."""
    data = json.dumps(message).encode()
    link.sendall(struct.pack("!I", len(data)) + data)


def receive(link: socket.socket, largest: int = LARGEST) -> Message:
    """Receive one message. Raises: OSError (closed, too late), ValueError (not one of ours)."""
    (length,) = struct.unpack("!I", read_exactly(link, 4))
    if length > largest:
        raise ValueError("not a message from the doctor")
    message = json.loads(read_exactly(link, length))
    if not isinstance(message, dict):
        raise ValueError("not a message from the doctor")
    return message


def read_exactly(link: socket.socket, count: int) -> bytes:
    """The next ``count`` bytes. Raises: ConnectionError if the other side closes first."""
    data = bytearray()
    while len(data) < count:
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
