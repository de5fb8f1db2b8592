"""scripts/scaling_study.sh: plans, the table, and studies: simulated, over ssh, under Slurm."""

import ctypes
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path

import event_files
import pytest
import scaling_study
from compare.runs import Run
from conftest import ROOT, TIMEOUT, shell
from joined import Forked, command
from nodes import need
from running import TINY_LINE, Running, eventually, everyone
from studies import page as study_page
from studies import plan as planning
from studies import tiny
from studies.runs import StudyRun
from test_slurm import STAND_INS

from utils.start.errors import UserError

TRAINING = "imagenet_ddp.py -a vgg19 -b 32 --lr 1e-4 tests"  # any folder is data to a plan


def plan(own: str, training: str = TRAINING) -> list[StudyRun]:
    """The runs of a study with these options of its own; by default, of 8 simulated nodes."""
    where = "" if re.search("/hosts|--simulate|--slurm", own) else "--simulate 8"
    words = f"{where} --name s {own} -- {training}".split()
    return planning.plan(*scaling_study.parse(words))


def options(runs: list[StudyRun], name: str) -> list[str]:
    """What the script takes in each run: the last of several values."""
    places = [len(run.command) - run.command[::-1].index(name) for run in runs]
    return [run.command[place] for run, place in zip(runs, places, strict=True)]


def test_weak_scaling_keeps_the_batch_and_scales_the_rate():
    """The learning rates of the published experiment on 1, 2, 4 and 8 nodes."""
    runs = plan("--hours 2")
    assert [run.name for run in runs] == ["s_1node", "s_2nodes", "s_4nodes", "s_8nodes"]
    assert options(runs, "--lr") == ["1e-4", "0.000141421", "0.0002", "0.000282843"]
    assert options(runs, "-b") == ["32"] * 4
    assert options(runs, "--train-time") == ["2"] * 4
    assert options(plan("--lr-scaling linear"), "--lr")[-1] == "0.0008"
    assert [run.nodes for run in plan("--simulate 6")] == [1, 2, 4, 6]
    for more, lr in (("--optimizer adamw", "0.002"), ("--recipe fast16", "0.85")):
        _, run = plan("--nodes 2,8", f"imagenet_ddp.py tests {more}")
        assert (options([run], "--lr"), run.data) == ([lr], "tests")


