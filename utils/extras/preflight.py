"""The pre-flight check: the nodes of a job meet before training. Standard library only.

- Used by several nodes that are started by hand or by the wrappers (``--world-size``, WORLD_SIZE),
  and by scripts/elastic_train.sh, doctor.py and train_on_nodes.sh.
- Interface: `meet`, which `utils.launch` calls, through addons.py, before it starts processes; and
  two commands, of which the wrappers run the first one before torchrun:

      python -m utils.extras.preflight NODE_RANK NODES PROCESSES HOST:PORT [SECONDS]
      python -m utils.extras.preflight rendezvous HOST:PORT

- Without this file, torch waits for missing nodes, silently, and ends with a stack trace of C++;
  the three scripts do not start.

Every node prints which nodes are missing and since when, and a set-up that cannot work ends with
the same one-line error on every node. Each node connects once to the master port of node 0.
Messages are JSON objects, one a line. A node sends all facts that must be the same everywhere, then
follows node 0's messages: print a line, connect to the ports of the others, end.
"""

import argparse
import importlib.metadata
import json
import os
import selectors
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

from utils import launch, network
from utils.errors import UserError, printable
from utils.option_types import count, positive, seconds

PATIENCE = 10.0  # seconds for an answer
LOST = 90.0  # seconds without a message from node 0, which sends one every 15 s while it waits
SILENT = 12.0  # seconds without an answer from a master that is known to be up
PORTS = 2  # tried on each node: a firewall may let one through by chance
TRIES, TRY_SECONDS = 32, 2.0  # connections that a node tries at once, and for how long
LONGEST = 2**20  # bytes of a message
GREETING = "imagenet preflight check"
PROCESSES = "number of processes per node"
MUST_AGREE = (PROCESSES, "this code", "torch")  # facts that must be the same on all nodes
KINDS = {"rank": int, "nodes": int, "host": str, "ports": list}  # of the facts that a node sends
KINDS |= {PROCESSES: int, "this code": dict, "torch": str}
SAME_PORT = "port (--dist-url or MASTER_PORT)"

Facts = dict[str, Any]


def meet(rank: int, nodes: int, processes: int, master: tuple[str, int], wait: float) -> None:
    """Return when all ``nodes`` are here and agree; this is node ``rank``, with ``processes``.

    ``master`` is node 0's host and port. Raises: `UserError`, on every node, when a node does not
    come within ``wait`` seconds, ranks or numbers contradict each other, nodes differ in code or
    torch, or ports between them are closed.
    """
    with ExitStack() as stack:
        doors = [stack.enter_context(_listen(0)) for _ in range(PORTS)]  # the kernel answers
        me: Facts = {
            "greeting": GREETING,
            "rank": rank,
            "nodes": nodes,
            "host": socket.gethostname(),
            "ports": [door.getsockname()[1] for door in doors],
            PROCESSES: processes,
            "this code": network.code(),
            "torch": network.release(importlib.metadata.version("torch")),
        }
        if rank == 0:
            try:
                server = stack.enter_context(_open(*master))
            except UserError as fault:
                follow(me, master, 1.0, fault)  # another node 0 may be there, which has to end, too
                raise
            Leader(me, master, wait, server).lead()
        else:
            if is_own(master[0]):
                say(f"note: {master[0]} is this machine: does node 0 run here, too?")
            follow(me, master, wait)


def _open(host: str, port: int) -> socket.socket:
    """Listen at the master port. Raises: `UserError` if that is impossible."""
    if not is_own(host):
        here = socket.gethostname()
        text = f"{host} is not an address of this machine, {here}: the master's address must be "
        raise UserError(text + "that of node 0")
    try:
        return _listen(port)
    except OSError:
        raise UserError(network.taken(host, port, SAME_PORT)) from None


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


class Link:
    """One end of a connection, and the facts that the node at the other end has sent."""

    def __init__(self, connection: socket.socket):
        self.connection, self.received = connection, b""
        self.facts: Facts = {}

    def send(self, **message: Any) -> None:
        """Send a message; if the other end is gone, `read` fails."""
        with suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> Facts | None:
        """The next message, or None while it is not complete.

        Raises: OSError (closed, no answer), ValueError (not a message).
        """
        if b"\n" not in self.received:
            more = self.connection.recv(2**16)
            if not more:
                raise ConnectionError("the connection was closed")
            self.received += more
        line, newline, rest = self.received.partition(b"\n")
        if not newline and len(line) < LONGEST:
            return None
        self.received = rest
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            raise ValueError("it sends other messages") from None


