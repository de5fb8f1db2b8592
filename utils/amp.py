"""Native automatic mixed precision (torch.amp): the option ``--amp`` and its dtype."""

import argparse
import os
from pathlib import Path

import torch

from utils import addons
from utils.world import World, gather

# Measured with ResNet-18 on two cores with AMX: a bf16 step took less than half the time of a
# float32 step at 224 pixels, and more than twice the time at 64.
LEAST_FOR_AMX = 224
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "off": None}
NAMES = {dtype or torch.float32: name for name, dtype in DTYPES.items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    """``--amp``, for the scripts that use torch.amp."""
    text = (
        "autocast to fp16 with loss scaling, to bf16, or off (float32); auto: fp16 on a GPU, "
        "bf16 on a CPU with AMX for images of at least 224 pixels, else off"
    )
    add = parser.add_argument_group("mixed precision").add_argument
    add("--amp", choices=("auto", *DTYPES), default="auto", help=text)


def autocast_dtype(args: argparse.Namespace, world: World) -> torch.dtype | None:
    """The dtype for torch.autocast that ``--amp`` asks for; None for float32.

    All processes must call it; they get the same dtype.
    """
    device, choice = world.device, args.amp
    if choice == "auto" and device.type == "cuda":
        choice = "fp16"
    elif choice == "auto":
        largest = max([args.image_size, *args.epoch_sizes])
        faster = has_amx() and largest >= LEAST_FOR_AMX
        choice = "bf16" if all(gather(faster, world)) else "off"
        if choice == "bf16" and world.is_main:
            print("--amp auto: bf16, as the CPU has AMX (--amp off: float32)", flush=True)
    # By default is_bf16_supported() is also True on a T4, which only emulates bf16, slowly.
    native = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    if choice == "bf16" and not native and world.is_main:
        print("warning: this GPU only emulates bf16, slowly: --amp fp16 is faster", flush=True)
    if choice == "fp16" and device.type == "cpu" and world.is_main:
        addons.note_slow_float16("--amp off")
    return DTYPES[choice]


def has_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU has AMX instructions for bfloat16, and oneDNN may use them."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    if not torch.backends.mkldnn.is_available() or not limit.endswith(("AMX", "ALL", "DEFAULT")):
        return False
    try:
        flags = next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):  # not a Linux on x86
        return False
    return {"amx_tile", "amx_bf16"} <= set(flags.split())
