"""What an index of ImageNet's size costs: to load, and in a loader worker."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader, Dataset

from utils.data import listing
from utils.data.index import ImageIndex, class_folders
from utils.samplers import epoch_order

IMAGENET = 1_281_167


class Touch(Dataset):
    """Looks every sample up, and gives the worker's private memory in MB."""

    def __init__(self, index: ImageIndex):
        self.index = index

    def __getitems__(self, wanted: np.ndarray) -> float:
        for image in wanted.tolist():
            self.index.path(image)
            int(self.index.targets[image])
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024


def measure() -> dict[str, float]:
    """Loading a cached index of ImageNet's size, and the growth of a worker over an epoch of it."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        fill_with_names(root)
        began = time.perf_counter()
        index = ImageIndex(root, class_folders(root))
        load = time.perf_counter() - began
    order = epoch_order(len(index), 0, 0)
    loader = DataLoader(
        Touch(index),
        batch_sampler=list(chunks(order, 4096)),
        num_workers=1,
        collate_fn=lambda value: value,
    )
    memory = list(loader)
    return {"index_load_s": load, "worker_growth_mb": memory[-1] - memory[0]}


def chunks(order: np.ndarray, size: int) -> Iterator[np.ndarray]:
    for start in range(0, len(order), size):
        yield order[start : start + size]


def fill_with_names(root: Path) -> None:
    """A cached index of `IMAGENET` names in 1000 class folders, without the files."""
    listings = {}
    for number, share in enumerate(np.array_split(np.arange(IMAGENET), 1000)):
        name = f"n{number:08}"
        (root / name).mkdir()
        os.utime(root / name, (1e9, 1e9))  # long ago, or the cache would not be trusted
        paths = [b"%s/%s_%d.JPEG" % (name.encode(), name.encode(), i) for i in share]
        listings[name] = listing.Listing(
            b"".join(paths),
            np.array([len(path) for path in paths]),
            {name: os.stat(root / name).st_mtime_ns},
        )
    listing.write(root, listings)
