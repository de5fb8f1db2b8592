"""A missing environment is a one-line error message, a closed stdout is no error at all."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT, environment, python, summary
from running import tiny

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


def written_to(stdout: str, *arguments: object, **env: str) -> tuple[int, str]:
    """Exit code and error output of a command whose stdout cannot be written."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe, open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=ROOT,
            env=environment(**env),
            stdout=full if stdout == "full disk" else pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=240,
            check=False,
        )
    return done.returncode, done.stderr


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
    assert written_to("closed pipe", *f"scripts/{line}".split()) == (0, "")


@pytest.mark.parametrize("stdout", ["closed pipe", "full disk"])
@pytest.mark.parametrize(
    "line",
    ["imagenet_nd.py", pytest.param("imagenet_ddp.py -g 2", marks=pytest.mark.long)],
)
def test_training_continues_when_stdout_cannot_be_written(folder, tmp_path, line, stdout):
    model, env = tiny()
    options = "-b 5 -j 0 -p 1 --image-size 32 --epochs 1 --name run --output-dir"
    command = (*line.split(), *model, *options.split(), tmp_path, folder)
    assert written_to(stdout, *command, **env) == (0, "")
    assert summary(tmp_path / "run")["epochs_done"] == 1
    assert "all epochs done" in (tmp_path / "run" / "train.log").read_text()
