#!/usr/bin/env python3
"""One node of `bench_network.py --sleep MODEL`. It exchanges gradients, and sleeps instead of
computing.

So a few cores simulate several GPUs. DistributedDataParallel gets gradients of the model's shapes,
in the order and at the times at which a GPU would compute them. Rank 0 prints JSON: the figures of
each round, for each method and for "alone" (steps without an exchange).
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
from bench import gradients as arrival
from bench import rounds, steps
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from utils.model import compress
from utils.start.option_types import Options
from utils.start.world import World

FORWARD = 1 / 3  # fraction of a step's compute: one product per layer, while backward has two
ALONE = "alone"  # steps without an exchange
Shape = tuple[int, ...]


class SleepingModel(nn.Module):
    """A model whose step sleeps ``compute_s`` seconds.

    ``gradients``, in the order of their arrival: fraction of the compute done by then, and shape.
    """

    def __init__(self, gradients: list[tuple[float, Shape]], compute_s: float):
        super().__init__()
        self.compute_s, self.owed_s = compute_s, 0.0
        # Each gradient is a view of these values, so that none has to be computed.
        self.values = torch.randn(max(math.prod(shape) for _, shape in gradients)) * 1e-3
        self.layers, self.sleeps = nn.ModuleList(), []
        before = FORWARD
        for ready, group in groupby(gradients, key=lambda one: one[0]):
            self.layers.append(nn.ParameterList(torch.zeros(shape) for _, shape in group))
            self.sleeps.append(max(ready - before, 0) * compute_s)
            before = max(ready, before)

    def sleep(self, seconds: float) -> None:
        """Sleep. The sum is exact: if one sleep takes too long, the next ones take less."""
        self.owed_s += seconds
        began = time.perf_counter()
        if self.owed_s > 0:
            time.sleep(self.owed_s)
            self.owed_s -= time.perf_counter() - began

    def forward(self, number: Tensor) -> Tensor:
        self.sleep(FORWARD * self.compute_s)
        for layer, seconds in list(zip(self.layers, self.sleeps, strict=True))[::-1]:
            number = _Layer.apply(number, self, seconds, *layer.parameters())
        return number


class _Layer(torch.autograd.Function):
    """Passes a number on; backward sleeps, then returns gradients for the layer's parameters."""

    @staticmethod
    def forward(
        ctx: Any, number: Tensor, model: SleepingModel, seconds: float, *parameters: Tensor
    ) -> Tensor:
        ctx.model, ctx.seconds = model, seconds
        ctx.shapes = [parameter.shape for parameter in parameters]
        return number.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.model.sleep(ctx.seconds)
        values = ctx.model.values
        return gradients[0], None, None, *(values[: s.numel()].view(s) for s in ctx.shapes)


def shrink_shape(shape: Shape, times: float) -> Shape:
    """Return a shape with about 1 / ``times`` of the values. Matrices keep their proportions."""
    if len(shape) == 1:
        return (math.ceil(shape[0] / times),)
    rows = math.ceil(shape[0] / math.sqrt(times))
    return rows, math.ceil(math.prod(shape) / times / rows)


def main() -> None:
    order = Namespace(**json.loads(sys.argv[1]))
    rank, nodes = int(order.rank), order.nodes
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    place = {"rank": rank, "world_size": nodes, "timeout": timedelta(minutes=10)}
    dist.init_process_group("gloo", order.meet, **place)
    control = dist.new_group(backend="gloo", timeout=place["timeout"])
    world = World(torch.device("cpu"), rank, nodes, 0, 1, nodes, control)
    gradients = [
        (ready, shrink_shape(shape, order.shrink))
        for ready, shape in arrival.gradients(order.arch, order.classes)
    ]
    caps: dict[str, Any] = {}
    if order.shrink > 1:
        caps = {"bucket_cap_mb_list": [x / order.shrink / 2**20 for x in arrival.LIMITS]}

    def training(method: str) -> DistributedDataParallel:
        model = SleepingModel(gradients, order.compute_s * order.slow_down)
        replica = DistributedDataParallel(
            model, init_sync=False, gradient_as_bucket_view=True, **caps
        )
        how = Options(comm="fp32" if method == ALONE else method, seed=0)
        compress.exchange(replica, how, world)
        return replica

    trainings = {method: training(method) for method in (ALONE, *order.methods)}

    def figures_of(method: str) -> rounds.Figures:
        """Time a step, after one warm-up step. Returns: figures converted to real nodes."""
        replica = trainings[method]

        def step() -> None:
            with replica.no_sync() if method == ALONE else nullcontext():
                replica(torch.zeros((), requires_grad=True)).backward()
            replica.zero_grad()

        figures = steps.time_steps(step, world, 1, 1)
        ms = figures["ms_per_step"] / order.slow_down
        sent = figures["network_mb_per_step"] * order.shrink
        rate = 1000 * order.batch * nodes / ms
        return {"ms_per_step": ms, "network_mb_per_step": sent, "images_per_s": rate}

    results = rounds.measure(trainings, order.rounds, figures_of)
    if rank == 0:
        print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
