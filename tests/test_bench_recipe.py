"""scripts/bench_recipe.py: its arms, its table, and a small comparison."""

import bench_recipe
import pytest
from conftest import python
from running import STAND_IN

from utils.errors import UserError

NEEDED = ("--data", "D", "--target-top1", "90")


def test_an_arm_is_a_recipe_or_options():
    args = bench_recipe.parse(["tiny", "long=--lr 0.1 --name 'a b'", *NEEDED, "--options=-j 2"])
    assert bench_recipe.arms_of(args) == {
        "tiny": ["-j", "2", "--recipe", "tiny"],
        "long": ["-j", "2", "--lr", "0.1", "--name", "a b"],
    }
    with pytest.raises(UserError, match="two arms are called tiny"):
        bench_recipe.arms_of(bench_recipe.parse(["tiny", "tiny=--lr 1", *NEEDED]))
    with pytest.raises(UserError, match="no recipe other"):
        bench_recipe.arms_of(bench_recipe.parse(["other", *NEEDED]))


def run(seconds, cpu, top1=91.0):
    epochs = 3 if seconds is not None else None
    return {"seconds": seconds, "cpu_s": cpu, "best_top1": top1, "epochs": epochs}


def test_ratios_are_of_the_seeds_that_reached_the_target_with_both():
    found = {
        "slow": {0: run(100, 200), 1: run(110, 220), 2: run(None, 300, 89.0)},
        "fast": {0: run(50, 100), 1: run(44, 88), 2: run(40, 80)},
    }
    head, rows = bench_recipe.table(found)
    slow, fast = (dict(zip(head, row, strict=True)) for row in rows)
    assert (slow["reached"], fast["reached"]) == ("2 of 3", "3 of 3")
    assert slow["seconds to target"] == "105 (100 to 110)"
    assert slow["best top-1, %"] == "91.00 (89.00 to 91.00)"
    assert (slow["ratio of time"], fast["ratio of time"]) == (
        "1.00 (1.00 to 1.00)",
        "2.25 (2.00 to 2.50)",
    )
    never = bench_recipe.table({"a": {0: run(1, 1)}, "b": {0: run(None, 9)}})[1][1]
    assert never[1:3] == ["0 of 1", "-"] and never[-1] == "-"


@pytest.mark.long
def test_two_recipes_beside_each_other(folder, tmp_path):
    """Until the target is reached; what was trained before is not trained again."""
    common = "-a tiny_plain --image-size 32 -b 10 -j 0 --epochs 2 --lr 0.05"
    line = ("a=--wd 0", "b=--wd 1e-3", "--options", common, "--data", folder, "--seeds", "1")
    line += ("--target-top1", "1", "--threads", "1", "--out", tmp_path / "runs")
    results = ("--results", tmp_path / "R.md")
    done = python("scripts/bench_recipe.py", *line, *results, PYTHONPATH=STAND_IN)
    assert done.code == 0, done.err
    assert done.err.count("reached after ") == 2
    text = (tmp_path / "R.md").read_text()
    assert "## Time to accuracy" in text and "| b | 1 of 1 |" in text
    files = sorted((tmp_path / "runs").glob("*/events*"))
    assert len(files) == 2
    again = python("scripts/bench_recipe.py", *line, *results, PYTHONPATH=STAND_IN)
    assert again.code == 0, again.err
    assert sorted((tmp_path / "runs").glob("*/events*")) == files
    assert (tmp_path / "R.md").read_text() == text
