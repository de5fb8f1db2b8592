"""The benchmarks measure what they claim to, not how fast anything is; gpu_report continues."""

import importlib.util
import json
import os
import re
import runpy
import shlex
import sys
import time
import weakref
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import bench_input
import bench_network
import bench_step
import gpu_report
import pytest
import torch
from batches import noise_index
from bench import photographs, steps
from conftest import ROOT, python
from gpu_report import Part
from joined import Job, command, run_jobs
from nodes import need
from PIL import Image
from preparing import put, tar_bytes
from running import wait_for_group

from utils import loop
from utils.start import launch
from utils.start.errors import UserError
from utils.start.world import World

SMALL = ("-a", "tiny_full", "-b", "4", "--image-size", "32")


def cells(text):
    """The rows of a Markdown table, without its rule."""
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows]


# ---- bench_step.py


def options(*line):
    return bench_step.parse([*SMALL, *line])


def test_a_case_is_a_loop_and_additions():
    for case, words in (
        ("ddp+bf16+comm=int8+x2", "nproc_per_node=2 STEP_ddp {} --amp bf16 --comm=int8 --lr 0.001"),
        ("nd+compile", "python STEP_nd {} --compile default --lr 0.001"),
        ("O2", "nproc_per_node=1 STEP_ddp_apex {} --opt-level O2 --lr 0.001"),
        ("examples+channels_last", "python peer_loops.py examples {} --channels-last"),
    ):
        line = " ".join(bench_step.command(case, options(), Path("out")))
        line = re.sub(r"\S+/(imagenet_)?|.* --(?=nproc)| --output.*", "", line)
        assert re.sub(r"^python\S*", "python", line) == words.format(" ".join(SMALL)).replace(
            "STEP", "time_step.py imagenet"
        )
    for case, message in (
        ("nd,", "'' is not one of nd, dp"),
        ("nd+", "cannot be combined with ''"),
        ("nd+x2", "cannot be combined with 'x2'"),
    ):
        with pytest.raises(UserError, match=message):
            bench_step.measure(options("--cases", case))


def test_a_case_that_fails_or_takes_too_long_is_ended_with_its_children(tmp_path):
    with pytest.raises(UserError, match=r"^sh -c .* failed with exit code 3: more / why$"):
        bench_step.run(["sh", "-c", "echo more >&2; echo why >&2; exit 3"], options(), tmp_path)
    with pytest.raises(UserError, match=r"failed with exit code 4: printed$"):
        bench_step.run(["sh", "-c", "echo printed; exit 4"], options(), tmp_path)
    words = ["sh", "-c", "echo $$ > group; sleep 600 & wait"]
    with pytest.raises(UserError, match="longer than 2 s: a smaller -b"):
        bench_step.run(words, options("--limit", "2"), tmp_path)
    assert not wait_for_group(int((tmp_path / "group").read_text()))
    with pytest.raises(UserError, match="no case could be measured") as error:
        words = ["sh", "-c", "exit 75"]
        bench_step.rounds.measure([""], 1, lambda _: bench_step.run(words, options(), tmp_path))
    assert error.value.code == 75, "a machine that is too busy"


