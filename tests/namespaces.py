"""Linux namespaces that die with the process that made them."""

import subprocess
from pathlib import Path

import pytest
from running import eventually

# The first program inside. It has to collect dead orphans: ignoring SIGCHLD does that.
_FIRST = ("sh", "-c", "echo ready; trap '' CHLD; exec sleep infinity")


class Namespaces:
    """A set of namespaces of these kinds (options of unshare), alive while its keeper is."""

    def __init__(self, kinds: tuple[str, ...]):
        new = ("unshare", *kinds, "--fork", "--kill-child")
        new += ("--mount-proc",) if "--pid" in kinds else ()
        # The kernel kills unshare with this process, the first program with unshare, and with its
        # first program a whole process namespace.
        self.keeper = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *new, *_FIRST],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self.keeper.stdout.readline() != "ready\n":
            self.keeper.wait()
            pytest.skip(f"namespaces are not allowed here: {self.keeper.stderr.read().strip()}")
        (self.first,) = children(self.keeper.pid)
        self.enter = ("nsenter", f"--target={self.first}", *kinds, "--")

    def close(self) -> None:
        """End everything inside."""
        self.keeper.kill()
        self.keeper.wait()
        self.keeper.stdout.close()
        self.keeper.stderr.close()
        eventually(lambda: not Path(f"/proc/{self.first}").exists())


def children(pid: int) -> list[int]:
    """The ids of a process's children; none once it has ended."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except FileNotFoundError:  # it has ended
        return []
    return [int(one) for one in text.split()]
