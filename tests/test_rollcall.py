"""The roll call before a training on several nodes: on one network, and by the wrapper on two."""

import re
import signal
import socket

import pytest
from conftest import python, shell
from nodes import Nodes, need
from running import Running, eventually

from utils.launch.network import free_port

ROLL_CALL = ("-m", "utils.launch.rollcall")
HERE = "127.0.0.1"


def line(rank: int, port: int, nodes: int = 2, processes: int = 1, wait: float = 60) -> str:
    """What a wrapper runs on node ``rank``."""
    return (
        f"python {' '.join(ROLL_CALL)} --nodes {nodes} --node-rank {rank} --master {HERE} "
        f"--port {port} --processes {processes} --wait {wait}"
    )


def sentences(results) -> list[str]:
    """The error of each node, all of which ended with code 2 and without a traceback."""
    for result in results:
        assert result.code == 2, result.out + result.err
    return [result.sentence for result in results]


def test_nodes_that_agree_meet_and_leave_the_port(tmp_path):
    port = free_port()
    results = shell(*(line(rank, port, nodes=3) for rank in (2, 0, 1)))
    for result in results:
        assert result.code == 0, result.err
        assert not result.err
    assert "all 3 nodes are here" in results[1].out
    socket.create_server((HERE, port)).close()


def test_a_node_that_is_missing_is_counted_and_named_on_every_node():
    port = free_port()
    results = shell(line(0, port, nodes=3, wait=4), line(2, port, nodes=3))
    for sentence in sentences(results):
        assert f"node 1 of 3 did not come to {HERE}:{port} within 4 s" in sentence
    assert re.search(r"node 2 \(.*\) is here", results[0].out)
    for result in results:
        waiting = rf"waiting at {HERE}:{port} for node 1 of 3 \([23] s, at most 4\)"
        assert re.search(waiting, result.out)


def test_node_0_that_is_missing_is_counted():
    port = free_port()
    (result,) = shell(line(1, port, wait=4))
    assert f"waiting for node 0 at {HERE}:{port}: connection refused (2 s, at most 4)" in result.out
    (sentence,) = sentences([result])
    assert f"{HERE}:{port} cannot be reached after 4 s (connection refused)" in sentence


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"rank": 1, "nodes": 3}, ("2", "3", "nodes")),
        ({"rank": 1, "processes": 2}, ("processes per node differs", "has 1", "has 2")),
    ],
    ids=["nodes", "processes"],
)
def test_numbers_that_contradict_each_other_end_both(other, words):
    port = free_port()
    for sentence in sentences(shell(line(0, port), line(**({"port": port} | other)))):
        for word in words:
            assert word in sentence


def test_two_nodes_with_one_rank_end_all():
    port = free_port()
    results = shell(line(0, port, nodes=3), line(1, port, nodes=3), line(1, port, nodes=3))
    for sentence in sentences(results):
        assert re.search("rank 1.*own|its own", sentence)


def test_a_node_with_other_code_is_named(tmp_path):
    """The copy differs in one file."""
    port = free_port()
    copy = f"cp -r --parents utils scripts/recipes {tmp_path} && cd {tmp_path}"
    copy += " && echo >>utils/samplers.py"
    for sentence in sentences(shell(f"{copy} && {line(1, port)}", line(0, port))):
        assert "this code differs between the nodes: utils/samplers.py" in sentence


@pytest.mark.parametrize(
    ("master", "rank", "words"),
    [
        ("nowhere.invalid", 0, "nowhere.invalid cannot be resolved"),
        ("nowhere.invalid", 1, "nowhere.invalid cannot be resolved"),
        ("192.0.2.1", 0, "192.0.2.1 is not an address of this machine"),
    ],
)
def test_a_master_that_cannot_be_is_refused_at_once(master, rank, words):
    more = ("--node-rank", rank, "--nodes", 2, "--processes", 1, "--port", 8888)
    assert words in sentences([python(*ROLL_CALL, "--master", master, *more)])[0]


def test_a_port_in_use_is_refused_at_once():
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        (sentence,) = sentences(shell(line(0, port)))
        assert f"port {port} of {HERE} is taken by another program" in sentence


def test_ctrl_c_ends_every_node():
    port = free_port()
    words = [word for word in line(0, port, nodes=3).split() if word != "python"]
    with Running(*words) as first, Running(*map(str, words[:5]), "2", *words[6:]) as other:
        first.until("is here")
        first.send(signal.SIGINT)
        assert first.result().code == 130
        done = other.result()
        assert done.code == 2
        assert "node 0 was interrupted" in done.sentence


def test_a_node_that_leaves_is_waited_for_again():
    port = free_port()
    words = [word for word in line(0, port, nodes=3).split() if word != "python"]
    with Running(*words) as first:
        with Running(*words[:5], "1", *words[6:]) as other:
            first.until("node 1 .* is here")
            other.send(signal.SIGINT)
            assert other.result().code == 130
        first.until("node 1 .* has left")
        assert "nodes 1, 2 of 3" in first.until("for nodes 1, 2")


# ---- typed on two nodes

WRAPPER = "MASTER_ADDR={ip} NPROC=1 bash scripts/multi_node_train.sh 1 {rank} 2 run 5 --"
SPAWN = "python imagenet_ddp.py --dist-url tcp://{ip}:8888 -n 2 -nr {rank} -g 1 --name run"


@pytest.mark.parametrize("style", [WRAPPER, pytest.param(SPAWN, marks=pytest.mark.long)])
def test_closed_data_ports_are_a_sentence_on_both_nodes(folder, tmp_path, style):
    need("nft")
    with Nodes(2) as nodes:
        nodes[1].block_ports("1024-8887, 8889-65535")
        typed = [
            node.type(
                style.format(ip=nodes[0].ip, rank=rank)
                + f" --image-size 32 -j 1 --output-dir {tmp_path} {folder}"
            )
            for rank, node in enumerate(nodes)
        ]
        try:
            results = [one.result() for one in typed]
        finally:
            for one in typed:
                one.__exit__()
        for result in results:
            assert result.code == 2
            said = result.out + result.err
            assert "node0 (node 0) cannot connect to node1 (node 1)" in said
            assert "open all TCP ports" in said
            assert "Traceback" not in said
        assert eventually(lambda: not any(node.processes() for node in nodes))
