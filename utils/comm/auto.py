"""``--comm auto``: what the first steps show of compute and link, and the method to choose."""

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from utils.comm import cost
from utils.comm.lane import Alone, Peers
from utils.comm.methods import PowerSGD, Quantised, Step
from utils.processes.distributed import World

WARM_UP, STEPS = 3, 8  # steps: the first are slower, as they allocate and choose kernels
SMALL_ROUNDS, LINK_SECONDS = 10, 0.2
MOST_BYTES = 64 * 2**20
TRIAL_SECONDS = 0.5  # what a trial of an exchange would take in float32
LEAST_TRIAL, MOST_TRIAL = 2**18, 2**24  # values
LEAST_STRETCH = 0.5
SAMPLE = 2**20  # values on which a method's own arithmetic is timed
WITHIN = 0.05  # how much slower than the best the method may be that loses less


@dataclass(frozen=True)
class Choice:
    """The method that was chosen, and a sentence that says why."""

    method: str
    sentence: str


class Measurement:
    """Times the first steps of one process, which exchange float32 gradients."""

    def __init__(self, world: World):
        self.world = world
        self.cuda = world.device.type == "cuda"
        self.steps = 0
        self.began: Any = None
        self.marks: list[tuple[Any, list[Any]]] = []  # per step: its begin, and each bucket's
        self.shapes: list[tuple[int, tuple[tuple[int, int], ...]]] = []

    @property
    def done(self) -> bool:
        """Whether enough steps were seen; the same in all processes."""
        return self.steps == WARM_UP + STEPS

    def begin_step(self) -> None:
        """A step begins, and with it its compute."""
        self.steps += 1
        if self.steps > WARM_UP:
            self.marks.append((self._mark(), []))
            self.shapes = []

    def bucket_is_ready(self, bucket: dist.GradBucket) -> None:
        """To be called by the hook of DistributedDataParallel, in the order of readiness."""
        if self.steps > WARM_UP:
            self.marks[-1][1].append(self._mark())
            shapes = [g.shape for g in bucket.gradients() if g.dim() > 1]
            matrices = tuple((s[0], s.numel() // s[0]) for s in shapes)
            self.shapes.append((bucket.buffer().numel(), matrices))

    def compute(self) -> tuple[float, list[cost.Bucket]]:
        """Seconds until all local gradients are there (median), and the buckets on the way.

        Collective: the slowest process counts.
        """
        if self.cuda:
            torch.cuda.synchronize(self.world.device)
        marks = [entry for entry in self.marks if len(entry[1]) == len(self.shapes)]
        seconds = [[self._between(begin, mark) for mark in ready] for begin, ready in marks]
        ready = torch.tensor([median(times) for times in zip(*seconds, strict=True)])
        dist.all_reduce(ready, dist.ReduceOp.MAX, group=self.world.control)
        whole = max(float(ready.max()), 1e-6)
        shares = (ready / whole).cummax(0).values.tolist()
        buckets = [
            cost.Bucket(values, share, matrices)
            for (values, matrices), share in zip(self.shapes, shares, strict=True)
        ]
        return whole, buckets

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.world.device))
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1000 if self.cuda else end - begin