def test_strong_scaling_divides_the_batch_and_keeps_the_rate(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2\nb slots=2\n")
    for own, script, batches in (
        ("--simulate 2", "imagenet_ddp.py", ["96", "48"]),
        (hosts, "imagenet_ddp.py", ["48", "24"]),
        (hosts, "imagenet_ddp.py -g 4", ["24", "12"]),
        (f"{hosts} --nodes 1", "imagenet_dp.py", ["96"]),
    ):
        runs = plan(f"{own} --global-batch 96", f"{script} tests")
        assert options(runs, "-b") == batches
        assert not any("--lr" in run.command for run in runs)


def test_varied_options_and_seeds():
    """All of one seed first; the nodes from few to many."""
    runs = plan("--nodes 1,2 --vary recipe=tiny,fast16 --seeds 0,1")
    names = ["s_1node_recipe-tiny_seed0", "s_1node_recipe-fast16_seed0"]
    assert [run.name for run in runs][:3] == [*names, "s_2nodes_recipe-tiny_seed0"]
    assert options(runs, "--seed") == ["0"] * 4 + ["1"] * 4
    scripts = plan("--nodes 1 --vary script=imagenet_ddp.py,imagenet_fsdp.py")
    assert [run.command[0] for run in scripts] == ["imagenet_ddp.py", "imagenet_fsdp.py"]


@pytest.mark.parametrize(
    ("own", "training", "words"),
    [
        ("", f"{TRAINING} --train-time=2", "give --hours before imagenet_ddp.py"),
        ("", f"{TRAINING} --try", "give --try before imagenet_ddp.py"),
        ("--vary b=1,2", TRAINING, "the study sets -b: give --vary b before imagenet_ddp.py"),
        ("--vary name=a,b", TRAINING, "--vary --name=a is not possible"),
        ("--global-batch 60", TRAINING, "60 is not a multiple of 8"),
        ("", "imagenet_dp.py tests", "imagenet_dp.py trains on one node"),
        ("", "imagenet_ddp.py -a vgg91 tests", "unknown arch 'vgg91'; nearest names: .*vgg19"),
        ("--vary arch=vgg19,vgg91", "imagenet_ddp.py tests", "unknown arch 'vgg91'"),
        ("", f"{TRAINING} --epoch 2", "imagenet_ddp.py: error: unknown option --epoch: did you"),
        ("", f"{TRAINING} --warmup-epochs 99", "--warmup-epochs 99 is longer than --epochs 90"),
        ("", "imagenet_ddp.py nowhere", "data folder nowhere is missing"),
        ("--seeds 0,1", f"{TRAINING} --seed 3", "give --seeds before"),
        ("--nodes 2,16", TRAINING, "--nodes 16, but there are only 8 nodes"),
        ("--nodes 2,2", TRAINING, "two runs would be called s_2nodes"),
        ("-b largest", TRAINING, "the study sets -b: give -b before imagenet_ddp.py"),
        ("-b 8 --global-batch 64", "imagenet_ddp.py tests", "either --global-batch or -b"),
        ("--link 5", TRAINING, "--link 5 is not a rate"),
        ("--store s", f"{TRAINING} --store t", "give --store before imagenet_ddp.py"),
        ("--slurm", TRAINING, "--slurm needs --nodes"),
        ("--epochs 3", TRAINING, "--epochs is an option of the training: give it after the script"),
        ("--node 3", TRAINING, "^2scaling_study.sh: error: unknown option --node: .* --nodes"),
    ],
)
def test_options_that_contradict_each_other(capsys, own, training, words):
    with pytest.raises((UserError, SystemExit)) as ended:
        plan(own, training)
    assert re.search(words, f"{ended.value}{capsys.readouterr().err}")


def test_training_options_follow_the_script_or_the_dashes():
    own, training = ["hosts", "--hours", "2"], TRAINING.split()
    for words in ([*own, *training], [*own, "--", *training]):
        assert scaling_study.split_words(words) == (own, training)
    # As from a file in scripts/studies: the options that its user types come last.
    words = [*own, "--", "--epochs", "3", "--", *training]
    assert scaling_study.split_words(words) == (own, [*training, "--epochs", "3"])


def test_a_run_that_has_begun_keeps_its_options(tmp_path):
    """Runs may be added to a study. One process at a time works on it."""
    training = f"{TRAINING} --output-dir {tmp_path}/runs"
    first, more, other = (
        plan(f"--nodes {own}", training) for own in ("1,2", "1,2,4", "1,2 --hours 1")
    )
    first[0].folder.mkdir(parents=True)
    first[0].file("command").write_text(shlex.join(first[0].command))
    with scaling_study.study_lock(tmp_path / "book/s", other):
        pass  # nothing was trained with the first options: the model did not fit, for example
    first[0].file("log").write_text("Epoch 1/2 step   7/9  \n")  # on another machine
    with pytest.raises(UserError, match="s_1node began with other options"):
        scaling_study.study_lock(tmp_path / "book/s", other).__enter__()
    first[0].file("log").unlink()
    (first[0].folder / "snapshot.pt").touch()
    with scaling_study.study_lock(tmp_path / "book/s", more):
        for runs, words in ((first, "already"), (other, "s_1node began with other options")):
            with pytest.raises(UserError, match=words):
                scaling_study.study_lock(tmp_path / "book/s", runs).__enter__()


@pytest.mark.parametrize(
    ("summary", "training", "own", "longer"),
    [
        ({"finished_because": "epochs", "epochs_done": 2}, "--epochs={}", "", (2, 3)),
        ({"finished_because": "train_time", "elapsed_seconds": 7199}, "", "--hours {}", (2, 2.5)),
        (  # then until all epochs are done
            {"finished_because": "train_time", "elapsed_seconds": 7201},
            "--epochs 90",
            "{}",
            ("--hours 2", ""),
        ),
    ],
)
def test_a_finished_study_can_be_lengthened(tmp_path, summary, training, own, longer):
    folder = tmp_path / "runs/s_1node"
    folder.mkdir(parents=True)
    (folder / "snapshot.pt").touch()
    (folder / "summary.json").write_text(json.dumps(summary))
    for length, is_finished in zip(longer, (True, False), strict=True):
        words = f"{TRAINING} {training.format(length)} --output-dir {tmp_path}/runs"
        runs = plan(f"--nodes 1 {own.format(length)}", words)
        assert runs[0].is_finished == is_finished
        if is_finished:
            runs[0].file("command").write_text(shlex.join(runs[0].command))
        with scaling_study.study_lock(tmp_path / "book/s", runs):
            pass
    for depends in ("--lr-schedule cosine", "--progressive 32,48"):
        both = [plan("--nodes 1", f"{words} {depends} --epochs {n}") for n in (2, 3)]
        runs[0].file("command").write_text(shlex.join(both[0][0].command))
        with pytest.raises(UserError, match="s_1node cannot be lengthened, as its --lr-schedule"):
            scaling_study.study_lock(tmp_path / "book/s", both[1]).__enter__()


def test_with_hours_epochs_are_unlimited_and_the_rate_is_constant():
    """Unless the options of the script decide about epochs."""
    for more, expected in (
        ("", ["100000", "constant"]),
        ("--epochs 30 --lr-schedule cosine", ["30", "cosine"]),
        ("--lr-schedule cosine", ["100000", "cosine"]),
    ):
        runs = plan("--nodes 1 --hours 2", f"{TRAINING} {more}")
        assert [options(runs, name)[0] for name in ("--epochs", "--lr-schedule")] == expected
        assert runs[0].epochs == int(expected[0])
    (run,) = plan("--nodes 1 --hours 2", "imagenet_ddp.py tests --recipe fast16")
    assert "--epochs" not in run.command


@pytest.fixture
def no_handlers(monkeypatch):
    """A study in this process leaves the signals alone, and writes no page."""
    monkeypatch.setattr(scaling_study.signals, "handle", lambda *_: None)
    monkeypatch.setattr(scaling_study.page, "write", lambda *_: None)


def test_a_run_that_fails_gets_a_second_attempt_and_is_an_error(
    tmp_path, monkeypatch, capsys, no_handlers
):
    own = f"--simulate 2 --name s --logbook {tmp_path} --hours 1 -- {TRAINING} --output-dir"
    args, training = scaling_study.parse([*own.split(), str(tmp_path)])
    runs, trained = planning.plan(args, training), []

    def train(self, run):
        trained.append(run.nodes)
        with open(run.file("log"), "a") as log:
            log.write(f"error: number {len(trained)}\n")
        if run.nodes == 2:
            (run.folder / "summary.json").write_text('{"finished_because": "desired_acc"}')

    monkeypatch.setattr(scaling_study.Runner, "train", train)
    for run in runs:
        run.folder.mkdir()
    assert scaling_study.carry_out(args, runs) == 1
    assert trained == [1, 2, 1]
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        f"error: s_1node: not finished: number {number}" for number in (1, 3)
    ]
    args.dry_run = True
    assert scaling_study.carry_out(args, runs) == 0
    assert "at most 1 h of training (1 node-hours)" in capsys.readouterr().out


