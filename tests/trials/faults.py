#!/usr/bin/env python3
"""What happens when part of a run on several nodes fails, and how long it takes to continue.

    sudo python tests/trials/faults.py [--only node_killed,link_down] [--dist-timeout 30]

The nodes are simulated (tests/nodes.py; needs root, iproute2, openssh-server and pytest), each with
one process: two of scripts/elastic_train.sh, 1:2 nodes; for rank0_killed four of
scripts/train_on_nodes.sh --elastic 1:4. The model costs next to nothing and sleeps 0.1 s per step,
so that the times are those of detection, rendezvous and start-up. Prints a Markdown table; the log
of each trial is kept in --output-dir.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from utils.errors import UserError, end_with  # noqa: E402

IMAGES, CLASSES, BATCH = 600, 3, 5  # images per epoch; classes; images per step and process
LIMIT = 300  # seconds after which a trial that does not continue is given up
STEADY = 15  # seconds for which training has to continue, as one restart may follow another
LINK_DOWN, AWAY = 20, 10  # seconds
START = re.compile(r"\S+; processes: \d+, nodes: (\d+)")
STEP = re.compile(r"Epoch \d+/\d+ step ")
KILLS = 3  # of rank 0's node, in rank0_killed
ENV = {"PYTHONPATH": str(ROOT / "tests" / "stand_in"), "STEP_SECONDS": "0.1"}
ENV |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


class Line(NamedTuple):
    """A line that a node printed, and when (seconds, monotonic)."""

    time: float
    node: str
    text: str


# Of the table: fault, what happens, nodes afterwards, seconds to the next step, restarts.
Row = tuple[str, str, int, float, int]


class Trial:
    """A run on several nodes, and all the lines that it has printed so far."""

    def __init__(self, nodes: list, name: str, args: argparse.Namespace):
        self.nodes, self.name, self.args = nodes, name, args
        self.master = 0  # the node where they meet
        self.lines: list[Line] = []
        self.path = args.output_dir / f"{name}.log"
        self.path.unlink(missing_ok=True)
        self.began = time.monotonic()
        self.typed: dict[int, subprocess.Popen] = {}
        self.options = (
            f"--image-size 32 -j 1 -p 1 --epochs 10000 --dist-timeout {args.dist_timeout:g}"
            f" --snapshot-minutes 0.05 --output-dir {args.output_dir}"
        )

    def start(self, number: int) -> None:
        """Type the command of elastic_train.sh on a node."""
        env = {"MASTER_ADDR": self.nodes[self.master].ip, "DATA": str(self.args.data)}
        wrapper = f"bash scripts/elastic_train.sh 1 1:2 {self.name} {BATCH} -- {self.options}"
        self.type(number, wrapper, ENV | env | {"ARCH": "tiny_plain", "NPROC": "1"})

    def start_over_ssh(self) -> None:
        """Type the command of train_on_nodes.sh on node 0, for all others."""
        hosts = self.args.data.parent / "hosts"
        hosts.write_text("".join(f"{node.name}\n" for node in self.nodes[1:]))
        for node in self.nodes[1:]:
            node.start_sshd(**ENV)
        launcher = f"bash scripts/train_on_nodes.sh {hosts} --dir {ROOT} --python {sys.executable}"
        script = f"imagenet_ddp.py -a tiny_plain -b {BATCH} --name {self.name} {self.options}"
        self.type(0, f"{launcher} --elastic 1:{KILLS + 1} -- {script} {self.args.data}", {})

    def type(self, number: int, command: str, env: dict[str, str]) -> None:
        """Type a command on a node."""
        how = {"stdin": DEVNULL, "stdout": PIPE, "stderr": STDOUT, "text": True}
        self.typed[number] = self.nodes[number].popen(command, env, **how)
        self.say(f"typed on node{number}: {command}")
        threading.Thread(target=self._read, args=(number, self.typed[number]), daemon=True).start()

    def _read(self, number: int, typed: subprocess.Popen) -> None:
        for text in typed.stdout:
            # The launcher over ssh puts the node's name in front.
            found = re.match(r"(?:\[(node\d+)\] )?(.*)", text)
            self.lines.append(Line(time.monotonic(), found[1] or f"node{number}", found[2]))
            self.say(f"{self.lines[-1].node}: {found[2]}")
        typed.wait()

    def say(self, text: str) -> None:
        """Write a line into the trial's log."""
        with open(self.path, "a") as log:
            log.write(f"{time.monotonic() - self.began:7.2f} {text}\n")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until ``condition`` holds. Raises: `UserError` if that takes too long."""
        end = time.monotonic() + LIMIT
        while not condition():
            if time.monotonic() > end:
                raise UserError(f"{self.name}: waited {LIMIT} s for {what}; see {self.path}")
            time.sleep(0.1)

    def wait_for_steps(self, nodes: int, since: float = 0.0) -> float:
        """Wait until training has been under way for a while, after ``since``, on so many nodes.

        Returns: when the first of these steps was done.
        """
        times: list[float] = []

        def steady() -> bool:
            times.clear()
            now = 0  # nodes, as rank 0 has printed at the last start
            for line in list(self.lines):
                if match := START.match(line.text):
                    now = int(match[1])
                    times.clear()
                elif STEP.match(line.text) and line.time > since:
                    times.append(line.time)
            return now == nodes and bool(times) and times[-1] - times[0] > STEADY

        self.wait(steady, f"steps on {nodes} nodes")
        return times[0]

    def worker(self, number: int) -> int:
        """The process id of a node's training process."""
        ours = self.nodes[number].processes()
        torchrun = {one.pid for one in ours if " -m torch.distributed.run " in one.command}
        found = [one.pid for one in ours if one.parent in torchrun and " -u " in one.command]
        if len(found) != 1:
            raise UserError(f"{self.name}: node{number} is not training; see {self.path}")
        return found[0]

    def row(self, fault: str, what: str, nodes: int, began: float, since: float = 0.0) -> Row:
        """Wait until training continues after ``since``; the fault was at ``began``."""
        first = self.wait_for_steps(nodes, since or began)
        starts = [line for line in self.lines if line.time > began and START.match(line.text)]
        return fault, what, nodes, first - began, len(starts)


