"""Arms as jobs of Slurm, by scripts/train.sbatch, one after the other.

A job belongs to Slurm, not to this launcher: when that ends, however, the job goes on, and the same
line finds it again by the file ARM.job.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

from study.arms import Arm
from study.places import ROOT, keep_dump
from study.running import Runner, Steady

from utils.errors import INTERRUPTED, UserError

POLL_SECONDS = 2.0
LIVING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "STOPPED")
LIVING += ("RESIZING", "REQUEUE_HOLD", "REQUEUE_FED", "SIGNALING", "STAGE_OUT", "SPECIAL_EXIT")


class Slurm:
    """Nodes that Slurm chooses for each arm."""

    what = "nodes of Slurm"
    nodes = 10**6  # no more than that; Slurm itself knows

    def __init__(self, options: argparse.Namespace):
        if not options.nodes:
            raise UserError("--slurm needs --nodes, such as --nodes 1,2,4")
        if not shutil.which("sbatch"):
            raise UserError("there is no sbatch here: type this on a login node of the cluster")
        if Path.cwd() != ROOT:
            raise UserError(f"scripts/train.sbatch is submitted from {ROOT}: cd there first")
        self.words = shlex.split(options.slurm)
        found = re.findall(r"--(?:gpus|ntasks)-per-node[= ](?:\w+:)?(\d+)", options.slurm)
        given = os.environ.get("NPROC") or (found[-1] if found else "")
        self.processes = int(given) if given.isdecimal() else None

    def names(self, arm: Arm) -> list[str]:
        """Not known before the job has begun."""
        return []

    def submission(self, arm: Arm) -> list[str]:
        """The command that submits an arm."""
        own = [f"--nodes={arm.nodes}", f"--job-name={arm.name}", f"--output={_log(arm)}"]
        return ["sbatch", *own, *self.words, "scripts/train.sbatch", *arm.command]

    def lines(self, arm: Arm) -> list[str]:
        """The command of an arm, to be read and typed."""
        return [shlex.join(self.submission(arm))]

    def check(self, runner: Runner, arms: list[Arm], folder: Path) -> None:
        """Nothing to check: each job begins with a pre-flight check of its nodes."""

    def wait_until_empty(self, silent: float) -> None:
        """Jobs outlive their launcher."""

    def train(self, runner: Runner, arm: Arm, folder: Path) -> int:
        """Submit an arm, or find its job again, and show its output. Returns: the exit code."""
        log, kept = _log(arm), folder / f"{arm.name}.job"
        log.parent.mkdir(parents=True, exist_ok=True)
        job = kept.read_text().strip() if kept.is_file() else ""
        place = log.stat().st_size if log.is_file() else 0
        if job and is_alive(job):
            print(f"job {job} of this arm is still there", flush=True)
        else:
            job = self._submit(arm)
            kept.write_text(f"{job}\n")
        runner.error = ""
        steady = Steady(lambda: _dump(job, arm, folder))
        while True:
            alive = is_alive(job)  # before reading, so that its last words are not missed
            place = _show_from(place, log, runner, steady)
            if runner.stops:
                print(f"job {job} goes on without this launcher; to end it: scancel {job}")
                return INTERRUPTED
            if not alive:
                steady.join()
                return exit_code(job)
            time.sleep(POLL_SECONDS)

    def _submit(self, arm: Arm) -> str:
        command = self.submission(arm)
        done = _ask(command[0], "--parsable", *command[1:])
        if done.returncode:
            raise UserError(f"sbatch refuses {arm.name}: {' '.join(done.stderr.split())}")
        job = done.stdout.strip().partition(";")[0]
        print(f"job {job} is submitted", flush=True)
        return job


def _log(arm: Arm) -> Path:
    return arm.run / "study.log"


def _ask(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def is_alive(job: str) -> bool:
    """Whether a job is waiting or running; also when Slurm does not answer."""
    done = _ask("squeue", "-h", "-j", job, "-o", "%T")
    if done.returncode:
        return "Invalid job id" not in done.stderr
    return done.stdout.strip() in LIVING


def exit_code(job: str) -> int:
    """The exit code of a job that has ended; 1 where Slurm does not know it any more."""
    found = re.search(r"ExitCode=(\d+):(\d+)", _ask("scontrol", "show", "job", job).stdout)
    if not found:
        return 1
    code, signum = map(int, found.groups())
    return code or (128 + signum if signum else 0)


def _show_from(place: int, log: Path, runner: Runner, steady: Steady) -> int:
    """Show what is new in a log behind ``place`` (bytes). Returns: the new place."""
    if not log.is_file():
        return place
    with open(log, "rb") as file:
        file.seek(place)
        new = file.read()
    whole = new.rfind(b"\n") + 1
    for line in new[:whole].splitlines(keepends=True):
        runner.show(line, "", None, steady)
    return place + whole


def _dump(job: str, arm: Arm, folder: Path) -> None:
    """What nvidia-smi says on each node of a running job."""
    each = ("--overlap", f"--jobid={job}", "--ntasks-per-node=1", f"--nodes={arm.nodes}", "--label")
    done = _ask("srun", *each, "sh", "-c", "command -v nvidia-smi >/dev/null && nvidia-smi; true")
    if done.returncode == 0:
        keep_dump(folder / f"{arm.name}.nvidia-smi.txt", [(f"job {job}", done.stdout)])
