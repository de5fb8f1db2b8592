"""When all ranks stop: they ask each other often enough, and not more often than that."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from test_comm import in_processes

from utils.launch.world import World
from utils.train import stopping
from utils.train.stopping import FARTHEST, Reason, StopRequest


def polled(rank: int, size: int) -> dict[str, Any]:
    """What a rank sees; rank 1 wishes for the end. The clock moves by ``seconds`` at each poll."""
    clock = SimpleNamespace(now=0.0)
    stopping.time = SimpleNamespace(monotonic=lambda: clock.now)
    votes, real = [], dist.all_reduce

    def counted(*arguments: Any, **options: Any) -> Any:
        votes.append(clock.now)
        return real(*arguments, **options)

    stopping.dist.all_reduce = counted
    stop = StopRequest(World(torch.device("cpu"), rank, size), None, 0.0, minutes=1.0)
    found: dict[str, Any] = {"due": []}

    def polls(count: int, seconds: float) -> int:
        votes.clear()
        for number in range(count):
            clock.now += seconds
            stop.poll()
            if stop.snapshot_due:
                found["due"].append(clock.now)
            if stop.reason:
                return number
        return len(votes)

    found["fast"] = polls(200, 0.001)
    stop.begin_phase()
    found["slow after fast"] = polls(20, 10.0)
    found["fast again"] = polls(50, 0.001)
    if rank == 1:
        stop.ask(Reason.INTERRUPTED)
    found["stopped after"] = polls(200, 0.001)
    found["reason"] = stop.reason
    stop.close()
    return found


def test_two_ranks_vote_at_some_steps_and_stop_at_the_same():
    one, other = in_processes(2, polled)
    assert one == other
    assert 200 / FARTHEST <= one["fast"] < 200 / FARTHEST + 5
    assert one["slow after fast"] == 20, "steps that last are asked about each"
    assert one["fast again"] < 15
    assert one["stopped after"] <= FARTHEST + 1
    assert one["reason"] is Reason.INTERRUPTED
    assert len(one["due"]) == 3, "every minute of 200 seconds"
