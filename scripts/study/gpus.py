"""Prints what nvidia-smi says on this machine; nothing where there is none.

Also sent to nodes as a single file, whose Python may be 3.7 and have no package.
"""

import shutil
import subprocess


def dump() -> str:
    """The whole output of nvidia-smi, "" without one."""
    if not shutil.which("nvidia-smi"):
        return ""
    try:
        done = subprocess.run(["nvidia-smi"], stdout=subprocess.PIPE, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


if __name__ == "__main__":
    print(dump(), end="")
