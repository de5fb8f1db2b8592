"""Bad input: a one-line error message that names the cause, a non-zero exit code, nothing lost."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Result, draw_folder, python, shell, train
from running import tiny

from utils.errors import of_shortage
from utils.launch.network import free_port

TINY = ("-a", "resnet18", "--image-size", "32", "-b", "5", "-j", "0", "--epochs", "2")
LINE = " ".join(TINY)
SECOND = "lost touch with another process"  # what other ranks may say after the first error


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder``: relative path -> bytes."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def assert_one_sentence(result: Result, *names: object) -> None:
    """The command failed, and all that it says on stderr is one line with ``names`` in it."""
    assert result.code != 0, result.out
    said = result.sentence
    for name in names:
        assert str(name) in said, said
    assert result.err.strip().splitlines() == [said], result.err


def assert_one_sentence_of_many(result: Result, *names: object) -> None:
    """The same for a command with several processes: the sentence comes once, not once a process.

    torchrun adds its report, with a traceback of its own. Other ranks may add that they have lost
    touch with the one that failed.
    """
    assert result.code != 0, result.out
    tracebacks = re.findall(
        r"(?ms)^Traceback .*?^(?=\S+(?:Error|Exception|Interrupt)\b)(\S+)", result.err
    )
    assert result.err.count("Traceback (") == len(tracebacks), result.err
    assert all("ChildFailedError" in name for name in tracebacks), result.err
    ours = [line for line in result.err.splitlines() if re.match(r"error\b", line)]
    first = [line for line in ours if SECOND not in line]
    assert len(first) == 1, result.err
    for name in names:
        assert str(name) in first[0], first[0]


# ---- the command line


def attempt(script: str, *arguments: object) -> Result:
    """Run a script on one process that is bound to fail."""
    return python(script, *TINY, *arguments)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("nd -a resnet5", ("resnet5", "resnet50")),
        ("nd --learning-speed 1", ("--learning-speed",)),
        ("nd --desired-acc=175", ("--desired-acc", "175")),
        ("nd --seed=99999999999999999999999", ("--seed",)),
        ("nd --mixup=inf", ("--mixup", "inf")),
        ("nd -j 5000", ("5000", "--workers")),
        ("ddp --dist-timeout=0", ("--dist-timeout", "0")),
        ("ddp --dist-url 127.0.0.1:8888", ("--dist-url", "127.0.0.1:8888", "tcp://")),
        ("ddp -n 2 -nr 2", ("2", "0 to 1")),
    ],
)
def test_options_that_cannot_be(folder, words, named):
    script, *options = words.split()
    assert_one_sentence(attempt(f"imagenet_{script}.py", *options, folder), *named)


# ---- the data set


def test_missing_data_folder(tmp_path):
    assert_one_sentence(attempt("imagenet_nd.py", tmp_path / "none"), tmp_path / "none")


@pytest.fixture
def data(tmp_path) -> Path:
    """A small data set to spoil."""
    return draw_folder(tmp_path / "data", train=6, val=2)


def fails_before_it_begins(data: Path, *arguments: object) -> Result:
    """A training on ``data`` that must leave no run directory behind."""
    output = data.parent / "output"
    done = attempt("imagenet_nd.py", "--output-dir", output, *arguments, data)
    assert not output.exists() or not list(output.iterdir())
    return done


def test_missing_val(data):
    shutil.rmtree(data / "val")
    assert_one_sentence(fails_before_it_begins(data), data / "val")


def test_class_without_images(data):
    for image in (data / "train" / "class_1").iterdir():
        image.rename(image.with_suffix(".txt"))
    assert_one_sentence(fails_before_it_begins(data), data / "train" / "class_1", "no images")


def test_classes_that_differ_between_train_and_val(data):
    (data / "val" / "class_2").rename(data / "val" / "class_x")
    assert_one_sentence(fails_before_it_begins(data), "class_2", "class_x", "train", "val")


def test_unknown_name_in_classes(data):
    assert_one_sentence(fails_before_it_begins(data, "--classes", "class_1,dog"), "dog")


def test_image_size_too_small_for_the_arch(data):
    done = fails_before_it_begins(data, "-a", "alexnet", "--image-size", "32")
    assert_one_sentence(done, "alexnet", "32", "--image-size")


def spoil(data: Path, count: int) -> list[Path]:
    """Make ``count`` training images unreadable."""
    bad = sorted((data / "train").glob("*/*.JPEG"))[:: 18 // count][:count]
    for path in bad:
        path.write_text("not an image")
    return bad


def test_more_bad_files_than_allowed(data, tmp_path):
    bad = spoil(data, 3)
    options = ("--max-bad-files", "2", "--output-dir", tmp_path / "output")
    done = attempt("imagenet_nd.py", *options, data)
    assert_one_sentence(done, "2", "--max-bad-files")
    assert any(str(path) in done.sentence for path in bad)
    for path in bad:
        assert done.out.count(str(path)) == 1


# ---- checkpoints and the run directory


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory) -> Path:
    """A run of one epoch. Tests compare it before and after."""
    output = tmp_path_factory.mktemp("runs")
    options = ("-j", "0", "-b", "20", "--epochs", "1", "--lr", "0.01")
    train("imagenet_nd.py", *options, "--output-dir", output, "--name", "old", folder)
    return output / "old"


def test_checkpoint_of_another_arch(run, folder):
    before = contents(run)
    done = attempt("imagenet_nd.py", "-a", "resnet34", "--resume", run / "snapshot.pt", folder)
    assert_one_sentence(done, run / "snapshot.pt", "resnet18")
    assert contents(run) == before


def test_damaged_snapshot_of_the_run_itself(run, folder, tmp_path):
    mine = shutil.copytree(run, tmp_path / "mine")
    (mine / "snapshot.pt").write_bytes((run / "snapshot.pt").read_bytes()[:-1000])
    before = contents(mine)
    options = ("--resume", "auto", "--output-dir", tmp_path, "--name", "mine")
    assert_one_sentence(attempt("imagenet_nd.py", *options, folder), mine / "snapshot.pt")
    assert contents(mine) == before


def test_run_directory_that_cannot_be_made(folder, tmp_path):
    (tmp_path / "file").write_text("precious")
    done = attempt("imagenet_nd.py", "--output-dir", tmp_path / "file", folder)
    assert_one_sentence(done, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"


def test_loss_that_is_no_number_leaves_the_last_snapshot(run, folder, tmp_path):
    mine = shutil.copytree(run, tmp_path / "mine")
    before = {name: (mine / name).read_bytes() for name in ("snapshot.pt", "best.pt")}
    options = ("-b", "20", "--lr", "1e20", "--output-dir", tmp_path, "--name", "mine")
    done = attempt("imagenet_nd.py", *options, "--resume", "auto", folder)
    assert_one_sentence(done, "loss", "nan", "--lr")
    assert {name: (mine / name).read_bytes() for name in before} == before


def test_batch_larger_than_memory():
    done = attempt("imagenet_nd.py", "--dummy", "-b", "1000000000")
    assert_one_sentence(done, "this machine is out of memory", "bytes", "-b", "--accum-steps")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "CUDA out of memory. Tried to allocate 3.06 GiB. GPU 0 has a total capacity of 14 GiB",
            ("the GPU is out of memory", "3.06 GiB", "smaller -b"),
        ),
        ("DataLoader worker (pid(s) 7, 8) exited unexpectedly", ("worker 7, 8 exited", "-j")),
    ],
)
def test_shortages_that_torch_reports(text, parts):
    sentence = str(of_shortage(RuntimeError(text)))
    for part in parts:
        assert part in sentence


def test_other_faults_of_torch_keep_their_traceback():
    assert (
        of_shortage(RuntimeError("mat1 and mat2 shapes cannot be multiplied (5x4 and 3x2)")) is None
    )


def test_full_disk_ends_the_run_and_leaves_the_last_snapshot(run, folder, tmp_path):
    """A limit on the size of files stands in for the full disk. Loader workers must end, too."""
    mine = shutil.copytree(run, tmp_path / "mine")
    before = {name: (mine / name).read_bytes() for name in ("snapshot.pt", "best.pt")}
    options = f"{LINE} -j 1 -b 20 --output-dir {tmp_path} --name mine --resume auto"
    (done,) = shell(f"ulimit -f 1000 && python imagenet_nd.py {options} {folder}", timeout=60)
    assert_one_sentence(done, mine)
    assert {name: (mine / name).read_bytes() for name in before} == before
    assert not list(mine.glob(".*.tmp"))


# ---- several processes


LAUNCHED = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
LAUNCHED |= {"MASTER_PORT": "29500"}
PORT = {"MASTER_PORT": "99999"}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999", "WORLD_SIZE": "2"},
            "from 1 to 65535",
        ),
        ({"MASTER_ADDR": "127.0.0.1", "NODE_RANK": "x"}, "NODE_RANK=x"),
        ({"WORLD_SIZE": "2"}, "--dist-url"),
        pytest.param(LAUNCHED | PORT, "MASTER_PORT=99999", marks=pytest.mark.long),
        (LAUNCHED | {"RANK": "x"}, "RANK=x"),
        pytest.param(LAUNCHED | {"RANK": "1"}, "contradict", marks=pytest.mark.long),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else None,
)
def test_environment_that_cannot_be(folder, environment, words):
    assert_one_sentence(python("imagenet_ddp.py", *TINY, folder, **environment), words)


def test_nodes_that_see_different_data(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "train" / "class_2" / "000.JPEG").unlink()
    rest = f"-n 2 --dist-url tcp://127.0.0.1:{free_port()} {LINE} --output-dir {tmp_path}/output"
    results = shell(
        f"python imagenet_ddp.py -nr 0 {rest} {folder}",
        f"python imagenet_ddp.py -nr 1 {rest} {other}",
    )
    for result in results:  # each node has a terminal of its own
        assert_one_sentence(result, "60 images", "59 images", "class_2: 20 images", "(node 1)")
    assert not (tmp_path / "output").exists()


def torchrun(*arguments: object) -> Result:
    """Run imagenet_ddp.py on two processes of torchrun."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    return python(*launcher, "imagenet_ddp.py", *TINY, *arguments)


