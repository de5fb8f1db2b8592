"""The scripts train the same thing, and differ in their mode alone."""

import ast
import difflib
import re
from pathlib import Path
from shlex import split

import pytest
from conftest import ROOT, scalars, summary, train
from running import assert_same_weights, tiny

SCRIPTS = ("imagenet_nd.py", "imagenet_dp.py", "imagenet_ddp.py", "imagenet_ddp_apex.py")
SCRIPTS += ("imagenet_fsdp.py",)
CURVES = ("Loss/train", "Top1/train", "Top5/train", "Loss/val", "Top1/val", "Top5/val", "Lr")

# Everything that changes a step; float32 in all scripts.
SAME = split("-b 10 --epochs 2 -p 2 --lr 0.05 --clip-grad 2 --label-smoothing 0.1 --seed 5")
SAME += split("--lr-schedule cosine --warmup-epochs 0.5")
MODES = {
    "nd": ("imagenet_nd.py",),
    "dp": ("imagenet_dp.py",),
    "ddp": ("imagenet_ddp.py", "-g", "1"),
    "apex": ("imagenet_ddp_apex.py", "-g", "1", "--opt-level", "O0"),
}


@pytest.fixture(scope="module")
def modes(folder, tmp_path_factory) -> Path:
    """The same training of a ResNet-18 by each script: a folder of runs named like `MODES`."""
    runs = tmp_path_factory.mktemp("modes")
    for name, (script, *options) in MODES.items():
        train(script, *options, *SAME, "--output-dir", runs, "--name", name, folder)
    return runs


@pytest.mark.parametrize("mode", list(MODES)[1:])
def test_one_process_trains_bit_for_bit_like_nd(modes, mode):
    assert_the_same_step(modes, mode, "nd", tolerance=0)


# No clipping: it would hide a gradient that is too large by a factor.
PLAIN = split("--epochs 2 --lr 0.05 --label-smoothing 0.1 --seed 5 --warmup-epochs 0.5")


def divide(ways: dict[str, str], folder: Path, runs: Path) -> None:
    """Train a model whose gradient is a mean over images, by a script and its options each."""
    model, env = tiny()
    for name, way in ways.items():
        script, *options = way.split()
        options += [*model, *PLAIN, "--output-dir", runs, "--name", name, folder]
        train(script, *options, processes=2 if name == "torchrun" else 0, **env)


def assert_the_same_step(runs: Path, way: str, whole: str, tolerance: float = 1e-5) -> None:
    """Equal curves and weights, but for the order of additions."""
    ours, plain = scalars(runs / way), scalars(runs / whole)
    for tag in (*CURVES, "Step/loss"):
        assert ours[tag] == [(x, pytest.approx(y, rel=tolerance, abs=0)) for x, y in plain[tag]], (
            tag
        )
    assert_same_weights(runs / way, runs / whole, tolerance)


@pytest.fixture(scope="module")
def splits(folder, tmp_path_factory) -> Path:
    """10 images a step in several ways."""
    runs = tmp_path_factory.mktemp("splits")
    ways = {
        "one": "imagenet_nd.py -b 10",
        "accumulated": "imagenet_nd.py -b 5 --accum-steps 2",
        "spawned": "imagenet_ddp.py -b 5 -g 2",
        "torchrun": "imagenet_ddp.py -b 5",
    }
    divide(ways, folder, runs)
    return runs


@pytest.mark.parametrize(
    ("way", "whole", "tolerance"),
    [("accumulated", "one", 1e-5), ("spawned", "one", 1e-5), ("torchrun", "spawned", 0)],
)
def test_a_step_is_the_same_however_its_batch_is_divided(splits, way, whole, tolerance):
    assert_the_same_step(splits, way, whole, tolerance)
    found = summary(splits / way)
    assert (found["global_batch"], found["world_size"]) == (10, 1 if way == "accumulated" else 2)


def test_one_process_communicates_not_at_all(splits):
    found, step = summary(splits / "one"), max(y for _, y in scalars(splits / "one")["Time/train"])
    assert found["communication_s"] == 0
    assert 0 < found["data_s"] + found["compute_s"] <= step  # the rest: lines, polls


@pytest.mark.long
def test_a_step_is_the_same_on_two_processes_that_accumulate(folder, tmp_path):
    both = "imagenet_ddp.py -b 3 -g 2 --accum-steps 2"
    divide({"both": both, "twelve": "imagenet_nd.py -b 12"}, folder, tmp_path)
    assert_the_same_step(tmp_path, "both", "twelve")


