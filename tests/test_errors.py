"""Bad input: a one-line error message that names the cause, a non-zero exit code, nothing lost."""

import errno
import json
import os
import re
import runpy
import shutil
import sys
import threading
import time
from pathlib import Path

import joined
import pytest
import torch
from conftest import ROOT, SMALL, TORCHVISION_MODEL, Result, draw_folder, python, shell, summary
from running import TINY_LINE, TORCHRUN, alone

from utils.start import errors
from utils.start.addresses import free_port
from utils.start.errors import UserError, report
from utils.start.known_errors import REQUIRED, explain

TINY = (*SMALL, "-b", "5", "-j", "0", "--epochs", "2")


def attempt(*words: object) -> Result:
    """Run a script that is bound to fail."""
    return joined.command("imagenet_nd", *TINY, *words)


# ---- the command line


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("nd -a resnet5", "resnet50"),
        ("nd --desired-acc=175", "175 is neither a share"),
        ("nd --seed=9223372036854775808", "9223372036854775808 is not at least 0 and at most"),
        ("nd --mixup=inf", "argument --mixup: invalid number value"),
        ("nd --batch-range 9:1", "--batch-range was removed"),
        ("nd -b 0", "0 is not at least 1"),
        ("nd --image-size 99999999999999999999", "at most 10000"),
        ("nd --repeated-aug 3", "--repeated-aug was removed"),
        ("nd --wd 1e308", "at most 1000000000"),
        ("nd --mixup 1e-320", "neither 0 nor 0.001"),
        ("nd -j 5000", "argument -j/--workers: 5000 is not at least 0 and at most"),
        ("nd --epochs 2 --warmup-epochs 2.5", "2.5 is longer than --epochs 2: give fewer"),
        ("nd --epochs 2 --start-epoch 2", "leaves none of --epochs 2: counted from 0"),
        ("nd --resume auto", "--resume auto needs --name"),
        ("nd --name=..", "'..' is not a plain name"),
        (f"nd --name={'x' * 201}", "is longer than 200 bytes"),
        (f"nd --name={'é' * 101}", "is longer than 200 bytes"),
        ("nd --profile -e --pretrained", "--profile traces training: leave out --find-batch"),
        ("nd --find-batch -e --pretrained", "--find-batch measures training: leave out --evaluate"),
        ("nd -e", "add --resume runs/NAME/best.pt, or --name NAME --resume auto"),
        ("nd --part test", "--part test is for --evaluate: add -e"),
        ("nd -b auto", "-b auto was removed: run the command once with --find-batch"),
        ("nd --memory-limit 3", "a smaller number than --find-batch prints"),
        ("nd --find-batch", "--find-batch measures the memory of GPUs, and there is none"),
        ("nd --optimizer lamb", "--optimizer lamb was removed: use adamw"),
        ("nd --optimizer=muon", "--optimizer muon was removed: use adamw or nesterov"),
        ("ddp --comm localsgd:8", "--comm localsgd was removed: --comm int4 sends least"),
        ("ddp --dist-timeout=0", "0 is not at least 1"),
        ("ddp --opt-level O2", "--opt-level is an option of imagenet_ddp_apex.py"),
        ("nd -g 2", "-g is an option of imagenet_ddp.py"),
        ("nd --optimizer nesterov --momentum 0", "needs a --momentum"),
        ("nd --progressive 192:160", "neither FROM:TO"),
        ("nd --progressive 160,0", "neither FROM:TO"),
        ("nd --betas 0.9", "argument --betas"),
        ("nd --betas 0.9,1", "argument --betas"),
        ("nd --global-batch 7 --accum-steps 2", "sets the accumulation steps itself: leave out"),
        ("ddp --global-batch 0", "0 is not at least 1"),
        ("ddp --comm int7", "invalid choice: 'int7'"),
        ("ddp --comm auto", "--comm auto was removed: `python scripts/bench_network.py"),
        ("ddp --comm powersgd:4", "--comm powersgd was removed: --comm int4"),
        ("ddp_apex --optimizer adamw --opt-level O3", "--opt-level O2 keeps float32 masters"),
    ],
)
def test_options_that_cannot_be(folder, parse, capsys, monkeypatch, line, named):
    script, *words = line.split()
    for local_rank in "01":  # the second process of a node leaves it to the first to print it
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises((SystemExit, UserError)) as end:
            parse(f"imagenet_{script}", *words, folder)
        assert end.value.code == 2
        printed = capsys.readouterr().err
        if isinstance(end.value, UserError):
            assert end.value.on_every_rank
            assert not printed
        assert named in (printed or str(end.value))
        assert bool(printed) <= (local_rank == "0")


