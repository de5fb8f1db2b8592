"""scripts/cleanup.sh ends what belongs to the suite, gently at first, and nothing else."""

import os
import re
import signal
import sys

import pytest
from conftest import summary
from nodes import Node, Nodes, need
from running import TINY_LINE, TORCHRUN, tiny

_, ENV = tiny(step_seconds=0.05)
LASTING = f"{TINY_LINE} -j 2 --epochs 100000 -p 1 --name run"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True)"
STUBBORN += "; time.sleep(600)"


@pytest.fixture(scope="module")
def nodes():
    """Two nodes; each sees no processes but its own."""
    with Nodes(2) as both:
        both[1].start_sshd()
        yield both


def commands(node: Node, part: str) -> list[str]:
    return [one.command for one in node.processes() if part in one.command]


@pytest.mark.parametrize(
    ("first", "least"),
    [
        ("python imagenet_ddp.py -g 2", 5),
        pytest.param("python imagenet_nd.py", 2, marks=pytest.mark.long),
        pytest.param(f"python {' '.join(TORCHRUN)} --nproc_per_node=2 imagenet_ddp.py", 5,
                     marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_training_typed_by_hand_gets_time_for_its_snapshot(nodes, folder, tmp_path, first, least):
    """A process that ignores SIGTERM is killed; other Python programs stay."""
    node = nodes[0]
    waiting = "import time; time.sleep(600)"
    line = f"{first} {LASTING} --output-dir {tmp_path} {folder}"
    bystander = tmp_path / "bystander.py"
    bystander.write_text(waiting)
    with (
        node.type(["python", bystander, "imagenet_ddp.py", "--rank", "0"]),
        node.type(["python", "-c", waiting, "bystander of torch.distributed.run"]),
        # An orphan: what started it is gone, and the first process of the node has adopted it.
        node.type(f'(IMAGENET_SUITE=training python -c "{STUBBORN}" & ) ; sleep 1000') as shell,
        node.type(line, **ENV) as run,
    ):
        run.until(r"step +3/")
        shell.until("up")
        before = node.processes()
        seen = node.run("bash scripts/cleanup.sh --dry-run")
        assert seen.code == 0, seen.err
        assert len(re.findall(r"^would end \d+", seen.out, re.MULTILINE)) >= least + 1, seen.out
        assert "(orphaned): python -c import signal" in seen.out
        assert not re.search("bystander|sleep 1000", seen.out)
        assert before <= node.processes()
        done = node.run("bash scripts/cleanup.sh --grace 10")
        assert done.code == 0, done.out + done.err
        # torchrun has no code of its own for an interruption.
        assert run.result().code == (1 if "torch" in first else 75), run.result().err
        assert "1 more ended after SIGKILL" in done.out, done.out
        assert "port 8888 is free" in done.out
        assert summary(tmp_path / "run")["finished_because"] == "interrupted"
        assert (tmp_path / "run" / "snapshot.pt").is_file()
        assert len(commands(node, "bystander")) >= 2
        assert "nothing of this suite" in node.run("bash scripts/cleanup.sh").out
        assert not [one for one in node.processes() if "spawn_main" in one.command]


def test_what_is_stopped_ends_gently_too(nodes, tmp_path):
    """A shell that would never notice that its program has ended, and the program."""
    willing = tmp_path / "willing.py"
    willing.write_text(
        "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit('saved'))\n"
        "print('up', flush=True)\ntime.sleep(600)\n"
    )
    line = f"IMAGENET_SUITE=training bash -c '{sys.executable} {willing}; exit 3'; exit $?"
    with nodes[0].type(line) as run:
        run.until("up")
        ours = [one for one in nodes[0].processes() if one.pid != run.pid]
        assert len(ours) == 2
        for one in ours:
            os.kill(one.pid, signal.SIGSTOP)
        done = nodes[0].run("bash scripts/cleanup.sh --grace 20")
        assert done.code == 0, done.out + done.err
        assert "2 of 2 ended after SIGTERM" in done.out, done.out
        assert "SIGKILL" not in done.out
        result = run.result()
        assert (result.code, result.err) == (3, "saved\n")


def test_on_the_hosts_of_a_file(nodes, tmp_path):
    """Ends what runs on them, not here."""
    hosts = tmp_path / "hosts"
    hosts.write_text("node1\nnode0\n")
    orphan = f'(IMAGENET_SUITE=training {sys.executable} -c "{STUBBORN}" & ) ; sleep 1000'
    with nodes[0].type(orphan) as here, nodes[1].type(orphan) as there:
        here.until("up")
        there.until("up")
        done = nodes[0].run(f"bash scripts/cleanup.sh {hosts} --grace 0.5")
        assert "[node1] ending " in done.out
        assert "[node1] 1 more ended after SIGKILL" in done.out
        assert "ssh to node0 failed" in done.err
        assert done.code == 2
        assert not commands(nodes[1], "signal")
        assert commands(nodes[0], "signal")


def test_one_run_by_its_name(nodes, folder, tmp_path):
    """Typed by hand, and marked by a launcher; another run goes on."""
    node = nodes[0]
    line = f"python imagenet_nd.py {LASTING} --output-dir {tmp_path} {folder}"
    other = f'IMAGENET_SUITE=guard:other python -c "{STUBBORN}"'
    marked = """IMAGENET_SUITE=guard:run python -uc 'print("up"); import time; time.sleep(600)'"""
    with node.type(line, **ENV) as run, node.type(other) as stays, node.type(marked) as orphan:
        run.until(r"step +3/")
        stays.until("up")
        orphan.until("up")
        done = node.run("bash scripts/cleanup.sh --name run --grace 60")
        assert done.code == 0, done.out + done.err
        assert run.result().code == 75
        assert "SIGKILL" not in done.out, done.out
        assert orphan.process.wait(30)
        assert stays.process.poll() is None
        assert (
            "nothing of nosuch is running" in node.run("bash scripts/cleanup.sh --name nosuch").out
        )


@pytest.mark.parametrize("answer", ["n", "y", "--yes"])
def test_on_a_terminal_it_asks(nodes, answer):
    need("script")
    node = nodes[0]
    command = "bash scripts/cleanup.sh --grace 0.2"
    with node.type(f'IMAGENET_SUITE=training python -c "{STUBBORN}"') as run:
        run.until("up")
        yes = " --yes" if answer == "--yes" else ""
        typed = f"echo {answer} | script -qec '{command}{yes}' /dev/null"
        done = node.run(typed)
        assert done.code == 0, done.out
        assert ("End these processes? [y/N]" in done.out) == (not yes)
        assert ("nothing was ended" in done.out) == (answer == "n")
        assert bool(commands(node, "signal")) == (answer == "n")


def test_processes_of_another_user_stay(nodes):
    node = nodes[0]
    other = f'IMAGENET_SUITE=training setpriv --reuid=65534 python3 -c "{STUBBORN}"'
    with node.type(f"PATH=/usr/bin:/bin; {other}") as run:
        run.until("up")
        done = node.run("bash scripts/cleanup.sh --grace 0.2")
        assert "nothing of this suite is running" in done.out
        assert commands(node, "signal")
