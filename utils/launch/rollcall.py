"""Roll call: the nodes of a job meet before any of their processes starts. Standard library only.

    python -m utils.launch.rollcall --nodes N --node-rank R --master IP --port P --processes K

torchrun's own meeting is silent for many minutes when a node is missing, and ends in a stack trace
of C++. Here every node says whom it waits for, and since when; what can never work ends on every
node in a sentence. Then the nodes compare their code and torch, and try the ports between them.
"""

import argparse
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from utils.errors import UserError
from utils.launch import agreement, links, network, shapes, visitor
from utils.launch.meeting import Host, NoMeeting
from utils.launch.messages import Message
from utils.launch.shapes import Protocol
from utils.launch.supervise import MARKER, run_main
from utils.option_types import amount, count, positive

WAIT = 300.0  # seconds
SILENT = 12.0  # seconds without any answer from a master that is known to be up
CLOCK_LIMIT = 60.0  # seconds between two nodes' clocks from which a note says so
ROLL_CALL = Protocol(
    "imagenet roll call, protocol 1",
    "node 0 of this job",
    "start the training again",
    shapes.REQUESTS | {"facts": {}, "wait": {"text": str}, "end": {"fault": (str, None)}},
    shapes.ANSWERS
    | {
        "wait": {},
        "facts": {"number of processes per node": int, "this code": {str: str}, "torch": str},
    },
)


def call(
    node: int, nodes: int, master: tuple[str, int], processes: int, seconds: float = WAIT
) -> None:
    """Return when all ``nodes`` are here and agree; ``node`` is this one's rank.

    ``master`` is host and port of node 0, ``processes`` the number of this node's. Prints whom it
    waits for. Raises: `UserError`, on every node, when a node does not come within ``seconds``,
    ranks or numbers contradict each other, the nodes differ in code or torch, or a port between two
    of them is closed.
    """
    network.resolve(*master)
    me = _Me(node, nodes, processes)
    try:
        fault = (_gather if node == 0 else _attend)(me, master, seconds)
    except NoMeeting as lack:
        fault = f"{lack.sentence}: {lack.remedy}"
    finally:
        me.close()
    if fault:
        raise UserError(fault)


class _Me:
    """This node; ``handlers`` answer node 0's questions."""

    def __init__(self, node: int, nodes: int, processes: int):
        self.node, self.nodes, self.processes = node, nodes, processes
        self.host = socket.gethostname()
        self.endpoint: links.Endpoint | None = None
        self.handlers = {
            "facts": self.facts,
            "wait": _wait,
            "clock": lambda _: {"time": time.time()},
            "open": self.open,
            "probe": links.probe,
        }

    def card(self) -> Message:
        """How this node introduces itself."""
        return {"rank": self.node, "nodes": self.nodes, "host": self.host}

    def facts(self, _: Message) -> Message:
        """What must be the same on all nodes."""
        return {
            "number of processes per node": self.processes,
            "this code": agreement.code(),
            "torch": agreement.release(agreement.torch_version()),
        }

    def open(self, request: Message) -> Message:
        """Open ports for the others to try."""
        self.endpoint = links.Endpoint(self.node, request["token"])
        return {"ports": self.endpoint.ports}

    def close(self) -> None:
        """Close the ports."""
        if self.endpoint:
            self.endpoint.close()


class _Clock:
    """Says what is waited for after 2 s, then every 5 s, after a minute every 15 s."""

    def __init__(self, limit: float):
        self.limit, self.began, self.next = limit, time.monotonic(), 2.0

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


def _wait(request: Message) -> Message:
    """Node 0 says whom it still waits for."""
    print(str(request["text"])[:500], flush=True)
    return {}


def _gather(me: _Me, master: tuple[str, int], seconds: float) -> str | None:
    """Node 0: wait for the others and compare them. Returns the fault that all hear of."""
    if not network.is_own(master[0]):
        return (
            f"{master[0]} is not an address of this machine, {me.host}: the master's address must "
            "be that of node 0"
        )
    try:
        host = Host(master[1], me.nodes, me.handlers, ROLL_CALL)
    except NoMeeting:
        return f"port {master[1]} of {master[0]} is taken by another program: choose another"
    fault: str | None = "node 0 was interrupted"
    try:
        fault = _await(host, master, seconds) or _compare(host, me, master[0])
    finally:
        host.dismiss(lambda _: {"fault": fault})
    if fault is None:
        names = ", ".join([me.host, *(host.guests[rank].host for rank in sorted(host.guests))])
        print(f"all {me.nodes} nodes are here: {names}", flush=True)
    return fault