EMPTY = "--classes --resume --pretrained --recipe --output-dir --store --name -a --seed --lr --comm"


@pytest.mark.parametrize("option", [*EMPTY.split(), "DATA"])
def test_the_value_of_an_unset_shell_variable_is_an_error(folder, parse, capsys, option):
    words = [""] if option == "DATA" else [option, "", folder]
    with pytest.raises((SystemExit, UserError)) as end:
        parse("imagenet_ddp", *words)
    assert end.value.code == 2
    printed = capsys.readouterr().err or str(end.value)
    assert option in printed
    assert re.search("the value is empty|invalid|not a plain name", printed)


def test_an_empty_imagenet_dir_is_an_unset_one(parse, monkeypatch):
    monkeypatch.setenv("IMAGENET_DIR", "")
    with pytest.raises(UserError, match="data folder /data is missing"):
        parse("imagenet_nd")


def test_a_file_as_data_is_not_called_missing(parse, tmp_path):
    (tmp_path / "train.tar").write_bytes(b"")
    with pytest.raises(UserError, match=r"is a file: DATA is the folder that .* zip"):
        parse("imagenet_nd", tmp_path / "train.tar")


def test_an_error_is_one_line(folder, tmp_path):
    attempt("--epoch", 1, folder).fails_with("--epoch: did you mean --epochs?")
    line = ("-n", 2, "-nr", 0, "--dist-url", f"tcp://127.0.0.1:{free_port()}")
    done = joined.command("imagenet_ddp", *line, "--dist-timeout", 9, "--epoch", 1, folder)
    done.fails_with("--epoch: did you mean --epochs?")
    assert not done.out, "it waited for another node first"
    words = ("this machine is out of memory", "bytes", "--global-batch")
    large = ("-b", 1000000, "--image-size", 10000)  # a batch of 1.2 PB
    joined.command("scripts/bench/time_step", "imagenet_nd", *TINY, *large).fails_with(*words)
    attempt("--dummy", *large, "--output-dir", tmp_path).fails_with("no memory for", "a smaller -b")
    for classes in ("0", "99999999999"):
        attempt("--dummy", "--classes", classes).fails_with("--classes a number, 1 to 1000000")
    attempt("--classes", "/proc/self/mem", folder).fails_with("/proc/self/mem cannot be read")


# ---- the data set


@pytest.fixture
def data(tmp_path) -> Path:
    """A small data set to spoil."""
    return draw_folder(tmp_path / "data", train=6, val=2)


def test_a_data_set_that_cannot_be_trained_on_leaves_no_run(data):
    output = data.parent / "output"
    (data / "val" / "class_2").rename(data / "val" / "class_x")
    attempt("--output-dir", output, data).fails_with("class_2", "class_x", "train", "val")
    shutil.rmtree(data)
    attempt("--output-dir", output, data).fails_with(f"{data} is missing")
    assert not output.exists() or not list(output.iterdir())


def test_a_training_that_does_not_begin_leaves_nothing(folder, tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "text.pt").write_text("no checkpoint")
    for place in ("kept", "made/and/made"):
        for name in ((), ("--name", "one")):
            options = ("--resume", tmp_path / "text.pt", "--output-dir", tmp_path / place, *name)
            attempt(*options, folder).fails_with("text.pt is not a checkpoint")
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "kept", tmp_path / "text.pt"]