def test_a_largest_batch_that_cannot_be_measured_ends_the_study(tmp_path, monkeypatch, no_handlers):
    """What an earlier call has measured is of other options."""
    own = f"--simulate 1 --name s -b largest -- imagenet_ddp.py --output-dir {tmp_path} tests"
    args, training = scaling_study.parse(own.split())
    (run,) = planning.plan(args, training)
    run.folder.mkdir()
    run.file("log").write_text("largest batch per GPU: 99\n")
    monkeypatch.setattr(scaling_study.Runner, "start", lambda *_, **__: 2)
    runner, begun = scaling_study.Runner(args, tmp_path), []
    with pytest.raises(UserError, match="--find-batch failed, see above: give -b N"):
        runner.train(run)
    assert run.batch is None
    run.file("batch").touch()
    assert run.batch is None
    # A training that is killed has left its command, which must not change.
    run.file("batch").write_text("8")
    monkeypatch.setattr(runner, "start", lambda run: begun.append(run.file("command").read_text()))
    runner.train(run)
    assert begun == [shlex.join(run.command)]


def test_each_run_has_its_own_hosts_which_the_doctor_has_seen(tmp_path, monkeypatch, no_handlers):
    """A warning of the doctor (1) is no reason to stop, an error (2) is one."""
    hosts = tmp_path / "hosts"
    hosts.write_text("# three\na\n\nb  # two\nc\n", "utf-8-sig")  # as some editors write
    args, training = scaling_study.parse(f"{hosts} --nodes 1,2 --env CODE=7 -- {TRAINING}".split())
    runs, codes = planning.plan(args, training), [1, 2]
    runner = scaling_study.Runner(args, tmp_path)
    for name in ("RANK", "WORLD_SIZE", "NODE_RANK"):  # those of a job in which the study runs
        monkeypatch.setenv(name, "1")
    exits = "exit ${RANK:-${WORLD_SIZE:-${NODE_RANK:-$CODE}}}"
    assert runner.execute([["true"], ["sh", "-c", exits]]) == 7
    asked: list[list[str]] = []
    monkeypatch.setattr(runner, "execute", lambda words: asked.extend(words) or codes.pop(0))
    runner.check_nodes(hosts, runs)
    assert asked[0][:3] == ["bash", "scripts/doctor.sh", str(tmp_path / "hosts_2")]
    assert asked[0][-2:] == ["--data", "tests"]
    assert (tmp_path / "hosts_1").read_text().split() == ["a"]
    assert (tmp_path / "hosts_2").read_text() == "a\nb  # two\n"
    with pytest.raises(UserError, match="the nodes are not ready"):
        runner.check_nodes(hosts, runs)


