"""Pre-flight check: the nodes of a job connect before training starts. Standard library only.

torch's own rendezvous is silent for many minutes when a node is missing, and ends in a stack trace
of C++. Here every node prints which nodes are missing and since when, and a set-up that cannot work
ends with the same one-line error on every node.

Each node connects once to node 0 on the master port. Messages are JSON objects, one a line. A node
sends all facts that must be the same everywhere, then follows node 0's messages: print a line, try
the ports of the others, end.
"""

import asyncio
import json
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from utils.errors import UserError, report
from utils.launch import agreement, network, supervise

PATIENCE = 10.0  # seconds for an answer
LOST = 90.0  # seconds without a message from node 0, which sends one every 15 s while it waits
SILENT = 12.0  # seconds without any answer from a master that is known to be up
CLOCK_LIMIT = 60.0  # seconds between two nodes' clocks from which a note says so
PORTS = 2  # tried on each node: a firewall may let one through by chance
LARGEST = 1 << 20  # bytes of a message
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

    def __str__(self) -> str:
        return f"{self.facts['host']} (node {self.facts['rank']})"


class Preflight:
    """The check of one node: of rank ``node`` of ``nodes``; ``master`` is node 0's host and port.

    `begin` it before torch is imported, and `finish` it once the number of processes is known.
    """

    def __init__(self, node: int, nodes: int, master: tuple[str, int], wait: float, names: Names):
        self.node, self.nodes, self.master, self.wait, self.names = node, nodes, master, wait, names
        self.there = f"{master[0]}:{master[1]}"
        self.clock = network.Clock(wait)
        self.processes: int | None = None
        self.peers: dict[int, Link] = {}  # in node 0: the other nodes, by rank
        self.closed: list[str] = []  # in node 0: the closed ports between nodes
        self.stop: str | None = None  # in node 0: the error that ends the waiting
        self.fault: str | None = None
        self.done = threading.Event()

    def begin(self, ends_process: bool = False) -> None:
        """Start to wait for the other nodes. An error before `finish` may end this process."""
        threading.Thread(target=self._work, args=(ends_process,), daemon=True).start()

    def finish(self, processes: int) -> None:
        """Return when all nodes are here and agree; this one has so many ``processes``.

        Raises: `UserError`, on every node, when a node does not come in time, ranks or numbers
        contradict each other, nodes differ in code or torch, or ports between them are closed.
        """
        self.processes = processes
        try:
            self.done.wait()
        except KeyboardInterrupt:
            self.stop = "node 0 was interrupted"
            if self.node == 0:
                self.done.wait(PATIENCE)  # until the others have been told
            raise
        if self.fault:
            raise UserError(self.fault)

    def _work(self, ends_process: bool) -> None:
        try:
            network.resolve(*self.master)
            asyncio.run(self._check())
        except UserError as error:
            self.fault = str(error)
        except Exception as fault:  # in a thread, it would be lost
            self.fault = f"the pre-flight check failed: {fault!r}"
        if self.fault and ends_process and self.processes is None:
            code = report(UserError(self.fault))
            sys.stdout.flush()
            os._exit(code)  # the import of torch would take seconds more
        self.done.set()

    async def _check(self) -> None:
        with ExitStack() as stack:
            doors = [stack.enter_context(_listen(0)) for _ in range(PORTS)]  # the kernel answers
            self.me = {
                "greeting": GREETING,
                "rank": self.node,
                "nodes": self.nodes,
                "host": socket.gethostname(),
                "ports": [door.getsockname()[1] for door in doors],
                "time": time.time(),
                "this code": agreement.code(),
                "torch": agreement.installed_torch(),
            }
            await (self._host() if self.node == 0 else self._visit())

    async def _greet(self, connection: socket.socket) -> Link:
        """Send this node's facts to node 0. Raises: `UserError` if refused; what a link raises."""
        link = Link(*await asyncio.open_connection(sock=connection, limit=LARGEST))
        link.send(**self.me)
        answer = await link.receive()
        if "end" in answer:
            raise UserError(str(answer["end"]))
        return link

    # ---- node 0

    async def _host(self) -> None:
        host, port = self.master
        door, fault = None, f"{host} is not an address of this machine, {self.me['host']}: the "
        fault += "master's address must be that of node 0"
        if network.is_own(host):
            fault = f"port {port} of {host} is taken by another program: choose another "
            fault += f"{self.names.port} on every node"
            with suppress(OSError):
                door = _listen(port)
        if door is None:
            with suppress(OSError, ValueError):  # a first node 0 then ends with an error as well
                await self._greet(socket.create_connection(self.master, timeout=2.0))
            raise UserError(fault)
        server = await asyncio.start_server(self._receive, sock=door, limit=LARGEST)
        told: str | None = "node 0 has failed"
        try:
            await self._gather()
            hosts = await self._compare()
            told = None
        except UserError as error:
            told = str(error)
            raise
        finally:
            server.close()
            while self.peers:
                _, peer = self.peers.popitem()
                peer.send(end=told)
                peer.writer.close()
        print(f"all {self.nodes} nodes are here: {', '.join(hosts)}", flush=True)

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
            print(f"node {link.facts['rank']} ({link.facts['host']}) has left", flush=True)

    def _let_in(self, hello: Message, link: Link) -> None:
        """Add a node that has sent its facts; if they contradict those of others, end all."""
        if hello["greeting"] != GREETING:
            raise ValueError("not a node")
        hello["address"] = link.writer.get_extra_info("peername")[0].removeprefix("::ffff:")
        hello["ahead"] = hello["time"] - time.time()
        rank, nodes, here = hello["rank"], hello["nodes"], self.me["host"]
        who, fault = f"{hello['host']} ({hello['address']})", ""
        if nodes != self.nodes:
            fault = f"{self.names.nodes} is {self.nodes} on {here} (node 0), but {nodes} on {who}: "
            fault += "give every node the same"
        elif rank == 0 or rank in self.peers:
            first = self.peers[rank] if rank else here
            fault = f"two nodes have {self.names.rank} {rank}, {first} and {who}: give each its own"
        if fault:
            link.send(end=fault)
            self.stop = fault
            return
        link.facts, self.peers[rank] = hello, link
        link.send(welcome=True)
        print(f"node {rank} ({hello['host']}, {hello['address']}) is here", flush=True)

    async def _gather(self) -> None:
        """Wait until all nodes are here and know their number of processes."""
        while True:
            missing = [rank for rank in range(1, self.nodes) if rank not in self.peers]
            late = missing or [r for r, p in self.peers.items() if PROCESSES not in p.facts]
            if not late and self.processes is not None:
                return
            late = late or [0]
            names = f"node{'s' * (len(late) > 1)} {', '.join(map(str, late))} of {self.nodes}"
            if self.clock.seconds >= self.wait:
                raise UserError(
                    f"{names} did not connect to {self.there} within {self.wait:g} s: is training "
                    "started there, with this address, and does the firewall let the port through?"
                )
            if self.clock.due:
                what = f"at {self.there} for {names}" if missing else f"until {names} has started"
                text = self.clock.line(f"waiting {what}")
                print(text, flush=True)
                for peer in self.peers.values():
                    peer.send(print=text)
            await self._pause()

    async def _pause(self) -> None:
        """Let messages arrive. Raises: `UserError` if one of them has ended the check."""
        await asyncio.sleep(0.05)
        if self.stop:
            raise UserError(self.stop)

    async def _compare(self) -> list[str]:
        """The nodes' names. Raises: `UserError` with what keeps them from training together."""
        me = self.me | {"address": self.master[0], PROCESSES: self.processes}
        peers = [self.peers[rank] for rank in sorted(self.peers)]
        everyone = {f"{me['host']} (node 0)": me} | {str(peer): peer.facts for peer in peers}
        found = [(name, {key: one.get(key) for key in ALIKE}) for name, one in everyone.items()]
        if different := agreement.unlike(found):
            raise UserError(different)
        for peer in peers:
            if abs(ahead := peer.facts["ahead"]) > CLOCK_LIMIT:
                print(f"note: the clock of {peer} is {ahead:+.0f} s off node 0's", flush=True)
        targets = [(name, facts["address"], facts["ports"]) for name, facts in everyone.items()]
        for peer in peers:
            peer.send(**{"try": targets})
        self.closed = await asyncio.to_thread(try_ports, targets, next(iter(everyone)))
        deadline = time.monotonic() + 60
        while waiting := [peer for peer in peers if "closed" not in peer.facts]:
            for peer in waiting:
                if peer not in self.peers.values() or time.monotonic() > deadline:
                    raise UserError(f"{peer} was lost in the pre-flight check")
            await self._pause()
        self.closed += [way for peer in peers for way in peer.facts["closed"]]
        if self.closed:
            more = f" (and {len(self.closed) - 4} more)" if len(self.closed) > 4 else ""
            raise UserError(
                f"{'; '.join(self.closed[:4])}{more}: gradients travel over ports that the kernel "
                "chooses, so open all TCP ports between the nodes, in both directions"
            )
        return [facts["host"] for facts in everyone.values()]

    # ---- all other nodes

    async def _visit(self) -> None:
        """Connect to node 0 and follow it. Raises: `UserError` with the error that it reports."""
        connection = network.connect(*self.master, self.wait, self._waiting_for_master())
        name, welcome = f"{self.me['host']} (node {self.node})", False
        try:
            link = await self._greet(connection)
            welcome, told = True, asyncio.create_task(self._tell_processes(link))
            while "end" not in (message := await link.receive(LOST)):
                if "print" in message:
                    print(message["print"], flush=True)
                if "try" in message:
                    await told
                    link.send(closed=await asyncio.to_thread(try_ports, message["try"], name))
            if message["end"]:
                raise UserError(message["end"])
        except (OSError, ValueError) as fault:
            if welcome:
                raise UserError(
                    f"lost touch with node 0 at {self.there} in the pre-flight check ({fault}): "
                    "look at what it has printed"
                ) from None
            raise UserError(
                f"what answers at {self.there} is not node 0 of this job ({fault}): does another "
                f"program use this port? If so, choose another {self.names.port} on every node"
            ) from None

    async def _tell_processes(self, link: Link) -> None:
        while self.processes is None:  # until `finish`
            await asyncio.sleep(0.05)
        link.send(**{PROCESSES: self.processes})

    def _waiting_for_master(self) -> Any:
        # The launcher over ssh has reached all nodes and started them together: a master that does
        # not even refuse is not late.
        all_up = os.environ.get(supervise.MARKER, "").startswith("guard")
        answered = 0.0

        def say(reason: str) -> None:
            nonlocal answered
            if "refused" in reason:
                answered = self.clock.seconds
            elif all_up and self.clock.seconds - answered > SILENT:
                raise UserError(
                    f"node 0 is up, but {self.there} does not answer this node ({reason}): open "
                    "all TCP ports between the nodes, in both directions"
                )
            if self.clock.due:
                print(self.clock.line(f"waiting for node 0 at {self.there}: {reason}"), flush=True)

        return say


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
