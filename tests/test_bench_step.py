"""scripts/bench_step.py: its cases, its table, and small runs of its real parts."""

import json
from pathlib import Path

import bench_step
import pytest
from conftest import python
from running import STAND_IN

from utils.errors import UserError

SMALL = ("-a", "tiny_full", "-b", "4", "--image-size", "32")


def options(*line):
    return bench_step.parse([*SMALL, *line])


def test_a_case_is_a_loop_and_what_is_added():
    args = options()
    assert bench_step.options_of("ddp+bf16+compile+x2", args) == (
        "ddp",
        [*SMALL, "--amp", "bf16", "--compile", "default"],
        2,
    )
    assert bench_step.options_of("O2", args)[1:] == ([*SMALL, "--opt-level", "O2"], 1)
    for case, word in (("pt", "pt"), ("nd+x2", "x2"), ("examples+compile", "compile")):
        with pytest.raises(UserError, match=word):
            bench_step.options_of(case, args)


def test_ratios_are_medians_over_the_rounds_to_the_first_case():
    def rounds(*cpu):
        return [{"images_per_s": 1000 / ms, "ms": ms, "cpu_ms_per_image": ms} for ms in cpu]

    found = {"examples": rounds(100, 200, 110), "nd": rounds(80, 160, 100)}
    head, rows = bench_step.table(found, cuda=False)
    assert [row[head.index("ratio")] for row in rows] == ["1.00", "1.25"]
    assert rows[1][head.index("CPU ms per image")] == "100.0"
    assert rows[1][head.index("GiB")] == "-"


def test_peers_go_with_data():
    with pytest.raises(UserError, match="--data"):
        bench_step.measure(options("--peer", "a=b"))


def test_a_scripts_own_loop_is_timed():
    line = ("imagenet_nd.py", "--steps", "6", "--warm-up", "1", "--", *SMALL)
    done = python("scripts/bench/step_case.py", *line, PYTHONPATH=STAND_IN)
    assert done.code == 0, done.err
    figures = json.loads(done.out.splitlines()[-1])
    assert all(figures[key] > 0 for key in ("images_per_s", "ms", "cpu_ms", "host_ms"))


@pytest.mark.long
def test_the_steps_of_this_suite_and_of_the_usual_loops(tmp_path):
    file = tmp_path / "found.json"
    steps = ("--steps", "6", "--warm-up", "1", "--rounds", "1", "--threads", "1")
    line = (*SMALL, *steps, "--cases", "examples,torchvision,nd+off,ddp+x2,O2", "--json", file)
    done = python("scripts/bench_step.py", *line, PYTHONPATH=STAND_IN)
    assert done.code == 0, done.err
    assert "examples" in done.out
    found = json.loads(file.read_text())["found"]
    assert found.keys() == {"examples", "torchvision", "nd+off", "ddp+x2", "O2"}


def test_from_files_what_few_images_cost_is_taken_off(monkeypatch, folder, tmp_path):
    """A peer that takes 2 s and 0.1 s per image, by a clock that stands in."""
    spent = [0.0]

    def run(command, args, place):
        assert command[0] == "train"
        seconds = 2 + 0.1 * len(list((Path(command[1]) / "train").rglob("*.JPEG")))
        spent[0] += seconds
        return "", seconds, spent[0]

    monkeypatch.setattr(bench_step, "run", run)
    monkeypatch.setattr(bench_step, "_children_cpu", lambda: spent[0])
    args = options("--data", str(folder), "--few", "8", "--more", "100")
    folders = bench_step.few_and_more(args, tmp_path)
    found = bench_step.difference("slow", {"slow": "train {data}"}, args, folders)
    assert found["cpu_ms_per_image"] == pytest.approx(100)
    assert found["images_per_s"] == pytest.approx(10)


def test_an_unknown_case_is_a_sentence():
    done = python("scripts/bench_step.py", "--cases", "nothing")
    assert done.code == 2
    assert "nothing is no case" in done.sentence
