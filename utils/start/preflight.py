"""The pre-flight check: the nodes of a job meet before training and compare their set-up.

- Used with ``--nodes`` or WORLD_SIZE, if several nodes are started by hand or by the
  wrappers, and by scripts/elastic_train.sh, doctor.py and train_on_nodes.sh.
- Interface: `meet` and `find_master`. The wrappers call `main`.

Each node connects to the master port of node 0 and sends its facts. Then it does what node 0 asks:
print a line, connect to the ports of the others, end. Messages are JSON objects, one per line.
"""

import argparse
import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO

from utils.start import errors, known_errors
from utils.start.addresses import (
    address_towards,
    interface_towards,
    is_own,
    parse_tcp_url,
    port_in_use,
    resolve,
)
from utils.start.agreement import PROCESSES, code, describe_mismatch, release
from utils.start.errors import UserError, printable
from utils.start.option_types import count, positive, seconds
from utils.start.orphans import die_with_launcher

PATIENCE = 10.0  # seconds to wait for an answer
LOST = 90.0  # seconds to wait for a message from node 0, which sends one every 15 s while it waits
SILENT = 12.0  # seconds to wait for a master that is known to be running
PORTS = 2  # ports to try on each node: one alone may be open in the firewall by chance
TRIES, TRY_SECONDS = 32, 2.0  # parallel connection attempts of a node, and their timeout
LONGEST = 2**20  # maximum size of a message, bytes
FAILED = "failed"  # fact of a node that cannot train: why
NODES = "number of nodes (--nodes, WORLD_SIZE or NODES)"
SAME_PORT = "port (--dist-url or MASTER_PORT)"
OPEN_PORTS = "open all TCP ports between the nodes, in both directions"

Facts = dict[str, Any]


def meet(
    rank: int,
    nodes: int,
    processes: int,
    master: tuple[str, int],
    wait: float,
    failed: UserError | None = None,
) -> None:
    """Return when all ``nodes`` have joined and agree. This is node ``rank``, with ``processes``.

    ``master`` is node 0's host and port. Raises: `UserError` on every node if a node does not join
    within ``wait`` seconds, if ranks or counts contradict each other, if nodes differ in code or
    torch version, or if ports between them are closed. ``failed``: why this node cannot train. The
    others, and this one, then end with this error.
    """
    import importlib.metadata  # not at the top: it takes longer than the rest of a script's start

    host, is_here = socket.gethostname(), is_own(master[0])
    agree = {PROCESSES: processes, "this code": code()}
    try:
        agree["torch"] = release(importlib.metadata.version("torch"))
    except ModuleNotFoundError as error:
        raise known_errors.explain(error) or error from None
    me: Facts = {"rank": rank, "nodes": nodes, "host": host, "name": f"{host} (node {rank})"}
    me["agree"] = agree
    instead, more = failed, {FAILED: str(failed)} if failed else {}
    with contextlib.ExitStack() as stack:
        doors = [stack.enter_context(_listen(0)) for _ in range(PORTS)]  # the kernel answers
        me["ports"] = [door.getsockname()[1] for door in doors]
        if rank and is_here:
            say(f"note: {master[0]} is this machine: does node 0 run here, too?")
        elif rank == 0 and not is_here:
            text = f"{master[0]} is not an address of this machine, {host}: the master's address "
            instead = failed or UserError(text + "must be that of node 0")
        elif rank == 0:
            try:
                server = stack.enter_context(_listen(master[1]))
                # Without shutdown, a thread that waits in accept() keeps the port open.
                stack.callback(server.shutdown, socket.SHUT_RDWR)
            except OSError:
                instead = failed or port_in_use(*master, SAME_PORT)
            else:
                leader = Leader(me, master, server)
                leader.nodes[0] |= more
                leader.lead(Clock(wait))
                return
        follow(me | more, master, wait if failed or not instead else 1.0, instead)


