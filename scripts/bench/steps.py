"""Time a training step: `time_steps` calls it again and again, on one batch of `random_batch`."""

import logging
import resource
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from utils.start.world import World

WARMUP_STEPS, TIMED_STEPS = 5, 20
AHEAD = 3  # steps that the host can queue before the GPU has finished the first one

log = logging.getLogger("utils.bench")  # the console of a run prints what is below "utils"


def random_batch(size: int, side: int, world: World, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return images float32 [size, 3, side, side] and targets int64 [size] from 0 to 999."""
    generator = torch.Generator(world.device).manual_seed(seed + world.data_parallel_rank)
    made = {"generator": generator, "device": world.device}
    return torch.randn((size, 3, side, side), **made), torch.randint(1000, (size,), **made)


def time_steps(
    step: Callable[[], Any], world: World, warm_up: int, steps: int, timer: Any = None
) -> dict[str, Any]:
    """Call ``step`` and measure it. ``timer`` runs during the timed calls. Collective.

    Returns: ``ms_per_step``; ``cpu_ms_per_step``, the CPU time of all threads of this process;
    ``network_mb_per_step``, sent by this machine, headers included; ``peak_memory_bytes`` of this
    process. On a GPU also ``host_ms_per_step``, the time that the host takes to start a step's
    work, and ``host_waits``, the files and lines where the host waits for the GPU.
    """
    cuda = world.device.type == "cuda"

    def run(count: int) -> float:
        """Return the seconds until the devices of all processes have finished ``count`` steps."""
        began = time.perf_counter()
        for _ in range(count):
            step()
        if cuda:
            torch.cuda.synchronize(world.device)
        if world.size > 1:
            dist.barrier(group=world.control)
        return time.perf_counter() - began

    run(0)
    # An upper limit: the first step is the slowest, as it allocates, chooses kernels and compiles.
    first = run(1)
    log.info(
        f"the first step took {first:.1f} s, all need at most {first * (warm_up + steps):.0f} s"
    )
    run(warm_up - 1)
    if timer is not None:
        timer.start()
    sent, cpu = sent_bytes(), time.process_time()
    figures = {
        "ms_per_step": 1000 * run(steps) / steps,
        "cpu_ms_per_step": 1000 * (time.process_time() - cpu) / steps,
        "network_mb_per_step": (sent_bytes() - sent) / 1e6 / steps,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if timer is not None:
        timer.stop()
    if not cuda:
        return figures
    figures["peak_memory_bytes"] = torch.cuda.max_memory_allocated(world.device)
    began = time.perf_counter()
    for _ in range(AHEAD):
        step()
    figures["host_ms_per_step"] = 1000 * (time.perf_counter() - began) / AHEAD
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    # Ignore the warning that the debug mode is a prototype.
    waits = [one for one in seen if "called a synchronizing" in str(one.message)]
    return figures | {"host_waits": [f"{one.filename}:{one.lineno}" for one in waits]}


def sent_bytes() -> int:
    """Return the bytes that this machine has sent over all network interfaces except loopback."""
    rows = [line.split(":") for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
    return sum(int(counts.split()[8]) for name, counts in rows if name.strip() != "lo")
