"""One node by itself: GPUs, limits, disk space, the data set, and how fast it is read."""

import argparse
import contextlib
import os
import random
import resource
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from checks.findings import ERROR, OK, WARNING, Finding
from torchvision.models import get_model_weights

from utils.data.images import ImageBatches
from utils.data.opening import check_same_classes, class_folders, has_classes, open_source
from utils.data.samplers import UNREADABLE, Batch
from utils.data.sources import Source
from utils.start import addresses, gpu_check
from utils.start.cores import usable_cores
from utils.start.errors import UserError

# Images/s that one GPU trains: ResNet-50 in mixed precision, published or estimated.
RESNET50_IMAGES_PER_S = {"T4": 400, "V100": 1200, "A100": 2470, "H100": 4900, "H200": 4900}
RESNET50_GFLOPS = 4.09  # forward pass of one image of 224 x 224


def check_machine(args: argparse.Namespace, gpus: list[str]) -> Iterator[Finding]:
    """Check GPUs and limits of this node. Appends the names of its GPUs to ``gpus``."""
    try:
        gpu_check.check_gpus()
        gpus += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except UserError as error:
        yield Finding(ERROR, f": {error}")
    interface = addresses.interface_towards(args.master)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        chosen = os.environ.get(name, "").lstrip("=")
        if not interface or not chosen or chosen[0] == "^":
            continue
        if not interface.startswith(tuple(chosen.split(","))):
            text = f": {name} chooses {chosen}, but {interface} leads to node 0"
            why = "training hangs if other nodes cannot reach it there; unset it"
            yield Finding(WARNING, text, why)
    shm = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    if shm < 256e6 and len(gpus) > 1:
        why = "NCCL and the loaders pass data through it; start containers with --ipc=host"
        yield Finding(WARNING, f": /dev/shm has only {shm / 1e6:.0f} MB free", why)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < 1024:
        why = "workers, sockets and batches need a file descriptor each; run ulimit -n 4096"
        yield Finding(WARNING, f": a process may open only {files} files", why)
    place = Path(args.output_dir).absolute()
    place = next(one for one in (place, *place.parents) if one.exists())
    free = shutil.disk_usage(place).free
    if args.rank == 0 and not os.access(place, os.W_OK | os.X_OK):
        why = "node 0 writes the run directory there; choose another --output-dir"
        yield Finding(ERROR, f": this user may not write to {place}", why)
    elif free < (5e9 if args.rank == 0 else 5e8):
        level = ERROR if args.rank == 0 and free < 5e8 else WARNING
        why = "node 0 writes two snapshots, several times as large as the model, and the best one; "
        why += "free disk space, or choose another --output-dir"
        yield Finding(level, f": only {free / 1e9:.1f} GB of disk are free at {place}", why)


def check_data(
    args: argparse.Namespace, needed: float, sources: dict[str, Source]
) -> Iterator[Finding]:
    """Check whether a run can start with the data set, and whether this node reads and decodes the
    images that its GPUs need (``needed``: images/s). Fills ``sources``, by part."""
    root = Path(args.data)
    try:
        classes = class_folders(root / "train")
        parts = ["val", *["test"] * has_classes(root / "test")]
        for part in parts:
            check_same_classes(root, part, classes, subset=False)
        for part in (*parts, "train"):
            sources[part] = open_source(root / part, classes, shows=args.rank == 0)
    except UserError as error:
        sources.clear()
        yield Finding(ERROR, f": {error}")
        return
    unreadable: dict[str, str] = {}
    for verb, rate, remedy in (
        (
            "reads",
            read_speed(sources["train"], unreadable),
            "a local disk or prepare_data.py shards",
        ),
        ("decodes", decode_speed(sources["train"], args.image_size, unreadable), "more cores"),
    ):
        if rate >= needed:
            yield Finding(OK, f" {verb} {rate:.0f} images/s")
        else:
            text = f" {verb} {rate:.0f} images/s, but its GPUs need {needed:.0f} (see --need)"
            why = f"GPUs wait for images; use {remedy}, or smaller images (prepare_data.py shrink)"
            yield Finding(WARNING, text, why)
    if unreadable:
        text = f": {len(unreadable)} of the image files that were tried cannot be read, such as "
        why = "training shows other images in their place, and ends after --max-bad-files of them"
        path, reason = min(unreadable.items())
        yield Finding(WARNING, f"{text}{path} ({reason})", why)


def images_per_gpu(args: argparse.Namespace, gpus: list[str]) -> float | None:
    """Return the images/s that one GPU of this node trains; None if unknown."""
    words = gpus[0].replace("-", " ").split() if gpus else ()
    known = [rate for name, rate in RESNET50_IMAGES_PER_S.items() if name in words]
    if args.need or not known:
        return args.need
    with contextlib.suppress(ValueError, KeyError):  # a model of timm: unknown
        weights = next(iter(get_model_weights(args.arch)))
        size = weights.transforms.keywords["crop_size"]  # of the images that need these operations
        operations = weights.meta["_ops"] * (args.image_size / size) ** 2
        return known[0] * RESNET50_GFLOPS / operations
    return None


def read_speed(source: Source, unreadable: dict[str, str]) -> float:
    """Return files/s, read at random by one thread per core, not from the page cache. Adds the
    files that cannot be read to ``unreadable``, with the reason."""

    def read(image: int) -> None:
        path, place, size = source.stored(image)
        try:
            with open(path, "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), place, size or 0, os.POSIX_FADV_DONTNEED)
                file.readall() if size is None else os.pread(file.fileno(), size, place)
        except OSError as error:
            unreadable[source.path(image)] = f"{error.strerror}"

    chosen = random.sample(range(len(source)), min(256, len(source)))
    with ThreadPoolExecutor(min(usable_cores(), 16)) as pool:
        began = time.perf_counter()
        list(pool.map(read, chosen))
        return len(chosen) / (time.perf_counter() - began)


def decode_speed(source: Source, size: int, unreadable: dict[str, str]) -> float:
    """Return the images/s that all cores decode and crop for training. It is measured on one core,
    in CPU time, so that other programs do not count. Adds files as `read_speed` does."""
    torch.set_num_threads(1)
    order = np.resize(np.random.default_rng().permutation(len(source)), 72)
    batches = ImageBatches(source, size, 0, train=True)
    batches.__getitems__(Batch(0, order[:8]))  # the first call loads libraries
    used = time.process_time()
    _, targets, reading = batches.__getitems__(Batch(0, order[8:]))
    seconds = time.process_time() - used
    for image, reason in reading.unreadable:
        unreadable.setdefault(source.path(image), reason)
    return usable_cores() * int((targets != UNREADABLE).sum()) / seconds
