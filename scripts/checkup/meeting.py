"""Node 0 meets the others on the master port and asks them questions. Standard library only.

For the doctor; `visitor` is the other side.

The others say who they are, then answer requests until node 0 says "end". Nothing that is received
is executed: a request names one of the handlers that its receiver has. Anybody can connect: what is
not as `shapes` has it is refused in a sentence, and the meeting goes on.
"""

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from checkup import message_shapes as shapes
from checkup.message_shapes import Protocol
from checkup.messages import Message, listen, notice_death, plain, receive, send

from utils.errors import UserError

PATIENCE = 10.0  # seconds for an answer that needs no work
GREETING_SECONDS = 3.0  # for a newcomer's greeting, and again for its answer to a first question
GREETING_BYTES = 10_000
NEWCOMERS = 64  # that may be about to greet; when one more comes, the first of them has to leave
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

    def __init__(self, port: int, nodes: int, handlers: Handlers, protocol: Protocol):
        """Open the master port. Raises: `NoMeeting` if that is impossible."""
        self.port, self.nodes, self.handlers, self.protocol = port, nodes, handlers, protocol
        self.guests: dict[int, Guest] = {}
        self.refused: Counter[str] = Counter()  # sentences, with the address that each was told
        self.contradictions: list[str] = []  # those of them that nodes were told, not strangers
        self.newcomers: list[socket.socket] = []
        self.begun = self.closed = False
        self.changed = threading.Condition()  # guards all of these until the meeting has begun
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

    def welcome(self, seconds: float, waiting: Callable[[list[int]], Any]) -> None:
        """Let the others in until all are here or ``seconds`` have passed.

        ``waiting(missing)`` is called about once a second meanwhile; it may end that by True.
        """
        threading.Thread(target=self._attend, daemon=True).start()
        began = time.monotonic()
        with self.changed:
            while True:
                self._forget_the_gone()
                rest = began + seconds - time.monotonic()
                if not self.missing or rest <= 0 or waiting(self.missing):
                    break
                self.changed.wait(min(rest, 1.0))
            self.begun = True

    def _attend(self) -> None:
        """Let newcomers in, all at the same time: a slow one must not keep the others waiting."""
        while True:
            try:
                link, peer = self.door.accept()
            except OSError:
                if self.closed:
                    return
                time.sleep(0.1)  # too many open files, say
                continue
            with self.changed:
                self.newcomers.append(link)
                if len(self.newcomers) > NEWCOMERS:
                    with contextlib.suppress(OSError):  # wakes the thread that listens to it
                        self.newcomers.pop(0).shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._let_in, args=(link, plain(peer[0])), daemon=True).start()

    def _let_in(self, link: socket.socket, address: str) -> None:
        """Make a guest of whoever has connected, or refuse it in a sentence."""
        stranger = False
        try:
            hello = receive(link, GREETING_BYTES, GREETING_SECONDS)
            refusal = self._refusal(hello)
            if not refusal:
                # A node's rank is not taken by what cannot even do this.
                send(link, {"do": "clock"})
                reply = receive(link, GREETING_BYTES, GREETING_SECONDS)
                shapes.check(reply, self.protocol.answers["clock"], "its answer")
        except (OSError, ValueError) as fault:
            stranger = True
            refusal = f"a stranger, or another program ({fault})"
        with self.changed, contextlib.suppress(OSError):
            if link in self.newcomers:
                self.newcomers.remove(link)
            refusal = refusal or self._refusal(hello)  # another may have been faster
            if not refusal:
                notice_death(link)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                send(link, {"welcome": self.protocol.greeting})
                guest = Guest(hello["rank"], hello["host"], address, link)
                self.guests[guest.rank] = guest
                self.changed.notify_all()
                return
            self.refused[f"{address}: {refusal}"] += 1
            if not stranger:
                self.contradictions.append(f"{hello['host']} ({address}): {refusal}")
                self.changed.notify_all()
            link.settimeout(0)  # its other end need not listen
            send(link, {"refused": refusal})
        link.close()

    def _refusal(self, hello: Message) -> str | None:
        """Why who greets like this cannot take part. Raises: ValueError if it is no greeting."""
        protocol = self.protocol
        if hello.get("greeting") != protocol.greeting:
            if str(hello.get("greeting")).startswith(protocol.greeting[:15]):
                raise ValueError("the two nodes have different versions: copy the code again")
            raise ValueError(f"not a greeting from {protocol.name}")
        shapes.check(hello, shapes.HELLO, "its greeting")
        rank = hello["rank"]
        if hello["nodes"] != self.nodes:
            return f"node 0 was started with --nodes {self.nodes}, this node with {hello['nodes']}"
        if not 0 < rank < self.nodes:
            return f"--rank {rank} is not one of 1 to {self.nodes - 1}"
        with self.changed:
            self._forget_the_gone()
            if rank in self.guests:
                other = self.guests[rank].host
                return f"{other} has connected with --rank {rank}, too: give each its own"
            if self.begun:
                return f"the check has begun without node {rank}: start it again on all nodes"
        return None

    def _forget_the_gone(self) -> None:
        """Before the meeting begins: a guest that has left can come again."""
        for rank, guest in list(self.guests.items()) if not self.begun else ():
            try:
                guest.link.settimeout(0)
                guest.link.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                continue  # it is there, and as quiet as a node has to be
            except OSError:
                pass
            guest.link.close()
            del self.guests[rank]

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
            return answer(self.handlers, request["do"], request)
        if rank not in self.guests:
            return {"error": "it has already left the check"}
        link = self.guests[rank].link
        try:
            link.settimeout(seconds)
            send(link, request)
            reply = receive(link, seconds=seconds)
            return shapes.check(reply, self.protocol.answers[request["do"]], "its answer")
        except (OSError, ValueError) as fault:
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
        self.closed = True
        with contextlib.suppress(OSError):
            self.door.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept()
        self.door.close()


def answer(handlers: Handlers, do: str, request: Message) -> Message:
    """What the handler ``do`` makes of a request; {"error": reason} if it fails."""
    try:
        return handlers[do](request)
    except UserError as error:
        return {"error": str(error)}
    except Exception as fault:  # a bug in one check must not hide what the others find
        return {"error": f"{type(fault).__name__}: {fault}"}
