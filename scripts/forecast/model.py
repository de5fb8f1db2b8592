"""Forecast the time of a data-parallel training step on more GPUs and nodes.

    step    = compute x (1 + jitter x (sqrt(GPUs) - 1)) + exposed communication
    exposed = communication that does not overlap with compute

DistributedDataParallel collects gradients in buckets and reduces them one after the other, each as
soon as it is full and the previous one is done, while backward continues. So a step ends with
backward or with the last all-reduce, whichever is later. Compression delays both.

The jitter is fitted; all other constants come from data sheets or are estimates. RESULTS.md
compares forecasts with published runs and with our own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from utils.extras import compress
from utils.extras.compress import Method
from utils.report import ring_bytes

# How often a method's arithmetic reads or writes 4 bytes of memory per value. We counted instead of
# measuring: bytes that utils/extras/compress.py moves per value on a GPU, if each operation is a
# kernel. 16 bits: encode 4 + 2, decode 2 + 4. 8 bits: copy into blocks 8, find the largest 4, round
# 16, narrow 5, add the parts of all nodes 9, round again 8 (with 4 nodes), widen 5, copy out of
# blocks 8. 4 bits: the same, and packing and unpacking. PowerSGD: add the error 12, two products 8,
# multiply the factors 4, copy 8, compute the new error 32.
PASSES = {"fp32": 0, "fp16": 3, "bf16": 3, "int8": 16, "int4": 18, "powersgd": 16}


class Bucket(NamedTuple):
    """Gradients that are reduced together. ``shapes``: their shapes. ``ready``: the fraction of the
    step's compute (0 to 1) after which the last of them is available."""

    ready: float
    shapes: tuple[tuple[int, ...], ...]

    @property
    def values(self) -> int:
        return sum(map(math.prod, self.shapes))


@dataclass(frozen=True)
class Workload:
    """The step of one GPU: ``batch`` images at ``images_per_s`` when it is alone, and gradients in
    ``buckets`` (in the order in which they become ready), exchanged by the method ``how``."""

    batch: int
    images_per_s: float
    buckets: tuple[Bucket, ...]
    how: Method = compress.METHODS["fp32"]

    @property
    def compute_s(self) -> float:
        """Seconds per step of a GPU that waits for no other."""
        return self.batch / self.images_per_s

    @property
    def wire_bytes(self) -> list[float]:
        """Bytes of each bucket that enter the collectives, after compression."""
        return [compress.wire_bytes(bucket.shapes, self.how) for bucket in self.buckets]


@dataclass(frozen=True)
class Cluster:
    """Nodes and their links. Bandwidths in Gbit/s in one direction, latencies in seconds."""

    gpus_per_node: int = 1
    network_gbit: float = 10.0  # rate of a node's link
    protocol: float = 0.85  # fraction of that rate which all-reduce reaches: TCP, headers, pauses
    local_gbit: float = 80.0  # between the GPUs of a node: PCIe 3 x16; NVLink has 400 or more
    latency_s: float = 25e-6  # per hop between nodes: TCP sockets; InfiniBand has a fifth
    local_latency_s: float = 5e-6
    # Fitted to one published run, on 8 GPUs of the HAL cluster. The jitter depends on the machines:
    # a shared cluster with a shared disk has 0.06, a quiet one with local data 0.01.
    jitter: float = 0.06
    memory_gbyte_s: float = 300.0  # limits the arithmetic of compression; T4's data sheet: 320

    def exchange_s(self, size: float, gpus: int, collectives: int = 1) -> float:
        """Seconds to sum ``size`` bytes over ``gpus`` GPUs in consecutive all-reduces.

        The slowest link of a ring decides. The latency is the lower one of a ring and a tree.
        """
        if gpus == 1 or not size:
            return 0.0
        nodes, rate = math.ceil(gpus / self.gpus_per_node), self.local_gbit
        if nodes > 1:
            rate = min(rate, self.network_gbit * self.protocol)
        local = 2 * (min(gpus, self.gpus_per_node) - 1) * self.local_latency_s
        ring = 2 * (nodes - 1) * self.latency_s + nodes * local
        tree = 2 * math.ceil(math.log2(nodes)) * self.latency_s + local
        return ring_bytes(size, gpus) / (rate * 1e9 / 8) + collectives * min(ring, tree)


