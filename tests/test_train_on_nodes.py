"""scripts/train_on_nodes.sh on nodes with an sshd each: nothing is left behind, whatever ends.

The second part is about --elastic: nodes that are lost, node 0 too, come back, never come.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, TIMEOUT, summary
from nodes import Node, Nodes, Typed, need
from running import TINY_LINE, Process, eventually, tiny

INTERRUPTED, LOST_PEER = 75, 69
ENV = tiny()[1] | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
SECRET = "kept+from/everybody="
# A node that has lost its launcher is empty 25 s later, on a machine with time for it. The limit
# is below that of `Typed`, which would end the launcher and so the processes.
EMPTY_SECONDS = TIMEOUT / 2


def three_nodes() -> Iterator[list[Node]]:
    """node0 to type on, node1 and node2 to train on."""
    with Nodes(3) as all_nodes:
        for node in all_nodes[1:]:
            node.start_sshd(**ENV)
        yield all_nodes


@pytest.fixture(scope="module")
def nodes():
    """Shared by tests that leave them as they are."""
    yield from three_nodes()


@pytest.fixture
def hosts(tmp_path) -> Path:
    """A list of node1 and node2."""
    path = tmp_path / "hosts"
    path.write_text("# ssh names\nnode1\nroot@node2  # another user\n")
    return path


def line(hosts: Path | str, training: str, launcher: str = f"--dir {ROOT}") -> str:
    """The command as people type it."""
    return f"bash scripts/train_on_nodes.sh {hosts} {launcher} -- {training}"


def ours(nodes: list[Node]) -> set[Process]:
    """What lives in the nodes."""
    return set().union(*(node.processes() for node in nodes))


def script_on(node: Node) -> int:
    """The process id of the training script on a node, which starts the ranks."""
    (script,) = [one.pid for one in node.processes() if "imagenet_ddp.py" in one.command]
    return script


def rank_on(node: Node) -> int:
    """The process id of the rank on a node. Its loader workers have the same command line."""
    script = script_on(node)
    found = [one for one in node.processes() if one.parent == script]
    (rank,) = [one.pid for one in found if "spawn_main" in one.command]
    return rank


def test_two_nodes_sync_and_fetch(nodes, folder, tmp_path):
    """The code goes there, the run comes back, and each line shows where it is from.

    Typed as for horovodrun, but for our own options.
    """
    need("rsync")
    code = tmp_path / "copied"
    (tmp_path / "here").mkdir()
    python = "import sys; print(sys.executable)"
    python = nodes[0].run(["python", "-c", python]).out.strip()
    launcher = f"--sync --fetch --dir {code} --python {python} --port 8888 --env TIMES=3"
    launcher += f" --env AWS_SECRET_ACCESS_KEY={SECRET} --env=HERE"
    training = f"imagenet_ddp.py {TINY_LINE} --epochs 1 --name mine {folder}"
    typed = line("-np 2 -H node1:1,root@node2:1", f"python {training}", launcher)
    typed = typed.replace("scripts/", f"{ROOT}/scripts/").replace(" -- ", " ")
    done = nodes[0].run(typed, cwd=tmp_path / "here", env={"HERE": SECRET})
    assert done.code == 0, done.out + done.err
    assert SECRET not in done.out + done.err
    assert "TIMES=*** AWS_SECRET_ACCESS_KEY=*** HERE=*** python imagenet_ddp.py" in done.out
    here, there = tmp_path / "here" / "runs" / "mine", code / "runs" / "mine"
    found = summary(here)
    assert found == summary(there)
    assert (found["world_size"], found["nodes"], found["epochs_done"]) == (2, 2, 1)
    assert (here / "snapshot.pt").read_bytes() == (there / "snapshot.pt").read_bytes()
    files = [path for path in (code / "runs").rglob("*") if path.is_file()]
    assert {"options.json", "train.log"} <= {path.name for path in files}
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert not (code / ".git").exists()
    lines = done.out.splitlines()
    assert any(one.startswith("[node1] Epoch 1/1") for one in lines), done.out
    assert any(one.startswith("[node2] [rank 1] Epoch 1/1") for one in lines), done.out
    assert f"[node1] + cd {code}; MASTER_ADDR=10.77.0.2 MASTER_PORT=8888 WORLD_SIZE=2" in done.out
    assert "\033[" not in done.out + done.err
    assert not ours(nodes)


@pytest.mark.long
def test_four_nodes_with_two_processes_each(folder, tmp_path):
    with Nodes(4) as four:
        for node in four:
            node.start_sshd(**ENV)
        hosts = tmp_path / "hosts"
        hosts.write_text("".join(f"{node.name} slots=2\n" for node in four))
        training = f"imagenet_ddp.py {TINY_LINE} -b 2 --epochs 1 --name run --output-dir {tmp_path}"
        done = four[0].run(line(hosts, f"{training} {folder}"))
        assert done.code == 0, done.out + done.err
        assert summary(tmp_path / "run")["world_size"] == 8
        assert not ours(four)


def silent(
    nodes: list[Node], hosts: Path, folder: Path, runs: Path, step_seconds: float, grace: int = 0
) -> Typed:
    """A training on both nodes that never ends and prints nothing.

    By default, ``grace`` leaves time for a snapshot where the steps do.
    """
    grace = grace or (100 if step_seconds < 1 else 20)
    lasting = f"--epochs 100000 -p 1000000 --name run --output-dir {runs} {folder}"
    launcher = f"--dir {ROOT} --grace {grace} --env STEP_SECONDS={step_seconds}"
    launcher += f" --env SECRET={SECRET}"
    started = nodes[0].type(line(hosts, f"imagenet_ddp.py {TINY_LINE} {lasting}", launcher))
    log = runs / "run" / "train.log"
    assert eventually(lambda: log.exists() and "steps per epoch" in log.read_text(), TIMEOUT / 2)
    assert len(ours(nodes[1:])) >= 6  # guards, scripts, ranks
    given = f"SECRET={SECRET}".encode()
    seen = [one for one in ours(nodes) if given in Path(f"/proc/{one.pid}/environ").read_bytes()]
    assert len(seen) >= 4  # the variable is there, on no command line
    assert not [one for one in ours(nodes) if SECRET in one.command]
    return started


@pytest.mark.parametrize(
    ("way", "step_seconds"),
    [
        ("SIGKILL", 0.05),
        pytest.param("SIGINT", 0.05, marks=pytest.mark.long),
        pytest.param("SIGTERM", 0.05, marks=pytest.mark.long),
        pytest.param("SIGHUP", 0.05, marks=pytest.mark.long),
        # Ranks that are stuck in a step do not notice a request.
        pytest.param("SIGINT", 600, marks=pytest.mark.long),
        pytest.param("SIGTERM", 600, marks=pytest.mark.long),
        pytest.param("SIGKILL", 600, marks=pytest.mark.long),
    ],
)
def test_a_launcher_that_ends_leaves_no_process(nodes, hosts, folder, tmp_path, way, step_seconds):
    with silent(nodes, hosts, folder, tmp_path, step_seconds) as run:
        group = way == "SIGINT"  # from the terminal
        run.send(getattr(signal, way), group=group)
        assert eventually(lambda: not ours(nodes), EMPTY_SECONDS), ours(nodes)
        run.process.wait()
        if step_seconds < 1:  # it had time for a snapshot
            assert summary(tmp_path / "run")["finished_because"] == "interrupted"
            assert way == "SIGKILL" or run.process.returncode == INTERRUPTED


@pytest.mark.long
def test_a_second_interrupt_ends_at_once(nodes, hosts, folder, tmp_path):
    with silent(nodes, hosts, folder, tmp_path, 600, grace=600) as run:
        run.send(signal.SIGINT, group=True)
        time.sleep(1)
        assert ours(nodes)
        run.send(signal.SIGINT, group=True)
        assert eventually(lambda: not ours(nodes)), ours(nodes)
        assert run.result().code not in (0, INTERRUPTED)


@pytest.mark.parametrize(
    ("cut", "step_seconds"),
    [
        pytest.param(0, 600, marks=pytest.mark.long),
        pytest.param(0, 0.05, marks=pytest.mark.long),
        pytest.param(1, 0.05, marks=pytest.mark.long),
        pytest.param(2, 600, marks=pytest.mark.long),
    ],
)
def test_a_cut_link_leaves_no_process(nodes, hosts, folder, tmp_path, cut, step_seconds):
    with silent(nodes, hosts, folder, tmp_path, step_seconds) as run:
        try:
            nodes[cut].link(False)
            assert eventually(lambda: not ours(nodes), EMPTY_SECONDS), ours(nodes)
            assert run.result().code == LOST_PEER
        finally:
            nodes[cut].link(True)
            # Wait until the switch knows where the node is.
            assert eventually(lambda: nodes[0].run("ssh node1 true; ssh node2 true").code == 0)


@pytest.mark.parametrize("victim", ["rank", pytest.param("script", marks=pytest.mark.long)])
def test_a_process_that_is_killed_ends_the_job(nodes, hosts, folder, tmp_path, victim):
    """The launcher names the node and the signal. Ctrl-Z does not stop it."""
    with silent(nodes, hosts, folder, tmp_path, 0.05) as run:
        run.send(signal.SIGTSTP)
        os.kill(rank_on(nodes[2]) if victim == "rank" else script_on(nodes[2]), signal.SIGKILL)
        result = run.result()
    assert result.code == LOST_PEER
    assert "launcher: node2 ended with exit code 137: killed by SIGKILL" in result.err
    assert "Traceback" not in result.err
    assert eventually(lambda: not ours(nodes)), ours(nodes)


@pytest.mark.parametrize(
    ("text", "rest", "named"),
    [
        ("node1\nnode2 slot=2\n", "-- imagenet_ddp.py", "line 2"),
        ("node1\nroot@node1\n", "-- imagenet_ddp.py", "twice"),
        ("# none\n", "-- imagenet_ddp.py", "no host"),
        ("node1\nnode2\n", "-- imagenet_nd.py", "one node"),
        ("node1\n", "-- train.py", "train.py"),
        ("node1\n", "--fetch -- imagenet_nd.py", "--name"),
        ("node1\n", "imagenet_nd.py", ""),
        ("node1\n", "--elastic 2 -- imagenet_ddp.py --name a", "MIN:MAX"),
        ("node1\n", "--elastic 2:1 -- imagenet_ddp.py --name a", "MIN:MAX"),
        ("node1\n", "--elastic 2:2 -- imagenet_ddp.py --name a", "names 1"),
        ("node1\n", "--elastic 1:1 -- imagenet_ddp.py", "--name"),
        ("node1\n", "--elastic 1:1 -- imagenet_nd.py --name a", "imagenet_nd.py"),
        ("node1\n", f"--dir {ROOT} --python /usr/bin/python3 -- imagenet_ddp.py", "not installed"),
        ("node1 slots=2\nnode2 slots=1\n", "-- imagenet_ddp.py", "slots"),
        ("node1\nnode0\n", f"--dir {ROOT} -- imagenet_ddp.py", "ssh to node0 failed"),
        ("node1\n", "--dir /nowhere -- imagenet_ddp.py", "/nowhere"),
    ],
)
def test_errors_are_sentences(nodes, tmp_path, text, rest, named):
    path = tmp_path / "hosts"
    path.write_text(text)
    done = nodes[0].run(f"bash scripts/train_on_nodes.sh {path} {rest}")
    assert done.code == 2, done.out + done.err
    assert "Traceback" not in done.err
    assert "error: " in done.err
    assert named in done.err
    assert not ours(nodes)


@pytest.mark.long
@pytest.mark.parametrize("blocked", [1, 2])
def test_closed_ports_are_a_sentence(nodes, hosts, folder, tmp_path, blocked):
    """All but sshd's: node 1's with the master's port among them, or node 2's."""
    need("nft")
    nodes[blocked].block_ports("1-2199, 2300-65535")
    try:
        training = f"imagenet_ddp.py {TINY_LINE} --epochs 1 --name run --output-dir {tmp_path}"
        done = nodes[0].run(line(hosts, f"{training} {folder}"))
    finally:
        nodes[blocked].unblock_ports()
    assert done.code == 2, done.out + done.err
    assert "open all TCP ports between the nodes, in both directions" in done.err
    assert not ours(nodes)


def test_colours_only_for_a_terminal(nodes, hosts, folder, tmp_path):
    need("script")
    failing = line(hosts, "imagenet_ddp.py", "--dir /nowhere")
    for given, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        done = nodes[0].run(["script", "-qec", failing, "/dev/null"], env=given)
        assert done.code == 2, done.out
        assert ("\033[36m[node1]\033[0m error: " in done.out) == coloured, done.out
        assert ("[node1] error: " in done.out) != coloured


# ---- --elastic


@pytest.fixture
def fresh():
    """As `nodes`, for a test that changes some."""
    yield from three_nodes()


def typed(nodes: list[Node], runs, folder, listed: str, limits: str, epochs: int = 100000) -> Typed:
    """The training, typed on node0; a line every step."""
    hosts = runs / "hosts"
    hosts.write_text(listed)
    return nodes[0].type(
        f"exec bash scripts/train_on_nodes.sh {hosts} --dir {ROOT} --elastic {limits} "
        f"--env STEP_SECONDS=0.05 -- imagenet_ddp.py {TINY_LINE} -p 1 --epochs {epochs} "
        f"--snapshot-minutes 0.02 --name run --output-dir {runs} {folder} 2>&1"
    )


def test_training_begins_without_a_node_that_cannot_be_reached(nodes, folder, tmp_path):
    with typed(nodes, tmp_path, folder, "node0\nnode1\n", "1:2", epochs=1) as run:
        result = run.result()
    assert result.code == 0, result.out
    assert "launcher: ssh to node0 failed: does `ssh node0 true` work here?; will" in result.out
    assert "launcher: training begins on 1 of 2 nodes: node1" in result.out
    found = summary(tmp_path / "run")
    assert (found["nodes"], found["epochs_done"]) == (1, 1)
    assert not ours(nodes)


@pytest.mark.long
def test_training_goes_on_without_node_0_and_with_it_again(fresh, folder, tmp_path):
    """Then Ctrl-C ends it, with a snapshot."""
    with typed(fresh, tmp_path, folder, "node1\nnode2\n", "1:2") as run:
        run.until(r"\[node1\] Epoch 2/\d+ step")
        fresh[1].kill()
        run.until("lost the connection to node1; will keep trying")
        run.until("training begins again on 1 of 2 nodes: node2")
        run.until("resumed from .*snapshot")
        run.until(r"\[node2\] Epoch \d+/\d+ step")
        fresh[1].start_again()
        fresh[1].start_sshd(**ENV)
        run.until("launcher: node1 is back")
        run.until("stopping with a snapshot, to go on with node1")
        run.until("training begins again on 2 of 2 nodes: node1, node2")
        run.until(r"\[node1\] Epoch \d+/\d+ step")
        run.send(signal.SIGINT, group=True)
        result = run.result()
    assert result.code == INTERRUPTED, result.out
    assert summary(tmp_path / "run")["finished_because"] == "interrupted"
    assert "Traceback" not in result.out
    assert not ours(fresh)


@pytest.mark.long
def test_too_few_nodes_are_waited_for(fresh, folder, tmp_path):
    with typed(fresh, tmp_path, folder, "node1\nnode2\n", "2:2") as run:
        run.until(r"\[node1\] Epoch 1/\d+ step")
        fresh[2].kill()
        run.until(r"waiting for node2: 1 of at least 2 nodes are here \(\d+ s, at most 600\)")
        run.send(signal.SIGINT, group=True)
        result = run.result()
    assert result.code == INTERRUPTED, result.out
    assert eventually(lambda: not ours(fresh[:2])), ours(fresh[:2])


@pytest.mark.long
def test_a_killed_process_is_started_again(fresh, folder, tmp_path):
    """On both nodes: the other one notices, and does not call it bad input."""
    with typed(fresh, tmp_path, folder, "node1\nnode2\n", "1:2") as run:
        run.until(r"\[node1\] Epoch 1/\d+ step")
        os.kill(rank_on(fresh[2]), signal.SIGKILL)
        said = run.until(r"ended with exit code \d+; stopping the rest")
        assert re.search(r"code (69|137);", said)
        run.until("training begins again on 2 of 2 nodes")
        run.until(r"\[node1\] Epoch \d+/\d+ step")
        run.send(signal.SIGINT, group=True)
        assert run.result().code == INTERRUPTED


@pytest.mark.long
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("mkdir {0}/run && mount -t tmpfs tmpfs {0}/run",
         "node2 (node 1) does not see what node1 (node 0) writes into"),
        ("mount -t tmpfs tmpfs {1}", "/data/train is missing"),
    ],
)  # fmt: skip
def test_bad_input_ends_the_job(fresh, folder, tmp_path, broken, said):
    fresh[2].run(broken.format(tmp_path, folder))
    with typed(fresh, tmp_path, folder, "node1\nnode2\n", "1:2") as run:
        result = run.result()
    assert result.code == 2, result.out
    assert said in result.out
    assert "begins again" not in result.out
    assert not ours(fresh)


@pytest.mark.long
def test_a_node_that_comes_back_broken_stays_out(fresh, folder, tmp_path):
    with typed(fresh, tmp_path, folder, "node1\nnode2\n", "1:2") as run:
        run.until(r"\[node1\] Epoch 1/\d+ step")
        fresh[2].kill()
        run.until(r"on 1 of 2 nodes: node1")
        fresh[2].start_again()
        fresh[2].run(f"mount -t tmpfs tmpfs {ROOT}")
        fresh[2].start_sshd(**ENV)
        run.until("going on without node2")
        run.until("training begins again on 1 of 2 nodes: node1")
        run.until(r"\[node1\] Epoch \d+/\d+ step")
        run.send(signal.SIGINT, group=True)
        result = run.result()
    assert result.code == INTERRUPTED
    assert "can't open file" in result.out  # Python says so


def test_the_wait_for_nodes_is_that_of_dist_timeout(nodes, tmp_path):
    with typed(nodes, tmp_path, "DATA --dist-timeout 4", "node0\nnode1\n", "2:2") as run:
        run.until(r"waiting for node0: 1 of at least 2 nodes are here \(\d+ s, at most 4\)")
        result = run.result()
    assert result.code == 2
    assert "error: the job needs 2 nodes and has waited 4 s for node0" in result.out
    assert not ours(nodes)