class Clock:
    """Measures how long a wait takes, which ends after ``limit`` seconds."""

    def __init__(self, limit: float):
        self.limit, self.began, self.next = limit, time.monotonic(), 1.0

    @property
    def seconds(self) -> float:
        """The seconds since the wait began."""
        return time.monotonic() - self.began

    def line(self, text: str) -> str | None:
        """Return ``text`` with the times if a line is due: after 1 s, then every 5 or 15 s."""
        now = self.seconds
        if now < self.next:
            return None
        self.next = now + (5 if now < 60 else 15)
        return f"{text} ({now:.0f} s, at most {self.limit:g})"


def say(text: object, file: TextIO | None = None) -> None:
    """Print a line safely: another machine may have sent it."""
    print(printable(str(text)), file=file, flush=True)


def send(connection: socket.socket, **message: Any) -> None:
    """Send a message. Ignore a closed connection: the next read from it reports that."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def receive(file: Any) -> Facts:
    """Read a message from a socket's file. Raises: OSError (closed, no answer), ValueError."""
    if not (line := file.readline(LONGEST)):
        raise ConnectionError("the connection was closed")
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError, RecursionError):
        raise ValueError("it sends unknown messages") from None


class Leader:
    """Node 0, to which all other nodes connect. One thread per connection fills a queue."""

    def __init__(self, me: Facts, master: tuple[str, int], server: socket.socket):
        self.there = f"{master[0]}:{master[1]}"
        self.kinds = {key: type(value) for key, value in me.items()}  # types of a node's facts
        # Use the master's address for node 0: its own view of it may not work on other nodes.
        self.nodes: dict[int, Facts] = {0: me | {"address": master[0]}}  # joined nodes, by rank
        self.sent: queue.SimpleQueue[tuple[Facts, Facts | None]] = queue.SimpleQueue()
        threading.Thread(target=self._accept, args=(server,), daemon=True).start()

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the check is over
            while True:
                threading.Thread(target=self._read, args=server.accept(), daemon=True).start()

    def _read(self, connection: socket.socket, address: tuple) -> None:
        """Queue a node's messages, and None when it leaves. Ignore other programs."""
        node: Facts = {"connection": connection, "address": address[0].removeprefix("::ffff:")}
        with (
            connection,
            connection.makefile("rb") as file,
            contextlib.suppress(OSError, ValueError),
        ):
            message = receive(file)
            while {key: type(message.get(key)) for key in self.kinds} == self.kinds:
                self.sent.put((node, message | node))
                message = receive(file)
        self.sent.put((node, None))

    def lead(self, clock: Clock) -> None:
        """Run the check with all nodes and send them the result. Raises: `UserError`."""
        end: str | None = "node 0 was interrupted"
        try:
            self._gather(clock)
            self._compare([self.nodes[rank] for rank in sorted(self.nodes)])
            end = None
        except UserError as error:
            end = str(error)
            raise
        finally:
            self._tell_all(end=end)

    def _tell_all(self, **message: Any) -> None:
        for node in self.nodes.values():
            if "connection" in node:
                send(node["connection"], **message)
        if "print" in message:
            say(message["print"])

    def _step(self) -> None:
        """Process one message, if there is one. Raises: `UserError` if nodes contradict."""
        try:
            node, message = self.sent.get(timeout=0.05)
        except queue.Empty:
            return
        node.update(message or {})
        rank: int = node.get("rank", -1)  # -1: it left before it sent its facts
        if self.nodes.get(rank) is node:
            if message is None:
                del self.nodes[rank]
                say(f"{node['name']} has left")
        elif message is not None:
            pair = [(one["name"], {NODES: one["nodes"]}) for one in (self.nodes[0], node)]
            if not (text := describe_mismatch(pair)) and (other := self.nodes.get(rank)):
                text = (
                    f"two nodes have rank {rank} (--node-rank or NODE_RANK), {other['host']} and "
                )
                text += f"{node['host']} ({node['address']}): give each its own"
            if text:
                send(node["connection"], end=text)
                raise UserError(text)
            self.nodes[rank] = node
            send(node["connection"])  # welcome
            say(f"{node['name']} has joined from {node['address']}")

    def _gather(self, clock: Clock) -> None:
        """Wait until all nodes have joined, or one has failed. Raises: `UserError`."""
        total = self.nodes[0]["nodes"]
        while missing := [str(rank) for rank in range(total) if rank not in self.nodes]:
            is_over = clock.seconds >= clock.limit
            if (failed := self._failures()) and (is_over or FAILED not in self.nodes[0]):
                break  # if this node has failed, the others have to join to hear of it
            names = f"node{'s' * (len(missing) > 1)} {', '.join(missing)} of {total}"
            if is_over:
                raise UserError(
                    f"{names} did not connect to {self.there} within {clock.limit:g} s: is "
                    "training started there, with this address, and does the firewall let the "
                    "port through?"
                )
            if line := clock.line(f"waiting at {self.there} for {names}"):
                self._tell_all(print=line)
            self._step()
        if failed := self._failures():
            raise UserError(failed[0])

    def _failures(self) -> list[str]:
        return [f"{one['name']}: {one[FAILED]}" for one in self.nodes.values() if FAILED in one]

    def _compare(self, everyone: list[Facts]) -> None:
        """Compare the nodes and try their ports. Raises: `UserError` if they cannot train."""
        if mismatch := describe_mismatch([(node["name"], node["agree"]) for node in everyone]):
            raise UserError(mismatch)
        targets = [(node["name"], node["address"], node["ports"]) for node in everyone]
        self._tell_all(connect=targets)
        deadline = time.monotonic() + PATIENCE + TRY_SECONDS * PORTS * len(everyone) / TRIES
        everyone[0]["closed"] = try_ports(targets, everyone[0]["name"])
        while waiting := [one for one in everyone if not isinstance(one.get("closed"), list)]:
            if waiting[0]["rank"] not in self.nodes or time.monotonic() > deadline:
                raise UserError(
                    f"{waiting[0]['name']} was lost in the pre-flight check: look at what it has "
                    "printed, then start all nodes again"
                )
            self._step()
        if closed := [str(text) for node in everyone for text in node["closed"]]:
            more = f" (and {len(closed) - 4} more)" if len(closed) > 4 else ""
            why = "gradients travel over ports that the kernel chooses"
            raise UserError(f"{'; '.join(closed[:4])}{more}: {why}, so {OPEN_PORTS}")
        hosts = ", ".join(node["host"] for node in everyone)
        self._tell_all(print=f"all {len(everyone)} nodes are here: {hosts}")


