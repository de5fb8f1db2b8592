"""Which kernels a device computes with: settled once, before the model, and said in a line."""

import os
from pathlib import Path

import torch

CHOSEN = (
    "kernels: cuDNN times its own and takes the fastest; products of float32 in TF32 where the GPU "
    "has it (with NVIDIA_TF32_OVERRIDE=0 in the environment: in float32)"
)


def settle(device: torch.device) -> None:
    """Let cuDNN choose its kernels by timing them, and float32 products use TF32.

    All training batches have one size, so that each kernel is timed once. Neither gives the same
    bits on every run; no bit on a GPU is promised to be.
    """
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision("high")


def has_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU multiplies matrices of bfloat16 in tiles, and oneDNN may use them."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    if not torch.backends.mkldnn.is_available() or not limit.endswith(("AMX", "ALL", "DEFAULT")):
        return False
    try:
        flags = next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):  # not a Linux on x86
        return False
    return {"amx_tile", "amx_bf16"} <= set(flags.split())
