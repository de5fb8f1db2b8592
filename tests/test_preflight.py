"""The pre-flight check before training on several nodes; in namespaces: test_wrappers."""

import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, python, shell
from joined import command
from running import Running, eventually, free_port

from utils import loop, report
from utils.start import addresses, agreement, preflight, world
from utils.start.errors import UserError

sys.path.append(str(ROOT / "scripts/ssh"))
import guard

HERE = "127.0.0.1"


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def line(port):
    """Gives the command of the check, which the wrappers run before torchrun."""

    def check(rank, nodes=2, processes=1, wait=60, master=HERE):
        return f"python -m utils.start.preflight {rank} {nodes} {processes} {master}:{port} {wait}"

    return check


def begun(line: str) -> Running:
    """The command in the background."""
    return Running(*line.split()[1:])


def test_nodes_that_agree_meet_and_leave_the_port(line, port):
    """At once: node 0's process continues, and torch's rendezvous takes the port."""
    code = (
        "import socket; from utils.start import preflight\n"
        f"preflight.meet(0, 3, 1, ('{HERE}', {port}), 60)\n"
        f"socket.create_server(('{HERE}', {port}))"
    )
    results = shell(line(2, nodes=3), f'python -c "{code}"', line(1, nodes=3))
    for result in results:
        assert (result.code, result.err) == (0, "")
        assert "all 3 nodes are here" in result.out


def test_missing_nodes_are_counted_and_named_on_every_node(line, port):
    results = shell(line(0, nodes=3, wait=3), line(2, nodes=3))
    assert re.search(r"\(node 2\) has joined from ", results[0].out)
    for result in results:
        result.fails_with(f"node 1 of 3 did not connect to {HERE}:{port} within 3 s")
        assert re.search(rf"waiting at {HERE}:{port} for node 1 of 3 \(\d", result.out)
    (result,) = shell(line(1, wait=3))
    assert f"waiting for the master {HERE}:{port}: connection refused (1 s" in result.out
    assert f"note: {HERE} is this machine" in result.out
    result.fails_with(f"{HERE}:{port} cannot be reached after 3 s (connection refused)")


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([(0, {}), (1, {"nodes": 3})], ("--nodes", ": 2 on", ", 3 on", "same")),
        ([(0, {}), (1, {"processes": 2})], ("processes per node differs", "1 on", "2 on")),
        ([(r, {"nodes": 3}) for r in (0, 1, 1)], ("two nodes have rank 1 (--node-rank", "its own")),
        ([(0, {}), (0, {})], ("two nodes have rank 0", "its own")),
        ([(0, {"master": "no.invalid"}), (1, {"master": "no.invalid"})], ("cannot be resolved",)),
        ([(0, {"master": "192.0.2.1"})], ("192.0.2.1 is not an address of this machine",)),
    ],
)
def test_a_set_up_that_cannot_work_ends_all(line, nodes, words):
    for result in shell(*(line(rank, **more) for rank, more in nodes)):
        result.fails_with(*words)


def test_a_port_in_use_is_refused_on_every_node(line, port):
    """The other program accepts and says nothing. For torchrun, whose restart chooses
    another port, it is not bad input."""
    with socket.create_server((HERE, port)):
        first, other, launched = shell(line(0), line(1), f"TORCHELASTIC_MAX_RESTARTS=1 {line(0)}")
    first.fails_with(f"port {port} of {HERE} is taken by another program")
    other.fails_with(
        f"what answers at {HERE}:{port} is not node 0", "a training that has begun? Oth"
    )
    assert launched.code == 69, launched


