"""scripts/bench_step.py: its cases, its table, and small runs of its real parts."""

import json
from pathlib import Path

import bench_step
import pytest
import torch
from conftest import ROOT, python
from running import STAND_IN, Running, eventually, wait_for_group

from utils.errors import UserError
from utils.launch.world import World
from utils.train import dummy

SMALL = ("-a", "tiny_full", "-b", "4", "--image-size", "32")


def options(*line):
    return bench_step.parse([*SMALL, *line])


def test_a_case_is_a_loop_and_what_is_added(capsys):
    for case, loop, more, processes in (
        ("ddp+bf16+compile+comm=int8+x2", "ddp", "--amp bf16 --compile default --comm int8", 2),
        ("nd+compile=max-autotune", "nd", "--compile max-autotune", 0),
        ("O2", "O2", "--opt-level O2", 1),
    ):
        wanted = loop, [*SMALL, *more.split()], processes
        assert bench_step.options_of(case, options()) == wanted
    for case, said in (
        ("nd,", "'' is no case"),
        ("nd+", "cannot be combined with ''"),
        ("O2+fp16", "cannot be combined with 'fp16'"),
    ):
        assert bench_step.main(["--cases", case]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


def test_a_case_that_fails_or_takes_too_long_is_ended_with_what_it_has_started(tmp_path):
    with pytest.raises(UserError, match=r"^sh -c .* failed: why$"):
        bench_step.run(["sh", "-c", "echo more >&2; echo why >&2; exit 3"], options(), tmp_path)
    words = ["sh", "-c", "echo $$ > group; sleep 600 & wait"]
    with pytest.raises(UserError, match="longer than --limit 5 seconds: a smaller -b"):
        bench_step.run(words, options("--limit", "5"), tmp_path)
    assert not wait_for_group(int((tmp_path / "group").read_text()))


def test_a_case_ends_with_a_bench_that_is_killed(tmp_path):
    words = ["sh", "-c", f"cd {tmp_path}; echo $$ > new; mv new group; exec sleep 600"]
    code = f"from bench import commands; commands.run([{words}], 60, '')"
    with Running("-c", code, PYTHONPATH=str(ROOT / "scripts")) as bench:
        assert eventually((tmp_path / "group").exists)
        bench.process.kill()
        assert not wait_for_group(int((tmp_path / "group").read_text()))


def test_ratios_are_medians_over_the_rounds_to_the_first_case():
    """Of images/s on a GPU, of CPU time without; both rise with speed."""

    def rounds(*cpu):
        return [{"images_per_s": 3000 / ms, "cpu_ms_per_image": ms} for ms in cpu]

    found = {"examples": rounds(100, 200, 110), "nd": rounds(80, 160, 100)}
    found["nd"][1]["images_per_s"] = 30.0  # twice that of the first case
    found["nd"][2]["images_per_s"] = 60.0
    for cuda, ratio in ((False, "1.25"), (True, "2.00")):
        head, rows = bench_step.table(found, cuda)
        assert [row[head.index("ratio")] for row in rows] == ["1.00", ratio]
        assert rows[1][head.index("CPU ms per image")] == "100.0"


def test_the_steps_of_this_suite_and_of_the_usual_loops(tmp_path):
    file = tmp_path / "found.json"
    line = ("--rounds", "1", "--threads", "1", "--cases", "examples,nd+off", "--json", file)
    done = python("scripts/bench_step.py", *SMALL, *line, PYTHONPATH=STAND_IN)
    assert done.code == 0, done.err
    found = json.loads(file.read_text())
    assert found.keys() == {"examples", "nd+off"}
    for (figures,) in found.values():
        keys = ("images_per_s", "cpu_ms_per_image", "peak_memory_bytes")
        assert all(figures[key] > 0 for key in keys)
        assert figures["images_per_s"] * figures["ms_per_step"] == pytest.approx(4000)


def test_a_step_is_timed_without_those_that_warm_up(monkeypatch):
    """By clocks that stand in: the first two steps take 100 s, each of the others 2 s, and half
    of that in CPU time."""
    now = [0.0]

    def step():
        now.append(now[-1] + (100 if len(now) <= 2 else 2))

    monkeypatch.setattr(dummy.time, "perf_counter", lambda: now[-1])
    monkeypatch.setattr(dummy.time, "process_time", lambda: now[-1] / 2)
    monkeypatch.setattr(dummy, "_sent_bytes", lambda: 3e6 * len(now))
    found = dummy.time_steps(step, World(torch.device("cpu")), 2, 4)
    assert len(now) == 1 + 2 + 4
    assert found.pop("peak_memory_bytes") > 1e6
    assert found == {"ms_per_step": 2000, "cpu_ms_per_step": 1000, "network_mb_per_step": 3}


def test_from_files_what_few_images_cost_is_taken_off(monkeypatch, folder, tmp_path):
    """A peer that takes 2 s and 0.1 s per image, and the first time much longer, by a clock that
    stands in; of CPU time half of that."""
    warm = []

    def run(words, args, place):
        assert words[0] == "train"
        seconds = 2 + 0.1 * len(list((Path(words[1]) / "train").rglob("*.JPEG")))
        seconds += 0 if warm else 1000
        warm.append(words)
        return "", seconds, seconds / 2

    monkeypatch.setattr(bench_step, "run", run)
    args = options("--data", str(folder), "--few", "8", "--more", "100")
    folders = bench_step.few_and_more(args, tmp_path)
    found = bench_step.difference("slow", {"slow": "train {data}"}, args, folders)
    wanted = {"cpu_ms_per_image": 50, "images_per_s": 10, "ms_per_step": 400}
    assert found == pytest.approx(wanted)
