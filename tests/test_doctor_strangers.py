"""Whatever arrives at the doctor's port is refused in a sentence, and the meeting goes on."""

import contextlib
import json
import random
import socket
import struct
import threading

import pytest
from conftest import ROOT, python
from running import Running, eventually

from utils.launch.network import free_port

DOCTOR = "scripts/doctor.py"
SMALL = "--quick --batch-size 16 --image-size 32 --workers 1 --nodes 2 --master 127.0.0.1"
SEEDS = range(12)  # of each kind of stranger
GREETING = {"greeting": "imagenet doctor, protocol 3", "rank": 1, "nodes": 2, "host": "x"}
PROTOCOLS = (
    b"GET / HTTP/1.1\r\nHost: node0\r\n\r\n",
    bytes.fromhex("16030100c8010000c40303") + bytes(193),  # a TLS hello
    b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n",
    struct.pack("!I", 0x3C85F7CE) + bytes(8),
    b"\0\0\0\x02{}",
    b"\0\0\0\x04null",
    b"\0\0\0\x03\xff\xfe\xfd",
)
VALUES = (None, True, -1, 1.5, 10**400, float("nan"), "1", "\x1b[2J", "x" * 9000, [], {}, [[1]], "")


@pytest.fixture(autouse=True, scope="module")
def scripts_on_path():
    """Modules of scripts/checkup, as scripts/doctor.py finds them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        yield


class Stranger:
    """A connection to the doctor on which anything may be said; nothing waits for an answer."""

    def __init__(self, port: int, seed: int):
        self.link = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.dice = random.Random(seed)

    def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # it may have been shown out
            self.link.sendall(data)

    def say(self, message: object) -> None:
        data = json.dumps(message).encode()
        self.send(struct.pack("!I", len(data)) + data)

    def hear(self) -> dict:
        """The next message; {} if the connection was closed."""
        from checkup import messages

        try:
            return messages.receive(self.link)
        except OSError:
            return {}

    def scan(self) -> None:
        """Closes, politely or not."""
        hard = struct.pack("ii", self.dice.randrange(2), 0)
        self.link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, hard)
        self.link.close()

    def speak_otherwise(self) -> None:
        """Another protocol, or random bytes."""
        self.send(self.dice.choice((*PROTOCOLS, self.dice.randbytes(self.dice.randrange(2000)))))

    def promise(self) -> None:
        """A length that nobody would send."""
        length = self.dice.choice((10_001, 1 << 20, 1 << 26, (1 << 31) - 1, (1 << 32) - 1))
        self.send(struct.pack("!I", length) + bytes(self.dice.randrange(3000)))

    def nest(self) -> None:
        """JSON of more levels than Python's parser takes."""
        data = self.dice.choice((b"[", b'{"a":', b"[[{},")) * self.dice.randrange(1500, 1900)
        self.send(struct.pack("!I", len(data)) + data)

    def nest_in_the_greeting(self) -> None:
        deep = b"[" * self.dice.randrange(100, 4000)
        field = self.dice.choice(("greeting", "rank", "nodes", "host"))
        whole = json.dumps(GREETING | {field: "@"}).encode()
        data = whole.replace(b'"@"', deep + b"]" * len(deep))
        self.send(struct.pack("!I", len(data)) + data)
        self.say({"time": 1.0})

    def greet_wrongly(self) -> None:
        """A wrong type somewhere; then the answer to what is asked next."""
        field = self.dice.choice(("rank", "nodes", "host", "more"))
        self.say(GREETING | {field: self.dice.choice(VALUES)})

    def leave_out(self) -> None:
        field = self.dice.choice(("greeting", "rank", "nodes", "host"))
        self.say({key: value for key, value in GREETING.items() if key != field})

    def take_a_rank(self) -> None:
        """A good greeting as node 1, and then nonsense."""
        self.say(GREETING)
        if self.dice.randrange(4):
            self.say({"time": self.dice.choice(VALUES)} if self.dice.randrange(2) else {})

    def say_nothing(self) -> None:
        """Nothing, or a byte now and then (see `drip`)."""
        if self.dice.randrange(2):
            self.send(b"\0\0")


KINDS = [
    Stranger.scan,
    Stranger.speak_otherwise,
    Stranger.promise,
    Stranger.nest,
    Stranger.nest_in_the_greeting,
    Stranger.greet_wrongly,
    Stranger.leave_out,
    Stranger.take_a_rank,
    Stranger.take_a_rank,
    Stranger.say_nothing,
    Stranger.say_nothing,
    Stranger.say_nothing,
]


def listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False