@pytest.mark.parametrize(("cuda", "ratio"), [(False, "1.25"), (True, "2.00")])
def test_ratios_are_medians_over_the_rounds_to_the_first_case(monkeypatch, cuda, ratio):
    """Of images/s on a GPU, of CPU time without; both rise with speed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "X")
    results = {
        case: [{"images_per_s": rate, "cpu_ms_per_image": ms} for rate, ms in rounds]
        for case, rounds in {
            "examples": [(30, 100), (15, 200), (27, 110)],
            "nd": [(37, 80), (30, 160), (60, 100)],
        }.items()
    }
    results["nd"][1]["host_waits"] = [
        f"/root/utils/{place}" for place in ("loop.py:7", "epoch.py:5")
    ]
    page = bench_step.page(results, options())
    assert page.endswith(
        " In a step of nd the host waits for the GPU: utils/epoch.py:5, utils/loop.py:7."
    )
    head, *rows = cells(page)
    rows = [dict(zip(head, row, strict=True)) for row in rows]
    assert [row["ratio"] for row in rows] == ["1.00", ratio]
    assert (rows[1]["CPU ms per image"], rows[1]["host ms"]) == ("100.0", "-")


def test_the_steps_of_this_suite_in_two_processes(tmp_path):
    line = ("imagenet_ddp", *SMALL, "--accum-steps", "2")
    run_jobs([Job("scripts/bench/time_step", line)], tmp_path)
    figures = json.loads((tmp_path / "job0_rank0").read_text().splitlines()[-1])
    rate = figures["images_per_s"] * figures["ms_per_step"]
    assert rate == pytest.approx(1000 * 2 * 2 * 4)
    assert all(figures[part] > 0 for part in ("compute_s", "communication_s", "cpu_ms_per_step"))


def test_without_torchrun_the_processes_time_their_step_too(monkeypatch):
    """Those that multiprocessing starts, as on the nodes of bench_network.py: they trained."""
    monkeypatch.setattr(launch, "prepare", lambda _: None)
    monkeypatch.setattr(loop, "find_batch", None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    found = runpy.run_path(f"{ROOT}/scripts/bench/time_step.py", run_name="__mp_main__")
    assert loop.find_batch is found["time_step"]


def test_cpu_time_per_image_is_over_all_images_of_a_processs_step(monkeypatch):
    """Each of two processes takes two micro-batches."""
    figures = {"cpu_ms_per_step": 80, "peak_memory_bytes": 0, "global_batch": 16, "world_size": 2}
    monkeypatch.setattr(bench_step, "run", lambda *_: json.dumps(figures))
    line = options("--rounds", "1", "--cases", "ddp+x2+accum-steps=2")
    (one,) = bench_step.measure(line)["ddp+x2+accum-steps=2"]
    assert one["cpu_ms_per_image"] == 10


def test_the_steps_of_a_usual_loop():
    line = ("--rounds", "1", "--threads", "1", "--cases", "examples")
    done = python("scripts/bench_step.py", *SMALL, *line)
    assert done.code == 0, done.err
    head, row = cells(done.out)
    row = dict(zip(head, row, strict=True))
    assert row["case"] == "examples"
    assert float(row["CPU ms per image"]) > 0 and float(row["GiB"]) > 0
    rate = float(row["images/s"]) * float(row["ms per step"])
    assert rate == pytest.approx(4000, rel=0.1)


@pytest.mark.parametrize("kind", ["examples", "torchvision"])
def test_a_usual_loop_trains_on_fewer_classes_than_five(folder, kind):
    done = command("scripts/bench/peer_loops", kind, *SMALL, "-j", 0, "--data", folder)
    assert done.code == 0 and "top-5 100.0000" in done.out, done


def test_a_step_is_timed_without_those_that_warm_up(monkeypatch):
    """By simulated clocks: the first two steps take 100 s, each of the others 2 s, and half of that
    in CPU time. Each sends 3 MB."""
    rows = [
        f"{name}: {' '.join(f'{n}{i}' for i in range(16))}"
        for n, name in ((5, "    lo"), (7, "  eth0"), (9, " eth10"))
    ]
    with monkeypatch.context() as patch:  # the columns of received and of sent bytes: 0 and 8
        patch.setattr(Path, "read_text", lambda _: "\n".join(["", "", *rows]))
        assert steps.sent_bytes() == 78 + 98, "not those of loopback"
    now = [0.0]

    def step():
        now.append(now[-1] + (100 if len(now) <= 2 else 2))

    monkeypatch.setattr(time, "perf_counter", lambda: now[-1])
    monkeypatch.setattr(time, "process_time", lambda: now[-1] / 2)
    monkeypatch.setattr(steps, "sent_bytes", lambda: 3_000_000 * len(now))
    figures = steps.time_steps(step, World(torch.device("cpu")), 2, 4)
    assert len(now) == 1 + 2 + 4
    assert figures.pop("peak_memory_bytes") > 1e6
    expected = {"ms_per_step": 2000, "cpu_ms_per_step": 1000, "network_mb_per_step": 3.0}
    assert figures == expected


@pytest.mark.parametrize(
    ("case", "few", "ms"),
    [("slow", "8", 400), ("slow", "1", 400), ("ddp+x2+accum-steps=3", "8", 2400)],
)
def test_from_files_the_cost_of_few_images_is_subtracted(
    monkeypatch, folder, tmp_path, case, few, ms
):
    """By simulated clocks, a peer takes 2 s and 0.1 s per image, and the first time much longer; of
    CPU time half of that. Each class has an image, also of fewer images than classes."""
    clock = [0.0]

    def run(words, args, place):
        if case == "slow":
            assert words[:2] == ["python", str(tmp_path / "peer/train.py")]  # it runs elsewhere
        seconds = 2 + 0.1 * len(list((Path(words[-1]) / "train").rglob("*.JPEG")))
        clock.append(clock[-1] + seconds + (1000 if len(clock) == 1 else 0))

    monkeypatch.setattr(bench_step, "run", run)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[-1])
    monkeypatch.setattr(bench_step.rounds, "cpu_seconds", lambda: clock[-1] / 2)
    args = options("--data", str(folder), "--few", few, "--more", "100")
    folders = bench_step.link_images(args, tmp_path)
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer/train.py").touch()
    monkeypatch.chdir(tmp_path if few == "8" else tmp_path / "peer")
    peers = {"slow": f"python {'peer/' if few == '8' else ''}train.py {{data}}"}
    figures = bench_step.difference(case, peers, args, folders, tmp_path / "runs")
    expected = {"cpu_ms_per_image": 50, "images_per_s": 10, "ms_per_step": ms}
    assert figures == pytest.approx(expected)


# ---- bench_input.py, bench_network.py


def test_ratios_are_of_cpu_time_to_the_first_row_and_round_by_round(monkeypatch, tmp_path):
    """The second pipeline is three times as fast; a round that warms up is not counted."""
    monkeypatch.setenv("LATENCY_US", "0")
    source, calls = noise_index(tmp_path, images=3), []

    def time_it(pipeline, batches, workers):
        calls.append((pipeline, len(batches)))
        images = 64 * len(batches)
        slow = 10 if len(calls) == 6 else 100 if len(calls) <= 2 else 1
        return slow * images / pipeline, 2 * images / pipeline

    monkeypatch.setattr(bench_input, "time_it", time_it)
    args = Namespace(rounds=3, batches=4, workers=1, latency=None)
    table = bench_input.compare({"one|x": (100, source, 0), "other|x": (300, source, 0)}, args)
    # After the first, all rounds take about as long.
    assert calls[:2] == [(100, 4), (300, 4)]
    assert calls[2:] == [(100, 4), (300, 12), (300, 12), (100, 4), (100, 4), (300, 12)]
    assert cells(table)[1:] == [
        ["one", "x", "50", "10.00", "100", "1.00"],
        ["other", "x", "150", "3.33", "300", "3.00"],
    ]
    # On slow disks each form is compared with the usual loop at the same delay.
    args.latency, speeds = [0, 10], {"this suite": (100, 40), "pytorch/examples": (50, 10)}
    rows = {
        f"{name}, folder|{ms} ms": (speed, source, ms)
        for name, both in speeds.items()
        for ms, speed in zip(args.latency, both, strict=True)
    }
    _, *rows = cells(bench_input.compare(rows, args))
    ratios = [["1.00", "2.00"], ["0.40", "4.00"], ["0.50", "1.00"], ["0.10", "1.00"]]
    assert [row[-2:] for row in rows] == ratios


def test_photographs_are_not_in_memory_together(monkeypatch, tmp_path):
    """One while the next is opened."""
    paths = [tmp_path / f"{name}.jpg" for name in "abcd"]
    for path in paths:
        Image.new("RGB", (800, 600)).save(path)
    convert, alive = Image.Image.convert, []

    def watched(image, *mode):
        alive.append(weakref.ref(made := convert(image, *mode)))
        assert sum(one() is not None for one in alive) <= 2
        return made

    monkeypatch.setattr(Image.Image, "convert", watched)
    made = photographs.make(tmp_path, paths, images=12)
    assert len(alive) == len(paths)
    names = sorted(str(path.relative_to(made)) for path in made.rglob("*.JPEG"))
    assert names == sorted(f"train/class_{i % 10}/{i:05}.JPEG" for i in range(12))


def test_tar_files_are_refused_before_they_are_copied(monkeypatch, tmp_path):
    """Other pipelines read files by their names."""
    put(tmp_path, {"train.tar": tar_bytes([("train/a/1.jpg", b"x")])})
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path), "--cache", str(tmp_path / "cache")])
    with pytest.raises(UserError, match=f"{tmp_path}/train holds tar files, .* class folders"):
        bench_input.main()
    assert [path.name for path in tmp_path.iterdir()] == ["train.tar"]


@pytest.mark.parametrize(("more", "command"), [([], "shrink"), (["--latency", "1"], "shards")])
def test_the_size_of_a_copy_is_said_before_it_is_made(monkeypatch, tmp_path, capsys, more, command):
    for name in "12":
        put(tmp_path, {f"train/a/{name}.jpg": b""})
        os.truncate(tmp_path / f"train/a/{name}.jpg", 1_250_000_000)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path), "--cache", str(tmp_path / "c"), *more])
    monkeypatch.setenv(bench_input.SLOW_PATHS, "")
    monkeypatch.setattr(bench_input.commands, "run", Mock(side_effect=UserError("no space")))
    with pytest.raises(UserError, match="no space"):
        bench_input.main()
    said = f"copying {tmp_path} (2.5 GB in train/) to {tmp_path}/c/{command}_"
    assert said in capsys.readouterr().out


@pytest.mark.long
def test_a_slow_disk_delays_each_open_and_read(folder, tmp_path):
    """In a folder an image takes both; the sleeps are a lower limit on any machine."""
    line = ("--latency", "0,10", "--rounds", "1", "--batches", "1", "-j", "0")
    done = python("scripts/bench_input.py", folder, "--cache", tmp_path / "cache", *line)
    assert done.code == 0, done.err
    rates = {(row[0], row[1]): float(row[2]) for row in cells(done.out)[1:]}
    names = ("this suite, folder", "this suite, tar files", "pytorch/examples, folder")
    assert rates.keys() == {(name, delay) for name in names for delay in ("0 ms", "10 ms")}
    assert max(rates[names[0], "10 ms"], rates[names[2], "10 ms"]) < 1000 / 20


@pytest.mark.parametrize(
    ("rank", "master", "url"),
    [("0", "10.0.0.1", "tcp://10.0.0.1:29555"), ("1", "fd00::1", "tcp://[fd00::1]:29555")],
)
def test_methods_are_compared_with_one_node_and_with_the_first_method(
    monkeypatch, capsys, rank, master, url
):
    took = {"alone": [90, 80, 100], "fp32": [180, 200, 200], "int8": [90, 100, 100]}
    sent = {"alone": [0] * 3, "fp32": [50, 52, 51], "int8": [13] * 3}

    def run(commands, seconds, advice, **how):
        ((_, script, mode, *words),) = commands
        given = dict(zip(words[::2], words[1::2], strict=False))
        assert (Path(script).name, mode) == ("time_step.py", "imagenet_ddp")
        assert given["--node-rank"] == rank
        assert (given["--dist-url"], given["-b"]) == (url, "8")
        method = given["--comm"] if given["--nodes"] == "2" else "alone"
        ms, mb = took[method].pop(0), sent[method].pop(0)
        figures = {"ms_per_step": ms, "images_per_s": 1000 / ms, "network_mb_per_step": mb}
        return ["a line\n" + json.dumps(figures)]

    monkeypatch.setattr(bench_network.commands, "run", run)
    line = ["--methods", "fp32,int8", "--master", master, "--rank", rank, "--", "-b", "8"]
    assert bench_network.main(line) == 0
    out = capsys.readouterr().out
    if rank == "1":
        assert (out, took) == ("", {"alone": [90, 80, 100], "fp32": [], "int8": []})
        return
    assert cells(out)[1:] == [
        ["2", "fp32", "51.0", "200", "5", "50%", "1.00"],
        ["2", "int8", "13.0", "100", "10", "100%", "2.00"],
    ]
    assert "2 nodes: use --comm int8, 100 ms per step; fp32: 200 ms, so int8 saves 50%" in out


def test_links_of_nodes_that_sleep_are_slower_by_both_factors(monkeypatch):
    limits, figures = [], {name: [{"ms_per_step": 90}] for name in ("alone", "fp16")}
    spaces = bench_network.namespaces
    monkeypatch.setattr(spaces, "network", lambda n: nullcontext([Namespace(enter=())] * n))
    monkeypatch.setattr(spaces, "limit", lambda _, rate, latency: limits.append(rate))
    monkeypatch.setattr(bench_network.commands, "run", lambda *_, **__: [json.dumps(figures)])
    line = "--sleep vgg19 --methods fp16 --gbit 8 --slow-down 16 --shrink 4"
    assert bench_network.main(line.split()) == 0
    assert limits == ["125000000bit"] * 2


def test_a_more_exact_method_is_worth_a_little_time():
    times = {"fp16": [{"ms_per_step": 100}], "fp32": [{"ms_per_step": 104}]}
    said = bench_network.recommend(times)
    assert said == "use --comm fp32, 104 ms per step; fp16: 100 ms"


@pytest.mark.long
def test_sleeping_nodes_send_what_the_model_would(capsys):
    """A ring all-reduce of ResNet-50's gradients sends 102.2 MB on each of two nodes."""
    need()
    line = "--sleep resnet50 --methods fp32,fp16 --rounds 1 --slow-down 2 --shrink 32"
    assert bench_network.main(line.split()) == 0
    sent = {row[2]: float(row[3]) for row in cells(capsys.readouterr().out)[1:]}
    assert sent == {"fp32": pytest.approx(102.2, rel=0.02), "fp16": pytest.approx(51.1, rel=0.02)}


