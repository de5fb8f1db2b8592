#!/usr/bin/env python3
"""How long training pauses for a snapshot, compared with waiting for a torch.save.

    python scripts/bench/snapshot_pause.py [-a resnet50] [--rounds 7] [--folder DIR]

Both write the same content (weights, momentum, position) to the same disk, flushed, in turn.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils.amp.loss_scale import LossScaler
from utils.model import models
from utils.model.optim import sgd
from utils.option_types import positive
from utils.run.checkpoint import TrainState, snapshot_of
from utils.run.snapshots import SNAPSHOT, SnapshotWriter, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-a", "--arch", default="resnet50")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--folder", type=Path, help="on the disk to write to (a temporary one)")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = models.create(args.arch, 1000, 224, False).to(device)
    state = TrainState(model, sgd(model.parameters(), 0.1, 0.9, 1e-4), LossScaler(device))

    def content() -> dict:
        return snapshot_of(state, {}, [], state.full_weights())

    waits, pauses, writes = [], [], []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        writer = SnapshotWriter(Path(folder))
        for _ in range(args.rounds + 1):  # the first of each allocates its buffers
            began = time.perf_counter()
            write(content(), Path(folder) / SNAPSHOT)
            waits.append(time.perf_counter() - began)
            began = time.perf_counter()
            writer.save({SNAPSHOT: content()})
            pauses.append(time.perf_counter() - began)
            writer.wait()
            writes.append(time.perf_counter() - began)
            size = os.path.getsize(Path(folder) / SNAPSHOT)
    wait, pause, whole = (statistics.median(times[1:]) for times in (waits, pauses, writes))
    print(
        f"{args.arch}, {size / 1e6:.0f} MB, {device.type}, median of {args.rounds}: training waits "
        f"{1000 * wait:.0f} ms for torch.save, {1000 * pause:.0f} ms for a snapshot in the "
        f"background (first: {1000 * pauses[0]:.0f} ms; on disk after {1000 * whole:.0f} ms): "
        f"ratio {wait / pause:.1f}"
    )


if __name__ == "__main__":
    main()
