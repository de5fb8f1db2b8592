"""Choose the torch that can use the GPUs of this machine. This needs no packages.

python scripts/choose_torch.py choose  # print the constraints file that fits, and why
python scripts/choose_torch.py check   # end with an error if this Python's torch cannot use the
                                       # GPUs; print a node's default number of processes,
                                       # their largest number, and the usable CPU cores
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils.start import nvidia
from utils.start.cores import usable_cores
from utils.start.errors import exit_with
from utils.start.orphans import die_with_launcher


def main() -> int:
    question = sys.argv[1] if len(sys.argv) == 2 else ""
    die_with_launcher()
    if question == "check":
        print(*processes(), usable_cores())
    elif question == "choose":
        print(*nvidia.choose(nvidia.look()), sep="\n")
    return 0


def processes() -> tuple[int, int]:
    """Return a node's default and largest number of processes. Without GPUs, several processes may
    share a core, as in a simulation. Raises: `UserError` if torch cannot use the GPUs."""
    on_cpu = 1, max(16, 4 * usable_cores())
    if nvidia.is_cpu_chosen() or not (nvidia.look().has_gpus or Path("/dev/kfd").exists()):
        return on_cpu  # without importing torch, which takes seconds
    import torch

    from utils.start.gpu_check import check_gpus

    check_gpus()
    gpus = torch.cuda.device_count()
    return (gpus, gpus) if gpus else on_cpu


if __name__ == "__main__":
    exit_with(main)
