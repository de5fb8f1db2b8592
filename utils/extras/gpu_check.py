"""Stop before training if torch cannot use the GPUs of this machine.

- Always on. Used by every script on machines with an NVIDIA driver.
- Interface: `check_gpus` and `unused`, which `utils.world` and `utils.run_directory` call through
  addons.py.
- Without this file, training silently uses the CPU if torch does not support the driver.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from utils.errors import UserError
from utils.provenance import DRIVER, is_cpu_chosen


def check_gpus() -> None:
    """Raise `UserError` if torch cannot use the GPUs, unless the user has chosen the CPU."""
    if torch.cuda.is_available():
        kernels = torch.cuda.get_arch_list() if torch.version.cuda else []  # none: ROCm
        capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
        usable = not kernels or all(has_kernels(one, kernels) for one in capabilities)
    else:
        usable = is_cpu_chosen()
    if not usable and (why := _ask_driver("explain")):
        raise UserError(why, on_every_rank=True)


def has_kernels(capability: tuple[int, int], built_for: list[str]) -> bool:
    """Return whether a torch ``built_for`` sm_80, compute_90, ... runs on a GPU of ``capability``.

    sm_XY runs on X.Y and later minor versions of X; compute_XY (PTX) on X.Y and all later versions.
    """
    for name in built_for:
        kind, x, y = re.match(r"(sm|compute)_(\d+)(\d)", name).groups()
        code = int(x), int(y)
        if code <= capability and (kind == "compute" or code[0] == capability[0]):
            return True
    return False


def unused() -> str:
    """Describe the GPUs that the environment hides, for a note; "" if there are none."""
    return _ask_driver("gpus") if is_cpu_chosen() else ""


def _ask_driver(question: str) -> str:
    """Run scripts/choose_torch.py with ``question`` ("gpus" or "explain"); "" without a driver."""
    if not (shutil.which("nvidia-smi") or DRIVER.exists()):
        return ""
    command = [sys.executable, Path(__file__).parents[2] / "scripts/choose_torch.py", question]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
