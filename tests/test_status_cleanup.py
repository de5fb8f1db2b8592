"""scripts/status.sh shows what every rank is doing; scripts/cleanup.sh ends what is ours."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, python, summary
from nodes import Node, Nodes, need
from running import TINY_LINE, TORCHRUN, Process

from utils.run.snapshots import TrainState
from utils.start.world import World
from utils.status import Status

sys.path.append(str(ROOT / "scripts/ssh"))
import cleanup
import hosts
import status

ENV = {"STEP_SECONDS": "0.05"}
LASTING = f"{TINY_LINE} -j 2 --epochs 100000 -p 1 --name run"
# A program that handles SIGTERM so, and says when it is up.
PROGRAM = "import signal, sys, time; signal.signal(15, %s); print('up', flush=True); "
PROGRAM = f'python -c "{PROGRAM} time.sleep(600)"'
STUBBORN, WILLING = PROGRAM % "signal.SIG_IGN", PROGRAM % "lambda *_: sys.exit('saved')"
OURS = "IMAGENET_SUITE=training"
ORPHAN = "(%s & ) ; sleep 1000"  # what started it is gone, and the node's first process has it


@pytest.fixture(scope="module")
def nodes():
    """Two nodes with an sshd each, and a list of them in the folder of the first."""
    with Nodes(2) as both:
        login = both[0].folder / "login"
        login.write_text("unset BASH_ENV; printf '# a title '")
        for node in both:
            node.start_sshd(BASH_ENV=str(login))
        (both[0].folder / "hosts").write_text("node0\nnode1\n")
        yield both


# ---- status.sh


def ask(node: Node, hosts: object = "", code: int = 0) -> str:
    """What status.sh prints, with single spaces."""
    done = node.run(f"bash scripts/status.sh {hosts}")
    assert done.code == code, done.err
    return re.sub(" +", " ", done.out)


# Of a rank that has ended its first epoch: its number, the time it computes, whether others wait.
ROW = r"(?m)^ (\d) node\1 (?:[2-9]|\d\d+)/100000 \S+ \S+ \S+ ([\d.]+) .*?(<< straggler)?$"


def test_a_run_writes_only_where_no_other_user_could(tmp_path):
    """/dev/shm is open to all: the folder of the status files may have been made by anybody."""
    state, args = TrainState(None, None, None), SimpleNamespace(arch="a", epochs=1)
    shown = Status(state, args, World(torch.device("cpu")), "nd", tmp_path)
    for number, prepare in enumerate(
        (
            *("mkdir {0}x; ln -s {0}x {0}", "mkdir -m 777 {0}", "mkdir -m 770 {0}"),
            *("mkdir {0}; chown 1 {0}", "true"),
        )
    ):
        shown.folder = tmp_path / f"{number}"
        shown.path = shown.folder / "0.json"
        subprocess.run(["bash", "-c", prepare.format(shown.folder)], check=True)
        shown.show("training")
        assert [path.name for path in shown.folder.iterdir()] == ["0.json"] * (prepare == "true")
    assert (shown.folder.stat().st_mode & 0o777, shown.path.stat().st_mode & 0o777) == (
        0o700,
        0o600,
    )


def test_ranks_of_a_run_and_a_straggler(nodes, folder, tmp_path):
    """On all hosts and on one; then nothing, as both ranks have ended."""
    hosts, runs = nodes[0].folder / "hosts", []
    for rank, seconds in enumerate((0.05, 0.25)):  # of a step, at least
        line = f"imagenet_ddp --dist-url tcp://{nodes[0].ip}:8888 -n 2 -nr {rank} "
        line += f"{TINY_LINE} -p 2 --name run --epochs 100000 --output-dir {tmp_path} {folder}"
        runs.append(nodes[rank].fork(*line.split(), STEP_SECONDS=str(seconds)))
    with runs[0], runs[1]:
        runs[0].until(r"Epoch 2/100000 step +4/6")
        out = ask(nodes[1], hosts)
        assert f"\n{tmp_path}/run (tiny_plain, ddp)\n" in out
        (first, fast, waits), (second, slow, waited_for) = re.findall(ROW, out)
        assert (first, waits, second, waited_for) == ("0", "", "1", "<< straggler")
        # The fast one computes for a fifth of the slow one's time, and waits for the rest.
        assert 0.05 <= float(fast) < 0.6 * float(slow)
        assert float(slow) >= 0.25
        assert [row[0] for row in re.findall(ROW, ask(nodes[1]))] == ["1"]
        runs[0].send(15)
        assert [one.result().code for one in runs] == [75, 75]
        for node in nodes:
            shared = f"/proc/{node.spaces.first}/root/dev/shm/imagenet-suite-{os.getuid()}"
            assert os.listdir(shared) == []
    hosts.write_text("node0\nnode7\n")
    out = ask(nodes[0], hosts, code=2)
    assert "node7: no answer" in out
    assert "node0: no runs" in out


def test_a_frozen_machine_is_not_waited_for_without_end(tmp_path, monkeypatch, capsys):
    """Its kernel accepts the connection, and nobody says a word."""
    if not shutil.which("ssh"):
        pytest.skip("ssh is missing")
    short = [word.replace("=20", "=1") for word in hosts.SSH_OPTIONS]
    monkeypatch.setattr(hosts, "SSH_OPTIONS", short)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        (tmp_path / "hosts").write_text("127.0.0.1\n")
        ssh = f"ssh -p {frozen.getsockname()[1]}"
        ((_, code, _),) = hosts.ask_all(tmp_path / "hosts", ssh, status.__file__, {})
    assert (code, "ssh to 127.0.0.1 failed" in capsys.readouterr().err) == (255, True)


def test_the_lines_of_a_run_and_the_file_of_a_killed_process(tmp_path, monkeypatch):
    """The line has what nvidia-smi answers about the GPU of the rank."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU-0, 1, 2, 3'; echo 'GPU-7, 97, 11000, 15360'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(status, "FOLDER", str(tmp_path))
    own = Process(os.getpid())
    rank = {"pid": own.pid, "started": str(own.started), "run": str(tmp_path), "gpu": "GPU-7"}
    rank |= {"rank": 0, "size": 4, "epoch": 1, "epochs": 9, "phase": "starting"}
    rank |= {"arch": "a", "mode": "ddp", "at": 0}
    (tmp_path / "0.json").write_text(json.dumps(rank))
    (tmp_path / "1.json").write_text(json.dumps(rank | {"started": "1"}))
    ended = subprocess.Popen(["true"])  # its parent has not yet asked for its exit code
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    of_ended = {"pid": ended.pid, "started": str(Process(ended.pid).started)}
    (tmp_path / "2.json").write_text(json.dumps(rank | of_ended))
    foreign = {"pid": own.pid, "started": str(own.started)}
    for number, text in enumerate(([], {}, foreign, rank | {"epoch": "one"}, rank | {"size": {}})):
        (tmp_path / f"foreign{number}.json").write_text(json.dumps(text))
    usage = SimpleNamespace(free=3 * 2**30, used=2**30, total=4 * 2**30)
    monkeypatch.setattr(status.shutil, "disk_usage", lambda _: usage)
    for saved in ("no snapshot yet", r"snapshot \d+ s ago"):
        ranks, run, disk, head, line, missing = status.describe([("here", status.node())])
        assert len(head) <= 80 and line.index("15360") < head.index("seen")
        assert ranks == "here: 1 rank"
        assert run == f"\n{tmp_path} (a, ddp)"
        assert re.fullmatch(f"  {saved}; disk 3.0 of 4 GiB free", disk)
        assert re.match("0 here 2/9 starting - - - 97 11000/15360 ", " ".join(line.split()))
        assert missing == "  not seen here: rank 1, 2, 3"
        assert not [name for name in ("1.json", "2.json") if (tmp_path / name).exists()]
        (tmp_path / "snapshot.pt").touch()
    ended.wait()


