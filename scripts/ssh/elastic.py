"""A job on MIN to MAX nodes, any of which may fail and come back: train_on_nodes.sh --elastic.

torchrun's elastic agents restart the training on the nodes that are left. They meet in a store
that this process holds, so no node is special. Each node reaches the store at a port of its own
loopback interface, from which ssh forwards connections to here (ssh -R).

This process calls lost nodes again, and starts torchrun where they answer. It writes the number of
nodes into the store. When a job has more, one was lost, and the agents restart at once; see
scripts/elastic_agent.py.
"""

import argparse
import math
import random
import socket
import sys
import time

import hosts
from hosts import Host, note
from job import LOST_SECONDS, READY, Job, Node, interrupted_code

from utils.start.errors import BAD_INPUT, INTERRUPTED, LOST_PEER, UserError

sys.path.append(str(hosts.ROOT / "scripts"))
try:
    from elastic_agent import ENDED, NODES, QUICK_FAILURES, QUICK_SECONDS, TCPStore
except ImportError as error:
    text = f"--elastic needs torch on this machine, too ({error}): set PYTHON=/path/to/python"
    raise UserError(text) from None

JOIN_SECONDS = 10.0  # wait before a restart that includes a node: more may come back
NOTE_SECONDS = 15.0  # between lines about missing nodes
CLOCK_SECONDS = 5.0  # torchrun finds nodes lost by comparing their clocks (after 15 s)
LAST_CALL_SECONDS = 5  # time for more nodes to join when MIN have
RESTARTS = 10_000  # torchrun's own limit; elastic_agent.py ends a job that fails again and again


