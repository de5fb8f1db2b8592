#!/usr/bin/env python3
"""Are the batches of the input path bit for bit those of decoding every image whole?

    python tests/trials/same_batches.py DATA [EPOCHS]

Every batch of EPOCHS (1) epochs of DATA/train is made twice: as training gets it, by two workers in
slots of the ring, and plainly, in this process, with whole images and nothing saved. The checksum
that is printed does not change from one release of this repository to the next.
"""

import argparse
import sys
import zlib
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from utils import addons, launch
from utils.folder import class_folders, open_source
from utils.images import ImageBatches
from utils.loaders import RingLoader
from utils.samplers import TrainSampler

SIZE, BATCH, SEED = 224, 64, 0


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("epochs", type=int, nargs="?", default=1, metavar="EPOCHS")
    args = parser.parse_args()
    root = args.data / "train"
    torch.set_num_threads(1)
    index = open_source(root, class_folders(root))
    sampler = TrainSampler(len(index), BATCH, (0, 1), 1, SEED)
    make = partial(ImageBatches, index, SIZE, SEED, train=True)
    plain, different = make(regions=None), 0
    loaders = {"whole images": RingLoader(make(regions=None), sampler, workers=2)}
    if addons.region_decoder():
        loaders["regions"] = RingLoader(make(), sampler, workers=2)
    for epoch in range(args.epochs):
        sampler.start_at(epoch, 0)
        checksum = 0
        for batch, *filled in zip(sampler, *loaders.values(), strict=True):
            images, targets, reading = plain.__getitems__(batch)
            checksum = zlib.crc32(images.numpy(), checksum)
            for loader, one in zip(loaders.values(), filled, strict=True):
                same = torch.equal(loader.ring.images[one.slot, : len(targets)], images)
                same &= one.targets.tolist() == targets.tolist()
                different += not (same and one.reading.faults == reading.faults)
                loader.ring.free_after(one.slot)
        found = f"checksum {checksum:08x}, {different} different so far"
        print(f"epoch {epoch} ({', '.join(loaders)}): {found}", flush=True)
    return 1 if different else 0


if __name__ == "__main__":
    launch.run_main(main)
