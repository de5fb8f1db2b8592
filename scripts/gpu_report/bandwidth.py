"""An all-reduce over all GPUs of this machine, for several sizes; started by torchrun."""

import json
import os
import time

import torch
import torch.distributed as dist

MB = (1, 8, 64, 256)
TIMES = 20


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    size, found = dist.get_world_size(), []
    for mb in MB:
        values = torch.zeros(mb * 1_000_000 // 4, device="cuda")
        for turn in range(TIMES + 5):
            if turn == 5:
                torch.cuda.synchronize()
                began = time.perf_counter()
            dist.all_reduce(values)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / TIMES
        # Each GPU sends and receives 2 (n - 1) / n times the bytes.
        rate = mb * 1e6 * 2 * (size - 1) / size / seconds / 1e9
        found.append({"mb": mb, "ms": 1000 * seconds, "gb_per_s": rate})
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
