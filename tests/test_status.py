"""scripts/status.sh shows what every rank is doing, and which one the others wait for."""

import json
import os
import re
import sys

import pytest
from conftest import ROOT
from nodes import Node, Nodes
from running import TINY_LINE, Process, tiny

sys.path.append(str(ROOT / "scripts/ssh"))
import status

GPU = "GPU-11111111-2222-3333-4444-555555555555"


@pytest.fixture(scope="module")
def nodes():
    """Two nodes with an sshd each, and a list of them in the folder of the first."""
    with Nodes(2) as both:
        for node in both:
            node.start_sshd()
        (both[0].folder / "hosts").write_text("node0\nnode1\n")
        yield both


def ask(node: Node, hosts: object = "", code: int = 0) -> tuple[dict[int, str], str]:
    """The line of each rank in what status.sh prints, and all of it."""
    done = node.run(f"bash scripts/status.sh {hosts}")
    assert done.code == code, done.err
    lines = [line.split() for line in done.out.splitlines() if line.startswith("   ")]
    ranks = [words for words in lines if words and words[0].isdecimal()]
    return {int(words[0]): " ".join(words[1:]) for words in ranks}, done.out


def test_ranks_of_a_run_and_a_straggler(nodes, folder, tmp_path):
    """On all hosts and on one; then nothing, as both ranks have ended."""
    hosts, typed = nodes[0].folder / "hosts", []
    for rank, seconds in enumerate((0.05, 0.25)):  # of a step, at least
        line = f"python imagenet_ddp.py --dist-url tcp://{nodes[0].ip}:8888 -n 2 -nr {rank} "
        line += f"{TINY_LINE} -p 2 --name run --epochs 100000 --output-dir {tmp_path} {folder}"
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
        typed[0].send(15)
        assert [one.result().code for one in typed] == [75, 75]
        for node in nodes:
            shared = f"/proc/{node.spaces.first}/root/dev/shm/imagenet-suite-{os.getuid()}"
            assert os.listdir(shared) == []
        assert ask(nodes[1], hosts)[0] == {}
    hosts.write_text("node0\nnode7\n")
    out = ask(nodes[0], hosts, code=2)[1]
    assert "node7: no answer" in out
    assert "node0: no runs" in out


def test_a_run_without_a_snapshot_and_the_file_of_a_killed_process(tmp_path, monkeypatch):
    """nvidia-smi's answer is found for the GPU of a rank."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho 'GPU-0, 1, 2, 3'; echo '{GPU}, 97, 11000, 15360'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(status, "FOLDER", str(tmp_path))
    own = Process(os.getpid())
    rank = {"pid": own.pid, "started": str(own.started), "run": str(tmp_path), "gpu": GPU, "at": 0}
    rank |= {"rank": 3, "size": 4, "epoch": 1, "epochs": 9, "phase": "starting", "arch": "a"}
    files = [tmp_path / "0.json", tmp_path / "1.json"]
    files[0].write_text(json.dumps(rank | {"rank": 0, "mode": "ddp"}))
    files[1].write_text(json.dumps(rank | {"started": "1"}))
    for saved in ("no snapshot yet", "snapshot 0 s ago"):
        lines = [*status.describe([("here", status.node())])]
        assert f"  {saved}; disk " in "\n".join(lines)
        assert [file.exists() for file in files] == [True, False]
        assert lines[-1] == "  not seen here: rank 1, 2, 3"
        assert lines[-2].split()[:5] == ["0", "here", "2/9", "starting", "-"]
        assert lines[-2].split()[7:9] == ["97", "11000/15360"]
        (tmp_path / "snapshot.pt").touch()
