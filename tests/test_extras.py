"""The files of utils/extras can be deleted: training that does not ask for them goes on."""

import ast
import importlib
import re
import sys
from functools import partial

import pytest
from conftest import ROOT, SMALL, summary
from joined import Job, command, in_processes, run_jobs
from test_layout import imports

CORE = {path.stem: path for path in (ROOT / "utils").glob("*.py") if path.stem != "__init__"}
EXTRAS = {path.stem: path for path in (ROOT / "utils/extras").glob("*.py")}
del EXTRAS["__init__"]
# The extras that are a script's mode: its own, and what those may import.
MODES = {
    "imagenet_nd": (),
    "imagenet_ddp": (),
    "imagenet_fsdp": ("fsdp", "blocks"),
    "imagenet_ddp_apex": ("apex", "o2"),
}
OPTION = r"(?<![\w-])--?[a-z][a-z-]*"


@pytest.mark.parametrize("name", sorted(CORE.keys() - {"addons"}))
def test_only_addons_imports_extras_into_the_core(name):
    assert not [one for one in imports(CORE[name]) if one.startswith("utils.extras")]


@pytest.mark.parametrize("name", sorted(EXTRAS))
def test_extras_do_not_import_each_other(name):
    others = {one.split(".")[2] for one in imports(EXTRAS[name]) if one.startswith("utils.extras.")}
    assert others <= ({"o2"} if name == "apex" else set())


@pytest.mark.parametrize("name", sorted(EXTRAS))
def test_an_extra_names_what_turns_it_on(name):
    """An option of a script, or the command without which it is not used; or it is always on."""
    parsers = [importlib.import_module(script).parser() for script in MODES]
    known = set().union(*(re.findall(OPTION, one.format_help()) for one in parsers))
    text = ast.get_docstring(ast.parse(EXTRAS[name].read_text()))
    scripts = [one for one in re.findall(r"\b(?:scripts/)?\w+\.py", text) if (ROOT / one).exists()]
    assert scripts or known & set(re.findall(OPTION, text)) or "Always on" in text


def train_without(hidden, script, folder, place):
    """An epoch with these extras hidden; two processes where the mode has them."""
    line = (*SMALL, "-b", "10", "--epochs", "1")
    line += ("--opt-level", "O0") if "apex" in script else ()
    line += ("--output-dir", place, "--name", "run", folder)
    env = {"HIDDEN_EXTRAS": " ".join(hidden)}
    run_jobs([Job(script, line, 1 if script == "imagenet_nd" else 2, env=env)], place)
    assert summary(place / "run")["epochs_done"] == 1


@pytest.mark.parametrize("script", MODES)
def test_a_script_trains_without_extras(script, folder, tmp_path):
    others = EXTRAS.keys() - set(MODES[script])
    train_without(others, script, folder, tmp_path)


def train_without_each(folder, place, rank, size):
    """In one process: an epoch for each extra, which cannot be imported meanwhile."""
    import imagenet_nd
    from utils import options
    from utils.world import single_process

    line = [*SMALL, "-b", "20", "-j", "0", "--epochs", "1"]
    for name in EXTRAS:
        words = [*line, "--output-dir", str(place), "--name", name, str(folder)]
        sys.modules[f"utils.extras.{name}"] = None  # as Python notes that there is none
        imagenet_nd.train(options.parse(imagenet_nd.parser(), words), single_process())
        del sys.modules[f"utils.extras.{name}"]


def test_each_extra_can_be_deleted(folder, tmp_path):
    in_processes(1, partial(train_without_each, folder, tmp_path), join=False)
    for name in EXTRAS:
        assert summary(tmp_path / name)["epochs_done"] == 1


def test_an_option_whose_file_was_deleted_is_an_error_line(folder, tmp_path):
    line = (*SMALL[:2], "--ema", "0.9", "-j", "1", "--output-dir", tmp_path, folder)
    done = command("imagenet_nd", *line, HIDDEN_EXTRAS="ema")
    done.fails_with("utils/extras/ema.py, which is missing", "git checkout utils/extras/ema.py")
