#!/usr/bin/env python3
"""What happens when part of a run on several nodes fails, and how long it takes to continue.

    sudo python tests/trials/faults.py [--only node_killed link_down]

The nodes are simulated (tests/nodes.py; needs root, iproute2, openssh-server and pytest), each with
one process: two of scripts/elastic_train.sh, 1:2 nodes; for rank0_killed four, and for ssh_* two
of scripts/train_on_nodes.sh --elastic, all with the default of --dist-timeout. The model costs next
to nothing and sleeps 0.1 s per step, so that the times are those of detection, rendezvous and
start-up. Prints a Markdown table; the log of each trial is kept in --output-dir.
"""

import argparse
import os
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from conftest import draw_folder
from nodes import Nodes
from running import eventually

IMAGES, BATCH = 600, 5  # images per epoch, and per step and process
LIMIT = 300  # seconds after which a trial that does not continue is given up
STEADY = 15  # seconds for which training has to continue, as one restart may follow another
LINK_DOWN, AWAY = 20, 10  # seconds
START = re.compile(r"\S+; processes: \d+, nodes: (\d+)")
STEP = re.compile(r"Epoch \d+/\d+ step ")
KILLS = 3  # of rank 0's node, in rank0_killed
ENV = {"STEP_SECONDS": "0.1"}


class Trial:
    """A run on several nodes, and all the lines that it has printed so far."""

    def __init__(self, nodes: list, name: str, data: Path, output_dir: Path):
        self.nodes, self.name, self.data = nodes, f"faults_{name}_{os.getpid()}", data
        self.lines: list[tuple[float, str, str]] = []  # when (monotonic), on which node, the text
        self.log = open(output_dir / f"{self.name}.log", "w", buffering=1)
        self.jobs: dict[int, Popen] = {}
        self.options = (
            f"--image-size 32 -j 1 -p 1 --epochs 10000"
            f" --snapshot-minutes 0.05 --output-dir {output_dir}"
        )

    def start(self, number: int, master: int = 0) -> None:
        """Type the command of elastic_train.sh on a node; they meet on the node ``master``."""
        env = {"MASTER_ADDR": self.nodes[master].ip, "DATA": str(self.data), "NPROC": "1"}
        wrapper = f"bash scripts/elastic_train.sh 1 1:2 {self.name} {BATCH} -- {self.options}"
        wrapper += " --dist-timeout 30"  # nothing else notices a lost node
        self.type(number, wrapper, ENV | env | {"ARCH": "tiny_plain"})

    def start_over_ssh(self) -> None:
        """Type the command of train_on_nodes.sh on node 0, for all others."""
        hosts = self.data.parent / "hosts"
        hosts.write_text("".join(f"{node.name}\n" for node in self.nodes[1:]))
        for node in self.nodes[1:]:
            node.start_sshd(**ENV)
        launcher = f"bash scripts/train_on_nodes.sh {hosts} --dir {ROOT} --python {sys.executable}"
        script = f"imagenet_ddp.py -a tiny_plain -b {BATCH} --name {self.name} {self.options}"
        self.type(0, f"{launcher} --elastic 1:{len(self.nodes) - 1} -- {script} {self.data}", {})

    def type(self, number: int, command: str, env: dict[str, str]) -> None:
        """Type a command on a node."""
        how = {"stdin": DEVNULL, "stdout": PIPE, "stderr": STDOUT, "text": True}
        self.jobs[number] = self.nodes[number].popen(command, env, **how)
        self.log.write(f"started on node{number}: {command}\n")
        threading.Thread(target=self._read, args=(number, self.jobs[number]), daemon=True).start()

    def _read(self, number: int, process: Popen) -> None:
        for line in process.stdout:
            # The launcher over ssh puts the node's name in front.
            match = re.match(r"(?:\[(node\d+)\] )?(.*)", line)
            node, text = match[1] or f"node{number}", match[2]
            self.lines.append((time.monotonic(), node, text))
            self.log.write(f"{self.lines[-1][0]:.2f} {node}: {text}\n")
        process.wait()

    def worker(self, number: int) -> int:
        """Process id of the training process on a node."""
        processes = self.nodes[number].processes()
        torchrun = {one.pid for one in processes if "/torchrun.py " in one.command}
        (worker,) = [x for x in processes if x.parent in torchrun and " -u " in x.command]
        return worker.pid

    def wait_for_steps(self, nodes: int, since: float = 0.0) -> float:
        """Wait until training has been under way for a while, after ``since``, on so many nodes.

        Returns: when the first of these steps was done.
        """
        times: list[float] = []

        def steady() -> bool:
            times.clear()
            now = 0  # nodes, as rank 0 has printed at the last start
            for moment, _, text in list(self.lines):
                if match := START.match(text):
                    now = int(match[1])
                    times.clear()
                elif STEP.match(text) and moment > since:
                    times.append(moment)
            return now == nodes and bool(times) and times[-1] - times[0] > STEADY

        assert eventually(steady, LIMIT), f"no steps on {nodes} nodes; see {self.log.name}"
        return times[0]

    def row(self, event: str, what: str, nodes: int, began: float, since: float = 0.0) -> None:
        """Wait until training continues after ``since``; the event was at ``began``."""
        seconds = self.wait_for_steps(nodes, since or began) - began
        starts = sum(moment > began and bool(START.match(text)) for moment, _, text in self.lines)
        assert starts or since, f"nothing was started again; see {self.log.name}"
        print(f"| {event} | {what} | {nodes} | {seconds:.1f} | {starts} |", flush=True)