def test_a_rank_that_waits_for_its_images_is_a_straggler():
    rank = {"run": "/r", "size": 2, "arch": "a", "mode": "ddp", "epoch": 0, "epochs": 1}
    rank |= {"phase": "starting", "gpu": None, "age": 5, "compute_seconds": 0.1}
    ranks = [rank | {"rank": n, "data_seconds": x} for n, x in enumerate((0.0, 0.9))]
    *_, first, second = status.describe([("here", ranks)])
    assert ["straggler" in line for line in (first, second)] == [False, True]
    # The run's folder is elsewhere on another host; a host's own run of this name stays apart.
    far, own = ranks[0] | {"run": "/home/r"}, ranks[0] | {"run": "/own/r"}
    *_, run, _, first, second = status.describe([("b", [ranks[1]]), ("a", [far])])
    assert run == "\n/home/r (a, ddp)"
    assert [line.split()[:2] for line in (first, second)] == [["0", "a"], ["1", "b"]]
    lines = [*status.describe([("b", [ranks[1], own])])]
    assert [line for line in lines if line.startswith("\n")] == [
        "\n/r (a, ddp)",
        "\n/own/r (a, ddp)",
    ]
    # Of the run directory, the node of rank 0 tells, which may be the only one that has it.
    lines = [*status.describe([("b", [ranks[1] | {"disk": "x"}])])]
    assert [line.split()[0] for line in lines[1:]] == ["/r", "rank", "1", "not"]
    # Each host may have a run of its own in a folder of the same name.
    alone = rank | {"rank": 0, "size": 1, "data_seconds": 0.0}
    *_, run, _, first, again, _, second = status.describe([("a", [alone]), ("b", [alone])])
    assert run == again == "\n/r (a, ddp)"
    assert [line.split()[:2] for line in (first, second)] == [["0", "a"], ["0", "b"]]
    assert [status.ago(seconds) for seconds in (119, 300, 7000, 9000)] == [
        *("119 s", "5 min", "117 min", "2.5 h")
    ]


