"""Imports point down; commands, options and files in documents exist."""

import ast
import os
import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT, python

UTILS = ROOT / "utils"
MODULES_OF_UTILS = [path for path in UTILS.rglob("*.py") if path.stem != "__init__"]
# A module imports only from its own room and from the rooms before it; the files at the top of
# utils/ form the last room.
ROOMS = ("start", "data", "model", "run")
TORCH_FREE = (
    *("start.errors", "start.option_types", "start.atomic", "start.launch", "start.preflight"),
    *("start.nvidia", "start.typical", "data.samplers", "data.preprocessing", "data.opening"),
    *("options", "data.options", "model.options", "run.options", "run.recipes"),
)
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


def room(module: str) -> int:
    """The place of a module's room among ROOMS."""
    parts = module.split(".")
    return ROOMS.index(parts[1]) if len(parts) > 2 else len(ROOMS)


def imports_of_utils() -> dict[str, set[str]]:
    """module -> the modules of utils that it imports: at its top, inside functions, for types."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES_OF_UTILS
    }
    return {module: imports(path) & files.keys() for module, path in files.items()}


def test_imports_point_down_from_room_to_room():
    """Imports inside functions, too."""
    pairs = [(one, other) for one, found in imports_of_utils().items() for other in found]
    assert len(pairs) > 150
    assert not [f"{one} imports {other}" for one, other in pairs if room(other) > room(one)]
    all_names = set().union(*map(imports, MODULES_OF_UTILS))
    assert not [name for name in all_names if name.startswith(("imagenet", "scripts", "tests"))]


def imports_of_scripts() -> dict[str, set[str]]:
    """module -> the modules of scripts/ that it imports. Those of scripts/ssh have no package."""
    files = {}
    for path in (ROOT / "scripts").rglob("*.py"):
        parts = path.relative_to(ROOT / "scripts").with_suffix("").parts
        files[".".join(parts[1:] if parts[0] == "ssh" else parts)] = path
    return {module: imports(path) & files.keys() for module, path in files.items()}


@pytest.mark.parametrize("found", [imports_of_utils, imports_of_scripts])
def test_imports_make_no_circle(found):
    """Imports inside functions and under TYPE_CHECKING, too."""
    left = found()
    assert sum(map(len, left.values())) > 50
    # Take away what imports nothing that is left, until nothing changes: circles remain.
    while free := {one for one, found in left.items() if not found & left.keys()}:
        left = {one: found for one, found in left.items() if one not in free}
    # And what imports a circle without being part of it.
    while top := left.keys() - set().union(*left.values()):
        left = {one: found for one, found in left.items() if one not in top}
    assert not {one: sorted(found & left.keys()) for one, found in left.items()}


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


# ---- documents

DOCUMENTS = ("README.md", "utils/README.md", "scripts/README.md", "RESULTS.md")
DOCUMENTS += ("utils/MODES.md", "utils/OPTIONS.md", "scripts/AWS.md", "CONTRIBUTING.md")
CODE = [*ROOT.glob("*.py"), *(ROOT / "utils").rglob("*.py"), *(ROOT / "scripts").rglob("*.*")]
CODE += [*(ROOT / "tests" / "trials").glob("*.py")]
# Options of other programs: torchrun, Slurm, scripts that benches run, git, pip, aws, hf.
FOREIGN = {
    *("--nnodes", "--node_rank", "--nproc_per_node", "--master_addr", "--master_port"),
    *("--gpus-per-node", "--time", "--nodes", "--val-split", "--model", "--num-classes"),
    *("--device", "--opt", "--no-build-isolation", "--collect-only", "--branch"),
    *("--group-id", "--protocol", "--source-group", "--info", "--repo-type", "--local-dir"),
}


def commands(document: str) -> list[str]:
    """The commands in the bash blocks of a document, each on one line."""
    found = re.findall(r"```bash\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    lines = "\n".join(found).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def training_commands() -> list[str]:
    found = [line for document in DOCUMENTS for line in commands(document)]
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


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_name_options_and_files_that_exist(document):
    """But in blocks of text: they show outputs, and commands of earlier commits."""
    whole = (ROOT / document).read_text()
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
    for file, word in re.findall(r"pytest .*(tests/\w+\.py) -k (\w+)", text):
        assert re.search(rf"def test_\w*{word}", (ROOT / file).read_text()), f"no test is {word}"


def test_the_tree_has_one_line_for_each_file():
    tree = re.search(r"```text\nimagenet_.*?```", (UTILS / "README.md").read_text(), re.DOTALL)
    folder, listed = "", []
    for line in tree[0].splitlines():
        if match := re.match(r"( +)([\w*]+)(/|\.py)? ", line):
            folder = match[2] if match[3] == "/" else "." if match[2] == "*" else folder
            if match[3] == ".py" and match[2] != "*":
                listed.append(f"{folder}/{match[2]}".removeprefix("./"))
    files = [str(path.relative_to(UTILS).with_suffix("")) for path in MODULES_OF_UTILS]
    assert sorted(listed) == sorted(files)


def test_texts_name_modules_that_exist():
    """`utils`, then room, module and name: the module is there, and has the name."""
    paths = [*ROOT.glob("*.*")]
    paths += [
        path for folder in ("utils", "scripts", "tests") for path in (ROOT / folder).rglob("*.*")
    ]
    names = {
        (name, path.name)
        for path in paths
        if path.suffix in (".py", ".md", ".ini", ".c", ".sh")
        for name in re.findall(r"`(utils(?:\.\w+)+)`", path.read_text())
    }
    assert len(names) > 40
    for name, file in names:
        place, parts = ROOT, name.split(".")
        while parts and (place / parts[0]).is_dir():
            place /= parts.pop(0)
        if parts:
            module = place / f"{parts.pop(0)}.py"
            assert module.exists(), f"{file} names {name}"
            words = set(re.findall(r"\w+", module.read_text()))
            assert not set(parts) - words, f"{file} names {name}"
