#!/usr/bin/env python3
"""Compare the input pipeline of this suite with the usual ones.

    python scripts/bench_input.py                    # 1,500 cut-out images
    python scripts/bench_input.py DATA               # images of DATA/train
    python scripts/bench_input.py --latency 0,1,5    # on a slow disk

Prints a Markdown table. It includes timm, DALI and SPDL if they are installed; SPDL also needs
FFmpeg's libraries (apt-get install ffmpeg). The pipelines take turns, so that a change of the
machine's speed affects all of them. Figures are medians over the rounds. Ratios compare CPU time,
which depends least on other programs. A faster pipeline makes more batches per round, so that each
pipeline runs equally long. CPU time includes the workers, from start to end, and this process,
which receives the batches. With -j 0 one thread of this process makes the batches.

--latency simulates a slow disk. It adds this many milliseconds to each open, to each stat by name,
and to each read that Linux's read-ahead of 128 KB would not have served. A preloaded library does
this (scripts/bench/latency.c, compiled with cc). With --latency, ratios compare images/s.
"""

import argparse
import math
import os
import shutil
import sys
import time
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils.start import launch

launch.prepare()  # before torch is imported, which takes seconds

from bench import photographs

from utils.start.option_types import (
    DocstringFormatter,
    Parser,
    count,
    list_of,
    number,
    place,
    positive,
)

BATCH = 64


def parse() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=DocstringFormatter)
    add = parser.add_argument
    add("data", nargs="?", type=Path, metavar="DATA", help="folder with train/CLASS/*.JPEG")
    add("--rounds", type=positive, default=5, metavar="N", help="runs of each pipeline (5)")
    text = f"batches of {BATCH} images in a round of the first row (40); faster rows make more"
    add("--batches", type=positive, default=40, metavar="N", help=text)
    add("-j", "--workers", type=count, default=2, metavar="N", help="data loading workers (2)")
    text = "compare a folder, tar files and pytorch/examples on disks with these delays"
    add("--latency", type=list_of(number(float, 0, 1000)), metavar="MS,MS", help=text)
    text = "images to make without DATA (1500)"
    add("--images", type=positive, default=1500, metavar="N", help=text)
    text = "folder of photographs to cut the images from; default: those of the Debian packages "
    text += ", ".join(photographs.PACKAGES)
    add("--photographs", type=place, metavar="DIR", help=text)
    cache, text = ROOT / "data/bench", "folder for these images and copies (%(default)s)"
    add("--cache", type=lambda x: place(x).resolve(), default=cache, metavar="DIR", help=text)
    return parser.parse_args()


if __name__ == "__main__":
    parse()  # before torch is imported
    launch.print_first_line(sys.stderr)

import numpy as np
import torch
from bench import commands, pipelines, rounds

from utils.data.opening import FOLDER, class_folders, open_source, source_kind
from utils.data.samplers import Batch, epoch_order
from utils.data.sources import Source
from utils.start.cores import usable_cores
from utils.start.errors import UserError

IDLE_SECONDS = 0.05
MOST = 12  # limit of a row's batches, as a multiple of the first row's
LATENCY, SLOW_PATHS = "LATENCY_US", "LATENCY_PATHS"  # read by scripts/bench/latency.c
FORMS = {"originals": "folder", "shards": "tar files"}
EXAMPLES = "pytorch/examples"
COLUMNS = {
    "images/s": ("images_per_s", ".0f"),
    "CPU ms per image": ("cpu_ms", ".2f"),
    "images/s per core": ("per_core", ".0f"),
}
Row = tuple[pipelines.Pipeline, Source, float]  # the float: latency in ms


def main() -> int:
    args = parse()
    torch.set_num_threads(1)
    if args.data:
        check(args.data / "train")
    if args.latency and SLOW_PATHS not in os.environ:
        restart_with_slow_disk(args)
    originals = (args.data or made_images(args)).resolve()
    sets = {"originals": originals}
    copies = {"shards": "shards"} if args.latency else {"shrink": "shrunk to 256"}
    for command, title in copies.items():
        source = open_source(originals / "train", class_folders(originals / "train"))
        size = f"{len(source) * source.sample_sizes()[0] / 1e9:.1f} GB in train/"
        sets[title] = args.cache / f"{command}_{zlib.crc32(os.fsencode(originals)):08x}"
        print(f"copying {originals} ({size}) to {sets[title]}, unless that was done", flush=True)
        words = [sys.executable, str(ROOT / "scripts/prepare_data.py"), command]
        commands.run([[*words, str(originals), str(sets[title])]], math.inf)
    rows: dict[str, Row] = {}
    for title, root in sets.items():
        source = open_source(root / "train", class_folders(root / "train"))
        print(f"{title}: {len(source)} images, {source.sample_sizes()[0] / 1000:.0f} KB on average")
        if not args.latency:
            pairs = pipelines.all_of(source).items()
            rows |= {f"{name}|{title}": (pipeline, source, 0) for name, pipeline in pairs}
            continue
        suite = pipelines.this_suite(source, regions=True)
        peer = {EXAMPLES: pipelines.examples(source)} if title == "originals" else {}
        for name, pipeline in ({"this suite": suite} | peer).items():
            for ms in args.latency:
                rows[f"{name}, {FORMS[title]}|{ms:g} ms"] = (pipeline, source, ms)
    print(f"torch {torch.__version__}, {usable_cores()} cores\n", flush=True)
    print(compare(rows, args))
    return 0


