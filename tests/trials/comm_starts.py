#!/usr/bin/env python3
"""Start each way to exchange gradients many times, at random moments, and see that none hangs.

    python tests/trials/comm_starts.py --starts 200

Each start joins 2 to 4 processes, which begin at different moments and compute at different speeds,
trains a network of many buckets for some steps, and compares the weights of all processes. A start
that takes longer than a minute counts as a hang.
"""

import argparse
import multiprocessing
import queue
import random
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
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


def train(rank: int, size: int, port: int, method: str, seed: int) -> float:
    """Join, train, leave. Returns the sum of all weights."""
    random.seed(seed * 10 + rank)
    time.sleep(random.random() * 0.2)
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size,
        timeout=timedelta(seconds=LIMIT),
    )  # fmt: skip
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
    total = sum(float(p.detach().double().sum()) for p in replica.parameters())
    dist.barrier()
    dist.destroy_process_group()
    return total


def work(rank: int, orders: multiprocessing.Queue, results: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    results.put((rank, "has begun"))
    while (order := orders.get()) is not None:
        results.put((rank, train(rank, *order)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default=METHODS, metavar="LIST", help="(%(default)s)")
    parser.add_argument("--starts", type=int, default=200, metavar="N", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    args = parser.parse_args()
    return next((code for method in args.methods.split(",") if (code := try_out(method, args))), 0)


def try_out(method: str, args: argparse.Namespace) -> int:
    """All starts of one method, by processes of its own: what DDP has made stays in memory."""
    context = multiprocessing.get_context("spawn")
    orders, results = [context.Queue() for _ in range(4)], context.Queue()
    for rank in range(4):
        context.Process(target=work, args=(rank, orders[rank], results), daemon=True).start()
    for _ in range(4):
        results.get()
    began = time.monotonic()
    for number in range(args.starts):
        size = 2 + number % 3
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(size):
            orders[rank].put((size, port, method, args.seed + number))
        try:
            sums = {results.get(timeout=LIMIT)[1] for _ in range(size)}
        except queue.Empty:
            print(f"{method}: start {number} with {size} processes hangs")
            return 1
        if len(sums) > 1:
            print(f"{method}: start {number} with {size} processes: unequal weights {sums}")
            return 1
    seconds = time.monotonic() - began
    print(f"{method}: {args.starts} starts, none hung, equal weights; {seconds:.0f} s", flush=True)
    for order in orders:
        order.put(None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