class Forecast(NamedTuple):
    """A step on ``gpus`` GPUs of ``nodes`` nodes, in seconds.

    Every step waits for the slowest GPU: ``straggler_s`` is how much longer it takes than a typical
    one. ``exchange_s`` is the whole communication; ``exposed_s`` is the part that compute does not
    hide, including the arithmetic of compression. ``images_per_s``: of all GPUs together.
    ``efficiency``: relative to the same number of independent GPUs.
    """

    nodes: int
    gpus: int
    compute_s: float
    straggler_s: float
    exchange_s: float
    exposed_s: float
    step_s: float
    images_per_s: float
    efficiency: float


def forecast(work: Workload, cluster: Cluster, gpus: int) -> Forecast:
    """The step of ``work`` on ``gpus`` GPUs, which fill node after node."""
    # PowerSGD sends the first factors and the tensors of one dimension, then the second factors.
    collectives, compute = 2 if work.how.rank else 1, work.compute_s
    times = [cluster.exchange_s(size, gpus, collectives) for size in work.wire_bytes]
    exposed = 0.0 if gpus == 1 else _exposed_s(work, times, 1e9 * cluster.memory_gbyte_s)
    straggler = compute * (cluster.jitter * (math.sqrt(gpus) - 1))
    step, nodes = compute + straggler + exposed, math.ceil(gpus / cluster.gpus_per_node)
    parts = (compute, straggler, sum(times), exposed)
    return Forecast(nodes, gpus, *parts, step, gpus * work.batch / step, compute / step)


def _exposed_s(work: Workload, exchange_times: list[float], memory_bytes_per_s: float) -> float:
    """Return how much longer than its compute a step takes because of the exchange."""
    codec_s = PASSES[work.how.name.partition(":")[0]] * 4 / memory_bytes_per_s  # per value
    device = network = done = 0.0  # times until which each is busy; fraction of compute done
    decoding: list[tuple[float, float]] = []  # time when a bucket arrives, seconds to decode it
    end = Bucket(1.0, ())  # the end of backward
    for bucket, exchange_s in zip((*work.buckets, end), (*exchange_times, 0.0), strict=True):
        device += (bucket.ready - done) * work.compute_s
        done = bucket.ready
        while decoding and decoding[0][0] <= device:  # it has delayed backward
            device += decoding.pop(0)[1]
        half = codec_s * bucket.values / 2  # seconds to encode; decoding takes as long
        device += half
        arrival = max(network, device) + exchange_s
        network = arrival + half  # the next exchange begins when this one is decoded
        decoding.append((arrival, half))
    return max(device, network) - work.compute_s


def choice(work: Workload, cluster: Cluster, gpus: int) -> tuple[Forecast, str]:
    """The forecast with the most exact of the fast methods, and the method's name."""
    forecasts = {
        name: forecast(replace(work, how=compress.parse(name)), cluster, gpus)
        for name in compress.CANDIDATES
    }
    name = compress.most_exact({name: one.step_s for name, one in forecasts.items()})
    return forecasts[name], name


def fit_compute(work: Workload, cluster: Cluster, gpus: int, step_s: float) -> Workload:
    """Return ``work`` with the GPU speed at which a step on ``gpus`` GPUs takes ``step_s``."""

    def trial(compute_s: float) -> Workload:
        return replace(work, images_per_s=work.batch / compute_s)

    # If communication alone explains the step, the result is the smallest compute time.
    low, high = 1e-6 * step_s, step_s
    return trial(_solve(lambda x: forecast(trial(x), cluster, gpus).step_s, step_s, low, high))


def fit_network(work: Workload, cluster: Cluster, gpus: int, step_s: float) -> Cluster:
    """Return ``cluster`` with the ``protocol`` (1/1000 to 1 of the link's rate) at which a step on
    ``gpus`` GPUs takes ``step_s``."""

    def trial(cost: float) -> Cluster:
        return replace(cluster, protocol=1 / cost)

    return trial(_solve(lambda x: forecast(work, trial(x), gpus).step_s, step_s, 1.0, 1000.0))


def _solve(rising: Callable[[float], float], value: float, low: float, high: float) -> float:
    """Find x, from ``low`` to ``high``, where ``rising`` is ``value``; else the nearer end."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return (low + high) / 2
