"""The pre-flight check before training on several nodes: on one network, and in namespaces."""

import json
import re
import shutil
import signal
import socket
from pathlib import Path

import pytest
from conftest import ROOT, shell
from nodes import Nodes, need, type_on_each
from running import TINY_LINE, Running, eventually, tiny

from utils.errors import UserError
from utils.launch import network, preflight, supervise
from utils.launch.network import free_port

HERE = "127.0.0.1"
CHECK = """
import sys, time; sys.path.insert(0, '.')
from utils.launch import preflight, supervise
node, nodes, port, processes, wait, busy = map(int, sys.argv[2:])
def main():
    names = preflight.Names("-n", "-nr", "port")
    check = preflight.Preflight(node, nodes, (sys.argv[1], port), wait, names)
    check.begin()
    time.sleep(busy)  # as the import of torch
    check.finish(processes)
supervise.run_main(main)
"""


class Line:
    """The check alone, as it is called before torch is imported, at a port of its own."""

    def __init__(self, folder: Path):
        self.script, self.port = folder / "check.py", free_port()
        self.script.write_text(CHECK)

    def words(self, rank, nodes=2, processes=1, wait=60, master=HERE, busy=0) -> list[str]:
        """The words of node ``rank``."""
        numbers = rank, nodes, self.port, processes, wait, busy
        return [str(self.script), master, *map(str, numbers)]

    def __call__(self, rank: int, **more: int | str) -> str:
        return " ".join(["python", *self.words(rank, **more)])


@pytest.fixture
def line(tmp_path) -> Line:
    return Line(tmp_path)


def test_nodes_that_agree_meet_and_leave_the_port(line):
    results = shell(line(2, nodes=3, busy=3), line(0, nodes=3), line(1, nodes=3))
    for result in results:
        assert (result.code, result.err) == (0, "")
        assert "for the processes of node 2 of 3: all nodes are connected (1 s, at" in result.out
    assert "all 3 nodes are here" in results[1].out
    socket.create_server((HERE, line.port)).close()


def test_missing_nodes_are_counted_and_named_on_every_node(line):
    results = shell(line(0, nodes=3, wait=3), line(2, nodes=3))
    assert re.search(r"node 2 \(.*\) is here", results[0].out)
    for result in results:
        result.fails_with(f"node 1 of 3 did not connect to {HERE}:{line.port} within 3 s")
        assert re.search(rf"waiting at {HERE}:{line.port} for node 1 of 3 \(\d", result.out)
    (result,) = shell(line(1, wait=3))
    assert f"waiting for node 0 at {HERE}:{line.port}: connection refused (1 s" in result.out
    assert f"note: {HERE} is this machine" in result.out
    result.fails_with(f"{HERE}:{line.port} cannot be reached after 3 s (connection refused)")


NOWHERE = "nowhere.invalid cannot be resolved"


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([(0, {}), (1, {"nodes": 3})], ("-n is 2 on", "but 3 on", "same")),
        ([(0, {}), (1, {"processes": 2})], ("processes per node differs", "1 on", "2 on")),
        ([(r, {"nodes": 3}) for r in (0, 1, 1)], ("two nodes have -nr 1", "its own")),
        ([(0, {}), (0, {})], ("two nodes have -nr 0", "its own")),
        ([(rank, {"master": "nowhere.invalid"}) for rank in (0, 1)], (NOWHERE,)),
        ([(0, {"master": "192.0.2.1"})], ("192.0.2.1 is not an address of this machine",)),
    ],
    ids=["nodes", "processes", "rank 1 twice", "rank 0 twice", "no name", "foreign address"],
)
def test_a_set_up_that_cannot_work_ends_all(line, nodes, words):
    for result in shell(*(line(rank, **more) for rank, more in nodes)):
        result.fails_with(*words)


def test_a_second_node_0_may_be_there_before_the_first_one_itself(monkeypatch):
    """Each gets the error that names the mistake, whichever node 0 is the one too many."""
    port, connect = free_port(), network.connect
    greeting = {"greeting": preflight.GREETING, "rank": 0, "nodes": 2, "host": "other", "ports": []}
    said = []

    def after_the_other(*place):
        other = connect(HERE, port, 10.0)
        other.sendall(json.dumps(greeting).encode() + b"\n")
        said.append(other)
        return connect(*place)

    monkeypatch.setattr(network, "connect", after_the_other)
    check = preflight.Preflight(0, 2, (HERE, port), 30.0, preflight.Names("-n", "-nr", "port"))
    check.begin()
    with pytest.raises(UserError, match="two nodes have -nr 0"):
        check.finish(1)
    with said[0], said[0].makefile() as lines:
        assert "two nodes have -nr 0" in json.loads(list(lines)[1])["end"]