def test_two_doctors_meet_among_strangers(folder):
    """144 of them, and those that do not leave are still there when node 1 comes."""
    port = free_port()
    options = (*SMALL.split(), "--port", port, "--data", folder)
    done = threading.Event()
    strangers = []

    def drip() -> None:
        while not done.wait(0.2):
            for one in strangers:
                one.send(b"\0")

    with Running(DOCTOR, *options, "--rank", 0) as first:
        assert eventually(lambda: listens(port))
        for seed in SEEDS:
            for number, kind in enumerate(KINDS):
                strangers.append(Stranger(port, 100 * number + seed))
                kind(strangers[-1])
        slow = threading.Thread(target=drip)
        slow.start()
        second = python(DOCTOR, *options, "--rank", 1)
        done.set()
        slow.join()
        result = first.result()
        for one in strangers:
            one.link.close()
    assert (result.code, second.code) == (0, 0), (result, second)
    assert "2 of 2 nodes connected" in result.out
    assert not result.err + second.err
    assert "\x1b" not in result.out
    assert "refused 127.0.0.1: a stranger, or another program (" in result.out


@pytest.fixture
def host():
    """Node 0 of two, in this process."""
    from checkup.meeting import Host
    from checkup.shapes import DOCTOR

    node_0 = Host(free_port(), 2, {}, DOCTOR)
    yield node_0
    node_0.dismiss(lambda rank: {})


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"greeting": "imagenet doctor, protocol 1"}, "different versions"),
        (GREETING | {"nodes": 3}, "was started with --nodes 2, this node with 3"),
        (GREETING | {"rank": 2}, "--rank 2 is not one of 1 to 1"),
        (GREETING | {"rank": "1"}, "'rank' of its greeting is not a whole number"),
        (GREETING | {"rank": True}, "'rank' of its greeting is not a whole number"),
        (GREETING | {"host": "\x1b[2J"}, "'host' of its greeting is not what belongs there"),
        ({"greeting": GREETING["greeting"], "rank": 1, "nodes": 2}, "its greeting has no 'host'"),
        ([], "not a dictionary"),
        ({}, "not a greeting from the doctor"),
    ],
)
def test_each_is_told_why(host, message, words):
    stranger = Stranger(host.port, 0)
    stranger.say(message)
    host.welcome(0.05, lambda missing: None)
    assert words in stranger.hear()["refused"]
    assert words in "".join(host.refused)


def test_a_node_that_has_left_can_come_again(host):
    """While it is still there, no other gets its rank."""
    host.nodes = 3
    told, guests = [], []
    for _ in range(3):
        guest = Stranger(host.port, 0)
        guests.append(guest)
        guest.say(GREETING | {"nodes": 3})
        guest.say({"time": 1.0})
        link, _ = host.door.accept()
        host._let_in(link, "127.0.0.1")
        told += [guest.hear(), guest.hear()]
        if len(told) == 2:
            guest.link.close()
    assert told[1] == told[3] == {"welcome": GREETING["greeting"]}
    assert "x has connected with --rank 1, too" in told[4]["refused"]
    assert host.missing == [2]


@pytest.mark.parametrize(
    ("do", "reply", "words"),
    [
        ("clock", {"time": "12:00"}, "'time' of its answer is not a number"),
        ("clock", {}, "its answer has no 'time'"),
        ("facts", {"versions": {}}, "its answer has no 'gpus'"),
        ("open", {"ports": [0]}, "a part of 'ports' of its answer is not what"),
        ("probe", {"ways": [{"to": 1}]}, "a part of 'ways' of its answer has no 'address'"),
        ("transfer", {"bytes_per_s": float("inf")}, "is not a number"),
        ("torch", {"gloo": {"latency_s": 1, "bytes_per_s": True}}, "is not a number"),
        ("torch", {"x": 1}, "has 'x', which does not belong there"),
    ],
)
def test_an_impostor_that_answers_nonsense_has_left(host, do, reply, words):
    """It has met node 0 as node 1; from then on it is a node that does not answer."""
    stranger = Stranger(host.port, 0)
    for message in (GREETING, {"time": 1.0}, reply):
        stranger.say(message)
    # Not the whole of `welcome`, to which someone who talks unasked is gone.
    link, _ = host.door.accept()
    host._let_in(link, "127.0.0.1")
    assert words in host.ask(do, {1: {}})[1]["error"]
    assert not host.clocks()
    assert host.missing == [1]


def test_a_node_refuses_nonsense_from_node_0():
    """Whatever has taken the master's port; the request is not carried out."""
    from checkup import visitor
    from checkup.shapes import DOCTOR

    for request in (
        {"do": ["clock"]},
        {"do": "clock", "x": 1},
        {"do": "open", "token": "../.."},
        {"do": "transfer", "streams": 10**9},
        {"do": "end", "findings": [{}], "code": 0, "verdict": ""},
        {"do": "end", "findings": [], "code": "0", "verdict": ""},
    ):
        here, there = socket.socketpair()
        with there:
            data = json.dumps(request).encode()
            there.sendall(struct.pack("!I", len(data)) + data)
            with pytest.raises(visitor.NoMeeting, match="lost touch with node 0"):
                visitor.serve(here, {}, DOCTOR)
