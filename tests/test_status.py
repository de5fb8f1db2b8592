"""scripts/status.sh shows what every rank is doing, and which one the others wait for."""

import contextlib
import os
import re
import signal
import sys

import pytest
from conftest import ROOT
from nodes import Node, Nodes
from running import TINY_LINE, eventually, tiny

sys.path.append(str(ROOT / "scripts/ssh"))
import status

LASTING = f"{TINY_LINE} -p 2 --name run"
GPU = "GPU-11111111-2222-3333-4444-555555555555"


@pytest.fixture(scope="module")
def nodes():
    """Two nodes with an sshd each, and a list of them in the folder of the first."""
    with Nodes(2) as both:
        for node in both:
            node.start_sshd()
        (both[0].folder / "hosts").write_text("node0\nnode1\n")
        yield both


def files_of(node: Node) -> list[str]:
    """Status files in the node's own /dev/shm."""
    return os.listdir(f"/proc/{node.spaces.first}/root/dev/shm/imagenet-suite-{os.getuid()}")


def ask(node: Node, hosts: object = "") -> tuple[dict[int, str], str]:
    """The line of each rank in what status.sh prints, and all of it."""
    done = node.run(f"bash scripts/status.sh {hosts}")
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines() if line.startswith("   ")]
    ranks = [words for words in lines if words and words[0].isdecimal()]
    return {int(words[0]): " ".join(words[1:]) for words in ranks}, done.out


def test_ranks_of_a_run_and_a_straggler(nodes, folder, tmp_path):
    """On all hosts and on one; then nothing, as one rank was killed and the other has ended."""
    hosts, typed = nodes[0].folder / "hosts", []
    for rank, seconds in enumerate((0.05, 0.25)):  # of a step, at least
        line = f"python imagenet_ddp.py --dist-url tcp://{nodes[0].ip}:8888 -n 2 -nr {rank} "
        line += f"{LASTING} --epochs 100000 --output-dir {tmp_path} {folder}"
        typed.append(nodes[rank].type(line, **tiny(step_seconds=seconds)[1]))
    with typed[0], typed[1]:
        typed[0].until(r"Epoch 2/100000 step +4/6")
        found, out = ask(nodes[1], hosts)
        assert set(found) == {0, 1}, out
        assert found[1].endswith("<< straggler")
        assert "straggler" not in found[0]
        for rank, line in found.items():
            assert re.search(rf"^node{rank} ([2-9]|\d\d+)/100000 ", line), out
        # The fast one computes for a fifth of the slow one's time, and waits for the rest.
        compute = [float(found[rank].split()[5]) for rank in (0, 1)]
        assert 0.05 <= compute[0] < 0.6 * compute[1]
        assert compute[1] >= 0.25
        assert str(tmp_path / "run") in out
        assert re.search(r"snapshot .* ago; disk ", out)
        found, out = ask(nodes[1])
        assert set(found) == {1}, out
        assert "not seen here: rank 0" in out
        assert [len(files_of(node)) for node in nodes] == [1, 1]
        for process in [p for p in nodes[1].processes() if "spawn_main" in p.command]:
            with contextlib.suppress(ProcessLookupError):  # it has ended with another one
                os.kill(process.pid, signal.SIGKILL)
        assert all(one.result().code for one in typed)
        assert eventually(lambda: not nodes[0].processes())
        assert ask(nodes[1], hosts)[0] == {}
        assert [files_of(node) for node in nodes] == [[], []]


@pytest.mark.long
def test_a_finished_run_leaves_no_file(nodes, folder, tmp_path):
    line = f"python imagenet_nd.py {LASTING} --epochs 1 --output-dir {tmp_path} {folder}"
    done = nodes[0].run(line, env=tiny()[1])
    assert done.code == 0, done.err
    assert files_of(nodes[0]) == []


def test_gpus_of_ranks(tmp_path, monkeypatch):
    """nvidia-smi's answer is found for the GPU of a rank."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{GPU}, 97, 11000, 15360'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    rank = {"rank": 3, "node": "a", "epoch": 1, "epochs": 9, "phase": "starting", "age": 1}
    words = status.row(rank | {"gpu": status.gpus()[GPU]}).split()
    assert words[-5:] == ["-", "97", "11000/15360", "1", "s"]


def test_an_unreachable_host(nodes, tmp_path):
    (tmp_path / "hosts").write_text("node0\nnode7\n")
    done = nodes[0].run(f"bash scripts/status.sh {tmp_path}/hosts")
    assert done.code == 2
    assert "node7: no answer" in done.out
    assert "node0: no runs" in done.out
