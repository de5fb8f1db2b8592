"""What a run was made with: machine, versions, commit. What cannot be found is left out.

torch is imported only where it is described: scripts/doctor.py asks for the commit without it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from utils.launch import gpus
from utils.launch.agreement import ROOT

if TYPE_CHECKING:
    import torch


def describe(device: torch.device) -> dict[str, str]:
    """Names and versions: cpu, gpu and driver where ``device`` is a GPU, torch, commit."""
    import torch

    found = {"cpu": _cpu(), "torch": torch.__version__, "commit": commit()}
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "driver": gpus.loaded().driver}
    return {key: text for key, text in found.items() if text}


def _first(path: str, pattern: str) -> str:
    try:
        match = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except OSError:
        return ""
    return match[1].strip() if match else ""


def _cpu() -> str:
    return _first("/proc/cpuinfo", r"^model name\s*:(.*)$")


def commit() -> str:
    """This code's commit, with "+" behind it if files differ from it; empty if unknown."""
    if not (ROOT / ".git").exists():  # do not take the commit of a repository around this copy
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
