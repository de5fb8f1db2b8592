"""scripts/train.sbatch with stand-ins for Slurm's commands, and on a real Slurm of two nodes.

The latter needs Debian's packages slurmctld, slurmd, slurm-client and munge.
"""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import summary
from nodes import Node, Nodes, need
from running import TINY_LINE, Running, eventually, snapshot

ENV = {"STEP_SECONDS": "0.05"}
# Of one node. What srun starts is in a session of its own, to which scancel sends its signal.
STAND_INS = {
    "scontrol": '[ $1 = show ] && echo localhost || echo "$@" >> $0.log',
    "scancel": 'echo "$@" >> $0.log; kill -USR1 -- -$(cat ${0%/*}/srun.pid)',
    "srun": """[ "$SLURM_EXPORT_ENV" != NONE ] || exec env -i "$BASH" -c 'exec getent'
        while [[ $1 == --* ]]; do echo "$1" >> $0.log; shift; done
        echo $$ > $0.pid; export SLURM_NODEID=0; exec setsid "$@" """,
}
SBATCH = "import os, sys; os.execvp('bash', ['bash', 'scripts/train.sbatch', *sys.argv[1:]])"

CONFIGURATION = """
ClusterName=tests
SlurmctldHost=node0
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir=/run/slurmd
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%h.log
ProctrackType=proctrack/linuxproc
SelectType=select/linear
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
    env |= {"SLURM_EXPORT_ENV": "NONE", "SLURM_GPUS_ON_NODE": "2", "NPROC": "1"}
    # Asked for with a task per GPU; the last one of a job array, which has the array's number.
    env |= {"SLURM_GPUS_PER_TASK": "1", "SLURM_NTASKS": "2", "SLURM_ARRAY_TASK_ID": "7"}
    env |= {"SLURM_ARRAY_JOB_ID": str(job_id)}
    for data, code in ((folder, 0), ("/nowhere", 2)):
        words = ["imagenet_ddp.py", *TINY_LINE.split(), "-p", 1, "--epochs", 10000]
        with Running("-c", SBATCH, *words, "--output-dir", tmp_path, data, **env) as job:
            if code == 0:
                job.until("Epoch 1/10000 step")
                job.send(signal.SIGUSR1)
            done = job.result()
            assert done.code == code, done.out + done.err
    assert "/nowhere is missing" in done.err
    assert (tmp_path / "scontrol.log").read_text() == f"requeue {job_id}_7\n"
    assert (tmp_path / "scancel.log").read_text() == f"--signal=USR1 {job_id}_7\n"
    options = (tmp_path / "srun.log").read_text().splitlines()
    assert {"--ntasks=1", "--ntasks-per-node=1", "--cpu-bind=none", "--gpus-per-node=2"} < {
        *options
    }
    facts = summary(tmp_path / f"slurm_{job_id}")
    assert (facts["finished_because"], facts["world_size"]) == ("interrupted", 1)


def start_slurm(nodes: list[Node], folder: Path) -> Callable[[str], str]:
    """Start Slurm on the nodes; gives what a command prints on the first."""

    def ask(command: str, node: Node = nodes[0]) -> str:
        env = {"SLURM_CONF": f"{folder}/slurm.conf", "PYTHON": sys.executable}
        done = node.run(command, env=env | ENV)
        assert done.code == 0, done.out + done.err
        return done.out

    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, cpus=os.cpu_count()))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    munged = f"munged --force --key-file={key} --socket=/run/munge/munge.socket.2"
    munged += " --pid-file=/run/munge/pid --log-file=/run/munge/log --seed-file=/run/munge/seed"
    for node, controller in zip(nodes, ("slurmctld", "true"), strict=True):
        ask(f"mkdir -p /run/munge /run/slurmd && {munged} && {controller}", node)
        ask("slurmd -N $(hostname)", node)
    assert eventually(lambda: ask("sinfo -h -t idle -o %D") == "2\n"), ask("scontrol show nodes")
    return ask


@pytest.mark.long
def test_a_time_limit_gives_a_snapshot_and_the_queue(folder, tmp_path):
    """Slurm itself sends SIGUSR1."""
    need("slurmctld", "slurmd", "sbatch", "munged")
    log, run = tmp_path / "log", tmp_path / "runs" / "mine"
    with Nodes(2) as nodes:
        ask = start_slurm(nodes, tmp_path)
        options = f"--parsable --output={log} --time=2 --signal=B:USR1@60 --ntasks-per-node=2"
        training = f"imagenet_ddp.py {TINY_LINE} -p 1000 --name mine --epochs 5000"
        training += f" --output-dir {run.parent} {folder}"
        job = ask(f"sbatch {options} scripts/train.sbatch {training}").strip()

        def becomes(state: str, restarts: int, seconds: float) -> bool:
            line = f"(?s)JobState={state} .*Restarts={restarts} "
            return eventually(lambda: re.search(line, ask(f"scontrol show job {job}")), seconds)

        # The job stays in the queue for two minutes and starts again.
        assert becomes("PENDING", 1, 150), log.read_text()
        results = summary(run)
        ended = [results[key] for key in ("finished_because", "nodes", "world_size")]
        assert ended == ["interrupted", 2, 2]
        assert "--dist-url tcp://10.77.0.1:" in log.read_text()
        done = results["epochs_done"]
        assert snapshot(run)["progress"]["epoch"] == done
        assert "asking all ranks for a snapshot" in log.read_text()
        assert becomes("RUNNING", 1, 200), log.read_text()
        resumed = rf"resumed from {run}/snapshot.pt: epoch {done + 1}, step"
        assert eventually(lambda: re.search(resumed, log.read_text())), log.read_text()
        ask(f"scancel {job}")
        assert becomes("CANCELLED", 1, 60)
        training = [one for node in nodes for one in node.processes()]
        training = [one for one in training if "imagenet" in one.command]
        assert eventually(lambda: not any(one.lives() for one in training)), training
