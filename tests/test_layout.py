"""The rooms: imports point down, and what must do without torch does."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from conftest import ROOT, python

UTILS = ROOT / "utils"
ROOMS = sorted(path.name for path in UTILS.iterdir() if (path / "__init__.py").is_file())
# From the top: a room imports from those behind it alone.
FLOORS = ("train", "run", "amp", "comm", "model", "data", "launch")
TORCH_FREE = (
    *("errors", "option_types", "atomic", "samplers", "model.schedules", "data.preprocessing"),
    *("launch.agreement", "launch.gpus", "launch.network", "launch.supervise"),
    *("launch.installed", "launch.launch", "launch.preflight"),
    *("data.index", "data.jpeg", "data.pack", "run.lock", "run.provenance"),
)
LINES = 9_760  # of utils/, whatever its files; 7,800 are the goal
MODULES = 45  # that `import imagenet_nd` loads
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
    paths = [path for path in UTILS.rglob("*.py") if path.stem != "__init__"]
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    modules = {module: imports(path) & files.keys() for module, path in files.items()}
    between = {}  # one in the hall is a room of its own
    for module, names in modules.items():
        room = module.split(".")[1]
        between.setdefault(room, set()).update({name.split(".")[1] for name in names} - {room})
    for arrows in (modules, between):
        TopologicalSorter(arrows).prepare()  # CycleError names the circle
    assert sorted(FLOORS) == ROOMS
    for number, floor in enumerate(FLOORS):
        assert not between[floor] & set(FLOORS[:number]), f"{floor} imports from above"
    all_names = set().union(*map(imports, UTILS.rglob("*.py")))
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


def test_utils_is_small():
    lines = sum(len(path.read_text().splitlines()) for path in UTILS.rglob("*.py"))
    assert lines <= LINES, f"utils/ has {lines} lines"


def test_a_script_of_one_process_loads_few_modules():
    """What one mode alone needs is imported where that mode begins."""
    code = "import sys, imagenet_nd; print(*(n for n in sys.modules if n.startswith('utils.')))"
    loaded = set(python("-c", code).out.split())
    assert 20 < len(loaded) <= MODULES, sorted(loaded)
    assert "utils.launch.preflight" not in loaded
