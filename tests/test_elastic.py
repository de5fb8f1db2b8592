"""Processes that die: the others name them, and torchrun's restarts continue the same run.

What the launcher over ssh does about them, test_job.py tests.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torchrun
from conftest import ROOT, SMALL, summary
from elastic_agent import ENDED, NODES, Agent, first_code
from joined import Forked, command, start
from running import TORCHRUN, Running, alone, descendants, eventually, free_port

from utils.run.snapshots import TrainState
from utils.start import meeting, preflight, signals
from utils.start.errors import UserError
from utils.start.lost_peer import explain
from utils.start.world import is_lost_peer, process_group

sys.path.append(str(ROOT / "scripts/ssh"))
from elastic import Elastic
from hosts import Host
from job import Job

RESTARTS = (*TORCHRUN, "--max-restarts=1", "--nproc_per_node=2")
NAMED = ("--name", "a", "--resume", "auto")
PEERS = 2 * [("a (node 0)", "10.0.0.2")] + 2 * [("b (node 1)", "10.0.0.21")]
CLOSED = "[/src/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.21]:1234"
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
        (
            dist.DistBackendError(REMOTE),
            [PEERS[0]] * 9,
            ("one of the ranks 1, 2, 3, 4, 5, 6, 7, 8",),
        ),
        (dist.DistBackendError(REMOTE), [PEERS[0]] * 10, ("another process of the job",)),
        (RuntimeError("shapes differ"), PEERS, ()),
        (TimeoutError(110, "Connection timed out", "/nfs/data"), PEERS, ()),
    ],
)
def test_a_failed_collective_is_explained(error, peers, words):
    """Other errors keep their traceback."""
    assert is_lost_peer(error) == bool(words)
    sentence = explain(error, 0, peers, 9)
    for word in words:
        assert word in sentence
        assert "run the same command again" in sentence  # before there is a run directory
        assert "/src/gloo" not in sentence


def test_torchrun_restarts_continue_from_the_snapshot(folder, tmp_path):
    # In the third step of the second epoch.
    env = {"HOLD_AFTER": "9", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    line = ("-a", "tiny_plain", "-b", "5", "-p", "1", "--epochs", "2", *NAMED)
    where = ("--output-dir", tmp_path, folder)
    with start("imagenet_ddp.py", *line, *where, launcher=RESTARTS, **env) as run:
        run.until("waiting for a signal")
        assert eventually((tmp_path / "a/snapshot.pt").exists)  # written by a thread
        family = descendants(run.process.pid)
        killed = min(one.pid for one in family if " -u imagenet_ddp.py" in one.command)
        os.kill(killed, signal.SIGKILL)
        result = run.result()
    assert result.code == 0, result.out + result.err
    assert f"process {killed} on" in result.out
    assert "then run the same command again, unless it restarts by itself" in result.err
    assert re.search(r"resumed from \S+: epoch 2, step 0", result.out)
    facts = summary(tmp_path / "a")
    assert (facts["finished_because"], facts["epochs_done"]) == ("epochs", 2)


def meet(port: int, rank: int) -> None:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(1 - rank)
    meeting.meet_all(("127.0.0.1", port), rank, 2, 20.0)


def test_ranks_meet_whose_agents_have_counted_different_restarts(monkeypatch):
    """Rank 1's node has just joined a job whose other node was restarted before."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    here, port = multiprocessing.get_context("fork"), free_port()
    ranks = [here.Process(target=meet, args=(port, rank)) for rank in (0, 1)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    assert [one.exitcode for one in ranks] == [0, 0]


def test_of_many_ranks_that_do_not_come_some_are_named(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    eight = "ranks 1, 2, 3, 4, 5, 6, 7, 8"
    for size, named in ((9, f"{eight} of 9"), (10, f"{eight}, ... of 10")):
        with pytest.raises(UserError, match=f"^{named} have not joined the job within 0.2 s"):
            meeting.meet_all(("127.0.0.1", free_port()), 0, size, 0.2)


def test_a_rank_that_is_given_twice_is_named_on_every_node(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    address, began = ("127.0.0.1", free_port()), time.monotonic()

    def join(rank: int) -> str:
        with pytest.raises(UserError) as error:
            meeting.meet_all(address, rank, 3, 60.0)
        return f"{error.value.code}: {error.value}"

    with ThreadPoolExecutor(3) as pool:
        for text in pool.map(join, (0, 1, 1)):
            assert text.startswith("2: two processes have rank 1 of 3, on ")
    assert time.monotonic() - began < 30, "somebody has waited for the time limit"


def test_a_rank_that_is_stopped_while_it_waits_for_others_ends_those_that_wait(monkeypatch):
    """Ctrl-C on one node; the last rank has not come yet."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    address, stopped, sleep = ("127.0.0.1", free_port()), threading.Event(), time.sleep

    def stop(seconds: float) -> None:
        sleep(seconds)
        if threading.current_thread().name.endswith("_1") and not stopped.is_set():
            stopped.set()
            raise signals.Stopped(signal.SIGTERM)

    def join(rank: int) -> str:
        threading.current_thread().name = f"rank_{rank}"
        with pytest.raises((UserError, signals.Stopped)) as error:
            meeting.meet_all(address, rank, 3, 600.0)
        return str(error.value)

    monkeypatch.setattr(time, "sleep", stop)
    with ThreadPoolExecutor(2) as pool:
        told, own = pool.map(join, (0, 1))
    assert own == "SIGTERM"
    assert told == f"on {socket.gethostname()}: SIGTERM has stopped it; run the same command again"


def test_the_end_of_rank_0_is_named_while_the_others_meet(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    address, fork = ("127.0.0.1", free_port()), multiprocessing.get_context("fork")
    first = fork.Process(target=meeting.meet_all, args=(address, 0, 3, 60.0), daemon=True)
    first.start()
    sleep, waits = time.sleep, threading.Event()

    def slept(seconds: float) -> None:
        waits.set()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", slept)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(meeting.meet_all, address, 1, 3, 60.0)
        assert waits.wait(60)
        first.kill()
        with pytest.raises(UserError, match=r"^lost touch with the store .* node 0: look") as error:
            other.result()
    assert error.value.code == 69


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_a_rank_that_fails_before_it_comes_tells_the_others_why(monkeypatch, restarts):
    """Unless the job is elastic, and may go on without it."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    env = alone() | {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": restarts}
    address = ("127.0.0.1", int(env["MASTER_PORT"]))

    def answers() -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(address).close()
            return True
        return False

    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(meeting.meet_all, address, 0, 2, 30.0)
        assert eventually(answers)
        command("imagenet_ddp", "/nowhere", **env).fails_with("data folder /nowhere is missing")
        if restarts == "1":
            assert meeting.meet_all(address, 1, 2, 30.0) and waits.result()
        else:
            with pytest.raises(UserError, match=r"^on \S+: data folder /nowhere is miss") as error:
                waits.result()
            assert error.value.code == 69


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


# ---- scripts/torchrun.py with --max_restarts: elastic_agent.py

# Ends with the next exit code of its node's list; without one it goes on for ever.
TRAINING = """
import ctypes, os, signal, sys, time
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it dies with torchrun
node = sys.argv[1]
print(f"{node}: start on {os.environ['WORLD_SIZE']} nodes", flush=True)
codes = open(node).read().split()
open(node, "w").write(" ".join(codes[1:]))
code = int(codes[0]) if codes else time.sleep(600)
sys.exit(code) if code >= 0 else os.kill(os.getpid(), -code)
"""


@pytest.fixture
def store():
    """The store of a rendezvous, as scripts/ssh/elastic.py holds it."""
    limit = timedelta(seconds=30)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)


@pytest.fixture
def agent(store, tmp_path):
    """A function that starts torchrun for a node whose training ends with these codes."""
    (tmp_path / "train.py").write_text(TRAINING)

    def agent(node: str, codes: str = "") -> Running:
        (tmp_path / node).write_text(codes)
        options = ["--nnodes=1:2", "--rdzv_backend=c10d", "--rdzv_id=a", "--local_addr=127.0.0.1"]
        options += [f"--rdzv_endpoint=127.0.0.1:{store.port}", "--nproc_per_node=1"]
        alive = "keep_alive_interval=1,keep_alive_max_attempt=3"
        options += [f"--rdzv_conf=is_host=false,last_call_timeout=1,{alive}", "--max_restarts=99"]
        script = (tmp_path / "train.py", tmp_path / node)
        off = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return Forked("scripts/torchrun.py", *options, *script, **off)

    return agent


@pytest.mark.parametrize(
    ("failures", "code"),  # (time, exit code) of each
    [([(10, 69), (12, 1)], 69), ([(12, 1), (10, -9)], -9), ([(10, 69), (11, 2)], 2)],
)
def test_the_first_failure_of_a_node_counts(failures, code):
    """torchrun then stops the other processes, which have codes of their own."""
    listed = [SimpleNamespace(timestamp=when, exitcode=own) for when, own in failures]
    assert first_code(listed) == code


@pytest.mark.parametrize(
    ("codes", "code", "starts", "said"),
    [
        ("0", 0, 1, ""),
        ("2", 2, 1, ""),  # bad input, which the training process reports
        ("1 2 -9 0", 0, 4, ""),
        ("1 2 2", 2, 3, ""),
        ("-9 -9 -9 -9 -9", 69, 5, "error: training has failed 5 times in a row soon after start\n"),
    ],
)
def test_which_failures_are_worth_a_restart(agent, store, codes, code, starts, said):
    with agent("a", codes) as run:
        result = run.result()
    assert (result.code, result.out.count("start on 1"), result.err) == (code, starts, said)
    assert store.check([ENDED]) == bool(said)


@pytest.mark.parametrize(("nodes", "is_lost"), [(1, False), (2, False), (3, True)])
def test_a_node_is_lost_if_the_job_has_more_than_there_are(nodes, is_lost):
    """One that is there may still have to join."""
    messages = SimpleNamespace(check=lambda _: True, get=lambda _: b"2")
    agent = SimpleNamespace(next_look=0.0, messages=messages)
    assert Agent.has_lost_node(agent, SimpleNamespace(group_world_size=nodes)) == is_lost


@pytest.mark.long
def test_bad_input_of_a_new_node_and_the_loss_of_a_node_leave_the_other(agent, store, tmp_path):
    """A node that is gone does not say so: its number in the store does."""
    store.set(NODES, "2")
    with agent("a") as one:
        one.until("start on 1")
        with agent("b", "2") as new:
            assert new.result().code == 2
        store.set(NODES, "1")
        one.until("start on 1")
        store.set(NODES, "2")
        with agent("c") as lost:
            one.until("start on 2")
            lost.until("start on 2")
            for process in lost.meet_family():
                os.kill(process.pid, signal.SIGKILL)
            lost.send(signal.SIGKILL)
        time.sleep(3)
        waits = [process for process in descendants(one.pid) if "train.py" in process.command]
        assert waits, "without a word of the launcher, the process waits for the other"
        (tmp_path / "a").write_text("0")
        store.set(NODES, "1")
        one.until("start on 1")
        assert one.result().code == 0


def test_only_failures_soon_after_the_start_count_as_failures_in_a_row():
    """The launcher's own count, of a node that goes down again and again, and an agent's."""
    agent = SimpleNamespace(starts=2, quick=0, was_bad_input=False, messages=mock.Mock())
    job = Elastic(SimpleNamespace(elastic=(1, 1), wait=1.0), [], [Host("a")], "")
    (node,) = job.nodes
    for number, seconds in enumerate((1.0, 1.0, 300.0, 119.0, 1.0, 1.0, 1.0, 1.0), 1):
        job.running, node.code, node.since = [node], 1, time.monotonic() - seconds
        job.ended(node)
        assert job.ending == ("failed" if number == 8 else "")
        agent.began = time.monotonic() - seconds
        with pytest.raises(UserError) if number == 8 else nullcontext():
            Agent.judge(agent, 1)
    assert job.run_host is node.host


def test_a_run_is_fetched_from_the_last_node_that_was_not_lost():
    job = Elastic(SimpleNamespace(elastic=(1, 2), wait=1.0), [], [Host("a"), Host("b")], "")
    job.running = [*job.nodes]
    for node, code in zip(job.nodes, (1, 255), strict=True):
        node.code = code
        job.ended(node)
        assert job.run_host == Host("a")


def test_a_job_gives_up_when_too_few_nodes_have_come(capsys):
    job = Elastic(SimpleNamespace(elastic=(1, 2), wait=90.0), [], [Host("a"), Host("b")], "")
    for seconds in (20, 40):
        job.wait_for_more(job.enough + seconds, ready=0)
        text = f"waiting for a, b: nodes here: 0, at least 1 needed ({seconds} s, at most 90)\n"
        assert capsys.readouterr().err == f"launcher: {text}"
    job = Elastic(SimpleNamespace(elastic=(1, 2), wait=1.0), [], [Host("a"), Host("b")], "")
    later = time.monotonic() + 5
    job.wait_for_more(later, ready=1)  # it is enough; the other one may still come
    with pytest.raises(UserError, match="needs 1 of 2 nodes and has waited 1 s for a, b"):
        job.wait_for_more(later, ready=0)
    job.running = job.nodes[:1]
    job.wait_for_more(later + 500, ready=0)
    job.running = []  # it trained until now, and may come back
    job.wait_for_more(later + 500.5, ready=0)


def test_the_agents_are_told_how_many_nodes_there_are(monkeypatch):
    job = Elastic(SimpleNamespace(elastic=(1, 2), wait=1.0), [], [Host("a"), Host("b")], "")
    monkeypatch.setattr(Job, "start", lambda self, nodes: self.running.extend(nodes))
    for node, number in zip(job.nodes, (b"1", b"2"), strict=True):
        job.start([node])
        assert job.store.get(NODES) == number
        job.has_begun = True
    assert [node.is_new for node in job.nodes] == [False, True]
    node.code = 255
    job.ended(node)
    assert job.store.get(NODES) == b"1"


@pytest.mark.parametrize(
    ("processes", "gpus", "rank", "threads", "limit", "conf"),
    [
        ("3", 0, "1 2 h:5", "2", "7", "timeout=60"),
        ("gpu", 0, "0 2 h:5", "8", None, "timeout=300"),
        ("gpu", 3, "1 2 h:5", "2", "9", "timeout=7"),  # given by the user
        ("9", 0, "0 1 h:5", "1", "7", "timeout=60"),
    ],
)
def test_what_a_node_over_ssh_prepares(monkeypatch, processes, gpus, rank, threads, limit, conf):
    """Its processes share the cores; it waits for the others as long as training would."""
    met = []
    monkeypatch.setattr(preflight, "meet", lambda *given: met.append(given))
    monkeypatch.setattr(torchrun, "usable_cores", lambda: 8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("IMAGENET_ALL_UP", rank)
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    words = ["-a", "x", *(["--dist-timeout", limit] if limit else [])]
    options = SimpleNamespace(nproc_per_node=processes, training_script_args=words)
    options.rdzv_backend, options.rdzv_conf = "static", conf if gpus else ""
    torchrun.prepare(options)
    assert options.rdzv_conf == conf
    set_by_it = [os.environ[name] for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")]
    assert set_by_it == [threads, "passive"]
    number, nodes, _ = rank.split()
    whole = (int(number), 2, 1 if threads == "8" else 3, ("h", 5), float(limit or 300))
    assert met == [whole] * (nodes == "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    torchrun.prepare(options)
    assert os.environ["OMP_NUM_THREADS"] == "5", "given by the user"
