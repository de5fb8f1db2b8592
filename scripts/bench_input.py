#!/usr/bin/env python3
"""Measure the input pipeline of this suite beside the usual ones.

    python scripts/bench_input.py             # on 1,500 images cut out of photographs
    python scripts/bench_input.py DATA        # on the training images of DATA

Prints one Markdown table, with timm and DALI if they are installed. Rounds of the pipelines
alternate, so that a change of the machine's speed affects all of them. The figures are medians. The
ratios are those of CPU time, which other programs on the machine disturb least. A faster pipeline
makes more batches in a round, so that all rounds take about as long. CPU time is that of the
workers, from start to end, and of this process, which receives the batches. With -j 0 one thread of
this process makes them.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils import launch

launch.prepare()  # before torch is imported, which takes seconds

import numpy as np
import torch
from bench import photographs, pipelines
from compare.table import markdown_table

from utils.errors import UserError
from utils.folder import Source, class_folders, open_source
from utils.option_types import count, positive
from utils.samplers import Batch, epoch_order

BATCH = 64
IDLE_SECONDS = 0.05
MOST = 12  # times the batches of the first row


def main() -> int:
    args = parse()
    torch.set_num_threads(1)
    originals = Path(args.data) if args.data else made_images(args)
    name = zlib.crc32(os.fsencode(originals.resolve()))
    sets = {"originals": originals}
    for command, title in (("shrink", "shrunk to 256"), ("pack", "packed at 256")):
        sets[title] = prepared(command, originals, Path(args.cache) / f"{command}_{name:08x}")
    rows = []
    for title, root in sets.items():
        index = open_source(root / "train", class_folders(root / "train"))
        print(f"{title}: {len(index)} images, {index.sample_sizes()[0] / 1000:.0f} KB on average")
        rows += [
            {"names": (name, title), "make": pipeline, "index": index, "batches": args.batches}
            for name, pipeline in pipelines.all_of(index).items()
        ]
    head = [f"{args.workers} workers", "images", "images/s", "CPU ms per image", "ratio"]
    print(f"torch {torch.__version__}, {launch.usable_cores()} cores\n", flush=True)
    print(markdown_table(head, compare(rows, args)))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("data", nargs="?", metavar="DATA", help="folder with train/CLASS/*.JPEG")
    add("--rounds", type=positive, default=5, metavar="N", help="of each pipeline (5)")
    add(
        "--batches",
        type=positive,
        default=40,
        metavar="N",
        help=f"of {BATCH} images, in a round of the first row (40); faster pipelines make more",
    )
    add("-j", "--workers", type=count, default=2, metavar="N", help="(2)")
    add("--images", type=positive, default=1500, metavar="N", help="to make (1500)")
    add(
        "--photographs",
        type=Path,
        metavar="DIR",
        help="where to cut them from; default: those of the Debian packages "
        + ", ".join(photographs.PACKAGES),
    )
    add("--cache", default=str(ROOT / "data" / "bench"), metavar="DIR")
    return parser.parse_args()


def made_images(args: argparse.Namespace) -> Path:
    """The folder of images cut out of photographs, made if it does not exist."""
    found = photographs.find(args.photographs)
    if not found:
        place = f"in {args.photographs}" if args.photographs else "on this machine"
        raise UserError(
            f"found no photographs {place}: give DATA, or --photographs DIR, or "
            f"apt-get install {' '.join(photographs.PACKAGES)}"
        )
    print(f"{args.images} images cut out of {len(found)} photographs, e.g. {found[0]}", flush=True)
    return photographs.make(Path(args.cache), found, args.images)


def prepared(command: str, originals: Path, out: Path) -> Path:
    """A copy of ``originals`` with a short side of 256 pixels, by prepare_data.py ``command``."""
    line = [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), command, originals, out]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{command}: {done.stderr.strip().removeprefix('error: ')}")
    return out


def batches_of(index: Source, number: int, epoch: int) -> list[Batch]:
    order = np.resize(epoch_order(len(index), 0, epoch), number * BATCH)
    return [Batch(epoch, part) for part in np.split(order, number)]


def cpu_seconds() -> float:
    """CPU seconds of this process and of its ended children."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def time_it(pipeline: pipelines.Pipeline, batches: list[Batch], workers: int) -> tuple[float, ...]:
    """CPU seconds and seconds that the batches take, including what threads prefetch meanwhile."""
    cpu, wall = cpu_seconds(), time.perf_counter()
    iterator = pipeline(batches, workers)
    for _ in iterator:
        pass
    wall = time.perf_counter() - wall
    del iterator  # with it the workers end
    used = -1.0
    while time.process_time() - used > IDLE_SECONDS / 10:
        used = time.process_time()
        time.sleep(IDLE_SECONDS)
    return cpu_seconds() - cpu, wall


def compare(rows: list[dict[str, Any]], args: argparse.Namespace) -> list[tuple[object, ...]]:
    """Time all pipelines on all sets, in rounds. Returns the rows of the table."""
    costs: list[list[float]] = [[] for _ in rows]  # CPU ms per image, round by round
    speeds: list[list[float]] = [[] for _ in rows]
    slowest = 0.0
    for turn in range(-1, args.rounds):
        for row, cost, speed in zip(rows, costs, speeds, strict=True):
            batches = batches_of(row["index"], row["batches"], max(turn, 0))
            cpu, wall = time_it(row["make"], batches, args.workers)
            if turn < 0:  # warms up, and tells how many batches take as long as the first row's
                slowest = slowest or wall
                row["batches"] = round(args.batches * min(max(slowest / wall, 1), MOST))
            else:
                cost.append(1000 * cpu / len(batches) / BATCH)
                speed.append(len(batches) * BATCH / wall)
    table = []
    for row, cost, speed in zip(rows, costs, speeds, strict=True):
        ratio = statistics.median(base / c for base, c in zip(costs[0], cost, strict=True))
        figures = f"{statistics.median(speed):.0f}", f"{statistics.median(cost):.2f}"
        table.append((*row["names"], *figures, f"{ratio:.2f}"))
    return table


if __name__ == "__main__":
    launch.run_main(main)
