"""Who takes part in a training whose nodes may fail, for elastic.py."""

import time
from dataclasses import dataclass, field

from connection import Node
from hosts import SSH_FAILED, Host

FIRST_PAUSE, LONGEST_PAUSE = 15.0, 60.0  # seconds between attempts to reach a lost node


@dataclass
class Seat:
    """A host, whether it takes part or not."""

    host: Host
    node: Node | None = None  # the ssh to its guard; one that is `ready` waits for a job
    ready: bool = False
    called: float = 0.0  # when the ssh was started; this and the others by the monotonic clock
    came: float = 0.0  # when it was ready
    next_call: float = 0.0
    failures: int = 0  # since it was last heard of
    trusted: bool = False  # it was in an attempt that began well, and has not been lost since
    barred: bool = False

    def leave(self, failed: bool) -> None:
        """Its ssh has ended: call it again, at once or, after a failure, later."""
        self.node, self.ready = None, False
        self.failures = self.failures + 1 if failed else 0
        pause = min(FIRST_PAUSE * 2 ** (self.failures - 1), LONGEST_PAUSE) if failed else 0.0
        self.next_call = time.monotonic() + pause


@dataclass
class Attempt:
    """A start of the training on ``nodes`` (by rank)."""

    nodes: list[Node]
    began: float = field(default_factory=time.monotonic)
    ending: bool = False  # its nodes have been told to end
    joining: bool = False  # ... for the sake of a node that is back
    first: Node | None = None  # the first that failed

    @property
    def names(self) -> str:
        """For people."""
        return ", ".join(node.host.name for node in self.nodes)


def is_lost(node: Node) -> bool:
    """Whether its ssh has ended without an exit code of the guard's (a signal: we ended it)."""
    return node.code == SSH_FAILED or (node.code or 0) < 0