def worker_killed(trial: Trial) -> None:
    os.kill(trial.worker(1), signal.SIGKILL)
    trial.row("worker killed (-9)", "both nodes start it again", 2, time.monotonic())


def node_killed(trial: Trial) -> None:
    trial.nodes[1].kill()
    trial.row("node killed", "the other continues alone", 1, time.monotonic())
    trial.nodes[1].start_again()
    now = time.monotonic()
    trial.start(1)
    trial.row("... and started again", "it joins; time from typing its command again", 2, now)


def node_back_soon(trial: Trial) -> None:
    now = time.monotonic()
    trial.nodes[1].kill()
    time.sleep(AWAY)
    trial.nodes[1].start_again()
    trial.start(1)
    what = f"node killed, started again after {AWAY} s"
    trial.row(what, "both nodes start it again", 2, now)


def link_down(trial: Trial) -> None:
    now = time.monotonic()
    trial.nodes[1].link(False)
    time.sleep(LINK_DOWN)
    trial.nodes[1].link(True)
    trial.row(f"link down {LINK_DOWN} s", "both continue", 2, now, time.monotonic())


def master_killed(trial: Trial) -> None:
    now = time.monotonic()
    trial.nodes[0].kill()
    told = re.compile("error: .*(lost touch|no sign of life)")
    assert eventually(lambda: any(told.search(text) for *_, text in list(trial.lines)), LIMIT)
    noticed = time.monotonic()
    # torchrun itself waits for its rendezvous for many minutes.
    trial.nodes[1].run(f"bash scripts/cleanup.sh --name {trial.name} --grace 5")
    trial.jobs[1].wait()
    ended = time.monotonic()
    trial.start(1, master=1)
    what = (
        f"the other reports it after {noticed - now:.1f} s; cleanup.sh --name, then the same "
        "command with its own MASTER_ADDR (time from typing it)"
    )
    trial.row("master node killed", what, 1, ended)


def rank0_killed(trial: Trial) -> None:
    for left in range(KILLS, 0, -1):
        name = next(node for _, node, text in reversed(trial.lines) if STEP.match(text))
        next(node for node in trial.nodes if node.name == name).kill()
        now, what = time.monotonic(), "over ssh, the other nodes continue"
        trial.row(f"{name} killed, which had rank 0", what, left, now)
    for node in trial.nodes[1 : KILLS + 1]:
        node.start_again()
        node.start_sshd(**ENV)
    now, what = time.monotonic(), "all nodes switched on again"
    trial.row(what, "over ssh, they join", KILLS + 1, now)


def ssh_worker_killed(trial: Trial) -> None:
    os.kill(trial.worker(2), signal.SIGKILL)
    trial.row("worker killed (-9)", "over ssh, both nodes start it again", 2, time.monotonic())


def ssh_link_down(trial: Trial) -> None:
    now = time.monotonic()
    trial.nodes[2].link(False)
    time.sleep(LINK_DOWN)
    trial.nodes[2].link(True)
    what = "over ssh, both continue"
    trial.row(f"link down {LINK_DOWN} s", what, 2, now, time.monotonic())


def ssh_node_frozen(trial: Trial) -> None:
    frozen = [one.pid for one in trial.nodes[2].processes()]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    what = "over ssh, its guard is silent: torchrun is started there again"
    trial.row("processes frozen (SIGSTOP)", what, 2, time.monotonic())


def ssh_launcher_killed(trial: Trial) -> None:
    now = time.monotonic()
    (launcher,) = [one.pid for one in trial.nodes[0].processes() if "launcher.py" in one.command]
    os.kill(launcher, signal.SIGKILL)
    assert eventually(lambda: not any(node.processes() for node in trial.nodes[1:]), LIMIT)
    seconds = time.monotonic() - now
    print(f"| launcher killed (-9) | nothing is left on the nodes | 0 | {seconds:.1f} | 0 |")


ALL = (worker_killed, node_killed, node_back_soon, link_down, master_killed, rank0_killed)
ALL += (ssh_worker_killed, ssh_link_down, ssh_node_frozen, ssh_launcher_killed)
FAULTS = {fault.__name__: fault for fault in ALL}


def try_fault(name: str, output_dir: Path) -> None:
    """Train on several nodes, cause the fault, and print what comes of it."""
    over_ssh = name == "rank0_killed" or name.startswith("ssh_")
    count = KILLS + 1 if name == "rank0_killed" else 2
    with tempfile.TemporaryDirectory() as folder, Nodes(count + over_ssh) as nodes:
        data = draw_folder(Path(folder) / "data", train=IMAGES // 3)
        trial = Trial(nodes, name, data, output_dir)
        if over_ssh:
            trial.start_over_ssh()
        else:
            trial.start(0)
            trial.start(1)
        trial.wait_for_steps(count)
        trial.log.write(f"fault: {name}\n")
        FAULTS[name](trial)


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--output-dir", type=Path, default=ROOT / "runs", metavar="DIR")
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    print("| fault | what happens | then nodes | s to the next step | restarts |")
    print("|---|---|---|---|---|", flush=True)
    for name in args.only:
        try_fault(name, args.output_dir.resolve())


if __name__ == "__main__":
    main()
