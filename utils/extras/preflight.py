"""The pre-flight check: the nodes of a job meet before training and compare their set-up.

- Used by several nodes that are started by hand or by the wrappers (``--world-size``, WORLD_SIZE),
  and by scripts/elastic_train.sh, doctor.py and train_on_nodes.sh.
- Interface, through addons.py: `meet`, which `utils.launch` calls before it starts processes;
  `find_master` and `compare_processes`, which `utils.world` calls as a process joins the job;
  `compare_data`. The wrappers call two commands, the first one before torchrun:

      python -m utils.extras.preflight NODE_RANK NODES PROCESSES HOST:PORT [SECONDS]
      python -m utils.extras.preflight rendezvous HOST:PORT

- Without this file, torch waits for missing nodes, silently, and ends with a stack trace of C++.
  Nodes with different code, options or images train nevertheless, wrongly. GLOO_SOCKET_IFNAME and
  NCCL_SOCKET_IFNAME must name the interface by hand. The scripts named above do not start.

Every node prints which nodes are missing and since when, and a set-up that cannot work ends with
the same one-line error on every node. Each node connects once to the master port of node 0.
Messages are JSON objects, one a line. A node sends all facts that must be the same everywhere, then
follows node 0's messages: print a line, connect to the ports of the others, end.
"""

import argparse
import contextlib
import fcntl
import importlib.metadata
import json
import os
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from utils import errors, launch
from utils.errors import UserError, printable
from utils.option_types import count, positive, seconds

PATIENCE = 10.0  # seconds for an answer
LOST = 90.0  # seconds without a message from node 0, which sends one every 15 s while it waits
SILENT = 12.0  # seconds without an answer from a master that is known to be up
PORTS = 2  # tried on each node: a firewall may have one of them open by chance
TRIES, TRY_SECONDS = 32, 2.0  # connections that a node tries at once, and for how long
LONGEST = 2**20  # bytes of a message
SIZES = 1000  # files
GREETING = "imagenet preflight check"
PROCESSES = "number of processes per node"
MUST_AGREE = (PROCESSES, "this code", "torch")  # facts that must be the same on all nodes
KINDS = {"rank": int, "nodes": int, "host": str, "ports": list}  # of the facts that a node sends
KINDS |= {PROCESSES: int, "this code": dict, "torch": str}
SAME_PORT = "port (--dist-url or MASTER_PORT)"
OPEN_PORTS = "open all TCP ports between the nodes, in both directions"

Facts = dict[str, Any]


def meet(rank: int, nodes: int, processes: int, master: tuple[str, int], wait: float) -> None:
    """Return when all ``nodes`` are here and agree; this is node ``rank``, with ``processes``.

    ``master`` is node 0's host and port. Raises: `UserError`, on every node, when a node does not
    come within ``wait`` seconds, ranks or numbers contradict each other, nodes differ in code or
    torch, or ports between them are closed.
    """
    with contextlib.ExitStack() as stack:
        doors = [stack.enter_context(_listen(0)) for _ in range(PORTS)]  # the kernel accepts
        me: Facts = {
            "greeting": GREETING,
            "rank": rank,
            "nodes": nodes,
            "host": socket.gethostname(),
            "ports": [door.getsockname()[1] for door in doors],
            PROCESSES: processes,
            "this code": code(),
            "torch": release(importlib.metadata.version("torch")),
        }
        if rank:
            if is_own(master[0]):
                say(f"note: {master[0]} is this machine: does node 0 run here, too?")
            follow(me, master, wait)
            return
        try:
            if not is_own(master[0]):
                text = f"{master[0]} is not an address of this machine, {me['host']}: "
                raise UserError(text + "the master's address must be that of node 0")
            try:
                server = stack.enter_context(_listen(master[1]))
            except OSError:
                raise launch.port_in_use(*master, SAME_PORT) from None
            # A thread that waits in accept() would keep the port after close().
            stack.callback(server.shutdown, socket.SHUT_RDWR)
        except UserError as error:
            follow(me, master, 1.0, error)  # if there is another node 0, it has to end, too
            raise
        Leader(me, master, wait, server).lead()


class Clock:
    """The time spent waiting. A line is due after 1 s, then every 5 s, later every 15 s."""

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


