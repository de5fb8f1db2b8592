"""Native automatic mixed precision (torch.amp): the dtype of ``--amp``."""

import os
import time
from pathlib import Path

import torch

from utils.start.option_types import Options
from utils.start.world import World

# Measured with ResNet-18 on two cores with AMX: a bf16 step took less than half the time of a
# float32 step at 224 pixels, and more than twice the time at 64.
LEAST_FOR_AMX = 224
SLOW = 2.0  # warn if float16 takes this many times as long as float32
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "off": None}
NAMES = {dtype or torch.float32: name for name, dtype in DTYPES.items()}


def autocast_dtype(args: Options, world: World) -> torch.dtype | None:
    """The dtype for torch.autocast that ``--amp`` asks for; None for float32.

    All processes must call it; they get the same dtype.
    """
    device, choice = world.device, args.amp
    if choice == "auto" and device.type == "cuda":
        choice = "fp16"
    elif choice == "auto":
        largest = max([args.image_size, *args.epoch_sizes])
        faster = has_amx() and largest >= LEAST_FOR_AMX
        choice = "bf16" if all(world.gather(faster)) else "off"
        if choice == "bf16" and world.is_main:
            print("--amp auto: bf16, as the CPU has AMX (--amp off: float32)", flush=True)
    # By default is_bf16_supported() is also True on a T4, which only emulates bf16, slowly.
    native = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    if choice == "bf16" and not native and world.is_main:
        print("warning: this GPU only emulates bf16, slowly: --amp fp16 is faster", flush=True)
    if choice == "fp16" and device.type == "cpu" and world.is_main:
        note_slow_float16("--amp off")
    return DTYPES[choice]


def has_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU has AMX instructions for bfloat16, and oneDNN may use them."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()  # such as AVX512_CORE_AMX_FP16
    allowed = limit in ("", "ALL", "DEFAULT") or "AMX" in limit
    if not torch.backends.mkldnn.is_available() or not allowed:
        return False
    try:
        flags = next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):  # not a Linux on x86
        return False
    return {"amx_tile", "amx_bf16"} <= set(flags.split())


def note_slow_float16(option: str) -> None:
    """Print a warning if float16 is slow on this CPU. It recommends ``option``: float32."""

    def seconds(dtype: torch.dtype) -> float:
        images = torch.ones(8, 32, 32, 32, dtype=dtype)  # randn would change the random state
        weights = torch.ones(32, 32, 3, 3, dtype=dtype, requires_grad=True)
        times = []
        for _ in range(3):
            began = time.perf_counter()
            torch.conv2d(images, weights).sum().backward()
            times.append(time.perf_counter() - began)
        return min(times)

    base = seconds(torch.float32)
    half, brain = (seconds(dtype) / base for dtype in (torch.float16, torch.bfloat16))
    if half > SLOW:
        print(
            f"warning: float16 is slow on this CPU: a convolution takes {half:.0f} times as long "
            f"as in float32 (bfloat16: {brain:.1f} times). To train here, use {option}",
            flush=True,
        )
