"""--recipe: files of options, what is typed beside them, and how large a batch they bear."""

import importlib
import json
import re
import sys
from argparse import Namespace

import pytest
from conftest import ROOT, scalars, train
from running import tiny

from utils import options
from utils.errors import UserError
from utils.train import recipes
from utils.train.recipes import batch_warnings

SCRIPTS = sorted(path.stem for path in ROOT.glob("imagenet_*.py"))
ASKED = ("classic90", "fast16", "fast30", "strong100", "vit-finetune", "tiny")


class Stop(Exception):
    """Raised in place of parsing, by the parser's owner."""


def parser_of(script: str, monkeypatch):
    """The parser that a script parses its command line with."""
    found = []

    def keep(parser):
        found.append(parser)
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(options, "parse", keep)
        with pytest.raises(Stop):
            importlib.import_module(script).main()
    return found[0]


@pytest.fixture
def parser(monkeypatch):
    return parser_of("imagenet_nd", monkeypatch)


@pytest.fixture
def recipe(tmp_path):
    def write(*lines: str) -> str:
        path = tmp_path / "mine.txt"
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    return write


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name", sorted({*recipes.names(), *ASKED}))
def test_every_script_understands_every_recipe(name, script, monkeypatch):
    args = recipes.parse(parser_of(script, monkeypatch), ["--recipe", name, "--epochs", "7", "D"])
    assert (args.data, args.epochs) == ("D", 7)
    assert args.wanted.options and "--epochs 7 (not " in args.wanted.typed


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_says_where_it_comes_from_and_what_it_reached(name):
    text = recipes.find(name).read_text()
    for wanted in ("Source: ", "What that reached: ", "What we reached: ", "Global batch: "):
        assert f"# {wanted}" in text, wanted
    assert recipes.RANGE.search(text)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_classic_recipe_is_the_defaults(script, monkeypatch, tmp_path):
    """So it trains what no recipe trains, bit for bit."""
    parser, found = parser_of(script, monkeypatch), []
    for line in ([], ["--recipe", "classic90"]):
        monkeypatch.setattr(sys, "argv", [script, *line, str(tmp_path)])
        settled = vars(options.parse(parser)).items()
        found.append({key: value for key, value in settled if key not in ("recipe", "wanted")})
    assert found[0] == found[1]


def test_what_is_typed_wins_wherever_it_stands(parser, recipe):
    path = recipe("# a comment", "--lr 0.5 --epochs 16  # another", "", "--name 'a b'")
    for line in (["--lr", "0.3", f"--recipe={path}", "D"], ["--recipe", path, "--lr", "0.3", "D"]):
        args = recipes.parse(parser, line)
        assert (args.lr, args.epochs, args.name, args.data) == (0.3, 16, "a b", "D")
        assert args.wanted == ("--lr 0.5 --epochs 16 --name 'a b'", "--lr 0.3 (not 0.5)", None)
    assert recipes.parse(parser, ["D"]).wanted is None


def test_an_option_without_its_value_takes_no_data_for_one(parser, recipe):
    args = recipes.parse(parser, ["--recipe", recipe("--pretrained", "--resume"), "D"])
    assert (args.data, args.resume) == ("D", "auto") and args.pretrained


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("--lr x", "argument --lr"),
        ("--opt-level O2", "--opt-level O2: no option of this script"),
        ("--lr 0.1 DATA", "DATA: no option of this script"),
        ("--lr '0.1", "No closing quotation"),
        ("--recipe tiny", "no other recipe"),
        ("--help", "no other recipe"),
    ],
)
def test_a_wrong_line_is_named(parser, recipe, line, what):
    with pytest.raises(UserError, match=rf"mine\.txt, line 2: .*{re.escape(what)}"):
        recipes.parse(parser, ["--recipe", recipe("# header", line), "D"])


def test_tools_that_look_at_options_see_those_of_a_recipe(recipe):
    words = recipes.expanded(["x.py", "-b", "8", "--recipe", recipe("--lr 0.5", "--wd 0"), "D"])
    assert words == ["x.py", "--lr", "0.5", "--wd", "0", "-b", "8", "D"]
    assert recipes.expanded(["x.py", "-b", "8", "D"]) == ["x.py", "-b", "8", "D"]


def test_a_recipe_that_is_not_there(parser):
    with pytest.raises(UserError, match="no recipe fast: give a file, or one of classic90, fast16"):
        recipes.parse(parser, ["--recipe", "fast", "D"])


def test_a_run_by_a_recipe(folder, tmp_path, recipe):
    """Printed, kept in options.json, and its sizes in the curves."""
    path = recipe("# Global batch: 64", "--epochs 3 --lr 0.05 --progressive 16,24", "-p 2")
    model, env = tiny()
    line = ("--recipe", path, *model, "-b", "10", "--epochs", "2", "--image-size", "32")
    line += ("--val-image-size", "48")
    line += ("--output-dir", tmp_path, "--name", "run", folder)
    done = train("imagenet_nd.py", *line, **env)
    assert f"recipe {path}: --epochs 3 --lr 0.05 --progressive 16,24 -p 2" in done.out
    assert "typed instead: --epochs 2 (not 3)" in done.out
    assert "meant for a global batch of 64, and this is 10; by the linear rule" in done.out
    assert "training images of 16 pixels in epoch 1, 24 in epoch 2; evaluation at 48" in done.out
    assert scalars(tmp_path / "run")["Size/train"] == [(1, 16), (2, 24)]
    kept = json.loads((tmp_path / "run/options.json").read_text())
    assert kept["recipe"] == path
    assert (kept["lr"], kept["epochs"]) == (0.05, 2)


def wishes(**changes) -> Namespace:
    plain = {"recipe": None, "wanted": None, "lr": 0.1, "lr_scaling": "none", "warmup_epochs": 0.0}
    return Namespace(**plain | changes)


def meant_for(low, high) -> dict:
    return {"recipe": "x", "wanted": recipes.Wanted("", "", (low, high))}


@pytest.mark.parametrize(
    ("args", "batch", "wanted"),
    [
        (wishes(), 8192, []),
        (wishes(), 8193, [r"sgd is known .* batch of 8192 \(ResNet-50: Goyal", "0 epochs of warm"]),
        (
            wishes(lr=3.2),
            16384,
            [r"by the linear rule 6\.4\)", "--warmup-epochs 5 or more, or LAR"],
        ),
        (wishes(optimizer="adamw"), 100_000, []),
        (wishes(optimizer="lars"), 32768, []),
        (wishes(optimizer="lamb"), 65536, ["32768 .BERT: You et al"]),
        (wishes(**meant_for(512, 1024)), 1024, []),
        (wishes(**meant_for(512, 1024)), 2048, [r"512 to 1024.*2048.*--lr 0\.2"]),
        (wishes(**meant_for(512, 512)), 256, [r"of 512, and.*256.*--lr 0\.05"]),
        (wishes(**meant_for(512, 512), lr_scaling="linear"), 256, ["is 256$"]),
    ],
)
def test_a_batch_beyond_what_is_known_is_named(args, batch, wanted):
    said = batch_warnings(args, batch, args.lr)
    assert len(said) == bool(wanted)
    for pattern in wanted:
        assert re.search(pattern, said[0]), said[0]


def test_recipes_go_to_all_nodes():
    """A job whose nodes have other recipes is refused, as one with other code."""
    from utils.launch import agreement

    assert {f"scripts/recipes/{name}.txt" for name in recipes.names()} <= agreement.code().keys()
