"""The shell scripts: --help, wrong arguments, waiting, and a host whose own name is unknown."""

import os
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Result, shell, summary
from nodes import Node, Nodes, type_on_each
from running import TINY_LINE, eventually, tiny

SCRIPTS = ROOT / "scripts"
INNER = ("environment.sh", "launch.sh")  # not typed by anybody
WRAPPERS = sorted(path.name for path in SCRIPTS.glob("*.sh") if path.name not in INNER)
WRAPPERS.append("train.sbatch")


@pytest.mark.parametrize("name", WRAPPERS)
def test_help_says_how_to_use_it(name, tmp_path):
    """From another folder, with no environment active."""
    bare = f"env -i PATH=/usr/bin:/bin HOME={tmp_path} bash"
    (done,) = shell(f"cd {tmp_path} && {bare} {SCRIPTS}/{name} --help")
    assert (done.code, done.err) == (0, "")
    assert f"scripts/{name}" in done.out, "no example"
    assert "Installing" not in done.out and "set -" not in done.out and "SBATCH -" not in done.out
    assert not list(tmp_path.iterdir())


def typed(command: str, folder: Path, **env: str) -> Result:
    """Run a wrapper in ``folder``."""
    (done,) = shell(f"cd {folder} && exec bash {SCRIPTS}/{command}", **env)
    return done


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("one_node_train.sh", "TRAIN_HOURS SAVE_NAME BATCH_SIZE"),
        ("one_node_train.sh soon mine 5", "soon"),
        ("one_node_train.sh 1 mine 5 --epochs 1", "--epochs"),
        ("one_node_train.sh 1 ../../out 5", "../../out"),
        ("one_node_train.sh 3.0 0 4 multi_node 32", "multi_node_train.sh 3.0 0 4 multi_node 32"),
        ("multi_node_train.sh 1 2 2 mine 5", "2"),
        ("multi_node_train.sh 1 0 2 mine 5", "MASTER_ADDR"),
        ("elastic_train.sh 1 3:2 mine 5", "3:2"),
        ("elastic_train.sh 1 1:2 mine 5", "MASTER_ADDR"),
    ],
)
def test_a_wrong_argument_is_named_and_writes_nothing(command, named, tmp_path):
    here = tmp_path / "a" / "b"
    here.mkdir(parents=True)
    given = {} if named == "MASTER_ADDR" else {"MASTER_ADDR": "127.0.0.1"}
    typed(command, here, **given).fails_with(named)
    assert sorted(tmp_path.rglob("*")) == [here.parent, here]


PLAYED = f"""#!/bin/bash
case "$*" in # in place of training, print the command and its environment
*imagenet_*) echo "$* at $MASTER_ADDR:$MASTER_PORT$WORLD_SIZE$NODE_RANK for $IMAGENET_SUITE" ;;
*) exec {sys.executable} "$@" ;;
esac
"""
REST = "--resume auto"
HERE, PORT = "127.0.0.1", str(20000 + os.getpid() % 10000)  # none that the kernel gives to others
RENDEZVOUS = "--nnodes=1:2 --rdzv_backend=c10d --rdzv_id=mine --rdzv_conf=is_host=true"
RENDEZVOUS += f" --rdzv_endpoint={HERE}:{PORT} --local_addr={HERE} --max_restarts=7"


@pytest.mark.parametrize(
    ("command", "env", "log", "wanted"),
    [
        (
            "one_node_train.sh 1.5 mine 8 -- -p 3 --output-dir a --output-dir=b",
            {"MASTER_ADDR": "x", "MASTER_PORT": "7", "WORLD_SIZE": "2", "NODE_RANK": "1"}
            | {"NPROC": "2", "ARCH": "vgg19", "DATA": "/d", "SCRIPT": "imagenet_nd.py"},
            "b/mine/node0.log",
            f"imagenet_nd.py -b 8 --train-time 1.5 --name mine {REST} -a vgg19 -p 3"
            " --output-dir a --output-dir=b /d at : for launcher:mine",
        ),
        (
            "multi_node_train.sh .5 1 3 mine 7 -- -p 3",
            {"MASTER_ADDR": "10.0.0.1", "NPROC": "2"},
            "runs/mine/node1.log",
            f"imagenet_ddp.py -n 3 -nr 1 -g 2 -b 7 --train-time .5 --name mine {REST} -p 3"
            " at 10.0.0.1:8888 for launcher:mine",
        ),
        (
            "elastic_train.sh 3 1:2 mine 5",
            {"MASTER_ADDR": HERE, "MASTER_PORT": PORT, "MAX_RESTARTS": "7", "NPROC": "4"},
            "runs/mine/node_*.log",
            f"-m torch.distributed.run {RENDEZVOUS} --nproc_per_node=4 imagenet_ddp.py"
            f" -b 5 --train-time 3 --name mine {REST} at {HERE}:{PORT} for launcher:mine",
        ),
    ],
)
def test_arguments_reach_the_training_script(command, env, log, wanted, tmp_path):
    (tmp_path / "python").write_text(PLAYED)
    (tmp_path / "python").chmod(0o755)
    done = typed(command, tmp_path, **env, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1].replace(f"{ROOT}/", "") == wanted
    (written,) = tmp_path.glob(log)
    assert wanted in written.read_text().replace(f"{ROOT}/", "")


@pytest.mark.parametrize(
    ("words", "named"), [("{folder}/none", "none is missing"), ("--mixup 2 {folder}", "--mixup")]
)
def test_elastic_train_ends_with_one_error(folder, tmp_path, words, named):
    """Not with torchrun's stack trace, and not after a hundred restarts."""
    command = f"elastic_train.sh 1 1:1 run 5 -- {TINY_LINE} {words.format(folder=folder)}"
    env = {"MASTER_ADDR": HERE, "MASTER_PORT": PORT, "NPROC": "2"}
    done = typed(command, tmp_path, **tiny()[1], **env)
    assert done.code != 0
    assert "Traceback" not in done.out
    assert named in done.sentence


def test_hosts_whose_own_names_do_not_resolve_can_train(folder, tmp_path):
    """Two by hand, then one elastically. Closed data ports are one error on both."""

    def on_each(nodes: list[Node], command: str) -> list[Result]:
        line = f"NPROC={3 - len(nodes)} MASTER_ADDR={{ip}} bash scripts/{command} -- {TINY_LINE}"
        line += f" --epochs 1 --output-dir {tmp_path} {folder}"
        return type_on_each(nodes, line, **tiny()[1])

    by_hand = "multi_node_train.sh 1 {rank} 2 by_hand 5"
    with Nodes(2) as nodes:
        for node in nodes:
            node.replace("/etc/hosts", "127.0.0.1 localhost\n")
        results = on_each(nodes, by_hand) + on_each(nodes[:1], "elastic_train.sh 1 1:1 elastic 5")
        assert [done.code for done in results] == [0, 0, 0], results
        for name, count in (("by_hand", 2), ("elastic", 1)):
            found = summary(tmp_path / name)
            assert [found[key] for key in ("world_size", "nodes", "epochs_done")] == [2, count, 1]
        nodes[1].block_ports("1024-8887, 8889-65535")
        closed = "node0 (node 0) cannot connect to node1 (node 1)"
        for done in on_each(nodes, by_hand):
            done.fails_with(closed, "open all TCP ports")
        assert eventually(lambda: not any(node.processes() for node in nodes))