def test_over_ssh_a_master_that_is_up_and_silent_is_an_error(monkeypatch):
    """A firewall drops what is sent to it; a master that is late would refuse."""
    monkeypatch.setenv(supervise.MARKER, "guard:run")
    monkeypatch.setattr(preflight, "SILENT", 0.0)
    monkeypatch.setattr(network, "connect", lambda *_: _[-1]("no answer"))
    check = preflight.Preflight(1, 2, (HERE, 8), 30.0, preflight.Names())
    check.begin()
    with pytest.raises(UserError, match=r"node 0 is up.*:8 does not answer .*no answer"):
        check.finish(1)


def test_a_port_in_use_is_refused_on_every_node(line):
    """The other program accepts and says nothing."""
    with socket.create_server((HERE, line.port)):
        first, other = shell(line(0), line(1))
    first.fails_with(f"port {line.port} of {HERE} is taken by another program")
    other.fails_with(f"what answers at {HERE}:{line.port} is not node 0")


def test_strangers_at_the_port_are_ignored(line):
    with Running(*line.words(0)) as first:
        first.until("waiting at")
        strangers = [socket.create_connection((HERE, line.port)) for _ in range(100)]
        said = (b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[" * 100_000 + b"\n", b'{"greeting": 1}\n')
        for text, stranger in zip(said, strangers, strict=False):
            stranger.sendall(text)
        (other,) = shell(line(1))
        for stranger in strangers:
            stranger.close()
        assert (other.code, first.result().code) == (0, 0)


@pytest.mark.parametrize(
    ("signum", "code", "words"),
    [
        (signal.SIGINT, 130, "node 0 was interrupted"),
        (signal.SIGKILL, -9, "lost touch with node 0"),
    ],
)
def test_a_node_that_leaves_is_waited_for_and_the_end_of_node_0_ends_all(line, signum, code, words):
    with Running(*line.words(0, nodes=4)) as first, Running(*line.words(2, nodes=4)) as stays:
        first.until("node 2 .* is here")
        with Running(*line.words(1, nodes=4)) as leaves:
            first.until("node 1 .* is here")
            leaves.send(signal.SIGINT)
            assert leaves.result().code == 130
        first.until("node 1 .* has left")
        first.until("for nodes 1, 3 of 4")
        first.send(signum)
        assert first.result().code == code
        stays.result().fails_with(words)


@pytest.mark.parametrize("what", ["code", "torch"])
def test_nodes_with_other_code_or_another_torch(line, tmp_path, what):
    """On the second node a file has changed, or the installed torch is of another release."""
    code, words = ROOT, ("torch differs", "1.99 on", "install the same")
    other = tmp_path / "other"
    if what == "torch":
        (other / "torch-1.99.0.dist-info").mkdir(parents=True)
        metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 1.99.0\n"
        (other / "torch-1.99.0.dist-info/METADATA").write_text(metadata)
    else:
        code, words = other, ("this code differs", "utils/samplers.py", "copy it")
        for part in ("utils", "scripts/recipes"):
            shutil.copytree(ROOT / part, other / part)
        with open(other / "utils" / "samplers.py", "a") as file:
            file.write("# a change that git does not know of\n")
    for result in shell(line(0), f"cd {code} && PYTHONPATH={other} {line(1)}"):
        result.fails_with("(node 1)", *words)


def test_closed_data_ports_are_one_error_on_both_nodes(folder, tmp_path):
    need("nft")
    command = "MASTER_ADDR={ip} NPROC=1 bash scripts/multi_node_train.sh 1 {rank} 2 run 5 --"
    with Nodes(2) as nodes:
        nodes[1].block_ports("1024-8887, 8889-65535")
        command += f" {TINY_LINE} --output-dir {tmp_path} {folder}"
        for result in type_on_each(nodes, command, **tiny()[1]):
            result.fails_with(
                "node0 (node 0) cannot connect to node1 (node 1)", "open all TCP ports"
            )
        assert eventually(lambda: not any(node.processes() for node in nodes))