def test_strangers_at_the_port_are_ignored(line, port):
    with begun(line(0)) as first:
        first.until("waiting at")
        strangers = [socket.create_connection((HERE, port)) for _ in range(100)]
        said = (b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[" * 100_000 + b"\n", b'{"rank": 1}\n')
        for text, stranger in zip(said, strangers, strict=False):
            stranger.sendall(text)
        (other,) = shell(line(1))
        for stranger in strangers:
            stranger.close()
        assert (other.code, first.result().code) == (0, 0)


def test_a_stranger_who_poses_as_a_node_cannot_keep_the_others_waiting(line, port):
    """Nor do its words reach the terminal as they are."""
    facts = {"rank": 1, "nodes": 2, "ports": [1, 2]}
    facts |= {"host": "a\x1b[2J\nb", "name": "a\x1b[2J (node 1)"}
    agree = {"this code": agreement.code(), "torch": agreement.release(torch.__version__)}
    facts["agree"] = {agreement.PROCESSES: 1} | agree
    with begun(line(0)) as first:
        first.until("waiting at")
        with socket.create_connection((HERE, port)) as stranger:
            stranger.sendall(json.dumps(facts).encode() + b"\n")
            came = time.monotonic()
            result = first.result()  # the stranger has been asked something, and says nothing
            took = time.monotonic() - came
    result.fails_with(r"a\x1b[2J", "(node 1) was lost in the pre-flight check: look at what it")
    assert "\x1b" not in result.out + result.err
    assert took < 3 * preflight.PATIENCE


@pytest.mark.parametrize(
    ("signum", "code", "words"),
    [
        (signal.SIGINT, 130, "node 0 was interrupted"),
        (signal.SIGKILL, -9, "lost touch with node 0"),
    ],
)
def test_a_node_that_leaves_is_waited_for_and_the_end_of_node_0_ends_all(line, signum, code, words):
    with begun(line(0, nodes=4)) as first, begun(line(2, nodes=4)) as stays:
        first.until("node 2. has joined")
        with begun(line(1, nodes=4)) as leaves:
            first.until("node 1. has joined")
            leaves.send(signal.SIGINT)
            assert leaves.result().code == 130
        first.until("node 1. has left")
        first.until("for nodes 1, 3 of 4")
        first.send(signum)
        assert first.result().code == code
        stays.result().fails_with(words)


@pytest.mark.parametrize(
    ("bad", "words", "error"),
    [
        (0, ["/nowhere"], "data folder /nowhere is missing"),
        (1, ["--dummy", "-a", "nosuch"], "unknown arch 'nosuch'"),  # torch has been imported
    ],
)
def test_a_node_that_fails_before_the_check_tells_the_others_why(line, port, bad, words, error):
    place = ["--nodes", 3, "--node-rank", bad, "--dist-url", f"tcp://{HERE}:{port}"]
    with begun(line(1 - bad, nodes=3)) as first, begun(line(2, nodes=3)) as other:
        first.until("node 2. has joined" if bad else "waiting for the master")
        command("imagenet_ddp", *place, *words).fails_with(f"error: {error}")
        for waited in (first, other):
            waited.result().fails_with(f"(node {bad}): {error}")


OTHER_TORCH = "Metadata-Version: 2.1\nName: torch\nVersion: 1.99.0\n"


@pytest.mark.parametrize(
    ("file", "more", "words"),
    [
        (
            "utils/data/samplers.py",
            "# more\n",
            ("this code differs", "utils/data/samplers.py", "copy it"),
        ),
        ("torch-1.99.0.dist-info/METADATA", OTHER_TORCH, ("torch differs", "1.99 on", "install")),
    ],
)
def test_nodes_with_other_code_or_another_torch(line, tmp_path, file, more, words):
    other = tmp_path / "other"  # of the second node
    shutil.copytree(ROOT / "utils", other / "utils")
    (other / file).parent.mkdir(exist_ok=True)
    with open(other / file, "a") as changed:
        changed.write(more)
    for result in shell(line(0), f"cd {other} && PYTHONPATH={other} {line(1)}"):
        result.fails_with("(node 1)", *words)


WRAPPER = """
import os, subprocess, sys
os.environ["IMAGENET_LAUNCHER"] = str(os.getpid())
subprocess.run([sys.executable, *sys.argv[1:]])
"""


def test_the_check_ends_with_the_wrapper_that_has_started_it(line):
    with Running("-c", WRAPPER, *line(1, wait=600).split()[1:]) as wrapper:
        wrapper.until("waiting for the master")
        wrapper.meet_family()
        wrapper.send(signal.SIGKILL)
        assert eventually(lambda: not any(one.lives() for one in wrapper.family))


def test_processes_of_a_node_look_at_its_files_once():
    """Two nodes of three processes: the first of each node reads the sizes."""
    together, values = threading.Barrier(6, timeout=60), [None] * 6

    def compare(rank: int, sizes: tuple[float, str]) -> str | None:
        def gather(value: object) -> list:
            values[rank] = value
            together.wait()
            gathered = [*values]
            together.wait()
            return gathered

        node, local = divmod(rank, 3)
        group = mock.Mock(nodes=2, local_rank=local, local_size=3, node_name=f"n{node}")
        group.gather, source = gather, mock.Mock()
        source.fingerprint.return_value, source.sample_sizes.return_value = "60 images", sizes
        try:
            agreement.compare_data("train", source, group)
        except UserError as error:
            return str(error)
        finally:
            assert source.sample_sizes.called == (local == 0)

    for other, end in (
        ((9.5, "a"), None),
        (
            (9.0, "b"),
            "the size of files in train differs between the nodes: 9.500 bytes on average (a) on "
            "n0, 9.000 bytes on average (b) on n1: make it the same on every node",
        ),
    ):
        with ThreadPoolExecutor(6) as pool:
            ends = pool.map(compare, range(6), [(9.5, "a")] * 3 + [other] * 3)
            assert [*ends] == [end] * 6


@pytest.mark.parametrize(
    ("messages", "said"),
    [(["gone", "gone"], "gone"), ([None, "gone"], "on n1: gone"), (["gone", None], "on n0: gone")],
)
def test_an_error_names_the_node_that_alone_has_it(messages, said):
    """Every node prints it: its user would look for a missing class on the wrong machine."""

    def compute() -> None:
        if messages[0]:
            raise UserError(messages[0])

    first = mock.Mock(nodes=2, local_rank=0, node_name="n0")
    first.gather.return_value = list(zip(("n0", "n1"), messages, strict=True))
    with pytest.raises(UserError, match=f"^{said}$"):
        world.first_on_node(compute, first)


def test_an_error_of_rank_0_says_on_other_nodes_where_it_is_from(monkeypatch):
    def receive(box: list, **_: object) -> None:
        box[1] = "gone"

    monkeypatch.setattr(dist, "broadcast_object_list", receive)
    for rank, said in ((1, "gone"), (2, "on node 0: gone")):
        other = world.World(torch.device("cpu"), rank, size=4, local_size=2, nodes=2)
        with pytest.raises(UserError, match=f"^{said}$"):
            world.broadcast_from_rank0(int, other)


def test_a_full_disk_of_node_0_is_not_taken_for_that_of_another(monkeypatch):
    monkeypatch.setattr(loop, "broadcast_from_rank0", lambda *_: "cannot write x")
    monkeypatch.setattr(report, "end", mock.Mock())
    for rank, said in ((1, "cannot write x; free"), (2, "on node 0: cannot write x; free")):
        session = mock.Mock(world=world.World(torch.device("cpu"), rank, size=4, local_size=2))
        session.loaders.test = session.stop.error = session.stop.reason = None
        with pytest.raises(UserError, match=f"^{said}"):
            loop.end(session, mock.Mock())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("0 2 x h:1", "usage: python -m utils"),
        ("0 2 1", "usage: python -m utils"),
        ("0 2 1 h:1 0.5", "--dist-timeout 0.5 is not a number of seconds, at least 1"),
        ("0 2 1 h:1 5m", "--dist-timeout 5m is not a number"),  # as the wrappers hand it on
    ],
)
def test_wrong_arguments_of_the_check_are_one_error_line(words, said):
    shell(f"python -m utils.start.preflight {words}")[0].fails_with(said)


