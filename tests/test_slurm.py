"""scripts/train.sbatch with stand-ins for Slurm's commands, and on a real Slurm of two nodes.

The latter needs Debian's packages slurmctld, slurmd, slurm-client and munge.
"""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from conftest import Result, summary
from nodes import Node, Nodes, need
from running import TINY_LINE, Running, eventually, snapshot, tiny

_, ENV = tiny(step_seconds=0.05)
# Of one node. What srun starts is in a session of its own, to which scancel sends its signal.
STAND_INS = {
    "scontrol": '[ $1 = show ] && echo localhost || echo "$@" >> $0.log',
    "scancel": "kill -USR1 -- -$(cat ${0%/*}/srun.pid)",
    "srun": """while [[ $1 == --* ]]; do shift; done
        echo $$ > $0.pid; export SLURM_NODEID=0; exec setsid "$@" """,
}
SBATCH = "import os, sys; os.execvp('bash', ['bash', 'scripts/train.sbatch', *sys.argv[1:]])"

CONFIGURATION = """
ClusterName=tests
SlurmctldHost=node0
SlurmUser=root
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%h.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/backfill
SelectType=select/linear
MpiDefault=none
ReturnToService=2
NodeName=node[0-1] CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def test_only_a_job_at_its_time_limit_is_requeued(folder, tmp_path):
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job_id = os.getpid()  # the master's port depends on it
    env = {"SLURM_JOB_ID": str(job_id), "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1"}
    env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable, **ENV}
    for data, code in ((folder, 0), ("/nowhere", 2)):
        words = ["imagenet_ddp.py", *TINY_LINE.split(), "-p", 1, "--epochs", 10000]
        with Running("-c", SBATCH, *words, "--output-dir", tmp_path, data, **env) as job:
            if code == 0:
                job.until("Epoch 1/10000 step")
                job.send(signal.SIGUSR1)
            done = job.result()
            assert done.code == code, done.out + done.err
    assert "/nowhere is missing" in done.err
    assert (tmp_path / "scontrol.log").read_text() == f"requeue {job_id}\n"
    assert summary(tmp_path / f"slurm_{job_id}")["finished_because"] == "interrupted"


@pytest.fixture
def cluster(tmp_path):
    need("slurmctld", "slurmd", "sbatch", "munged")
    with Nodes(2) as nodes:
        yield Cluster(nodes, tmp_path)


class Cluster:
    """Two nodes with a running Slurm; commands are typed on the first."""

    def __init__(self, nodes: list[Node], folder: Path):
        self.nodes, self.folder = nodes, folder
        (folder / "state").mkdir()
        self.configuration = folder / "slurm.conf"
        self.configuration.write_text(CONFIGURATION.format(folder=folder, cpus=os.cpu_count()))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        socket = "--socket=/run/munge/munge.socket.2 --pid-file=/run/munge/pid"
        for node in nodes:
            done = self.type(
                f"mkdir -p /run/munge /run/slurmd; munged --force --key-file={key} {socket}"
                " --log-file=/run/munge/log --seed-file=/run/munge/seed || exit 1\n"
                "[ $(hostname) != node0 ] || slurmctld || exit 1\n"
                "slurmd -N $(hostname)",
                node,
            )
            assert done.code == 0, done.out + done.err
        idle = eventually(lambda: self.type("sinfo -h -t idle -o %D").out == "2\n")
        assert idle, self.type(f"sinfo; scontrol show nodes; tail -n 20 {folder}/*.log").out

    def type(self, command: str, node: Node | None = None) -> Result:
        """Run a command on a node, by default the first."""
        env = {"SLURM_CONF": str(self.configuration), "PYTHON": sys.executable}
        return (node or self.nodes[0]).run(command, env=env | ENV)

    def submit(self, options: str, training: str) -> str:
        """Submit train.sbatch; returns the job's number."""
        done = self.type(f"sbatch --parsable {options} scripts/train.sbatch {training}")
        assert done.code == 0, done.err
        return done.out.strip()

    def state(self, job: str) -> str:
        """State and number of restarts of a job, such as "COMPLETED 0"."""
        out = self.type(f"scontrol show job {job}").out
        return " ".join(re.search(rf"{key}=(\S+)", out)[1] for key in ("JobState", "Restarts"))


@pytest.mark.long
def test_a_time_limit_gives_a_snapshot_and_the_queue(cluster, folder, tmp_path):
    """Slurm itself sends SIGUSR1."""
    log, run = tmp_path / "log", tmp_path / "runs" / "mine"
    training = (
        f"imagenet_ddp.py {TINY_LINE} -p 1000 --name mine --output-dir {tmp_path}/runs {folder}"
    )
    job = cluster.submit(f"--output={log} --time=2 --signal=B:USR1@60", f"{training} --epochs 5000")
    # The job stays in the queue for two minutes and starts again.
    assert eventually(lambda: cluster.state(job) == "PENDING 1", 150), log.read_text()
    found = summary(run)
    assert (found["finished_because"], found["nodes"], found["world_size"]) == ("interrupted", 2, 2)
    assert "--dist-url tcp://10.77.0.1:" in log.read_text()
    done = found["epochs_done"]
    assert snapshot(run)["progress"]["epoch"] == done
    assert "asking all ranks for a snapshot" in log.read_text()
    assert eventually(lambda: cluster.state(job) == "RUNNING 1", 200), log.read_text()
    resumed = rf"resumed from {run}/snapshot.pt: epoch {done + 1}, step"
    assert eventually(lambda: re.search(resumed, log.read_text()) is not None), log.read_text()
    cluster.type(f"scancel {job}")
    assert eventually(lambda: cluster.state(job).startswith("CANCELLED"))
    training = [one for node in cluster.nodes for one in node.processes()]
    training = [one for one in training if "imagenet" in one.command]
    assert eventually(lambda: not any(one.lives() for one in training)), training
