#!/usr/bin/env python3
"""Time the training step of a script alone, on one random batch that stays on the device.

    python scripts/bench/time_step.py imagenet_nd -a resnet50 -b 256
    torchrun --nproc_per_node=2 scripts/bench/time_step.py imagenet_ddp -b 256 --comm int8

All options are those of the script. The step includes optimiser and all-reduce as in training, but
neither data loading nor metrics. It prints images/s, ms per step and peak memory; the last line is
JSON. It leaves no files.
"""

import importlib
import json
import logging
import sys
import tempfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from utils.start import launch

launch.prepare(__name__)

from bench import steps

from utils import loop, monitor, report
from utils.model import compiling
from utils.session import Session, TrainStep
from utils.start.errors import UserError

SCRIPTS = [f"imagenet_{mode}" for mode in ("nd", "dp", "ddp", "fsdp", "ddp_apex")]

log = logging.getLogger(steps.log.name)


def main() -> int:
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if len(sys.argv) < 2 or sys.argv[1] not in SCRIPTS:
        raise UserError(f"give a script first: {', '.join(SCRIPTS)}", on_every_rank=True)
    script = importlib.import_module(sys.argv.pop(1))
    with tempfile.TemporaryDirectory() as out:
        sys.argv[1:1] = ["--dummy", "--output-dir", out]
        return time_script(script)


def time_script(script: ModuleType) -> int:
    """Run ``script``, with `time_step` instead of a training. Returns: the exit code."""
    find_batch, loop.find_batch = loop.find_batch, time_step
    try:
        return script.main()
    finally:
        loop.find_batch = find_batch


def time_step(session: Session, train_step: TrainStep) -> int:
    """Time the step, and print the figures. It takes the place of `utils.loop.find_batch`.

    Returns: exit code 0.
    """
    args, world, global_batch = session.args, session.world, session.global_batch
    report.sharding(session)
    side, accum = session.train.dataset.size, session.train.sampler.accum
    images, targets = steps.random_batch(session.train.sampler.largest, side, world, args.seed)
    images = images.to(memory_format=args.memory_format)
    targets %= len(session.loaders.classes)
    timer = monitor.StepTimer(session.state.model, world.device, world.size > 1)
    if args.compile:
        train_step = compiling.first_step_timed(train_step, args, world.device)

    def step() -> None:
        for micro in range(accum):
            update = micro + 1 == accum
            timer.begin()
            train_step(images, targets, 1 / accum, update)
            timer.end(update)

    log.info(
        f"timing {steps.TIMED_STEPS} steps of {global_batch} images after "
        f"{steps.WARMUP_STEPS} warm-up steps"
    )
    figures = steps.time_steps(step, world, steps.WARMUP_STEPS, steps.TIMED_STEPS, timer)
    figures["images_per_s"] = 1000 * global_batch / figures["ms_per_step"]
    times = timer.stop()
    parts = {f"{part}_s": times[part] for part in monitor.PARTS if part in times}
    share = parts.get("communication_s", 0) / (sum(parts.values()) or 1)
    communication = f" ({share:.0%} communication)" if "communication_s" in parts else ""
    log.info(
        f"{args.arch}, {world.size} x {world.device.type}, global batch {global_batch}:"
        f" {figures['images_per_s']:.1f} images/s, {figures['ms_per_step']:.1f} ms per step"
        f"{communication}, peak memory of rank 0 {figures['peak_memory_bytes'] / 2**30:.2f} GiB"
    )
    for place in figures.get("host_waits", ()):
        log.warning(f"the host waits for the GPU in each step: {place}")
    session.run.close()
    if world.is_main:
        print(json.dumps(report.setting(session) | figures | parts), flush=True)
    return 0


if __name__ == "__main__":
    launch.run_main(main)
elif __name__ == "__mp_main__":  # a process that `launch.supervise` has started
    loop.find_batch = time_step
