"""scripts/gpu_report.sh: what fails is named, what takes too long is ended, the rest goes on."""

import importlib.util
import sys

import gpu_report
from conftest import ROOT, shell
from gpu_report import Part


def test_the_parts_after_one_that_fails_are_done(monkeypatch, tmp_path):
    def report(parts, *options):
        """The exit code and the page of a report on the CPU."""
        words = ["gpu_report.py", "--device", "cpu", "--out", str(tmp_path / "out"), *options]
        monkeypatch.setattr(gpu_report, "PARTS", parts)
        monkeypatch.setattr(sys, "argv", words)
        return gpu_report.main(), (tmp_path / "out/gpu_report.md").read_text()

    parts = [
        Part("One", "-c print('well')", 100),
        Part("Two", "-c exit('no_such_kernel')", 100),
        Part("Three", "-c __import__('time').sleep(1000)", 6),
        Part("Four", "-c print(1)", 100, gpus=2),
        Part("Five", "-m pytest", 100),
    ]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, page = report(parts)
    assert code == 1
    found = dict(part.partition("\n\n")[::2] for part in page.split("\n## ")[1:])
    assert "\nwell\n" in found["One"]
    assert found["Two"].startswith("**Failed:** exit code 1: no_such_kernel")
    assert found["Three"].startswith("**Failed:** it did not end within 6 s")
    assert found["Four"].startswith("Left out: it needs 2 GPUs, and there are 0")
    assert found["Five"].startswith("Left out: pytest is not installed")
    code, page = report(parts[:1], "--minutes", "0.01")
    assert code == 0
    assert "Left out: no time was left" in page


def test_without_internet_it_goes_on_without_what_the_tests_need(tmp_path):
    """Here there is no GPU, which is an error."""
    environment = f"""
        source {ROOT}/scripts/environment.sh
        use_environment() {{
            echo "installing $*"
            [ $# = 0 ] || fail "no internet"
            PYTHON=python
        }}
    """
    line = 'source "$(dirname "$0")/environment.sh"\n'
    script = (ROOT / "scripts/gpu_report.sh").read_text()
    (tmp_path / "gpu_report.sh").write_text(script.replace(line, environment))
    (done,) = shell(f"bash {tmp_path}/gpu_report.sh --out {tmp_path}/out")
    assert done.code == 2
    assert "there is no GPU here" in done.err.splitlines()[-1]
    assert done.out.splitlines() == [f"installing {ROOT}/tests/requirements.txt", "installing "]
