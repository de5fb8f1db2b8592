#!/usr/bin/env python3
"""One node of `bench_network.py`: exchanges gradients, and says how long steps took.

    python scripts/bench/network_node.py '{"rank": 0, "nodes": 2, "master": "10.77.0.1", ...}'

Rank 0 prints a line of JSON: for each method, of each round, seconds and bytes sent per step (mean
over the nodes), and which method auto has chosen; under "compute" the same of steps without any
exchange.
"""

import json
import math
import os
import sys
import time
from argparse import Namespace
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from bench import sleeping  # noqa: E402
from forecast import buckets  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from utils.comm import exchange  # noqa: E402
from utils.launch.world import World  # noqa: E402

SEED, IMAGE = 0, 1
TIMEOUT = timedelta(minutes=10)


def main() -> None:
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    if order["interface"]:
        os.environ["GLOO_SOCKET_IFNAME"] = order["interface"]
    meet = f"tcp://{order['master']}:{order['port']}"
    rank, nodes = order["rank"], order["nodes"]
    dist.init_process_group("gloo", meet, rank=rank, world_size=nodes, timeout=TIMEOUT)
    control = dist.new_group(backend="gloo", timeout=TIMEOUT)
    world = World(torch.device("cpu"), rank, nodes, 0, 1, nodes, control)
    found = measure(order, world)
    if world.is_main:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def measure(order: dict[str, Any], world: World) -> dict[str, Any]:
    """Take turns between the methods, ``rounds`` times. Collective."""
    layers = buckets.shrink(buckets.layers(order["arch"], order["classes"]), order["shrink"])
    compute = order["compute_s"] * order["slow_down"]
    sizes = [math.prod(shape) for _, *shape in layers]
    weights, pool = torch.zeros(sum(sizes)), torch.randn(max(sizes)).mul_(1e-3)
    trainings = {}
    for name in (*order["methods"], "compute"):
        model = sleeping.Sleeping(layers, compute, weights, pool)
        how = "fp32" if name == "compute" else name
        trainings[name] = Training(how, sleeping.replica(model, order["shrink"]), world)
    trainings["compute"].alone = True
    found: dict[str, Any] = {name: {"rounds": []} for name in trainings}
    if "auto" in trainings:
        while trainings["auto"].exchange.method is None:
            trainings["auto"].steps(1)
    for name in order["methods"]:
        found[name]["method"] = trainings[name].exchange.method
    for turn in range(order["rounds"] + 1):
        for name, training in trainings.items():
            seconds, size = training.steps(order["steps"] if turn else 1)
            if turn:  # the first is a warm-up
                found[name]["rounds"].append({"step_s": seconds, "bytes": size})
    if "auto" in trainings:
        found["auto"]["why"] = trainings["auto"].why
    return found


class Training:
    """Steps with one method, or ``alone`` without an exchange."""

    alone = False
    why: str | None = None  # auto has chosen its method

    def __init__(self, name: str, replica: DistributedDataParallel, world: World):
        self.replica, self.world, self.number = replica, world, 0
        self.optimizer = torch.optim.SGD(replica.parameters(), lr=0.0)
        args = Namespace(comm=name, seed=SEED, image_size=IMAGE, evaluate=False)
        self.exchange = exchange.Exchange(replica, self.optimizer, args, world)

    def steps(self, count: int) -> tuple[float, float]:
        """Do ``count`` steps. Returns seconds per step, and the bytes that a node sends in it."""
        images = torch.zeros(1, 3, IMAGE, IMAGE)
        dist.barrier(group=self.world.control)
        before, began = sent_bytes(), time.perf_counter()
        for _ in range(count):
            # In the second of two epochs: methods that begin late are at work.
            self.why = self.exchange.begin_step(1, self.number, 2**30, 2) or self.why
            self.number += 1
            with self.replica.no_sync() if self.alone else nullcontext():
                self.replica(images).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        seconds = (time.perf_counter() - began) / count
        dist.barrier(group=self.world.control)  # what was sent has arrived
        size = (sent_bytes() - before) / count
        means = torch.tensor([seconds, size], dtype=torch.float64) / self.world.size
        dist.all_reduce(means, group=self.world.control)
        return means[0].item(), means[1].item()


def sent_bytes() -> int:
    """Bytes that left this network since it exists, by all its interfaces, headers included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines)


if __name__ == "__main__":
    main()