WITHOUT_TORCH = "raise SystemExit('torch was imported')"


@pytest.mark.parametrize("launcher", [{}, {"RANK": "0", "LOCAL_RANK": "0"}])
def test_what_needs_no_torch_is_checked_before_it_is_imported(data, launcher):
    """Also below torchrun, where the start of each process takes seconds."""
    (data / "torch").mkdir()
    (data / "torch/__init__.py").write_text(WITHOUT_TORCH)
    shutil.rmtree(data / "val")
    words = (data, "--lr", "x"), (data / "none",), (data, "--epochs", "1"), (data / "train",)
    for line, named in zip(words, ("--lr", "none is missing", "run `python", "run `"), strict=True):
        done = python("imagenet_ddp.py", *line, PYTHONPATH=str(data), **launcher)
        done.fails_with(named)
        assert not done.out


def test_control_characters_of_a_file_name_are_escaped(data):
    """In the terminal and in the log."""
    (data / "train/class_1/\x1b[31m\n.JPEG").write_text("no image")
    done = attempt("--output-dir", data.parent, "--name", "run", data)
    assert done.code == 0, done.err
    for text in (done.out, (data.parent / "run/train.log").read_text()):
        assert r"class_1/\x1b[31m\n.JPEG" in text
        assert "\x1b" not in text


# ---- checkpoints and the run directory


def test_a_run_that_cannot_be_continued_is_left_as_it_was(folder, tmp_path):
    run = tmp_path / "mine"
    here = (*TORCHVISION_MODEL, "-b", "20", "--lr", "0.01", "--name", "mine")
    here += ("--output-dir", tmp_path)
    assert attempt("--epochs", "1", *here, folder).code == 0
    again = (*here, "--resume", "auto", folder)

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in run.iterdir()}

    whole = contents()
    for options, words in (
        (("-a", "resnet34", "--resume", run / "snapshot.pt"), "snapshot.pt is a shufflenet_v2"),
        (("--output-dir", run / "best.pt"), run / "best.pt"),
        (here, f"{run} contains a run"),
    ):
        attempt(*options, folder).fails_with(words)
        assert contents() == whole
    # A limit on the size of files stands in for a full disk. Loader workers must end, too.
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1_024_000, 1_024_000))"
    joined.command("imagenet_nd", *TINY, "-j", "1", *again, BEFORE=full).fails_with(run)
    for path in (run / "snapshot.pt", run / "best.pt"):
        assert path.read_bytes() == whole[path]
    assert not list(run.glob(".*.tmp"))
    os.truncate(run / "snapshot.pt", 1000)
    damaged = contents()
    attempt(*again).fails_with("snapshot.pt is not a checkpoint")
    assert contents() == damaged


