"""The network between the nodes: all-reduces, and the time that gradients take."""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from checks.findings import OK, WARNING, Finding

from utils.model import compress, models
from utils.start.world import World

BUCKET = 25 * 2**20  # bytes of gradients that DDP exchanges at once
SECONDS = 0.5  # for measuring the all-reduce
SLOW_LINK = 0.65  # fraction of the usual speed
BACKWARD = 2 / 3  # fraction of a step in which gradients can be exchanged


def check_network(
    args: argparse.Namespace, names: list[str], needs: list[float | None], world: World
) -> Iterator[Finding]:
    """Measure all-reduces, and compare them with the time of a step. Collective.

    ``needs``: the images/s that a GPU of each node trains; None if unknown.
    """

    def seconds(
        operation: Callable[[], object],
        times: int,
        choose: Callable[[list[float]], float] = statistics.median,
    ) -> list[float]:
        """Return the median (or else the chosen) time of ``times`` operations on each node."""
        durations = []
        for _ in range(times):
            began = time.perf_counter()
            operation()
            durations.append(time.perf_counter() - began)
        return world.gather(choose(durations))

    small, large, hops = torch.zeros(1), torch.zeros(BUCKET // 4), 2 * (args.nodes - 1)
    seconds(lambda: dist.all_reduce(small), 2)
    latency = max(seconds(lambda: dist.all_reduce(small), 30)) / hops
    once = max(seconds(lambda: dist.all_reduce(large), 1))
    times = max(1, min(8, int(SECONDS / once)))
    exchange_s = max(seconds(lambda: dist.all_reduce(large), times))
    gbit = 8e-9 * hops / args.nodes * BUCKET / exchange_s
    yield Finding(OK, f"network: all-reduce reaches {gbit:.3g} Gbit/s, {1000 * latency:.2g} ms")
    speeds: dict[str, float] = {}
    for sender in range(args.nodes):
        receiver = (sender + 1) % args.nodes
        parts = {sender: (dist.send, large, receiver), receiver: (dist.recv, large, sender)}
        part = functools.partial(*parts.get(args.rank, (int,)))  # int(): nothing
        way = f"{names[sender]} sends to {names[receiver]}"
        # The fastest of several: other programs slow down some transfers, a slow link all of them.
        speeds[way] = 8e-9 * BUCKET / seconds(part, max(3, times), min)[receiver]
    usual = statistics.median_high(speeds.values())
    for way, speed in speeds.items():
        if speed < SLOW_LINK * usual:
            text = f"network: {way} at {speed:.3g} Gbit/s, others reach {usual:.3g}"
            yield Finding(
                WARNING, text, "all nodes wait for the slowest; check the network of these two"
            )
    known = [need for need in needs if need is not None]
    if len(known) < len(needs):
        return
    with torch.device("meta"):
        model = models.create(args.arch, 1000, args.image_size)
    size = compress.ring_bytes(4 * sum(one.numel() for one in model.parameters()), args.nodes)
    exchange_s, step_s = 8e-9 * size / gbit, args.batch_size / min(known)
    text = f"{args.arch}: each node sends {size / 1e6:.0f} MB of gradients in a step, which takes "
    text += f"{1000 * exchange_s:.0f} ms; a GPU computes the step in {1000 * step_s:.0f} ms"
    if exchange_s <= BACKWARD * step_s:
        yield Finding(OK, text)
    else:
        yield Finding(
            WARNING, text, "nodes wait for gradients; use --comm fp16, a larger -b, --accum-steps"
        )
