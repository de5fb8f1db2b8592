"""scripts/train_on_nodes.sh --elastic: nodes that are lost, node 0 too, come back, never come."""

import os
import re
import signal

import pytest
from conftest import ROOT, TIMEOUT, summary
from nodes import Node, Nodes, Typed
from running import TINY_LINE, Process, eventually, tiny

INTERRUPTED = 75
_, ENV = tiny(step_seconds=0.05)
ENV |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def nodes():
    """node0 to type on, node1 and node2 to train on."""
    with Nodes(3) as all_nodes:
        for node in all_nodes[1:]:
            node.start_sshd(**ENV)
        yield all_nodes


def typed(nodes: list[Node], runs, folder, listed: str, limits: str, epochs: int = 100000) -> Typed:
    """The training, typed on node0; a line every step."""
    hosts = runs / "hosts"
    hosts.write_text(listed)
    return nodes[0].type(
        f"exec bash scripts/train_on_nodes.sh {hosts} --dir {ROOT} --elastic {limits} "
        f"-- imagenet_ddp.py {TINY_LINE} -p 1 --epochs {epochs} --snapshot-minutes 0.02 "
        f"--name run --output-dir {runs} {folder} 2>&1"
    )


def ours(nodes: list[Node]) -> set[Process]:
    """What lives in the nodes."""
    return set().union(*(node.processes() for node in nodes))


def test_training_begins_without_a_node_that_cannot_be_reached(nodes, folder, tmp_path):
    with typed(nodes, tmp_path, folder, "node0\nnode1\n", "1:2", epochs=1) as run:
        result = run.result()
    assert result.code == 0, result.out
    assert "launcher: ssh to node0 failed: does `ssh node0 true` work here?; will" in result.out
    assert "launcher: training begins on 1 of 2 nodes: node1" in result.out
    found = summary(tmp_path / "run")
    assert (found["nodes"], found["epochs_done"]) == (1, 1)
    assert not ours(nodes)


@pytest.mark.long
def test_training_goes_on_without_node_0_and_with_it_again(nodes, folder, tmp_path):
    """Then Ctrl-C ends it, with a snapshot."""
    with typed(nodes, tmp_path, folder, "node1\nnode2\n", "1:2") as run:
        run.until(r"\[node1\] Epoch 2/\d+ step")
        nodes[1].kill()
        run.until("lost the connection to node1; will keep trying")
        run.until("training begins again on 1 of 2 nodes: node2")
        run.until("resumed from .*snapshot")
        run.until(r"\[node2\] Epoch \d+/\d+ step")
        nodes[1].start_again()
        nodes[1].start_sshd(**ENV)
        run.until("launcher: node1 is back")
        run.until("stopping with a snapshot, to go on with node1")
        run.until("training begins again on 2 of 2 nodes: node1, node2")
        run.until(r"\[node1\] Epoch \d+/\d+ step")
        run.send(signal.SIGINT, group=True)
        result = run.result()
    assert result.code == INTERRUPTED, result.out
    assert summary(tmp_path / "run")["finished_because"] == "interrupted"
    assert "Traceback" not in result.out
    assert not ours(nodes)


@pytest.mark.long
def test_too_few_nodes_are_waited_for(nodes, folder, tmp_path):
    with typed(nodes, tmp_path, folder, "node1\nnode2\n", "2:2") as run:
        run.until(r"\[node1\] Epoch 1/\d+ step")
        nodes[2].kill()
        run.until(r"waiting for node2: 1 of at least 2 nodes are here \(\d+ s, at most 600\)")
        run.send(signal.SIGINT, group=True)
        result = run.result()
    assert result.code == INTERRUPTED, result.out
    assert eventually(lambda: not ours(nodes[:2])), ours(nodes[:2])


@pytest.mark.long
def test_a_killed_process_is_started_again(nodes, folder, tmp_path):
    """On both nodes: the other one notices, and does not call it bad input."""
    with typed(nodes, tmp_path, folder, "node1\nnode2\n", "1:2") as run:
        run.until(r"\[node1\] Epoch 1/\d+ step")
        rank = min(one.pid for one in ours(nodes[2:]) if "spawn_main" in one.command)
        os.kill(rank, signal.SIGKILL)  # the others are its loader workers
        said = run.until(r"ended with exit code \d+; stopping the rest")
        assert re.search(r"code (69|137);", said)
        run.until("training begins again on 2 of 2 nodes")
        run.until(r"\[node1\] Epoch \d+/\d+ step")
        run.send(signal.SIGINT, group=True)
        assert run.result().code == INTERRUPTED


@pytest.mark.long
def test_bad_input_ends_the_job(nodes, tmp_path):
    with typed(nodes, tmp_path, tmp_path / "nowhere", "node1\nnode2\n", "1:2") as run:
        result = run.result()
    assert result.code == 2, result.out
    assert "begins again" not in result.out
    assert not ours(nodes)


@pytest.mark.long
def test_a_run_that_not_all_nodes_can_see_is_refused(nodes, folder, tmp_path):
    nodes[2].run(f"mkdir {tmp_path}/run && mount -t tmpfs tmpfs {tmp_path}/run")
    with typed(nodes, tmp_path, folder, "node1\nnode2\n", "1:2") as run:
        result = run.result()
    assert result.code == 2, result.out
    assert "node2 (node 1) does not see what node1 (node 0) writes into" in result.out
    assert "begins again" not in result.out


@pytest.mark.long
def test_a_node_that_comes_back_broken_stays_out(nodes, folder, tmp_path):
    with typed(nodes, tmp_path, folder, "node1\nnode2\n", "1:2") as run:
        run.until(r"\[node1\] Epoch 1/\d+ step")
        nodes[2].kill()
        run.until(r"on 1 of 2 nodes: node1")
        nodes[2].start_again()
        nodes[2].run(f"mount -t tmpfs tmpfs {ROOT}")
        nodes[2].start_sshd(**ENV)
        run.until("going on without node2")
        run.until("training begins again on 1 of 2 nodes: node1")
        run.until(r"\[node1\] Epoch \d+/\d+ step")
        run.send(signal.SIGINT, group=True)
        result = run.result()
    assert result.code == INTERRUPTED
    assert "can't open file" in result.out  # Python says so


@pytest.mark.long
def test_a_launcher_that_is_killed_leaves_no_process(nodes, folder, tmp_path):
    with typed(nodes, tmp_path, folder, "node1\nnode2\n", "1:2") as run:
        run.until(r"\[node1\] Epoch 1/\d+ step")
        run.send(signal.SIGKILL)
        assert eventually(lambda: not ours(nodes[1:]), TIMEOUT / 2), ours(nodes[1:])


def test_the_wait_for_nodes_is_that_of_dist_timeout(nodes, tmp_path):
    with typed(nodes, tmp_path, "DATA --dist-timeout 4", "node0\nnode1\n", "2:2") as run:
        run.until(r"waiting for node0: 1 of at least 2 nodes are here \(\d+ s, at most 4\)")
        result = run.result()
    assert result.code == 2
    assert "error: the job needs 2 nodes and has waited 4 s for node0" in result.out
    assert not ours(nodes)
