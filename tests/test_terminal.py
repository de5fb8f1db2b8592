"""What a run shows: a bar on a terminal, lines elsewhere, and all lines in train.log."""

import fcntl
import functools
import os
import re
import signal
import struct
import termios
from collections.abc import Callable
from dataclasses import replace

import pytest
from conftest import SMALL, train
from joined import Forked, Job, run_jobs

LINE = ("-a", "tiny_plain", "-b", "5", "--epochs", "1", "-p", "2")


def set_width(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def read_to_end(terminal: int, at: str, then: Callable[[], object]) -> list[str]:
    """What is drawn on a terminal: each line, and each state of a line that is drawn over. When
    ``at`` was seen, ``then`` is called, and a word marks the place."""
    drawn, is_called = "", False
    while True:
        try:
            part = os.read(terminal, 4096).decode()
        except OSError:  # its last process has ended
            return re.split(r"[\r\n]", drawn)
        drawn += part
        if not is_called and at in drawn:
            then()
            drawn, is_called = f"{drawn}<then>", True


def on_terminal(
    words: tuple[object, ...], both: bool, signum: int | None = None
) -> tuple[list[str], str]:
    """Run a command whose errors go to a terminal of 80 columns, and with ``both`` its output, too.
    In the middle, it gets a signal or, without one, 60 columns.

    Returns: what is drawn on the terminal, and the output that went elsewhere.
    """
    terminal, end = os.openpty()
    set_width(terminal, 80)
    opens = f"import os; place = os.open({os.ttyname(end)!r}, os.O_WRONLY | os.O_NOCTTY); "
    opens += f"os.write(1, b'\\n'); [os.dup2(place, n) for n in {(1, 2) if both else (2,)}]"
    with Forked(*words, STEP_SECONDS="0.15", BEFORE=f"{opens}; os.close(place)") as run:
        run.until("")
        os.close(end)
        narrow = functools.partial(set_width, terminal, 60)
        drawn = read_to_end(
            terminal, "7/12", narrow if signum is None else lambda: run.send(signum)
        )
        result = run.result()
    os.close(terminal)
    assert result.code == (75 if signum else 0), (drawn, result)
    return drawn, result.out


@pytest.mark.parametrize("both", [True, False], ids=["terminal", "tee"])
def test_a_bar_on_a_terminal_and_lines_elsewhere(folder, tmp_path, both):
    words = ("imagenet_nd", *SMALL, *LINE, "--output-dir", tmp_path, "--name", "run", folder)
    drawn, text = on_terminal(words, both)
    log = (tmp_path / "run" / "train.log").read_text().splitlines()
    steps = [line for line in log if " step " in line]
    assert len(steps) == 7, "also while a bar is shown: the first step and every second one"
    pattern = r"Epoch 1/1 step +\d+/12  loss \d\.\d{4}  top-1 \d+\.\d\d  top-5 \d+\.\d\d  "
    pattern += r"images/s \d+\.\d  s/step \d+\.\d{4}  waiting % \d+\.\d"
    assert all(re.fullmatch(pattern, line) for line in steps), steps
    bars = [line for line in drawn if "img/s" in line]
    if not both:
        assert not bars and text.count(" step ") >= 7
        return
    resized = next(i for i, line in enumerate(drawn) if "<then>" in line)
    assert len(bars) > 5 and not any(" step  " in line for line in drawn)
    assert re.match(
        r"Epoch 1/1 \|.{5,}\| \d+/12 \S+, loss \d\.\d{4}  top-1 .{4}  .{4} img/s", bars[0]
    )
    assert max(len(line) for line in drawn[:resized] if line.startswith("Epoch 1/1 |")) <= 80
    later = drawn[resized + 1 :]
    assert max(len(line) for line in later if "Epoch 1/1 |" in line) <= 60, "no spaces to wrap"
    assert any("\x1b[1A" in line for line in drawn[resized:]), "the row above is of the wrapped bar"


def test_a_signal_is_told_below_the_bar(folder, tmp_path):
    words = ("imagenet_nd", *SMALL, *LINE, "--output-dir", tmp_path, "--name", "run", folder)
    drawn, _ = on_terminal(words, True, signal.SIGTERM)
    assert "SIGTERM: stopping after this step, with a snapshot" in drawn


def test_a_second_node_does_not_repeat_the_first_ones_lines(folder, tmp_path):
    words = (*LINE, "--output-dir", tmp_path, "--name", "run", folder)
    job = Job("imagenet_ddp", (*SMALL, *words), processes=1, nodes=2)
    run_jobs([job, replace(job, options=(*job.options, "--name", "b"), stop_after=2)], tmp_path)
    first, second, *_ = ((tmp_path / f"job{n}_rank{i}").read_text() for n in (0, 1) for i in (0, 1))
    assert "Epoch 1/1 step" in first
    begun = "[rank 1] this node trains with rank 0 of 2, which prints the progress"
    assert second.splitlines() == [begun]
    begins, *said = (tmp_path / "job1_rank1").read_text().splitlines()
    assert (begins, said[0]) == (begun, "SIGTERM: stopping after this step, with a snapshot")
    assert re.fullmatch(r"\[rank 1\] Training time .*: interrupted by a signal; to .*", said[-1])
    assert len(said) == 2, "its terminal says why it ends, and how to continue"


def test_the_stages_of_a_start_are_printed_as_they_come(folder, tmp_path):
    out = train("imagenet_nd.py", *LINE, "--output-dir", tmp_path, folder).out
    stages = ["reading the lists of images in", "run directory", "training begins", "step  1/12"]
    places = [out.find(text) for text in stages]
    assert -1 not in places and places == sorted(places), out


def test_ranks_that_are_told_to_print_at_other_steps_use_that_of_rank_0(tmp_path, folder):
    """On nodes where different lines were typed. The sums that a line needs are of all ranks."""
    other = "import os, sys; sys.argv += ['-p', '3'] if os.environ['RANK'] == '1' else ['-p', '2']"
    line = ("-b", 5, "--epochs", 1, "--output-dir", tmp_path, "--name", "run", folder)
    done = train("imagenet_ddp.py", *line, processes=2, BEFORE=other)
    assert re.findall(r"^Epoch 1/1 step (\d)", done.out, re.MULTILINE) == ["1", "2", "4", "6"]
