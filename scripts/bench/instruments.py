#!/usr/bin/env python3
"""What do the always-on instruments cost? The step timer and the monitor, on and off.

    python scripts/bench/instruments.py [-a resnet18] [-b 16] [--image-size 64]

Trains with DistributedDataParallel in a process group of one, on the GPU if there is one. Rounds
with and without instruments alternate, so that a change of the machine's speed affects both; the
ratio is the median of the rounds' ratios. On the CPU it is that of CPU time, which other programs
disturb least. The calls alone are timed, too.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from utils.model import models  # noqa: E402
from utils.option_types import number, positive  # noqa: E402
from utils.train import monitor  # noqa: E402
from utils.train.step_time import StepTimer  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-a", "--arch", default="resnet18")
    parser.add_argument("-b", "--batch-size", type=positive, default=16, metavar="N")
    parser.add_argument("--image-size", type=positive, default=64, metavar="PX")
    parser.add_argument(
        "--rounds", type=number(int, 2), default=30, metavar="N", help="of each kind (30)"
    )
    parser.add_argument("--steps", type=positive, default=10, metavar="N", help="per round (10)")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl" if cuda else "gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1
        )
        measure(args, device)
        dist.destroy_process_group()
    return 0


def measure(args: argparse.Namespace, device: torch.device) -> None:
    """Take the times and print them."""
    sources: list[monitor.Source] = [monitor.Cpu()]
    gpu = monitor.gpu_source(monitor.gpu_name(device)) if device.type == "cuda" else None
    sources += [gpu] if gpu is not None else []
    model = models.create(args.arch, 1000, args.image_size).to(device)
    replica = DistributedDataParallel(model, device_ids=[0] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    targets = torch.zeros(args.batch_size, dtype=torch.long, device=device)
    timer = StepTimer(model, device, distributed=True)  # its hooks do nothing between epochs
    criterion = nn.CrossEntropyLoss()
    clock = time.perf_counter if device.type == "cuda" else time.process_time

    def steps(count: int, on: bool) -> float:
        """Seconds per step, over ``count`` steps."""
        watcher = monitor.Monitor(sources) if on else None
        if on:
            timer.start()
        began = clock()
        for _ in range(count):
            if on:
                timer.begin()
            criterion(replica(images), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            if on:
                timer.end(update=True)
                timer.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = clock() - began
        if watcher is not None:
            timer.stop()
            watcher.ended.set()
            watcher.thread.join()
        return seconds / count

    steps(3, False)
    pairs = []
    for turn in range(args.rounds):
        kinds = (True, False) if turn % 2 else (False, True)
        times = {on: steps(args.steps, on) for on in kinds}
        pairs.append((times[True], times[False]))
    low, ratio, high = statistics.quantiles((on / off for on, off in pairs), n=4)
    step = statistics.median(off for _, off in pairs)
    print(
        f"{args.arch}, {args.batch_size} images of {args.image_size} pixels on {device.type}: "
        f"{1000 * step:.2f} ms per step; on/off {ratio:.4f} (median of {args.rounds} "
        f"pairs; half of them from {low:.4f} to {high:.4f})"
    )
    calls = timer_calls(timer) / step
    sample = sampling(sources)
    print(
        f"the timer's calls alone: {1e6 * calls * step:.1f} us per step, {calls:.3%} of it; "
        f"a sample of the monitor: {1e3 * sample:.2f} ms of CPU time every "
        f"{monitor.SECONDS:g} s, {sample / monitor.SECONDS / (os.cpu_count() or 1):.3%} of the node"
    )


def timer_calls(timer: StepTimer, steps: int = 2000) -> float:
    """Seconds of host time per step that the timer's calls take, callbacks included."""
    timer.start()
    began = time.perf_counter()
    for _ in range(steps):
        timer.begin()
        timer.now.local = timer.clock.mark()
        timer._all_gradients()
        timer.end(update=True)
        timer.wait()
    seconds = time.perf_counter() - began
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    timer.stop()
    return seconds / steps


def sampling(sources: list[monitor.Source], samples: int = 100) -> float:
    """Seconds of CPU time per sample."""
    began = time.process_time()
    for _ in range(samples):
        for source in sources:
            source.read()
    return (time.process_time() - began) / samples


if __name__ == "__main__":
    sys.exit(main())
