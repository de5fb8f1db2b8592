"""scripts/scaling_study.sh: the plan, its state on disk, and studies on simulated nodes."""

import json
import os
import shlex
import signal
from pathlib import Path

import pytest
from conftest import ROOT, shell, summary
from running import TINY_LINE, Running, eventually, tiny
from study import arms
from study.arms import Wish
from study.state import State

from utils.errors import UserError

_, ENV = tiny()
TRAINING = ("imagenet_ddp.py", "-a", "vgg19", "-b", "32", "--lr", "1e-4", "DATA")


def wish(nodes=(1, 2, 4, 8), training=TRAINING, **more) -> Wish:
    return Wish("s", tuple(nodes), tuple(training), **more)


def test_weak_scaling_keeps_the_batch_and_scales_the_rate():
    """The learning rates of the published experiment on 1, 2, 4 and 8 nodes."""
    plan = arms.plan(wish(hours=2))
    assert [arm.name for arm in plan] == ["s_1node", "s_2nodes", "s_4nodes", "s_8nodes"]
    rates = [float(arms.option(arm.command, "--lr")) for arm in plan]
    assert rates == pytest.approx([1e-4, 1.41421e-4, 2e-4, 2.82843e-4], rel=1e-5)
    assert {arms.option(arm.command, "-b") for arm in plan} == {"32"}
    assert {arms.option(arm.command, "--train-time") for arm in plan} == {"2"}
    assert all(arm.command[-1] == "DATA" for arm in plan)
    linear = arms.plan(wish(lr_scaling="linear"))[-1].command
    assert float(arms.option(linear, "--lr")) == pytest.approx(8e-4)
    other = ("imagenet_ddp.py", "--optimizer", "adamw", "DATA")
    usual = arms.plan(wish((1, 4), training=other))[-1].command
    assert float(arms.option(usual, "--lr")) == pytest.approx(2e-3)


def test_strong_scaling_shares_the_batch_and_keeps_the_rate():
    training = ("imagenet_ddp.py", "--lr=0.2", "DATA")
    plan = arms.plan(wish((1, 2, 4), training, global_batch=96, processes=2))
    assert [arms.option(arm.command, "-b") for arm in plan] == ["48", "24", "12"]
    assert {arms.option(arm.command, "--lr") for arm in plan} == {"0.2"}


def test_a_grid_with_seeds():
    """All of one seed first; the nodes from few to many."""
    vary = {"comm": ("fp32", "powersgd:4"), "script": ("imagenet_ddp.py", "imagenet_ddp_apex.py")}
    plan = arms.plan(wish((1, 2), vary=vary, seeds=(0, 1)))
    assert len(plan) == len({arm.name for arm in plan}) == 16
    assert plan[3].name == "s_1node_comm-powersgd-4_script-imagenet_ddp_apex_seed0"
    assert plan[3].command[0] == "imagenet_ddp_apex.py"
    assert arms.option(plan[3].command, "--comm") == "powersgd:4"
    assert [arm.seed for arm in plan] == [0] * 8 + [1] * 8
    assert [arm.nodes for arm in plan[:8]] == [1] * 4 + [2] * 4


def test_data_is_the_last_word_unless_it_is_a_value():
    assert arms.data_of(TRAINING) == "DATA"
    assert arms.data_of(("imagenet_ddp.py", "--pretrained", "DATA")) == "DATA"
    assert arms.data_of(("imagenet_ddp.py", "--pretrained", __file__)) is None
    assert arms.data_of(("imagenet_ddp.py", "--freeze", "DATA")) == "DATA"
    assert arms.data_of(("imagenet_ddp.py", "--epochs=2", "DATA")) == "DATA"
    assert arms.data_of(("imagenet_ddp.py", "--epochs", "2")) is None
    assert arms.data_of(("imagenet_ddp.py",)) is None


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (wish(training=(*TRAINING, "--name", "x")), "--name among the training's options"),
        (wish(training=(*TRAINING, "--train-time=2")), "give --hours before the --"),
        (wish(training=(*TRAINING, "-n", "2")), "give --nodes before the --"),
        (wish(vary={"b": ("1", "2")}), "-b is varied: leave it out"),
        (wish(vary={"lr": ("1", "1")}, training=TRAINING[:5]), "each value of --vary once"),
        (wish(vary={"name": ("a", "b")}), "--vary name=... is not possible"),
        (wish(global_batch=64, processes=1), "leave out -b"),
        (wish(global_batch=64, training=TRAINING[:1]), "write slots=N behind each host"),
        (
            wish(global_batch=60, training=TRAINING[:1], processes=1),
            "60 cannot be shared by 8 processes",
        ),
        (wish(training=("imagenet_dp.py",)), "imagenet_dp.py trains on one node"),
        (wish(seeds=(0, 1), training=(*TRAINING, "--seed", "3")), "exclude each other"),
    ],
)
def test_what_does_not_fit_together(wanted, words):
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        arms.plan(wanted)


