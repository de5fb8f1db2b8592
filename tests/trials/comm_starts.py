#!/usr/bin/env python3
"""Start each way to exchange gradients many times, at random moments, and see that none hangs.

    python tests/trials/comm_starts.py --starts 200

Each start joins 2 to 4 processes, which begin at different moments and compute at different speeds,
trains a network of several buckets for some steps, and compares the weights of all processes. A
start that takes longer than a minute counts as a hang.
"""

import argparse
import functools
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from joined import in_processes

LIMIT = 60.0  # seconds


def train(method: str, seed: int, rank: int, size: int) -> float:
    """Train in one of several joined processes. Returns the sum of all weights."""
    from test_comm import Training, world_of

    source = random.Random(seed * 10 + rank)
    time.sleep(source.random() * 0.2)
    nodes = size if size % 2 else random.Random(seed).choice((2, size))
    training = Training(method, world_of(rank, size, size // nodes))
    for layer in list(training.replica.module)[1:]:
        layer.register_full_backward_hook(lambda *_: time.sleep(source.random() * 0.01))
    training.exchange.start_at(0, 0, 14)
    for step in range(14):
        training.step(step)
    return float(training.weights().double().sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--starts", type=int, default=200, metavar="N", help="(%(default)s)")
    starts = parser.parse_args().starts
    for method in ("fp16", "bf16", "int8", "int4"):
        for number in range(starts):
            size = 2 + number % 3
            sums = in_processes(size, functools.partial(train, method, number), limit=LIMIT)
            assert len(set(sums)) == 1, f"{method}, start {number}: unequal weights {sums}"
        print(f"{method}: {starts} starts, none hung, equal weights", flush=True)


if __name__ == "__main__":
    main()
