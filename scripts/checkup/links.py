"""Tries the way between two nodes: open or closed, latency, bandwidth. Plain TCP sockets.

Like gloo and NCCL, each node listens on ports that the kernel chooses; the others connect there.
"""

import contextlib
import socket
import statistics
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from checkup.messages import Message, listen, read_exactly

PORTS = 2  # opened by each node: a firewall may let one through by chance
PATIENCE = 2.0  # seconds for a connection: time to send one lost packet again
PINGS = 30
CHUNK = 1 << 18  # bytes
_PING, _SINK = b"p", b"s"
_TOKEN = 16  # bytes


class Endpoint:
    """What the others connect to; ``token`` (16 bytes, as hex) keeps strangers out."""

    def __init__(self, rank: int, token: str):
        self.rank, self.token = rank, bytes.fromhex(token)
        self.doors = [listen(0) for _ in range(PORTS)]
        self.ports = [door.getsockname()[1] for door in self.doors]
        for door in self.doors:
            threading.Thread(target=self._accept, args=(door,), daemon=True).start()

    def close(self) -> None:
        """Close the ports."""
        for door in self.doors:
            with contextlib.suppress(OSError):
                door.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept()
            door.close()

    def _accept(self, door: socket.socket) -> None:
        while True:
            try:
                link, _ = door.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            link.settimeout(PATIENCE)
            if read_exactly(link, _TOKEN) != self.token:
                return
            kind = read_exactly(link, 1)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.sendall(struct.pack("!I", self.rank))
            if kind == _PING:
                while data := link.recv(1):
                    link.sendall(data)
            elif kind == _SINK:
                link.settimeout(30.0)
                link.sendall(struct.pack("!Qd", *_swallow(link)))


def _swallow(link: socket.socket) -> tuple[int, float]:
    """Receive until the other side has finished; bytes, and seconds since the first of them."""
    buffer, total = bytearray(CHUNK), 0
    count = link.recv_into(buffer)
    began = time.perf_counter()
    while count:
        count = link.recv_into(buffer)
        total += count  # the first chunk only starts the clock
    return total, time.perf_counter() - began


def _connect(target: Message, address: str, port: int, token: str, kind: bytes) -> socket.socket:
    """Connect to a node's endpoint. Raises: OSError, whose text says why that failed."""
    link = socket.create_connection((address, port), timeout=PATIENCE)
    try:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sendall(bytes.fromhex(token) + kind)
        (rank,) = struct.unpack("!I", read_exactly(link, 4))
        if rank != target["rank"]:
            raise OSError(None, f"node {rank} answers at {address}")
    except OSError:
        link.close()
        raise
    return link


def probe(request: Message) -> Message:
    """Try each port of each address of each of ``request["targets"]`` from here.

    A target: rank, addresses, ports. Returns "ways": of each its rank, address, port, the reason if
    it is closed, and the round trip in seconds (median) if not.
    """
    ways = [
        (target, address, port)
        for target in request["targets"]
        for address in target["addresses"]
        for port in target["ports"]
    ]
    if not ways:
        return {"ways": []}
    with ThreadPoolExecutor(min(len(ways), 64)) as pool:
        found = list(pool.map(lambda way: _try(*way, request["token"]), ways))
    # One after the other: simultaneous pings would wait for each other.
    for target, way in zip([way[0] for way in ways], found, strict=True):
        if way["reason"] is None and way["port"] == target["ports"][0]:
            way["seconds"] = _ping(target, way["address"], way["port"], request["token"])
    return {"ways": found}


def _try(target: Message, address: str, port: int, token: str) -> dict[str, Any]:
    reason = None
    try:
        _connect(target, address, port, token, _PING).close()
    except TimeoutError:
        reason = "no answer"
    except OSError as fault:
        reason = (fault.strerror or str(fault)).lower()
    return {"to": target["rank"], "address": address, "port": port, "reason": reason}


def _ping(target: Message, address: str, port: int, token: str) -> float | None:
    times = []
    try:
        with _connect(target, address, port, token, _PING) as link:
            for _ in range(PINGS):
                began = time.perf_counter()
                link.sendall(b"x")
                read_exactly(link, 1)
                times.append(time.perf_counter() - began)
    except OSError:
        return None
    return statistics.median(times)


def transfer(request: Message) -> Message:
    """Send to ``request["target"]`` on ``streams`` connections for ``seconds``; bytes per second.

    They are counted where they arrive.
    """
    target, streams = request["target"], int(request["streams"])
    start = threading.Barrier(streams)

    def stream(number: int) -> tuple[int, float]:
        port = target["ports"][number % len(target["ports"])]
        try:
            link = _connect(target, target["addresses"][0], port, request["token"], _SINK)
        except OSError:
            start.abort()
            raise
        with link:
            link.settimeout(30.0)
            start.wait(PATIENCE)
            end = time.perf_counter() + float(request["seconds"])
            data = bytes(CHUNK)
            while time.perf_counter() < end:
                link.sendall(data)
            link.shutdown(socket.SHUT_WR)
            return struct.unpack("!Qd", read_exactly(link, 16))

    with ThreadPoolExecutor(streams) as pool:
        parts = list(pool.map(stream, range(streams)))
    return {"bytes_per_s": sum(count for count, _ in parts) / max(part[1] for part in parts)}
