"""``--dummy``: the speed of the training step alone, on batches that live on the device."""

import logging
import resource

import torch
import torch.distributed as dist

from utils.comm import auto
from utils.data.preprocessing import largest_size
from utils.launch.world import World
from utils.train import compiling, report
from utils.train.session import Session, TrainStep
from utils.train.step_time import StepTimer, StepTimes
from utils.train.stopping import Reason

WARMUP_STEPS, TIMED_STEPS = 5, 20
CHOOSING_STEPS = auto.MOST_STEPS + 2  # to warm up, while ``--comm auto`` has to choose
MOST_STEPS = CHOOSING_STEPS + TIMED_STEPS

log = logging.getLogger(__name__)


def time_step(session: Session, train_step: TrainStep) -> int:
    """Time the step on random images and print images/s, ms per step and peak memory.

    The same step as in training, optimiser and all-reduce included; no loader, no metrics. Writes
    the figures to summary.json. Returns: exit code 0.
    """
    args, world, run, global_batch = session.args, session.world, session.run, session.global_batch
    run.begin(0, 0)
    report.sharding(session)
    device = world.device
    side = largest_size(args)
    size = (args.batch_size, 3, side, side)
    generator = torch.Generator(device).manual_seed(args.seed + world.rank)
    images = torch.randn(size, generator=generator, device=device).to(
        memory_format=args.memory_format
    )
    targets = torch.randint(0, args.dummy_classes, size[:1], generator=generator, device=device)

    comm, done = session.state.comm, 0
    timer = StepTimer(session.state.model, device, distributed=world.size > 1)

    def steps(number: int) -> StepTimes:
        nonlocal done
        _wait_for_all(world)
        timer.start()
        for _ in range(number):
            if comm is not None and (why := comm.begin_step(1, done, MOST_STEPS, 2)):
                log.info(why)
            done += 1
            for micro in range(args.accum_steps):
                update = micro + 1 == args.accum_steps
                timer.begin()
                train_step(images, targets, 1 / args.accum_steps, update)
                timer.end(update)
        _wait_for_all(world)
        return timer.stop()

    if args.compile:
        train_step = compiling.first_step_timed(train_step, args, device)
    warm_up = CHOOSING_STEPS if comm is not None and comm.method is None else WARMUP_STEPS
    log.info(f"timing {TIMED_STEPS} steps of {global_batch} images, after {warm_up} to warm up ...")
    first, rest = steps(1).seconds, warm_up - 1
    # Not longer: the first step is the slowest, as it allocates, chooses kernels and compiles.
    longest = first * (rest + TIMED_STEPS)
    log.info(f"the first step took {first:.1f} s: done in {longest:.0f} s at most")
    steps(rest)
    times = steps(TIMED_STEPS)
    seconds = times.seconds / TIMED_STEPS
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated(device)
    else:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    log.info(
        f"dummy data, {args.arch}, {world.size} x {device.type}, global batch {global_batch}: "
        f"{global_batch / seconds:.1f} images/s, {1000 * seconds:.1f} ms per step "
        f"({times.communication / times.seconds:.0%} communication), peak memory of "
        f"rank 0 {memory / 2**30:.2f} GiB"
    )
    run.finish(
        report.setting(session)
        | {
            "images_per_s": global_batch / seconds,
            "ms_per_step": 1000 * seconds,
            **times.per_step("", "_s"),
            "peak_memory_bytes": memory,
            "finished_because": Reason.DUMMY,
        }
    )
    return 0


def _wait_for_all(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    if world.size > 1:
        dist.barrier(group=world.control)
