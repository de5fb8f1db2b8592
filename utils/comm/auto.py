"""``--comm auto``: try each method in a few real steps, and keep a fast and exact one."""

import math
from statistics import median

import torch
import torch.distributed as dist

from utils.launch.world import Clock, Mark, World

# What auto chooses among, the most exact first.
METHODS = ("fp32", "fp16", "int8", "int4", "powersgd:32")
WARM_UP, STEPS = 1, 3  # of each method
FIRST_WARM_UP = 4  # the first steps are slower, as they allocate and choose kernels
MOST_STEPS = FIRST_WARM_UP + STEPS + (len(METHODS) - 1) * (WARM_UP + STEPS)
WITHIN = 0.05  # how much slower than the fastest a more exact method may be


class Search:
    """auto's search for a method, in one process; all processes make the same steps.

    ``method`` is that of the current step; ``reason`` says why it was chosen, once it is. A step is
    timed until the optimiser has the means: data and output do not count.
    """

    def __init__(self, candidates: list[str], optimizer: torch.optim.Optimizer, world: World):
        """``candidates``: names of methods, the most exact first, which is plain float32."""
        self.left, self.world, self.reason = list(candidates), world, ""
        self.clock = Clock(world.device)
        self.seconds: dict[str, float] = {}  # per step, by method
        self.hook = optimizer.register_step_pre_hook(lambda *_: self.ends.append(self.clock.mark()))
        self._try_next(FIRST_WARM_UP)

    def _try_next(self, warm_up: int) -> None:
        self.method, self.steps_left = self.left.pop(0), warm_up + STEPS
        self.begins: list[Mark] = []
        self.ends: list[Mark] = []

    def begin_step(self) -> None:
        """Begin a step. Collective; all processes see the same times and so choose the same."""
        if not self.steps_left:
            self.seconds[self.method] = self._slowest()
            if not self.left:
                self._choose()
                return
            self._try_next(WARM_UP)
        self.steps_left -= 1
        self.begins[len(self.ends) :] = [self.clock.mark()]  # not of a step that was skipped

    def _slowest(self) -> float:
        """Seconds of a step: the median, of the slowest process."""
        if self.clock.cuda:
            torch.cuda.synchronize(self.world.device)
        pairs = [*zip(self.begins, self.ends, strict=False)][-STEPS:]
        times = [self.clock.seconds(*pair) for pair in pairs]
        # None: a loss scaler has skipped all steps.
        found = torch.tensor(median(times) if times else math.inf)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.world.control)
        return float(found)

    def _choose(self) -> None:
        self.hook.remove()
        plain, self.method = next(iter(self.seconds)), mildest(self.seconds)
        steps = ", ".join(f"{1000 * took:.0f} ms with {n}" for n, took in self.seconds.items())
        self.reason = f"communication: {self.method}; steps took {steps}"
        if self.method != plain:
            saved = 1 - self.seconds[self.method] / self.seconds[plain]
            self.reason += f": saves {saved:.0%} of the time"


def mildest(seconds: dict[str, float]) -> str:
    """The first method whose step is at most `WITHIN` longer than the shortest."""
    limit = (1 + WITHIN) * min(seconds.values())
    return next(name for name, took in seconds.items() if took <= limit)
