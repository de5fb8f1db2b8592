#!/usr/bin/env python3
"""How fast do images come in? This suite's input path against the usual pipelines.

    python scripts/bench_input.py             # on 1,500 images cut out of photographs
    python scripts/bench_input.py DATA        # on the training images of DATA
    python scripts/bench_input.py --profile   # where the time of a worker goes

timm and DALI are compared with where they are installed. Rounds of the pipelines alternate, so that
a change of the machine's speed affects all of them; the figures are medians, and the ratios are
those of CPU time, which other programs on the machine disturb least. In a round a faster pipeline
makes more batches, so that all take about as long, and starting weighs the same. One core: batches
are made in this process by one thread. Workers: the CPU time of the workers, from their start to
their end, and of this process, which receives the batches; DALI's are threads that have been
started.
"""

import argparse
import datetime
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import utils.launch.installed  # noqa: E402, F401 (a missing package becomes one sentence)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from bench import big_index, photographs, pipelines, worker_profile  # noqa: E402
from prepare import restart  # noqa: E402

from utils.data.index import ImageIndex, class_folders  # noqa: E402
from utils.errors import UserError  # noqa: E402
from utils.launch import supervise  # noqa: E402
from utils.option_types import positive  # noqa: E402
from utils.samplers import Batch, epoch_order  # noqa: E402

BATCH = 64
IDLE_SECONDS = 0.05
MOST = 12  # times the batches of the first row
RESTARTS = "restart markers"  # the originals with them: nothing to gain for the other pipelines


def main() -> int:
    args = parse()
    torch.set_num_threads(1)
    originals = Path(args.data) if args.data else made_images(args)
    name = zlib.crc32(os.fsencode(originals.resolve()))
    shrunk = prepared("shrink", originals, Path(args.cache) / f"shrunk_{name:08x}")
    packed = prepared("pack", originals, Path(args.cache) / f"packed_{name:08x}")
    result: dict[str, Any] = {"command": " ".join(sys.argv), "machine": machine()}
    sets = {"originals": originals, "shrunk to 256": shrunk, "packed at 256": packed}
    if shutil.which(restart.COMMAND[0]):
        sets[RESTARTS] = prepared("restart", originals, Path(args.cache) / f"restart_{name:08x}")
    indices = {name: index_of(root / "train") for name, root in sets.items()}
    result["images"] = {name: describe(name, index) for name, index in indices.items()}
    if args.profile:
        result["profile"] = profile(indices, args)
        return write(result, args)
    result["one core"] = compare(indices, args, workers=0)
    print_table("one core", result["one core"])
    args.batches *= 8  # so that the workers' start weighs little
    result["workers"] = compare(indices, args, args.workers)
    print_table(f"{args.workers} worker{'s' * (args.workers > 1)}", result["workers"])
    result |= first_batch(indices["originals"], args.workers) | big_index.measure()
    for key in ("first_batch_s", "index_load_s", "worker_growth_mb"):
        print(f"{key}: {result[key]:.3g}")
    return write(result, args)