def follow(me: Facts, master: tuple[str, int], wait: float, instead: UserError | None) -> None:
    """Connect to node 0 and do what it asks. Raises: `UserError` with the error that it reports.

    ``instead``: why this node, which has rank 0, cannot be node 0. It still connects, so that a
    process that acts as node 0 there ends as well, and then raises ``instead``.
    """
    there = f"{master[0]}:{master[1]}"
    text = f"what answers at {there} is not node 0 of this job ({{}}): is it a training that has "
    text += f"begun? Otherwise choose another {SAME_PORT} on every node"
    try:
        connection = connect(*master, wait, sys.stdout)
        with connection, connection.makefile("rb") as file:
            connection.settimeout(PATIENCE)
            send(connection, **me)
            while "end" not in (message := receive(file)):
                connection.settimeout(LOST)
                text = f"lost touch with node 0 at {there} in the pre-flight check ({{}}): look at "
                text += "what it has printed"
                if "print" in message:
                    say(message["print"])
                if "connect" in message:
                    me["closed"] = try_ports(message["connect"], me["name"])
                    send(connection, **me)
    except (OSError, ValueError) as error:
        raise instead or UserError(text.format(reason(error))) from None
    except UserError as error:
        raise instead or error from None
    if message["end"]:
        raise UserError(str(message["end"]))


def try_ports(targets: list[tuple[str, str, list[int]]], me: str) -> list[str]:
    """Connect to each target (name, address, ports) except ``me``. Returns: error messages."""

    def closed(way: tuple[str, str, int]) -> str | None:
        name, address, port = way
        try:
            socket.create_connection((address, port), timeout=TRY_SECONDS).close()
        except OSError as error:
            why = reason(error)
            return f"{me} cannot connect to {name} at {address}, port {port} ({why})"
        return None

    ways = [(to, at, port) for to, at, ports in targets if to != me for port in ports[:PORTS]]
    with ThreadPoolExecutor(TRIES) as pool:
        return list(filter(None, pool.map(closed, ways)))


