"""scripts/train_on_nodes.sh on nodes with an sshd each: nothing is left behind, whatever ends."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, TIMEOUT, summary
from nodes import Node, Nodes, Typed, need
from running import TINY_LINE, Process, eventually, tiny

INTERRUPTED, LOST_PEER = 75, 69
ENV = tiny()[1] | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
HERE = f"--dir {ROOT} --python {sys.executable}"  # the code and the Python of these tests
SECRET = "kept+from/everybody="
# A node that has lost its launcher is empty 25 s later, on a machine with time for it. The limit
# is below that of `Typed`, which would end the launcher and so the processes.
EMPTY_SECONDS = TIMEOUT / 2
long = pytest.mark.long
# What fails, the length of a step, the exit code. Ranks that are stuck in a step of 600 s do not
# notice a request.
ENDS = [("SIGKILL", 0.05, -signal.SIGKILL), ("rank", 0.05, LOST_PEER)]
LONG_ENDS = [("SIGKILL", 600, -signal.SIGKILL), ("script", 0.05, LOST_PEER)]
LONG_ENDS += [(f"SIG{name}", 0.05, INTERRUPTED) for name in ("TERM", "HUP", "INT")]
LONG_ENDS += [(name, 600, LOST_PEER) for name in ("SIGTERM", "SIGINT", "SIGINT SIGINT")]
LONG_ENDS += [(f"link {n}", s, LOST_PEER) for n, s in ((0, 600), (0, 0.05), (1, 0.05), (2, 600))]
ENDS += [pytest.param(*one, marks=long) for one in LONG_ENDS]


@pytest.fixture(scope="module")
def nodes():
    """node0 to type on, node1 and node2 to train on."""
    with Nodes(3) as all_nodes:
        for node in all_nodes[1:]:
            node.start_sshd(**ENV)
        yield all_nodes


def line(hosts: str, training: str, tmp_path: Path, launcher: str = "") -> str:
    """The command as people type it, with a hosts file of these lines."""
    (tmp_path / "hosts").write_text(hosts)
    where = f"--name run --output-dir {tmp_path}"
    command = f"bash scripts/train_on_nodes.sh {tmp_path}/hosts {HERE} {launcher}"
    return f"{command} -- imagenet_ddp.py {TINY_LINE} {where} {training}"


def ours(nodes: list[Node]) -> set[Process]:
    """What lives in the nodes."""
    return set().union(*(node.processes() for node in nodes))


def empty(nodes: list[Node], seconds: float = 60.0) -> bool:
    """Whether nothing is left in the nodes, soon."""
    return eventually(lambda: not ours(nodes), seconds)


def process_on(node: Node, kind: str) -> int:
    """The process id of the training "script" on a node, or of the "rank" that it starts."""
    living = node.processes()
    (script,) = [one.pid for one in living if "imagenet_ddp.py" in one.command]
    # A rank's loader workers have the same command line.
    ranks = [one for one in living if one.parent == script and "spawn_main" in one.command]
    (rank,) = [one.pid for one in ranks]
    return script if kind == "script" else rank


def test_two_nodes_sync_and_fetch(nodes, folder, tmp_path):
    """The code goes there, the run comes back, and each line shows where it is from.

    Typed as for horovodrun, but for our own options.
    """
    need("rsync")
    code = tmp_path / "copied" / "there"
    (tmp_path / "here").mkdir()
    typed = f"bash {ROOT}/scripts/train_on_nodes.sh -np 2 -H node1:1,root@node2:1 --sync --fetch "
    typed += f"--dir {code} --python {sys.executable} --port 8888 --env TIMES=3 "
    typed += f"--env AWS_SECRET_ACCESS_KEY={SECRET} --env=HERE python imagenet_ddp.py {TINY_LINE} "
    typed += f"--epochs 1 --name mine {folder}"
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
    for start in (
        "[node1] Epoch 1/1",
        "[node2] [rank 1] Epoch 1/1",
        f"[node1] + cd {code}; MASTER_ADDR=10.77.0.2 MASTER_PORT=8888 WORLD_SIZE=2",
    ):
        assert any(one.startswith(start) for one in done.out.splitlines()), done.out
    assert "\033[" not in done.out + done.err
    assert empty(nodes)


def silent(nodes: list[Node], folder: Path, tmp_path: Path, launcher: str) -> Typed:
    """A training on node1 and node2 that never ends and prints nothing."""
    hosts = "# ssh names\nnode1\nroot@node2  # another user\n"
    training = f"--epochs 100000 -p 1000000 {folder}"
    started = nodes[0].type(line(hosts, training, tmp_path, launcher), SECRET=SECRET)
    log = tmp_path / "run" / "train.log"
    assert eventually(lambda: log.exists() and "steps per epoch" in log.read_text(), TIMEOUT / 2)
    assert len(ours(nodes[1:])) >= 6  # guards, scripts, ranks
    given = f"SECRET={SECRET}".encode()
    seen = [one for one in ours(nodes) if given in Path(f"/proc/{one.pid}/environ").read_bytes()]
    assert len(seen) >= 4  # the variable is there, on no command line
    assert not [one for one in ours(nodes) if SECRET in one.command]
    return started


@pytest.mark.parametrize(("fault", "seconds", "code"), ENDS)
def test_nothing_is_left(nodes, folder, tmp_path, fault, seconds, code):
    """Whatever ends: the launcher, a link, a process on a node. Ctrl-Z does not stop it."""
    # Time for a snapshot where the steps are short; a second Ctrl-C does not wait for its end.
    grace = 600 if " SIG" in fault else 100 if seconds < 1 else 20
    launcher = f"--grace {grace} --env STEP_SECONDS={seconds} --env SECRET"
    with silent(nodes, folder, tmp_path, launcher) as run:
        run.send(signal.SIGTSTP)
        if fault.startswith("link"):
            cut = nodes[int(fault[-1])]
            cut.link(False)
        elif fault.startswith("SIG"):
            for name in fault.split():
                time.sleep(1)
                assert ours(nodes)
                run.send(getattr(signal, name), group=name == "SIGINT")  # as from the terminal
        else:
            os.kill(process_on(nodes[2], fault), signal.SIGKILL)
        try:
            assert empty(nodes, EMPTY_SECONDS), ours(nodes)
            result = run.result()
        finally:
            if fault.startswith("link"):
                cut.link(True)
                # Wait until the switch knows where the node is.
                assert eventually(lambda: nodes[0].run("ssh node1 true; ssh node2 true").code == 0)
    assert result.code == code
    assert "Traceback" not in result.err
    if fault.startswith("SIG") and seconds < 1:  # it had time for a snapshot
        assert summary(tmp_path / "run")["finished_because"] == "interrupted"
    if fault in ("rank", "script"):
        assert "launcher: node2 ended with exit code 137: killed by SIGKILL" in result.err


@pytest.mark.parametrize(
    ("launcher", "named"),
    [
        ("--python /usr/bin/python3", "not installed"),
        ("--dir /nowhere", "/nowhere"),
        ("--ssh nosuch", "no program 'nosuch' here"),
    ],
)
def test_errors_on_nodes_are_one_line(nodes, tmp_path, launcher, named):
    """In colours for a terminal."""
    need("script")
    command = line("node1", "", tmp_path, launcher)
    done = nodes[0].run(command)
    assert done.code == 2, done.out + done.err
    assert "Traceback" not in done.err
    assert "error: " in done.err
    assert named in done.err
    assert empty(nodes)
    if launcher.startswith("--dir"):
        for env, label in (({}, "\033[36m[node1]\033[0m"), ({"NO_COLOR": "1"}, "[node1]")):
            done = nodes[0].run(["script", "-qec", command, "/dev/null"], env=env)
            assert f"\n{label} error: " in done.out.replace("\r", ""), done.out


def test_the_wait_for_nodes_is_that_of_dist_timeout(nodes, tmp_path):
    """What else --elastic does, test_job.py tests."""
    command = line("node0\nnode1\n", "DATA --dist-timeout 12", tmp_path, "--elastic 2:2")
    with nodes[0].type(f"exec {command} 2>&1") as run:
        run.until(r"waiting for node0: 1 of at least 2 nodes are here \(\d+ s, at most 12\)")
        result = run.result()
    assert result.code == 2
    assert "error: the job needs 2 nodes and has waited 12 s for node0" in result.out
    assert empty(nodes)
