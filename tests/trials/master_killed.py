#!/usr/bin/env python3
"""Kills node 0 of a training by scripts/train_on_nodes.sh --elastic, again and again.

    sudo python tests/trials/master_killed.py [--kills 3]

The nodes are namespaces of this machine (tests/nodes.py; needs root, iproute2, openssh-server and
pytest): one to type on and one more than there are kills, with one process each. Each time the node
that has rank 0 is switched off, without a word to the others. In the end all are switched on
again. The model costs next to nothing and sleeps 0.1 s per step, so that the times are those of
detection and start-up. Prints a Markdown table; the log is kept in --output-dir.
"""

import argparse
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from utils.errors import UserError, report  # noqa: E402

LIMIT = 300  # seconds after which the trial is given up
STEADY = 10  # seconds for which training has to continue
STEP = re.compile(r"\[(\w+)\] Epoch \d+/\d+ step ")
SSHD = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "STEP_SECONDS": "0.1"}
SSHD |= {"PYTHONPATH": str(ROOT / "tests" / "stand_in")}


class Trial:
    """A training that goes on, and when rank 0 has printed a step (name of its node, time)."""

    def __init__(self, nodes: list, args: argparse.Namespace, folder: Path):
        self.nodes, self.began = nodes, time.monotonic()
        self.steps: list[tuple[str, float]] = []
        self.log = open(args.output_dir / f"{args.name}.log", "w")
        hosts = folder / "hosts"
        hosts.write_text("".join(f"{node.name}\n" for node in nodes[1:]))
        command = (
            f"bash scripts/train_on_nodes.sh {hosts} --dir {ROOT} --elastic 1:{len(nodes) - 1} -- "
            f"imagenet_ddp.py -a tiny_plain --image-size 32 -b 5 -j 1 -p 1 --epochs 10000 "
            f"--snapshot-minutes 0.05 --name {args.name} --output-dir {args.output_dir} "
            f"{folder / 'data'}"
        )
        how = {"stdin": DEVNULL, "stdout": PIPE, "stderr": STDOUT, "text": True}
        self.typed = nodes[0].popen(command, **how)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for text in self.typed.stdout:
            now = time.monotonic()
            if match := STEP.match(text):
                self.steps.append((match[1], now))
            self.log.write(f"{now - self.began:7.2f} {text}")
            self.log.flush()

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until ``condition`` holds. Raises: `UserError` if that takes too long."""
        end = time.monotonic() + LIMIT
        while not condition():
            if time.monotonic() > end or self.typed.poll() is not None:
                raise UserError(f"no {what} within {LIMIT} s: see {self.log.name}")
            time.sleep(0.1)

    def goes_on(self, since: float) -> float | None:
        """When the first step after ``since`` was, once training is steady; None until then."""
        times = [at for _, at in list(self.steps) if at > since]
        return times[0] if times and times[-1] - times[0] > STEADY else None

    def kill_master(self) -> tuple[str, float]:
        """Switch off the node of rank 0. Returns: its name, and seconds to the next step."""
        name = self.steps[-1][0]
        victim = next(node for node in self.nodes if node.name == name)
        now = time.monotonic()
        victim.kill()
        # A step that was under way may still be printed.
        self.wait(lambda: self.steps[-1][0] != name and self.goes_on(now), f"step after {name}")
        return name, next(at for by, at in self.steps if at > now and by != name) - now


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=3, metavar="N", help="(%(default)s)")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "runs", metavar="DIR")
    args = parser.parse_args()
    args.name = f"master_killed_{os.getpid()}"
    args.output_dir = args.output_dir.resolve()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    try:
        if os.geteuid() != 0:
            raise UserError("network namespaces need root: sudo python tests/trials/...")
        with tempfile.TemporaryDirectory(prefix="master") as folder:
            try_it(args, Path(folder))
    except UserError as error:
        return report(error)
    return 0


def try_it(args: argparse.Namespace, folder: Path) -> None:
    """Start, kill, kill, kill, and let all come back."""
    from conftest import draw_folder
    from nodes import Nodes

    draw_folder(folder / "data", train=200)
    with Nodes(args.kills + 2) as nodes:
        for node in nodes[1:]:
            node.start_sshd(**SSHD)
        trial = Trial(nodes, args, folder)
        trial.wait(lambda: trial.goes_on(0) is not None, "first step")
        print("| what | s to the next step |\n|---|---|", flush=True)
        for number in range(args.kills):
            name, seconds = trial.kill_master()
            left = args.kills - number
            print(f"| {name}, rank 0, killed; {left} left | {seconds:.1f} |", flush=True)
        for node in nodes[1 : args.kills + 1]:
            node.start_again()
            node.start_sshd(**SSHD)
        now = time.monotonic()
        # Rank 0 is on the first node of the list again.
        trial.wait(lambda: trial.steps[-1][0] == nodes[1].name and trial.goes_on(now), "all nodes")
        back = next(at for by, at in trial.steps if at > now and by == nodes[1].name) - now
        print(f"| all switched on again | {back:.1f} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
