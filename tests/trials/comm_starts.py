#!/usr/bin/env python3
"""Start each way to exchange gradients many times, at random moments, and see that none hangs.

    python tests/trials/comm_starts.py --starts 200

Each start joins 2 to 4 processes, which begin at different moments and compute at different speeds,
trains a network of many buckets for some steps, and compares the weights of all processes. A start
that takes longer than a minute counts as a hang.
"""

import argparse
import functools
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from joined import in_processes  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from utils.comm.auto import MOST_STEPS  # noqa: E402
from utils.comm.exchange import Exchange  # noqa: E402
from utils.launch.world import World  # noqa: E402

METHODS = "fp16,bf16,int8,int4,powersgd:2,auto"
LIMIT = 60.0  # seconds
SIZE = 24


class Sleepy(nn.Module):
    """A layer whose backward takes a random while."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE * SIZE, SIZE * SIZE)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = torch.relu(self.layer(images.flatten(1)))
        images.register_hook(lambda _: time.sleep(random.random() * 0.01))
        return images


def train(method: str, seed: int, rank: int, size: int) -> float:
    """Train in one of several joined processes. Returns the sum of all weights."""
    random.seed(seed * 10 + rank)
    time.sleep(random.random() * 0.2)
    nodes = size if method == "auto" or size % 2 else random.Random(seed).choice((2, size))
    local = size // nodes
    world = World(torch.device("cpu"), rank, size, rank % local, local, nodes, dist.group.WORLD)
    torch.manual_seed(0)
    head = nn.Conv2d(3, 1, 1)
    replica = DistributedDataParallel(
        nn.Sequential(head, *(Sleepy() for _ in range(3))), bucket_cap_mb=0.5
    )
    replica.broadcast_buffers = False
    optimizer = torch.optim.SGD(replica.parameters(), 0.01, momentum=0.9)
    args = SimpleNamespace(comm=method, seed=seed, image_size=SIZE, evaluate=False)
    exchange = Exchange(replica, optimizer, args, world)
    steps = MOST_STEPS + 3 if method == "auto" else 14
    for step in range(steps):
        exchange.begin_step(0, step, steps, 1)
        replica(torch.randn(2, 3, SIZE, SIZE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(float(p.detach().double().sum()) for p in replica.parameters())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default=METHODS, metavar="LIST", help="(%(default)s)")
    parser.add_argument("--starts", type=int, default=200, metavar="N", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    args = parser.parse_args()
    for method in args.methods.split(","):
        began = time.monotonic()
        for number in range(args.starts):
            size, work = 2 + number % 3, functools.partial(train, method, args.seed + number)
            try:
                sums = in_processes(size, work, limit=LIMIT)
                assert len(set(sums)) == 1, f"unequal weights {sums}"
            except AssertionError as fault:
                print(f"{method}: start {number} with {size} processes: {fault}")
                return 1
        seconds = time.monotonic() - began
        text = f"{method}: {args.starts} starts, none hung, equal weights; {seconds:.0f} s"
        print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
