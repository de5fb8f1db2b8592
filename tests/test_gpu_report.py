"""scripts/gpu_report.sh: what fails is named, what takes too long is ended, the rest goes on."""

import json
import time

import pytest
from conftest import ROOT, python
from gpu_report.report import Failed, Part, Sitting, sit

REPORT = "scripts/gpu_report/report.py"


@pytest.fixture
def sitting(tmp_path):
    return Sitting("cpu", 0, tmp_path, time.monotonic() + 1000)


def fine(sitting):
    return "All is well.", {"number": 7}


def wrong(sitting):
    return sitting.run("-c", "import sys; sys.exit('no such kernel')"), None


def broken(sitting):
    raise ZeroDivisionError("of something")


def endless(sitting):
    return sitting.run("-c", "import time; time.sleep(1000)"), None


def test_the_parts_after_one_that_fails_are_done(sitting):
    works = {"One": fine, "Two": wrong, "Three": broken, "Four": endless, "Five": fine}
    sit(
        sitting,
        [Part(title, work, 100 if work is not endless else 0) for title, work in works.items()],
    )
    assert sitting.failed == ["Two", "Three", "Four"]
    text = (sitting.out / "gpu_report.md").read_text()
    for sentence in (
        "exit code 1: no such kernel",
        "ZeroDivisionError",
        "it did not end in the time",
    ):
        assert f"**Failed:** {sentence}" in text
    assert text.count("All is well.") == 2
    content = json.loads((sitting.out / "gpu_report.json").read_text())
    assert content["failed"] == sitting.failed
    assert content["parts"] == {"One": {"number": 7}, "Five": {"number": 7}}
    assert content["machine"]["torch"]


def test_without_time_or_gpus_a_part_is_left_out(sitting):
    sit(sitting, [Part("Two GPUs", wrong, 100, gpus=2)])
    sitting.deadline = time.monotonic()
    sit(sitting, [Part("Late", wrong, 100)])
    assert not sitting.failed
    text = (sitting.out / "gpu_report.md").read_text()
    assert "needs 2 GPUs, and there are 0" in text
    assert "no time was left" in text


def test_a_command_sees_no_gpu_on_the_cpu(sitting):
    sitting.limit = sitting.deadline
    look = "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    assert sitting.run("-c", look) == "''\n"
    with pytest.raises(Failed, match="exit code 3"):
        sitting.run("-c", "raise SystemExit(3)")


def test_without_a_gpu_a_sentence_says_so(tmp_path):
    done = python(REPORT, "--out", tmp_path / "out")
    assert done.code == 2
    assert "there is no GPU here" in done.sentence
    assert not (tmp_path / "out").exists()
    assert REPORT in (ROOT / "scripts/gpu_report.sh").read_text()


@pytest.mark.long
def test_the_whole_report_on_the_cpu(tmp_path):
    out = tmp_path / "out"
    done = python(REPORT, "--device", "cpu", "--out", out, "--minutes", "30", timeout=2000)
    assert done.code == 0, done.err
    text = (out / "gpu_report.md").read_text()
    assert "Failed" not in text
    assert "From image files" in text
