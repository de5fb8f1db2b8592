"""Native automatic mixed precision (torch.amp): its option, and the dtype that it chooses."""

import argparse

import torch


def add_options(parser: argparse.ArgumentParser) -> None:
    """``--amp``, for the scripts that use torch.amp."""
    group = parser.add_argument_group("mixed precision")
    group.add_argument(
        "--amp",
        choices=("auto", "fp16", "bf16", "off"),
        default="auto",
        help="fp16 with loss scaling, bf16, or off: float32; auto: fp16 on a GPU, else off",
    )


def autocast_dtype(choice: str, device: torch.device) -> torch.dtype | None:
    """The dtype for torch.autocast that ``--amp`` asks for; None for plain float32."""
    if choice == "auto":
        choice = "fp16" if device.type == "cuda" else "off"
    # is_bf16_supported() alone says yes on a T4, which emulates bf16 at a fraction of the speed.
    native = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    if choice == "bf16" and not native:
        print("warning: this GPU only emulates bf16, slowly: --amp fp16 is faster", flush=True)
    return {"fp16": torch.float16, "bf16": torch.bfloat16, "off": None}[choice]
