"""The part of the doctor that needs torch, in a process of its own that can be abandoned.

    python scripts/checkup/torch_part.py '{"arch": ..., "data": ...}'

Prints a line of JSON after each measurement, so that one that hangs does not hide the others.
"""

import json
import os
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

DECODE_SECONDS = 0.5
SMALL_ROUNDS, LARGE_BYTES, LARGE_SECONDS = 30, 25 * 2**20, 0.5  # 25 MiB: a bucket of DDP


def main() -> None:
    order = json.loads(sys.argv[1])
    import torch

    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    tell(
        "torch",
        {
            "cuda": cuda,
            "gpus": torch.cuda.device_count() if cuda else 0,
            "built_for": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        },
    )
    tell("model", model(order["arch"], order["image_size"]))
    if order.get("data"):
        tell("decode", decode(order["data"], order["image_size"]))
    if order.get("ring"):
        ring = order["ring"]
        tell("gloo", all_reduce("gloo", ring | {"device": "cpu"}))
        if ring["nccl"] and cuda:
            tell("nccl", all_reduce("nccl", ring | {"device": "cuda:0", "port": ring["port2"]}))


def tell(what: str, found: Any) -> None:
    print(json.dumps({what: found}), flush=True)


def model(arch: str, image_size: int) -> dict[str, Any]:
    """Bytes and buckets of the gradients of ``arch`` (float32); published GFLOPs per image."""
    from forecast import buckets
    from torchvision.models import get_model_weights

    found = buckets.of(arch, image_size=image_size)
    gflops = None
    with suppress(ValueError, KeyError, AttributeError):
        gflops = next(iter(get_model_weights(arch))).meta["_ops"] * (image_size / 224) ** 2
    size = 4 * sum(bucket.values for bucket in found)
    return {"gradient_bytes": size, "gflops": gflops, "buckets": [asdict(one) for one in found]}


def decode(data: str, image_size: int) -> dict[str, float]:
    """Images/s that one core reads, decodes and crops for training."""
    import numpy as np

    from utils.data.dataset import ImageBatches
    from utils.data.index import ImageIndex, class_folders
    from utils.samplers import Batch, epoch_order

    root = Path(data) / "train"
    batches = ImageBatches(ImageIndex(root, class_folders(root)), image_size, seed=0, train=True)
    batches.quietly = True  # as in a worker
    order = epoch_order(len(batches), seed=0, epoch=0)
    batches.__getitems__(Batch(0, order[:4]))  # the first ones load libraries
    images, began, used = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began < DECODE_SECONDS:
        chosen = np.take(order, range(images, images + 8), mode="wrap")
        batches.__getitems__(Batch(0, chosen))
        images += 8
    # CPU time, so that other programs do not count; the disk is measured in facts.py.
    return {"images_per_s_core": images / max(time.process_time() - used, 1e-6)}


def all_reduce(backend: str, ring: dict[str, Any]) -> dict[str, float]:
    """Latency of a small all-reduce and speed of one of DDP's bucket size, one process per node.

    In seconds, and bytes of gradients per second (medians).
    """
    import torch
    import torch.distributed as dist

    if ring["interface"]:  # as utils/launch/launch.py chooses
        os.environ.setdefault("GLOO_SOCKET_IFNAME", ring["interface"])
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={ring['interface']}")
    dist.init_process_group(
        backend,
        init_method=f"tcp://{ring['master']}:{ring['port']}",
        rank=ring["rank"],
        world_size=ring["nodes"],
        timeout=timedelta(seconds=60),
    )

    def seconds(tensor: torch.Tensor) -> float:
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    small = torch.zeros(1, device=ring["device"])
    large = torch.zeros(LARGE_BYTES // 4, device=ring["device"])
    for tensor in (small, small, large):
        seconds(tensor)
    latency = statistics.median(seconds(small) for _ in range(SMALL_ROUNDS))
    # All must do the same number of rounds: the slowest process in a first one decides.
    slowest = torch.tensor([seconds(large)], device=ring["device"])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    rounds = max(1, min(20, int(LARGE_SECONDS / float(slowest))))
    speed = LARGE_BYTES / statistics.median(seconds(large) for _ in range(rounds))
    dist.destroy_process_group()
    return {"latency_s": latency, "bytes_per_s": speed}


if __name__ == "__main__":
    main()
