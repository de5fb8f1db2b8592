"""torchrun's elastic agent, which restarts a node's training processes, for scripts/torchrun.py.

Restarts go on until training has ended, with these exceptions:

- Bad input (exit code 2) ends the agent of a node that has just joined. An agent that has trained
  before restarts once, as the bad input may be that of a new node.
- `QUICK_FAILURES` failures in a row, each within `QUICK_SECONDS` of the start, end the job.

scripts/ssh/elastic.py writes the number of nodes into the store of the rendezvous. When the job has
more nodes than that, one of them was lost. The agent then kills its processes, which may wait for
the lost node, and restarts. Without that number, torchrun waits until they give up.
"""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] (documented)
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher import api

from utils.start.errors import BAD_INPUT, LOST_PEER, UserError
from utils.start.launch import job_exit_code

QUICK_SECONDS, QUICK_FAILURES = 120.0, 5
NODES, ENDED = "imagenet/nodes", "imagenet/ended"  # keys: number of nodes; why the job has ended
STORE_SECONDS = 10.0  # time for the store to answer
_EXIT_BARRIER_SECONDS = 30.0  # for the other nodes to finish, too; torchrun's default is 300


class BadInput(SignalException):
    """Ends this agent, and leaves the job to the others (torchrun: only a signal does that)."""

    def __init__(self) -> None:
        super().__init__("bad input", signal.SIGTERM)


_Base: Any = LocalElasticAgent  # an untyped decorator hides the arguments of its methods


class Agent(_Base):
    """An agent with the rules above. ``endpoint``: host and port of the rendezvous store."""

    endpoint: tuple[str, int] = ("", 0)

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, exit_barrier_timeout=_EXIT_BARRIER_SECONDS, **named)
        host, port = self.endpoint
        limit = timedelta(seconds=STORE_SECONDS)
        self.messages = TCPStore(host, port, timeout=limit, wait_for_workers=False)
        self.starts = 0  # how often training has begun here
        self.quick = 0  # failures in a row soon after start
        self.was_bad_input = False
        self.began = self.next_look = 0.0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.starts += 1
        self.began = time.monotonic()
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            self.judge(first_code(result.failures.values()))
        elif result.state == WorkerState.HEALTHY and self.has_lost_node(worker_group):
            for worker in worker_group.workers:
                with suppress(ProcessLookupError):
                    os.kill(worker.id, signal.SIGKILL)
            self.quick = 0
            self._remaining_restarts += 1  # it is not a failure of this node
            return RunResult(state=WorkerState.UNHEALTHY)
        return result

    def judge(self, code: int) -> None:
        """Decide after a failure whether to restart. Raises: `BadInput`, `UserError`."""
        if code == BAD_INPUT and (self.starts == 1 or self.was_bad_input):
            raise BadInput
        self.was_bad_input = code == BAD_INPUT
        is_quick = time.monotonic() - self.began < QUICK_SECONDS
        self.quick = self.quick + 1 if is_quick else 0
        if self.quick >= QUICK_FAILURES:
            why = f"training has failed {self.quick} times in a row soon after start"
            with suppress(RuntimeError):
                self.messages.set(ENDED, why)
            raise UserError(why, code=LOST_PEER if code < 0 else code)

    def has_lost_node(self, worker_group: WorkerGroup) -> bool:
        """Whether the job has more nodes than there are. Looks once a second."""
        if (now := time.monotonic()) < self.next_look:
            return False
        self.next_look = now + 1.0
        with suppress(RuntimeError):  # the launcher is gone: the guard ends this process
            if self.messages.check([NODES]):
                return int(self.messages.get(NODES)) < (worker_group.group_world_size or 0)
        return False


def use(host: str, port: int) -> None:
    """Make torchrun use `Agent`, whose rendezvous store is at ``host`` and ``port``."""
    Agent.endpoint = (host, port)
    setattr(api, "LocalElasticAgent", Agent)  # noqa: B010 (torch offers no other way)


def first_code(failures: Iterable[ProcessFailure]) -> int:
    """Return the exit code that says why a node's processes have failed; -N: by signal N."""
    all_failures = list(failures)
    # Processes that ended later were stopped by torchrun because of the first failure.
    latest = min(one.timestamp for one in all_failures) + 1  # in whole seconds
    return job_exit_code([one.exitcode for one in all_failures if one.timestamp <= latest])
