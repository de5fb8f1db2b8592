"""--recipe: files of options, the batches they are meant for; options that are gone."""

import json
import re
from argparse import Namespace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torchvision
from conftest import ROOT, scalars, train

from utils import advice, report
from utils.data.classes import select
from utils.run import recipes
from utils.start import agreement
from utils.start.errors import UserError
from utils.start.option_types import Options
from utils.start.world import World

SCRIPTS = sorted(path.stem for path in ROOT.glob("imagenet_*.py"))
NAMES = ("classic90", "fast16", "fast32", "strong100", "tiny", "vit-finetune")


@pytest.fixture
def recipe(tmp_path):
    def write(*lines: str) -> Path:
        (tmp_path / "mine.txt").write_text("\n".join(lines) + "\n")
        return tmp_path / "mine.txt"

    return write


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_takes_every_recipe_and_the_command_line_takes_precedence(
    script, parse, tmp_path
):
    for name in NAMES:
        words = recipes.read(name)
        args = parse(script, tmp_path, "--epochs", 7, "--recipe", name)
        assert (args["data"], args["epochs"]) == (str(tmp_path), 7)
        assert args["lr"] == float(words[words.index("--lr") + 1])
    plain = parse(script, tmp_path)
    assert parse(script, tmp_path, "--recipe", "classic90") == plain | {"recipe": "classic90"}


def test_the_recipes_name_their_batch_and_go_to_all_nodes():
    """A job whose nodes have other recipes is refused, as one with other code."""
    assert recipes.names() == sorted(NAMES)
    for name in NAMES:
        assert "# Global batch: " in (recipes.RECIPES / f"{name}.txt").read_text()
    assert {f"utils/recipes/{name}.txt" for name in NAMES} <= agreement.code().keys()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--lr '0.1", r"mine\.txt cannot be read: No closing quotation"),
        ("--ema-every 4", "--ema-every was removed: .* leave it out"),
        (None, "no recipe fast: give a file, or one of classic90, fast16"),
    ],
)
def test_a_recipe_that_cannot_be_used(parse, recipe, tmp_path, line, message):
    with pytest.raises(UserError, match=message):
        parse("imagenet_ddp", "--recipe", recipe("# header", line) if line else "fast", tmp_path)


def test_a_byte_order_mark_is_skipped(parse, recipe, tmp_path):
    """Some editors write it. In a list of classes, too."""
    assert parse("imagenet_nd", "--recipe", recipe("\ufeff--epochs 3"), tmp_path)["epochs"] == 3
    names = [f"class_{number}" for number in range(3)]
    assert select(str(recipe("\ufeffclass_2", "class_0")), names) == ["class_0", "class_2"]


def test_a_run_by_a_recipe(folder, tmp_path, recipe):
    """Printed, kept in options.json, and its sizes in the curves."""
    path = recipe("# Mine", "--epochs 3 --lr 0.05 --progressive 16,24", "-p 2")
    line = ("--recipe", path, "-b", "10", "--epochs", "2", "--image-size", "32")
    line += ("--val-image-size", "48", "--output-dir", tmp_path, "--name", "run", folder)
    done = train("imagenet_nd.py", *line)
    assert f"recipe {path}: --epochs 3 --lr 0.05 --progressive 16,24 -p 2" in done.out
    assert "images of 16 pixels from epoch 1, 24 from epoch 2; evaluation at 48" in done.out
    assert scalars(tmp_path / "run")["Size/train"] == [(1, 16), (2, 24)]
    kept = json.loads((tmp_path / "run/options.json").read_text())
    assert (kept["recipe"], kept["lr"], kept["epochs"]) == (str(path), 0.05, 2)


def test_a_file_of_ones_own_comes_before_a_recipe_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fast16").mkdir()  # a folder of data, say
    assert "--progressive" in recipes.read("fast16")
    (tmp_path / "tiny").write_bytes(b"\xef\xbb\xbf# mine\r\n--lr 7 \r\n")
    assert recipes.read("tiny") == ["--lr", "7"]