def _await(host: Host, master: tuple[str, int], seconds: float) -> str | None:
    """Wait until all are here. Returns: why they will never be."""
    clock, known = _Clock(seconds), {}

    def look(missing: list[int]) -> bool:
        nonlocal known
        for rank, guest in host.guests.items():
            if known.get(rank) is not guest:
                print(f"node {rank} ({guest.host}, {guest.address}) is here", flush=True)
        for rank in known.keys() - host.guests.keys():
            print(f"node {rank} ({known[rank].host}) has left", flush=True)
        known = dict(host.guests)
        if clock.due:
            text = clock.line(f"waiting at {master[0]}:{master[1]} for {_nodes(missing, host)}")
            print(text, flush=True)
            host.ask("wait", {rank: {"text": text} for rank in known}, 5.0)
        return bool(host.contradictions)

    host.welcome(seconds, look)
    if host.contradictions:
        return f"a node was refused: {host.contradictions[0]}"
    if host.missing:
        return (
            f"{_nodes(host.missing, host)} did not come to {master[0]}:{master[1]} within "
            f"{seconds:g} s: is training started there, with this address, and does the firewall "
            "let the port through?"
        )
    return None


def _nodes(missing: list[int], host: Host) -> str:
    return f"node{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {host.nodes}"


def _compare(host: Host, me: _Me, master: str) -> str | None:
    """Returns: the first thing that would keep the nodes from training together."""
    names = {0: me.host} | {rank: guest.host for rank, guest in host.guests.items()}

    def name(rank: int) -> str:
        return f"{names[rank]} (node {rank})"

    found = host.ask("facts")
    if lost := [rank for rank, facts in found.items() if "error" in facts]:
        return f"{name(lost[0])} was lost in the middle of the roll call: {found[lost[0]]['error']}"
    different = agreement.unlike([(name(rank), facts) for rank, facts in sorted(found.items())])
    if different:
        return different
    for rank, (ahead, _) in host.clocks().items():
        if abs(ahead) > CLOCK_LIMIT:
            print(f"note: the clock of {name(rank)} is {ahead:+.0f} s off node 0's", flush=True)
    token = secrets.token_hex(16)
    opened = host.ask("open", {rank: {"token": token} for rank in names})
    addresses = {0: master} | {rank: guest.address for rank, guest in host.guests.items()}
    targets = {
        rank: {"rank": rank, "addresses": [addresses[rank]], "ports": answer["ports"]}
        for rank, answer in opened.items()
        if "ports" in answer
    }
    wanted = {
        rank: {"token": token, "targets": [one for to, one in targets.items() if to != rank]}
        for rank in targets
    }
    for rank, answer in sorted(host.ask("probe", wanted, seconds=60.0).items()):
        for way in answer.get("ways", ()):
            if way["reason"]:
                return (
                    f"{name(rank)} cannot connect to {name(way['to'])} at {way['address']}, port "
                    f"{way['port']} ({way['reason']}): gradients travel over ports that the kernel "
                    "chooses, so open all TCP ports between the nodes, in both directions"
                )
    return None


def _attend(me: _Me, master: tuple[str, int], seconds: float) -> str | None:
    """Any other node: find node 0 and answer it. Returns the fault that node 0 reports, if any."""
    network.wait_for_master(*master, seconds, _say_that_it_waits(master, seconds))
    link = visitor.visit(*master, me.card(), 10.0, ROLL_CALL)
    return visitor.serve(link, me.handlers, ROLL_CALL)["fault"]


def _say_that_it_waits(master: tuple[str, int], seconds: float) -> Callable[[str], None]:
    clock = _Clock(seconds)
    # The launcher over ssh has reached all nodes and started them together: a master that does not
    # even refuse is not late.
    all_up = os.environ.get(MARKER, "").startswith("guard")
    answered = 0.0

    def say(reason: str) -> None:
        nonlocal answered
        if "refused" in reason:
            answered = clock.seconds
        elif all_up and clock.seconds - answered > SILENT:
            raise UserError(
                f"node 0 is up, but port {master[1]} of {master[0]} does not answer this node "
                f"({reason}): open all TCP ports between the nodes, in both directions"
            )
        if clock.due:
            there = f"waiting for node 0 at {master[0]}:{master[1]}"
            print(clock.line(f"{there}: {reason}"), flush=True)

    return say


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add: Callable[..., Any] = parser.add_argument
    add("--nodes", type=positive, required=True)
    add("--node-rank", type=count, required=True)
    add("--master", required=True, metavar="IP")
    add("--port", type=positive, required=True)
    add("--processes", type=positive, required=True, help="of this node")
    add("--wait", type=amount, default=WAIT, metavar="SECONDS")
    args = parser.parse_args(argv)
    master = (args.master, args.port)
    call(args.node_rank, args.nodes, master, args.processes, args.wait)
    return 0


if __name__ == "__main__":
    run_main(main)
