"""``--comm auto``: what the first steps show of compute and link, and the method to take.

Steps in float32 say how long compute takes and when each bucket of gradients is ready. With the
link's rate, `utils.comm.cost` says what a step would take with each method if its collectives got
all of the link: hardly any step is shorter than that, and some are longer. So the method that would
be taken is tried in some steps first, and what they took replaces the forecast, until the method
that would be taken is one that was tried.
"""

import math
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from utils.comm import cost
from utils.comm.lane import Alone
from utils.comm.methods import PowerSGD, Quantised, Step
from utils.launch.world import World

WARM_UP, STEPS = 3, 8  # steps: the first are slower, as they allocate and choose kernels
TRIAL_WARM_UP, TRIAL_STEPS = 1, 3  # of a method on trial
MOST_STEPS = WARM_UP + STEPS + (len(cost.AUTO) - 1) * (TRIAL_WARM_UP + TRIAL_STEPS)
SMALL_ROUNDS, LINK_SECONDS = 10, 0.2
MOST_BYTES = 64 * 2**20
SAMPLE = 2**20  # values on which a method's own arithmetic is timed
WITHIN = 0.05  # how much slower than the best the method may be that loses less


class Search:
    """auto's way to a method, in one process; all processes make the same steps.

    ``method`` is what the current step exchanges by; ``sentence`` says why that one was taken, as
    soon as it was.
    """

    def __init__(self, candidates: list[str], optimizer: torch.optim.Optimizer, world: World):
        """``candidates``: names of methods, the mildest first, which is plain float32."""
        self.candidates, self.optimizer, self.world = candidates, optimizer, world
        self.method, self.sentence = candidates[0], ""
        self.timing = Timing(optimizer, world, WARM_UP, STEPS)
        self.tried: list[str] = []
        # Seconds per step by method: forecast, or of its trial.
        self.seconds: dict[str, float] = {}

    def begin_step(self) -> None:
        """A step begins. Collective; all come to the same choice, as all see the same numbers."""
        if self.timing.done:
            if not self.seconds:
                self._forecast()
            found = self.timing.end()
            if math.isfinite(found):
                self.seconds[self.method] = found
            self.tried.append(self.method)
            self.method = cost.mildest(list(self.seconds.items()), WITHIN)
            if self.method in self.tried:
                self.sentence = self._why()
                return
            self.timing = Timing(self.optimizer, self.world, TRIAL_WARM_UP, TRIAL_STEPS)
        self.timing.begin_step()

    def _forecast(self) -> None:
        self.compute, self.buckets = self.timing.compute()
        self.link = measure_link(self.world)
        for name in self.candidates:
            own, how = arithmetic(name, self.world), cost.method(name)
            self.seconds[name] = cost.step_seconds(self.compute, self.buckets, self.link, how, own)

    def _why(self) -> str:
        size = sum(bucket.values for bucket in self.buckets) * cost.FLOAT32 / 1e6
        steps = {name: f"{1000 * took:.0f} ms with {name}" for name, took in self.seconds.items()}
        sentence = (
            f"communication: {self.method}. {size:.0f} MB of gradients per step at "
            f"{self.link.bytes_per_s * 8e-9:.3g} Gbit/s, {1000 * self.compute:.0f} ms of compute: "
            "steps took " + ", ".join(steps.pop(name) for name in self.tried)
        )
        if steps:
            sentence += ", would take at least " + ", ".join(steps.values())
        plain, taken = self.seconds[self.candidates[0]], self.seconds[self.method]
        if self.method != self.candidates[0]:
            sentence += f"; saves {1 - taken / plain:.0%} of the time"
        share = self.compute / taken
        if share < 0.9:
            sentence += (
                f". Exchanging them still takes {1 - share:.0%}: a larger batch (-b auto) costs "
                "nothing; --comm powersgd:4 or localsgd:8 change the learning curve"
            )
        return sentence


class Timing:
    """Times ``steps`` steps of one process, after some to ``warm_up``."""

    def __init__(self, optimizer: torch.optim.Optimizer, world: World, warm_up: int, steps: int):
        self.optimizer, self.world = optimizer, world
        self.warm_up, self.steps = warm_up, steps
        self.cuda = world.device.type == "cuda"
        self.begun = 0
        self.begins: list[Any] = []
        self.ready: list[list[Any]] = []  # per step, in the order of the buckets
        self.ends: list[Any] = []  # None for a step in which no weight changed
        self.shapes: list[tuple[int, tuple[tuple[int, int], ...]]] = []
        self.hook: Any = None

    @property
    def done(self) -> bool:
        """Whether enough steps were seen; the same in all processes."""
        return self.begun == self.warm_up + self.steps

    def begin_step(self) -> None:
        """A step begins, and with it its compute."""
        if not self.begun:  # when weights change, the means are there
            self.hook = self.optimizer.register_step_pre_hook(self._weights_change)
        self.begun += 1
        if self.begun > self.warm_up:
            self.begins.append(self._mark())
            self.ready.append([])
            self.ends.append(None)
            self.shapes = []

    def bucket_is_ready(self, bucket: dist.GradBucket) -> None:
        """To be called by the hook of DistributedDataParallel, in the order of readiness."""
        if self.ready:
            self.ready[-1].append(self._mark())
            shapes = [g.shape for g in bucket.gradients() if g.dim() > 1]
            matrices = tuple((s[0], s.numel() // s[0]) for s in shapes)
            self.shapes.append((bucket.buffer().numel(), matrices))

    def _weights_change(self, *_: Any) -> None:
        if self.ends:
            self.ends[-1] = self._mark()

    def end(self) -> float:
        """Seconds from a step's begin until the means are there (median; infinite if no step had
        any). Collective: the slowest process counts."""
        self.hook.remove()
        self._wait()
        pairs = zip(self.begins, self.ends, strict=True)
        times = [self._between(begin, end) for begin, end in pairs if end is not None]
        slowest = torch.tensor(median(times) if times else math.inf)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.world.control)
        return float(slowest)

    def compute(self) -> tuple[float, list[cost.Bucket]]:
        """Seconds until all local gradients are there (median), and the buckets on the way.

        Collective: the slowest process counts.
        """
        self._wait()
        steps = zip(self.begins, self.ready, strict=True)
        seconds = [
            [self._between(begin, mark) for mark in marks]
            for begin, marks in steps
            if len(marks) == len(self.shapes)
        ]
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

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.world.device)


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


def arithmetic(method: str, world: World) -> float:
    """Seconds per value that a method computes, before and after the network (slowest process)."""
    how = cost.method(method)
    if how.name == "fp32":
        return 0.0
    values = torch.randn(1024, SAMPLE // 1024, device=world.device)
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(how.name)
    codec: Quantised | PowerSGD | None = None
    if how.rank:
        codec = PowerSGD(how.rank, Alone(world.nodes), seed=0)
    elif half is None:
        codec = Quantised(int(how.name[3:]), Alone(world.nodes))

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
