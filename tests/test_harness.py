"""The tests' own promises: killed, they leave nothing; what they leave out is said last."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from joined import command
from running import Process, eventually

HERE = Path(__file__).parent
TESTS = {
    "endless": """
        import time
        from conftest import shell
        def test_endless():
            line = "echo $$ >FILE.new; mv FILE.new FILE; sleep 600; :"
            shell(f"setsid bash -c '{line}' & wait")
        """,
    "skipped": """
        import pytest
        def test_a(): pytest.skip("no chromium here")
        def test_b(): pass
        """,
    "failing": """
        def test_a(): raise ValueError("a name that is not UTF-8: \\udcfc")
        def test_b(): pass
        """,
}


def inner(tmp_path: Path, name: str, *options: str, **env: str) -> subprocess.Popen:
    """Start a pytest of its own on one of `TESTS`, with the project's conftest."""
    code = "\n".join(line[8:] for line in TESTS[name].splitlines())
    file = tmp_path / "test_inner.py"
    file.write_text(code.replace("FILE", str(tmp_path / "pid")))
    words = [sys.executable, "-m", "pytest", "-c", ROOT / "pytest.ini", "--rootdir", tmp_path]
    inherited = {name: value for name, value in os.environ.items() if name != "NO_SKIPS"}
    return subprocess.Popen(
        [*map(str, words), "-p", "conftest", "-p", "no:cacheprovider", *options, str(file)],
        env=inherited | {"PYTHONPATH": str(HERE)} | env,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_tests_that_are_killed_leave_no_process(tmp_path, options):
    tests = inner(tmp_path, "endless", *options)
    try:
        assert eventually((tmp_path / "pid").exists)
        started = Process(int((tmp_path / "pid").read_text()))
        assert started.lives()
    finally:
        tests.send_signal(signal.SIGKILL)
        tests.wait()
        tests.stdout.close()
    assert eventually(lambda: not started.lives())


@pytest.mark.long
def test_a_failure_with_a_hostile_name_leaves_the_other_tests(tmp_path):
    out, _ = inner(tmp_path, "failing", "-n", "1").communicate()
    assert "1 failed, 1 passed" in out and r"UTF-8: \udcfc" in out


@pytest.mark.long
@pytest.mark.parametrize(("env", "code"), [({}, 0), ({"NO_SKIPS": "1"}, 1)])
@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_what_is_left_out_is_the_last_line(tmp_path, options, env, code):
    tests = inner(tmp_path, "skipped", *options, **env)
    out, _ = tests.communicate()
    last = out.splitlines()[-1]
    assert last == "left out because something is missing on this machine: 1: no chromium here"
    assert tests.returncode == code


def test_a_fork_has_loaded_what_the_server_is_told_to():
    """The server passes over a module that it does not find. Each fork would import it for long."""
    found = "import sys; sys.exit('warm' not in sys.modules)"
    assert command("imagenet_nd", "--help", BEFORE=found).code == 0