def test_shortages_that_torch_reports(capsys):
    """Other errors keep their traceback. Without a training, there is nothing to resume."""
    for text, words in (
        ("CUDA out of memory. Tried to allocate 3.06 GiB. GPU 0", "the GPU is out of memory"),
        ("DataLoader worker (pid(s) 7, 8) exited unexpectedly", "worker 7, 8 exited"),
        ("DataLoader worker (pid 7) exited", "To continue, run the same command again"),
    ):
        assert words in str(explain(RuntimeError(text)))
    for error, words in (
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (RuntimeError("unable to open shared memory: Too many open files (24)"), "ulimit -n"),
        (RuntimeError("received 0 items of ancdata"), "ulimit -n"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (RuntimeError(os.strerror(errno.EAGAIN)), "ulimit -u"),  # C++
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "ulimit -u"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "too little memory"),
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), "on the disk for /data/x"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/home/x"), "on the disk for /home/x"),
        (OSError(errno.EIO, ""), "cannot use a file (Input/output error): check its disk"),
        (OSError(errno.ENOTCONN, "", "/mnt/x"), "cannot use /mnt/x (Transport endpoint is not"),
        (PermissionError(errno.EACCES, "", "/data"), "permissions, then run the same command"),
    ):
        assert words in str(explain(error)), error
    assert explain(OSError(errno.ENOTCONN, "of a socket")) is None
    assert report(OSError(errno.ENOSPC, "No space left on device", "a.png")) == 2  # not training
    said = "error: a.png: No space left on device: correct that, then run the same command again\n"
    assert capsys.readouterr().err == said
    assert explain(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None


def with_unused_layer(rank: int, size: int) -> str:
    """What a user reads when DistributedDataParallel waits for a gradient that never comes."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.register_parameter("unused", torch.nn.Parameter(torch.zeros(2)))
    replica = torch.nn.parallel.DistributedDataParallel(model)
    try:
        for _ in range(2):
            replica(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        return str(explain(error))
    return "no error"


def test_models_that_cannot_be_trained_so_are_one_line():
    """One image whose feature map is one pixel, in batch norm; a layer that a model never uses."""
    with pytest.raises(ValueError, match="per channel") as error:
        torch.nn.BatchNorm2d(3)(torch.ones(1, 3, 1, 1))
    assert "use -b 2 or more images per process" in str(explain(error.value))
    for text in joined.in_processes(2, with_unused_layer):
        assert "such as a layer that it never uses" in text


# ---- losses that are no numbers


SPOILT = """
import signal
from torch import nn
class Spoilt(nn.CrossEntropyLoss):
    calls = 0
    def forward(self, *arguments):
        Spoilt.calls += 1
        return super().forward(*arguments) * FACTOR
nn.CrossEntropyLoss = Spoilt
"""


def spoilt(mode: str, factor: str, *options: object, **env: str) -> Result:
    """A training whose loss is multiplied by ``factor``."""
    words = ("-a", "tiny_plain", "--image-size", "32", "--name", "one", *options)
    env |= {"BEFORE": SPOILT.replace("FACTOR", factor), "STEP_SECONDS": "0.1"}
    return joined.command(f"imagenet_{mode}", *words, **env)


def test_a_loss_scale_that_falls_without_end_leaves_the_last_snapshot(folder, tmp_path):
    """Every gradient of this loss overflows; weights stay as they were, and nothing is learnt."""
    options = ("--opt-level", "O2", "-b", "1", "-j", "1", "--clip-grad", "1")
    done = spoilt("ddp_apex", "1e30", *options, "--output-dir", tmp_path, folder, **alone())
    done.fails_with("loss scale", "--lr", "--clip-grad; no snapshot was written yet")
    skipped = [line for line in done.out.splitlines() if line.startswith("Gradient overflow.")]
    scales = [float(line.rsplit(maxsplit=1)[1]) for line in skipped]
    assert scales == [2.0**-n for n in range(-15, 16)][: len(scales)]
    assert len(scales) >= 30
    assert not (tmp_path / "one" / "snapshot.pt").exists()


def test_no_snapshot_is_written_once_the_loss_is_no_number(folder, tmp_path):
    """It is due after each step, long before the line that would show the loss."""
    factor = "(1 if Spoilt.calls < 4 else float('nan'))"
    often = ("-b", "5", "-j", "0", "-p", "1000", "--snapshot-minutes", "0")
    done = spoilt("nd", factor, *often, "--output-dir", tmp_path, folder)
    done.fails_with("loss", "nan", "last snapshot is intact")
    # No snapshot is due while the last one is being written: on a slow machine after step 5, too.
    assert re.search("epoch 1, step [56]:", done.sentence)
    snapshot = torch.load(tmp_path / "one" / "snapshot.pt", weights_only=True)
    assert 1 <= snapshot["progress"]["step"] <= 3
    assert all(tensor.isfinite().all() for tensor in snapshot["model"].values())


@pytest.mark.parametrize(
    ("step", "factor", "what"),
    [
        (4, "[float('nan'), signal.raise_signal(15)][0]", "the loss is"),
        # Its value is 1, and its gradient is no number: the last step of the epoch.
        (12, "(1 + (0 * arguments[0].sum()).sqrt())", "some weights are"),
    ],
    ids=["a signal", "the end of an epoch"],
)
def test_a_model_that_is_lost_takes_the_place_of_no_snapshot(folder, tmp_path, step, factor, what):
    """No run could continue from it."""
    rarely = ("-b", "5", "-j", "0", "-p", "1000", "--output-dir", tmp_path, folder)
    done = spoilt("nd", f"(1 if Spoilt.calls != {step} else {factor})", *rarely)
    done.fails_with(f"{what} nan", f"epoch 1, step {step}:", "no snapshot was written yet")
    assert not (tmp_path / "one" / "snapshot.pt").exists()


# ---- several processes


RAISED_BY = """
import os, time
from utils.start import launch
from utils.start.errors import UserError, report
def main():
    time.sleep({seconds})
    raise UserError('the data folder is missing', on_every_rank=True)
{more}
launch.run_main(main)
"""


def test_torchrun_ends_with_the_error_of_the_slowest_process(tmp_path):
    """torchrun ends rank 0 when rank 1 has ended. Rank 0 alone prints an error that both have."""
    slow = tmp_path / "slow.py"
    slow.write_text(RAISED_BY.format(seconds="4 * (os.environ['LOCAL_RANK'] == '0')", more=""))
    done = joined.command(*TORCHRUN, "--nproc_per_node=2", slow, PYTHONPATH=str(ROOT))
    assert done.code != 0
    assert done.err.count("error: the data folder is missing") == 2, "at once, and at the end"
    assert done.err.strip("=\n").endswith("error: the data folder is missing"), done.err


def test_torchrun_reports_a_process_that_it_has_stopped_as_no_cause(tmp_path):
    (tmp_path / "reported").touch()  # by another process
    file = tmp_path / "error.json"
    env = {"IMAGENET_REPORTED": str(tmp_path / "reported"), "TORCHELASTIC_ERROR_FILE": str(file)}
    code, now = "from utils.start import signals; signals.say(15)", int(time.time())
    done = python("-c", code, PYTHONPATH=str(ROOT), **env)
    assert (done.code, done.out, done.err) == (0, "", "")
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "SIGTERM: stopped, as another process has failed"
    assert int(message["extraInfo"]["timestamp"]) > now, "the earliest one is shown as the cause"


def test_of_torchruns_processes_one_prints_an_error_and_all_have_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(errors, "ending", threading.RLock())
    monkeypatch.delenv("IMAGENET_REPORTED", raising=False)
    for rank in "01":
        file = tmp_path / f"attempt_0/{rank}/error.json"
        file.parent.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        assert errors.report(UserError("gone", on_every_rank=True)) == 2
        assert json.loads(file.read_text())["message"]["message"] == "error: gone"
    assert capsys.readouterr().err == "error: gone\n"


def test_an_error_that_the_first_process_does_not_have_is_reported_by_the_other():
    code = RAISED_BY.format(seconds=0, more="")
    done = python("-c", code, LOCAL_RANK="1", PYTHONPATH=str(ROOT))
    done.fails_with("folder is missing")


# Scripts in a notebook's kernel: sys.ps1 tells that Python is interactive.
IN_A_KERNEL = """
import runpy, sys
sys.ps1 = "In : "
sys.path.append("scripts")
for line in ("imagenet_nd.py nowhere", "scripts/compare_runs.py nowhere"):
    sys.argv = line.split()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        print(end.code)
"""


def test_bad_input_in_a_notebook_does_not_end_its_kernel():
    assert python("-c", IN_A_KERNEL).out.split() == ["2", "2"]


def test_several_processes_report_an_error_once(data):
    """Both ranks have it in their first batch."""
    for path in sorted((data / "train").glob("*/*.JPEG"))[:15]:
        path.write_text("not an image")
    options = ("-g", 2, "--max-bad-files", 2, "--output-dir", data.parent / "output", data)
    done = python("imagenet_ddp.py", *TINY, *options)
    assert done.code == 2
    assert (done.err.count("--max-bad-files"), done.err.count("Traceback")) == (1, 0), done.err


# ---- a missing environment, a closed or full stdout


@pytest.mark.parametrize(
    ("line", "package"),
    [
        ("imagenet_ddp.py --help", "numpy"),
        ("scripts/bench_input.py", "pillow"),
        ("scripts/prepare_data.py sample nowhere", "tqdm"),
        ("scripts/compare_runs.py RUN", "tensorboard"),
        ("scripts/torchrun.py imagenet_ddp.py", "torch"),
        ("-m utils.start.preflight 0 1 1 127.0.0.1:8888", "torch"),
    ],
)
def test_without_its_packages_a_command_is_one_error_message(line, package, tmp_path):
    (tmp_path / "events.out.tfevents.1").touch()
    done = python("-S", *line.replace("RUN", str(tmp_path)).split())  # -S: no site-packages
    assert done.code == 2
    assert f"error: {package} is not installed for {sys.executable}: " in done.sentence
    assert "requirements.txt" in done.sentence


def test_an_old_python_is_one_error_message(monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "utils/__init__.py"))
    assert "is Python 3.9, and 3.10 or newer is needed: activate" in capsys.readouterr().err


def test_each_required_package_has_a_message():
    """By the name under which it is imported; nvidia-ml-py is optional there."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    packages = {re.match(r"[\w-]+", line)[0] for line in lines if line and line[0] != "#"}
    assert packages - {"nvidia-ml-py"} <= {*REQUIRED.values()}


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("ulimit -f 0", ("no folder for temporary files", "ulimit -f")),
        ("ulimit -v 3000000", ("too low to load torch", "ulimit -v")),
        ("ulimit -n 18", ("too low to load torch", "ulimit -n")),
        ("export IMAGENET_LAUNCHER=abc", ("IMAGENET_LAUNCHER=abc", "unset it")),
    ],
)
def test_a_shell_in_which_torch_cannot_be_imported(limit, words):
    line = f"{limit}; python imagenet_ddp.py --dummy -g 1 2>&1"
    (done,) = shell(f"({line}; echo code $?) | cat", PYTHONPATH="")
    lines = [line for line in done.out.splitlines() if not line.startswith("starting ")]
    assert (len(lines), lines[-1]) == (2, "code 2"), done.out
    assert all(word in lines[0] for word in words), done.out


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
    options = f"{TINY_LINE} -p 1 --epochs 1 --name run --output-dir"
    assert written_to(stdout, f"{line} {options} {tmp_path} {folder}") == (0, "")
    assert summary(tmp_path / "run")["epochs_done"] == 1
    assert "all epochs done" in (tmp_path / "run" / "train.log").read_text()


def test_a_full_shared_memory_is_one_error_line(folder, tmp_path):
    """Semaphores of data loading workers are in /dev/shm."""
    full = "mount --make-rprivate / && mount -t tmpfs -o size=64k none /dev/shm && "
    full += "dd if=/dev/zero of=/dev/shm/x bs=4k 2>/dev/null"
    own = "import ctypes, os; ctypes.CDLL(None).unshare(0x20000) and exit('unshare'); "  # NEWNS
    own += f"os.system({full!r})"
    line = (*SMALL, "-b", 10, "--output-dir", tmp_path, folder)
    done = joined.command("imagenet_nd", *line, BEFORE=own)
    if "unshare" in done.err or "mount" in done.err:
        pytest.skip("only root can mount a small disk")
    done.fails_with("/dev/shm has only 0.0 MiB free", "--ipc=host")
