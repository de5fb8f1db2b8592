"""scripts/train_on_nodes.sh on nodes with an sshd each: nothing is left behind, whatever ends."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, TIMEOUT, summary
from nodes import Node, Nodes, need
from running import TINY_LINE, Process, eventually

INTERRUPTED, LOST_PEER = 75, 69
HERE = f"--dir {ROOT} --python {sys.executable}"  # the code and the Python of these tests
SECRET = "kept+from/everybody="
# A node that has lost its launcher is empty 25 s later, on a machine with time for it. The limit
# is below that of `Typed`, which would end the launcher and so the processes.
EMPTY_SECONDS = TIMEOUT / 2
# What fails, the length of a step, the exit code. Ranks that are stuck in a step of 600 s do not
# notice a request.
ENDS = [("SIGKILL", 0.05, -signal.SIGKILL)]
LONG_ENDS = [("SIGKILL", 600, -signal.SIGKILL), ("torchrun", 0.05, LOST_PEER)]
LONG_ENDS += [("rank", 0.05, LOST_PEER)]  # test_job has it in small
LONG_ENDS += [(f"SIG{name}", 0.05, INTERRUPTED) for name in ("TERM", "HUP", "INT")]
LONG_ENDS += [(name, 600, LOST_PEER) for name in ("SIGTERM", "SIGINT SIGINT")]
LONG_ENDS += [(f"link {n}", s, LOST_PEER) for n, s in ((0, 600), (0, 0.05), (1, 0.05), (2, 600))]
ENDS += [pytest.param(*one, marks=pytest.mark.long) for one in LONG_ENDS]


@pytest.fixture(scope="module")
def nodes():
    """node0 to type on, node1 and node2 to train on."""
    with Nodes(3) as all_nodes:
        for node in all_nodes[1:]:
            node.start_sshd()
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


def test_two_nodes_sync_and_fetch(nodes, folder, tmp_path):
    """The code goes there, the run comes back, and each line shows where it is from.

    Typed as for horovodrun, but for our own options.
    """
    need("rsync")
    code = tmp_path / "copied" / "there"
    (tmp_path / "here").mkdir()
    command = f"bash {ROOT}/scripts/train_on_nodes.sh -np 2 -H node1:1,root@node2:1 --sync --fetch "
    command += f"--dir {code} --python {sys.executable} --port 8888 "
    command += (
        f"--env AWS_SECRET_ACCESS_KEY={SECRET} --env=HERE python imagenet_ddp.py {TINY_LINE} "
    )
    command += f"--epochs 1 --name mine {folder}"
    done = nodes[0].run(command, cwd=tmp_path / "here", env={"HERE": SECRET})
    assert done.code == 0, done.out + done.err
    assert SECRET not in done.out + done.err
    here, there = tmp_path / "here" / "runs" / "mine", code / "runs" / "mine"
    results = summary(here)
    assert (results["world_size"], results["nodes"], results["epochs_done"]) == (2, 2, 1)
    files = {path.name: path.read_bytes() for path in there.iterdir()}
    assert {"options.json", "train.log", "snapshot.pt"} <= files.keys()
    assert {path.name: path.read_bytes() for path in here.iterdir()} == files
    assert not [name for name, content in files.items() if SECRET.encode() in content]
    assert not {".git", ".venv"} & {path.name for path in code.iterdir()}
    place = "--nnodes=2 --node_rank=0 --master_addr=10.77.0.2 --master_port=8888 --nproc_per_node=1"
    for line_of_a_node in (
        "[node1] Epoch 1/1",
        "[node2] [rank 1] this node trains with rank 0 of 2",
        f"[node1] + cd {code}; AWS_SECRET_ACCESS_KEY=*** HERE=*** torchrun {place} imagenet_ddp",
    ):
        assert f"\n{line_of_a_node}" in f"\n{done.out}", done.out
    assert "\033[" not in done.out + done.err
    assert empty(nodes)


@pytest.mark.parametrize(("event", "seconds", "code"), ENDS)
def test_nothing_is_left(nodes, folder, tmp_path, event, seconds, code):
    """Whatever ends: the launcher, a link, a process on a node."""
    # Time for a snapshot where the steps are short; a second Ctrl-C does not wait for its end.
    grace = 600 if " SIG" in event else 100 if seconds < 1 else 20
    launcher = f"--grace {grace} --env STEP_SECONDS={seconds} --env SECRET"
    # The guard of each node notices by itself that the launcher was killed.
    one = event == "SIGKILL" and seconds < 1
    hosts = "# ssh names\nroot@node2  # another user\n" + "node1\n" * (not one)
    training = f"--epochs 100000 -p 1000000 {folder}"  # never ends, and prints nothing
    with nodes[0].type(line(hosts, training, tmp_path, launcher), SECRET=SECRET) as run:
        log = tmp_path / "run" / "train.log"
        assert eventually(lambda: log.exists() and "steps per epoch" in log.read_text())
        assert len(ours(nodes[1:])) >= (3 if one else 6)  # guards, scripts, ranks
        environments = [Path(f"/proc/{one.pid}/environ").read_bytes() for one in ours(nodes)]
        assert sum(f"SECRET={SECRET}".encode() in one for one in environments) >= (2 if one else 4)
        assert not [one for one in ours(nodes) if SECRET in one.command]
        if event.startswith("link"):
            cut = nodes[int(event[-1])]
            cut.link(False)
        elif event.startswith("SIG"):
            for name in event.split():
                time.sleep(1)
                assert ours(nodes)
                run.send(getattr(signal, name), group=name == "SIGINT")  # as from the terminal
        else:
            word = "/torchrun.py " if event == "torchrun" else " -u imagenet_ddp.py"
            # The first one, as a rank's loader workers have the same command line.
            first = min(one.pid for one in nodes[2].processes() if word in one.command)
            os.kill(first, signal.SIGKILL)
        try:
            assert empty(nodes, EMPTY_SECONDS), ours(nodes)
            result = run.result()
        finally:
            if event.startswith("link"):
                cut.link(True)
                # Wait until the switch knows where the node is.
                assert eventually(lambda: nodes[0].run("ssh node1 true; ssh node2 true").code == 0)
    assert result.code == code
    assert "Traceback" not in result.err
    if event.startswith("SIG") and seconds < 1:  # it had time for a snapshot
        assert summary(tmp_path / "run")["finished_because"] == "interrupted"
    if event in ("rank", "torchrun"):
        assert "launcher: node2 ended with exit code 137: killed by SIGKILL" in result.err


@pytest.mark.parametrize(
    ("launcher", "said"),
    [
        ("--dir /nowhere", "/nowhere"),
        ("--ssh nosuch", "'nosuch' here"),
        # What else --elastic does, test_job.py tests.
        ("--elastic 2:2", "the job needs 2 of 2 nodes and has waited 7 s for node0"),
    ],
)
def test_errors_are_one_line(nodes, tmp_path, launcher, said):
    """In colours for a terminal."""
    need("script")
    hosts = "node1\nnode0\n" if "elastic" in launcher else "node1"
    command = line(hosts, "--dist-timeout 7 DATA", tmp_path, launcher)
    done = nodes[0].run(["script", "-qec", command, "/dev/null"])
    assert done.code == 2, done.out
    assert "Traceback" not in done.out
    assert re.search(f"(?m)^(\033.36m.node1.\033.0m )?error: .*{said}", done.out), done.out
    assert empty(nodes)