def test_a_study_may_be_started_in_another_folder(tmp_path, monkeypatch, capsys, no_handlers):
    """Its scripts are found, and a run where the job has it: in the repository's root."""
    monkeypatch.chdir(tmp_path)
    hosts = tmp_path / "hosts"
    hosts.write_text("a\n")
    args, training = scaling_study.parse(["hosts", "--name", "s", "--", *TRAINING.split()])
    runs, asked = planning.plan(args, training), []
    runner = scaling_study.Runner(args, tmp_path)
    monkeypatch.setattr(runner, "execute", lambda words: asked.extend(words) or 0)
    runner.check_nodes(hosts, runs)
    for words in (*asked, scaling_study.launch_command(runs[0], args, tmp_path)):
        assert Path(words[1]).is_file(), words
    args, training = scaling_study.parse(f"--slurm --nodes 1 --name s -- {TRAINING}".split())
    (run,) = planning.plan(args, training)
    assert run.folder == ROOT / "runs/s_1node"
    words = scaling_study.launch_command(run, args, tmp_path)
    assert f"--output={run.folder}/study.log" in words and "scripts/train.sbatch" in words
    runner = scaling_study.Runner(args, tmp_path)
    assert runner.execute([["test", "-f", "scripts/train.sbatch"]]) == 0
    capsys.readouterr()
    runner.stopped = True
    runner.execute([["echo", "Submitted batch job 7"]], dataclasses.replace(run, folder=tmp_path))
    assert "job 7 goes on: `scancel 7` ends it with a snapshot\n" in capsys.readouterr().out


# In place of Python: it prints the words that it gets after the name of the script, one a line.
PRINTS = """#!/bin/bash
case "$*" in *check_requirements*) ;; -c*) exit 1 ;; *) printf '%s\\n' "${@:2}" ;; esac"""


def test_a_dry_run_prints_commands_and_does_nothing(tmp_path):
    """That of each prepared study, too."""
    hosts, eight = tmp_path / "hosts", tmp_path / "eight"
    hosts.write_text("# two\nnode1 slots=1\nroot@node2 slots=1\n")
    eight.write_text("".join(f"node{number}\n" for number in range(8)))
    own = f"--logbook {tmp_path}/book --dry-run"
    names = sorted(file.stem for file in (ROOT / "scripts/studies").glob("*.sh"))
    (tmp_path / "prints").write_text(PRINTS)
    (tmp_path / "prints").chmod(0o755)
    scripts = (f"bash scripts/studies/{name}.sh {eight} DATA {own}" for name in names)
    lines = [one.out.splitlines() for one in shell(*scripts, PYTHON=f"{tmp_path}/prints")]
    training = "-- imagenet_ddp.py -a vgg19 --pretrained there.pt DATA"
    over_ssh = (
        f"{hosts} --hours 2 {own} --env SECRET=xyz --ssh 'ssh -F file' --dir code --python py"
    )
    job = f"--slurm='--time=10 -p gpu' --nodes 1,2 {own} --name s -- imagenet_ddp.py"
    done, slurm, *studies = (
        command("scripts/scaling_study", *line)
        for line in (
            shlex.split(f"{over_ssh} --grace 9 {training}"),
            shlex.split(f"{job} --output-dir out DATA"),
            *lines,
        )
    )
    assert done.code == 0, done.err
    assert (
        f"+ bash scripts/train_on_nodes.sh {tmp_path}/book/vgg19/hosts_2 --fetch --dir=code "
        "--python=py '--ssh=ssh -F file' --grace=9.0 --env=SECRET -- imagenet_ddp.py "
        "--epochs 100000 --lr-schedule constant -a vgg19 "
        "--pretrained there.pt DATA --lr 0.141421 --train-time 2 --name vgg19_2nodes "
        "--resume auto\n"
    ) in done.out
    assert (
        "+ sbatch --wait --nodes=2 --job-name=s_2nodes --dependency=singleton "
        "--output=out/s_2nodes/study.log --time=10 -p gpu scripts/train.sbatch imagenet_ddp.py "
        "--output-dir out DATA --lr 0.141421 --name s_2nodes --resume auto\n"
    ) in slurm.out
    assert "at most 4 h of training (6 node-hours)" in done.out
    assert not (tmp_path / "book").exists()
    usual = "2 runs -b 208 --epochs 2", "4 runs -b 32 --train-time 2", "2 runs --epochs 26"
    for name, one, words in zip(names, studies, usual, strict=True):
        number, *given = re.split(" (?=-)", words)
        assert one.code == 0, one.err
        assert f"study {name}: {number}, " in one.out
        assert " DATA --" in one.out and all(f" {word} " in one.out for word in given), one.out
    finds, trains = re.findall(
        r"\+ .* imagenet_fsdp.py (.*)", studies[names.index("vit_cifar10")].out
    )
    assert finds.endswith(" --find-batch") and trains.endswith(" -b LARGEST")


