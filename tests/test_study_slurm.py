"""scripts/scaling_study.sh --slurm on a real Slurm; a launcher that was killed finds its job."""

import os
import signal

import pytest
from nodes import Nodes, need
from running import TINY_LINE, eventually
from test_slurm import ENV, Cluster
from test_study import lines_without_times

pytestmark = pytest.mark.long


def test_one_job_an_arm(folder, tmp_path):
    need("slurmctld", "slurmd", "sbatch", "munged")
    (tmp_path / "slurm").mkdir()
    training = f"imagenet_ddp.py {TINY_LINE} -p 1 --epochs 2 --output-dir {tmp_path}/runs {folder}"
    line = (
        f"bash scripts/scaling_study.sh --slurm='--time=10' --nodes 1,2 --name s "
        f"--logbook {tmp_path}/book -- {training}"
    )
    with Nodes(2) as nodes:
        cluster = Cluster(nodes, tmp_path / "slurm")
        # The first job lasts until the second launcher is there.
        slow = ENV | {"STEP_SECONDS": "2", "SLURM_CONF": str(cluster.configuration)}
        log = tmp_path / "runs/s_1node/study.log"
        with nodes[0].type(line, **slow) as run:
            assert eventually(lambda: log.is_file() and "Epoch 1/2 step" in log.read_text())
            run.send(signal.SIGKILL, group=True)
            run.process.wait()
        done = cluster.type(line)  # its first job waits for the one that is still there
        assert done.code == 0, done.out + done.err
    page = tmp_path / "book/s.md"
    assert "2 of 2 arms finished" in page.read_text()
    assert any("| 5 | 10 |" in row for row in lines_without_times(page))
    assert log.read_text().count("all epochs done") == 1
    assert os.listdir(tmp_path / "runs")