def send(connection: socket.socket, **message: Any) -> None:
    """Send a message. If the other end is gone, reading from it fails."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def receive(file: Any) -> Facts:
    """The next message from a socket's file. Raises: OSError (closed, no answer), ValueError."""
    line = file.readline(LONGEST)
    if not line:
        raise ConnectionError("the connection was closed")
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError, RecursionError):
        raise ValueError("it sends other messages") from None


class Leader:
    """Node 0, to which all others connect. A thread reads from each connection."""

    def __init__(self, me: Facts, master: tuple[str, int], wait: float, server: socket.socket):
        self.nodes, self.there, self.clock = me["nodes"], f"{master[0]}:{master[1]}", Clock(wait)
        # Node 0 may know itself by an address at which nobody else reaches it.
        self.facts: dict[int, Facts] = {0: me | {"address": master[0]}}  # of all nodes, by rank
        self.connections: dict[int, socket.socket] = {}  # to the others
        self.contradiction: str | None = None  # between nodes
        self.lock = threading.Lock()
        threading.Thread(target=self._accept, args=(server,), daemon=True).start()

    def lead(self) -> None:
        """Lead all nodes through the check, and send them its result. Raises: `UserError`."""
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

    def _tell_all(self, **message: Any) -> None:
        if message.get("print"):
            say(message["print"])
        for connection in list(self.connections.values()):
            send(connection, **message)

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the check is over
            while True:
                connection, address = server.accept()
                where = address[0].removeprefix("::ffff:")
                threading.Thread(target=self._read, args=(connection, where), daemon=True).start()

    def _read(self, connection: socket.socket, address: str) -> None:
        """Read what a node sends, until it leaves. Another program is ignored."""
        facts: Facts = {}
        with connection, connection.makefile("rb") as file:
            try:
                facts = self._let_in(receive(file), connection, address)
                while True:
                    facts.update(receive(file))
            except (OSError, ValueError):
                with self.lock:
                    if self.facts.get(facts.get("rank")) is facts:
                        del self.facts[facts["rank"]], self.connections[facts["rank"]]
                        say(f"node {facts['rank']} ({facts['host']}) has left")

    def _let_in(self, hello: Facts, connection: socket.socket, address: str) -> Facts:
        """Add a node that has sent its facts, unless they contradict those of others."""
        kinds = {name: type(hello.get(name)) for name in KINDS}
        if hello.get("greeting") != GREETING or kinds != KINDS:
            raise ValueError("not a node")
        rank, me = hello["rank"], f"{hello['host']} ({address})"
        with self.lock:
            if hello["nodes"] != self.nodes:
                self.contradiction = (
                    f"the number of nodes (--world-size, WORLD_SIZE or NODES) is {self.nodes} on "
                    f"{self.facts[0]['host']} (node 0), but {hello['nodes']} on {me}: give every "
                    "node the same"
                )
            elif rank in self.facts:
                self.contradiction = (
                    f"two nodes have rank {rank} (--rank or NODE_RANK), "
                    f"{self.facts[rank]['host']} and {me}: give each its own"
                )
            else:
                self.connections[rank] = connection
                self.facts[rank] = hello | {"address": address}
                send(connection, welcome=True)
                say(f"node {rank} ({hello['host']}, {address}) is here")
                return self.facts[rank]
        send(connection, end=self.contradiction)
        raise ValueError("not a node of this job")

    def _check(self) -> None:
        time.sleep(0.05)
        if self.contradiction:
            raise UserError(self.contradiction)

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
            self._check()

    def _compare(self) -> None:
        """Raises: `UserError` with what keeps the nodes from training together."""
        everyone = [self.facts[rank] for rank in range(self.nodes)]
        names = [f"{facts['host']} (node {rank})" for rank, facts in enumerate(everyone)]
        entries = [{key: facts[key] for key in MUST_AGREE} for facts in everyone]
        if mismatch := describe_mismatch(list(zip(names, entries, strict=True))):
            raise UserError(mismatch)
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
            self._check()
        if closed := [str(way) for facts in everyone for way in facts["closed"]]:
            more = f" (and {len(closed) - 4} more)" if len(closed) > 4 else ""
            why = "gradients travel over ports that the kernel chooses"
            raise UserError(f"{'; '.join(closed[:4])}{more}: {why}, so {OPEN_PORTS}")
        hosts = ", ".join(facts["host"] for facts in everyone)
        self._tell_all(print=f"all {self.nodes} nodes are here: {hosts}")


