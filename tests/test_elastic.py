"""Processes that die: the others name them, and torchrun's restarts continue the same run."""

import os
import re
import signal
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from conftest import SMALL, summary
from joined import command
from running import Running, descendants, start, tiny

from utils.errors import UserError
from utils.launch import network
from utils.launch.world import Peer, explain_collective, process_group
from utils.run import checkpoint

RESTARTS = ("-m", "torch.distributed.run", "--standalone", "--max-restarts=1")
PEERS = [Peer("a (node 0)", "10.0.0.1"), Peer("a (node 0)", "10.0.0.1")]
PEERS += [Peer("b (node 1)", "10.0.0.2"), Peer("b (node 1)", "10.0.0.2")]
CLOSED = "[/src/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:1234"
REMOTE = "NCCL error in: a.cpp:1, remote process exited or there was a network error"


def test_a_process_that_lost_a_peer_has_an_exit_code_of_its_own(monkeypatch):
    """Schedulers and the launcher over ssh tell by it that a new attempt makes sense."""
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": network.free_port()}
    for name, value in (place | {"MASTER_ADDR": "127.0.0.1"}).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    args = SimpleNamespace(dist_backend=None, dist_timeout=9.0, sync_bn=False)
    try:
        with pytest.raises(UserError) as lost, process_group(args):
            raise RuntimeError(CLOSED)
    finally:
        dist.destroy_process_group()
    assert lost.value.code == 69


@pytest.mark.parametrize(
    ("fault", "peers", "words"),
    [
        (RuntimeError(CLOSED), PEERS, ("rank 0 of 4 on a", "ranks 2, 3 on b", "was killed")),
        (RuntimeError(CLOSED), PEERS[:1] + PEERS[2:3], ("rank 1 on b (node 1), 10.0.0.2",)),
        (RuntimeError("gloo: Timed out waiting 5000ms"), PEERS[1:3], ("rank 1", "within 9 s")),
        (
            RuntimeError("gloo: No route to host"),
            PEERS,
            ("the link to it", "ranks 1, 2, 3"),
        ),
        (dist.DistBackendError(REMOTE), PEERS, ("has ended",)),
        (dist.DistBackendError("unhandled cuda error"), PEERS, ("CUDA failed",)),
        (dist.DistStoreError("wait timeout after 9000ms"), [], ("rank 0 lost", "within 9 s")),
        (TimeoutError("the store"), PEERS * 4, ("another process of the job",)),
    ],
)
def test_a_failed_collective_is_explained(fault, peers, words):
    sentence = explain_collective(fault, 0, peers, 9)
    assert "/src/gloo" not in sentence
    assert "--resume" in sentence
    for word in words:
        assert word in sentence


@pytest.mark.parametrize("fault", [RuntimeError("shapes differ"), TimeoutError(110, "NFS")])
def test_other_faults_are_left_alone(fault):
    assert explain_collective(fault, 0, PEERS, 9) is None


def workers(run: Running, pattern: str) -> list[int]:
    """The training processes of a launcher, in the order of their start."""
    found = [one for one in descendants(run.process.pid) if re.search(pattern, one.command)]
    return sorted(one.pid for one in found if one.parent == run.process.pid)


def test_torchrun_restarts_continue_from_the_snapshot(folder, tmp_path):
    model, env = tiny(step_seconds=0.05)
    options = ("-b", "5", "-p", "1", "--epochs", "2", "--output-dir", tmp_path, folder)
    launcher = (*RESTARTS, "--nproc_per_node=2")
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    line = (*model, "--name", "one", "--resume", "auto", *options)
    with start("imagenet_ddp.py", *line, launcher=launcher, **env) as run:
        run.until(r"Epoch 2/2 step +3/")
        killed = workers(run, r" -u imagenet_ddp\.py")[0]
        os.kill(killed, signal.SIGKILL)
        result = run.result()
    assert result.code == 0, result.out + result.err
    assert f"process {killed} on" in result.out
    assert re.search(r"resumed from \S+: epoch 2, step 0", result.out)
    found = summary(tmp_path / "one")
    assert (found["finished_because"], found["epochs_done"]) == ("epochs", 2)


NAMED = ("--name", "a", "--resume", "auto")


@pytest.mark.parametrize("more", [(), NAMED[:2], (*NAMED, "--start-epoch", "1")])
def test_restarts_need_a_run_to_continue(folder, tmp_path, more):
    env = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(network.free_port()), "TORCHELASTIC_MAX_RESTARTS": "3"}
    words = (*SMALL, "-j", "0", *more, "--output-dir", tmp_path, folder)
    command("imagenet_ddp", *words, **env).fails_with("--name X --resume auto")
    assert not list(tmp_path.iterdir())


def test_fewer_processes_go_on_at_the_step_boundary_before(monkeypatch):
    """Half an epoch of 20 steps of 10 images; then there are 3 processes of 5, or one of 5."""
    state = checkpoint.TrainState(None, None, None, global_batch=10, step=7, sums=[70.0, 7, 35, 70])
    with pytest.raises(UserError, match="global batch 10 "):
        checkpoint._rescale_position(state, 15)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert checkpoint._rescale_position(state, 15) == 10
    assert (state.step, state.global_batch, state.sums) == (4, 15, [60.0, 6.0, 30.0, 60.0])
    assert checkpoint._rescale_position(state, 5) == 0
    assert (state.step, state.global_batch) == (12, 5)