def worker_killed(trial: Trial) -> list[Row]:
    os.kill(trial.worker(1), signal.SIGKILL)
    now = time.monotonic()
    return [trial.row("worker killed (-9)", "both nodes start it again", 2, now)]


def node_killed(trial: Trial) -> list[Row]:
    trial.nodes[1].kill()
    found = trial.row("node killed", "the other continues alone", 1, time.monotonic())
    trial.nodes[1].start_again()
    now = time.monotonic()
    trial.start(1)
    what = "it joins; time from typing its command again"
    return [found, trial.row("... and started again", what, 2, now)]


def node_back_soon(trial: Trial) -> list[Row]:
    now = time.monotonic()
    trial.nodes[1].kill()
    time.sleep(AWAY)
    trial.nodes[1].start_again()
    trial.start(1)
    what = f"node killed, started again after {AWAY} s"
    return [trial.row(what, "both nodes start it again", 2, now)]


def link_down(trial: Trial) -> list[Row]:
    now = time.monotonic()
    trial.nodes[1].link(False)
    time.sleep(LINK_DOWN)
    trial.nodes[1].link(True)
    return [trial.row(f"link down {LINK_DOWN} s", "both continue", 2, now, time.monotonic())]


def master_killed(trial: Trial) -> list[Row]:
    now = time.monotonic()
    trial.nodes[0].kill()
    trial.wait(lambda: any("lost touch" in line.text for line in list(trial.lines)), "an error")
    noticed = time.monotonic()
    # torchrun itself waits for its rendezvous for many minutes.
    trial.nodes[1].run(f"bash scripts/cleanup.sh --name {trial.name} --grace 5")
    trial.typed[1].wait()
    trial.master, ended = 1, time.monotonic()
    trial.start(1)
    what = (
        f"the other reports it after {noticed - now:.1f} s; cleanup.sh --name, then the same "
        "command with its own MASTER_ADDR (time from typing it)"
    )
    return [trial.row("master node killed", what, 1, ended)]


def rank0_killed(trial: Trial) -> list[Row]:
    found = []
    for left in range(KILLS, 0, -1):
        name = next(line.node for line in reversed(trial.lines) if STEP.match(line.text))
        next(node for node in trial.nodes if node.name == name).kill()
        now, what = time.monotonic(), "over ssh, the other nodes continue"
        found.append(trial.row(f"{name} killed, which had rank 0", what, left, now))
    for node in trial.nodes[1 : KILLS + 1]:
        node.start_again()
        node.start_sshd(**ENV)
    now, what = time.monotonic(), "all nodes switched on again"
    return [*found, trial.row(what, "over ssh, they join", KILLS + 1, now)]


ALL = (worker_killed, node_killed, node_back_soon, link_down, master_killed, rank0_killed)
FAULTS = {fault.__name__: fault for fault in ALL}


def try_fault(name: str, args: argparse.Namespace) -> list[Row]:
    """Train on several nodes, cause the fault, and see what comes of it."""
    from conftest import draw_folder
    from nodes import Nodes

    args.output_dir.mkdir(parents=True, exist_ok=True)
    count = KILLS + 1 if name == "rank0_killed" else 2
    with tempfile.TemporaryDirectory() as folder, Nodes(count + (count > 2)) as nodes:
        args.data = draw_folder(Path(folder) / "data", train=IMAGES // CLASSES, classes=CLASSES)
        trial = Trial(nodes, f"faults_{name}_{os.getpid()}", args)
        if count > 2:
            trial.start_over_ssh()
        else:
            trial.start(0)
            trial.start(1)
        trial.wait_for_steps(count)
        trial.say(f"fault: {name}")
        return FAULTS[name](trial)


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--only", default=",".join(FAULTS), metavar="LIST", help="(%(default)s)")
    parser.add_argument("--dist-timeout", type=float, default=30, metavar="S", help="(%(default)s)")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "runs", metavar="DIR")
    args = parser.parse_args()
    args.output_dir = args.output_dir.resolve()
    if os.geteuid() != 0:
        raise UserError("network namespaces need root: sudo python tests/trials/faults.py")
    if unknown := set(args.only.split(",")) - set(FAULTS):
        raise UserError(f"--only {unknown.pop()} is not one of {', '.join(FAULTS)}")
    print("| fault | what happens | then nodes | s to the next step | restarts |")
    print("|---|---|---|---|---|", flush=True)
    for name in args.only.split(","):
        for fault, what, nodes, seconds, restarts in try_fault(name, args):
            print(f"| {fault} | {what} | {nodes} | {seconds:.1f} | {restarts} |", flush=True)
    return 0


if __name__ == "__main__":
    end_with(main)