# ---- questions about the network

WRONG = ["10.0.0.1:80", "tcp://:80", "http://10.0.0.1:80"]
WRONG += [f"tcp://10.0.0.1{port}" for port in ("", ":0", ":65536", ":port", ":80/path")]


def test_files_of_every_room_are_compared():
    """Not only those at the top."""
    files = {f"utils/{room}/__init__.py" for room in ("start", "data", "model", "run")}
    assert files | {"utils/recipes/tiny.txt"} <= agreement.code().keys()
    assert agreement.release("2.14.1+cu130") == "2.14", "patches and CUDA may differ"


def test_the_interface_that_a_user_has_chosen_stays(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setattr(preflight, "interface_towards", lambda _: "eth7")
    preflight.find_master(0, 2, (HERE, 1), 1.0)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    assert [os.environ[name] for name in names] == ["mine", "mine"]


@pytest.mark.parametrize("free_port", [addresses.free_port, guard.free_port])
def test_a_free_port_is_none_that_connections_get(free_port, monkeypatch, tmp_path):
    """Another program could have it before the job listens."""
    first = int(addresses.CONNECTIONS.read_text().split()[0])
    least, end = (10_000, first) if first > 20_000 else (1024, 65536)  # this machine may give all
    assert all(least <= free_port() < end for _ in range(9))
    monkeypatch.setattr(addresses, "CONNECTIONS", tmp_path / "range")
    (tmp_path / "range").write_text("1024 65535\n")  # all are connections'
    assert 1024 <= free_port() < 65536


def test_urls_of_the_master():
    assert addresses.parse_tcp_url("tcp://localhost:65535/") == ("localhost", 65535)
    assert addresses.parse_tcp_url("tcp://[fe80::1]:80") == ("fe80::1", 80)
    with pytest.raises(UserError, match="in place of MASTER_IP and MASTER_PORT, such as tcp://"):
        addresses.parse_tcp_url("tcp://MASTER_IP:MASTER_PORT")
    for url in WRONG:
        with pytest.raises(UserError, match=f"{re.escape(url)} is not of the form tcp://HOST:PORT"):
            addresses.parse_tcp_url(url)
    with pytest.raises(
        UserError, match=r"tcp://::1:80 is not of the form tcp://\[IPV6_ADDRESS\]:P"
    ):
        addresses.parse_tcp_url("tcp://::1:80")
    with pytest.raises(UserError, match=r"to MASTER_ADDR=::1: give .* IPv4 address"):
        preflight.rendezvous("[::1]:80")


def test_a_master_that_starts_late_is_waited_for(port, monkeypatch, capsys):
    servers = []
    late = threading.Timer(1.5, lambda: servers.append(socket.create_server((HERE, port))))
    late.start()
    monkeypatch.setattr(preflight, "is_own", lambda _: False)
    assert preflight.rendezvous(f"{HERE}:{port}") == f"{HERE} false"
    assert servers, "it was not waited for"
    said = capsys.readouterr().err
    assert f"waiting for the master {HERE}:{port}: connection refused (1 s, at most 300)" in said
    late.join()
    monkeypatch.undo()
    with servers[0], pytest.raises(UserError, match=f"port {port} of .* MASTER_PORT"):
        preflight.rendezvous(f"{HERE}:{port}")  # on the master, another program's
    with pytest.raises(UserError, match=r"no\.invalid cannot be resolved"):
        preflight.connect("no.invalid", port, 60.0)
    with pytest.raises(UserError, match=r"172\.31\.\.10 cannot be resolved .*no valid name"):
        preflight.connect("172.31..10", port, 60.0)
    assert addresses.address_towards("172.31..10") is None


@pytest.mark.long  # a minute
def test_torchrun_waits_for_another_node_no_longer_than_its_training(tmp_path):
    """A node that ended after this check, before its torchrun answers; torch waits for minutes."""
    (tmp_path / "train.py").touch()
    where = ("--nnodes=2", "--node_rank=0", f"--master_addr={HERE}", f"--master_port={free_port()}")
    script = (tmp_path / "train.py", "--dist-timeout", 1)
    done = python("scripts/torchrun.py", *where, "--nproc_per_node=1", *script)
    assert "could not meet the other nodes" in done.sentence
    assert (done.code, "1/2 clients joined" in done.err) == (69, True)