@pytest.mark.long
def test_torchrun_wrong_option(folder):
    done = torchrun("--lr", "fast", folder)
    assert done.code != 0
    assert done.err.count("error: argument --lr") == 1, done.err


def test_torchrun_tells_what_the_slowest_process_was_to_tell(folder, tmp_path):
    """torchrun ends rank 0 when rank 1 has ended, and rank 0 alone prints what both find."""
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import os, time\n"
        "from utils.launch import supervise\n"
        "from utils.errors import UserError\n"
        "def main():\n"
        "    time.sleep(0 if os.environ['LOCAL_RANK'] == '1' else 4)\n"
        "    raise UserError('the data folder is missing', alike=True)\n"
        "supervise.run_main(main)\n"
    )
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    assert_one_sentence_of_many(python(*launcher, slow, PYTHONPATH=str(ROOT)), "folder is missing")


def test_a_fault_that_the_first_process_does_not_find_is_told_by_the_other():
    code = (
        "from utils.launch import supervise\n"
        "from utils.errors import UserError\n"
        "supervise.REPORT_SECONDS = 0.1\n"
        "def main(): raise UserError('found by one', alike=True)\n"
        "supervise.run_main(main)\n"
    )
    assert_one_sentence(python("-c", code, LOCAL_RANK="1", PYTHONPATH=str(ROOT)), "found by one")


