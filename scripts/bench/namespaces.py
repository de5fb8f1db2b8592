"""Linux namespaces that end with the process that created them, and a network between them.

    with network(2) as nodes:
        limit(nodes[0], "100mbit")
        subprocess.run([*nodes[0].enter, "ping", "-c", "1", address(1)])

Each node has its own network namespace, in which eth0 has the node's `address` and leads to a
bridge in another one. Needs root and Debian's package iproute2.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from utils.start.errors import UserError


class Namespaces:
    """Namespaces of these ``kinds`` (options of unshare), and a process that keeps them alive.

    ``enter`` is the prefix of a command to run inside.
    """

    def __init__(self, kinds: tuple[str, ...]):
        """Raises: `UserError` where namespaces are not allowed."""
        new = ["unshare", *kinds, "--fork", "--kill-child"]
        new += ["--mount-proc"] if "--pid" in kinds else []
        # When this process dies, the kernel kills unshare. With unshare it kills the first program,
        # and with that all processes of a process namespace. The first program must collect dead
        # orphans: ignoring SIGCHLD does that.
        first = ["sh", "-c", "echo ready; trap '' CHLD; exec sleep infinity"]
        self.keeper = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *new, *first],
            start_new_session=True,  # Ctrl-C must not end the network before the job
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.keeper.stdout is not None, "it is a pipe"
        if self.keeper.stdout.readline() != "ready\n":
            _, reason = self.keeper.communicate()
            raise UserError(f"namespaces are not allowed here: {reason.strip()}")
        (self.first,) = children(self.keeper.pid)
        self.enter = ("nsenter", f"--target={self.first}", *kinds, "--")

    def close(self) -> None:
        """End everything inside."""
        with self.keeper:
            self.keeper.kill()
        end = time.monotonic() + 30
        while Path(f"/proc/{self.first}").exists() and time.monotonic() < end:
            time.sleep(0.01)


def children(pid: int) -> list[int]:
    """Return the ids of a process's children; none if it has exited."""
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def do(*command: str) -> None:
    """Run a command of the set-up. Raises: `UserError` if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{' '.join(command)}: {done.stderr.strip()}")


def address(number: int) -> str:
    """The IP address of a node."""
    return f"10.77.0.{number + 1}"


def make_bridge(switch: Namespaces) -> None:
    """Turn a network into a switch for `plug_in`."""
    up = "ip link add bridge type bridge forward_delay 0; ip link set bridge up"
    do(*switch.enter, "sh", "-ec", up)


def plug_in(number: int, node: Namespaces, switch: Namespaces) -> None:
    """Connect a node's eth0 with ``port<number>`` of the switch."""
    cable = f"ip link add port{number} type veth peer name eth0 netns {node.first}"
    do(*switch.enter, "sh", "-ec", f"{cable}; ip link set port{number} up master bridge")
    up = f"ip link set lo up; ip address add {address(number)}/24 dev eth0; ip link set eth0 up"
    do(*node.enter, "sh", "-ec", up)


def limit(node: Namespaces, rate: str, latency: str = "20ms") -> None:
    """Limit the rate at which a node sends, such as 100mbit, counted in Ethernet's bytes."""
    line = f"tc qdisc add dev eth0 root tbf rate {rate} burst 256kb latency {latency}"
    do(*node.enter, *line.split())


@contextlib.contextmanager
def network(count: int) -> Iterator[list[Namespaces]]:
    """Start ``count`` connected nodes; they end with the `with` block. Raises: `UserError`."""
    if os.geteuid() != 0:
        raise UserError("nodes on one machine (network namespaces) need root: use sudo")
    for program in ("unshare", "nsenter", "setpriv", "ip", "tc"):
        if not shutil.which(program):
            raise UserError(f"{program} is missing: apt-get install iproute2 util-linux")
    with contextlib.ExitStack() as stack:
        spaces = []
        for _ in range(1 + count):
            spaces.append(Namespaces(("--net",)))
            stack.callback(spaces[-1].close)
        switch, *nodes = spaces
        make_bridge(switch)
        for number, node in enumerate(nodes):
            plug_in(number, node, switch)
        yield nodes
