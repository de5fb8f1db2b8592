"""scripts/examples/ray_train.py on a Ray cluster of two nodes that train, and a head.

Needs Ray, in this environment or in that of the interpreter $RAY_PYTHON.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile

import pytest
from conftest import ROOT, TIMEOUT, summary
from nodes import Node, Nodes, Typed
from running import TINY_LINE, Process, eventually, tiny

pytestmark = pytest.mark.long

PYTHON = os.environ.get("RAY_PYTHON", sys.executable)
HEAD = "10.77.0.1:6379"
# Without the last, Ray makes its workers, and so the training, give way to everything else.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
_, ENV = tiny(step_seconds=0.05)


@pytest.fixture
def nodes():
    """node0, Ray's head, to type on; node1 and node2, which train."""
    if subprocess.run([PYTHON, "-c", "import ray"], capture_output=True, check=False).returncode:
        pytest.skip(f"Ray is not installed for {PYTHON}: pip install ray, or set RAY_PYTHON")
    # The path of a socket is short, and so is this.
    with Nodes(3) as all_nodes, tempfile.TemporaryDirectory(prefix="ray") as folder:
        head = f"--head --port 6379 --num-cpus 0 --include-dashboard false --temp-dir {folder}"
        with ray(all_nodes[0], head), ray(all_nodes[1]), ray(all_nodes[2]):
            yield all_nodes


def ray(node: Node, options: str = f"--address {HEAD} --num-cpus 1 --num-gpus 1") -> Typed:
    """A node of the cluster, as long as the command runs; Ray does not check the number of GPUs."""
    options += f" --node-ip-address {node.ip} --object-store-memory 80000000"
    line = f"exec {PYTHON} -m ray.scripts.scripts start {options} --disable-usage-stats --block"
    started = node.type(f"unset CUDA_VISIBLE_DEVICES; {line} 2>&1", **QUIET)
    started.allow(4 * TIMEOUT)
    started.until("Ray runtime started")
    return started


def start(nodes: list[Node], runs, folder, limits: str, epochs: int = 100000) -> Typed:
    """The training, started on node0; a line every step."""
    given = " ".join(
        f"--env {pair}" for pair in (*map("=".join, ENV.items()), "CUDA_VISIBLE_DEVICES=")
    )
    run = nodes[0].type(
        f"exec {PYTHON} scripts/examples/ray_train.py --address {HEAD} --nodes {limits} "
        f"--python {sys.executable} --dir {ROOT} {given} -- imagenet_ddp.py {TINY_LINE} -p 1 "
        f"--epochs {epochs} --snapshot-minutes 0.02 --name run --output-dir {runs} {folder} 2>&1",
        **QUIET,
    )
    run.allow(3 * TIMEOUT)
    return run


def trainings(nodes: list[Node]) -> set[Process]:
    """What belongs to trainings in the nodes, guards too."""
    living = set().union(*(node.processes() for node in nodes))
    return {one for one in living if re.search("imagenet_ddp|ARGUMENTS|spawn_main", one.command)}


def test_training_goes_on_without_a_node_and_with_it_again(nodes, folder, tmp_path):
    """Then the launcher is killed: nothing is left."""
    with start(nodes, tmp_path, folder, "1:2") as run:
        run.until(r"training begins on 2 of 2 nodes: node\d, node\d")
        run.until(r"\[node2\] (\[rank 1\] )?Epoch 2/\d+ step")
        (raylet,) = [one for one in nodes[2].processes() if "/raylet/raylet " in one.command]
        os.kill(raylet.pid, signal.SIGKILL)
        run.until("lost the connection to node2; will keep trying")
        run.until(r"training begins again on 1 of \d nodes: node1$")
        run.until(r"resumed from \S+: epoch \d+, step \d+")
        run.until(r"\[node1\] Epoch \d+/\d+ step")
        assert eventually(lambda: not trainings(nodes[2:])), trainings(nodes[2:])
        with ray(nodes[2]):
            run.until("stopping with a snapshot, to continue with node2")
            run.until(r"training begins again on 2 of \d nodes: node\d, node\d")
            run.until(r"\[node2\] (\[rank 1\] )?Epoch \d+/\d+ step")
            run.send(signal.SIGKILL)
            assert eventually(lambda: not trainings(nodes)), trainings(nodes)


def test_a_training_ends_and_its_faults_are_one_line(nodes, folder, tmp_path):
    for data, code in ((folder, 0), ("/nowhere", 2)):
        with start(nodes, tmp_path, data, "2", epochs=1) as run:
            result = run.result()
        assert result.code == code, result.out
    assert "error: data folder /nowhere is missing" in result.out
    assert "Traceback" not in result.out
    results = summary(tmp_path / "run")
    assert (results["nodes"], results["world_size"], results["epochs_done"]) == (2, 2, 1)
