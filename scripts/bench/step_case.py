#!/usr/bin/env python3
"""One case of scripts/bench_step.py: a training script's own loop on synthetic batches.

    python scripts/bench/step_case.py imagenet_nd.py --steps 20 -- -a resnet18 -b 32
    torchrun --standalone --nproc_per_node=2 scripts/bench/step_case.py imagenet_ddp.py -- -b 32

The script runs as it is, epoch loop, metrics, printed lines and stop poll included, except that its
`build_loaders` gives the same batch again and again, on the device and in the precision that the
script asks for. The last line, of rank 0, is JSON: see `Clock.figures`.
"""

import argparse
import importlib
import itertools
import json
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from utils.data.dataset import Reading  # noqa: E402
from utils.data.loaders import BadFiles, Loaders  # noqa: E402
from utils.launch.world import World  # noqa: E402
from utils.option_types import positive  # noqa: E402
from utils.samplers import EvalSampler, TrainSampler  # noqa: E402

CLASSES = 1000
FREE = 3  # steps that a host may run ahead of a GPU without having to wait for it


class Clock:
    """Times the steps between the calls of `step`: the first ``warm_up`` of them are left out.

    On a GPU some more come at the end, for the host's own time.
    """

    def __init__(self, device: torch.device, warm_up: int, steps: int):
        self.device, self.warm_up, self.last = device, warm_up, warm_up + steps
        self.total = self.last + (4 * FREE if device.type == "cuda" else 0)  # steps to make
        self.count = 0
        self.began = self.cpu = self.mark = 0.0
        self.seconds = self.cpu_seconds = float("nan")
        self.host: list[float] = []
        self.thread: list[float] = []  # the CPU time of the main thread

    def step(self) -> None:
        """A step begins; one more call than there are steps."""
        done, self.count = self.count, self.count + 1
        if self.warm_up <= done <= self.last and self.total == self.last:
            self.thread.append(time.thread_time())
        if done == self.warm_up:
            self._wait()
            self.began, self.cpu = time.perf_counter(), time.process_time()
        if done == self.last:
            self._wait()
            self.seconds = time.perf_counter() - self.began
            self.cpu_seconds = time.process_time() - self.cpu
        if done < self.last or self.total == self.last:
            return
        # Some steps that begin with nothing to wait for.
        if (done - self.last) % FREE == 0:
            if done > self.last:
                self.host.append((time.perf_counter() - self.mark) / FREE)
            self._wait()
            self.mark = time.perf_counter()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def figures(self, batch: int, processes: int = 1) -> dict[str, Any]:
        """What the steps took, with ``batch`` images in each process.

        ``images_per_s`` of all processes; of this one ``ms`` and ``cpu_ms`` (all its threads) per
        step, ``host_ms`` until a step's work is started, peak ``memory_bytes``. On the CPU
        ``host_ms`` is the main thread's own time for a step, the lowest tenth of all: what other
        programs take does not count.
        """
        steps = self.last - self.warm_up
        host = statistics.median(self.host) if self.host else float("nan")
        if len(self.thread) > 2:
            spent = [b - a for a, b in itertools.pairwise(self.thread)]
            host = statistics.quantiles(spent, n=10)[0]
        if self.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self.device)
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "images_per_s": processes * batch * steps / self.seconds,
            "ms": 1000 * self.seconds / steps,
            "cpu_ms": 1000 * self.cpu_seconds / steps,
            "host_ms": 1000 * host,
            "memory_bytes": memory,
        }


class Waits(Clock):
    """Notes, instead of times, where the host has to wait for a GPU after the first steps."""

    def __init__(self, device: torch.device, warm_up: int, steps: int):
        super().__init__(device, warm_up, steps)
        self.total = self.last
        self.caught = warnings.catch_warnings(record=True)
        self.seen: list[Any] = []

    def step(self) -> None:
        """A step begins."""
        if self.count == self.warm_up:
            self.seen = self.caught.__enter__()
            warnings.simplefilter("always")
            self._watch("warn")
        self.count += 1
        if self.count > self.last:
            self._watch("default")
            self.caught.__exit__(None, None, None)

    def _watch(self, mode: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_sync_debug_mode(mode)

    def figures(self, batch: int, processes: int = 1) -> dict[str, Any]:
        """``waits``: file and line of each."""
        found = [one for one in self.seen if "synchroniz" in str(one.message)]
        return {"waits": [f"{one.filename}:{one.lineno}" for one in found]}


class Synthetic:
    """In place of `utils.data.loaders.Batches`: one batch, again and again."""

    def __init__(self, sampler: Any, batch: tuple[Tensor, Tensor], count: int, clock: Clock | None):
        self.sampler, self.batch, self.count, self.clock = sampler, batch, count, clock
        self.bad = BadFiles(_NoIndex(), 0)
        self.start_count()

    def start_count(self) -> None:
        self.waited, self.reading = 0.0, Reading()

    def use(self, wanted: Any) -> None:
        pass

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.count):
            if self.clock is not None:
                self.clock.step()
            yield self.batch
        if self.clock is not None:
            self.clock.step()


class _NoIndex:
    """In place of an index of image files."""

    def fingerprint(self) -> str:
        return "synthetic"


def batch_of(
    place: tuple[torch.device, torch.memory_format, torch.dtype], size: int, pixels: int
) -> tuple[Tensor, Tensor]:
    """Random images ``dtype`` [size, 3, pixels, pixels] and targets int64 [size]."""
    device, layout, dtype = place
    generator = torch.Generator(device).manual_seed(0)
    images = torch.randn(size, 3, pixels, pixels, generator=generator, device=device)
    images = images.to(dtype=dtype, memory_format=layout)
    return images, torch.randint(0, CLASSES, (size,), generator=generator, device=device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("script", help="imagenet_nd.py, ...")
    parser.add_argument("--warm-up", type=positive, default=3, metavar="N")
    parser.add_argument("--steps", type=positive, default=10, metavar="N")
    text = "name the lines that make the host wait for a GPU after the warm-up, instead of times"
    parser.add_argument("--count-waits", action="store_true", help=text)
    own, rest = parser.parse_known_args()
    script = importlib.import_module(Path(own.script).stem)
    made: list[Any] = []

    def build_loaders(args: Any, world: World, dtype: torch.dtype) -> Loaders:
        batch = args.batch_size
        clock = (Waits if own.count_waits else Clock)(world.device, own.warm_up, own.steps)
        made.extend((clock, batch, world))
        data = batch_of((world.device, args.memory_format, dtype), batch, args.image_size)
        ranks, steps = (world.rank, world.size), clock.total
        train = TrainSampler(batch * world.size * steps, batch, ranks, 1, args.seed)
        val = EvalSampler(world.size, 1, ranks)
        return Loaders(
            [str(number) for number in range(CLASSES)],
            train=Synthetic(train, data, steps, clock),
            val=Synthetic(val, (data[0][:1], data[1][:1]), 1, None),
        )

    script.build_loaders = build_loaders
    with tempfile.TemporaryDirectory() as folder:
        options = ["--epochs", "1", "--lr", "0.001", "--output-dir", folder, "--name", "case"]
        sys.argv = [own.script, *(word for word in rest if word != "--"), *options, folder]
        code = script.main()
    clock, batch, world = made
    if world.is_main:
        print(json.dumps(clock.figures(batch, world.size)), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