# ---- gpu_report.sh


def test_the_parts_after_one_that_fails_are_run(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    out = tmp_path / "my out"
    files = out / gpu_report.FILES
    typed = shlex.join(["python", "-c", f"print('{files}')"])
    own = out / "made/own"  # a user's, in a folder of the name that a part makes
    own.mkdir(parents=True)
    late = tmp_path / "late.py"  # makes half of it
    late.write_text("import os, sys, time; os.mkdir(sys.argv[1]); time.sleep(1000)")
    parts = {
        Part("One", "-c print('{out}')", 100): (f"`{re.escape(typed)}` \\(", f"\n{files}\n"),
        Part("Two", "-c exit('no_kernel')", 100): (r"\*\*Failed:", "exit code 1: no_kernel"),
        Part("Three", f"{late} {{out}}/made", 6, makes="made"): ("Left out: ", "longer than 6 s"),
        Part("Four", "-c print(1)", 100, needs="made"): ("Left out: ", "made is missing"),
        Part("Five", "-c print(1)", 100, gpus=2): ("Left out: it needs 2 GPUs", "machine has 0"),
        Part("Six", "-c exit(75)", 100): ("Left out: ", "exit code 75"),
        Part("Seven", "-m pytest", 100): ("Left out: ", "pytest is not installed"),
    }

    def report(*options):
        """The exit code and the sections of a report on the CPU."""
        words = ["gpu_report.py", "--device", "cpu", "--out", str(out), *options]
        monkeypatch.setattr(sys, "argv", words)
        code = gpu_report.main()
        return code, (out / "gpu_report.md").read_text().split("\n## ")[1:]

    monkeypatch.setattr(gpu_report, "PARTS", list(parts))
    code, sections = report()
    assert code == 1
    for section, (part, (begin, text)) in zip(sections, parts.items(), strict=True):
        assert re.match(f"{part.title}\n\n{begin}", section) and text in section
    monkeypatch.setattr(gpu_report, "PARTS", list(parts)[:1])
    code, (section,) = report("--minutes", "0.01")
    assert code == 0
    assert "Left out: no time was left" in section
    assert own.is_dir()


def test_a_part_that_is_too_slow_gets_less_work(tmp_path):
    script, names = tmp_path / "part.py", {"model": "", "gpus": "1", "out": str(tmp_path)}
    script.write_text("import sys, time\ntime.sleep(0 if sys.argv[1:] else 1000)\nprint('well')\n")
    part = Part("Slow", str(script), 6, few="--few")
    text = gpu_report.section(part, time.monotonic() + 60, names, small=False)
    assert text.startswith(f"Left out: python {script} takes longer than 6 s.")
    assert f"`python {script} --few` (" in text and text.endswith("\nwell\n```")
