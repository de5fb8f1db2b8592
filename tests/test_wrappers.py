"""The shell scripts: --help, wrong arguments, waiting, and a host whose own name is unknown."""

import socket
from pathlib import Path

import pytest
from conftest import ROOT, Result, shell, summary
from nodes import Nodes
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
    "command",
    ["one_node_train.sh 1 {} 5", "multi_node_train.sh 1 0 2 {} 5", "elastic_train.sh 1 1:2 {} 5"],
)
@pytest.mark.parametrize("name", ["../../out", "x" * 300])
def test_a_wrong_name_writes_nothing(command, name, tmp_path):
    here = tmp_path / "a" / "b"
    here.mkdir(parents=True)
    done = typed(command.format(name), here, MASTER_ADDR="127.0.0.1")
    assert done.code == 2
    assert done.sentence.startswith("error: ")
    assert name[:20] in done.sentence
    assert sorted(tmp_path.rglob("*")) == [here.parent, here]


def test_the_wait_for_a_node_is_that_of_dist_timeout(folder, tmp_path):
    command = f"multi_node_train.sh 1 0 2 run 5 -- {TINY_LINE} --dist-timeout 3 {folder}"
    env = tiny()[1] | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NPROC": "1"}
    done = typed(command, tmp_path, **env)
    assert done.code == 2, done.out + done.err
    assert "node 1 of 2" in done.sentence
    assert "within 3 s" in done.sentence


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
    wanted = {"port": f"port {port} is", "data": f"{data} is missing", "option": "--mixup"}
    assert wanted[fault] in done.sentence


@pytest.mark.parametrize(
    "command", ["one_node_train.sh 1 run 5", "elastic_train.sh 1 1:1 run 5"], ids=lambda c: c[:8]
)
def test_a_host_whose_own_name_does_not_resolve_can_train(command, folder, tmp_path):
    with Nodes(1) as (node,):
        node.replace("/etc/hosts", "127.0.0.1 localhost\n")
        done = node.run(
            f"NPROC=2 MASTER_ADDR={node.ip} bash scripts/{command} -- {TINY_LINE} --epochs 1 "
            f"--output-dir {tmp_path} {folder}",
            env=tiny()[1],
        )
    assert done.code == 0, done.out + done.err
    assert summary(tmp_path / "run")["world_size"] == 2
