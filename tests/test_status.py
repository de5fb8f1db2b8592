"""scripts/status.sh shows what every rank is doing, and which one the others wait for."""

import os
import re
import signal

import pytest
from conftest import ROOT
from nodes import Node, Nodes, Typed
from running import TINY_LINE, eventually, tiny

LASTING = f"{TINY_LINE} --epochs 100000 -p 2 --name run"
GPU = "GPU-11111111-2222-3333-4444-555555555555"


@pytest.fixture(scope="module")
def nodes():
    """Two nodes with an sshd each."""
    with Nodes(2) as both:
        for node in both:
            node.start_sshd()
        yield both


def start(nodes: list[Node], folder, runs, seconds: tuple[float, float]) -> list[Typed]:
    """A training on both nodes whose steps take at least so many seconds on each."""
    typed = []
    for rank, node in enumerate(nodes):
        line = f"python imagenet_ddp.py --dist-url tcp://{nodes[0].ip}:8888 -n 2 -nr {rank} "
        _, env = tiny(step_seconds=seconds[rank])
        typed.append(node.type(f"{line}{LASTING} --output-dir {runs} {folder}", **env))
    return typed


def files_of(node: Node) -> str:
    """The folder of status files in the node's own /dev/shm."""
    return f"/proc/{node.spaces.first}/root/dev/shm/imagenet-suite-{os.getuid()}"


def rows(out: str) -> dict[int, str]:
    """The line of each rank in what status.sh has printed."""
    lines = [line.split() for line in out.splitlines() if line.startswith("   ")]
    return {int(words[0]): " ".join(words[1:]) for words in lines if words and words[0].isdecimal()}


def test_all_ranks_and_a_straggler(nodes, folder, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("node0\nnode1\n")
    one, other = start(nodes, folder, tmp_path / "runs", (0.05, 0.25))
    with one, other:
        one.until(r"Epoch 2/100000 step +4/6")
        done = nodes[1].run(f"bash scripts/status.sh {hosts}")
        assert done.code == 0, done.err
        found = rows(done.out)
        assert set(found) == {0, 1}, done.out
        assert found[0].startswith("node0 ")
        assert found[1].startswith("node1 ")
        assert found[1].endswith("<< straggler")
        assert "straggler" not in found[0]
        assert all(re.search(r"^node\d ([2-9]|\d\d+)/100000 ", line) for line in found.values())
        # The fast one computes for a fifth of the slow one's time, and waits for the rest.
        compute = [float(found[rank].split()[5]) for rank in (0, 1)]
        assert 0.05 <= compute[0] < 0.6 * compute[1]
        assert compute[1] >= 0.25
        assert str(tmp_path / "runs" / "run") in done.out
        assert "snapshot " in done.out
        assert " ago; disk " in done.out


@pytest.mark.long
def test_only_what_lives_on_this_node(nodes, folder, tmp_path):
    """Without a hosts file, only this node's ranks; none that was killed, or has finished."""
    hosts = tmp_path / "hosts"
    hosts.write_text("node0\nnode1\n")
    nodes[0].run(f"bash scripts/status.sh {hosts}")  # removes what other tests' killed runs left
    one, other = start(nodes, folder, tmp_path / "runs", (0.05, 0.05))
    with one, other:
        one.until(r"step +4/6")
        here = nodes[1].run("bash scripts/status.sh")
        assert set(rows(here.out)) == {1}, here.out
        assert "not seen here: rank 0" in here.out
        assert [len(os.listdir(files_of(node))) for node in nodes] == [1, 1]
        for process in [p for p in nodes[1].processes() if "spawn_main" in p.command]:
            os.kill(process.pid, signal.SIGKILL)
        other.result()
        one.result()
        assert eventually(lambda: not nodes[0].processes())
        assert rows(nodes[1].run(f"bash scripts/status.sh {hosts}").out) == {}
        assert [os.listdir(files_of(node)) for node in nodes] == [[], []]
    line = f"python imagenet_nd.py {LASTING} --epochs 1 --output-dir {tmp_path} {folder}"
    done = nodes[0].run(line, env=tiny()[1])
    assert done.code == 0, done.err
    assert not os.listdir(files_of(nodes[0]))


def test_gpus_and_an_unreachable_host(nodes, tmp_path):
    """nvidia-smi's answer is found for the GPU of a rank."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{GPU}, 97, 11000, 15360'\n")
    tool.chmod(0o755)
    code = f"""
import sys; sys.path.insert(0, "{ROOT}/scripts/ssh")
import status
rank = dict(rank=3, node="a", epoch=1, epochs=9, phase="starting", age=1)
print(status.row(rank | dict(gpu=status.gpus()["{GPU}"])))
"""
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = nodes[0].run(["python3", "-c", code], env={"PATH": path})
    assert done.out.split()[-5:] == ["-", "97", "11000/15360", "1", "s"], done.err

    hosts = tmp_path / "hosts"
    hosts.write_text("node0\nnode7\n")
    done = nodes[0].run(f"bash scripts/status.sh {hosts}")
    assert done.code == 2
    assert "node7: no answer" in done.out
    assert "node0: 0 ranks" in done.out
