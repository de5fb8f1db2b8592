"""Commands typed on several nodes, each with its own host name, address and network."""

import functools
import os
import socket
import sys
from unittest import mock

import pytest
from conftest import summary
from joined import in_processes
from nodes import Nodes, type_on_each
from running import TINY_LINE, tiny

from utils.errors import UserError

WRAPPER = "MASTER_ADDR={ip} NPROC=1 bash scripts/multi_node_train.sh 1 {rank} {n} run 5 --"


@pytest.mark.long  # test_commands.py types these commands on one network
@pytest.mark.parametrize(
    ("count", "line"),
    [
        (2, WRAPPER),
        (4, f"SCRIPT=imagenet_ddp_apex.py {WRAPPER} --opt-level O0"),
        (2, "python imagenet_ddp.py --dist-url tcp://{ip}:8888 -n {n} -nr {rank} --name run"),
        (
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
        line = f"{line} {TINY_LINE} --epochs 1 --output-dir {tmp_path} {folder}"
        for result in type_on_each(nodes, line, **tiny()[1]):
            assert result.code == 0, result.out + result.err
            assert "Epoch 1/1" in result.out
        found = summary(tmp_path / "run")
        assert (found["nodes"], found["epochs_done"]) == (count, 1)
        assert found["world_size"] == count * (2 if "-g 2" in line else 1)
        if "multi_node" in line:
            assert "Epoch 1/1" in (tmp_path / "run" / f"node{count - 1}.log").read_text()
        assert not any(node.processes() for node in nodes)


# ---- options that differ between the nodes: one error on each, before anything is built

DIFFERENT = [
    ("--lr 0.3", "--lr 0.4", "--lr: 0.3 on {0}, 0.4 on {1}"),
    ("--seed 1", "--seed 2", "--seed: 1 on {0}, 2 on {1}"),
    ("--mixup 0.2", "--wd 0.5", "--mixup: 0.2 on {0}, 0.0 on {1} (and 1 more)"),
    ("--epochs 2", "--epochs 3", "--epochs: 2 on {0}, 3 on {1}"),
    ("--comm int8", "--comm fp32", "--comm: int8 on {0}, fp32 on {1}"),
    ("-b 6", "-b 8", "--batch-size: 6 on {0}, 8 on {1}"),
    ("-a resnet34", "-a resnet18", "--arch: resnet34 on {0}, resnet18 on {1}"),
    ("--image-size 32", "--image-size 64", "--image-size: 32 on {0}, 64 on {1}"),
    ("--resume a.pt", "", "--resume: True on {0}, False on {1}"),
    ("--amp off", "", "--amp: off on {0}, auto on {1}"),
    ("-j 1 -p 3 --name a --profile", "-j 2 -p 4 --name b --output-dir b", None),
]


class Built(Exception):
    """Training goes on to its data."""


def _ends(lines: list[tuple[str, ...]], folder: str, rank: int, size: int) -> list[str]:
    """How rank ``rank`` of two nodes ends on each of ``lines`` (the words of each rank)."""
    import torch.distributed as dist

    import imagenet_ddp as script
    from utils.launch import network

    def build(*_: object, **__: object) -> None:
        raise Built

    found: list[str] = []
    environment = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(environment, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    for number, words in enumerate(lines):
        how = functools.partial(dist.init_process_group, init_method=f"file://{folder}/{number}")
        with (
            mock.patch.object(sys, "argv", ["imagenet_ddp.py", *words[rank].split(), folder]),
            mock.patch.object(dist, "init_process_group", how),
            mock.patch.object(network, "connect"),
            mock.patch.object(script, "build_loaders", build),
        ):
            try:
                script.main()
            except UserError as error:
                found.append(f"{error.code} {error}")
            except Built:
                found.append("built")
        dist.destroy_process_group()
    return found


def test_options_that_differ_end_every_node_with_one_error(tmp_path):
    found = in_processes(2, functools.partial(_ends, DIFFERENT, str(tmp_path)), join=False)
    assert found[0] == found[1]
    nodes = [f"{socket.gethostname()} (node {number})" for number in range(2)]
    for (*_, words), end in zip(DIFFERENT, found[0], strict=True):
        expected = words and words.format(*nodes)
        if words is None:
            assert end == "built"
        else:
            assert end.startswith("2 the command line differs between the nodes: "), end
            assert expected in end