# ---- the table

# A published experiment: VGG19, 20 classes, 2 hours on 1, 2, 4 and 8 g4dn.2xlarge.
PUBLISHED = """
| Learning Rate (e-4) | 1.00 | 1.41 | 2.00 | 2.83 |
| Global Batch Size | 32 | 64 | 128 | 256 |
| Steps Per Epoch | 650 | 375 | 163 | 82 |
| Avg Epoch Time (min) | 8.76 | 5.40 | 3.35 | 2.37 |
| Epoch Num @ 2 hr | 14 | 23 | 36 | 54 |
| Scaling Efficiency | 1.00 | 0.81 | 0.65 | 0.46 |
| Best Validation Loss | 0.3795 | 0.3646 | 0.3558 | 0.3522 |
| Test Loss | 0.4485 | 0.4351 | 0.4286 | 0.4287 |
| Top1 Test Accuracy | 86.90% | 87.30% | 87.50% | 87.50% |
""".strip().splitlines()
CELLS = [[cell.strip() for cell in row.split("|")[1:-1]] for row in PUBLISHED]


def published_run(place: int, more_loss: float = 0.0) -> tuple[StudyRun, Run]:
    """The run of a column, with what its cells say; the epochs after 2 hours were trained too."""
    lr, batch, steps, minutes, epochs, _, loss, test_loss, top1 = (
        float(row[place + 1].strip("%")) for row in CELLS
    )
    nodes, last = 2**place, int(epochs) + 2
    run = Run(Path(f"runs/{nodes}"), epoch_seconds=60 * minutes)
    run.facts = {"gpus": nodes, "global_batch": batch, "steps_per_epoch": int(steps)}
    run.facts["best_by"] = "loss"
    run.hours = {x: 2.0 * x / epochs for x in range(1, last + 1)}
    run.scalars = {
        "Lr": {1: 1e-6, 2: ctypes.c_float(lr * 1e-4).value, last: 1e-6},
        "Loss/val": {1: 2.0, 5: loss + more_loss, last: 0.5},
        "Loss/test": {last: test_loss},
        "Top1/test": {last: top1},
    }
    return StudyRun(f"{nodes}", nodes, "", None, (), run.path, "DATA"), run


def test_the_published_table_column_for_column():
    columns = {f"{2**place} Nodes": [published_run(place)] for place in range(4)}
    assert study_page.rows(columns, 2.0) == CELLS


def rows_of(*columns: tuple[StudyRun, Run]) -> dict[str, list[str]]:
    """The table of runs on one node, as titles and cells; and a column of runs to come."""
    table = study_page.rows({"1 Node": list(columns), "2 Nodes": []}, 2.0)
    return {title: cells for title, *cells in table}


def test_the_best_validation_loss_is_the_lowest_whatever_chooses_the_best_model():
    one, run = published_run(0)
    run.scalars |= {
        "Loss/val": {1: 0.7, 2: 0.5, 3: 0.6},
        "Top1/val": {1: 71.0, 2: 70.0, 3: 72.0},
        "Loss/ema": {1: 0.9, 2: 0.8, 3: 0.75},
        "Top1/ema": {1: 60.0, 2: 74.0, 3: 74.0},
    }
    for best_by in ("top1", "loss"):
        run.facts["best_by"] = best_by
        assert rows_of((one, run))["Best Validation Loss"] == ["0.5000", "-"]
    run.scalars["Loss/ema"][4] = 0.4
    assert rows_of((one, run))["Best Validation Loss"] == ["0.4000", "-"]
    assert "\n- Best validation loss: the lowest of all epochs." in study_page.LEGEND


