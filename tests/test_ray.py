"""scripts/examples/ray_train.py on a Ray cluster of one machine.

Needs Ray, in this environment or in that of the interpreter $RAY_PYTHON.
"""

import os
import signal
import subprocess
import sys
import tempfile

import pytest
from conftest import TIMEOUT, summary
from running import TINY_LINE, Running, descendants, tiny

pytestmark = pytest.mark.long

PYTHON = os.environ.get("RAY_PYTHON", sys.executable)
# Without the last, Ray makes its workers, and so the training, give way to everything else.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
_, ENV = tiny(step_seconds=0.05)
RUN = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"


@pytest.fixture
def cluster():
    """A cluster, as long as the test runs."""
    if subprocess.run([PYTHON, "-c", "import ray.train"], check=False).returncode:
        pytest.skip(f"Ray is not installed for {PYTHON}: pip install 'ray[train]'")
    # The path of a socket is short, and so is this.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        options = f"--head --port 6399 --num-cpus 2 --include-dashboard false --temp-dir {folder}"
        words = ["-m", "ray.scripts.scripts", "start", *options.split(), "--block"]
        with Running("-c", RUN, PYTHON, *words, **QUIET, **ENV) as ray:
            ray.allow(4 * TIMEOUT)
            ray.until("Ray runtime started")
            yield ray


def start(runs, data, epochs: int) -> Running:
    """The training, started beside the cluster; a line every step."""
    words = "scripts/examples/ray_train.py --address 127.0.0.1:6399 --workers 2 -- imagenet_ddp.py"
    words += f" {TINY_LINE} -p 1 --epochs {epochs} --name run --output-dir {runs} {data}"
    run = Running("-c", RUN, PYTHON, "-u", *words.split(), **QUIET, **ENV)
    run.allow(3 * TIMEOUT)
    return run


def test_a_training_resumes_ends_and_reports_bad_input(cluster, folder, tmp_path):
    with start(tmp_path, folder, epochs=20) as run:
        run.until(r"Epoch 2/20 step")
        family = descendants(cluster.pid)
        killed = min(one.pid for one in family if " -u imagenet_ddp.py" in one.command)
        os.kill(killed, signal.SIGKILL)
        run.until(r"resumed from \S+: epoch \d+, step")
        result = run.result()
    assert result.code == 0, result.out + result.err
    results = summary(tmp_path / "run")
    assert (results["world_size"], results["epochs_done"]) == (2, 20)
    with start(tmp_path, "/nowhere", epochs=1) as run:
        result = run.result()
    assert result.code == 2, result.out + result.err
    assert "error: data folder /nowhere is missing" in result.out + result.err
