"""What a step costs on more GPUs and nodes: a model of data-parallel training on paper.

    step    = compute x (1 + jitter x (sqrt(GPUs) - 1)) + exposed communication
    exposed = what the exchanges, bucket after bucket, take longer than the compute beside them, and
              the method's own arithmetic: scripts/forecast/model.py

Everything but the jitter, which is fitted, comes from data sheets or is an estimate; RESULTS.md has
the errors against published runs and our own. Imports nothing but the standard library (buckets of
unlisted models aside), so that it answers at once.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from forecast import buckets, model
from forecast.buckets import Bucket

from utils.comm import auto, methods
from utils.comm.methods import Method

PLAIN = methods.parse("fp32")


@dataclass(frozen=True)
class Workload:
    """What one GPU does in a step: ``batch`` images at ``images_per_s`` when it is alone, and
    gradients to share, in ``buckets``, exchanged by ``how``."""

    batch: int
    images_per_s: float
    buckets: tuple[Bucket, ...]
    how: Method = PLAIN

    @property
    def compute_s(self) -> float:
        """Seconds per step of a GPU that waits for no other."""
        return self.batch / self.images_per_s

    @property
    def wire_bytes(self) -> float:
        """Bytes of a step's gradients as they travel."""
        return sum(model.wire_bytes(bucket, self.how) for bucket in self.buckets)


@dataclass(frozen=True)
class Cluster:
    """Nodes and what connects them. Bandwidths in Gbit/s in one direction, latency in seconds."""

    gpus_per_node: int = 1
    network_gbit: float = 10.0  # of a node's link
    protocol: float = 0.85  # share of the link's rate that all-reduce gets: TCP, headers, pauses
    local_gbit: float = 80.0  # between the GPUs of a node: PCIe 3 x16; NVLink has 400 or more
    latency_s: float = 25e-6  # per hop between nodes: TCP sockets; InfiniBand has a fifth
    local_latency_s: float = 5e-6
    # Fitted on one published point, HAL's 8 GPUs: see `straggler_s` of `Forecast`. It depends on
    # the machines: a shared cluster with a shared disk has 0.06, a quiet one with local data 0.01.
    jitter: float = 0.06

    def link(self, gpus: int) -> model.Link:
        """What connects ``gpus`` GPUs."""
        return model.Link(
            gpus,
            self.network_gbit * self.protocol * 1e9 / 8,
            self.latency_s,
            self.gpus_per_node,
            self.local_gbit * 1e9 / 8,
            self.local_latency_s,
        )


@dataclass(frozen=True)
class Forecast:
    """A step on ``gpus`` GPUs of ``nodes`` nodes, in seconds.

    ``straggler_s`` is how much longer the slowest of all GPUs takes than a typical one: every step
    waits for it. ``exchange_s`` is the whole communication, ``exposed_s`` the part that compute
    does not hide, with the arithmetic of compression.
    """

    nodes: int
    gpus: int
    batch: int
    compute_s: float
    straggler_s: float
    exchange_s: float
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
    """Number of parameters of ``arch``. Raises: `UserError` for an unknown arch."""
    return sum(bucket.values for bucket in buckets.of(arch, classes))


def forecast(work: Workload, cluster: Cluster, gpus: int) -> Forecast:
    """The step of ``work`` on ``gpus`` GPUs, which fill node after node."""
    link = cluster.link(gpus)
    step = model.step_seconds(work.compute_s, work.buckets, link, work.how)
    return Forecast(
        nodes=link.nodes,
        gpus=gpus,
        batch=work.batch,
        compute_s=work.compute_s,
        straggler_s=work.compute_s * cluster.jitter * (math.sqrt(gpus) - 1),
        exchange_s=model.all_exchanges_seconds(work.buckets, link, work.how),
        exposed_s=step - work.compute_s,
    )


def compare(
    work: Workload, cluster: Cluster, gpus: Sequence[int], names: Sequence[str]
) -> dict[str, list[Forecast]]:
    """The forecasts for so many ``gpus`` with each of the methods called ``names``."""
    trials = {name: replace(work, how=methods.parse(name)) for name in names}
    return {name: [forecast(one, cluster, n) for n in gpus] for name, one in trials.items()}


def choice(work: Workload, cluster: Cluster, gpus: int) -> tuple[Forecast, str]:
    """The forecast with the method that ``--comm auto`` takes there, and its name."""
    found = {name: one for name, (one,) in compare(work, cluster, [gpus], auto.METHODS).items()}
    name = auto.mildest({name: one.step_s for name, one in found.items()})
    return found[name], name


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
