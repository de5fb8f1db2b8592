"""A missing environment is a one-line error message, a closed stdout is no error at all."""

import sys

import pytest
from conftest import python, shell, summary
from running import TINY_LINE, tiny

MODES = ("nd", "dp", "ddp", "ddp_apex", "fsdp")


@pytest.mark.parametrize(
    ("line", "package"),
    [
        *((f"imagenet_{name}.py --help", "torch") for name in MODES),
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


def test_what_a_package_can_do_without_is_its_own_affair(tmp_path):
    """Only imports of this repository are reported."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "guarded.py").write_text(
        "try:\n    import torch\nexcept ImportError:\n    print('fine')\n"
    )
    code = "import utils.launch.installed, sys; sys.path.append(sys.argv[1]); import guarded"
    done = python("-S", "-c", code, tmp_path / "site-packages")
    assert (done.code, done.out) == (0, "fine\n"), done.err


UNWRITABLE = {"closed pipe": "exec > >(:); wait $!", "full disk": "exec > /dev/full"}


def written_to(stdout, line, **env):
    """Exit code and error output of a command whose stdout cannot be written."""
    # Without a buffer, argparse would drop the error that the exit reports.
    (done,) = shell(f"{UNWRITABLE[stdout]}; python {line}", PYTHONUNBUFFERED="", **env)
    return done.code, done.err


@pytest.mark.parametrize(
    "line",
    [
        "forecast_scaling.py --arch resnet50 -b 208 --gpu-images-per-s 400 --network-gbit 25",
        "compare_runs.py --help",
        "prepare_data.py --help",
        "doctor.py --help",
        "ssh/status.py",
        "ssh/cleanup.py --dry-run",
        "ssh/launcher.py --help",
    ],
)
def test_nobody_has_to_read_what_a_program_says(line):
    assert written_to("closed pipe", f"scripts/{line}") == (0, "")


@pytest.mark.parametrize("stdout", ["closed pipe", "full disk"])
@pytest.mark.parametrize(
    "line",
    ["imagenet_nd.py", pytest.param("imagenet_ddp.py -g 2", marks=pytest.mark.long)],
)
def test_training_continues_when_stdout_cannot_be_written(folder, tmp_path, line, stdout):
    _, env = tiny()
    options = f"{TINY_LINE} -p 1 --epochs 1 --name run --output-dir"
    assert written_to(stdout, f"{line} {options} {tmp_path} {folder}", **env) == (0, "")
    assert summary(tmp_path / "run")["epochs_done"] == 1
    assert "all epochs done" in (tmp_path / "run" / "train.log").read_text()
