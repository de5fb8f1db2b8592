"""The shell scripts: --help, wrong arguments, waiting, and a host whose own name is unknown."""

import os
import socket
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Result, shell, summary
from nodes import Nodes, type_on_each
from running import TINY_LINE, tiny

from utils.launch.network import free_port

SCRIPTS = ROOT / "scripts"
INNER = ("environment.sh", "launch.sh")  # not typed by anybody
WRAPPERS = sorted(path.name for path in SCRIPTS.glob("*.sh") if path.name not in INNER)


@pytest.mark.parametrize("name", WRAPPERS)
def test_help_says_how_to_use_it(name, tmp_path):
    """From another folder, with no environment active."""
    bare = f"env -i PATH=/usr/bin:/bin HOME={tmp_path} bash"
    (done,) = shell(f"cd {tmp_path} && {bare} {SCRIPTS}/{name} --help")
    assert (done.code, done.err) == (0, "")
    assert f"scripts/{name}" in done.out, "no example"
    assert "Installing" not in done.out and "set -euo" not in done.out
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
        ("one_node_train.sh 1 mine many", "many"),
        ("one_node_train.sh 1 mine 5 --epochs 1", "--epochs"),
        ("one_node_train.sh 1 ../../out 5", "../../out"),
        ("multi_node_train.sh 1 0 2 mine", "NODE_RANK"),
        ("multi_node_train.sh 1 2 2 mine 5", "2"),
        ("multi_node_train.sh 1 0 2 mine 5", "MASTER_ADDR"),
        ("elastic_train.sh 1 1:2 mine", "MIN:MAX"),
        ("elastic_train.sh 1 2 mine 5", "MIN:MAX is 2"),
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


@pytest.mark.parametrize(
    ("command", "env", "log", "wanted"),
    [
        (
            "one_node_train.sh 1.5 mine 8 -- -p 3 --output-dir a --output-dir=b",
            {"MASTER_ADDR": "x", "MASTER_PORT": "7", "WORLD_SIZE": "2", "NODE_RANK": "1"}
            | {"NPROC": "2", "ARCH": "vgg19", "DATA": "/d"},
            "b/mine/node0.log",
            f"imagenet_ddp.py -g 2 -b 8 --train-time 1.5 --name mine {REST} -a vgg19 -p 3"
            " --output-dir a --output-dir=b /d at : for launcher:mine",
        ),
        (
            "one_node_train.sh .5 mine 8",
            {"NPROC": "2", "SCRIPT": "imagenet_nd.py"},
            "runs/mine/node0.log",
            f"imagenet_nd.py -b 8 --train-time .5 --name mine {REST} at : for launcher:mine",
        ),
        (
            "multi_node_train.sh 2 1 3 mine auto -- -p 3",
            {"MASTER_ADDR": "10.0.0.1", "SCRIPT": "imagenet_fsdp.py"},
            "runs/mine/node1.log",
            f"imagenet_fsdp.py -n 3 -nr 1 -b auto --train-time 2 --name mine {REST} -p 3"
            " at 10.0.0.1:8888 for launcher:mine",
        ),
        (
            "elastic_train.sh 3 1:2 mine 5",
            {"MASTER_ADDR": "127.0.0.1", "MAX_RESTARTS": "7", "NPROC": "4"},
            "runs/mine/node_*.log",
            f"imagenet_ddp.py -b 5 --train-time 3 --name mine {REST} at ",
        ),
    ],
)
def test_arguments_reach_the_training_script(command, env, log, wanted, tmp_path):
    (tmp_path / "python").write_text(PLAYED)
    (tmp_path / "python").chmod(0o755)
    port = str(free_port())
    env = {"MASTER_PORT": port} | env if "elastic" in command else env
    done = typed(command, tmp_path, **env, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.code, done.err) == (0, "")
    said = done.out.splitlines()[-1].replace(f"{ROOT}/", "")
    if "elastic" in command:
        how = "--nnodes=1:2 --rdzv_backend=c10d --rdzv_id=mine --rdzv_conf=is_host=true"
        how += f" --rdzv_endpoint=127.0.0.1:{port} --local_addr=127.0.0.1 --max_restarts=7"
        assert said.startswith(f"-m torch.distributed.run {how} --nproc_per_node=4 {wanted}")
    else:
        assert said == wanted
    (written,) = tmp_path.glob(log)
    assert said in written.read_text().replace(f"{ROOT}/", "")


@pytest.mark.parametrize("fault", ["port", "data", "option"])
def test_elastic_train_ends_with_one_error(folder, tmp_path, fault):
    """Not with torchrun's stack trace, and not after a hundred restarts."""
    data, bad = tmp_path / "none" if fault == "data" else folder, 2 if fault == "option" else 0.1
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] if fault == "port" else free_port()
        command = f"elastic_train.sh 1 1:1 run 5 -- {TINY_LINE} --mixup {bad} {data}"
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NPROC": "2"}
        done = typed(command, tmp_path, **tiny()[1], **env)
    assert done.code != 0
    assert "Traceback" not in done.out
    wanted = {"port": f"port {port} of", "data": f"{data} is missing", "option": "--mixup"}
    assert wanted[fault] in done.sentence


@pytest.mark.parametrize(
    ("command", "count"),
    [("multi_node_train.sh 1 {rank} 2 run 5", 2), ("elastic_train.sh 1 1:1 run 5", 1)],
)
def test_hosts_whose_own_names_do_not_resolve_can_train(command, count, folder, tmp_path):
    line = f"NPROC={3 - count} MASTER_ADDR={{ip}} bash scripts/{command} -- {TINY_LINE} --epochs 1"
    with Nodes(count) as nodes:
        for node in nodes:
            node.replace("/etc/hosts", "127.0.0.1 localhost\n")
        line += f" --output-dir {tmp_path} {folder}"
        for done in type_on_each(nodes, line, **tiny()[1]):
            assert done.code == 0, done.out + done.err
    found = summary(tmp_path / "run")
    assert (found["world_size"], found["nodes"], found["epochs_done"]) == (2, count, 1)
