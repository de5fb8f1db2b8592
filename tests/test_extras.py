"""The files of utils/extras can be deleted: training that does not ask for them goes on."""

import ast
import importlib
import re

import pytest
from conftest import ROOT, summary
from joined import Job, run_jobs
from test_layout import imports

CORE = {path.stem: path for path in (ROOT / "utils").glob("*.py") if path.stem != "__init__"}
EXTRAS = {path.stem: path for path in (ROOT / "utils/extras").glob("*.py")}
del EXTRAS["__init__"]
# The extras that are a script's mode: its own, and what those may import.
MODES = {
    "imagenet_nd": (),
    "imagenet_ddp": (),
    "imagenet_fsdp": ("fsdp",),
    "imagenet_ddp_apex": ("apex", "o2"),
}
OPTION = r"(?<![\w-])--?[a-z][a-z-]*"
# What is still to do; each entry goes with the commit that makes its test pass.
NAMELESS = "apex fsdp o2"
NEEDED = {"imagenet_ddp": "compress"}


def to_do(names, unfinished: str) -> list:
    """Parameters, of which the unfinished ones must fail."""
    fails = pytest.mark.xfail(strict=True, reason="to do; take it from the list above")
    return [pytest.param(x, marks=fails) if x in unfinished.split() else x for x in names]


@pytest.mark.parametrize("name", sorted(CORE.keys() - {"addons"}))
def test_only_addons_imports_extras_into_the_core(name):
    assert not [one for one in imports(CORE[name]) if one.startswith("utils.extras")]


@pytest.mark.parametrize("name", sorted(EXTRAS))
def test_extras_do_not_import_each_other(name):
    found = {one.split(".")[2] for one in imports(EXTRAS[name]) if one.startswith("utils.extras.")}
    assert found <= ({"o2"} if name == "apex" else set())


@pytest.mark.parametrize("name", to_do(sorted(EXTRAS), NAMELESS))
def test_an_extra_names_what_turns_it_on(name):
    """An option of a script, or the command without which it is not used; or it is always on."""
    parsers = [importlib.import_module(script).parser() for script in MODES]
    known = set().union(*(re.findall(OPTION, one.format_help()) for one in parsers))
    said = ast.get_docstring(ast.parse(EXTRAS[name].read_text()))
    scripts = [one for one in re.findall(r"\b(?:scripts/)?\w+\.py", said) if (ROOT / one).exists()]
    assert scripts or known & set(re.findall(OPTION, said)) or "Always on" in said


def train_without(hidden, script, folder, place):
    """An epoch with these extras hidden; two processes where the mode has them."""
    line = ("-a", "resnet18", "--image-size", "32", "-b", "10", "-j", "1", "--epochs", "1")
    line += ("--opt-level", "O0") if "apex" in script else ()
    line += ("--output-dir", place, "--name", "run", folder)
    env = {"HIDDEN_EXTRAS": " ".join(hidden)}
    run_jobs([Job(script, line, 1 if script == "imagenet_nd" else 2, env=env)], place)
    assert summary(place / "run")["epochs_done"] == 1


@pytest.mark.parametrize("script", MODES)
def test_a_script_trains_without_extras(script, folder, tmp_path):
    others = EXTRAS.keys() - {*MODES[script], NEEDED.get(script)}
    train_without(others, script, folder, tmp_path)


@pytest.mark.parametrize(("script", "name"), NEEDED.items())
@pytest.mark.xfail(strict=True, reason="to do; take it from the list above")
def test_a_script_trains_without_one_that_is_still_needed(script, name, folder, tmp_path):
    train_without([name], script, folder, tmp_path)
