"""The pre-flight check: the nodes of a job meet before training and compare their set-up.

- Used with ``--nodes`` or WORLD_SIZE, if several nodes are started by hand or by the
  wrappers, and by scripts/elastic_train.sh, doctor.py and train_on_nodes.sh.
- Interface: `meet`, `find_master`, `compare_processes` and `compare_data`. The wrappers call
  `main`.

Each node connects to the master port of node 0 and sends its facts. Then it does what node 0 asks:
print a line, connect to the ports of the others, end. Messages are JSON objects, one per line.
"""

import argparse
import contextlib
import fcntl
import json
import os
import queue
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TextIO

from utils.start import errors, known_errors
from utils.start.addresses import parse_tcp_url, port_in_use
from utils.start.errors import ROOT, UserError, printable
from utils.start.option_types import Options, count, positive, seconds
from utils.start.orphans import die_with_launcher

PATIENCE = 10.0  # seconds to wait for an answer
LOST = 90.0  # seconds to wait for a message from node 0, which sends one every 15 s while it waits
SILENT = 12.0  # seconds to wait for a master that is known to be running
PORTS = 2  # ports to try on each node: one alone may be open in the firewall by chance
TRIES, TRY_SECONDS = 32, 2.0  # parallel connection attempts of a node, and their timeout
LONGEST = 2**20  # maximum size of a message, bytes
FAILED = "failed"  # fact of a node that cannot train: why
SIZES = 1000  # files whose sizes are compared
PROCESSES = "number of processes per node"
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
    text = f"what answers at {there} is not node 0 of this job ({{}}): does another program use "
    text += f"this port? If so, choose another {SAME_PORT} on every node"
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


# ---- addresses and interfaces


def _listen(port: int) -> socket.socket:
    """Return a socket that listens on all addresses, including IPv6 if the machine has it."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), backlog=1024, family=family, dualstack_ipv6=dual)


def resolve(host: str) -> list[tuple]:
    """Return `socket.getaddrinfo` of the master's name. Raises: `UserError` if it is unknown."""
    try:
        return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the latter for 172.31..10, which has an empty part
        why = getattr(error, "strerror", None) or "it is no valid name"
        text = f"the master's name {host} cannot be resolved ({why}): use its IP"
        raise UserError(text) from None


def is_own(host: str) -> bool:
    """Whether ``host`` (a name, IPv4 or IPv6) is this machine. Raises: `UserError` if unknown."""
    for family, kind, protocol, _, address in resolve(host):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def address_towards(host: str) -> str | None:
    """Return this machine's IPv4 address as seen by ``host``; None if no route, or IPv6."""
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with contextlib.suppress(OSError, UnicodeError), udp as probe:
        probe.connect((host, 9))  # UDP: this looks up the route and sends nothing
        return probe.getsockname()[0]
    return None


