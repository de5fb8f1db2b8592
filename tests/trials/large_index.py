#!/usr/bin/env python3
"""Index tar files with as many images as ImageNet has, and train on a part of them.

    python tests/trials/large_index.py [--images 1281167] [--output-dir DIR]

The images have one pixel and 100 bytes, in 1,000 classes: first in folders of one tar file, then in
1,000 tar files inside another. Prints seconds and CPU seconds for the index, made and then read
from the cache; the largest memory of the process (about 500 MB of it are torch); and the memory
that each of two loader workers has for itself after 20,000 images.
"""

import argparse
import io
import multiprocessing
import resource
import sys
import tarfile
import tempfile
import time
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from batches import batches_of
from PIL import Image

from utils.data.opening import class_folders, open_source
from utils.data.samplers import TrainSampler

CLASSES, BATCH, STEPS = 1000, 50, 400


def make(path: Path, images: int, nested: bool) -> None:
    """Write a tar file of the class folders, or of a tar file for each class."""

    def header(name: str, size: int) -> bytes:
        info = tarfile.TarInfo(name)
        info.size = size
        return info.tobuf(tarfile.USTAR_FORMAT)

    Image.new("RGB", (1, 1)).save(png := io.BytesIO(), "PNG")
    data = png.getvalue().ljust(512, b"\0")
    with open(path, "wb") as file:
        for label in range(CLASSES):
            name, own = f"n{label:08}", range(label, images, CLASSES)
            if nested:
                file.write(header(f"{name}.tar", 1024 * (len(own) + 1)))
            folder = "" if nested else f"train/{name}/"
            file.writelines(header(f"{folder}{name}_{i}.JPEG", 100) + data for i in own)
            file.write(bytes(1024 * nested))
        file.write(bytes(1024))


def measure(data: Path) -> None:
    """In a process of its own: print what the index and the workers take."""
    for title in ("made", "cached"):
        wall, cpu = time.perf_counter(), time.process_time()
        source = open_source(data / "train", class_folders(data / "train"))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
        print(f"{title}: {wall:.1f} s, {cpu:.1f} s of CPU, at most {peak:.0f} MB, {len(source)}")
    batches = batches_of(source, TrainSampler(len(source), BATCH, (0, 1), 1, 0), 2)
    for count in (1, STEPS):
        list(islice(batches, count))
        sizes = []
        for worker in multiprocessing.active_children():
            rows = Path(f"/proc/{worker.pid}/smaps_rollup").read_text().splitlines()
            sizes.append(sum(int(x.split()[1]) for x in rows if x.startswith("Private")) / 1000)
        print(f"MB of each worker's own after {count} batches: {sizes}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--images", type=int, default=1_281_167)
    parser.add_argument("--output-dir", type=Path, help="for 1.3 GB of tar files at a time")
    args = parser.parse_args()
    for nested in (False, True):
        with tempfile.TemporaryDirectory(dir=args.output_dir) as folder:
            make(Path(folder, "train.tar"), args.images, nested)
            time.sleep(3)  # the index of a file that has just changed is not kept
            print(f"{args.images} images in {'tar files in a' if nested else 'one'} tar file")
            spawn = multiprocessing.get_context("spawn")
            process = spawn.Process(target=measure, args=(Path(folder),))
            process.start()
            process.join()
            if process.exitcode:
                sys.exit("error: no index was made")


if __name__ == "__main__":
    main()