def follow(
    me: Facts, master: tuple[str, int], wait: float, instead: UserError | None = None
) -> None:
    """Connect to node 0 and follow it. Raises: `UserError` with the error that it reports.

    ``instead``: the error to raise where there is no node 0.
    """
    there, clock, refused, message = f"{master[0]}:{master[1]}", Clock(wait), 0.0, {}
    # The launcher over ssh has reached all nodes and started them together: a master that does not
    # even refuse is not late.
    all_up = "IMAGENET_ALL_UP" in os.environ

    def waiting(reason: str) -> None:
        nonlocal refused
        if "refused" in reason:
            refused = clock.seconds
        elif all_up and clock.seconds - refused > SILENT:
            text = f"node 0 is up, but {there} does not answer this node ({reason}): {OPEN_PORTS}"
            raise UserError(text)
        if line := clock.line(f"waiting for node 0 at {there}: {reason}"):
            say(line)

    text = f"what answers at {there} is not node 0 of this job ({{}}): does another program use "
    text += f"this port? If so, choose another {SAME_PORT} on every node"
    try:
        connection = connect(*master, wait, waiting)
        with connection, connection.makefile("rb") as file:
            connection.settimeout(PATIENCE)
            send(connection, **me)
            while "end" not in message:
                message = receive(file)
                if "welcome" in message:
                    connection.settimeout(LOST)
                    text = f"lost touch with node 0 at {there} in the pre-flight check ({{}}): "
                    text += "look at what it has printed"
                if "print" in message:
                    say(message["print"])
                if "connect" in message:
                    name = f"{me['host']} (node {me['rank']})"
                    send(connection, closed=try_ports(message["connect"], name))
    except (OSError, ValueError, UserError) as error:
        if instead or isinstance(error, UserError):
            raise instead or error from None
        why = "no answer" if isinstance(error, TimeoutError) else str(error)
        raise UserError(text.format(why)) from None
    if message["end"]:
        raise UserError(str(message["end"]))


def say(text: object) -> None:
    """Print a line, which another machine may have sent."""
    print(printable(str(text)), flush=True)


def try_ports(targets: list[tuple[str, str, list[int]]], me: str) -> list[str]:
    """Connect from ``me`` to the others' ports: (name, address, ports). Returns: error messages."""

    def closed(way: tuple[str, str, int]) -> str | None:
        name, address, port = way
        try:
            socket.create_connection((address, port), timeout=TRY_SECONDS).close()
        except OSError as error:
            why = reason(error)
            return f"{me} cannot connect to {name} at {address}, port {port} ({why})"
        return None

    ways = [(to, at, port) for to, at, ports in targets if to != me for port in ports]
    with ThreadPoolExecutor(TRIES) as pool:
        return list(filter(None, pool.map(closed, ways)))


# ---- addresses and interfaces


def _listen(port: int) -> socket.socket:
    """A listening socket on all addresses, IPv6 included where the machine has it."""
    more: dict[str, Any] = {"backlog": 1024}
    if socket.has_dualstack_ipv6():
        more |= {"family": socket.AF_INET6, "dualstack_ipv6": True}
    return socket.create_server(("", port), **more)


def resolve(host: str) -> list[tuple]:
    """What `socket.getaddrinfo` returns for the master's name. Raises: `UserError`: unknown."""
    try:
        return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        text = f"the master's name {host} cannot be resolved ({error.strerror}): use its IP"
        raise UserError(text) from None


def is_own(host: str) -> bool:
    """Whether ``host`` (a name, IPv4 or IPv6) is this machine. Raises: `UserError` if unknown."""
    for family, kind, protocol, _, address in resolve(host):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def address_towards(host: str) -> str | None:
    """This machine's IPv4 address as ``host`` sees it; None if unknown (no route, or IPv6)."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # UDP: this looks up the route and sends nothing
        return probe.getsockname()[0]
    return None


def interface_towards(host: str) -> str | None:
    """Name of the network interface that leads to ``host``; None if unknown (IPv6).

    On the master itself: the interface by which the others reach it, not the loopback.
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


