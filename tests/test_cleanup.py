"""scripts/cleanup.sh ends what belongs to the suite, gently at first, and nothing else."""

import os
import re
import signal

import pytest
from conftest import summary
from nodes import Node, Nodes, need
from running import TINY_LINE, TORCHRUN, tiny

_, ENV = tiny(step_seconds=0.05)
LASTING = f"{TINY_LINE} -j 2 --epochs 100000 -p 1 --name run"
# A program that handles SIGTERM so, and says when it is up.
PROGRAM = "import signal, sys, time; signal.signal(15, %s); print('up', flush=True); "
PROGRAM = f'python -c "{PROGRAM} time.sleep(600)"'
STUBBORN, WILLING = PROGRAM % "signal.SIG_IGN", PROGRAM % "lambda *_: sys.exit('saved')"
OURS = "IMAGENET_SUITE=training"
ORPHAN = "(%s & ) ; sleep 1000"  # what started it is gone, and the node's first process has it


@pytest.fixture(scope="module")
def nodes():
    """Two nodes; each sees no processes but its own."""
    with Nodes(2) as both:
        both[1].start_sshd()
        yield both


def commands(node: Node, part: str = "signal") -> list[str]:
    return [one.command for one in node.processes() if part in one.command]


def clean(node: Node, options: str = "", code: int = 0) -> str:
    """What cleanup.sh prints on a node; errors too."""
    done = node.run(f"bash scripts/cleanup.sh {options} 2>&1")
    assert done.code == code, done.out
    return done.out


def test_a_training_typed_by_hand_gets_time_for_its_snapshot(nodes, folder, tmp_path):
    """An orphan ends, too; other Python programs, and other users', stay."""
    node = nodes[0]
    waiting = "import time; time.sleep(600)"
    bystander = tmp_path / "bystander.py"
    bystander.write_text(waiting)
    stranger = STUBBORN.replace("python", "python3").replace("600", "601")
    stranger = f"PATH=/usr/bin:/bin; {OURS} setpriv --reuid=65534 {stranger}"
    command = f"python {' '.join(TORCHRUN)} --nproc_per_node=2 imagenet_ddp.py {LASTING}"
    with (
        node.type(["python", bystander, "imagenet_ddp.py", "--rank", "0"]),
        node.type(["python", "-c", waiting, "bystander of torch.distributed.run"]),
        node.type(stranger) as other,
        node.type(ORPHAN % f"{OURS} {WILLING}") as shell,
        node.type(f"{command} --output-dir {tmp_path} {folder}", **ENV) as run,
    ):
        run.until(r"step +3/")
        shell.until("up")
        other.until("up")
        before = node.processes()
        seen = clean(node, "--dry-run")
        assert seen.count("would end ") >= 6, seen
        assert "(orphaned): python -c import signal" in seen
        assert not re.search("bystander|sleep 1000|601", seen)
        assert before <= node.processes()
        done = clean(node, "--grace 60")
        # torchrun, which would kill its workers soon, is not asked; it has no code for this.
        result = run.result()
        assert (result.code, "SignalException" in result.err) == (1, False), done + result.err
        assert "killing" not in done, done
        assert summary(tmp_path / "run")["finished_because"] == "interrupted"
        assert (tmp_path / "run" / "snapshot.pt").is_file()
        assert len(commands(node, "bystander")) >= 2
        assert commands(node, "601")
        assert "nothing of this suite" in clean(node)


def test_one_run_by_its_name(nodes, folder, tmp_path):
    """Typed by hand, and marked by a launcher, though stopped; another run goes on."""
    node = nodes[0]
    command = f"python imagenet_nd.py {LASTING} --output-dir {tmp_path} {folder}"
    with (
        node.type(command, **ENV) as run,
        node.type(f"IMAGENET_SUITE=guard:other {STUBBORN}") as stays,
        node.type(f"IMAGENET_SUITE=guard:run {WILLING}; exit $?") as marked,
    ):
        run.until(r"step +3/")
        stays.until("up")
        marked.until("up")
        for one in node.processes():
            if "saved" in one.command and one.pid != marked.pid:  # which is the shell
                os.kill(one.pid, signal.SIGSTOP)
        done = clean(node, "--name run --grace 60")
        assert "killing" not in done, done
        assert run.result().code == 75
        assert marked.result().err == "saved\n"
        assert stays.process.poll() is None


def test_on_hosts_of_a_file_and_asked_on_a_terminal(nodes, tmp_path):
    """It ends what runs on the hosts, not here; here, after an answer."""
    need("script")
    hosts = tmp_path / "hosts"
    hosts.write_text("node1\nnode0\n")
    asked = "bash scripts/cleanup.sh --grace 0.2"
    with (
        nodes[0].type(ORPHAN % f"{OURS} {STUBBORN}") as here,
        nodes[1].type(ORPHAN % f"{OURS} {STUBBORN}") as there,
    ):
        here.until("up")
        there.until("up")
        done = clean(nodes[0], f"{hosts} --grace 0.5", code=2)
        assert "[node1] ending " in done
        assert "[node1] killing " in done
        assert "ssh to node0 failed" in done
        assert not commands(nodes[1])
        for answer, said in (("", "nothing was ended"), ("y", "killing")):
            assert commands(nodes[0])
            done = nodes[0].run(f"echo {answer} | script -qec '{asked}' /dev/null")
            assert done.code == 0, done.out
            assert "End these processes? [y/N]" in done.out
            assert said in done.out
        assert not commands(nodes[0])
