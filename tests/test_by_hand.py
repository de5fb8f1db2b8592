"""Commands typed on several nodes, each with its own host name, address and network."""

import pytest
from conftest import summary
from nodes import Node, Nodes, Typed
from running import TINY_LINE, tiny

OPTIONS = f"{TINY_LINE} --epochs 1"
WRAPPER = "MASTER_ADDR={ip} NPROC=1 bash scripts/multi_node_train.sh 1 {rank} {n} run 5 --"


def train_on(nodes: list[Node], line: str) -> list[str]:
    """Type the line on every node, each with its rank; what they print, when all have succeeded."""
    typed: list[Typed] = []
    try:
        for rank, node in enumerate(nodes):
            text = line.format(rank=rank, n=len(nodes), ip=nodes[0].ip)
            typed.append(node.type(text, **tiny()[1]))
        results = [one.result() for one in typed]
    finally:
        for one in typed:
            one.__exit__()
    for result in results:
        assert result.code == 0, result.out + result.err
    return [result.out for result in results]


@pytest.mark.long  # test_commands.py types the same lines on one network
@pytest.mark.parametrize(
    ("count", "line"),
    [
        (2, WRAPPER),
        pytest.param(
            4,
            f"SCRIPT=imagenet_ddp_apex.py {WRAPPER} --opt-level O0",
        ),
        pytest.param(
            2,
            "python imagenet_ddp.py --dist-url tcp://{ip}:8888 -n {n} -nr {rank} --name run",
        ),
        pytest.param(
            4,
            "MASTER_ADDR={ip} MASTER_PORT=8888 WORLD_SIZE={n} NODE_RANK={rank}"
            " python imagenet_ddp.py -g 2 --name run",
        ),
    ],
)
def test_nodes_train_together(folder, tmp_path, count, line):
    """Even with Debian's host names (127.0.1.1) and an interface that is not the first."""
    with Nodes(count, rate="1gbit") as nodes:
        for node in nodes:
            node.replace("/etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 {node.name}\n")
        outputs = train_on(nodes, f"{line} {OPTIONS} --output-dir {tmp_path} {folder}")
        for out in outputs:
            assert "Epoch 1/1" in out
        found = summary(tmp_path / "run")
        assert (found["nodes"], found["epochs_done"]) == (count, 1)
        assert found["world_size"] == count * (2 if "-g 2" in line else 1)
        if "multi_node" in line:
            assert "Epoch 1/1" in (tmp_path / "run" / f"node{count - 1}.log").read_text()
        assert not any(node.processes() for node in nodes)
