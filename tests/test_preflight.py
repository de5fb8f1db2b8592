"""The pre-flight check before training on several nodes: on one network, and in namespaces."""

import re
import shutil
import signal
import socket
from pathlib import Path

import pytest
from conftest import ROOT, Result, shell
from nodes import Nodes, need, type_on_each
from running import TINY_LINE, Running, eventually, tiny

from utils.launch.network import free_port

HERE = "127.0.0.1"
CHECK = """
import sys; sys.path.insert(0, '.')
from utils.launch import preflight, supervise
node, nodes, port, processes, wait = map(int, sys.argv[2:])
def main():
    names = preflight.Names("-n", "-nr", "port")
    check = preflight.Preflight(node, nodes, (sys.argv[1], port), wait, names)
    check.begin()
    check.finish(processes)
supervise.run_main(main)
"""


class Line:
    """The check alone, as it is called before torch is imported, at a port of its own."""

    def __init__(self, folder: Path):
        self.script, self.port = folder / "check.py", free_port()
        self.script.write_text(CHECK)

    def words(
        self, rank: int, nodes: int = 2, processes: int = 1, wait: int = 60, master: str = HERE
    ) -> list[str]:
        """The words of node ``rank``."""
        return [str(self.script), master, *map(str, (rank, nodes, self.port, processes, wait))]

    def __call__(self, rank: int, **more: int | str) -> str:
        return " ".join(["python", *self.words(rank, **more)])


@pytest.fixture
def line(tmp_path) -> Line:
    return Line(tmp_path)


def errors(results: list[Result]) -> list[str]:
    """The error of each node, all of which ended with code 2 and without a traceback."""
    for result in results:
        assert result.code == 2, result.out + result.err
    return [result.sentence for result in results]


def test_nodes_that_agree_meet_and_leave_the_port(line):
    results = shell(*(line(rank, nodes=3) for rank in (2, 0, 1)))
    for result in results:
        assert (result.code, result.err) == (0, "")
    assert "all 3 nodes are here" in results[1].out
    socket.create_server((HERE, line.port)).close()


def test_a_node_that_is_missing_is_counted_and_named_on_every_node(line):
    results = shell(line(0, nodes=3, wait=4), line(2, nodes=3))
    for error in errors(results):
        assert f"node 1 of 3 did not connect to {HERE}:{line.port} within 4 s" in error
    assert re.search(r"node 2 \(.*\) is here", results[0].out)
    for result in results:
        assert re.search(rf"waiting at {HERE}:{line.port} for node 1 of 3 \(\d", result.out)


def test_node_0_that_is_missing_is_counted(line):
    (result,) = shell(line(1, wait=4))
    assert f"waiting for node 0 at {HERE}:{line.port}: connection refused (1 s" in result.out
    assert f"note: {HERE} is this machine" in result.out
    (error,) = errors([result])
    assert f"{HERE}:{line.port} cannot be reached after 4 s (connection refused)" in error


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
    for error in errors(shell(*(line(rank, **more) for rank, more in nodes))):
        for word in words:
            assert word in error


def test_a_port_in_use_is_refused_on_every_node(line):
    """The other program accepts and says nothing."""
    with socket.create_server((HERE, line.port)):
        first, other = errors(shell(line(0), line(1)))
    assert f"port {line.port} of {HERE} is taken by another program" in first
    assert f"what answers at {HERE}:{line.port} is not node 0" in other


def test_strangers_at_the_port_are_ignored(line):
    with Running(*line.words(0)) as first:
        first.until("waiting at")
        said = (
            b"GET / HTTP/1.1\r\n\r\n",
            b"{}\n",
            b"[" * 100_000 + b"\n",
            b'{"greeting": 1}\n',
            b"",
        )
        strangers = [socket.create_connection((HERE, line.port)) for _ in range(100)]
        for text, stranger in zip(said, strangers, strict=False):
            stranger.sendall(text)
        (other,) = shell(line(1))
        for stranger in strangers:
            stranger.close()
        assert (other.code, first.result().code) == (0, 0)


def test_a_node_that_leaves_is_waited_for_and_ctrl_c_at_node_0_ends_all(line):
    with Running(*line.words(0, nodes=4)) as first, Running(*line.words(2, nodes=4)) as stays:
        first.until("node 2 .* is here")
        with Running(*line.words(1, nodes=4)) as leaves:
            first.until("node 1 .* is here")
            leaves.send(signal.SIGINT)
            assert leaves.result().code == 130
        first.until("node 1 .* has left")
        first.until("for nodes 1, 3 of 4")
        first.send(signal.SIGINT)
        assert first.result().code == 130
        done = stays.result()
        assert done.code == 2
        assert "node 0 was interrupted" in done.sentence


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


# ---- as typed

WRAPPER = "MASTER_ADDR={ip} NPROC=1 bash scripts/multi_node_train.sh 1 {rank} 2 run 5 --"
SPAWN = "python imagenet_ddp.py --dist-url tcp://{ip}:8888 -n 2 -nr {rank} -g 1 --name run"


@pytest.mark.parametrize("style", [WRAPPER, pytest.param(SPAWN, marks=pytest.mark.long)])
def test_closed_data_ports_are_one_error_on_both_nodes(folder, tmp_path, style):
    need("nft")
    with Nodes(2) as nodes:
        nodes[1].block_ports("1024-8887, 8889-65535")
        line = f"{style} {TINY_LINE} --output-dir {tmp_path} {folder}"
        results = type_on_each(nodes, line, **tiny()[1])
        for result in results:
            assert result.code == 2
            said = result.out + result.err
            assert "node0 (node 0) cannot connect to node1 (node 1)" in said
            assert "open all TCP ports" in said
            assert "Traceback" not in said
        assert eventually(lambda: not any(node.processes() for node in nodes))
