"""No orphans: a process ends when the process that has started it is killed. Without torch."""

import ctypes
import os
import signal

from utils.start.errors import UserError

LAUNCHER = "IMAGENET_LAUNCHER"  # environment variable: process id of the launcher
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent dies (Linux: prctl(2)).

    Give the process id ``parent`` if the parent may have died before this is called.
    """
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def die_with_launcher() -> None:
    """Let this process end with its launcher, if it has one: `supervise`, a script or torchrun.

    Call it before torch is imported: that takes seconds in which the launcher may be killed.
    """
    if launcher := os.environ.pop(LAUNCHER, None):
        if not launcher.isdecimal():
            text = f"{LAUNCHER}={launcher} in the environment is not a process id: unset it"
            raise UserError(text, on_every_rank=True)
        die_with_parent(int(launcher))
    elif "LOCAL_RANK" in os.environ:
        die_with_parent()
        # torchrun does not pass on its process id. If it has already died, the parent is init,
        # which, unlike torchrun, has not loaded torch.
        if "TORCHELASTIC_RUN_ID" in os.environ and not _has_torch(os.getppid()):
            os._exit(1)


def _has_torch(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:  # a path need not be text
            return any(b"libtorch" in line for line in file)
    except OSError:  # it has exited, or belongs to another user
        return False
