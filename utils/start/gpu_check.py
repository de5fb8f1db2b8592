"""Stop before training if torch cannot use the GPUs of this machine, and say what helps.

- Used by every script on machines with an NVIDIA driver.
- Interface: `check_gpus` and `unused`, which `utils.start.world` and `utils.run.run_directory`
  call.
"""

import os
import re

import torch

from utils.start import nvidia
from utils.start.errors import UserError, typed


def check_gpus() -> None:
    """Raise `UserError` if torch cannot use the GPUs, unless the user has chosen the CPU."""
    usable = not _without_kernels() if torch.cuda.is_available() else nvidia.is_cpu_chosen()
    if not usable and (hardware := nvidia.look()).has_gpus:
        raise UserError(explain(hardware), on_every_rank=True)


def has_kernels(capability: tuple[int, int], built_for: list[str]) -> bool:
    """Return whether a torch ``built_for`` sm_80, compute_90, ... runs on a GPU of ``capability``.

    sm_XY runs on X.Y and later minor versions of X; compute_XY (PTX) on X.Y and all later versions.
    """
    for name in built_for:
        if not (parts := re.match(r"(sm|compute)_(\d+)(\d)", name)):
            continue
        kind, code = parts[1], (int(parts[2]), int(parts[3]))
        if code <= capability and (kind == "compute" or code[0] == capability[0]):
            return True
    return False


def _without_kernels() -> list[int]:
    """The GPUs that torch sees, but has no kernels for."""
    kernels = torch.cuda.get_arch_list() if torch.version.cuda else []  # none: ROCm
    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    lacks = [i for i, capability in enumerate(capabilities) if not has_kernels(capability, kernels)]
    return lacks if kernels else []


def unused() -> str:
    """Describe the GPUs that the environment hides, for a note; "" if there are none."""
    hardware = nvidia.look() if nvidia.is_cpu_chosen() else nvidia.Machine()
    return str(hardware) if hardware.gpus else ""


def explain(hardware: nvidia.Machine) -> str:
    """Say why torch cannot use these GPUs, and what helps."""
    problem = _missing_kernels() if torch.cuda.is_available() else _why_unavailable()
    try:
        file, why = nvidia.choose(hardware)
        remedy = f"`bash {typed('scripts/quickstart.sh')}` fills .venv with a torch for {why} "
        remedy += f"(scripts/{file}); then run {typed('.venv/bin/python')}; {nvidia.HIDE}"
    except UserError as error:
        remedy = str(error)
    return (
        f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use the GPUs of this "
        f"machine: {problem}: {remedy}"
    )


def _why_unavailable() -> str:
    """Say why torch sees no GPU. CUDA's own reason, such as an old driver, comes first."""
    try:
        torch.cuda.init()
        reason = ""
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch for the CPU
        reason = " ".join(str(error).split())
    # These only repeat that torch sees none: in a container, or where the environment chooses.
    if reason and not re.match("Found no NVIDIA driver|No CUDA GPUs|Torch not compiled", reason):
        return reason
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return f"CUDA_VISIBLE_DEVICES={visible} selects none of them"
    return "a container needs `--gpus all`, a Slurm job `--gpus-per-node`"


def _missing_kernels() -> str:
    """Name the GPUs that torch sees but has no kernels for."""
    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    sms = ["sm_" + "".join(map(str, one)) for one in capabilities]
    lacks = _without_kernels()
    names = (f"{torch.cuda.get_device_name(i)} ({sms[i]})" for i in lacks)
    rest = ",".join(str(index) for index in range(len(sms)) if index not in lacks)
    others = ""
    if rest and "CUDA_VISIBLE_DEVICES" not in os.environ:
        others = f"; CUDA_VISIBLE_DEVICES={rest} uses the others"
    kernels = ", ".join(torch.cuda.get_arch_list())
    return f"it has no kernels for {', '.join(dict.fromkeys(names))}, only for {kernels}{others}"
