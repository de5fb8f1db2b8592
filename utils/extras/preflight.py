"""Pre-flight check: the nodes of a job connect before training starts. Standard library only.

torch's own rendezvous is silent for many minutes when a node is missing, and ends in a stack trace
of C++. Here every node prints which nodes are missing and since when, and a set-up that cannot work
ends with the same one-line error on every node.

Each node, node 0 too, connects once to the master port of node 0. Messages are JSON objects, one a
line. A node sends all facts that must be the same everywhere, then follows node 0's messages: print
a line, connect to the ports of the others, end.
"""

import asyncio
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from utils import launch, network
from utils.errors import UserError

PATIENCE = 10.0  # seconds for an answer
LOST = 90.0  # seconds without a message from node 0, which sends one every 15 s while it waits
SILENT = 12.0  # seconds without an answer from a master that is known to be up
PORTS = 2  # tried on each node: a firewall may let one through by chance
GREETING = "imagenet preflight check"
PROCESSES = "number of processes per node"
ALIKE = (PROCESSES, "this code", "torch")  # facts that must be the same on all nodes

Message = dict[str, Any]


class Names(NamedTuple):
    """The options or variables that messages name: those that the user has typed."""

    nodes: str = "NODES"
    rank: str = "NODE_RANK"
    port: str = "MASTER_PORT"


