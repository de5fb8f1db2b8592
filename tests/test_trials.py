"""The scripts in tests/trials: they start; parts of a training fail; runs are killed."""

import subprocess
import sys

import pytest
from conftest import ROOT, python
from nodes import need

sys.path.insert(0, str(ROOT / "scripts"))
from trials import faults
from trials.kill_runs import Case


@pytest.mark.parametrize("name", ["faults", "kill_runs", "run_all"])
def test_each_starts_from_any_folder(name, tmp_path):
    line = [sys.executable, str(ROOT / "tests" / "trials" / f"{name}.py"), "--help"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"python tests/trials/{name}.py" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", faults.FAULTS)
def test_training_continues_after_a_fault(name, tmp_path):
    need("ip")
    outcomes = faults.try_fault(name, tmp_path / "runs", dist_timeout=20)
    wanted = {"node_killed": [1, 2], "master_killed": [1], "rank0_killed": [3, 2, 1, 4]}
    assert [one.nodes for one in outcomes] == wanted.get(name, [2])
    assert all(one.restarts or name == "link_down" for one in outcomes)


@pytest.mark.long
def test_killed_runs_end_like_undisturbed_ones():
    done = python("tests/trials/kill_runs.py", "--kills", "12", "--seed", "1", timeout=600)
    assert done.code == 0, done.out + done.err
    rows = [line.split(" | ") for line in done.out.splitlines() if "imagenet" in line]
    assert [int(row[1]) for row in rows] == [3] * 4


def test_kill_runs_sees_what_differs(tmp_path):
    """A batch left out, one seen twice without a snapshot, and one with other images."""
    case = Case("nd", tmp_path, tmp_path)
    order = [str(step) for step in range(16)]
    for run, attempts, log in [
        ("whole", [order], ""),
        ("good", [order[:6], order[4:]], "resumed from a: epoch 2, step 0"),
        ("epoch", [order[:4], order[4:]], "resumed from a: epoch 1, step 4"),
        ("gap", [order[:6], order[8:]], "resumed from a: epoch 3, step 0"),
        ("again", [order[:6], order[5:]], "resumed from a: epoch 2, step 0"),
        ("other", [[*order[:5], "7", *order[6:]]], ""),
        ("short", [order[:-1]], ""),
    ]:
        (tmp_path / f"{run}_seen").mkdir()
        (tmp_path / f"{run}.log").write_text(log)
        for number, seen in enumerate(attempts):
            (tmp_path / f"{run}_seen" / f"0_{number}").write_text("\n".join(seen) + "\n")
        case.differences.clear()
        case.compare_images(run, "whole")
        assert bool(case.differences) == (run not in ("whole", "good", "epoch")), run