def test_repeats_have_a_mean_and_a_spread():
    """What a run has not recorded, or not reached, is "-"."""
    repeats = published_run(0), published_run(0, 0.02)
    for _, run in repeats:
        run.scalars.pop("Loss/test")
        run.hours = {1: 0.1}
    rows = rows_of(*repeats)
    assert rows["Best Validation Loss"] == ["0.3895 ± 0.0141", "-"]
    assert rows["Test Loss"] == rows["Epoch Num @ 2 hr"] == ["-", "-"]
    assert rows["Global Batch Size"] == ["32", "-"]
    # The scaling efficiency is relative to their mean.
    repeats[1][1].epoch_seconds = 1.5 * 60 * 8.76
    begun = published_run(2)  # has not finished an epoch
    begun[1].epoch_seconds = None
    columns = {"1 Node": [*repeats], "2 Nodes": [published_run(1)], "4 Nodes": [begun]}
    rows = {title: cells for title, *cells in study_page.rows(columns, 2.0)}
    assert rows["Scaling Efficiency"] == ["1.04 ± 0.29", "1.01", "-"]


def test_what_is_varied_stands_side_by_side():
    """On several numbers of nodes, each value has its own base of the scaling efficiency."""

    def columns(*nodes: int) -> dict[str, study_page.Column]:
        found: dict[str, study_page.Column] = {}
        for place in nodes:
            for group, times in (("lr 1", 1.0), ("lr 2", 2.0)):
                one, run = published_run(place)
                run.epoch_seconds = times * (run.epoch_seconds or 0.0)
                found[f"{place}, {group}"] = [(dataclasses.replace(one, group=group), run)]
        return found

    rows = {title: cells for title, *cells in study_page.rows(columns(0, 1), 2.0)}
    assert rows["Avg Epoch Time (min)"] == ["8.76", "17.52", "5.40", "10.80"]
    assert rows["Scaling Efficiency"] == ["1.00", "1.00", "0.81", "0.81"]
    assert "Scaling Efficiency" not in dict.fromkeys(
        row[0] for row in study_page.rows(columns(0), 2)
    )


@pytest.mark.parametrize(
    ("target", "seeds"),  # two names of one option
    [("target_top1", ""), ("desired_acc", "--seeds 0,1 ")],
)
def test_simulated_nodes_are_nodes_in_the_log_book(tmp_path, monkeypatch, target, seeds):
    """A run of two processes on this machine records one node. The study was killed when all runs
    had ended, before it wrote their page."""
    monkeypatch.setattr(scaling_study.signals, "handle", lambda *_: None)
    monkeypatch.setattr(study_page.pictures, "draw", lambda *_, **__: {})
    own = f"--simulate 2 --hours 1 {seeds}--name s --logbook book -- imagenet_ddp.py"
    args, training = scaling_study.parse(f"{own} --output-dir {tmp_path} tests".split())
    runs = planning.plan(args, training)
    for one in runs:
        number, processes = one.nodes, 2 * one.nodes - 1  # the second node has two
        facts = {"arch": "resnet18", "gpus": processes, "nodes": 1, "global_batch": 128 * number}
        facts |= {"device": "cpu", "batch_per_gpu": 128}
        event_files.write(one.folder, event_files.epochs_of(100 * number, 128), options=facts)
        (one.folder / "options.json").write_text(json.dumps({target: 50}))
        (one.folder / "summary.json").write_text('{"finished_because": "epochs"}')
    # What was there before: a page of one's own, and the curves of a run that was begun anew.
    copy = tmp_path / "book/s" / runs[0].name
    old = event_files.write(copy, {9: {"Loss/train": 1.0}}, began=1.0)
    (tmp_path / "book/README.md").write_text("# Mine\n")
    (tmp_path / "book/my_own #2.md").touch()
    monkeypatch.chdir(tmp_path)
    assert scaling_study.carry_out(args, runs) == 0
    page, index = (tmp_path / f"book/{name}.md" for name in ("s", "README"))
    page, index = page.read_text(), index.read_text()
    assert index.startswith("# Mine\n") and "- [s](s.md)\n" in index and "[README]" not in index
    assert "- [my\\_own \\#2](my_own%20%232.md)\n" in index
    assert not old.exists()
    assert "| nodes | 1 | 2 |" in page and "at an equal batch per process" in page
    assert "| Scaling Efficiency | 1.00 | 0.33 |" in page
    assert ("| 1 node, seed 0 | 2 nodes, seed 0 | 1 node, seed 1 |" in page) == bool(seeds)
    assert "## Scaling" in page and f"\nbash {ROOT}/scripts/scaling_study.sh " in page
    assert "time to top-1 of 50 %" in page and "| epochs in 1 h | 4 | 4 |" in page
    # Who gets the log book alone has the curves, too.
    named = re.search(r"`(python \S*scripts/compare_runs\.py .*?)`", page)
    assert named
    for one in runs:
        shutil.rmtree(one.folder)
    (compared,) = shell(f"cd {tmp_path} && {named[1]}")
    assert compared.code == 0, compared.err
    assert "s_2nodes" in compared.out