def interface_towards(host: str) -> str | None:
    """Return the name of the network interface towards ``host``; None if unknown (IPv6).

    On the master itself, this is the interface that the others use to reach it, not the loopback.
    """
    own = address_towards(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR of ioctl(2)
                if socket.inet_ntoa(answer[20:24]) == own:
                    return name
    return None


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


# ---- facts that must be the same on all nodes


PREPROCESSING = "the preprocessing that --pretrained FILE states"
REMEDY = {
    "the command line": "use the same options on every node",
    PREPROCESSING: "use the same file on every node",
    "the training script": "start the same script on every node",
    "this code": "copy it to every node again, and remove files that should be missing",
    "torch": "install the same version on every node",
    "NCCL": "install the same version on every node",
}
# Options that may differ between nodes: paths, output, choices that affect one process only, and
# the node's hardware. All others must be the same on every node.
_MAY_DIFFER = """data classes name output_dir store recipe
    workers print_freq profile spot_notice tracker memory_format
    snapshot_minutes train_time dist_url dist_timeout dist_backend gpus
    nodes node_rank local_rank preprocessing given_preprocessing defaulted_sizes
    epoch_sizes"""
MAY_DIFFER = frozenset(_MAY_DIFFER.split())
PATHS = {"resume", "pretrained"}  # paths may differ, but all nodes or none must have the option


class Group(Protocol):
    """The processes of a job, as one of them sees them: see `utils.start.world.World`."""

    @property
    def is_main(self) -> bool: ...
    @property
    def nodes(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def node_name(self) -> str: ...
    def gather(self, value: Any) -> list[Any]: ...


def compare_processes(
    args: Options, world: Group, versions: Mapping[str, str]
) -> list[tuple[str, str | None]]:
    """Raise `UserError` unless all processes of the job have the same script, code and options.

    ``versions``: those of torch and NCCL. Returns: for each rank, its node's name and its
    address as seen by the master.
    """
    script, me = Path(sys.argv[0]), world.node_name
    options = {key: value for key, value in vars(args).items() if key not in MAY_DIFFER}
    options |= {key: bool(options[key]) for key in PATHS & options.keys()}
    facts = {
        "the training script": script.name,
        "this code": code(script),
        "torch": release(versions["torch"]),
        "NCCL": versions["NCCL"],
        PROCESSES: world.local_size,
        "the command line": {f"--{key.replace('_', '-')}": str(options[key]) for key in options},
        PREPROCESSING: str(vars(args).get("given_preprocessing")),
    }
    if mismatch := describe_mismatch(world.gather((me, facts))):
        raise UserError(mismatch, on_every_rank=True)
    note = describe_mismatch(world.gather((me, {"--name": args.name})))
    if note and world.is_main:
        say(f"note: {note}; rank 0's is used")
    return world.gather((me, address_towards(os.environ["MASTER_ADDR"])))


def compare_data(what: str, source: Any, world: Group) -> None:
    """Raise `UserError`, naming the nodes, unless ``source`` has the same images in all processes.

    It compares their names and, on several nodes, the sizes of `SIZES` evenly spaced files, which
    takes less than a second.
    """
    me = world.node_name
    if mismatch := describe_mismatch(world.gather((me, {what: source.fingerprint()}))):
        if first := first_difference(world.gather((me, source.class_fingerprints()))):
            mismatch += f" ({first})"
    elif world.nodes > 1:
        mean, sizes = source.sample_sizes(SIZES) if world.local_rank == 0 else (0.0, "")
        fact = {f"the size of files in {what}": f"{mean:.3f} bytes on average ({sizes})"}
        mismatch = describe_mismatch(world.gather((me, fact))[:: world.local_size])
    if mismatch:
        raise UserError(mismatch, on_every_rank=True)


def code(*scripts: Path) -> dict[str, str]:
    """Return a checksum of each file below utils/, each recipe and each of ``scripts``, by name."""
    ours = [path for kind in ("*.py", "*.txt") for path in (ROOT / "utils").rglob(kind)]
    files = {str(path.relative_to(ROOT)): path for path in ours}
    files |= {path.name: path for path in scripts if path.is_file()}
    return {name: f"{zlib.crc32(path.read_bytes()):08x}" for name, path in sorted(files.items())}


def release(version: str) -> str:
    """Shorten 2.14.1+cu130 to 2.14, because patches and CUDA builds may differ between nodes."""
    return ".".join(version.split(".")[:2])


def describe_mismatch(entries: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
    """Return an error message about the first fact that differs between nodes; None if all agree.

    ``entries``: for each process its node's name, and its facts by name ("this code", "torch" ...).
    A fact can also be a mapping, such as the checksums by file.
    """
    for name in entries[0][1]:
        column = [(node, facts.get(name)) for node, facts in entries]
        if not all(isinstance(value, Mapping) for _, value in column):
            column = [(node, {"": value}) for node, value in column]
        if difference := first_difference(column):
            remedy = REMEDY.get(name, "make it the same on every node")
            return f"{name} differs between the nodes: {difference}: {remedy}"
    return None


def first_difference(entries: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Describe the first difference: "NAME: VALUE on NODES, VALUE on NODES (and 2 more)"."""
    differing = []
    for name in sorted({name for _, values in entries for name in values}):
        nodes: dict[str, dict[str, None]] = {}  # by value; dict keys, so that a name occurs once
        for node, values in entries:
            nodes.setdefault(str(values.get(name, "missing")), {})[node] = None
        if len(nodes) > 1:
            has = (f"{value} on {' and '.join(list(some)[:3])}" for value, some in nodes.items())
            differing.append(f"{name}: {', '.join(has)}" if name else ", ".join(has))
    more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    return differing[0] + more if differing else ""


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