def measure_link(world: World) -> cost.Link:
    """Latency and speed of an all-reduce between all processes, while nothing else travels."""

    def seconds(values: Tensor) -> float:
        dist.barrier(group=world.control)
        began = time.perf_counter()
        dist.all_reduce(values)
        if values.is_cuda:
            torch.cuda.synchronize(world.device)
        slowest = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=world.control)
        return float(slowest)

    small = torch.zeros(1, device=world.device)
    latency = median(seconds(small) for _ in range(SMALL_ROUNDS))
    size, taken = 2**20, 0.0
    while True:  # until the latency does not count, and bursts of the link are over
        taken = min(seconds(torch.zeros(size // 4, device=world.device)) for _ in range(2))
        if taken >= LINK_SECONDS or size >= MOST_BYTES:
            break
        size = min(MOST_BYTES, max(2 * size, int(size * LINK_SECONDS / taken)))
    share = 2 * (world.size - 1) / world.size
    rate = share * size / max(taken - latency, 1e-6)
    hops = 2 * (world.nodes - 1)
    return cost.Link(world.size, rate, latency / hops, world.local_size)


def stretch(
    method: str,
    own: float,
    buckets: list[cost.Bucket],
    link: cost.Link,
    world: World,
    peers: Peers | None,
) -> float:
    """How much longer an exchange takes than the link's rate says, by trying one.

    Not all collectives get as much of a link as the all-reduce by which it was measured. ``own`` is
    the method's `arithmetic`. Tried on a matrix in the proportions of the largest one. Collective.
    """
    how = cost.method(method)
    matrices = [matrix for bucket in buckets for matrix in bucket.matrices]
    if method in ("fp32", "fp16", "bf16") or not matrices:
        return 1.0
    rows, columns = max(matrices, key=lambda shape: shape[0] * shape[1])
    wanted = min(max(TRIAL_SECONDS * link.bytes_per_s / 8, LEAST_TRIAL), MOST_TRIAL)
    share = min(1.0, wanted / (rows * columns)) ** 0.5
    rows, columns = max(1, int(rows * share)), max(1, int(columns * share))
    tried = cost.Bucket(rows * columns, 1.0, ((rows, columns),))
    expected = cost.exchange_seconds(cost.wire_bytes(tried, how), link, how.collectives)
    gradient = torch.randn(rows, columns, device=world.device)
    codec = codec_of(how, peers) if peers else None
    times = []
    for _ in range(3):
        dist.barrier(group=world.control)
        began = time.perf_counter()
        if codec is not None:
            codec.mean([(0, gradient)], Step())
        if gradient.is_cuda:
            torch.cuda.synchronize(world.device)
        slowest = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=world.control)
        times.append(float(slowest))
    found = (min(times) - own * tried.values) / expected
    return min(max(found, LEAST_STRETCH), 1 / LEAST_STRETCH)


def codec_of(how: cost.Method, peers: Peers, seed: int = 0) -> Quantised | PowerSGD:
    """What computes the means of a method that is neither torch's own nor local."""
    return PowerSGD(how.rank, peers, seed) if how.rank else Quantised(int(how.name[3:]), peers)


def arithmetic(method: str, world: World) -> float:
    """Seconds per value that a method computes, before and after the network (slowest process)."""
    how = cost.method(method)
    if how.name == "fp32":
        return 0.0
    values = torch.randn(1024, SAMPLE // 1024, device=world.device)
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(how.name)
    codec = codec_of(how, Alone(world.nodes)) if half is None else None

    def once() -> None:
        if codec is not None:
            codec.mean([(0, values)], Step())
        else:
            values.copy_(values.to(half).div_(2))

    times = []
    for _ in range(4):
        began, used = time.perf_counter(), time.process_time()
        once()
        if values.is_cuda:
            torch.cuda.synchronize(world.device)
        times.append(time.perf_counter() - began)
        if not values.is_cuda:  # on cores that others use as well, its own time counts
            times[-1] = min(times[-1], time.process_time() - used)
    slowest = torch.tensor(min(times[1:]))
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=world.control)
    return float(slowest) / SAMPLE


def choose(
    measurement: Measurement, candidates: list[str], world: World, peers: Peers | None
) -> Choice:
    """The mildest of ``candidates`` (mildest first) that is about as fast as the fastest.

    ``peers`` exchange gradients between nodes; None in a process that takes no part in that.
    Collective. All processes come to the same choice, as they calculate with the same numbers.
    """
    compute, buckets = measurement.compute()
    link = measure_link(world)
    steps = []
    for name in candidates:
        own = arithmetic(name, world)
        longer = stretch(name, own, buckets, link, world, peers)
        how = cost.method(name)
        steps.append((name, cost.step_seconds(compute, buckets, link, how, own, longer)))
    chosen = cost.mildest(steps, WITHIN)
    seconds = dict(steps)
    plain = seconds[candidates[0]]
    size = sum(bucket.values for bucket in buckets) * cost.FLOAT32 / 1e6
    sentence = (
        f"communication: {chosen}. {size:.0f} MB of gradients per step at "
        f"{link.bytes_per_s * 8e-9:.3g} Gbit/s, {1000 * compute:.0f} ms of compute: steps of "
        + ", ".join(f"{1000 * step:.0f} ms with {name}" for name, step in steps)
    )
    share = compute / seconds[chosen]
    if chosen != candidates[0]:
        sentence += f"; saves {1 - seconds[chosen] / plain:.0%} of the time"
    if share < 0.9:
        sentence += (
            f". Exchanging them still takes {1 - share:.0%}: a larger batch (-b) costs nothing; "
            "--comm powersgd:4 or localsgd:8 change the learning curve"
        )
    return Choice(chosen, sentence)
