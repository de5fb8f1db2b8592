#!/usr/bin/env python3
"""Kill runs at random instants, resume them, and compare them with an undisturbed run.

    python tests/trials/kill_runs.py [--kills 100] [--seed 0] [--output-dir DIR]

Each of imagenet_nd.py and, with -g 2, imagenet_ddp.py, imagenet_ddp_apex.py and imagenet_fsdp.py
trains a tiny model of tests/stand_in on 300 drawn images: once undisturbed, then in runs that get a
signal at a random instant, mostly in training and sometimes during start-up, and are resumed with
--resume auto until the end. SIGKILL and SIGINT go to the process group, SIGTERM to the parent
alone, as from `kill`. Weights and momentum must be bit-identical to those of the undisturbed run;
each attempt must see the batches that follow its snapshot; TensorBoard curves must have the same
points, each once and in order. Exit code 1 if anything differs. CPU only; needs pytest.
"""

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]

from conftest import draw_folder, environment, summary  # noqa: E402
from running import (  # noqa: E402
    STAND_IN,
    assert_same_curves,
    assert_same_weights,
    wait_for_group,
)

from utils.launch import supervise  # noqa: E402

SCRIPTS = {
    "nd": "imagenet_nd.py -b 10",
    "ddp": "imagenet_ddp.py -g 2 -b 5",
    "apex": "imagenet_ddp_apex.py -g 2 -b 5",
    "fsdp": "imagenet_fsdp.py -g 2 -b 5",
}
IMAGES, EPOCHS = 300, 4
TRAINING = re.compile(r"^\d+ images in \d+ classes", re.MULTILINE)  # the line before the first step
IN_TRAINING = 0.8  # share of the signals that wait for that line
RECIPE = f"-a tiny_full --image-size 32 -j 1 -p 4 --epochs {EPOCHS} --lr 0.05 --crop-scale 0.5"
RECIPE += " --resume auto --snapshot-minutes 0.01"
RESUMED = re.compile(r"^resumed from .*: epoch (\d+), step (\d+)", re.MULTILINE)
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
LIMIT = 120  # seconds that an attempt may take