def connect(
    host: str, port: int, seconds: float, waiting: Callable[[str], None] = lambda reason: None
) -> socket.socket:
    """A connection to ``host:port``, which is tried again until ``seconds`` are over.

    ``waiting(reason)`` is called after each failed attempt. Raises: `UserError`: unknown host name,
    or nothing there in time.
    """
    resolve(host)
    clock = Clock(seconds)
    while True:
        try:
            return socket.create_connection((host, port), timeout=2.0)
        except OSError as error:
            why = reason(error)
        if clock.seconds >= seconds:
            raise UserError(
                f"the master {host}:{port} cannot be reached after {seconds:g} s ({why}): "
                "is node 0 started, is the address right, is the port open in the firewall?"
            )
        waiting(why)
        time.sleep(0.2)


def reason(error: OSError) -> str:
    """Why a connection failed, in a few words."""
    if isinstance(error, TimeoutError):
        return "no answer"
    return (error.strerror or str(error)).lower()


def find_master(rank: int, nodes: int, master: tuple[str, int], seconds: float) -> None:
    """Choose the network interfaces of gloo and NCCL, and wait for the master's port.

    gloo looks up this host's own name, which often gives 127.0.1.1 or nothing; NCCL may take
    Docker's bridge. The interface that leads to the master is right ("=": not a prefix).
    """
    if interface := interface_towards(master[0]) if nodes > 1 else "lo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if nodes > 1:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    if rank != 0:
        connect(*master, seconds).close()


# ---- what the nodes must agree on

ROOT = Path(__file__).resolve().parents[2]

REMEDY = {
    "the command line": "type the same options on every node",
    "the training script": "start the same script on every node",
    "this code": "copy it to every node again",
    "torch": "install the same version on every node",
    "NCCL": "install the same version on every node",
}

# Options that may differ between nodes: paths, output, decisions of one process alone, hardware of
# the node. All others must be the same on every node.
_MAY_DIFFER = """data classes name output_dir store recipe command mode
    workers print_freq profile spot_notice tracker memory_format
    snapshot_minutes train_time dist_url dist_timeout dist_backend gpus
    world_size rank local_rank preprocessing defaulted_sizes epoch_sizes"""
MAY_DIFFER = frozenset(_MAY_DIFFER.split())
PATHS = {"resume", "pretrained"}  # each node may have its own, but all or none


def compare_processes(args: Any, world: Any) -> list[tuple[str, str | None]]:
    """Raise `UserError` unless all processes of the job have the same script, code and options.

    Returns: for each rank, its node's name, and its address as the master sees it.
    """
    import torch

    from utils.world import gather, node_name

    script, me = Path(sys.argv[0]), node_name(world)
    facts = {
        "the training script": script.name,
        "this code": code(script),
        "torch": release(torch.__version__),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if world.device_ids else "",
        PROCESSES: world.local_size,
        "the command line": options(args),
    }
    if mismatch := describe_mismatch(gather((me, facts), world)):
        raise UserError(mismatch, on_every_rank=True)
    note = describe_mismatch(gather((me, {"--name": args.name}), world))
    if note and world.is_main:
        say(f"note: {note}; rank 0's is used")
    return gather((me, address_towards(os.environ["MASTER_ADDR"])), world)


def compare_data(what: str, source: Any, world: Any) -> None:
    """Raise `UserError`, naming the nodes, unless ``source`` has the same images in all processes.

    Their names are compared; on several nodes also the sizes of `SIZES` files, evenly spread, which
    takes less than a second.
    """
    from utils.world import gather, node_name

    me = node_name(world)
    if mismatch := describe_mismatch(gather((me, {what: source.fingerprint()}), world)):
        first = first_difference(gather((me, source.class_fingerprints()), world))
        raise UserError(f"{mismatch} ({first})" if first else mismatch, on_every_rank=True)
    if world.nodes > 1:
        mean, sizes = source.sample_sizes(SIZES) if world.local_rank == 0 else (0.0, "")
        fact = f"the size of files in {what}"
        entries = gather((me, {fact: f"{mean:.0f} bytes on average ({sizes})"}), world)
        if mismatch := describe_mismatch(entries[:: world.local_size]):
            raise UserError(mismatch, on_every_rank=True)


def options(args: Any) -> dict[str, str]:
    """The options that must be the same on every node, as on the command line."""
    given = {key: value for key, value in vars(args).items() if key not in MAY_DIFFER}
    given |= {key: bool(given[key]) for key in PATHS & given.keys()}
    return {f"--{key.replace('_', '-')}": str(value) for key, value in given.items()}