def test_runs_that_lie_in_the_log_book_stay(tmp_path):
    """Their --output-dir is the folder to which event files are copied."""
    one, run = published_run(0)
    one = dataclasses.replace(one, folder=tmp_path / one.name)
    file = event_files.write(one.folder, {1: {"Loss/train": 1.0}})
    (one.folder / "snapshot.pt").touch()
    study_page.hand_over([(one, run)], tmp_path)
    assert file.is_file() and (one.folder / "snapshot.pt").is_file()


# ---- studies that train


def study(place: Path, own: str, training: str, epochs: int = 2) -> str:
    """The command of a study in ``place`` with the tiny model."""
    script, _, options = training.partition(" ")
    return (
        f"scripts/scaling_study.sh {own} --name s --logbook {place}/book -- {script} {TINY_LINE} "
        f"--output-dir {place}/runs -p 1 --epochs {epochs} {options}"
    )


def run(words: str, **env: str) -> Running:
    """Start a study here."""
    script, *rest = words.split()
    return Forked(script.removesuffix(".sh"), *rest, **env)


# As nvidia-smi: it counts what trains in the folder of the test.
TRAINING_PROCESS = "^[^ ]*python[^ ]* ([^ ]*/)?imagenet_[a-z]*[.]py .*FOLDER/runs"
COUNT = f"echo $(pgrep -cf '{TRAINING_PROCESS}') of them train; [ $# = 0 ]"


def put_programs(place: Path, **programs: str) -> dict[str, str]:
    """Write bash scripts, and give the environment that has them in PATH."""
    (place / "bin").mkdir()
    for name, text in programs.items():
        (place / "bin" / name).write_text(f"#!/bin/bash\n{text.replace('FOLDER', str(place))}\n")
        (place / "bin" / name).chmod(0o755)
    return {"PATH": f"{place}/bin:{os.environ['PATH']}"}


def left(place: Path) -> list:
    """What still trains below ``place``."""
    here = TRAINING_PROCESS.replace("FOLDER", str(place))
    return [one for one in everyone() if one.lives() and re.search(here, one.command)]


@pytest.mark.long
def test_a_study_is_killed_stopped_and_continued(folder, tmp_path):
    """Finished runs are not trained again, not even one whose end nobody could note.

    A run has written its summary before it prints its time.
    """
    training = f"imagenet_nd.py -j 0 {folder}"
    programs = put_programs(tmp_path, **{"nvidia-smi": COUNT})
    words = study(tmp_path, "--simulate 1 --env KEY=secret --vary lr=0.05,0.02", training)
    slow = programs | {"STEP_SECONDS": "0.2"}
    runs = [tmp_path / f"runs/s_1node_lr-{lr}" for lr in ("0.05", "0.02")]
    with run(words, **slow) as started:
        started.until("Training time")
        started.send(signal.SIGKILL)
        started.process.wait()
        assert eventually(lambda: not left(tmp_path)), left(tmp_path)
    assert not (tmp_path / "book/s.md").exists()
    first = (runs[0] / "summary.json").stat().st_mtime_ns
    with run(words, **slow) as started:
        started.until("Epoch 1/2 step")
        started.send(signal.SIGINT, group=True)
        done = started.result()
    assert done.code == 75, done.out + done.err
    assert "2 runs, 1 to be trained" in done.out
    assert "1 of 2 runs finished" in (tmp_path / "book/s.md").read_text()
    with run(words, **slow) as started:
        started.until(f"resumed from {runs[1]}/snapshot.pt: epoch 1, step [1-9]")
        done = started.result()
    assert (done.code, done.out.count("\n== run")) == (0, 1), done.out + done.err
    assert (runs[0] / "summary.json").stat().st_mtime_ns == first
    page = (tmp_path / "book/s.md").read_text()
    for text in (
        "2 of 2 runs finished",
        "**Simulated: the nodes are processes",
        "## Results",
        "|  | lr 0.05 | lr 0.02 |",
        "| Learning Rate (e-2) | 5.00 | 2.00 |",
        "| Global Batch Size | 5 | 5 |",
        "--env KEY --vary",
        "(s/overlay.png)",
    ):
        assert text in page
    assert "secret" not in page
    # Both runs trained when it was taken, once in each of two epochs.
    dumps = re.findall(r"# this machine, in epoch (\d) of 2, step .*\n(\d) of them train", page)
    assert dumps == [("1", "1"), ("2", "1")] * 2
    assert (tmp_path / "book/s/overlay.png").is_file()
    assert "[s](s.md)" in (tmp_path / "book/README.md").read_text()


