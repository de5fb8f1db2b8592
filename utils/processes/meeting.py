"""Node 0 meets the others on the master port and asks them questions. Standard library only.

For the roll call before a training (rollcall.py) and for the doctor.

The others say who they are, then answer requests until node 0 says "end". Nothing that is received
is executed: a request names one of the handlers that its receiver has.
"""

import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from utils.errors import UserError
from utils.processes.messages import Message, listen, notice_death, plain, receive, send

GREETING = "imagenet doctor, protocol 1"
PATIENCE = 10.0  # seconds for an answer that needs no work
CLOCK_QUESTIONS = 10

Handlers = dict[str, Callable[[Message], Any]]


class NoMeeting(UserError):
    """This node and node 0 cannot meet; ``name`` is the name of the finding."""

    def __init__(self, name: str, sentence: str, remedy: str):
        super().__init__(f"{sentence}: {remedy}")
        self.name, self.sentence, self.remedy = name, sentence, remedy


@dataclass
class Guest:
    """A node that has connected to node 0."""

    rank: int
    host: str
    address: str
    link: socket.socket


class Host:
    """Node 0's side: wait for the others, then `ask` them (and this node itself)."""

    def __init__(self, port: int, nodes: int, handlers: Handlers):
        """Open the master port. Raises: `NoMeeting` if that is impossible."""
        self.port, self.nodes, self.handlers = port, nodes, handlers
        self.guests: dict[int, Guest] = {}
        self.refused: list[str] = []  # why nodes, not strangers, were refused
        try:
            self.door = listen(port)
        except OSError as fault:
            raise NoMeeting(
                "master-port",
                f"port {port} of this node cannot be opened ({fault.strerror})",
                "end the program that uses it (scripts/cleanup.sh ends this suite's own), or "
                "choose another --port",
            ) from None

    @property
    def missing(self) -> list[int]:
        """Node ranks that have not connected."""
        return [rank for rank in range(1, self.nodes) if rank not in self.guests]

    def welcome(self, seconds: float, waiting: Callable[[list[int]], None]) -> None:
        """Let the others in until all are here or ``seconds`` have passed.

        ``waiting(missing)`` is called once, if it takes longer than a moment.
        """
        began = time.monotonic()
        said = False
        while self.missing:
            rest = began + seconds - time.monotonic()
            if rest <= 0:
                break
            if not said and time.monotonic() - began > 2:
                said = True
                waiting(self.missing)
            self.door.settimeout(min(rest, 1.0))
            try:
                link, peer = self.door.accept()
            except TimeoutError:
                continue
            self._let_in(link, plain(peer[0]))

    def _let_in(self, link: socket.socket, address: str) -> None:
        link.settimeout(2.0)
        try:
            hello = receive(link, largest=10_000)
            refusal = self._refusal(hello)
            send(link, {"refused": refusal} if refusal else {"welcome": GREETING})
            if refusal:
                self.refused.append(f"{hello.get('host')} ({address}): {refusal}")
        except (OSError, ValueError, struct.error):
            refusal = "a stranger: a port scan, or a worker of a training"
        if refusal:
            link.close()
            return
        notice_death(link)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        rank = int(hello["rank"])
        self.guests[rank] = Guest(rank, str(hello["host"]), address, link)

    def _refusal(self, hello: Message) -> str | None:
        if hello.get("greeting") != GREETING:
            return "the doctors of the two nodes have different versions: copy the code again"
        if hello.get("nodes") != self.nodes:
            return f"node 0 was started with --nodes {self.nodes}, this node with {hello['nodes']}"
        rank = hello.get("rank")
        if not isinstance(rank, int) or not 0 < rank < self.nodes:
            return f"--rank {rank} is not one of 1 to {self.nodes - 1}"
        if rank in self.guests:
            return (
                f"{self.guests[rank].host} has connected with --rank {rank}, too: give each its own"
            )
        return None

    def ask(
        self, do: str, wanted: dict[int, Message] | None = None, seconds: float = PATIENCE
    ) -> dict[int, Message]:
        """Ask nodes to ``do`` something, all at the same time; their answers by rank.

        ``wanted``: the request to each node (default: an empty one to all that are here). The
        answer of a node that is silent for ``seconds`` is {"error": reason}; it is not asked again.
        """
        if wanted is None:
            wanted = {rank: {} for rank in (0, *self.guests)}
        if not wanted:
            return {}
        with ThreadPoolExecutor(len(wanted)) as pool:
            jobs = {
                rank: pool.submit(self._ask_one, rank, request | {"do": do}, seconds)
                for rank, request in sorted(wanted.items())
            }
            return {rank: job.result() for rank, job in jobs.items()}

    def _ask_one(self, rank: int, request: Message, seconds: float) -> Message:
        if rank == 0:
            return answer(self.handlers, request)
        if rank not in self.guests:
            return {"error": "it has already left the check"}
        link = self.guests[rank].link
        try:
            link.settimeout(seconds)
            send(link, request)
            return receive(link)
        except (OSError, ValueError, struct.error) as fault:
            link.close()
            self.guests.pop(rank, None)
            return {"error": f"it has left the check ({fault})", "left": True}

    def clocks(self) -> dict[int, tuple[float, float]]:
        """How far each guest's clock is ahead of this node's, and how well that is known; seconds.

        As in NTP, the question with the shortest round trip counts, and the guest's answer is
        compared with the middle of that trip.
        """
        best: dict[int, tuple[float, float]] = {}
        for rank in list(self.guests):
            for _ in range(CLOCK_QUESTIONS):
                began, tick = time.time(), time.perf_counter()
                reply = self._ask_one(rank, {"do": "clock"}, PATIENCE)
                trip = time.perf_counter() - tick
                if "time" not in reply:
                    break
                ahead = reply["time"] - (began + trip / 2)
                if rank not in best or trip / 2 < best[rank][1]:
                    best[rank] = (ahead, trip / 2)
        return best

    def dismiss(self, farewell: Callable[[int], Message]) -> None:
        """Tell each guest what was found, and close."""
        for rank, guest in self.guests.items():
            try:
                send(guest.link, farewell(rank) | {"do": "end"})
                guest.link.close()
            except OSError:
                continue
        self.door.close()