@pytest.mark.parametrize(
    ("changes", "batch", "patterns"),
    [
        ({}, 8192, []),
        ({}, 8193, [r"sgd is known .* batch of 8192 \(ResNet-50: Goyal", "0 epochs of warm"]),
        ({"lr": 3.2}, 16384, [r"linear rule: 6\.4\)", "--warmup-epochs 5 or more"]),
        ({"warmup_epochs": 5.0}, 16384, ["5 epochs of warm-up: expect less accuracy$"]),
        ({"optimizer": "nesterov"}, 8193, ["^nesterov is known"]),
        ({"optimizer": "adamw"}, 100_000, []),
    ],
)
def test_a_batch_beyond_what_is_known_is_named(changes, batch, patterns):
    usual = {"lr": 0.1, "lr_scaling": "none", "warmup_epochs": 0.0, "optimizer": "sgd"}
    args = Namespace(**usual | changes)
    warnings = advice.batch_warnings(args, batch, args.lr)
    assert len(warnings) == bool(patterns)
    for pattern in patterns:
        assert re.search(pattern, warnings[0]), warnings[0]


def test_a_few_steps_of_a_large_batch_are_named():
    """As of a hundred photographs with the default batch."""
    warnings = advice.step_warnings(Namespace(epochs=1), 128, 1)
    assert warnings[0].startswith("only 1 step in all")
    cases = [(128, 1, 10, True), (32, 4, 10, True), (16, 1, 1, False), (128, 5, 10, False)]
    for batch, steps, epochs, warns in cases:
        warnings = advice.step_warnings(Namespace(epochs=epochs), batch, steps)
        assert [f"only {steps * epochs} steps" in text for text in warnings] == [True] * warns


@pytest.mark.parametrize(
    ("arch", "changes", "batch", "warns"),
    [
        ("vgg11", {}, 256, True),
        ("vgg11", {"lr": 0.03}, 256, False),
        ("vgg11", {"lr": 0.03}, 32, False),  # which is no reason for less
        ("vgg11", {}, 2560, False),  # by the linear rule
        ("vgg11_bn", {}, 256, False),
        ("vgg11", {"optimizer": "adamw"}, 256, False),
        ("vit_b_16", {}, 256, False),
    ],
)
def test_the_default_rate_is_too_high_without_normalisation(arch, changes, batch, warns):
    args = Namespace(**{"arch": arch, "optimizer": "sgd", "lr": 0.1} | changes)
    with torch.device("meta"):
        model = torchvision.models.get_model(arch)
    warnings = advice.rate_warnings(args, model, batch, args.lr)
    assert len(warnings) == warns
    assert not warns or re.search(f"{arch} has no normalisation.*--lr 0.01", warnings[0])


@pytest.mark.parametrize(
    ("rule", "batch", "warmup", "noted"),
    [
        ("linear", 512, 0.0, True),
        ("linear", 512, 1.0, False),
        ("linear", 256, 0.0, False),
        ("none", 512, 0.0, False),
    ],
)
def test_a_scaled_up_rate_without_warm_up_gets_a_note(logged, rule, batch, warmup, noted):
    session = mock.MagicMock(world=World(torch.device("cpu")), global_batch=batch)
    session.args = Options(
        arch="x",
        optimizer="adamw",
        lr=0.1,
        lr_scaling=rule,
        epochs=9,
        batch_size=batch,
        global_batch=None,
        accum_steps=1,
        warmup_epochs=warmup,
        recipe=None,
        resume=None,
    )
    session.state.epoch, session.state.sharded, session.state.resumed = 0, False, False
    session.train.sampler.sizes, session.train.sampler.accum = (), 1
    session.train.sampler.steps_per_epoch = 1
    report.start(session, "runs/x")
    assert ("note: a scaled-up learning rate usually needs --warmup-epochs 5" in logged) == noted
    assert "warning: only 9 steps in all" in "\n".join(logged)
