"""``--dummy``: time the training step alone, with random images on the device.

Interface: `Dummy` is a `utils.folder.Source`; `time_step` replaces the loop over epochs and calls
`train_step`. Without this file, the training step cannot be timed without data loading.
"""

import logging
import resource
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from utils import addons, report
from utils.errors import UserError
from utils.folder import Source
from utils.session import Session, TrainStep
from utils.world import World

WARMUP_STEPS, TIMED_STEPS = 5, 20
MOST_CLASSES = 1_000_000
AHEAD = 3  # steps that the host can queue before the GPU has finished the first one

log = logging.getLogger(__name__)


class Dummy(Source):
    """A source whose images are never read, because batches are generated on the device.

    ``choice``: the value of ``--classes``, a number (None: 1000). Raises: `UserError`.
    """

    def __init__(self, choice: str | None):
        if choice and not (choice.isdecimal() and 0 < int(choice) <= MOST_CLASSES):
            text = f"--dummy has no folders: give --classes a number, 1 to {MOST_CLASSES}"
            raise UserError(text, on_every_rank=True)
        self.root, self.classes = "", [str(number) for number in range(int(choice or 1000))]

    def __len__(self) -> int:
        return sys.maxsize


def time_step(session: Session, train_step: TrainStep) -> int:
    """Time the step on random images and print images/s, ms per step and peak memory.

    The step includes optimiser and all-reduce as in training, but neither data loading nor metrics.
    The figures are written to summary.json. Returns: exit code 0.
    """
    args, world, run, global_batch = session.args, session.world, session.run, session.global_batch
    run.begin(0, 0)
    report.sharding(session)
    side = session.train.dataset.size
    images, targets = random_batch(args.batch_size, side, world, args.seed)
    images = images.to(memory_format=args.memory_format)
    targets %= len(session.loaders.classes)
    if (comm := session.state.parts.get("comm")) is not None:
        comm.start_at(1, 0, 1, 2)  # make powersgd compress from the first step
    timer = addons.extra("watch").StepTimer(session.state.model, world.device, world.size > 1)
    train_step = addons.first_step_timed(train_step, args, world.device)

    def step() -> None:
        for micro in range(args.accum_steps):
            update = micro + 1 == args.accum_steps
            timer.begin()
            train_step(images, targets, 1 / args.accum_steps, update)
            timer.end(update)

    log.info(
        f"timing {TIMED_STEPS} steps of {global_batch} images after {WARMUP_STEPS} warm-up steps"
    )
    figures = time_steps(step, world, WARMUP_STEPS, TIMED_STEPS, timer)
    figures["images_per_s"] = 1000 * global_batch / figures["ms_per_step"]
    times = timer.stop()
    parts = {f"{part}_s": times[part] for part in report.PARTS if part in times}
    share = parts.get("communication_s", 0) / (sum(parts.values()) or 1)
    communication = f" ({share:.0%} communication)" if "communication_s" in parts else ""
    log.info(
        f"dummy data, {args.arch}, {world.size} x {world.device.type}, global batch {global_batch}:"
        f" {figures['images_per_s']:.1f} images/s, {figures['ms_per_step']:.1f} ms per step"
        f"{communication}, peak memory of rank 0 {figures['peak_memory_bytes'] / 2**30:.2f} GiB"
    )
    for place in figures.get("host_waits", ()):
        log.warning(f"the host waits for the GPU in each step: {place}")
    run.finish(report.setting(session) | figures | parts | {"finished_because": "dummy"})
    return 0


def random_batch(size: int, side: int, world: World, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return images float32 [size, 3, side, side] and targets int64 [size] from 0 to 999."""
    generator = torch.Generator(world.device).manual_seed(seed + world.slice)
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