@pytest.mark.long
def test_under_slurm_with_the_largest_batch(folder, tmp_path):
    """Of each script; the best models go into a store, and nvidia-smi runs beside the training."""
    sbatch = """while [[ $1 == --* ]]; do
            [[ $1 != --output=* ]] || exec >>"${1#*=}" 2>&1
            shift
        done
        [[ " $* " != *" --find-batch "* ]] || {
            [ $2 = imagenet_ddp.py ] && echo "0: largest batch per GPU: 10" && exit
            echo "0: largest batch per GPU: 12"; exit; }
        export SLURM_JOB_ID=$$ SLURM_JOB_NODELIST=localhost SLURM_NNODES=1
        exec bash "$@" """
    programs = put_programs(tmp_path, **STAND_INS, sbatch=sbatch, **{"nvidia-smi": COUNT})
    own = f"--slurm --nodes 1 -b largest --store {tmp_path}/store --vary script=A,B"
    own = own.replace("A,B", "imagenet_ddp.py,imagenet_fsdp.py")
    words = study(tmp_path, own, f"imagenet_ddp.py {folder}").replace(" -b 5", "")
    env = programs | {"STEP_SECONDS": "0.2", "PYTHON": sys.executable}
    with run(words, **env) as started:
        done = started.result()
    assert done.code == 0, done.out + done.err
    page = (tmp_path / "book/s.md").read_text()
    assert "|  | script imagenet\\_ddp.py | script imagenet\\_fsdp.py |" in page
    assert "| Largest Batch Per GPU | 10 | 12 |" in page
    assert "| Global Batch Size | 10 | 12 |" in page
    dumps = re.findall(r"# job \d+, in epoch (\d) of 2, .*\n(\d) of them train", page)
    assert [epoch for epoch, count in dumps if count > "0"] == ["1", "2"] * 2, page
    for name in ("ddp", "fsdp"):
        assert (tmp_path / f"store/s_1node_script-imagenet_{name}/best.pt").is_file()


def test_the_log_book_of_a_try_lies_beside_that_of_the_study(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, given in enumerate((".", "book")):
        own = f"--try --simulate 2 --logbook {given} imagenet_ddp.py {folder}"
        args, training = scaling_study.parse(own.split())
        tiny.shrink(args, training, tmp_path / f"{number}")
        beside = (tmp_path / given).resolve()
        assert args.logbook == beside.with_name(f"{beside.name}_try")


@pytest.mark.long
def test_a_try_runs_the_whole_study_in_small(folder, tmp_path):
    """Before a study on eight hosts, or without hosts. The images come from DATA, the runs are not
    kept."""
    without = "--try --nodes 1,8 imagenet_ddp.py DATA"
    assert scaling_study.parse(without.split())[0].simulate == 8
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"host{n}\n" for n in range(8)))
    own = f"{hosts} --hours 2 --seeds 0,1 --try"
    words = study(tmp_path, own, f"imagenet_ddp.py --classes 2 --warmup-epochs 2 {folder}", 90)
    with run(words) as started:
        started.allow(3 * TIMEOUT)  # two runs, of three processes
        done = started.result()
    assert done.code == 0, done.out + done.err
    assert done.out.startswith("a try: the same study on this CPU")
    assert "all of it works; leave out --try" in done.out
    (place,) = set(re.findall(r" (/\S*/study_try_[^/\s]+)", done.out))
    assert not Path(place).exists()
    page = (tmp_path / "book_try/s.md").read_text()
    for text in ("**A try: ", "|  | 1 Node | 2 Nodes |", "| Global Batch Size | 2 | 4 |"):
        assert text in page
    assert "| Epoch Num | 1 | 1 |" in page
    assert "trained" not in page and "node, seed" not in page, "no conclusion; one seed has no name"
    assert (tmp_path / "book_try/s/overlay.png").is_file()
    assert not (tmp_path / "runs").exists() and not (tmp_path / "book").exists()


@pytest.mark.long
def test_simulated_nodes_with_a_slow_link(folder, tmp_path):
    need()
    words = study(tmp_path, "--simulate 2 --link 300mbit", f"imagenet_ddp.py {folder}")
    with run(words) as started:
        started.allow(3 * TIMEOUT)  # two runs, of three processes
        done = started.result()
    assert done.code == 0, done.out + done.err
    assert "| Global Batch Size | 5 | 10 |" in (tmp_path / "book/s.md").read_text()
    assert not left(tmp_path)