class Leader:
    """Node 0, which all others connect to."""

    def __init__(self, me: Facts, master: tuple[str, int], wait: float, server: socket.socket):
        self.nodes, self.there, self.clock = me["nodes"], f"{master[0]}:{master[1]}", Clock(wait)
        # Node 0 may know itself by an address at which nobody else reaches it.
        self.facts: dict[int, Facts] = {0: me | {"address": master[0]}}  # of all nodes, by rank
        self.links: dict[int, Link] = {}  # to the others
        self.server, self.selector = server, selectors.DefaultSelector()
        self.selector.register(server, selectors.EVENT_READ)

    def lead(self) -> None:
        """Lead all nodes through the check, and tell them how it ends. Raises: `UserError`."""
        end: str | None = "node 0 was interrupted"
        try:
            self._gather()
            self._compare()
            end = None
        except UserError as error:
            end = str(error)
            raise
        finally:
            self._tell_all(end=end)
            self.selector.close()

    def _tell_all(self, **message: Any) -> None:
        if message.get("print"):
            say(message["print"])
        for link in self.links.values():
            link.send(**message)

    def _gather(self) -> None:
        """Wait until all nodes are here."""
        while missing := [rank for rank in range(self.nodes) if rank not in self.facts]:
            names = f"node{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.nodes}"
            if self.clock.seconds >= self.clock.limit:
                raise UserError(
                    f"{names} did not connect to {self.there} within {self.clock.limit:g} s: is "
                    "training started there, with this address, and does the firewall let the "
                    "port through?"
                )
            if line := self.clock.line(f"waiting at {self.there} for {names}"):
                self._tell_all(print=line)
            self._listen()

    def _listen(self) -> None:
        """Let connections and messages come. Raises: `UserError` if one of them ends the check."""
        for key, _ in self.selector.select(0.2):
            if key.fileobj is self.server:
                link = Link(self.server.accept()[0])
                self.selector.register(link.connection, selectors.EVENT_READ, link)
                continue
            link = key.data
            try:
                if message := link.read():
                    link.facts.update(message) if link.facts else self._let_in(message, link)
            except (OSError, ValueError):  # another program, or a node that has left again
                self.selector.unregister(link.connection)
                link.connection.close()
                if link in self.links.values():
                    rank = link.facts["rank"]
                    del self.links[rank], self.facts[rank]
                    say(f"node {rank} ({link.facts['host']}) has left")

    def _let_in(self, hello: Facts, link: Link) -> None:
        """Add a node that has sent its facts. Raises: `UserError` if they contradict others'."""
        kinds = {name: type(hello.get(name)) for name in KINDS}
        if hello.get("greeting") != GREETING or kinds != KINDS:
            raise ValueError("not a node")
        rank, host = hello["rank"], hello["host"]
        address = link.connection.getpeername()[0].removeprefix("::ffff:")
        fault = ""
        if hello["nodes"] != self.nodes:
            fault = f"the number of nodes (--world-size, WORLD_SIZE or NODES) is {self.nodes} on "
            fault += f"{self.facts[0]['host']} (node 0), but {hello['nodes']} on {host} "
            fault += f"({address}): give every node the same"
        elif rank in self.facts:
            fault = f"two nodes have rank {rank} (--rank or NODE_RANK), "
            fault += f"{self.facts[rank]['host']} and {host} ({address}): give each its own"
        if fault:
            link.send(end=fault)
            raise UserError(fault)
        link.facts = hello | {"address": address}
        self.links[rank], self.facts[rank] = link, link.facts
        link.send(welcome=True)
        say(f"node {rank} ({host}, {address}) is here")

    def _compare(self) -> None:
        """Raises: `UserError` with what keeps the nodes from training together."""
        everyone = [self.facts[rank] for rank in range(self.nodes)]
        names = [f"{facts['host']} (node {rank})" for rank, facts in enumerate(everyone)]
        alike = [{key: facts[key] for key in MUST_AGREE} for facts in everyone]
        if different := network.describe_mismatch(list(zip(names, alike, strict=True))):
            raise UserError(different)
        targets = [
            (name, facts["address"], facts["ports"][:PORTS])
            for name, facts in zip(names, everyone, strict=True)
        ]
        self._tell_all(connect=targets)
        deadline = time.monotonic() + PATIENCE + TRY_SECONDS * PORTS * self.nodes / TRIES
        everyone[0]["closed"] = try_ports(targets, names[0])
        while waiting := [rank for rank, facts in enumerate(everyone) if "closed" not in facts]:
            if waiting[0] not in self.facts or time.monotonic() > deadline:
                raise UserError(f"{names[waiting[0]]} was lost in the pre-flight check")
            self._listen()
        if closed := [str(way) for facts in everyone for way in facts["closed"]]:
            more = f" (and {len(closed) - 4} more)" if len(closed) > 4 else ""
            raise UserError(
                f"{'; '.join(closed[:4])}{more}: gradients travel over ports that the kernel "
                "chooses, so open all TCP ports between the nodes, in both directions"
            )
        hosts = ", ".join(facts["host"] for facts in everyone)
        self._tell_all(print=f"all {self.nodes} nodes are here: {hosts}")


