"""Which kernels a device computes with: settled once, before the model, and said in a line."""

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
