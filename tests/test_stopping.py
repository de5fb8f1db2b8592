"""When all ranks stop: they ask each other often enough, and a signal ends a run at any time."""

import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import draw_folder, summary, train
from joined import in_processes
from running import start, tiny

from utils.errors import INTERRUPTED
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


# ---- the end of a run


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Folder of a run ``done`` of one epoch, and of its data, which has DATA/test."""
    root = tmp_path_factory.mktemp("finished")
    data = draw_folder(root / "data")
    shutil.copytree(data / "val", data / "test")
    model, env = tiny()
    options = ("-b", "10", "--epochs", "1", "--output-dir", root, "--name", "done")
    train("imagenet_nd.py", *model, *options, data, **env)
    return root


@pytest.mark.parametrize(
    ("script", "processes", "signum"),
    [
        ("imagenet_nd.py", (), signal.SIGINT),
        ("imagenet_ddp.py", ("-g", "2"), signal.SIGTERM),
    ],
)
def test_a_signal_while_the_test_images_are_evaluated(finished, script, processes, signum):
    """The run has ended as interrupted, and the same command evaluates them."""
    name = Path(script).stem
    run = shutil.copytree(finished / "done", finished / name)
    model, env = tiny()
    line = (*model, *processes, "-b", "10", "--epochs", "1", "--output-dir", finished)
    line += ("--name", name, "--resume", "auto", finished / "data")
    with start(script, *line, HOLD_AFTER="0", **env) as command:
        command.until("waiting for a signal")
        command.send(signum)
        result = command.result()
    assert result.code == INTERRUPTED, result.err
    assert "continue" in result.out
    found = summary(run)
    assert found["finished_because"] == "interrupted"
    assert found["epochs_done"] == 1
    assert "test_top1" not in found
    train(script, *line, **env)
    found = summary(run)
    assert (found["finished_because"], found["test_images"]) == ("epochs", 21)


def test_used_up_time_counts_after_a_resume(finished):
    """The limit is on the whole run: one that has used it up makes one step, and stops."""
    run = shutil.copytree(finished / "done", finished / "slow")
    content = torch.load(run / "snapshot.pt", weights_only=True)
    content["progress"]["elapsed"] = 3600.0
    torch.save(content, run / "snapshot.pt")
    model, env = tiny()
    line = (*model, "-b", "10", "--epochs", "3", "--output-dir", finished, "--name", "slow")
    train(
        "imagenet_nd.py", *line, "--resume", "auto", "--train-time", "1", finished / "data", **env
    )
    assert summary(run)["finished_because"] == "train_time"
    assert summary(run)["epochs_done"] == 1
    assert torch.load(run / "snapshot.pt", weights_only=True)["progress"]["step"] == 1
