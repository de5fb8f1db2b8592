"""Processes that die: the others name them, and torchrun's restarts continue the same run."""

import os
import re
import signal
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from conftest import SMALL, summary
from joined import command
from running import TORCHRUN, alone, descendants, start

from utils.errors import UserError
from utils.extras.lost_peer import explain
from utils.snapshots import TrainState
from utils.world import is_lost_peer, process_group

RESTARTS = (*TORCHRUN, "--max-restarts=1", "--nproc_per_node=2")
NAMED = ("--name", "a", "--resume", "auto")
PEERS = 2 * [("a (node 0)", "10.0.0.1")] + 2 * [("b (node 1)", "10.0.0.2")]
CLOSED = "[/src/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:1234"
REMOTE = "NCCL error in: a.cpp:1, remote process exited or there was a network error"


def test_a_process_that_lost_a_peer_has_an_exit_code_of_its_own(monkeypatch):
    """Schedulers and the launcher over ssh see by it that a new attempt makes sense."""
    for name, value in (alone() | {"GLOO_SOCKET_IFNAME": "lo"}).items():
        monkeypatch.setenv(name, value)
    args = SimpleNamespace(dist_backend=None, dist_timeout=9.0, sync_bn=False, name=None)
    try:
        with pytest.raises(UserError) as lost, process_group(args):
            raise RuntimeError(CLOSED)
    finally:
        dist.destroy_process_group()
    assert lost.value.code == 69


@pytest.mark.parametrize(
    ("error", "peers", "words"),
    [
        (RuntimeError(CLOSED), PEERS, ("rank 0 of 4 on a", "ranks 2, 3 on b", "was killed")),
        (RuntimeError("gloo: Timed out waiting 5000ms"), PEERS[1:3], ("rank 1", "within 9 s")),
        (dist.DistBackendError(REMOTE), PEERS, ("ranks 1, 2, 3", "has ended")),
        (dist.DistBackendError("unhandled cuda error"), PEERS, ("CUDA failed",)),
        (dist.DistStoreError("wait timeout after 9000ms"), [], ("rank 0 lost", "within 9 s")),
        (RuntimeError("shapes differ"), PEERS, ()),
        (TimeoutError(110, "NFS"), PEERS, ()),
    ],
)
def test_a_failed_collective_is_explained(error, peers, words):
    """Other errors keep their traceback."""
    assert is_lost_peer(error) == bool(words)
    sentence = explain(error, 0, peers, 9)
    for word in words:
        assert word in sentence
        assert "--resume" in sentence
        assert "/src/gloo" not in sentence


def test_torchrun_restarts_continue_from_the_snapshot(folder, tmp_path):
    env = {"STEP_SECONDS": "0.05", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    line = ("-a", "tiny_plain", "-b", "5", "-p", "1", "--epochs", "2", *NAMED)
    where = ("--output-dir", tmp_path, folder)
    with start("imagenet_ddp.py", *line, *where, launcher=RESTARTS, **env) as run:
        run.until(r"Epoch 2/2 step +3/")
        family = descendants(run.process.pid)
        killed = min(one.pid for one in family if " -u imagenet_ddp.py" in one.command)
        os.kill(killed, signal.SIGKILL)
        result = run.result()
    assert result.code == 0, result.out + result.err
    assert f"process {killed} on" in result.out
    assert re.search(r"resumed from \S+: epoch 2, step 0", result.out)
    facts = summary(tmp_path / "a")
    assert (facts["finished_because"], facts["epochs_done"]) == ("epochs", 2)


@pytest.mark.parametrize("more", [(), NAMED[:2], (*NAMED, "--start-epoch", "1")])
def test_restarts_need_a_run_to_continue(folder, tmp_path, more):
    env = alone() | {"TORCHELASTIC_MAX_RESTARTS": "3"}
    words = (*SMALL, "-j", "0", *more, "--output-dir", tmp_path, folder)
    command("imagenet_ddp", *words, **env).fails_with("--name X --resume auto")
    assert not list(tmp_path.iterdir())


def test_fewer_processes_go_on_at_the_step_boundary_before(monkeypatch):
    """After 7 steps of 2 processes of 5 images there are 3 processes."""
    old = TrainState(None, None, None, global_batch=10, step=7, sums=[70.0, 7, 35, 70])
    new = TrainState(None, None, None, global_batch=15)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    new.load_state_dict(old.state_dict())
    assert (new.step, new.global_batch, new.sums) == (4, 15, [60.0, 6.0, 30.0, 60.0])
