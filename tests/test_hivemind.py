"""scripts/examples/hivemind_train.py: three peers on this machine, one comes late, one is killed.

Needs Hivemind, in this environment or in that of the interpreter $HIVEMIND_PYTHON.
"""

import contextlib
import os
import signal
import subprocess
import sys

import pytest
from conftest import TIMEOUT, draw_folder, python, scalars, summary
from running import TINY_LINE, Running, descendants, eventually, tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.long

PYTHON = os.environ.get("HIVEMIND_PYTHON", sys.executable)
EXEC = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"  # keeps the process number
TARGET, EPOCHS = 60, 9
# So slow that it still learns when the third peer comes and the second is killed.
RECIPE = f"{TINY_LINE} --lr 0.004 --epochs {EPOCHS}".split()
_, ENV = tiny(step_seconds=0.25)


@pytest.fixture(scope="module", autouse=True)
def has_hivemind() -> None:
    done = subprocess.run([PYTHON, "-c", "import hivemind"], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"not installed for {PYTHON}: pip install hivemind, or set HIVEMIND_PYTHON")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """300 images to train on: five steps an epoch."""
    return draw_folder(tmp_path_factory.mktemp("swarm") / "data", train=100, val=30)


def peer(name: str, runs, images, *more: str) -> Running:
    options = ("--target-batch", TARGET, "--matchmaking", "2", "-p", "1", "--name", name)
    where = ("--listen", "/ip4/127.0.0.1/tcp/0", "--output-dir", runs, images)
    script = "scripts/examples/hivemind_train.py"
    run = Running("-c", EXEC, PYTHON, script, *RECIPE, *options, *more, *where, **ENV)
    run.allow(3 * TIMEOUT)  # each step waits for peers to find each other
    return run


def test_peers_come_and_go(images, tmp_path):
    """... and reach what one process reaches with as many images; nothing of them is left."""
    one = ("imagenet_nd.py", *RECIPE, "--accum-steps", TARGET // 5, "--name", "one")
    done = python(*one, "--output-dir", tmp_path, images, **tiny()[1])
    assert done.code == 0, done.err
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(peer("first", tmp_path, images))
        assert "no order of samples" in first.until("no order of samples")
        address = first.until("others join with").split()[-1]
        second = stack.enter_context(peer("second", tmp_path, images, "--peers", address))
        first.until("peers 2")
        late = stack.enter_context(peer("late", tmp_path, images, "--peers", address))
        first.until("peers 3")
        late.until(r"Epoch \d+/\d+ step")
        family = second.meet_family()
        second.send(signal.SIGKILL)
        assert eventually(lambda: not any(one.lives() for one in family)), family
        assert not late.seen[-1].startswith("Epoch 1/")  # it has the state of the others
        for run in (first, late):
            result = run.result()
            assert result.code == 0, result.out + result.err
            assert not descendants(run.process.pid)
    results, plain = summary(tmp_path / "first"), summary(tmp_path / "one")
    assert (results["epochs_done"], results["finished_because"]) == (EPOCHS, "epochs")
    assert results["val_top1"] >= plain["val_top1"] - 5
    behind = scalars(tmp_path / "one")["Loss/val"][-2][1]  # by an epoch, at most
    assert results["val_loss"] <= behind
    # The page of charts has none of the swarm, as all other runs would show it empty.
    events = EventAccumulator(str(tmp_path / "first")).Reload()
    last = events.Scalars("Swarm/samples")[-1]
    assert (last.step, last.value) == (EPOCHS, EPOCHS * 300)


def test_peers_that_do_not_answer_are_a_one_line_error(images, tmp_path):
    peers = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWBvRVrAvNnKUNfEhWZUv33SQaHLPZkL7yGvpWQWQGQnJn"
    with peer("lost", tmp_path, images, "--peers", peers) as run:
        result = run.result()
    assert result.code == 2, result.out + result.err
    assert "cannot join the peers at " in result.sentence
