"""What a run was made with: machine, versions, commit. What cannot be found is left out."""

import re
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def describe(device: torch.device) -> dict[str, str]:
    """Names and versions: cpu, gpu and driver where ``device`` is one, torch, commit."""
    found = {"cpu": _cpu(), "torch": torch.__version__, "commit": _commit()}
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "driver": _driver()}
    return {key: text for key, text in found.items() if text}


def _first(path: str, pattern: str) -> str:
    try:
        match = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except OSError:
        return ""
    return match[1].strip() if match else ""


def _cpu() -> str:
    return _first("/proc/cpuinfo", r"^model name\s*:(.*)$")


def _driver() -> str:
    return _first("/proc/driver/nvidia/version", r"Kernel Module.*?\s(\d+\.[\d.]+)\s")


def _commit() -> str:
    """This code's commit; "+" after it says that files differ from it."""
    if not (ROOT / ".git").exists():  # a copy inside somebody else's repository is not of it
        return ""

    def git(*command: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *command],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + "+" * bool(
            git("status", "--porcelain", "--untracked-files=no")
        )
    except (OSError, subprocess.SubprocessError):
        return ""