def code(*scripts: Path) -> dict[str, str]:
    """Checksum of each file below utils/, each recipe and each of ``scripts``, by name."""
    ours = [*(ROOT / "utils").rglob("*.py"), *(ROOT / "scripts/recipes").glob("*.txt")]
    files = {str(path.relative_to(ROOT)): path for path in ours}
    files |= {path.name: path for path in scripts if path.is_file()}
    return {name: f"{zlib.crc32(path.read_bytes()):08x}" for name, path in sorted(files.items())}


def release(version: str) -> str:
    """Major and minor number: 2.14 of 2.14.1+cu130. Patches and CUDA builds may differ."""
    return ".".join(version.split(".")[:2])


def describe_mismatch(entries: list[tuple[str, Mapping[str, Any]]]) -> str | None:
    """An error message about the first fact on which nodes disagree; None if they agree.

    ``entries``: for each process its node's name, and its facts by name ("this code", "torch" ...).
    A fact may be a mapping itself, such as each file's checksum.
    """
    for name, first in entries[0][1].items():
        values = [(node, facts.get(name)) for node, facts in entries]
        if any(value != first for _, value in values):
            has = first_difference(values) if isinstance(first, Mapping) else _who_has(values)
            remedy = REMEDY.get(name, "make it the same on every node")
            return f"{name} differs between the nodes: {has}: {remedy}"
    return None


def first_difference(entries: list[tuple[str, Mapping[str, Any]]]) -> str:
    """The first name whose value differs: "NAME: VALUE on NODES, VALUE on NODES (and 2 more)"."""
    differing = []
    for name in sorted({name for _, values in entries for name in values}):
        column = [(node, values.get(name, "missing")) for node, values in entries]
        if len({value for _, value in column}) > 1:
            differing.append(f"{name}: {_who_has(column)}")
    more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    return differing[0] + more if differing else ""


def _who_has(values: list[tuple[str, Any]]) -> str:
    nodes: dict[str, list[str]] = {}
    for node, value in values:
        nodes.setdefault(str(value), []).append(node)
    return ", ".join(
        f"{value} on {' and '.join(list(dict.fromkeys(some))[:3])}" for value, some in nodes.items()
    )


# ---- commands


def rendezvous(master: str) -> str:
    """For scripts/elastic_train.sh: this node's address, and whether it is ``master`` (HOST:PORT).

    As "10.0.0.1 false". On another node than the master, returns once that answers; prints that it
    waits on stderr. Raises: `UserError`.
    """
    host, port = launch.parse_tcp_url(f"tcp://{master}", "MASTER_ADDR:MASTER_PORT")
    here, address, clock = is_own(host), address_towards(host), Clock(300.0)
    if address is None:
        raise UserError(f"no route from here to MASTER_ADDR={host}: is the link up?")
    if here:
        try:
            socket.create_server(("", port)).close()
        except OSError:
            raise launch.port_in_use(host, port, "MASTER_PORT") from None
        return f"{address} true"

    def waiting(why: str) -> None:
        if line := clock.line(f"waiting for {master}: {why}"):
            print(line, file=sys.stderr, flush=True)

    connect(host, port, clock.limit, waiting).close()
    return f"{address} false"


def main() -> int:
    """Run the check, or answer `rendezvous`. Exit codes: 0; 2 with one error line; 130: Ctrl-C."""
    launch.die_with_launcher()
    words = sys.argv[1:]
    if words[:1] == ["rendezvous"] and len(words) == 2:
        print(rendezvous(words[1]))
        return 0
    try:
        kinds = (count, positive, positive)
        rank, nodes, processes = (kind(word) for kind, word in zip(kinds, words[:3], strict=True))
        master = launch.parse_tcp_url(f"tcp://{words[3]}", "HOST:PORT")
        wait = seconds(words[4]) if len(words) == 5 else 300.0
    except (ValueError, IndexError, argparse.ArgumentTypeError):
        how = (
            "usage: python -m utils.extras.preflight NODE_RANK NODES PROCESSES HOST:PORT [SECONDS]"
        )
        raise UserError(how) from None
    meet(rank, nodes, processes, master, wait)
    return 0


if __name__ == "__main__":
    errors.exit_with(main)  # at once: threads may still be printing