def check(train: Path) -> None:
    """Raise `UserError` unless ``train`` has class folders: other pipelines read files by name."""
    if source_kind(train) is not FOLDER:
        text = f"{train} holds tar files, which other pipelines do not read"
        raise UserError(f"{text}: give DATA with class folders, also with --latency")
    class_folders(train)


def restart_with_slow_disk(args: argparse.Namespace) -> None:
    """Start this program again with the library that makes reading DATA and the cache slow."""
    args.cache.mkdir(parents=True, exist_ok=True)
    library, source = args.cache / "latency.so", ROOT / "scripts/bench/latency.c"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise UserError("--latency needs a C compiler: apt-get install gcc")
    words = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    commands.run([words], math.inf)
    paths = ":".join(map(str, [args.cache, *([args.data.resolve()] if args.data else [])]))
    slow = {"LD_PRELOAD": str(library), SLOW_PATHS: paths, LATENCY: "0"}
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | slow)


def made_images(args: argparse.Namespace) -> Path:
    """Return the folder of images cut out of photographs; make it if it does not exist."""
    files = photographs.find(args.photographs)
    if not files:
        place = f"in {args.photographs}" if args.photographs else "on this machine"
        raise UserError(
            f"there are no photographs {place}: add DATA or --photographs DIR, or run "
            f"apt-get install {' '.join(photographs.PACKAGES)}"
        )
    print(f"{args.images} images cut out of {len(files)} photographs, e.g. {files[0]}", flush=True)
    return photographs.make(args.cache, files, args.images)


def time_it(pipeline: pipelines.Pipeline, batches: list[Batch], workers: int) -> tuple[float, ...]:
    """Return CPU seconds and seconds for the batches, including prefetches by threads."""
    cpu, wall = rounds.cpu_seconds(), time.perf_counter()
    iterator = pipeline(batches, workers)
    for _ in iterator:
        pass
    wall = time.perf_counter() - wall
    del iterator  # ends the workers
    used = -1.0
    while time.process_time() - used > IDLE_SECONDS / 10:
        used = time.process_time()
        time.sleep(IDLE_SECONDS)
    return rounds.cpu_seconds() - cpu, wall


def compare(rows: dict[str, Row], args: argparse.Namespace) -> str:
    """Time all pipelines on all sets, in rounds. Returns: the table."""
    fewest: int = args.batches
    batches = dict.fromkeys(rows, fewest)
    turns = dict.fromkeys(rows, 0)

    def figures_of(name: str) -> rounds.Figures:
        pipeline, source, latency = rows[name]
        images = batches[name] * BATCH
        order = np.resize(epoch_order(len(source), 0, turns[name]), images)
        parts = [Batch(turns[name], part) for part in np.split(order, batches[name])]
        os.environ[LATENCY] = f"{1000 * latency:.0f}"
        cpu, wall = time_it(pipeline, parts, args.workers)
        os.environ[LATENCY] = "0"
        turns[name] += 1
        figures = {"cpu_ms": 1000 * cpu / images, "images_per_s": images / wall}
        return figures | {"per_core": images / cpu, "wall_s": wall}

    # The first round warms up. Its times give the number of batches for the other rounds.
    warm = {name: one["wall_s"] for name, (one,) in rounds.measure(rows, 1, figures_of).items()}
    for name, wall in warm.items():
        longer = min(max(next(iter(warm.values())) / wall, 1), MOST)
        batches[name] = round(fewest * longer)
    measured = rounds.measure(warm, args.rounds, figures_of)
    first = next(iter(measured.values()))
    if not args.latency:
        for each in measured.values():
            rounds.add_ratio(each, first, "cpu_ms")
        columns = COLUMNS | {"ratio": ("ratio", ".2f")}
        return rounds.table(f"{args.workers} workers|images", measured, columns)
    for name, each in measured.items():
        same_delay = measured.get(f"{EXAMPLES}, folder|{name.partition('|')[2]}", [])
        rounds.add_ratio(each, first, "images_per_s")
        rounds.add_ratio(each, same_delay, "images_per_s", "to_examples")
    columns = COLUMNS | {"to the first row": ("ratio", ".2f")}
    columns |= {"to pytorch/examples": ("to_examples", ".2f")}
    return rounds.table(f"{args.workers} workers|delay", measured, columns)


if __name__ == "__main__":
    launch.run_main(main)
