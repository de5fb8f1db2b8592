"""A missing environment is a one-line error message, a closed stdout is no error at all."""

import sys

import pytest
from conftest import python, shell, summary
from running import TINY_LINE, tiny


@pytest.mark.parametrize(
    ("line", "package"),
    [
        ("imagenet_ddp.py --help", "torch"),
        ("imagenet_fsdp.py --help", "torch"),
        ("scripts/bench_input.py", "numpy"),
        ("scripts/prepare_data.py sample nowhere", "numpy"),
        ("scripts/compare_runs.py RUN", "tensorboard"),
    ],
)
def test_without_its_packages_a_command_is_one_error_message(line, package, tmp_path):
    (tmp_path / "events.out.tfevents.1").touch()
    done = python("-S", *line.replace("RUN", str(tmp_path)).split())  # -S: no site-packages
    assert done.code == 2
    assert f"error: {package} is not installed for {sys.executable}: " in done.sentence
    assert "requirements.txt" in done.sentence


CLOSED, FULL = "exec > >(:); wait $!", "exec > /dev/full"


def written_to(stdout, line, **env):
    """Exit code and error output of a command whose stdout cannot be written."""
    # Without a buffer, argparse would drop the error that the exit reports.
    (done,) = shell(f"{stdout}; python {line}", PYTHONUNBUFFERED="", **env)
    return done.code, done.err


@pytest.mark.parametrize(
    "line",
    [
        "compare_runs.py --help",
        "prepare_data.py --help",
        "doctor.py --help",
        "ssh/status.py",
        "ssh/cleanup.py --dry-run",
        "ssh/launcher.py --help",
    ],
)
def test_nobody_has_to_read_what_a_program_says(line):
    assert written_to(CLOSED, f"scripts/{line}") == (0, "")


@pytest.mark.parametrize(
    ("line", "stdout"),
    [
        ("imagenet_nd.py", CLOSED),
        ("imagenet_nd.py", FULL),
        pytest.param("imagenet_ddp.py -g 2", FULL, marks=pytest.mark.long),
    ],
)
def test_training_continues_when_stdout_cannot_be_written(folder, tmp_path, line, stdout):
    _, env = tiny()
    options = f"{TINY_LINE} -p 1 --epochs 1 --name run --output-dir"
    assert written_to(stdout, f"{line} {options} {tmp_path} {folder}", **env) == (0, "")
    assert summary(tmp_path / "run")["epochs_done"] == 1
    assert "all epochs done" in (tmp_path / "run" / "train.log").read_text()
