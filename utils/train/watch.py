"""What a training measures of itself: step times, hardware, a trace."""

import logging
import statistics
from pathlib import Path
from typing import Any

from torch import nn

from utils.launch.world import World, gather
from utils.run.figures import over_epochs
from utils.train import monitor, profiling
from utils.train.step_time import StepTimer, StepTimes

log = logging.getLogger(__name__)

PARTS = ("Time/data", "Time/compute", "Time/communication")


class Watch:
    """The instruments of one process. `close` ends them."""

    def __init__(self, args: Any, world: World, folder: Path, model: nn.Module):
        self.world = world
        self.timer = StepTimer(model, world.device, distributed=world.size > 1)
        sources: list[monitor.Source] = [monitor.Cpu()]
        if world.device.type == "cuda":
            gpu = monitor.gpu_source(monitor.gpu_name(world.device))
            if gpu is not None:
                sources.append(gpu)
            else:
                log.info(monitor.NOTHING)
        self.monitor = monitor.Monitor(sources)
        self.warned = False
        self.profiler: profiling.Profiler | None = None
        if args.profile and world.is_main:
            self.profiler = profiling.Profiler(folder)

    def start_epoch(self) -> None:
        """Count from here."""
        self.monitor.begin()
        self.timer.start()

    def end_step(self, update: bool) -> None:
        """A micro-batch is on its way; with ``update`` it ended a step."""
        self.timer.end(update)
        if update and self.profiler is not None:
            self.profiler.step()

    def recent(self) -> dict[str, float]:
        """The ``Step/`` curves: seconds per step since the last call, of this process."""
        return self.timer.recent().per_step("Step/", "_s")

    def end_epoch(self) -> dict[str, float]:
        """The epoch's values of all processes, for all of them. The device must be idle.

        Times are means over the processes, so that they add up to a step.
        """
        mine = (self.timer.stop(), self.monitor.end(), self.monitor.median())
        times, hardware, medians = zip(*gather(mine, self.world), strict=True)
        values = mean_times(times)
        for rank, figures in enumerate(hardware):
            values |= {f"{tag}_rank{rank}": value for tag, value in sorted(figures.items())}
        self._warn(values, medians)
        return values

    def _warn(self, values: dict[str, float], medians: tuple[float | None, ...]) -> None:
        known = [(median, rank) for rank, median in enumerate(medians) if median is not None]
        if self.warned or not known or min(known)[0] >= monitor.BUSY:
            return
        self.warned = True
        median, rank = min(known)
        step = sum(values.get(part, 0.0) for part in PARTS) or 1.0
        cause = monitor.likely_cause(
            values.get("Time/data", 0.0) / step, values.get("Time/communication", 0.0) / step
        )
        log.info(
            f"note: the GPU of rank {rank} is {median:.0f} % busy (median), not {monitor.BUSY:.0f}"
            f" % or more; likely cause: {cause}"
        )

    def close(self) -> None:
        """Stop the instruments."""
        self.monitor.close()
        if self.profiler is not None:
            self.profiler.close()


def mean_times(times: tuple[StepTimes, ...]) -> dict[str, float]:
    """Means over processes, in seconds per step, under the epoch's tags."""
    each = [found.per_step("Time/") for found in times if found.steps]
    return {part: statistics.fmean(one[part] for one in each) for part in PARTS} if each else {}


def summary(history: list[dict[str, float]]) -> dict[str, Any]:
    """The run's figures for summary.json: seconds per step, and the hardware's of each rank."""
    found: dict[str, Any] = {
        f"{part.removeprefix('Time/')}_s": over_epochs(history, part) for part in PARTS
    }
    tags = {tag for record in history for tag in record if tag.startswith(("GPU/", "CPU/"))}
    found["hardware"] = {tag: over_epochs(history, tag) for tag in sorted(tags)}
    return found
