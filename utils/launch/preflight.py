"""Pre-flight check: the nodes of a job meet before training starts. Standard library only.

torch's own rendezvous is silent for many minutes when a node is missing, and ends in a stack trace
of C++. Here every node prints whom it waits for and since when, and a set-up that cannot work ends
with the same one-line error on every node.

Each node connects once to node 0 on the master port. Messages are JSON objects, one a line. A node
greets with all facts that must be the same everywhere, then does what node 0 says: print a line,
try the others' ports, end.
"""

import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from utils.errors import UserError, report
from utils.launch import agreement, network, supervise

PATIENCE = 10.0  # seconds for an answer
SILENT = 12.0  # seconds without any answer from a master that is known to be up
CLOCK_LIMIT = 60.0  # seconds between two nodes' clocks from which a note says so
PORTS = 2  # tried on each node: a firewall may let one through by chance
LARGEST = 1 << 20  # bytes of a message
NEWCOMERS = 64  # connections that may be about to greet; one more, and the oldest is closed
GREETING = "imagenet preflight check 1"

Message = dict[str, Any]


class Names(NamedTuple):
    """What the user has typed: the options or variables that the messages name."""

    nodes: str = "NODES"
    rank: str = "NODE_RANK"
    port: str = "MASTER_PORT"


class Link:
    """One end of a connection, and what the node at the other end has told."""

    def __init__(self, link: socket.socket):
        link.settimeout(PATIENCE)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):  # the kernel notices a lost machine within half a minute
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.socket, self.rest = link, b""
        self.facts: Message = {}

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, **message: Any) -> None:
        """Send a message; whether the other end is gone shows when it is read from."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message]:
        """The messages that have come. Raises: OSError (closed), ValueError (not one of ours)."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the connection was closed")
        *lines, self.rest = (self.rest + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except RecursionError:
            messages = [None]
        if len(self.rest) > LARGEST or not all(isinstance(one, dict) for one in messages):
            raise ValueError("not a message of the pre-flight check")
        return messages

    def __str__(self) -> str:
        return f"{self.facts['host']} (node {self.facts['rank']})"


class Preflight:
    """The check of one node: of rank ``node`` of ``nodes``; ``master`` is node 0's host and port.

    `begin` it before torch is imported, and `finish` it once the number of processes is known.
    """

    def __init__(self, node: int, nodes: int, master: tuple[str, int], wait: float, names: Names):
        self.node, self.nodes, self.master, self.wait, self.names = node, nodes, master, wait, names
        self.there = f"{master[0]}:{master[1]}"
        self.clock = _Clock(wait)
        self.processes: int | None = None
        self.hosts: list[str] = []  # of all nodes, once they are here
        self.closed: list[str] = []  # in node 0: the ways between nodes that are closed
        self.fault: str | None = None
        self.stopped, self.done = False, threading.Event()

    def begin(self, ends_process: bool = False) -> None:
        """Start to wait for the other nodes. A fault before `finish` may end this process."""
        self.ends_process = ends_process
        threading.Thread(target=self._work, name="preflight", daemon=True).start()

    def finish(self, processes: int) -> None:
        """Return when all nodes are here and agree; this one has so many ``processes``.

        Raises: `UserError`, on every node, when a node does not come in time, ranks or numbers
        contradict each other, nodes differ in code or torch, or ports between them are closed.
        """
        self.processes = processes
        try:
            self.done.wait()
        except KeyboardInterrupt:
            self.stopped = True
            self.done.wait(PATIENCE)
            raise
        if self.fault:
            raise UserError(self.fault)

    def _work(self) -> None:
        try:
            network.resolve(*self.master)
            self._meet()
        except UserError as error:
            self.fault = str(error)
        except Exception as fault:  # in a thread, it would be lost
            self.fault = f"the pre-flight check failed: {fault!r}"
        if self.fault and self.ends_process and self.processes is None:
            code = report(UserError(self.fault))
            sys.stdout.flush()
            os._exit(code)  # the import of torch would take seconds more
        self.done.set()

    def _meet(self) -> None:
        with contextlib.ExitStack() as stack:
            doors = [stack.enter_context(_listen(0)) for _ in range(PORTS)]  # the kernel answers
            me = {
                "greeting": GREETING,
                "rank": self.node,
                "nodes": self.nodes,
                "host": socket.gethostname(),
                "ports": [door.getsockname()[1] for door in doors],
                "time": time.time(),
                "this code": agreement.code(),
                "torch": agreement.release(agreement.torch_version()),
            }
            if self.node == 0:
                self._host(me)
            else:
                self._visit(me)

    # ---- node 0

    def _host(self, me: Message) -> None:
        if not network.is_own(self.master[0]):
            self._tell_the_other_node_0(me)
            raise UserError(
                f"{self.master[0]} is not an address of this machine, {me['host']}: the master's "
                "address must be that of node 0"
            )
        try:
            door = _listen(self.master[1])
        except OSError:
            self._tell_the_other_node_0(me)
            raise UserError(
                f"port {self.master[1]} of {self.master[0]} is taken by another program: choose "
                f"another {self.names.port} on every node"
            ) from None
        peers: dict[int, Link] = {}
        fault: str | None = "node 0 was interrupted"
        with door:
            try:
                self._gather(door, peers, me)
                self._compare(peers, me)
                fault = None
            except UserError as error:
                fault = str(error)
                raise
            finally:
                for peer in peers.values():
                    peer.send(end=fault)
                    peer.socket.close()
        self.hosts = [me["host"], *(peers[rank].facts["host"] for rank in sorted(peers))]
        print(f"all {self.nodes} nodes are here: {', '.join(self.hosts)}", flush=True)

    def _tell_the_other_node_0(self, me: Message) -> None:
        """Let a node 0 that waits at the master port already know of this one."""
        with contextlib.suppress(OSError, ValueError):
            link = Link(socket.create_connection(self.master, timeout=2.0))
            link.send(**me)
            link.socket.settimeout(3.0)
            answer = link.receive()[0]
            if "end" in answer:
                raise UserError(str(answer["end"]))

    def _gather(self, door: socket.socket, peers: dict[int, Link], me: Message) -> None:
        """Let the others in until all are here and ready."""
        newcomers: list[Link] = []
        while (missing := [rank for rank in range(1, self.nodes) if rank not in peers]) or any(
            "processes" not in peer.facts for peer in peers.values()
        ):
            late = missing or [r for r, peer in peers.items() if "processes" not in peer.facts]
            names = f"node{'s' * (len(late) > 1)} {', '.join(map(str, late))} of {self.nodes}"
            if self.clock.seconds >= self.wait:
                raise UserError(
                    f"{names} did not come to {self.there} within {self.wait:g} s: is training "
                    "started there, with this address, and does the firewall let the port through?"
                )
            if self.clock.due:
                what = f"at {self.there} for {names}" if missing else f"until {names} has started"
                text = self.clock.line(f"waiting {what}")
                print(text, flush=True)
                for peer in peers.values():
                    peer.send(print=text)
            for link in self._ready([door, *newcomers, *peers.values()]):
                if link is door:
                    with contextlib.suppress(OSError):
                        newcomers.append(Link(door.accept()[0]))
                    if len(newcomers) > NEWCOMERS:
                        newcomers.pop(0).socket.close()
                    continue
                try:
                    for message in link.receive():
                        if link in newcomers:
                            newcomers.remove(link)
                            self._let_in(link, message, peers, me)
                        else:
                            link.facts.update(message)
                except (OSError, ValueError, TypeError, KeyError, IndexError):
                    link.socket.close()  # a stranger, or a node that has left again
                    if link in newcomers:
                        newcomers.remove(link)
                    elif link.facts and peers.pop(link.facts["rank"], None):
                        print(f"node {link.facts['rank']} ({link.facts['host']}) has left")

    def _ready(self, links: list[Any], patience: float = 0.2) -> Iterator[Any]:
        """Those of ``links`` from which something can be read. Raises: `UserError` on Ctrl-C."""
        if self.stopped:
            raise UserError("node 0 was interrupted")
        yield from select.select(links, [], [], patience)[0]

    def _let_in(self, link: Link, hello: Message, peers: dict[int, Link], me: Message) -> None:
        """Make a peer of a node that has greeted. Raises: `UserError` if it contradicts others."""
        if hello["greeting"] != GREETING:
            raise ValueError("a stranger")
        hello["host"] = _printable(hello["host"])
        hello["address"] = link.socket.getpeername()[0].removeprefix("::ffff:")
        hello["ahead"] = float(hello["time"]) - time.time()
        rank, nodes = int(hello["rank"]), int(hello["nodes"])
        who, fault = f"{hello['host']} ({hello['address']})", ""
        if nodes != self.nodes:
            fault = f"{self.names.nodes} is {self.nodes} on {me['host']} (node 0), but {nodes} on "
            fault += f"{who}: give every node the same"
        elif not 0 <= rank < nodes:
            fault = f"{self.names.rank} {rank} of {who} is not one of 0 to {nodes - 1}"
        elif rank == 0 or rank in peers:
            first = peers[rank] if rank else me["host"]
            fault = f"two nodes have {self.names.rank} {rank}, {first} and {who}: give each its own"
        if fault:
            link.send(end=fault)
            raise UserError(fault)
        link.facts, peers[rank] = hello, link
        link.send(welcome=GREETING)
        print(f"node {rank} ({hello['host']}, {hello['address']}) is here", flush=True)

    def _compare(self, peers: dict[int, Link], me: Message) -> None:
        """Raises: `UserError` with what would keep the nodes from training together."""
        while self.processes is None:  # until this process has imported torch as well
            time.sleep(0.05)
            for _ in self._ready([], 0):
                pass
        me |= {"address": self.master[0], "processes": self.processes}
        everyone = {f"{me['host']} (node 0)": me}
        everyone |= {str(peers[rank]): peers[rank].facts for rank in sorted(peers)}
        alike = {"processes": "number of processes per node", "this code": "", "torch": ""}
        found = [
            (name, {title or key: facts.get(key) for key, title in alike.items()})
            for name, facts in everyone.items()
        ]
        if different := agreement.unlike(found):
            raise UserError(different)
        for peer in peers.values():
            if abs(peer.facts["ahead"]) > CLOCK_LIMIT:
                ahead = peer.facts["ahead"]
                print(f"note: the clock of {peer} is {ahead:+.0f} s off node 0's", flush=True)
        targets = [(name, facts["address"], facts["ports"]) for name, facts in everyone.items()]
        for peer in peers.values():
            peer.send(**{"try": targets})
        closed = try_ports(targets, next(iter(everyone)))
        for peer in peers.values():
            closed += self._answer(peer)
        self.closed = closed
        if closed:
            more = f" (and {len(closed) - 4} more)" if len(closed) > 4 else ""
            raise UserError(
                f"{'; '.join(closed[:4])}{more}: gradients travel over ports that the kernel "
                "chooses, so open all TCP ports between the nodes, in both directions"
            )

    def _answer(self, peer: Link) -> list[str]:
        """The ports that are closed for ``peer``."""
        deadline = time.monotonic() + 60
        try:
            while "closed" not in peer.facts:
                if time.monotonic() > deadline:
                    raise TimeoutError("no answer")
                for _ in self._ready([peer]):
                    for message in peer.receive():
                        peer.facts.update(message)
            return [_printable(one) for one in peer.facts["closed"]]
        except (OSError, ValueError) as fault:
            raise UserError(f"{peer} was lost in the pre-flight check: {fault}") from None

    # ---- all other nodes

    def _visit(self, me: Message) -> None:
        """Find node 0 and do as it says. Raises: `UserError` with the fault that it reports."""
        link = Link(network.connect(*self.master, self.wait, self._say_that_it_waits()))
        link.send(**me)
        name, told, heard, began = (
            f"{me['host']} (node {self.node})",
            False,
            False,
            time.monotonic(),
        )
        try:
            while not self.stopped:
                if self.processes is not None and heard and not told:
                    told = link.send(processes=self.processes) is None
                if not heard and time.monotonic() - began > PATIENCE:
                    raise TimeoutError("no answer")
                if not select.select([link], [], [], 0.2)[0]:
                    continue
                for message in link.receive():
                    heard = True
                    if "print" in message:
                        print(_printable(message["print"]), flush=True)
                    if "try" in message:
                        link.send(closed=try_ports(message["try"], name))
                    if "end" in message:
                        if message["end"]:
                            raise UserError(_printable(message["end"], 2000))
                        return
        except (OSError, ValueError) as fault:
            if heard:
                raise UserError(
                    f"lost touch with node 0 at {self.there} in the pre-flight check ({fault}): "
                    "look at what it has printed"
                ) from None
            raise UserError(
                f"what answers at {self.there} is not node 0 of this job ({fault}): does another "
                f"program use this port? If so, choose another {self.names.port} on every node"
            ) from None
        finally:
            link.socket.close()

    def _say_that_it_waits(self) -> Any:
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


class _Clock:
    """Prints what is waited for after 1 s, then every 5 s, after a minute every 15 s."""

    def __init__(self, limit: float):
        self.limit, self.began, self.next = limit, time.monotonic(), 1.0

    @property
    def seconds(self) -> float:
        """Since the waiting began."""
        return time.monotonic() - self.began

    @property
    def due(self) -> bool:
        """Whether a line is due; true once for each."""
        if self.seconds < self.next:
            return False
        self.next = self.seconds + (5 if self.seconds < 60 else 15)
        return True

    def line(self, text: str) -> str:
        """``text`` with the seconds so far and their limit."""
        return f"{text} ({self.seconds:.0f} s, at most {self.limit:g})"


def _printable(text: object, most: int = 500) -> str:
    return "".join(letter for letter in str(text)[:most] if letter.isprintable())


def _listen(number: int) -> socket.socket:
    """A listening socket on all addresses, IPv6 included where the machine has it."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", number), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        except OSError as fault:
            if "in use" in str(fault):
                raise
    return socket.create_server(("", number), backlog=1024)


def try_ports(targets: list[tuple[str, str, list[int]]], me: str) -> list[str]:
    """Connect from ``me`` to the others' ports: (name, address, ports). Returns: what is closed."""

    def closed(way: tuple[str, str, int]) -> str | None:
        name, address, number = way
        try:
            socket.create_connection((address, number), timeout=2.0).close()
        except OSError as fault:
            reason = network.reason(fault)
            return f"{me} cannot connect to {name} at {address}, port {number} ({reason})"
        return None

    ways = [(to, at, number) for to, at, ports in targets if to != me for number in ports[:PORTS]]
    with ThreadPoolExecutor(32) as pool:
        return list(filter(None, pool.map(closed, ways)))