def test_torchrun_more_bad_files_than_allowed(data, tmp_path):
    """Both ranks find it, in their first batch."""
    spoil(data, 15)
    options = ("--max-bad-files", "2", "--output-dir", tmp_path / "output", data)
    assert_one_sentence_of_many(torchrun(*options), "--max-bad-files")


def test_a_loss_scale_that_falls_without_end_leaves_the_last_snapshot(folder, tmp_path):
    """Every gradient of this loss overflows; weights stay as they were, and nothing is learnt."""
    options = ("-a", "tiny_plain", "--opt-level", "O2", "-b", "1")
    spoilt = ("--image-size", "32", "--clip-grad", "1", "--output-dir", tmp_path, "--name", "one")
    code = (
        "import sys; from torch import nn; import imagenet_ddp_apex as script\n"
        "from utils.launch import supervise\n"
        "class Endless(nn.CrossEntropyLoss):\n"
        "    def forward(self, *a): return super().forward(*a) * 1e30\n"
        "script.nn.CrossEntropyLoss = Endless\n"
        "supervise.run_main(script.main)"
    )
    line = ("-j", "1", *options, *spoilt, folder)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    _, env = tiny()
    env["PYTHONPATH"] += f":{ROOT}"
    done = python("-c", code, *line, **env, **alone, MASTER_PORT=str(free_port()))
    assert_one_sentence(done, "loss scale", "--lr", "last snapshot is intact")
    skipped = [line for line in done.out.splitlines() if line.startswith("Gradient overflow.")]
    scales = [float(line.rsplit(maxsplit=1)[1]) for line in skipped]
    assert scales == [2.0**-n for n in range(-15, 16)][: len(scales)]
    assert len(scales) >= 30
    assert not (tmp_path / "one" / "snapshot.pt").exists()


def test_no_snapshot_is_written_once_the_loss_is_no_number(folder, tmp_path):
    """It is due after each step, long before the line that would show the loss."""
    code = (
        "from torch import nn; import imagenet_nd as script\n"
        "from utils.launch import supervise\n"
        "class Spoilt(nn.CrossEntropyLoss):\n"
        "    calls = 0\n"
        "    def forward(self, *a):\n"
        "        Spoilt.calls += 1\n"
        "        return super().forward(*a) * (1 if Spoilt.calls < 4 else float('nan'))\n"
        "script.nn.CrossEntropyLoss = Spoilt\n"
        "supervise.run_main(script.main)"
    )
    model, env = tiny(step_seconds=0.1)
    env["PYTHONPATH"] += f":{ROOT}"
    often = ("-b", "5", "-j", "0", "-p", "1000", "--snapshot-minutes", "0")
    where = ("--output-dir", tmp_path, "--name", "one", folder)
    done = python("-c", code, *model, *often, *where, **env)
    assert_one_sentence(done, "loss", "nan", "step 5", "last snapshot is intact")
    snapshot = torch.load(tmp_path / "one" / "snapshot.pt", weights_only=True)
    assert 1 <= snapshot["progress"]["step"] <= 3
    assert all(tensor.isfinite().all() for tensor in snapshot["model"].values())


@pytest.mark.parametrize(
    "script",
    ["imagenet_ddp.py", pytest.param("imagenet_ddp_apex.py", marks=pytest.mark.long)],
)
def test_spawned_processes_speak_once(data, tmp_path, script):
    """Both processes find the class without images, before there is anything between them."""
    for image in (data / "val" / "class_1").iterdir():
        image.unlink()
    done = attempt(script, "-g", "2", "--output-dir", tmp_path / "output", data)
    assert_one_sentence(done, data / "val" / "class_1")
