#!/usr/bin/env python3
"""DDP beside FSDP on this machine: bytes of state, bytes on the wire, time, and weights.

    sudo .venv/bin/python scripts/bench/sharding.py -a vit_b_32 --image-size 64 -b 4 --processes 2,4

Each case runs imagenet_ddp.py or imagenet_fsdp.py with --dummy, as it is, in a network namespace
whose interface (lo) counts what the processes send each other, headers included. State is
counted in tensors, in the last step: what a process of the CPU occupies says little. Cases take
turns, round by round; times are medians. Weights after the last step are compared with DDP's.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from bench import network_table  # noqa: E402

from utils.option_types import positive  # noqa: E402

CASES = {
    "DDP": ("imagenet_ddp", "--comm", "fp32"),
    "FSDP full": ("imagenet_fsdp", "--reshard", "full"),
    "FSDP none": ("imagenet_fsdp", "--reshard", "none"),
}
MIB = 2**20


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-a", "--arch", default="vit_b_32", help="(%(default)s)")
    add("-b", "--batch-size", type=positive, default=4, help="of each process (%(default)s)")
    add("--image-size", type=positive, default=64, metavar="PX", help="(%(default)s)")
    add("--processes", default="2,4", metavar="LIST", help="(%(default)s)")
    add("--rounds", type=positive, default=3, metavar="N", help="(%(default)s)")
    add("--warm-up", type=positive, default=2, metavar="N", help="steps (%(default)s)")
    add("--steps", type=positive, default=4, metavar="N", help="timed (%(default)s)")
    add("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.inside:
        up = "ip link set lo up && exec " + shlex.join([sys.executable, *sys.argv, "--inside"])
        env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.call(["unshare", "--net", "sh", "-ec", up], env=os.environ | env)
    with tempfile.TemporaryDirectory() as place:
        measure(args, Path(place))
    return 0


def measure(args: argparse.Namespace, place: Path) -> None:
    """Run all cases and print the table."""
    for module, *_ in CASES.values():  # once; each process is a fork
        importlib.import_module(module)
    head = ["processes", "case", "parameters", "gradients", "optimizer", "wire", "ms", "CPU ms"]
    head, rows = [*head, "largest difference"], []
    for size in map(int, args.processes.split(",")):
        found: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
        for number in range(args.rounds):
            for case in CASES if number % 2 == 0 else reversed(CASES):
                print(f"... {size} processes, round {number + 1}, {case}", file=sys.stderr)
                found[case].append(run(args, case, size, place))
        rows += [row(size, case, rounds, place) for case, rounds in found.items()]
    print(network_table.as_text(head, rows))
    print(
        f"{args.arch}, {args.batch_size} images of {args.image_size} pixels per process, SGD with "
        f"momentum, float32, gloo; MiB of the first process, MiB on the wire per step of all, per "
        f"step ms and CPU ms of all, medians of {args.rounds} interleaved rounds"
    )


def run(args: argparse.Namespace, case: str, size: int, place: Path) -> dict[str, Any]:
    """One case, in as many processes: what the first has counted."""
    context = multiprocessing.get_context("fork")
    started = [
        context.Process(target=rank, args=(args, case, (one, size), place)) for one in range(size)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()
    if any(process.exitcode for process in started):
        sys.exit(f"{case} on {size} processes failed: {(place / 'rank0').read_text()[-2000:]}")
    return json.loads((place / "figures.json").read_text())


def rank(args: argparse.Namespace, case: str, where: tuple[int, int], folder: Path) -> None:
    """One process of a case."""
    import torch
    import torch.distributed as dist

    from utils.comm import pieces
    from utils.run.checkpoint import TrainState
    from utils.train import dummy

    sys.stdout = sys.stderr = open(folder / f"rank{where[0]}", "w", buffering=1)
    env = {"RANK": where[0], "LOCAL_RANK": where[0], "WORLD_SIZE": where[1]}
    env |= {"LOCAL_WORLD_SIZE": where[1], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    os.environ.update({key: str(value) for key, value in env.items()})
    torch.set_num_threads(1)
    module = importlib.import_module(CASES[case][0])
    state: TrainState | None = None
    done, first, last = 0, args.warm_up, args.warm_up + args.steps
    begin: tuple[float, ...] = ()
    figures: dict[str, Any] = {}

    def now() -> tuple[float, ...]:
        dist.barrier()
        return _sent(), time.perf_counter(), time.process_time()

    def before(*_: Any) -> None:
        if done == last - 1:
            figures.update(pieces.bytes_held(state.model, state.optimizer))

    def after(*_: Any) -> None:
        nonlocal done, begin
        done += 1
        if done == first:
            begin = now()
        elif done == last:
            spent = [(b - a) / args.steps for a, b in zip(begin, now(), strict=True)]
            cpu = torch.tensor(spent[2])
            dist.all_reduce(cpu)
            figures.update(wire=spent[0], ms=1000 * spent[1], cpu_ms=1000 * float(cpu))

    def watched(*given: Any, **more: Any) -> TrainState:
        nonlocal state
        state = TrainState(*given, **more)
        state.optimizer.register_step_pre_hook(before)
        state.optimizer.register_step_post_hook(after)
        return state

    options = ["-a", args.arch, "-b", args.batch_size, "--image-size", args.image_size]
    options += ["--dummy", "--classes", 1000, "--amp", "off", "--output-dir", f"{folder}/runs"]
    options += ["--no-channels-last", "--lr", 0.001, *CASES[case][1:]]
    steps = {"WARMUP_STEPS": args.warm_up, "TIMED_STEPS": args.steps}

    def train(*given: Any) -> int:
        code = module_train(*given)
        weights = {name: pieces.whole(value) for name, value in state.full_weights().items()}
        if dist.get_rank() == 0:
            torch.save(weights, folder / f"{case}.pt")
            (folder / "figures.json").write_text(json.dumps(figures))
        return code

    module_train = module.train
    with (
        mock.patch.object(sys, "argv", [module.__name__, *map(str, options)]),
        mock.patch.multiple(dummy, **steps),
        mock.patch.multiple(module, TrainState=watched, train=train),
    ):
        if module.main():
            raise SystemExit(f"{case} has failed")


def _sent() -> int:
    """Bytes that the loopback interface of this network namespace has carried."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith("lo:"))
    return int(line.split()[9])


def row(size: int, case: str, rounds: list[dict[str, Any]], place: Path) -> list[str]:
    """A line of the table."""
    import torch

    ours, theirs = (torch.load(place / f"{name}.pt") for name in (case, "DDP"))
    far = max(float((w - theirs[n]).abs().max()) for n, w in ours.items() if w.numel())
    shown = [str(size), case]
    shown += [f"{rounds[-1][kind] / MIB:.1f}" for kind in ("parameters", "gradients", "optimizer")]
    shown.append(f"{median(one['wire'] for one in rounds) / MIB:.1f}")
    shown += [f"{median(one[key] for one in rounds):.0f}" for key in ("ms", "cpu_ms")]
    return [*shown, "-" if case == "DDP" else f"{far:.2g}"]


if __name__ == "__main__":
    sys.exit(main())