class Link:
    """One end of a connection, and the facts that the node at the other end has sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer
        self.facts: Message = {}

    def send(self, **message: Any) -> None:
        """Send a message; if the other end is gone, `receive` fails."""
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self, seconds: float | None = PATIENCE) -> Message:
        """The next message. Raises: OSError (closed, too late), ValueError (not a message)."""
        try:
            line = await asyncio.wait_for(self.reader.readline(), seconds)
        except asyncio.TimeoutError:  # before Python 3.11 not an OSError
            raise TimeoutError("no answer") from None
        if not line:
            raise ConnectionError("the connection was closed")
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError):
            raise ValueError("it sends other messages") from None


class Preflight:
    """The check of one node, rank ``node`` of ``nodes``; ``master`` is node 0's host and port."""

    def __init__(self, node: int, nodes: int, master: tuple[str, int], wait: float, names: Names):
        self.node, self.nodes, self.master, self.names = node, nodes, master, names
        self.there = f"{master[0]}:{master[1]}"
        self.clock = network.Clock(wait)
        self.peers: dict[int, Link] = {}  # in node 0: all nodes, by rank
        self.closed: list[str] = []  # in node 0: the closed ports between nodes
        self.stop: str | None = None  # in node 0: the error that ends the waiting
        self.fault: str | None = None
        self.done = threading.Event()

    def meet(self, processes: int) -> None:
        """Return when all nodes are here and agree; this one has so many ``processes``.

        Raises: `UserError`, on every node, when a node does not come in time, ranks or numbers
        contradict each other, nodes differ in code or torch, or ports between them are closed.
        """
        threading.Thread(target=self._work, args=(processes,), daemon=True).start()
        try:
            self.done.wait()
        except KeyboardInterrupt:
            self.stop = "node 0 was interrupted"
            if self.node == 0:
                self.done.wait(PATIENCE)  # until the others have been told
            raise
        if self.fault:
            raise UserError(self.fault)

    def _work(self, processes: int) -> None:
        try:
            asyncio.run(self._check(processes))
        except UserError as error:
            self.fault = str(error)
        except Exception as fault:  # in a thread, it would be lost
            self.fault = f"the pre-flight check failed: {fault!r}"
        self.done.set()

    async def _check(self, processes: int) -> None:
        doors = [_listen(0) for _ in range(PORTS)]  # the kernel answers
        me = {
            "greeting": GREETING,
            "rank": self.node,
            "nodes": self.nodes,
            "host": socket.gethostname(),
            "ports": [door.getsockname()[1] for door in doors],
            PROCESSES: processes,
            "this code": network.code(),
            "torch": network.installed_torch(),
        }
        fault = await self._open(me["host"]) if self.node == 0 else None
        try:
            await self._follow(me, fault)
        finally:
            for door in doors:
                door.close()

    # ---- node 0

    async def _open(self, me: str) -> str | None:
        """Listen at the master port. Returns: why that is impossible."""
        host, port = self.master
        if not network.is_own(host):
            return (
                f"{host} is not an address of this machine, {me}: the master's address must be "
                "that of node 0"
            )
        try:
            server = await asyncio.start_server(self._serve, sock=_listen(port))
        except OSError:
            return network.taken(host, port, self.names.port)
        self.leading = asyncio.create_task(self._lead(server))
        return None

    async def _lead(self, server: asyncio.Server) -> None:
        """Lead all nodes through the check, and tell them how it ends."""
        end: str | None = "node 0 has failed"
        try:
            await self._gather()
            await self._compare()
            end = None
        except UserError as error:
            end = str(error)
        finally:
            server.close()
            self._tell_all(end=end)

    def _tell_all(self, **message: Any) -> None:
        for peer in self.peers.values():
            peer.send(**message)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection to node 0 until it is closed."""
        link = Link(reader, writer)
        # Another program, a node that has left again, or the end of this check.
        with suppress(Exception, asyncio.CancelledError):
            self._let_in(await link.receive(), link)
            while True:
                link.facts.update(await link.receive(None))
        writer.close()
        if link in self.peers.values():
            del self.peers[link.facts["rank"]]
            if not self.leading.done():
                print(f"node {link.facts['rank']} ({link.facts['host']}) has left", flush=True)

    def _let_in(self, hello: Message, link: Link) -> None:
        """Add a node that has sent its facts; if they contradict those of others, end all."""
        if hello["greeting"] != GREETING:
            raise ValueError("not a node")
        rank, nodes, host = hello["rank"], hello["nodes"], hello["host"]
        address = link.writer.get_extra_info("peername")[0].removeprefix("::ffff:")
        # Node 0 may know itself by an address at which nobody else reaches it.
        link.facts = hello | {"address": address if rank else self.master[0]}
        if nodes != self.nodes:
            here = socket.gethostname()
            self.stop = f"{self.names.nodes} is {self.nodes} on {here} (node 0), but {nodes} on "
            self.stop += f"{host} ({address}): give every node the same"
        elif other := self.peers.get(rank):
            self.stop = f"two nodes have {self.names.rank} {rank}, {other.facts['host']} and {host}"
            self.stop += f" ({address}): give each its own"
        if self.stop:
            link.send(end=self.stop)
            self._tell_all(end=self.stop)  # now: this link may be node 0's own, whose check ends
            return
        self.peers[rank] = link
        link.send(welcome=True)
        if rank:
            print(f"node {rank} ({host}, {address}) is here", flush=True)

    async def _gather(self) -> None:
        """Wait until all nodes are here."""
        while missing := [rank for rank in range(self.nodes) if rank not in self.peers]:
            names = f"node{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.nodes}"
            if self.clock.seconds >= self.clock.limit:
                raise UserError(
                    f"{names} did not connect to {self.there} within {self.clock.limit:g} s: is "
                    "training started there, with this address, and does the firewall let the "
                    "port through?"
                )
            if line := self.clock.line(f"waiting at {self.there} for {names}"):
                self._tell_all(print=line)
            await self._pause()

    async def _pause(self) -> None:
        """Let messages arrive. Raises: `UserError` if one of them has ended the check."""
        await asyncio.sleep(0.05)
        if self.stop:
            raise UserError(self.stop)

    async def _compare(self) -> None:
        """Raises: `UserError` with what keeps the nodes from training together."""
        peers = [self.peers[rank] for rank in range(self.nodes)]
        names = [f"{peer.facts['host']} (node {rank})" for rank, peer in enumerate(peers)]
        facts = [{key: peer.facts[key] for key in ALIKE} for peer in peers]
        if different := network.unlike(list(zip(names, facts, strict=True))):
            raise UserError(different)
        ways = [(p.facts["address"], p.facts["ports"]) for p in peers]
        self._tell_all(connect=[(name, *way) for name, way in zip(names, ways, strict=True)])
        deadline = time.monotonic() + 60
        while waiting := [rank for rank, peer in enumerate(peers) if "closed" not in peer.facts]:
            if waiting[0] not in self.peers or time.monotonic() > deadline:
                raise UserError(f"{names[waiting[0]]} was lost in the pre-flight check")
            await self._pause()
        self.closed = [way for peer in peers for way in peer.facts["closed"]]
        if self.closed:
            more = f" (and {len(self.closed) - 4} more)" if len(self.closed) > 4 else ""
            raise UserError(
                f"{'; '.join(self.closed[:4])}{more}: gradients travel over ports that the kernel "
                "chooses, so open all TCP ports between the nodes, in both directions"
            )
        hosts = ", ".join(peer.facts["host"] for peer in peers)
        self._tell_all(print=f"all {self.nodes} nodes are here: {hosts}")

    # ---- all nodes

    async def _follow(self, me: Message, fault: str | None) -> None:
        """Connect to node 0 and follow it. Raises: `UserError` with the error that it reports.

        A node with a ``fault`` cannot be node 0; it connects so that another node 0 ends as well.
        """
        welcome, wait = False, 1.0 if fault else self.clock.limit
        # The launcher over ssh has reached all nodes and started them together: a master that does
        # not even refuse is not late.
        all_up, refused = os.environ.get(launch.MARKER, "").startswith("guard"), 0.0

        def say(reason: str) -> None:
            nonlocal refused
            if "refused" in reason:
                refused = self.clock.seconds
            elif all_up and self.clock.seconds - refused > SILENT:
                raise UserError(
                    f"node 0 is up, but {self.there} does not answer this node ({reason}): open "
                    "all TCP ports between the nodes, in both directions"
                )
            if line := self.clock.line(f"waiting for node 0 at {self.there}: {reason}"):
                print(line, flush=True)

        if self.node and network.is_own(self.master[0]):
            print(f"note: {self.master[0]} is this machine: does node 0 run here, too?", flush=True)
        try:
            connection = network.connect(*self.master, wait, say)
            link = Link(*await asyncio.open_connection(sock=connection))
            link.send(**me)
            while "end" not in (message := await link.receive(LOST if welcome else PATIENCE)):
                welcome = welcome or "welcome" in message
                if "print" in message:
                    print(message["print"], flush=True)
                if "connect" in message:
                    name = f"{me['host']} (node {self.node})"
                    link.send(closed=await asyncio.to_thread(try_ports, message["connect"], name))
        except (OSError, ValueError, UserError) as problem:
            if fault or isinstance(problem, UserError):
                raise UserError(fault or str(problem)) from None
            if welcome:
                raise UserError(
                    f"lost touch with node 0 at {self.there} in the pre-flight check ({problem}): "
                    "look at what it has printed"
                ) from None
            raise UserError(
                f"what answers at {self.there} is not node 0 of this job ({problem}): does another "
                f"program use this port? If so, choose another {self.names.port} on every node"
            ) from None
        if message["end"]:
            raise UserError(message["end"])


def _listen(port: int) -> socket.socket:
    """A listening socket on all addresses, IPv6 included where the machine has it."""
    more: Message = {"backlog": 1024}
    if socket.has_dualstack_ipv6():
        more |= {"family": socket.AF_INET6, "dualstack_ipv6": True}
    return socket.create_server(("", port), **more)


def try_ports(targets: list[tuple[str, str, list[int]]], me: str) -> list[str]:
    """Connect from ``me`` to the others' ports: (name, address, ports). Returns: what is closed."""

    def closed(way: tuple[str, str, int]) -> str | None:
        name, address, port = way
        try:
            socket.create_connection((address, port), timeout=2.0).close()
        except OSError as fault:
            reason = network.reason(fault)
            return f"{me} cannot connect to {name} at {address}, port {port} ({reason})"
        return None

    ways = [(to, at, port) for to, at, ports in targets if to != me for port in ports]
    with ThreadPoolExecutor(32) as pool:
        return list(filter(None, pool.map(closed, ways)))
