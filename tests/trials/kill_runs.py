#!/usr/bin/env python3
"""Kill runs at random instants, resume them, and compare them with an undisturbed run.

    python tests/trials/kill_runs.py [--kills 100] [--seed 0] [--output-dir DIR]

Each of imagenet_nd.py and, with -g 2, imagenet_ddp.py, imagenet_ddp_apex.py and imagenet_fsdp.py
trains a tiny model of tests/stand_in on 300 drawn images: once undisturbed, then in runs that get a
signal at a random instant, mostly in training and sometimes during start-up, and are resumed with
--resume auto until the end. SIGKILL and SIGINT go to the process group, SIGTERM to the parent
alone, as from `kill`. The undisturbed run reads a folder, the others read tar files of it. Weights
and momentum must be bit-identical to those of the undisturbed run; each attempt must see the
batches that follow its snapshot; TensorBoard curves must have the same points, each once and in
order. Exit code 1 if anything differs. CPU only; needs pytest.
"""

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from conftest import draw_folder, summary
from running import (
    Running,
    assert_same_curves,
    assert_same_weights,
    wait_for_group,
)

from utils.start import launch

SCRIPTS = {
    "nd": "imagenet_nd.py -b 10",
    "ddp": "imagenet_ddp.py -g 2 -b 5",
    "apex": "imagenet_ddp_apex.py -g 2 -b 5",
    "fsdp": "imagenet_fsdp.py -g 2 -b 5",
}
IMAGES, EPOCHS = 300, 4
TRAINING = r"^\d+ images in \d+ classes"  # the line before the first step
IN_TRAINING = 0.8  # share of the signals that wait for that line
RECIPE = f"-a tiny_full --image-size 32 -j 1 -p 4 --epochs {EPOCHS} --lr 0.05 --crop-scale 0.5"
RECIPE += " --resume auto --snapshot-minutes 0.01"
RESUMED = re.compile(r"^resumed from .*: epoch (\d+), step (\d+)", re.MULTILINE)
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
LIMIT = 120  # seconds that an attempt may take


class Case:
    """The runs of one script in the folder ``root``, and how they differ from an undisturbed one.

    A run NAME has its directory NAME, its output in NAME.log, and what each attempt has seen in
    each rank in NAME_seen/RANK_TIME, one line per step. The undisturbed one is "whole".
    """

    def __init__(self, name: str, root: Path, data: Path, tars: Path | None = None):
        self.name, self.root, self.data, self.tars = name, root, data, tars or data
        self.ranks = 1 if name == "nd" else 2
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

    def compare(self, run: str) -> None:
        """Note all differences between a run and the undisturbed one."""
        self.compare_images(run)
        for what, same in (("weights", assert_same_weights), ("curves", assert_same_curves)):
            try:
                same(self.root / run, self.root / "whole")
            except (AssertionError, OSError) as error:
                self.differs(run, f"has other {what}: {error}")

    def compare_images(self, run: str) -> None:
        """Each attempt must begin at the position of its snapshot, and continue step by step."""
        resumed = RESUMED.findall((self.root / f"{run}.log").read_text())
        for rank in range(self.ranks):
            (order,) = self.attempts("whole", rank)
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

    # ---- how it is run

    def attempt(
        self, run: str, seconds: float = LIMIT, signum: int = signal.SIGKILL, begun: bool = False
    ) -> int | None:
        """Start or resume a run; send it a signal after ``seconds``, if ``begun`` of training.

        Returns: its exit code; None if it got the signal. What it leaves behind is a difference.
        """
        seen = self.root / f"{run}_seen"
        seen.mkdir(parents=True, exist_ok=True)
        data = self.data if run == "whole" else self.tars
        words = f"{SCRIPTS[self.name]} {RECIPE} --name {run} --output-dir {self.root} {data}"
        env = {"STEP_SECONDS": "0.04", "SEEN_IMAGES": str(seen)}
        env[launch.LAUNCHER] = str(os.getpid())  # it ends with this trial
        with Running(*words.split(), **env) as started:
            if begun:
                with contextlib.suppress(AssertionError):  # it has ended before
                    started.until(TRAINING)
            try:
                code = started.process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
                started.send(signum, group=signum != signal.SIGTERM)
            if left := wait_for_group(started.pid, LIMIT):
                self.differs(run, f"has left processes: {left}")
                started.send(signal.SIGKILL, group=True)
            result = started.result()
        with open(self.root / f"{run}.log", "a") as log:
            log.write(result.out + result.err)
        return code

    def kill(self, kills: int, seed: str) -> None:
        """Send ``kills`` signals in all, and compare each run with the undisturbed one."""
        source, began = random.Random(seed), time.monotonic()
        if self.attempt("whole") != 0:
            self.differs("whole", "failed, or hung")
            return
        train_seconds = summary(self.root / "whole")["elapsed_seconds"]
        start_seconds = time.monotonic() - began - train_seconds
        while self.signals.total() < kills and not self.differences:
            run = f"run_{self.runs}"
            signum, begun = source.choice(SIGNALS), source.random() < IN_TRAINING
            seconds = source.uniform(0, train_seconds if begun else start_seconds)
            code = self.attempt(run, seconds, signum, begun)
            if code is None:
                self.signals[signum] += 1
                file = self.root / run / "summary.json"
                over = file.is_file() and summary(file.parent)["epochs_done"] == EPOCHS
                if not over and self.signals.total() < kills:
                    continue
                code = self.attempt(run)
            if code != 0:
                self.differs(run, "failed, or hung")
            self.compare(run)
            self.runs += 1


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--kills", type=int, default=100, help="of all scripts together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="keep the runs there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill_runs") as temporary:
        root = (args.output_dir or Path(temporary, "runs")).resolve() / f"{args.seed}_{os.getpid()}"
        data = draw_folder(Path(temporary, "data"), train=IMAGES // 3)
        tars = Path(temporary, "tars")
        tars.mkdir()
        for part in ("train", "val"):
            with tarfile.open(tars / f"{part}.tar", "w") as file:
                file.add(data / part, part)
        cases = [Case(name, root / name, data, tars) for name in SCRIPTS]
        with ThreadPoolExecutor(len(cases)) as pool:  # different scripts at the same time
            kills, seed = args.kills // len(cases), args.seed
            list(pool.map(lambda case: case.kill(kills, f"{seed} {case.name}"), cases))
    print("| script | kills | SIGKILL | SIGTERM | SIGINT | runs | steps repeated | differences |")
    print("|---|---|---|---|---|---|---|---|")
    for case in cases:
        cells = [SCRIPTS[case.name], case.signals.total()]
        cells += [case.signals[signum] for signum in SIGNALS[1:]]
        cells += [case.runs, case.steps_repeated, len(case.differences)]
        print("| " + " | ".join(map(str, cells)) + " |")
    differences = [text for case in cases for text in case.differences]
    for text in differences:
        print(f"error: {text}", file=sys.stderr)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
