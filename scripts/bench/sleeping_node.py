#!/usr/bin/env python3
"""One node of `bench_network.py --sleep MODEL`. It exchanges gradients, and sleeps to simulate
compute.

So a few cores simulate several GPUs. DistributedDataParallel gets gradients of the model's shapes,
in the order and at the times at which a GPU would compute them. Rank 0 writes a JSON file with the
figures of each round, for each method and for "alone" (steps without an exchange).
"""

import json
import math
import os
import sys
import time
from argparse import Namespace
from contextlib import nullcontext
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch
import torch.distributed as dist
from forecast import buckets
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from utils import addons
from utils.extras.dummy import sent_bytes
from utils.world import World

FORWARD = 1 / 3  # of a step's compute: one product per layer, where backward has two
ALONE = "alone"  # steps without an exchange
Gradients = list[tuple[float, tuple[int, ...]]]  # share of the compute done by then, shape


class Sleep:
    """Sleeps whose sum is exact: if one takes too long, the next ones take less."""

    def __init__(self) -> None:
        self.owed = 0.0

    def __call__(self, seconds: float) -> None:
        self.owed += seconds
        began = time.perf_counter()
        if self.owed > 0:
            time.sleep(self.owed)
            self.owed -= time.perf_counter() - began


class _Gradients(torch.autograd.Function):
    """Passes a number on; backward sleeps, then returns gradients for the layer's parameters."""

    @staticmethod
    def forward(ctx, number: Tensor, layer: "Layer", *parameters: Tensor) -> Tensor:
        ctx.layer, ctx.shapes = layer, [parameter.shape for parameter in parameters]
        return number.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.layer.sleep(ctx.layer.seconds)
        values = ctx.layer.values
        made = [values[: shape.numel()].view(shape) for shape in ctx.shapes]
        return gradient, None, *made


class Layer(nn.Module):
    """Parameters whose gradients arrive ``seconds`` after those of the layer behind it."""

    def __init__(self, shapes: list[tuple[int, ...]], seconds: float, sleep: Sleep, values: Tensor):
        super().__init__()
        self.own = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.seconds, self.sleep, self.values = seconds, sleep, values

    def forward(self, number: Tensor) -> Tensor:
        return _Gradients.apply(number, self, *self.own)


def sleeping(gradients: Gradients, values: Tensor, compute_s: float) -> nn.Module:
    """A model with parameters of these shapes, whose step sleeps ``compute_s`` seconds.

    Each gradient consists of the first of ``values``, a tensor of one dimension.
    """
    sleep, layers, before = Sleep(), [], FORWARD
    for ready, group in groupby(gradients, key=lambda one: one[0]):
        seconds = max(ready - before, 0) * compute_s
        layers.append(Layer([shape for _, shape in group], seconds, sleep, values))
        before = max(ready, before)
    model = nn.Sequential(*reversed(layers))
    model.register_forward_pre_hook(lambda *_: sleep(FORWARD * compute_s))
    return model


def shrunk(gradients: Gradients, times: float) -> Gradients:
    """Gradients with about 1 / ``times`` of the values. Matrices keep their proportions."""
    smaller = []
    for ready, shape in gradients:
        rows = math.ceil(shape[0] / math.sqrt(times))
        matrix = (rows, math.ceil(math.prod(shape) / times / rows))
        smaller.append((ready, matrix if len(shape) > 1 else (math.ceil(shape[0] / times),)))
    return smaller


def measure(order: dict[str, Any], world: World) -> dict[str, list[dict[str, float]]]:
    """The methods take turns, ``rounds`` times after one to warm up. Collective.

    Returns: the figures of each method and round, in the units of the real nodes.
    """
    shrink, slow_down = order["shrink"], order["slow_down"]
    gradients = shrunk(buckets.gradients(order["arch"], order["classes"]), shrink)
    values = torch.randn(max(math.prod(shape) for _, shape in gradients)) * 1e-3
    caps = {"bucket_cap_mb_list": [x / shrink / 2**20 for x in buckets.LIMITS]}
    trainings = {}
    for name in (ALONE, *order["methods"]):
        model = sleeping(gradients, values, order["compute_s"] * slow_down)
        replica = DistributedDataParallel(
            model, init_sync=False, gradient_as_bucket_view=True, **(caps if shrink > 1 else {})
        )
        how = Namespace(comm="fp32" if name == ALONE else name, seed=0)
        exchange = addons.exchange(replica, how, world, None)
        if exchange is not None:
            exchange.start_at(1, 0, 1, 2)  # PowerSGD compresses from the first step on
        trainings[name] = replica
    results: dict[str, list[dict[str, float]]] = {name: [] for name in trainings}
    for turn in range(order["rounds"] + 1):
        for name, replica in trainings.items():
            seconds, size = step(replica, name == ALONE, world)
            figures = {"ms_per_step": 1000 * seconds / slow_down}
            figures["network_mb_per_step"] = size * shrink / 1e6
            figures["images_per_s"] = order["batch"] * world.size * slow_down / seconds
            results[name] += [figures] if turn else []
    return results


def step(replica: DistributedDataParallel, is_alone: bool, world: World) -> tuple[float, float]:
    """Seconds of a step, and the bytes that a node sends in it; means over the nodes."""
    dist.barrier(group=world.control)
    before, began = sent_bytes(), time.perf_counter()
    with replica.no_sync() if is_alone else nullcontext():
        replica(torch.zeros((), requires_grad=True)).backward()
    replica.zero_grad()
    seconds = time.perf_counter() - began
    dist.barrier(group=world.control)  # everything sent has arrived
    means = torch.tensor([seconds, sent_bytes() - before], dtype=torch.float64) / world.size
    dist.all_reduce(means, group=world.control)
    return means[0].item(), means[1].item()


def main() -> None:
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    rank, nodes, timeout = order["rank"], order["nodes"], timedelta(minutes=10)
    place = {"rank": rank, "world_size": nodes, "timeout": timeout}
    dist.init_process_group("gloo", order["meet"], **place)
    control = dist.new_group(backend="gloo", timeout=timeout)
    results = measure(order, World(torch.device("cpu"), rank, nodes, 0, 1, nodes, control))
    if rank == 0:
        Path(order["out"]).write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