def follow(me: Facts, master: tuple[str, int], wait: float, fault: UserError | None = None) -> None:
    """Connect to node 0 and follow it. Raises: `UserError` with the error that it reports.

    A node that cannot be node 0 because of ``fault`` ends with that, if not with another error.
    """
    there, clock, refused, link, message = f"{master[0]}:{master[1]}", Clock(wait), 0.0, None, {}
    # The launcher over ssh has reached all nodes and started them together: a master that does not
    # even refuse is not late.
    all_up = "IMAGENET_ALL_UP" in os.environ

    def waiting(reason: str) -> None:
        nonlocal refused
        if "refused" in reason:
            refused = clock.seconds
        elif all_up and clock.seconds - refused > SILENT:
            raise UserError(
                f"node 0 is up, but {there} does not answer this node ({reason}): open all TCP "
                "ports between the nodes, in both directions"
            )
        if line := clock.line(f"waiting for node 0 at {there}: {reason}"):
            say(line)

    welcome = False
    try:
        link = Link(network.connect(*master, wait, waiting))
        link.connection.settimeout(PATIENCE)
        link.send(**me)
        while "end" not in message:
            message = link.read() or {}
            if "welcome" in message:
                welcome = True
                link.connection.settimeout(LOST)
            if "print" in message:
                say(message["print"])
            if "connect" in message:
                name = f"{me['host']} (node {me['rank']})"
                link.send(closed=try_ports(message["connect"], name))
    except (OSError, ValueError, UserError) as problem:
        if fault or isinstance(problem, UserError):
            raise fault or problem from None
        why = "no answer" if isinstance(problem, TimeoutError) else str(problem)
        if welcome:
            text = f"lost touch with node 0 at {there} in the pre-flight check ({why}): look at "
            raise UserError(text + "what it has printed") from None
        raise UserError(
            f"what answers at {there} is not node 0 of this job ({why}): does another program use "
            f"this port? If so, choose another {SAME_PORT} on every node"
        ) from None
    if message["end"]:
        raise UserError(str(message["end"]))


def say(text: object) -> None:
    """Print a line, which another machine may have sent."""
    print(printable(str(text)), flush=True)


def is_own(host: str) -> bool:
    """Whether ``host`` (a name, IPv4 or IPv6) is this machine. Raises: `UserError` if unknown."""
    for family, kind, protocol, _, address in network.resolve(host):
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def _listen(port: int) -> socket.socket:
    """A listening socket on all addresses, IPv6 included where the machine has it."""
    more: dict[str, Any] = {"backlog": 1024}
    if socket.has_dualstack_ipv6():
        more |= {"family": socket.AF_INET6, "dualstack_ipv6": True}
    return socket.create_server(("", port), **more)


def try_ports(targets: list[tuple[str, str, list[int]]], me: str) -> list[str]:
    """Connect from ``me`` to the others' ports: (name, address, ports). Returns: what is closed."""

    def closed(way: tuple[str, str, int]) -> str | None:
        name, address, port = way
        try:
            socket.create_connection((address, port), timeout=TRY_SECONDS).close()
        except OSError as fault:
            reason = network.reason(fault)
            return f"{me} cannot connect to {name} at {address}, port {port} ({reason})"
        return None

    ways = [(to, at, port) for to, at, ports in targets if to != me for port in ports]
    with ThreadPoolExecutor(TRIES) as pool:
        return list(filter(None, pool.map(closed, ways)))


def rendezvous(master: str) -> str:
    """For scripts/elastic_train.sh: this node's address, and whether it is ``master`` (HOST:PORT).

    As "10.0.0.1 false". On another node than the master, returns once that answers; prints that it
    waits on stderr. Raises: `UserError`.
    """
    host, _, number = master.rpartition(":")
    here, address, clock = is_own(host), network.address_towards(host), Clock(300.0)
    if address is None:
        raise UserError(f"no route from here to MASTER_ADDR={host}: is the link up?")
    if here:
        try:
            socket.create_server(("", int(number))).close()
        except OSError:
            raise UserError(network.taken(host, int(number), "MASTER_PORT")) from None
        return f"{address} true"

    def waiting(why: str) -> None:
        if line := clock.line(f"waiting for {master}: {why}"):
            print(line, file=sys.stderr, flush=True)

    network.connect(host, int(number), clock.limit, waiting).close()
    return f"{address} false"


def main() -> int:
    """Run the check, or answer `rendezvous`. Exit codes: 0; 2 with one error line; 130: Ctrl-C."""
    launch.die_with_launcher()
    words = sys.argv[1:]
    if words[:1] == ["rendezvous"] and len(words) == 2:
        network.parse_tcp_url(f"tcp://{words[1]}")
        print(rendezvous(words[1]))
        return 0
    try:
        kinds = (count, positive, positive, lambda text: network.parse_tcp_url(f"tcp://{text}"))
        rank, nodes, processes, master = (
            kind(word) for kind, word in zip(kinds, words[:4], strict=True)
        )
        wait = seconds(words[4]) if len(words) == 5 else 300.0
    except (ValueError, argparse.ArgumentTypeError):
        how = (
            "usage: python -m utils.extras.preflight NODE_RANK NODES PROCESSES HOST:PORT [SECONDS]"
        )
        raise UserError(how) from None
    meet(rank, nodes, processes, master, wait)
    return 0


if __name__ == "__main__":
    launch.run_main(main)
