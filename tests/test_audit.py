"""--audit: the log of a run, what it proves, and a bit that flips in one rank."""

import json
import shutil
from functools import partial

import pytest
import torch
from conftest import python
from joined import Job, run_jobs
from torch import nn

from utils.data.samplers import checksum, epoch_order
from utils.epoch import weights_checksum
from utils.run import audit
from utils.start.errors import UserError

LINE = ("-a", "tiny_plain", "--image-size", "32", "-j", "1", "--snapshot-minutes", "0")


def train(folder, place, *words, script="imagenet_ddp", processes=2, **how):
    line = (*LINE, *words, "--audit", "--name", "run", "--output-dir", place, folder)
    return run_jobs([Job(script, line, processes, **how)], place)


def audited(place):
    return python("scripts/audit_run.py", place / "run")


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """Two epochs of two processes."""
    place = tmp_path_factory.mktemp("trained")
    train(folder, place, "-b", "6", "--epochs", "2")
    return place / "run"


@pytest.fixture
def log(trained, tmp_path):
    """The log in a copy of that run, with one step in each line, and its lines."""
    shutil.copytree(trained, tmp_path / "run")
    file, lines = tmp_path / "run" / audit.FILE, []
    for line in map(json.loads, file.read_text().splitlines()):
        texts = line.get("taken", [])
        for n in range(len(texts[0]) // audit.DIGITS if texts else 0):
            part = slice(n * audit.DIGITS, (n + 1) * audit.DIGITS)
            lines.append(line | {"step": line["step"] + n, "taken": [text[part] for text in texts]})
        lines += [] if texts else [line]
    return file, lines


def test_stopped_resumed_and_on_other_processes_each_image_counts_once(folder, tmp_path):
    """60 images in steps of 18: stopped in mid-epoch on 2 processes, then on 3, 1 and 2 again. The
    last 6 images of an epoch, in the order of that epoch, are left out."""
    go = partial(train, folder, tmp_path, "--resume", "auto", "--epochs")
    go("3", "-b", "9", stop_after=4)
    go("3", "-b", "3", "--accum-steps", "2", processes=3)
    go("4", "-b", "18", script="imagenet_nd", processes=1)
    go("5", "-b", "9")
    done = audited(tmp_path)
    assert done.code == 0, done.out
    lines = done.out.splitlines()
    epochs = [f"epoch {n}: 3 steps, 54 of 60 images, each once" for n in (1, 2, 3, 4, 5)]
    assert lines[:5] == epochs
    assert "processes: 2, then 3, then 1, then 2;" in done.out
    assert lines[-1] == "every image was used as promised"


def test_steps_after_the_last_snapshot_are_counted_as_repeated(log, tmp_path):
    """As if it had been killed before the snapshot that follows the second epoch's first step."""
    file, lines = log
    second = [line for line in lines if "taken" in line and line["epoch"] == 1]
    file.write_text("\n".join(map(json.dumps, lines)) + '\n{"epoch": 1, "st')  # killed
    names = ("images", "seed", "global_batch", "shards", "accum")
    begun = audit.Log(file, audit.Setup(*(lines[0][name] for name in names)), 1, 0)
    for line in second:
        begun.write(line)
    done = audited(tmp_path)
    assert done.code == 0, done.out
    assert "5 of the logged steps were trained again" in done.out
    checks = sum("weights" in line for line in lines)
    assert checks > 1 and f"were compared {checks} times" in done.out


@pytest.mark.parametrize(
    "what",
    [
        *(
            "other image",
            "more steps",
            "extra step",
            "gap",
            "lost end",
            "missing end",
            "missing epoch",
        ),
        *("no log", "not a log", "half a step", "short epoch"),
    ],
)
def test_a_broken_promise_is_named(log, tmp_path, what):
    file, lines = log
    taken = [line for line in lines if "taken" in line and line["epoch"] == 1]
    code, answer = 1, ""
    if what == "other image":
        one = taken[-1]
        one["taken"][1] = "0" * len(one["taken"][1])
        answer = "process 1 read other images than the order of this seed and epoch"
    elif what == "more steps":  # in one process
        taken[1]["taken"][1] *= 2
        answer = "epoch 2, step 1: the processes have taken different numbers of steps"
    elif what == "extra step":  # of the images that an epoch leaves out
        lines.append(taken[-1] | {"step": 5, "taken": ["0" * audit.DIGITS] * 2})
        answer = "epoch 2 has only 5 steps, not 6"
    elif what == "gap":
        lines.remove(taken[1])
        answer = "epoch 2, step 2 follows epoch 2, step 1"
    elif what == "short epoch":
        lines.remove([line for line in lines if line.get("epoch") == 0 and "taken" in line][-1])
        answer = "epoch 2, step 0 follows epoch 1, step 4"
    elif what == "lost end":  # of the processes before those that resumed
        lines.append(lines[0] | {"began": [2, 3]})
        answer = "steps before epoch 3, step 3 are missing: the log ends at epoch 2, step 5"
    elif what == "missing end":  # the disk was full
        lines = lines[: lines.index(taken[3])]
        answer = "2 epochs are finished, but the log ends earlier"
    elif what == "missing epoch":
        lines = [line for line in lines if line.get("epoch") != 1]
        answer = "2 epochs are finished, but the log ends earlier"
    elif what == "half a step":
        taken[1]["taken"] = [text[:5] for text in taken[1]["taken"]]
        code, answer = 2, f"line {lines.index(taken[1]) + 1}: not a line of --audit"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    if what == "no log":
        file.unlink()
        code, answer = 2, "train with --audit"
    elif what == "not a log":
        file.write_text('{"epoch": 1, "taken": 3}\n')
        code, answer = 2, "line 1: not a line of --audit"
    done = audited(tmp_path)
    assert done.code == code, done.out
    assert answer in (done.err if code == 2 else done.out)


def test_another_batch_size_after_a_resume(tmp_path):
    """In mid-epoch, of which some images are trained on again; and after an epoch's last step."""
    file = tmp_path / audit.FILE
    for batch, began, *taken in (
        (12, (0, 0), (0, 0, 36)),  # epoch, the first image and the one after the last
        (20, (0, 1), (0, 20, 60), (1, 0, 60)),
        (30, (1, 2), (2, 0, 60)),
    ):
        log = audit.Log(file, audit.Setup(60, 7, batch, 1, 1), *began)
        for epoch, first, end in taken:
            log.move_to(epoch, first // batch)
            for image in range(first, end, batch):
                log.add(checksum(epoch_order(60, 7, epoch)[image : image + batch]))
            log.write_taken([log.move_to(epoch, end // batch)])
    proof = audit.read(file)
    assert (proof.problems, proof.repeated) == ([], 2)
    assert [line[9:] for line in proof.epochs.values()] == [
        f"{steps} steps, 60 of 60 images, each once" for steps in (4, 3, 2)
    ]
    log = audit.Log(file, audit.Setup(60, 7, 60, 1, 1), 3, 1)
    assert "steps before epoch 4, step 1 are missing" in audit.read(file).problems[0]


@pytest.mark.parametrize(("steps", "found"), [(100, "step 1 of epoch 2"), (1, "step 4 of epoch 1")])
def test_a_bit_that_flips_names_its_rank(folder, tmp_path, steps, found):
    """In the third step: at the epoch's snapshot, or at the next comparison."""
    often = f"from utils.run import audit; audit.STEPS_BETWEEN_CHECKS = {steps}"
    env = {"FLIP_BIT_IN": "2", "BEFORE": often}
    with pytest.raises(AssertionError) as failed:
        train(folder, tmp_path, "-b", "6", "--epochs", "2", processes=3, env=env)
    assert f"weights of rank 2 differ from those of other ranks before {found}" in str(failed)


def test_a_log_that_cannot_be_written_is_said_once(tmp_path, logged):
    log = audit.Log(tmp_path / "removed" / audit.FILE, audit.Setup(60, 7, 12, 1, 1), 0, 0)
    log.write({"epoch": 0})
    assert len(logged) == 1 and logged[0].endswith("--audit ends here")


def test_two_ranks_that_differ():
    text = "the weights differ between ranks before step 4 .* A snapshot, if there is one, is older"
    with pytest.raises(UserError, match=text):
        audit.check_equal(["a", "b"], epoch=0, step=3)  # which of two is right, nobody knows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_any_bit_of_a_weight_changes_the_checksum(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(dtype)
    before, bits = weights_checksum(model), 8 * torch.finfo(dtype).bits // 8
    assert weights_checksum(model) == before
    kinds = {16: torch.int16, 32: torch.int32, 64: torch.int64}
    for weight in model.parameters():
        view = weight.data.view(kinds[bits]).view(-1)
        for bit in (0, 1, bits // 2, bits - 2):
            view[-1] ^= 1 << bit
            assert weights_checksum(model) != before
            view[-1] ^= 1 << bit