# ---- connections


def _listen(port: int) -> socket.socket:
    """Return a socket that listens on all addresses, including IPv6 if the machine has it."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), backlog=1024, family=family, dualstack_ipv6=dual)


def connect(host: str, port: int, limit: float, out: TextIO | None = None) -> socket.socket:
    """Connect to the master; retry for at most ``limit`` seconds.

    Prints to ``out`` while it waits. Raises: `UserError` if the host is unknown or does not answer.
    """
    resolve(host)
    clock, answered, master = Clock(limit), 0.0, f"the master {host}:{port}"
    # The ssh launcher has reached all nodes and started them together. So a master that does not
    # even refuse a connection is unreachable, not late.
    patience = SILENT if "IMAGENET_ALL_UP" in os.environ else limit
    while True:
        try:
            return socket.create_connection((host, port), timeout=2.0)
        except OSError as error:
            why = reason(error)
        answered = clock.seconds if "refused" in why else answered
        if clock.seconds >= limit or clock.seconds - answered >= patience:
            raise UserError(
                f"{master} cannot be reached after {clock.seconds:.0f} s ({why}): is node 0 "
                "started, is the address right, is the port open in the firewall?"
            )
        if out and (line := clock.line(f"waiting for {master}: {why}")):
            say(line, out)
        time.sleep(0.2)


def reason(error: Exception) -> str:
    """Return in a few words why a connection failed."""
    if isinstance(error, TimeoutError):
        return "no answer"
    return (getattr(error, "strerror", None) or str(error)).lower()


def find_master(rank: int, nodes: int, master: tuple[str, int], seconds: float) -> None:
    """Choose the network interfaces of gloo and NCCL, and wait for the master's port.

    By default, gloo looks up this host's own name, which often gives 127.0.1.1 or nothing, and NCCL
    may choose Docker's bridge. Use the interface towards the master ("=": exact name, no prefix).
    """
    if interface := interface_towards(master[0]) if nodes > 1 else "lo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if nodes > 1:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    if rank != 0:
        connect(*master, seconds).close()


# ---- commands


def rendezvous(master: str) -> str:
    """Return this node's address and whether it is ``master`` (HOST:PORT), as "10.0.0.1 false".

    For scripts/elastic_train.sh. On other nodes, wait until the master answers, and print to
    stderr meanwhile. Raises: `UserError`.
    """
    host, port = parse_tcp_url(f"tcp://{master}", "MASTER_ADDR:MASTER_PORT")
    here, address = is_own(host), address_towards(host)
    if address is None:
        why = "give that machine's IPv4 address" if ":" in host else "is the link up?"
        raise UserError(f"no IPv4 route from here to MASTER_ADDR={host}: {why}")
    try:
        (socket.create_server(("", port)) if here else connect(host, port, 300, sys.stderr)).close()
    except OSError:
        raise port_in_use(host, port, "MASTER_PORT") from None
    return f"{address} {str(here).lower()}"


def main() -> int:
    """Run the check or `rendezvous`. Exit codes: 0; 2 with one error line; 130 after Ctrl-C."""
    die_with_launcher()
    words = sys.argv[1:]
    if words[:1] == ["rendezvous"] and len(words) == 2:
        print(rendezvous(words[1]))
        return 0
    try:
        kinds = (count, positive, positive)
        rank, nodes, processes = (kind(word) for kind, word in zip(kinds, words[:3], strict=True))
        master = parse_tcp_url(f"tcp://{words[3]}", "HOST:PORT")
    except (ValueError, IndexError, argparse.ArgumentTypeError):
        how = "python -m utils.start.preflight NODE_RANK NODES PROCESSES HOST:PORT [SECONDS]"
        raise UserError(f"usage: {how}") from None
    try:
        wait = seconds(words[4]) if len(words) > 4 else 300.0
    except (ValueError, argparse.ArgumentTypeError):
        text = f"--dist-timeout {words[4]} is not a number of seconds, at least 1"
        raise UserError(text) from None
    meet(rank, nodes, processes, master, wait)
    return 0


if __name__ == "__main__":
    errors.exit_with(main)  # at once: threads may still be printing
