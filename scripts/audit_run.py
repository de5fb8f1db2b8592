#!/usr/bin/env python3
"""Prove that a run was trained on each image once per epoch, in the promised order.

    python imagenet_ddp.py --audit --name my_run DATA
    python scripts/audit_run.py runs/my_run

It reads RUN/audit.jsonl, which --audit writes: a few bytes per step, from the data loading workers
of all processes. The order of images is computed again from the seed. So the proof covers kills,
resumes, and other numbers of processes. It also counts how often the weights of all ranks were
compared. Exit code: 0 if every promise was kept, 1 if not, 2 for a file that is no such log.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils.run import audit
from utils.start.errors import exit_with
from utils.start.option_types import Formatter, Parser

MOST = 20  # problems that are printed


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=Formatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    args: argparse.Namespace = parser.parse_args()
    proof = audit.read(args.run / audit.FILE)
    for line in proof.epochs.values():
        print(line)
    done = _epochs_done(args.run / "summary.json")
    if done is not None and done > proof.position[0] + proof.complete:
        proof.problems.append(f"{done} epochs are finished, but the log ends earlier")
    for problem in proof.problems[:MOST]:
        print(f"problem: {problem}")
    if len(proof.problems) > MOST:
        print(f"... and {len(proof.problems) - MOST} more problems")
    then = ", then ".join(map(str, proof.processes))
    print(
        f"processes: {then}; {proof.repeated} of the logged steps were trained again after a "
        f"resume; the weights of all ranks were compared {proof.checks} times"
    )
    print("the order was not kept" if proof.problems else "every image was used as promised")
    return 1 if proof.problems else 0


def _epochs_done(summary: Path) -> int | None:
    """The finished epochs in a run's summary; None without one."""
    try:
        return int(json.loads(summary.read_text())["epochs_done"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


if __name__ == "__main__":
    exit_with(main)
