"""Imports point down; documents are short, their commands parse, their options and files exist."""

import ast
import os
import re
import shlex
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from conftest import ROOT, python

UTILS = ROOT / "utils"
MODULES_OF_UTILS = [path for path in UTILS.rglob("*.py") if path.stem != "__init__"]
TORCH_FREE = (
    *("errors", "option_types", "atomic", "samplers", "preprocessing", "launch"),
    *("folder", "provenance", "extras.pack", "extras.preflight"),
)
CORE, EXTRAS = 5_200, 5_550  # lines; 4_200 and 3_000 are the goals
MODULES = 26  # that `import imagenet_nd` loads
# Sent to nodes as single files, whose Python may be 3.7 and have no package.
SENT_TO_NODES = ("guard", "status", "cleanup")


def imports(path: Path, inside: bool = True) -> set[str]:
    """Modules that a file imports, at its top or, unless told otherwise, inside a function."""
    found, tree = set(), ast.parse(path.read_text())
    for node in ast.walk(tree) if inside else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_no_import_leads_in_a_circle_or_up():
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES_OF_UTILS
    }
    graph = {name: imports(path) & files.keys() for name, path in files.items()}
    for name in graph:
        if not name.startswith("utils.extras."):  # what these import of extras: test_extras.py
            graph[name] = {one for one in graph[name] if not one.startswith("utils.extras.")}
    TopologicalSorter(graph).prepare()
    all_names = set().union(*map(imports, MODULES_OF_UTILS))
    assert not [name for name in all_names if name.startswith(("imagenet", "scripts", "tests"))]


def test_what_runs_without_torch_does_not_import_it():
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    assert 'torch' not in sys.modules, name"
    done = python("-c", code, *(f"utils.{module}" for module in TORCH_FREE))
    assert done.code == 0, done.err


def test_what_is_sent_to_nodes_imports_nothing_of_this_repository():
    here = {path.stem for path in (ROOT / "scripts/ssh").glob("*.py")}
    for name in SENT_TO_NODES:
        found = imports(ROOT / "scripts/ssh" / f"{name}.py", inside=False)
        assert not {one.split(".")[0] for one in found} & (here | {"utils", "torch", "numpy"})


@pytest.mark.parametrize(("folder", "limit"), [(UTILS, CORE), (UTILS / "extras", EXTRAS)])
def test_the_core_and_the_extras_are_small(folder, limit):
    lines = sum(len(path.read_text().splitlines()) for path in folder.glob("*.py"))
    assert lines <= limit, f"{folder} has {lines} lines"


def test_a_script_of_one_process_loads_few_modules():
    """What one mode alone needs is imported where that mode begins."""
    code = "import sys, imagenet_nd; print(*(n for n in sys.modules if n.startswith('utils.')))"
    loaded = set(python("-c", code).out.split())
    assert 20 < len(loaded) <= MODULES, sorted(loaded)
    assert "utils.extras.preflight" not in loaded


# ---- documents

LIMITS = {"README.md": 200, "utils/README.md": 200, "scripts/README.md": 200, "RESULTS.md": 350}
LIMITS |= {"utils/MODES.md": 100, "scripts/AWS.md": 120}
CODE = [*ROOT.glob("*.py"), *(ROOT / "utils").rglob("*.py"), *(ROOT / "scripts").rglob("*.*")]
CODE += [*(ROOT / "tests" / "trials").glob("*.py")]
# Options of other programs: torchrun, Slurm, scripts that benches run, git, pip, aws, hf.
FOREIGN = {
    *("--nnodes", "--node_rank", "--nproc_per_node", "--master_addr", "--master_port"),
    *("--gpus-per-node", "--time", "--nodes", "--val-split", "--model", "--num-classes"),
    *("--device", "--opt", "--no-build-isolation", "--branch"),
    *("--group-id", "--protocol", "--source-group", "--info", "--repo-type", "--local-dir"),
}


def commands(document: str) -> list[str]:
    """The commands in the bash blocks of a document, each on one line."""
    found = re.findall(r"```bash\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    lines = "\n".join(found).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def training_commands() -> list[str]:
    found = [line for document in LIMITS for line in commands(document)]
    found = [line for line in found if re.search(r"\bimagenet_\w+\.py", line)]
    return [x for x in found if not x.startswith(("diff", "sbatch")) and "$OPTIONS" not in x]


def test_training_commands_parse(parse, monkeypatch):
    """As far as the script's own options: launchers and their options stand before its name."""
    is_folder, words = os.path.isdir, []
    monkeypatch.setattr("os.path.isdir", lambda path: path in (*words, "/data") or is_folder(path))
    monkeypatch.setattr("fsspec.get_filesystem_class", lambda protocol: None)  # s3fs may be missing
    for line in training_commands():
        words = shlex.split(line, comments=True)
        place = next(i for i, word in enumerate(words) if re.fullmatch(r"imagenet_\w+\.py", word))
        assert parse(words[place].removesuffix(".py"), *words[place + 1 :]), line


@pytest.mark.parametrize("document", LIMITS)
def test_documents_are_short_and_their_options_and_files_exist(document):
    """But in blocks of text: they show outputs, and commands of earlier commits."""
    whole = (ROOT / document).read_text()
    assert whole.count("\n") <= LIMITS[document]
    text = re.sub(r"```text\n.*?```", "", whole, flags=re.DOTALL)
    code = "\n".join(path.read_text() for path in CODE if path.suffix in (".py", ".sh", ".sbatch"))
    option = r"(?<![\w-])--[a-z][a-z0-9_-]*[a-z0-9]"
    known = set(re.findall(option, code)) | FOREIGN
    known |= {f"--{name}" for name in re.findall(r'\("([a-z-]+)", ', code)}  # of tables of options
    missing = set(re.findall(option, text)) - known
    assert not missing, f"{document} names options that no command has"
    places = set(re.findall(r"(?<![\w/.-])(?:scripts|utils|tests|figures)/[\w./-]*\w", text))
    assert not {place for place in places if not (ROOT / place).exists()}
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert ((ROOT / document).parent / link).exists(), f"{document} links {link}"


def test_the_picture_of_the_modes_is_drawn(tmp_path):
    done = python("scripts/draw_modes.py", "--out", tmp_path / "modes.svg")
    assert done.code == 0, done.err
    drawn = (tmp_path / "modes.svg").read_text()
    assert drawn.count('id="axes_') == 4
