"""--help of the shell scripts: how to use them, without installing or starting anything."""

import subprocess

import pytest
from conftest import ROOT

WRAPPERS = sorted(
    path.name
    for path in (ROOT / "scripts").glob("*.sh")
    if path.name not in ("environment.sh", "launch.sh")
)


@pytest.mark.parametrize("name", WRAPPERS)
def test_help_says_how_to_use_it(name, tmp_path):
    """From another folder, with no environment active."""
    line = ["bash", ROOT / "scripts" / name, "--help"]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert f"{name} " in done.stdout
    assert "Installing" not in done.stdout
    assert "set -euo" not in done.stdout
    assert not list(tmp_path.iterdir())
