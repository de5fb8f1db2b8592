"""The shell scripts: --help, wrong arguments, waiting, and a host whose own name is unknown."""

import socket
import subprocess

import pytest
from conftest import ROOT, activated, summary
from nodes import Nodes
from running import TINY_LINE, tiny

from utils.launch.network import free_port

WRAPPERS = sorted(
    path.name
    for path in (ROOT / "scripts").glob("*.sh")
    if path.name not in ("environment.sh", "launch.sh")
)


@pytest.mark.parametrize("name", WRAPPERS)
def test_help_says_how_to_use_it(name, tmp_path):
    """From another folder, with no environment active."""
    line = ["bash", ROOT / "scripts" / name, "--help"]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert f"{name} " in done.stdout
    assert "Installing" not in done.stdout
    assert "set -euo" not in done.stdout
    assert not list(tmp_path.iterdir())


def typed(command: str, folder, **env: str) -> subprocess.CompletedProcess:
    """Run a wrapper in ``folder``."""
    return subprocess.run(
        f"exec bash {ROOT}/scripts/{command}",
        shell=True,
        executable="/bin/bash",
        cwd=folder,
        env=activated(**env),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize(
    "command",
    [
        "one_node_train.sh 1 {} 5",
        "multi_node_train.sh 1 0 2 {} 5",
        "elastic_train.sh 1 1:2 {} 5",
    ],
)
@pytest.mark.parametrize("name", ["../../out", "x" * 300])
def test_a_wrong_name_writes_nothing(command, name, tmp_path):
    here = tmp_path / "a" / "b"
    here.mkdir(parents=True)
    done = typed(command.format(name), here, MASTER_ADDR="127.0.0.1")
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert name[:20] in line
    assert sorted(tmp_path.rglob("*")) == [here.parent, here]


def test_the_wait_for_a_node_is_that_of_dist_timeout(folder, tmp_path):
    command = f"multi_node_train.sh 1 0 2 run 5 -- {TINY_LINE} --dist-timeout 3 {folder}"
    env = tiny()[1] | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NPROC": "1"}
    done = typed(command, tmp_path, **env)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert "node 1 of 2" in line
    assert "within 3 s" in line


@pytest.mark.parametrize("fault", ["port", "data", "option"])
def test_elastic_train_ends_with_one_error(folder, tmp_path, fault):
    """Not with torchrun's stack trace, and not after a hundred restarts."""
    data, bad = tmp_path / "none" if fault == "data" else folder, 2 if fault == "option" else 0.1
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] if fault == "port" else free_port()
        command = f"elastic_train.sh 1 1:1 run 5 -- {TINY_LINE} --mixup {bad}"
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NPROC": "2"}
        done = typed(f"{command} {data}", tmp_path, **tiny()[1], **env)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert {"port": f"port {port} is", "data": f"{data} is missing", "option": "--mixup"}[
        fault
    ] in line


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
