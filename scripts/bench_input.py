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
import subprocess
import sys
import time
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils import launch

launch.prepare()  # before torch is imported, which takes seconds

import numpy as np
import torch
from bench import photographs, pipelines, rounds

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
    rows = {}
    for title, root in sets.items():
        index = open_source(root / "train", class_folders(root / "train"))
        print(f"{title}: {len(index)} images, {index.sample_sizes()[0] / 1000:.0f} KB on average")
        for name, pipeline in pipelines.all_of(index).items():
            rows[f"{name}|{title}"] = pipeline, index
    print(f"torch {torch.__version__}, {launch.usable_cores()} cores\n", flush=True)
    print(compare(rows, args))
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


def compare(rows: dict[str, tuple[pipelines.Pipeline, Source]], args: argparse.Namespace) -> str:
    """Time all pipelines on all sets, in rounds. Returns the table."""
    batches = dict.fromkeys(rows, args.batches)
    turns = dict.fromkeys(rows, 0)

    def figures_of(row: str) -> rounds.Figures:
        pipeline, index = rows[row]
        images = batches[row] * BATCH
        cpu, wall = time_it(pipeline, batches_of(index, batches[row], turns[row]), args.workers)
        turns[row] += 1
        return {"cpu_ms": 1000 * cpu / images, "images_per_s": images / wall, "wall_s": wall}

    # The first round warms up, and tells how many batches take as long as the first row's.
    warm = {row: one["wall_s"] for row, (one,) in rounds.measure(rows, 1, figures_of).items()}
    for row, wall in warm.items():
        longer = min(max(next(iter(warm.values())) / wall, 1), MOST)
        batches[row] = round(args.batches * longer)
    found = rounds.measure(warm, args.rounds, figures_of)
    columns = {
        "images/s": rounds.middle("images_per_s", ".0f"),
        "CPU ms per image": rounds.middle("cpu_ms", ".2f"),
        "ratio": rounds.speed_up(next(iter(found.values())), "cpu_ms"),
    }
    return rounds.table(f"{args.workers} workers|images", found, columns)


if __name__ == "__main__":
    launch.run_main(main)