def test_what_has_begun_stays_as_it_is(tmp_path):
    """Arms may be added to a study; others than those that have begun may change."""
    first, more = arms.plan(wish((1, 2))), arms.plan(wish((1, 2, 4), seeds=()))
    kept = State(tmp_path)
    kept.join(first)
    kept.arms["s_1node"].status = "finished"
    kept.save()
    again = State(tmp_path)
    again.join(more)
    assert [one.status for one in again.arms.values()] == ["finished", "waiting", "waiting"]
    State(tmp_path).join(arms.plan(wish((1, 2), lr_scaling="linear")))
    with pytest.raises(UserError, match="has begun with other options"):
        State(tmp_path).join(arms.plan(wish((1, 2), hours=1)))
    with pytest.raises(UserError, match="has the arm s_1node too, which is finished"):
        State(tmp_path).join(arms.plan(wish((2, 4))))
    with kept.held(), pytest.raises(UserError, match=f"already .process {os.getpid()}"):
        State(tmp_path).held().__enter__()


def test_bad_lines_are_one_sentence_each(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("node1\nnode2\n")
    study = f"bash scripts/scaling_study.sh --logbook {tmp_path}/book"
    words = {
        f"{study} -- imagenet_ddp.py": "give either a HOSTS_FILE, or --simulate N",
        f"{study} {hosts} --nodes 1,4 -- imagenet_ddp.py": "--nodes 4, but",
        f"{study} --simulate 2": "what to train is missing",
        f"{study} --simulate 2 --nodes 1,x -- imagenet_ddp.py": "--nodes 1,x is not a list",
        f"{study} --simulate 2 --vary comm -- imagenet_ddp.py": "not of the form OPTION=A,B",
        f"{study} --simulate 2 --link 5 -- imagenet_ddp.py": "--link 5 is not a rate",
        f"{study} --simulate 2 -- train.py": "train.py is not a training script",
        f"{study} --runs {tmp_path}/none --name x": "does not exist",
    }
    for done, sentence in zip(shell(*words), words.values(), strict=True):
        assert done.code == 2
        assert sentence in done.sentence
    assert not (tmp_path / "book").exists()


def test_a_dry_run_prints_what_can_be_typed_and_does_nothing(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("# two\nnode1\nroot@node2 slots=1\n".replace("node1", "node1 slots=1"))
    line = f"bash scripts/scaling_study.sh {hosts} --hours 2 --logbook {tmp_path}/book --dry-run "
    line += "--env SECRET=xyz --ssh 'ssh -F file' -- imagenet_ddp.py -a vgg19 DATA"
    (done,) = shell(line)
    assert done.code == 0, done.err
    typed = [text.strip() for text in done.out.splitlines() if text.strip().startswith("+ ")]
    assert len(typed) == 2
    assert shlex.split(typed[1])[1:] == [
        *("bash", "scripts/train_on_nodes.sh", f"{tmp_path}/book/vgg19/hosts_2", "--fetch"),
        *("--ssh", "ssh -F file", "--env", "SECRET", "--", "imagenet_ddp.py"),
        *("--name", "vgg19_2nodes", "--resume", "auto", "--lr", "0.141421"),
        *("--train-time", "2", "-a", "vgg19", "DATA"),
    ]
    assert "at most 4 h of training (6 node-hours)" in done.out
    assert "xyz" not in done.out
    assert not (tmp_path / "book").exists()


def test_the_study_files_are_lines_that_work(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"node{number}\n" for number in range(8)))
    files = sorted((ROOT / "scripts/studies").glob("*.sh"))
    names = [file.stem for file in files]
    assert names == ["resnet50_o2", "vgg19", "vit_cifar10"]
    lines = [f"bash scripts/studies/{name}.sh" for name in names]
    own = f"{hosts} DATA --logbook {tmp_path}/book --dry-run"
    for name, done in zip(names, shell(*(f"{line} {own}" for line in lines)), strict=True):
        assert done.code == 0, done.err
        assert f"study {name}: " in done.out
        assert done.out.count(" DATA\n") >= 1
        assert ("imagenet_fsdp.py " in done.out) == (name == "vit_cifar10")
        assert "NOT RUN ON GPUS YET" in (ROOT / f"scripts/studies/{name}.sh").read_text()
    for line, done in zip(lines, shell(*lines), strict=True):
        assert (done.code, done.err.startswith(f"{line} HOSTS_FILE DATA")) == (2, True), done.err


def study(tmp_path: Path, *own: str, training: str, epochs: int = 2) -> list[str]:
    """The program behind scaling_study.sh, and its arguments."""
    words = ["scripts/study/main.py", "--logbook", f"{tmp_path}/book", "--name", "s", *own, "--"]
    options = f"{TINY_LINE} --output-dir {tmp_path}/runs -p 2 --epochs {epochs}"
    script, *rest = training.split()
    return [*words, script, *options.split(), *rest]


def kill_when(line: list[str], pattern: str, env: dict[str, str]) -> None:
    """Kill the launcher and its group when it prints ``pattern``; nothing is left behind."""
    with Running(*line, **env) as run:
        run.until(pattern)
        assert eventually(run.meet_family)
        family = run.family
        run.send(signal.SIGKILL, group=True)
        run.process.wait()
        assert eventually(lambda: not [one for one in family if one.lives()]), family


def test_a_killed_study_goes_on_and_a_failed_arm_stops_nothing(folder, tmp_path):
    vary = ("--simulate", "1", "--vary", "lr=0.05,none")
    line = study(tmp_path, *vary, training=f"imagenet_nd.py -j 0 {folder}", epochs=1)
    dump = tmp_path / "bin/nvidia-smi"
    dump.parent.mkdir()
    dump.write_text('#!/bin/sh\n[ "$1" != -L ] || exit 9\necho "| NVIDIA-SMI of a test |"\n')
    dump.chmod(0o755)
    env = ENV | {"PATH": f"{dump.parent}:{os.environ['PATH']}"}
    kill_when(line, "== arm s_1node_lr-0.05", env)  # in the middle of an epoch: the long test
    assert State(tmp_path / "book/s").arms["s_1node_lr-0.05"].status == "running"
    with Running(*line, **env) as run:
        done = run.result()
    assert done.code == 1
    kept = State(tmp_path / "book/s").arms
    failed, finished = kept["s_1node_lr-none"], kept["s_1node_lr-0.05"]
    assert (failed.status, failed.code, failed.attempts) == ("failed", 2, 1)
    assert "argument --lr/--learning-rate: invalid number value: 'none'" in failed.why
    assert (finished.status, finished.attempts) == ("finished", 2)
    assert summary(tmp_path / "runs/s_1node_lr-0.05")["epochs_done"] == 1
    page = (tmp_path / "book/s.md").read_text()
    assert "1 of 2 arms finished" in page
    assert "**Simulated: the nodes are processes" in page
    assert "failed: argument --lr/--learning-rate: invalid number value" in page
    assert "| Global Batch Size | 5 |" in page
    pictures = sorted(path.name for path in (tmp_path / "book/s").glob("*.png"))
    assert all(f"(s/{name})" in page for name in pictures)
    assert "overlay.png" in pictures
    assert "# this machine\n| NVIDIA-SMI of a test |\n```" in page
    assert "| [s](s.md) | tiny\\_plain |" in (tmp_path / "book/README.md").read_text()


def lines_without_times(page: Path) -> list[str]:
    """The lines of the first table and of the arms, less what differs from run to run."""
    lines = page.read_text().splitlines()
    wanted = ("| Learning", "| Global", "| Steps", "| Epoch Num", "| Best", "| Test", "| Top1")
    figures = ("| best val top", "| best val loss", "| epochs finished", "| test", "| arch")
    return [line for line in lines if line.startswith((*wanted, *figures))]


@pytest.mark.long
def test_a_killed_study_ends_like_an_undisturbed_one(folder, tmp_path):
    tables = []
    for kills in (False, True):
        place = tmp_path / f"kills{kills}"
        training = f"imagenet_ddp.py --comm fp32 {folder}"
        line = study(place, "--simulate", "2", training=training, epochs=3)
        if kills:
            slow = ENV | {"STEP_SECONDS": "0.2"}
            kill_when(line, r"\[node0\] Epoch 2/3 step", slow)
            with Running(*line, **slow) as run:
                run.until("== arm s_2nodes")
                run.until(r"\[node0\] Epoch 1/3 step")
                run.send(signal.SIGINT, group=True)
                done = run.result()
                assert done.code == 75
                assert "the same line continues this study" in done.out
            kill_when(line, r"\[node0\] Epoch 2/3 step", slow)
        with Running(*line, **ENV) as run:
            done = run.result()
        assert done.code == 0, done.out + done.err
        tables.append(lines_without_times(place / "book/s.md"))
        assert "2 of 2 arms finished" in (place / "book/s.md").read_text()
        assert "Node 3 would" in done.out
    assert tables[0] == tables[1]
    assert len(tables[0]) >= 12
    kept = json.loads((tmp_path / "killsTrue/book/s/study.json").read_text())["arms"]
    assert [one["attempts"] for one in kept.values()] == [2, 3]