class Elastic(Job):
    """Runs torchrun on MIN to MAX nodes: ``options.elastic``.

    ``options.wait``: time for MIN nodes to be there, in seconds. More options: see `Job`.
    """

    def __init__(
        self, options: argparse.Namespace, command: list[str], machines: list[Host], mark: str
    ):
        super().__init__(options, command, machines, mark)
        self.least, self.most = options.elastic
        self.has_begun = False
        self.codes: list[int] = []  # of the nodes that have ended since the job is ending
        self.last_host: Host | None = None  # the last one that has ended by itself
        self.enough = self.noted = time.monotonic()  # when there were enough nodes; last note
        listener = socket.create_server(("127.0.0.1", 0))
        self.store = TCPStore(
            *("127.0.0.1", 0),
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    @property
    def run_host(self) -> Host | None:
        """A host that can read the run directory; all of them share it."""
        return self.last_host

    def tunnel(self, node: Node) -> list[str]:
        """Let ssh forward a port of the node, on loopback, to the store."""
        # A lost connection may still hold the port that it has used, so this is a new one.
        node.port = random.SystemRandom().randrange(20_000, 30_000)
        way = f"127.0.0.1:{node.port}:127.0.0.1:{self.store.port}"
        return ["-o", "ExitOnForwardFailure=yes", "-R", way]

    def environment(self, rank: int, nodes: int, master: tuple[str, int]) -> dict[str, str]:
        # Training uses a store of its own, because torchrun's keeps the addresses of lost nodes.
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def rendezvous(self, node: Node, rank: int, nodes: int, master: tuple[str, int]) -> list[str]:
        limits = f"last_call_timeout={LAST_CALL_SECONDS},join_timeout={self.options.wait + 60:.0f}"
        return [
            f"--nnodes={self.least}:{self.most}",
            "--rdzv_backend=c10d",
            f"--rdzv_id={self.mark.partition(':')[2]}",
            f"--rdzv_endpoint=127.0.0.1:{node.port}",
            f"--rdzv_conf=is_host=false,{limits}",
            f"--local_addr={self.address(node)}",
            f"--max_restarts={RESTARTS}",
        ]

    def unreached(self, node: Node, reason: str) -> None:
        if node.next_call == math.inf:  # it was left out, and its guard has ended
            return
        if not node.failed and not self.signals:
            note(f"{reason}; will keep trying")
        node.leave(failed=True)

    def admit(self) -> None:
        """Start torchrun on nodes that have answered: at first on enough, later on all."""
        if self.ending:
            return
        now, ready = time.monotonic(), [node for node in self.nodes if node.state == READY]
        if self.running:
            is_due = any(now - node.since > JOIN_SECONDS for node in ready)
        else:
            if self.signals:
                code = INTERRUPTED if self.has_begun else 128 + self.signals[-1]
                raise UserError("interrupted while waiting for nodes", code=code)
            complete = len(ready) == sum(not node.failed for node in self.nodes)
            is_due = len(ready) >= (self.least if complete else self.most)
        due = ready[: self.most - len(self.running)] if is_due else []
        if due := [node for node in due if self.has_right_time(node)]:
            names = ", ".join(node.host.name for node in due)
            if self.has_begun:
                note(f"starting again on {names}")
            else:
                note(f"starting on {len(due)} of {len(self.nodes)} nodes: {names}")
            self.start(due)
            self.has_begun = True
        self.wait_for_more(now, len(ready) - len(due))

    def start(self, nodes: list[Node]) -> None:
        for node in nodes:
            node.is_new = self.has_begun
        self.store.set(NODES, str(len(self.running) + len(nodes)))
        super().start(nodes)

    def wait_for_more(self, now: float, ready: int) -> None:
        """While there are too few nodes, say so; after ``options.wait`` seconds give up."""
        here = len(self.running) + ready
        if here >= self.least and (self.running or here >= self.most):
            self.enough = self.noted = now
            return
        away = [node for node in self.nodes if node not in self.running and node.state != READY]
        names = ", ".join(node.host.name for node in away if node.next_call < math.inf)
        names = names or "more nodes than there are"
        if now - self.enough > self.options.wait and here < self.least:
            why = f"the job needs {self.least} of {len(self.nodes)} nodes and has waited "
            why += f"{self.options.wait:g} s for "
            raise UserError(why + names, code=LOST_PEER if self.has_begun else BAD_INPUT)
        if now - self.noted > NOTE_SECONDS:
            self.noted = now
            times = f"{now - self.enough:.0f} s, at most {self.options.wait:g}"
            note(f"waiting for {names}: nodes here: {here}, at least {self.least} needed ({times})")

    def has_right_time(self, node: Node) -> bool:
        """Whether a node's clock agrees with the first one's. Raises: `UserError` at the start."""
        others = [one for one in self.nodes if one is not node and one.hello]
        apart = node.hello["ahead"] - others[0].hello["ahead"] if others else 0.0
        if abs(apart) < CLOCK_SECONDS:
            return True
        text = f"the clock of {node.host.name} is {abs(apart):.0f} s off that of "
        text += f"{others[0].host.name}: set both (timedatectl set-ntp true)"
        if not self.has_begun:
            raise UserError(text)
        self.leave_out(node, text)
        return False

    def leave_out(self, node: Node, why: str) -> None:
        """Do not call a node again."""
        note(f"continuing without {node.host.name} ({why})")
        node.leave(failed=True)
        node.next_call = math.inf

    def ended(self, node: Node) -> None:
        """End the job, or continue on the other nodes."""
        seconds, code, name = time.monotonic() - node.since, node.code, node.host.name
        self.running.remove(node)
        self.last_host = self.last_host if node.lost else node.host
        if self.ending or code == 0:
            self.codes.append(node.result)
            if not self.ending:
                self.finish()
            return
        self.store.set(NODES, str(len(self.running)))
        node.quick = node.quick + 1 if seconds < QUICK_SECONDS else 0
        if node.lost:
            note(f"lost the connection to {name}; will keep trying")
        elif code == BAD_INPUT and node.is_new and self.running:
            self.leave_out(node, "the reason is above")
            return
        elif code == BAD_INPUT or self.store.check([ENDED]) or node.quick >= QUICK_FAILURES:
            self.note_end(node, "; stopping the rest" if self.running else "")
            self.failed, self.codes = node, [node.result]
            self.end("failed", LOST_SECONDS)
            return
        else:
            self.note_end(node, "; will keep trying")
        node.leave(failed=True)

    def exit_code(self) -> int | None:
        if not self.ending or self.running:
            return None
        if self.ending == "interrupted":
            return interrupted_code(self.codes)
        return self.codes[0] if self.ending == "failed" else 0
