"""What a step costs on more GPUs and nodes: a model of data-parallel training on paper.

    step    = compute x (1 + jitter x (sqrt(GPUs) - 1)) + exposed communication
    exposed = what the all-reduce takes longer than the part of backward that can hide it,
              and at least the all-reduce of the last bucket, which nothing is left to hide

The all-reduce is a ring over all GPUs, whose slowest link decides, or a tree where that has less
latency. Everything but the jitter, which is fitted, comes from data sheets or is an estimate;
RESULTS.md has the errors against published runs and our own. Imports nothing but the standard
library (`parameters` of unlisted models aside), so that it answers at once.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

BACKWARD = 2 / 3  # backward's share of compute: two matrix products per layer, forward has one
BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's; a bucket is reduced when it is full
BYTES = {"fp32": 4, "fp16": 2}  # per gradient on the wire

# Parameters without the last layer, and the number of its inputs. Other models: `parameters`.
_BODIES = {
    "alexnet": (57_003_840, 4096),
    "resnet18": (11_176_512, 512),
    "resnet34": (21_284_672, 512),
    "resnet50": (23_508_032, 2048),
    "resnet101": (42_500_160, 2048),
    "resnet152": (58_143_808, 2048),
    "vgg16": (134_260_544, 4096),
    "vgg19": (139_570_240, 4096),
}


@dataclass(frozen=True)
class Workload:
    """What one GPU does in a step: ``batch`` images at ``images_per_s`` when it is alone, then
    ``gradient_bytes`` to share (the number of parameters x bytes per gradient on the wire)."""

    batch: int
    images_per_s: float
    gradient_bytes: float

    @property
    def compute_s(self) -> float:
        """Seconds per step of a GPU that waits for no other."""
        return self.batch / self.images_per_s


@dataclass(frozen=True)
class Cluster:
    """Nodes and what connects them. Bandwidths in Gbit/s in one direction, latency in seconds."""

    gpus_per_node: int = 1
    network_gbit: float = 10.0  # of a node's link
    protocol: float = 0.85  # share of the link's rate that all-reduce gets: TCP, headers, pauses
    local_gbit: float = 80.0  # between the GPUs of a node: PCIe 3 x16; NVLink has 400 or more
    latency_s: float = 25e-6  # per hop between nodes: TCP sockets; InfiniBand has a fifth
    local_latency_s: float = 5e-6
    # Share of backward that hides communication. Below 1, as the two slow each other down, and the
    # first buckets are not ready at once: an estimate.
    overlap: float = 0.6
    # Fitted on one published point, HAL's 8 GPUs: see `straggler_s` of `Forecast`. It depends on
    # the machines: a shared cluster with a shared disk has 0.06, a quiet one with local data 0.01.
    jitter: float = 0.06


@dataclass(frozen=True)
class Forecast:
    """A step on ``gpus`` GPUs of ``nodes`` nodes, in seconds.

    ``straggler_s`` is how much longer the slowest of all GPUs takes than a typical one: every step
    waits for it. ``all_reduce_s`` is the whole communication, ``exposed_s`` the part that compute
    does not hide.
    """

    nodes: int
    gpus: int
    batch: int
    compute_s: float
    straggler_s: float
    all_reduce_s: float
    exposed_s: float

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return self.compute_s + self.straggler_s + self.exposed_s

    @property
    def images_per_s(self) -> float:
        """Images/s of all GPUs together."""
        return self.gpus * self.batch / self.step_s

    @property
    def efficiency(self) -> float:
        """Images/s relative to as many GPUs that each work alone."""
        return self.compute_s / self.step_s


def parameters(arch: str, classes: int = 1000) -> int:
    """Number of parameters of ``arch``; asks torchvision (and timm) for those not in the table.

    Raises: `UserError` for an unknown arch.
    """
    if arch in _BODIES:
        body, features = _BODIES[arch]
        return body + (features + 1) * classes
    import torch

    from utils import models

    with torch.device("meta"):  # the weights' shapes, without the weights
        model = models.create(arch, classes, image_size=224)
    return sum(parameter.numel() for parameter in model.parameters())


def all_reduce_seconds(size: float, gpus: int, cluster: Cluster) -> float:
    """Seconds to sum ``size`` bytes of gradients over ``gpus`` GPUs, bucket after bucket."""
    nodes = math.ceil(gpus / cluster.gpus_per_node)
    if gpus == 1 or not size:
        return 0.0
    gbit = cluster.local_gbit
    if nodes > 1:
        gbit = min(gbit, cluster.network_gbit * cluster.protocol)
    # Each link carries every byte once on its way to the sum and once back, less its own part.
    transfer = 2 * (gpus - 1) / gpus * size / (gbit * 1e9 / 8)
    local_hops = 2 * (min(gpus, cluster.gpus_per_node) - 1)
    ring = 2 * (nodes - 1) * cluster.latency_s + nodes * local_hops * cluster.local_latency_s
    depth = math.ceil(math.log2(nodes))
    tree = 2 * depth * cluster.latency_s + local_hops * cluster.local_latency_s
    return transfer + math.ceil(size / BUCKET_BYTES) * min(ring, tree)


def forecast(work: Workload, cluster: Cluster, gpus: int) -> Forecast:
    """The step of ``work`` on ``gpus`` GPUs, which fill node after node."""
    straggler = work.compute_s * cluster.jitter * (math.sqrt(gpus) - 1)
    all_reduce = all_reduce_seconds(work.gradient_bytes, gpus, cluster)
    hidden = cluster.overlap * BACKWARD * work.compute_s
    # The last bucket is half full on average.
    last = min(1.0, BUCKET_BYTES / 2 / max(work.gradient_bytes, 1.0))
    return Forecast(
        nodes=math.ceil(gpus / cluster.gpus_per_node),
        gpus=gpus,
        batch=work.batch,
        compute_s=work.compute_s,
        straggler_s=straggler,
        all_reduce_s=all_reduce,
        exposed_s=max(all_reduce - hidden, last * all_reduce),
    )


def not_worth_it(
    work: Workload, cluster: Cluster, most: int, share: float = 0.5
) -> tuple[int, float] | None:
    """From which node on more nodes are not worth it, looking at up to ``most`` nodes.

    Returns the first node from which on every further one adds less than ``share`` of the images/s
    of the first, and what that node adds (as a share; below 0 if it slows training down). None when
    all are worth it.
    """
    rates = [
        forecast(work, cluster, nodes * cluster.gpus_per_node).images_per_s
        for nodes in range(1, most + 1)
    ]
    gains = [(after - before) / rates[0] for before, after in itertools.pairwise(rates)]
    enough = [index for index, gain in enumerate(gains) if gain >= share]
    first = enough[-1] + 1 if enough else 0
    return (first + 2, gains[first]) if first < len(gains) else None


@dataclass(frozen=True)
class Measured:
    """A measured step: seconds on ``gpus`` GPUs."""

    gpus: int
    step_s: float


def fit_compute(work: Workload, cluster: Cluster, point: Measured) -> Workload:
    """``work`` with the speed of one GPU alone at which the forecast meets ``point``."""

    def step(seconds: float) -> float:
        trial = replace(work, images_per_s=work.batch / seconds)
        return forecast(trial, cluster, point.gpus).step_s

    # A step that is all communication cannot be explained by compute: the smallest is then taken.
    seconds = solve(step, point.step_s, (1e-6 * point.step_s, point.step_s))
    return replace(work, images_per_s=work.batch / seconds)


def fit_jitter(work: Workload, cluster: Cluster, anchor: Measured, other: Measured) -> Cluster:
    """``cluster`` with the jitter at which a forecast that starts from ``anchor`` meets ``other``.

    ``work`` gives batch and gradients; its speed is that of the anchor.
    """

    def step(jitter: float) -> float:
        trial = replace(cluster, jitter=jitter)
        fitted = fit_compute(work, trial, anchor)
        return forecast(fitted, trial, other.gpus).step_s

    return replace(cluster, jitter=solve(step, other.step_s, (0.0, 1.0)))


def fit_network(work: Workload, cluster: Cluster, other: Measured) -> Cluster:
    """``cluster`` with the share of its link's rate (``protocol``) at which the forecast meets
    ``other``."""

    def step(cost: float) -> float:
        return forecast(work, replace(cluster, protocol=1 / cost), other.gpus).step_s

    # At best the link's full rate, at worst a thousandth of it.
    return replace(cluster, protocol=1 / solve(step, other.step_s, (1.0, 1000.0)))


def errors(work: Workload, cluster: Cluster, points: Sequence[Measured]) -> list[float]:
    """How far the forecast is off each measured step: 0.1 is 10 % too long, -0.1 10 % too short."""
    return [forecast(work, cluster, point.gpus).step_s / point.step_s - 1 for point in points]


def solve(rising: Callable[[float], float], value: float, between: tuple[float, float]) -> float:
    """Where the ``rising`` function has ``value``; the nearer end if it does not reach it."""
    low, high = between
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return (low + high) / 2
