"""Signals that stop a run: ignored ones, a terminal that closes, a stop before the first step."""

import os
import pty
import signal
from pathlib import Path

import pytest
from conftest import SMALL, summary
from joined import Forked
from running import Running, eventually

OURS = ("scripts/torchrun.py", "--standalone")
WAYS = {
    "nd": ("imagenet_nd.py",),
    "spawn": ("imagenet_ddp.py", "-g", "2"),
    "torchrun": (*OURS, "--nproc_per_node=1", "imagenet_ddp.py"),
    "torchrun 2": (*OURS, "--nproc_per_node=2", "imagenet_ddp.py"),
}


def command(way: str, folder: Path, runs: Path) -> list[str]:
    """A training that continues until something ends it."""
    lasting = ("-a", "tiny_plain", "-b", "5", "--epochs", "10000", "-p", "1", "-j", "1")
    words = (*WAYS[way], *SMALL, *lasting, "--output-dir", runs, "--name", "run", folder)
    return [str(word) for word in words]


# A shell's way of starting a command whose process group ignores signals, as nohup and `&` do.
IGNORE = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (1, 2)]"


@pytest.mark.parametrize("way", ["nd", "spawn", "torchrun"])
def test_an_ignored_signal_stays_ignored(folder, tmp_path, way):
    """SIGHUP after nohup, SIGINT of a script's background process; SIGTERM still ends the run."""
    with Forked(*command(way, folder, tmp_path), BEFORE=IGNORE, STEP_SECONDS="0.1") as run:
        run.until("starting" if way == "torchrun" else "")  # the first line
        for signum in (signal.SIGHUP, signal.SIGINT):
            run.send(signum, group=True)
        run.until(r"step +2/")
        for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGINT):
            run.send(signum, group=True)
        for one in run.meet_family():  # torchrun's processes have groups of their own
            os.kill(one.pid, signal.SIGHUP)
        for _ in range(2):
            run.until(r"step +4/")
        run.send(signal.SIGTERM)
        result = run.result()
        assert eventually(lambda: not any(one.lives() for one in run.family))
    assert result.code == 75, result.err
    assert "SIGHUP" not in result.out + result.err and "SIGINT" not in result.out + result.err
    said = next(line for line in result.out.splitlines() if "stopping after this step" in line)
    assert ("SIGTERM" in said) == (way == "nd"), "a launcher passes on all signals as SIGTERM"
    assert "resource_tracker" not in result.err


@pytest.mark.parametrize("way", ["nd", "spawn", "torchrun"])
def test_a_terminal_that_closes_ends_the_run_with_a_snapshot(folder, tmp_path, way):
    """Nothing can be written to the terminal any more; the log is complete."""
    master, terminal = pty.openpty()
    # The first process of a session gets the terminal that it opens.
    opens = f"import os; [os.dup2(os.open({os.ttyname(terminal)!r}, 2), n) for n in range(3)]"
    with Forked(*command(way, folder, tmp_path), BEFORE=opens, STEP_SECONDS="0.1") as run:
        seen = os.read(master, 4096).decode()
        os.close(terminal)  # so that the end of the run would end the next line's wait
        while "Epoch 1/10000  train" not in seen:  # after a progress bar
            seen += os.read(master, 4096).decode()
        os.close(master)
        assert run.process.wait() == 75
    assert summary(tmp_path / "run")["finished_because"] == "interrupted"
    assert (tmp_path / "run/snapshot.pt").is_file()
    log = (tmp_path / "run/train.log").read_text()
    assert "interrupted by a signal" in log and "resource_tracker" not in log


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("way", "signum", "after"),
    [
        ("nd", signal.SIGINT, "starting imagenet_nd.py: loading PyTorch"),
        pytest.param("nd", signal.SIGTERM, "a long start begins", marks=LONG),
        ("spawn", signal.SIGHUP, "starting imagenet_ddp.py: loading PyTorch"),
        pytest.param("spawn", signal.SIGINT, "starting 2 processes on this node", marks=LONG),
        ("spawn", signal.SIGTERM, "a long start begins"),
        pytest.param(
            *("torchrun 2", signal.SIGTERM),
            "starting imagenet_ddp.py in 2 processes: loading PyTorch",
            marks=LONG,
        ),
        ("torchrun 2", signal.SIGINT, "a long start begins"),
    ],
)
def test_a_stop_before_the_first_step_is_one_line(folder, tmp_path, way, signum, after):
    """It imports torch; or rank 0 waits for rank 1 in C++, at most for --dist-timeout."""
    slow, start = "0" if way == "nd" else "1", Running if "starting" in after else Forked
    with start(*command(way, folder, tmp_path), SLOW_START_IN=slow) as run:
        run.until(after)
        run.meet_family()
        run.send(signum, group=True)
        result = run.result()
        assert eventually(lambda: not any(one.lives() for one in run.family))
    assert result.code == 75, result
    (line,) = result.err.strip().splitlines()
    assert line.endswith(": stopped; there is nothing to save"), line


def test_a_tool_that_is_stopped_while_it_loads_torch_prints_no_traceback(tmp_path):
    with Running("scripts/model_results.py", tmp_path) as tool:
        tool.until("starting model_results.py: loading PyTorch")
        tool.send(signal.SIGINT)
        result = tool.result()
    assert (result.code, result.err) == (130, "")


# A training process in a long step: it notes the request to end, and goes on. os.write writes a
# line in one piece, as two of them write at the same time.
BUSY = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked\\n"))
os.write(1, b"up\\n")
time.sleep(600)
"""
DROPPING = """
import contextlib, time
sleep = time.sleep
def dropping(seconds):
    with contextlib.suppress(Exception):
        sleep(seconds)
time.sleep = dropping
"""


@pytest.mark.parametrize("dropped", [False, True])
def test_a_second_interrupt_of_torchrun_does_not_wait_for_the_step(tmp_path, dropped):
    """Also where Python drops what the handler of the first one raises, as in a destructor."""
    (tmp_path / "train.py").write_text(BUSY)
    if dropped:
        (tmp_path / "sitecustomize.py").write_text(DROPPING)
    line = (*OURS, "--nproc_per_node=2", tmp_path / "train.py")
    with Forked(*line, PYTHONPATH=str(tmp_path)) as run:
        for _ in range(2):
            run.until("up")
        run.meet_family()
        run.send(signal.SIGINT, group=True)
        for _ in range(2):
            run.until("asked")
        assert all(one.lives() for one in run.family)
        run.send(signal.SIGINT, group=True)
        result = run.result()
        assert eventually(lambda: not any(one.lives() for one in run.family))
    assert (result.code, "Traceback" in result.err) == (130, False), result.err
