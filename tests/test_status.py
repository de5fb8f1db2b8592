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


@pytest.fixture(scope="module")
def nodes():
    """Two nodes with an sshd each, and a list of them in the folder of the first."""
    with Nodes(2) as both:
        for node in both:
            node.start_sshd()
        (both[0].folder / "hosts").write_text("node0\nnode1\n")
        yield both


def ask(node: Node, hosts: object = "", code: int = 0) -> str:
    """What status.sh prints, with single spaces."""
    done = node.run(f"bash scripts/status.sh {hosts}")
    assert done.code == code, done.err
    return re.sub(" +", " ", done.out)


# Of a rank that has ended its first epoch: its number, the time it computes, whether others wait.
ROW = r"(?m)^ (\d) node\1 (?:[2-9]|\d\d+)/100000 \S+ \S+ \S+ ([\d.]+) .*?(<< straggler)?$"


def test_ranks_of_a_run_and_a_straggler(nodes, folder, tmp_path):
    """On all hosts and on one; then nothing, as both ranks have ended."""
    hosts, typed = nodes[0].folder / "hosts", []
    for rank, seconds in enumerate((0.05, 0.25)):  # of a step, at least
        line = f"python imagenet_ddp.py --dist-url tcp://{nodes[0].ip}:8888 -n 2 -nr {rank} "
        line += f"{TINY_LINE} -p 2 --name run --epochs 100000 --output-dir {tmp_path} {folder}"
        typed.append(nodes[rank].type(line, **tiny(step_seconds=seconds)[1]))
    with typed[0], typed[1]:
        typed[0].until(r"Epoch 2/100000 step +4/6")
        out = ask(nodes[1], hosts)
        assert f"\n{tmp_path}/run (tiny_plain, ddp)\n" in out
        (first, fast, waits), (second, slow, waited_for) = re.findall(ROW, out)
        assert (first, waits, second, waited_for) == ("0", "", "1", "<< straggler")
        # The fast one computes for a fifth of the slow one's time, and waits for the rest.
        assert 0.05 <= float(fast) < 0.6 * float(slow)
        assert float(slow) >= 0.25
        assert [row[0] for row in re.findall(ROW, ask(nodes[1]))] == ["1"]
        typed[0].send(15)
        assert [one.result().code for one in typed] == [75, 75]
        for node in nodes:
            shared = f"/proc/{node.spaces.first}/root/dev/shm/imagenet-suite-{os.getuid()}"
            assert os.listdir(shared) == []
    hosts.write_text("node0\nnode7\n")
    out = ask(nodes[0], hosts, code=2)
    assert "node7: no answer" in out
    assert "node0: no runs" in out


def test_the_lines_of_a_run_and_the_file_of_a_killed_process(tmp_path, monkeypatch):
    """nvidia-smi's answer is found for the GPU of a rank."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU-0, 1, 2, 3'; echo 'GPU-7, 97, 11000, 15360'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(status, "FOLDER", str(tmp_path))
    own = Process(os.getpid())
    rank = {"pid": own.pid, "started": str(own.started), "run": str(tmp_path), "gpu": "GPU-7"}
    rank |= {"rank": 0, "size": 4, "epoch": 1, "epochs": 9, "phase": "starting"}
    rank |= {"arch": "a", "mode": "ddp", "at": 0}
    (tmp_path / "0.json").write_text(json.dumps(rank))
    (tmp_path / "1.json").write_text(json.dumps(rank | {"started": "1"}))
    for saved in ("no snapshot yet", r"snapshot \d+ s ago"):
        _, run, disk, _, line, missing = status.describe([("here", status.node())])
        assert run == f"\n{tmp_path} (a, ddp)"
        assert re.match(f"  {saved}; disk ", disk)
        assert re.match("0 here 2/9 starting - - - 97 11000/15360 ", " ".join(line.split()))
        assert missing == "  not seen here: rank 1, 2, 3"
        assert not (tmp_path / "1.json").exists()
        (tmp_path / "snapshot.pt").touch()