def visit(master: str, port: int, me: Message, seconds: float) -> socket.socket:
    """Connect to node 0 as ``me`` (rank, nodes, host); try again until ``seconds`` have passed.

    Raises: `NoMeeting`, which says why that failed.
    """
    deadline = time.monotonic() + seconds
    there = f"the master {master}:{port}"
    while True:
        rest = max(deadline - time.monotonic(), 0.1)
        try:
            link = socket.create_connection((master, port), timeout=min(rest, 5.0))
            break
        except socket.gaierror as fault:
            raise NoMeeting(
                "master-name",
                f"the master's name {master} cannot be resolved here ({fault.strerror})",
                "give node 0's IP address as --master, or add the name to /etc/hosts",
            ) from None
        except TimeoutError:
            reason = "no answer"
            remedy = (
                "open the port in the firewall or security group of node 0, and check the address"
            )
        except ConnectionRefusedError:
            reason = "connection refused"
            remedy = (
                "start the doctor on node 0 as well, and check that --master is node 0's address "
                "and that its firewall lets the port through"
            )
        except OSError as fault:
            reason, remedy = fault.strerror or str(fault), "check --master and the network"
        if time.monotonic() >= deadline:
            raise NoMeeting(
                "master-port", f"{there} cannot be reached after {seconds:g} s ({reason})", remedy
            )
        time.sleep(0.2)
    try:
        send(link, me | {"greeting": GREETING})
        link.settimeout(PATIENCE)
        reply = receive(link, largest=10_000)
    except (OSError, ValueError, struct.error):
        link.close()
        raise NoMeeting(
            "master-port",
            f"something answers at {there}, but it is not the doctor",
            "end what uses the port (a training still running?), or choose another --port",
        ) from None
    if "refused" in reply:
        link.close()
        raise NoMeeting(
            "master-port",
            f"node 0 refuses this node: {reply['refused']}",
            "correct it and run the doctor again",
        )
    link.settimeout(None)
    notice_death(link)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def serve(link: socket.socket, handlers: Handlers) -> Message:
    """Answer node 0's requests until it says "end"; return that message.

    Raises: `NoMeeting` if node 0 disappears before.
    """
    try:
        while (request := receive(link)).get("do") != "end":
            send(link, answer(handlers, request))
    except (OSError, ValueError, struct.error) as fault:
        raise NoMeeting(
            "lost",
            f"lost touch with node 0 in the middle of the check ({fault})",
            "look at the doctor's output there",
        ) from None
    finally:
        link.close()
    return request


def answer(handlers: Handlers, request: Message) -> Message:
    """What the handler of a request returns; {"error": reason} if it fails."""
    try:
        return handlers[request["do"]](request)
    except UserError as error:
        return {"error": str(error)}
    except Exception as fault:  # a bug in one check must not hide what the others find
        return {"error": f"{type(fault).__name__}: {fault}"}