# ---- cleanup.sh


def commands(node: Node, part: str = "signal") -> list[str]:
    return [one.command for one in node.processes() if part in one.command]


def clean(node: Node, options: str = "", code: int = 0, mark: str = "") -> str:
    """What cleanup.sh prints on a node; errors too."""
    done = node.run(f"{mark} bash scripts/cleanup.sh {options} 2>&1")
    assert done.code == code, done.out
    return done.out


def test_a_training_typed_by_hand_gets_time_for_its_snapshot(nodes, folder, tmp_path):
    """An orphan ends, too. Other Python programs, and other users', stay."""
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
        # torchrun, two ranks and their workers, at least; then the orphan.
        (training, unnamed) = sorted(re.findall(r"would end (.*)\n    (.*)", seen), reverse=True)
        assert re.fullmatch(r"the run run: ([5-9]|\d\d) processes in .*", training[0]), seen
        assert "torch.distributed" in training[1]
        assert unnamed[0].startswith("a run without --name: 1 process in ")
        assert "(orphaned): python -c import signal" in unnamed[1]
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
        assert "nothing of this suite" in clean(node, mark=OURS), "nor itself"


def test_one_run_by_its_name(nodes, folder, tmp_path):
    """Typed by hand, and marked by a launcher, though stopped; another run goes on."""
    node = nodes[0]
    command = f"python imagenet_nd.py {LASTING} --output-dir {tmp_path} {folder}"
    with (
        node.type(command, **ENV) as run,
        node.type(f"IMAGENET_SUITE=guard:run2 {STUBBORN}") as stays,
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


def test_the_processes_of_a_run_without_a_name_are_one_run():
    places = {"run": "", "folder": "/a"}
    child, first = (SimpleNamespace(pid=x, parent=x - 1, text=f"{x}: x", **places) for x in (6, 5))
    (lines,) = cleanup.describe([child, first])
    assert lines == "a run without --name: 2 processes in /a\n    5: x"


def test_bad_input_is_one_error_line(tmp_path):
    (tmp_path / "hosts").write_text("node\0one\n")
    done = python("scripts/ssh/cleanup.py", "--dry-run", "--grace", "nan")
    assert (done.code, "nan is not at least 0" in done.err) == (2, True)
    python("scripts/ssh/status.py", tmp_path / "hosts").fails_with("line 1: 'node\\x00one' is not")


def test_on_hosts_of_a_file_and_asked_on_a_terminal(nodes, tmp_path):
    """It ends what runs on the hosts, not here; here, after an answer."""
    need("script")
    hosts = tmp_path / "hosts"
    hosts.write_text("node1\nnode7\n")
    asked = "bash scripts/cleanup.sh --grace 0.2"
    with (
        nodes[0].type(ORPHAN % f"{OURS} {STUBBORN}") as here,
        nodes[1].type(ORPHAN % f"{OURS} {STUBBORN}") as there,
    ):
        here.until("up")
        there.until("up")
        done = clean(nodes[0], f"{hosts} --name other --grace 0.5", code=2)
        assert "nothing of other is running\n" in done
        done = clean(nodes[0], f"{hosts} --grace 0.5", code=2)
        assert "ending " in done
        assert "[node1] killing " in done
        assert "ssh to node7 failed" in done
        assert not commands(nodes[1])
        done = nodes[0].run(f"script -qec '{asked} 2>&1 | cat' /dev/null </dev/null")
        assert "error: it cannot ask, as its output goes elsewhere: add --yes" in done.out
        left = "nothing was ended"
        # "": Ctrl-D
        for answer, to, said in (
            ("", "2>/dev/null", left),
            (r"\n", "| cat", left),
            (r"y\n", "", "killing"),
        ):
            assert commands(nodes[0])
            done = nodes[0].run(f"printf '{answer}' | script -qec '{asked} {to}' /dev/null")
            assert done.code == 0, done.out
            assert "End these runs? [y/N]" in done.out
            assert said in done.out
        assert not commands(nodes[0])
