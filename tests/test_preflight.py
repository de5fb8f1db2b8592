"""A training on several nodes refuses to start if one of them has other code or another torch."""

import re
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, Result, shell
from test_errors import LINE, assert_one_sentence

from utils.launch.network import free_port


def both_refuse(folder: Path, tmp_path: Path, other: Path = ROOT, path: str = "") -> list[Result]:
    """Train on two nodes, the second with the code in ``other`` and the module path ``path``."""
    rest = f"-n 2 --dist-url tcp://127.0.0.1:{free_port()} {LINE} --output-dir {tmp_path}/output"
    results = shell(
        f"python imagenet_ddp.py -nr 0 {rest} {folder}",
        f"PYTHONPATH={path} python {other}/imagenet_ddp.py -nr 1 {rest} {folder}",
    )
    assert not (tmp_path / "output").exists()
    return results


def test_nodes_with_other_code(folder, tmp_path):
    for part in ("utils", "scripts/recipes"):
        shutil.copytree(ROOT / part, tmp_path / part)
    shutil.copy(ROOT / "imagenet_ddp.py", tmp_path)
    with open(tmp_path / "utils" / "schedules.py", "a") as file:
        file.write("# a change that git does not know of\n")
    for result in both_refuse(folder, tmp_path, other=tmp_path):
        assert_one_sentence(
            result, "this code differs", "utils/model/schedules.py", "(node 1)", "copy it"
        )


@pytest.mark.long
def test_nodes_with_another_torch(folder, tmp_path):
    """The torch on node 1 claims to be another release."""
    import torch.version

    text = Path(torch.version.__file__).read_text()
    stand_in = re.sub(r"(?m)^__version__ = .*", "__version__ = '1.99.0+cpu'", text)
    assert stand_in != text
    (tmp_path / "torch_version.py").write_text(stand_in)
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "from importlib.util import spec_from_file_location\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path, target=None):\n"
        "        if name == 'torch.version':\n"
        f"            return spec_from_file_location(name, '{tmp_path}/torch_version.py')\n"
        "sys.meta_path.insert(0, Finder)\n"
    )
    for result in both_refuse(folder, tmp_path, path=str(tmp_path)):
        assert_one_sentence(result, "torch differs", "has 1.99", "(node 1)", "install the same")