def test_a_batch_of_the_whole_data_set_weighs_uneven_shares_by_their_images(folder, tmp_path):
    """Forty images on three ranks, 13, 13 and 14: log, summary and learning rate all say 40."""
    more = "-b 64 --classes 2 --lr-scaling linear"
    ways = {"one": f"imagenet_nd.py {more}", "three": f"imagenet_ddp.py -g 3 {more}"}
    divide(ways, folder, tmp_path)
    assert "global batch 40 " in (tmp_path / "one" / "train.log").read_text()
    assert summary(tmp_path / "one")["global_batch"] == 40
    assert scalars(tmp_path / "one")["Lr"][-1][1] == pytest.approx(0.05 * 40 / 256)
    assert_the_same_step(tmp_path, "three", "one")


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(("imagenet_nd.py",), id="nd"),
        pytest.param(("imagenet_ddp.py", "-g", "2"), id="ddp", marks=pytest.mark.long),
    ],
)
def test_training_learns_the_classes(folder, tmp_path, way):
    script, *options = way
    model, env = tiny(full=True)
    recipe = split("--epochs 12 --lr 0.05 --crop-scale 0.5 --lr-schedule cosine")
    recipe += ["-b", "5" if options else "10", "--output-dir", tmp_path, "--name", "run"]
    train(script, *options, *model, *recipe, folder, **env)
    losses = [y for _, y in scalars(tmp_path / "run")["Loss/train"]]
    assert losses[-1] < 0.7 * losses[0]
    assert summary(tmp_path / "run")["best_top1"] > 60


# ---- the scripts as texts

LOOP = """
    while loop.goes_on(session):
        trained = epoch.train(session, train_step)
        evaluated = evaluation.evaluate(session, predict, loaders.val)
        loop.close_epoch(session, trained, evaluated)"""


def code(path: Path) -> list[str]:
    """Lines of a script below its docstring."""
    text = path.read_text()
    return text.splitlines()[ast.parse(text).body[0].end_lineno :]


def changes(other: str) -> tuple[list[str], list[str]]:
    """Lines that a script takes from imagenet_nd.py and adds to it, whatever their indentation."""
    before, after = (
        [line.strip() for line in code(ROOT / name) if line.strip()] for name in (SCRIPTS[0], other)
    )
    difference = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
    removed = [line[1:] for line in difference if line.startswith("-")]
    return removed, [line[1:] for line in difference if line.startswith("+")]


@pytest.mark.parametrize(
    ("script", "most_removed", "most_added", "about"),
    [
        ("imagenet_dp.py", 4, 6, "parallel|GPUs|mode="),
        (
            "imagenet_ddp.py",
            6,
            29,
            "distribut|launch|worker|train\\(args, world|process|replica|sync|nullcontext|ranks|"
            "all-reduce|mode=|comm|exchange|bucket|device_ids|^(model,|\\))$",
        ),
        (
            "imagenet_ddp_apex.py",
            19,
            42,
            "distribut|launch|worker|train\\(args, world|process|replica|sync|nullcontext|ranks|"
            "all-reduce|mode=|apex|amp\\.|master|float16|levels|level=|_fp32=|scale_loss|loss_scale|scaled_loss|o2\\b|"
            "allreduce|factor|buckets|^(model,|optimizer,|\\))$|optimizer\\.step|choice",
        ),
        (
            "imagenet_fsdp.py",
            7,
            34,
            "distribut|launch|worker|train\\(args, world|process|shard|sync|ranks|mode=|mesh|"
            "^part,|policy|fsdp\\b|copy_from_main|scattering|^\\)$",
        ),
    ],
)
def test_a_script_differs_from_nd_by_its_mode_alone(script, most_removed, most_added, about):
    removed, added = changes(script)
    assert 0 < len(removed) <= most_removed, removed
    assert 0 < len(added) <= most_added, added
    foreign = [line for line in added if not re.search(about, line, re.IGNORECASE)]
    assert not foreign


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_a_short_lesson(script):
    text = (ROOT / script).read_text()
    assert len(text.splitlines()) <= 150
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    (step,) = [function for function in functions if function.name == "train_step"]
    body = ast.unparse(step)
    assert ".backward()" in body
    assert "scaler.step(optimizer)" in body or "optimizer.step()" in body
    assert LOOP in text
    assert f"python {script}" in text or f" {script} " in text  # a command to type
