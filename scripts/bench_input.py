#!/usr/bin/env python3
"""Compare the input pipeline of this suite with the usual ones.

    python scripts/bench_input.py             # on 1,500 images cut out of photographs
    python scripts/bench_input.py DATA        # on the training images of DATA
    python scripts/bench_input.py --latency 0,1,5   # folder and tar files on a slow disk

Prints a Markdown table. It includes timm, DALI and SPDL if they are installed. The pipelines take
turns, so that a change of the machine's speed affects all of them. Figures are medians over the
rounds. Ratios compare CPU time, which other programs disturb least. A faster pipeline makes more
batches per round, so that all take about as long. CPU time includes the workers, from start to
end, and this process, which receives the batches. With -j 0 one thread of this process makes them.

--latency simulates a slow disk. It delays each open, each stat by name, and each read that Linux's
read-ahead of 128 KB would not have served, by this many milliseconds. A preloaded library does this
(scripts/bench/latency.c, compiled with cc). With --latency, ratios compare images/s.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils import launch

launch.prepare()  # before torch is imported, which takes seconds

import numpy as np
import torch
from bench import photographs, pipelines, rounds
from bench.commands import last_lines

from utils.errors import UserError
from utils.folder import Source, class_folders, open_source
from utils.option_types import count, number, positive
from utils.samplers import Batch, epoch_order

BATCH = 64
IDLE_SECONDS = 0.05
MOST = 12  # times the batches of the first row
LATENCY, SLOW_PATHS = "LATENCY_US", "LATENCY_PATHS"  # read by scripts/bench/latency.c
FORMS = {"originals": "folder", "shards": "tar files"}
EXAMPLES = "pytorch/examples, folder"


class Row(NamedTuple):
    """What a row of the table measures."""

    pipeline: pipelines.Pipeline
    index: Source
    latency: float = 0  # ms


def main() -> int:
    args = parse()
    torch.set_num_threads(1)
    cache = Path(args.cache).resolve()
    if args.latency and SLOW_PATHS not in os.environ:
        with_slow_disk([cache, *([Path(args.data).resolve()] if args.data else [])], cache)
    originals = (Path(args.data) if args.data else made_images(args)).resolve()
    number = zlib.crc32(os.fsencode(originals))
    sets = {"originals": originals}
    copies = {"shrink": "shrunk to 256", "pack": "packed at 256"}
    for command, title in ({"shards": "shards"} if args.latency else copies).items():
        sets[title] = prepared(command, originals, cache / f"{command}_{number:08x}")
    rows = {}
    for title, root in sets.items():
        index = open_source(root / "train", class_folders(root / "train"))
        print(f"{title}: {len(index)} images, {index.sample_sizes()[0] / 1000:.0f} KB on average")
        if not args.latency:
            for name, pipeline in pipelines.all_of(index).items():
                rows[f"{name}|{title}"] = Row(pipeline, index)
            continue
        suite = {f"this suite, {FORMS[title]}": pipelines.ThisSuite(index, regions=True)}
        peer = {EXAMPLES: pipelines.Usual(index)} if title == "originals" else {}
        for name, pipeline in (suite | peer).items():
            rows |= {f"{name}|{ms:g} ms": Row(pipeline, index, ms) for ms in args.latency}
    print(f"torch {torch.__version__}, {launch.usable_cores()} cores\n", flush=True)
    print(compare(rows, args))
    return 0


def with_slow_disk(paths: list[Path], cache: Path) -> NoReturn:
    """Start this program again with the library that makes files in ``paths`` slow."""
    cache.mkdir(parents=True, exist_ok=True)
    library, source = cache / "latency.so", ROOT / "scripts" / "bench" / "latency.c"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise UserError("--latency needs a C compiler: apt-get install gcc")
    line = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"cannot compile {source}: {last_lines(done)}")
    slow = {"LD_PRELOAD": str(library), SLOW_PATHS: ":".join(map(str, paths)), LATENCY: "0"}
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | slow)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("data", nargs="?", metavar="DATA", help="folder with train/CLASS/*.JPEG")
    add("--rounds", type=positive, default=5, metavar="N", help="runs of each pipeline (5)")
    text = f"batches of {BATCH} images in a round of the first row (40); faster rows make more"
    add("--batches", type=positive, default=40, metavar="N", help=text)
    add("-j", "--workers", type=count, default=2, metavar="N", help="data loading workers (2)")
    text = "compare a folder, tar files and pytorch/examples on disks with these delays"
    add("--latency", type=latencies, metavar="MS,MS", help=text)
    text = "images to make without DATA (1500)"
    add("--images", type=positive, default=1500, metavar="N", help=text)
    packages = ", ".join(photographs.PACKAGES)
    text = (
        f"folder of photographs to cut them from; default: those of the Debian packages {packages}"
    )
    add("--photographs", type=Path, metavar="DIR", help=text)
    folder, text = str(ROOT / "data" / "bench"), "for these images and copies"
    add("--cache", default=folder, metavar="DIR", help=text)
    return parser.parse_args()


def latencies(text: str) -> list[float]:
    """The type of ``--latency``: milliseconds, such as 0,1,5."""
    return [number(float, 0, 1000)(part) for part in text.split(",")]


def made_images(args: argparse.Namespace) -> Path:
    """The folder of images cut out of photographs, made if it does not exist."""
    files = photographs.find(args.photographs)
    if not files:
        place = f"in {args.photographs}" if args.photographs else "on this machine"
        raise UserError(
            f"there are no photographs {place}: add DATA or --photographs DIR, or run "
            f"apt-get install {' '.join(photographs.PACKAGES)}"
        )
    print(f"{args.images} images cut out of {len(files)} photographs, e.g. {files[0]}", flush=True)
    return photographs.make(Path(args.cache), files, args.images)


def prepared(command: str, originals: Path, out: Path) -> Path:
    """A copy of ``originals`` by prepare_data.py ``command``, with its defaults."""
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


def compare(rows: dict[str, Row], args: argparse.Namespace) -> str:
    """Time all pipelines on all sets, in rounds. Returns the table."""
    batches = dict.fromkeys(rows, args.batches)
    turns = dict.fromkeys(rows, 0)

    def figures_of(name: str) -> rounds.Figures:
        row = rows[name]
        images = batches[name] * BATCH
        order = batches_of(row.index, batches[name], turns[name])
        os.environ[LATENCY] = f"{1000 * row.latency:.0f}"
        cpu, wall = time_it(row.pipeline, order, args.workers)
        os.environ[LATENCY] = "0"
        turns[name] += 1
        figures = {"cpu_ms": 1000 * cpu / images, "images_per_s": images / wall}
        return figures | {"per_core": images / cpu, "wall_s": wall}

    # The first round warms up, and tells how many batches take as long as the first row's.
    warm = {row: one["wall_s"] for row, (one,) in rounds.measure(rows, 1, figures_of).items()}
    for row, wall in warm.items():
        longer = min(max(next(iter(warm.values())) / wall, 1), MOST)
        batches[row] = round(args.batches * longer)
    measured = rounds.measure(warm, args.rounds, figures_of)
    first = next(iter(measured.values()))
    columns = {
        "images/s": rounds.middle("images_per_s", ".0f"),
        "CPU ms per image": rounds.middle("cpu_ms", ".2f"),
        "images/s per core": rounds.middle("per_core", ".0f"),
    }
    if not args.latency:
        columns["ratio"] = rounds.speed_up(first, "cpu_ms")
        return rounds.table(f"{args.workers} workers|images", measured, columns)
    for name, figures in measured.items():
        same_delay = measured.get(f"{EXAMPLES}|{name.partition('|')[2]}", [])
        for one, other in zip(figures, same_delay, strict=False):
            one["to_examples"] = one["images_per_s"] / other["images_per_s"]
    columns["to the first row"] = rounds.speed_up(first, "images_per_s", rate=True)
    columns["to pytorch/examples"] = rounds.middle("to_examples", ".2f")
    return rounds.table(f"{args.workers} workers|delay", measured, columns)


if __name__ == "__main__":
    launch.run_main(main)