def write(result: dict[str, Any], args: argparse.Namespace) -> int:
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", metavar="DATA", help="folder with train/CLASS/*.JPEG")
    parser.add_argument(
        "--rounds", type=positive, default=5, metavar="N", help="of each pipeline (5)"
    )
    parser.add_argument(
        "--batches",
        type=positive,
        default=5,
        metavar="N",
        help=f"of {BATCH} images, in a round of the first row (5; eight times as many for the "
        "workers); faster pipelines make more",
    )
    parser.add_argument("-j", "--workers", type=positive, default=2, metavar="N", help="(2)")
    parser.add_argument("--images", type=positive, default=1500, metavar="N", help="to make (1500)")
    parser.add_argument(
        "--photographs",
        type=Path,
        metavar="DIR",
        help="where to cut them from; default: those of the Debian packages "
        + ", ".join(photographs.PACKAGES),
    )
    parser.add_argument("--cache", default=str(ROOT / "data" / "bench"), metavar="DIR")
    parser.add_argument(
        "--profile", action="store_true", help="show what a worker of this suite does, and end"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures into FILE")
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
    cache = Path(args.cache)
    print(f"{args.images} images cut out of {len(found)} photographs, e.g. {found[0]}", flush=True)
    cache.mkdir(parents=True, exist_ok=True)
    return photographs.make(cache, found, args.images)


def prepared(command: str, originals: Path, out: Path) -> Path:
    """A copy of ``originals`` with a short side of 256 pixels, by prepare_data.py ``command``."""
    line = [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), command]
    done = subprocess.run(
        [*line, str(originals), str(out)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UserError(f"{command}: {done.stderr.strip().removeprefix('error: ')}")
    return out


def index_of(root: Path) -> ImageIndex:
    return ImageIndex(root, class_folders(root))


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": supervise.usable_cores(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def describe(name: str, index: ImageIndex) -> dict[str, float]:
    """Print how many images there are, and of which size; the same as figures."""
    mean, _ = index.sample_sizes()
    print(f"{name}: {len(index)} images, {mean / 1000:.0f} KB on average")
    return {"number": len(index), "mean_bytes": mean}


def batches_of(index: ImageIndex, number: int, epoch: int) -> list[Batch]:
    order = np.resize(epoch_order(len(index), 0, epoch), number * BATCH)
    return [Batch(epoch, part) for part in np.split(order, number)]


def profile(indices: dict[str, ImageIndex], args: argparse.Namespace) -> dict[str, Any]:
    """What the parts of a worker's work cost: medians of the rounds, for each set of images."""
    found = {}
    for name, index in indices.items():
        for title, pipeline in pipelines.of_this_suite(index).items():
            rounds = [
                worker_profile.of(pipeline.dataset, batches_of(index, args.batches, turn))
                for turn in range(args.rounds)
            ]
            parts = {p: statistics.median(r.get(p, 0.0) for r in rounds) for p in rounds[0]}
            worker_profile.print_table(f"{title}, {name}", parts)
            found[f"{title}, {name}"] = parts
    return found


def cpu_seconds() -> float:
    """Of this process and of those of its children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def time_it(pipeline: pipelines.Pipeline, batches: list[Batch], workers: int) -> tuple[float, ...]:
    """CPU seconds and seconds that the batches take.

    What threads make in advance, as DALI's do, is counted where it was asked for.
    """
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


def offered(images: str, index: ImageIndex) -> dict[str, pipelines.Pipeline]:
    """The pipelines to compare on a set of images."""
    choose = pipelines.of_this_suite if images == RESTARTS else pipelines.all_of
    return dict(choose(index))


def compare(indices: dict[str, ImageIndex], args: argparse.Namespace, workers: int) -> list[Any]:
    """Rounds of every pipeline on every set: one row each, with the figures of each round."""
    rows: list[dict[str, Any]] = [
        {"pipeline": name, "images": images, "make": pipeline, "index": index, "rounds": []}
        | {"batches": args.batches}
        for images, index in indices.items()
        for name, pipeline in offered(images, index).items()
    ]
    slowest = 0.0
    for turn in range(-1, args.rounds):
        for row in rows:
            batches = batches_of(row["index"], row["batches"], max(turn, 0))
            cpu, wall = time_it(row["make"], batches, workers)
            number = row["batches"] * BATCH
            if turn < 0:  # warms up, and tells how many batches take as long as the first row's
                slowest = slowest or wall
                row["batches"] = round(args.batches * min(max(slowest / wall, 1), MOST))
            else:
                row["rounds"].append({"cpu_ms": 1000 * cpu / number, "images_per_s": number / wall})
    base: list[float] = []
    for row in rows:
        del row["make"], row["index"]
        costs = [turn["cpu_ms"] for turn in row["rounds"]]
        base = base or costs  # the first row: the usual pipeline on the originals
        row["cpu_ms"] = statistics.median(costs)
        row["images_per_s"] = statistics.median(turn["images_per_s"] for turn in row["rounds"])
        row["ratio"] = statistics.median(b / c for b, c in zip(base, costs, strict=True))
    return rows


def print_table(title: str, rows: list[Any]) -> None:
    print(f"\n{title:20}{'images':16}{'images/s':>10}{'CPU ms':>9}{'ratio':>8}")
    for row in rows:
        print(
            f"{row['pipeline']:20}{row['images']:16}{row['images_per_s']:10.0f}"
            f"{row['cpu_ms']:9.2f}{row['ratio']:8.2f}"
        )
    print(flush=True)


def first_batch(index: ImageIndex, workers: int) -> dict[str, float]:
    """Seconds from asking for batches to having the first."""
    batches = [Batch(0, np.arange(BATCH) % len(index))] * (2 * workers)
    began = time.perf_counter()
    next(pipelines.all_of(index)["this suite"](batches, workers))
    return {"first_batch_s": time.perf_counter() - began}


if __name__ == "__main__":
    supervise.run_main(main)