class Case:
    """The runs of one script in the folder ``root``, and how they differ from an undisturbed one.

    A run NAME has its directory NAME, its output in NAME.log, and what each attempt has seen in
    each rank in NAME_seen/RANK_TIME, one line per step.
    """

    def __init__(self, name: str, root: Path, data: Path):
        self.name, self.root, self.data = name, root, data
        self.ranks = 1 if name == "nd" else 2
        self.start_seconds = self.train_seconds = 0.0  # of the undisturbed run, until TRAINING
        self.signals: Counter = Counter()
        self.runs = self.steps_repeated = 0
        self.differences: list[str] = []

    # ---- how a run may differ

    def differs(self, run: str, how: str) -> None:
        """Note a difference."""
        self.differences.append(f"{run} {how}, see {self.root}/{run}.log")

    def attempts(self, run: str, rank: int) -> list[list[str]]:
        """What each attempt of a run has seen in one rank, one text per step."""
        files = (self.root / f"{run}_seen").glob(f"{rank}_*")
        files = sorted(files, key=lambda file: int(file.name.split("_")[1]))
        return [file.read_text().splitlines() for file in files]

    def compare(self, run: str, whole: str) -> None:
        """Note all differences between a run and the undisturbed one."""
        self.compare_images(run, whole)
        for what, same in (("weights", assert_same_weights), ("curves", assert_same_curves)):
            try:
                same(self.root / run, self.root / whole)
            except (AssertionError, OSError) as fault:
                self.differs(run, f"has other {what}: {fault}")

    def compare_images(self, run: str, whole: str) -> None:
        """Each attempt must begin at the position of its snapshot, and continue step by step."""
        resumed = RESUMED.findall((self.root / f"{run}.log").read_text())
        for rank in range(self.ranks):
            (order,) = self.attempts(whole, rank)
            per_epoch = len(order) // EPOCHS
            # After an epoch's last step, evaluated or not, the position is that of the next epoch.
            stands = {0} | {(int(epoch) - 1) * per_epoch + int(step) for epoch, step in resumed}
            reached, place = 0, {sums: number for number, sums in enumerate(order)}
            for number, seen in enumerate(self.attempts(run, rank)):
                first = place.get(seen[0], -1)
                if first < 0 or seen != order[first : first + len(seen)]:
                    self.differs(run, f"saw other images or order in attempt {number}")
                elif first not in stands or first > reached:
                    self.differs(run, f"began at another step in attempt {number}")
                self.steps_repeated += max(0, reached - first) if rank == 0 else 0
                reached = first + len(seen)
            if reached != len(order):
                self.differs(run, f"saw {reached} of {len(order)} steps in rank {rank}")

    def check_epochs(self, whole: str) -> None:
        """The undisturbed run must see each image once per epoch."""
        ranks = [self.attempts(whole, rank)[0] for rank in range(self.ranks)]
        per_epoch = len(ranks[0]) // EPOCHS
        for epoch in range(EPOCHS):
            steps = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
            sums = [one for seen in ranks for line in seen[steps] for one in line.split()]
            if not len(sums) == len(set(sums)) == IMAGES:
                self.differs(whole, f"saw {len(set(sums))} images in epoch {epoch + 1}")

    # ---- how it is run

    @contextlib.contextmanager
    def attempt(self, run: str, until_training: bool) -> Iterator[subprocess.Popen]:
        """Start or resume a run, in its own process group; its output goes to its log.

        One that does not end counts as a difference, and is killed.
        """
        seen, path = self.root / f"{run}_seen", self.root / f"{run}.log"
        seen.mkdir(parents=True, exist_ok=True)
        words = f"{SCRIPTS[self.name]} {RECIPE} --name {run} --output-dir {self.root} {self.data}"
        env = {"PYTHONPATH": STAND_IN, "STEP_SECONDS": "0.04", "SEEN_IMAGES": str(seen)}
        env[supervise.LAUNCHER] = str(os.getpid())  # it ends with this trial
        with open(path, "a") as log:
            before = len(TRAINING.findall(path.read_text()))
            process = subprocess.Popen(
                [sys.executable, *words.split()],
                cwd=ROOT,
                env=environment(**env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while until_training and process.poll() is None:
            if len(TRAINING.findall(path.read_text())) > before:
                break
            time.sleep(0.01)
        yield process
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.differs(run, "hung")
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def finish(self, run: str) -> None:
        """Train to the end undisturbed."""
        began = time.monotonic()
        with self.attempt(run, until_training=True) as process:
            start = time.monotonic() - began
        if not self.train_seconds:
            self.start_seconds, self.train_seconds = start, time.monotonic() - began - start
        if process.returncode:
            self.differs(run, f"ended with code {process.returncode}")

    def disturb(self, run: str, source: random.Random, kills: int) -> int:
        """Kill a run until it ends by itself, at most ``kills`` times. Returns how often."""
        for done in range(kills):
            signum, in_training = source.choice(SIGNALS), source.random() < IN_TRAINING
            seconds = source.uniform(0, self.train_seconds if in_training else self.start_seconds)
            sent = False
            with self.attempt(run, in_training) as process:
                try:
                    process.wait(seconds)
                except subprocess.TimeoutExpired:
                    sent = True
                    with contextlib.suppress(ProcessLookupError):
                        send = os.kill if signum == signal.SIGTERM else os.killpg
                        send(process.pid, signum)
            if left := wait_for_group(process.pid):
                self.differs(run, f"has left processes: {left}")
            if process.returncode == 0:
                return done
            if not sent:
                self.differs(run, "failed by itself")
                return done
            self.signals[signum.name] += 1
            folder = self.root / run
            if (folder / "summary.json").is_file() and summary(folder)["epochs_done"] == EPOCHS:
                self.finish(run)  # the signal came after its last step
                return done + 1
        self.finish(run)
        return kills

    def kill(self, kills: int, seed: str) -> None:
        """Kill runs ``kills`` times in all, and compare each with the undisturbed one."""
        source = random.Random(seed)
        while kills > 0 and not self.differences:
            run = f"{self.name}_{self.runs}"
            kills -= self.disturb(run, source, kills)
            self.compare(run, f"{self.name}_whole")
            self.runs += 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="of all scripts together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="keep the runs there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill_runs") as temporary:
        root = (args.output_dir or Path(temporary, "runs")).resolve()
        data = draw_folder(Path(temporary, "data"), train=IMAGES // 3)
        cases = [Case(name, root / f"seed{args.seed}_{os.getpid()}", data) for name in SCRIPTS]
        for case in cases:
            case.finish(f"{case.name}_whole")
            if not case.differences:
                case.check_epochs(f"{case.name}_whole")
        with ThreadPoolExecutor(len(cases)) as pool:  # different scripts at the same time
            kills = [(args.kills + i) // len(cases) for i in range(len(cases))]
            list(pool.map(Case.kill, cases, kills, [f"{args.seed} {name}" for name in SCRIPTS]))
        return summarize(cases)


def summarize(cases: list[Case]) -> int:
    """Print a table, and what differs. Returns the exit code."""
    print("| script | kills | SIGKILL | SIGTERM | SIGINT | runs | steps repeated | differences |")
    print("|---|---|---|---|---|---|---|---|")
    for case in cases:
        signals = [case.signals[name] for name in ("SIGKILL", "SIGTERM", "SIGINT")]
        cells = [SCRIPTS[case.name], sum(signals), *signals, case.runs]
        cells += [case.steps_repeated, len(case.differences)]
        print("".join(f"| {cell} " for cell in cells) + "|")
    found = [text for case in cases for text in case.differences]
    for text in found:
        print(f"error: {text}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
