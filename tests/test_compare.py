"""scripts/compare_runs.py: what it reads from event files of 2020, and its table."""

import csv
import io
import json
import math
import re
import shlex

import compare_runs
import pytest
from compare import page, pictures
from compare import table as tables
from compare.comparison import origin
from event_files import BEGAN, epochs_of, folder_name, note, table, write

from utils.run.tensorboard import cut_off
from utils.start.errors import UserError

TWO_RUNS_AND_ANOTHER = """
other cannot be compared with one: it has another model (vgg19, not resnet50), image size \
(176, not 224), data (8 images, not 9 images) and training image sizes (128:160, not 224).
Accuracy fell with speed: after epoch 4, top-1 is 70.00 % (one) and 60.50 % (two), more than \
seeds explain, so compare the times to the same accuracy.
two trained 1.90 times as many images per second as one (95 % throughput efficiency).
Both reached 60 % top-1: after 2 h (two) and 3 h (one).
Beware: the runs differ in length (4 to 5 epochs); the global batches differ (64 to 130), which \
changes accuracy; the runs differ in mode, precision, --comm, GPU, CPU and torch.

                                        two        one         other
--- set-up
nodes                                     4          2             -
GPUs                                      2          1             1
arch                               resnet50   resnet50         vgg19
mode                                    ddp         nd            nd
recipe                            classic90  classic90     classic90
training image sizes                      -          -       128:160
learning rate (highest)                 0.1        0.1           0.1
batch per GPU                            65         64            64
global batch                            130         64            64
steps per epoch                           5          5             5
state                          not finished   finished  not finished
--- speed
images/s                               1900       1000          2000
images/s per GPU                        950       1000          2000
speed-up to one                        1.90       1.00             -
throughput efficiency                  95 %      100 %             -
  top-1 after epoch 4, %              60.50      70.00         61.00
  time to top-1 of 60 %                 2 h        3 h           5 h
time per step, ms                     68.42         64         85.33
--- time
time per epoch                       30 min        1 h        1.25 h
epochs finished                           5          4             4
epochs in 2.5 h                           5          2             2
total time                            2.5 h        4 h           5 h
epochs to top-1 of 60 %                   4          3             4
cost to top-1 of 60 %                     4          3             -
cost of the whole run                     5        1.5             -
GPU-hours, all starts                     -          6             -
energy, kWh                               -        1.2             -
model FLOPs utilisation                   -       25 %             -
--- accuracy
best val top-1, %                     60.50      70.00         61.00
  in epoch                                4          4             4
  after                                 2 h        4 h           5 h
  of averaged weights                     -      65.00             -
best val top-5, %                     80.25      85.00         80.50
  in epoch                                4          4             4
  after                                 2 h        4 h           5 h
best val loss                        2.0750     1.6000        2.0500
  in epoch                                4          4             4
  after                                 2 h        4 h           5 h
  of averaged weights                     -     1.8000             -
test top-1, %                             -      48.12             -
test top-5, %                             -      80.00             -
test loss                                 -     2.5000             -
--- where the time goes
waiting for data                          -       25 %             -
share of step: data                       -       20 %             -
share of step: compute                    -       60 %             -
share of step: communication              -       20 %             -
sent per step, MB per process         44.71          -             -
GPU utilisation, %                        -         91             -
GPU power, W                              -        100             -
CPU utilisation, %                        -         50             -
--- memory
GPU memory, GiB                           -         12             -
parameters, MiB per process               -          8             -
gradients, MiB per process                -          9             -
optimizer, MiB per process                -         10             -
activations, MiB per process              -         11             -

two: two
one: one
other: other

two differs from its base one in batch per GPU (65, not 64), mode (ddp, not nd), precision \
(fp16, not fp32), --comm (int8, not fp32), GPU (A100, not T4), CPU (fast, not slow) and \
torch (2.5, not 2.4): the efficiency is not that of scaling alone
NOT COMPARABLE: other differs from one in model (vgg19, not resnet50), image size (176, not \
224), data (8 images, not 9 images) and training image sizes (128:160, not 224); it has no \
speed-up
speed-up and throughput efficiency: images/s relative to one, at different batches per GPU"""
ONE = {
    "arch": "resnet50", "mode": "nd", "recipe": "classic90", "gpus": 1, "batch_per_gpu": 64,
    "global_batch": 64, "steps_per_epoch": 5, "image_size": 224, "data_id": "9 images",
    "train_sizes": "224", "precision": "fp32", "comm": "fp32", "gpu": "T4", "cpu": "slow",
    "torch": "2.4",
}  # fmt: skip
TWO = ONE | {
    "mode": "ddp", "nodes": 4, "gpus": 2, "batch_per_gpu": 65, "global_batch": 130, "comm": "int8",
    "precision": "fp16", "gpu": "A100", "cpu": "fast", "torch": "2.5", "train_sizes": "",
    "sent_mb_per_step": 44.71,
}  # fmt: skip
OTHER = ONE | {"arch": "vgg19", "image_size": 176, "data_id": "8 images"}
OTHER |= {"train_sizes": "128:160", "progressive": "128:160"}
PARTS = {
    "Time/data": 0.1, "Time/compute": 0.3, "Time/communication": 0.1, "IO/wait_share": 0.25,
    "Memory/gradients_mb": 9, "Memory/optimizer_mb": 10, "Memory/activations_mb": 11,
    "CPU/utilisation": 50,
}  # fmt: skip
OF_PROCESSES = {
    "before December 2026": {
        "GPU/utilisation_rank0": 90, "GPU/utilisation_rank10": 92, "GPU/memory_gb_rank0": 10,
        "GPU/memory_gb_rank10": 12, "GPU/power_w_rank0": 99, "GPU/power_w_rank10": 101,
        "Memory/parameters_mb": 8,
    },
    "now": {
        "GPU/utilisation_min": 90, "GPU/utilisation_mean": 91, "GPU/utilisation_max": 93,
        "GPU/memory_gb_min": 10, "GPU/memory_gb_mean": 11.5, "GPU/memory_gb_max": 12,
        "GPU/power_w_min": 90, "GPU/power_w_mean": 100, "GPU/power_w_max": 101,
        "Memory/parameters_mb_min": 6, "Memory/parameters_mb_mean": 7,
        "Memory/parameters_mb_max": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("tags", OF_PROCESSES)
def test_the_whole_table_and_its_notes(tmp_path, tags):
    """By default the time is that of the shortest run, and the target what every run reaches, also
    with averaged weights. What runs cost is known if their nodes are. --train-images is for runs
    that have not recorded their steps."""
    one = epochs_of(1000, 64, (10, 30, 50, 70))
    for x, top1 in enumerate((5, 55, 65, 60), 1):
        for tag, value in (PARTS | OF_PROCESSES[tags]).items():
            # In the second epoch most memory is used.
            one[x][tag] = value / 2 if "memory" in tag.lower() and x != 2 else value
        one[x] |= {"Top1/ema": top1, "Loss/ema": 1.8}
    one[3] |= {"Top1/test": 47}  # before the run was continued
    one[4] |= {"Top1/test": 48.123, "Top5/test": 80, "Loss/test": 2.5}
    write(tmp_path / "one", one, seconds=3600, options=ONE | {"nodes": 2}, success=True)
    two = epochs_of(1900, 130, (10, 50, 40, 60.5, 60.5))
    write(tmp_path / "two", two, seconds=1800, options=TWO)
    used = {"node_hours": 3.0, "gpu_hours": 6.0, "energy_kwh": 1.2, "mfu": 0.25, "arch": "a"}
    (tmp_path / "one/summary.json").write_text(json.dumps(used))
    every_2 = {2 * x: values for x, values in epochs_of(3000, 128, (10, 61)).items()}
    write(tmp_path / "other", every_2, seconds=9000, options=OTHER)
    (tmp_path / "two/summary.json").write_text("{")
    (tmp_path / "other/summary.json").write_text(json.dumps(used))  # of before it was continued
    given = [tmp_path / name for name in ("two", "one", "other")]
    _, notes, comparison = table(*given, "--price", 0.5, "--train-images", 9000)
    text = comparison.as_text().replace(f"{tmp_path}/", "")
    shown = "\n".join(["", *comparison.sentences, "", text, "", *notes])
    assert shown == TWO_RUNS_AND_ANOTHER


NAN = math.nan
NOT_FINITE = {
    x: {"Top1/val": top1, "Throughput/train": rate}
    for x, (top1, rate) in enumerate([(NAN, 3.0), (7.0, NAN), (5.0, 5.0), (math.inf, 6.0)], 1)
}


@pytest.mark.parametrize(
    ("written", "options", "expected", "patterns"),
    [
        pytest.param(  # no epoch is lost to the rounding of hours
            {"a": (epochs_of(9, 64, range(6)), 7.7), "b": (epochs_of(9, 64, (0, 0.5)), 7.7),
             "c": (epochs_of(9, 64, (0,)), 50)},
            ("--within", 6 * 7.7 / 3600, "--target-top1", 0.025, "--gpus", 1, 2, 4),
            {"epochs_within": "6,2,0", "target_epochs": "4,-,-", "gpus": "1,2,4"},
            ["the batches per GPU are not recorded"], id="options",
        ),
        pytest.param(  # two groups, each with a base of its own; one run is like no other
            {name: (epochs_of(rate, 64), 100) for name, rate in (
                (folder_name(1, 64, "ddp"), 100), (folder_name(2, 32, "ddp"), 180),
                (folder_name(1, 64, "nd", "vgg19_bn"), 120),
                (folder_name(2, 64, "dp", "vgg19_bn"), 200),
                ("Jan1_01-02-03_hal-login-2_wide_resnet50_2_gpux4_b32_cpu8_ddp", 900))},
            (), {"arch": "resnet50,vgg19_bn,resnet50,vgg19_bn,wide_resnet50_2",
                 "scaling_efficiency": "100 %,100 %,90 %,83 %,-", "nodes": "1,1,-,-,-",
                 "batch_per_gpu": "64,64,32,32,32", "global_batch": "64,64,64,64,128"},
            ["relative to 1 GPU resnet50 ddp b64, at an equal global batch .strong scaling",
             r"NOT COMPARABLE: 1 GPU vgg19_bn .* in model \(vgg19_bn, not resnet50\); its base is",
             "NOT COMPARABLE: 4 GPUs wide_resnet50_2 .*; it has no speed-up"],
            id="differences",
        ),
        pytest.param(
            {"old": (epochs_of(100, 64, (10, 30.6, 20), first=0), 100),
             # Validation before any training is rightly at 0.
             "new": ({0: {"Top1/val": 0.1}} | epochs_of(100, 64, (10, 30.6, 20)), 100)},
            (), {"epochs": "3,3", "best_top1_epoch": "2,2", "target_epochs": "2,2"},
            ["old: its event files count epochs from 0; they are counted from 1 here"],
            id="epochs from 0",
        ),
        pytest.param(  # the first epoch, which is slow, counts if there is no other
            {"a": (NOT_FINITE, 100),
             "b": ({1: {"Top1/val": 7.0, "Throughput/train": 50.0}}, 100)},
            (), {"images_per_s": "5.5,50", "best_top1": "7.00,7.00",
                 "epoch_h": "1.67 min,1.67 min"}, [], id="NaN",
        ),
    ],
)  # fmt: skip
def test_the_table(tmp_path, written, options, expected, patterns):
    for name, (epochs, seconds) in written.items():
        write(tmp_path / name, epochs, seconds=seconds)
    cells, notes, _ = table(tmp_path, *options)
    assert {key: ",".join(cells[key]) for key in expected} == expected
    for pattern in patterns:
        note(notes, pattern)


GOOD = {"arch": "resnet50", "gpus": 1, "val_images": 50_000, "global_batch": 256}
SURE = GOOD | {"val_images": 1_000_000}
CPU = GOOD | {"device": "cpu"}
THREE = GOOD | {"class_count": 3}
FEW = GOOD | {"device": "cpu", "batch_per_gpu": 64, "global_batch": 64}
BEYOND = "more than the noise of 50000 images, but another seed may change it as well."


@pytest.mark.parametrize(
    ("runs", "target", "expected"),
    [
        (
            {"a": (1600, (60, 75.9), GOOD | {"device": "cuda"})}, 75,
            ["a trained 1600 images per second on 1 GPU.",
             "It reached 75.90 % top-1 in epoch 2 (3.33 min)."],
        ),
        (  # 0.53 points at 76 %: two independent samples of 50,000
            {"a": (1600, (60, 75.5), GOOD),
             "b": (1620, (60, 75.95), GOOD | {"val_images": 10**6})}, 75.8,
            ["a and b trained equally fast: their speeds differ no more than those of epochs.",
             "b reached 75.8 % top-1: after 3.29 min (b).",
             "Best top-1: 75.50 % (a) and 75.95 % (b), a difference within the noise of 50000 "
             "validation images."],
        ),
        (
            {"a": (1600, (60, 75.7), GOOD), "b": (1620, (60, 76.25), GOOD)}, 75,
            ["a and b trained equally fast: their speeds differ no more than those of epochs.",
             "Both reached 75 % top-1: after 3.33 min (a) and 3.29 min (b).",
             f"Best top-1: 75.70 % (a) and 76.25 % (b), {BEYOND}"],
        ),
        (
            {"a": (100, (20,), CPU), "b": (150, (19,), CPU | {"global_batch": 512, "mode": "ddp"}),
             "c": (150, (20,), {"arch": "vgg19"}), "d": (9, (20,), {"arch": "vgg16"})}, 20,
            ["c cannot be compared with a: it has another model (vgg19, not resnet50); nor can d.",
             "b trained 1.50 times as many images per second as a.",
             f"Best top-1: 20.00 % (a) and 19.00 % (b), {BEYOND}",
             "Beware: there is only one epoch, in which caches and compilers warm up; the global "
             "batches differ (256 to 512), which changes accuracy; these are CPU speeds, which say "
             "nothing about GPUs."],
        ),
        (
            {name: (100 * i, (20, 30 + i), GOOD) for i, name in enumerate("abcde", 1)}, 31,
            ["The fastest run, e, trained 5.00 times as many images per second as a.",
             "First to reach 31 % top-1: e, in 40 s.",
             f"Best top-1: 31.00 % to 35.00 %, {BEYOND}"],
        ),
        (  # as in a study with seeds
            {name: (100 * i, (20, 40), GOOD)
             for i, name in enumerate(("1 node", "2 nodes, 0", "2 nodes, 1", "4 nodes"), 1)}, 50,
            ["2 nodes, 0; 2 nodes, 1; and 4 nodes trained 2.00, 3.00 and 4.00 times as many images "
             "per second as 1 node.", "Best top-1: 40.00 %, no difference."],
        ),
        (
            {name: (100 * (5 - i), (20,), GOOD) for i, name in enumerate("abcde")}, 33,
            ["No run was faster than a; the next, b, trained 0.80 times as many images per second "
             "as a.",
             "Best top-1: 20.00 %, no difference.",
             "Beware: there is only one epoch, in which caches and compilers warm up."],
        ),
        (
            {name: (100 * i, (20, 30 + i), GOOD) for i, name in enumerate("abcde", 1)}, 33,
            ["The fastest run, e, trained 5.00 times as many images per second as a.",
             "c, d and e reached 33 % top-1: after 1.11 min (c), 50 s (d) and 40 s (e).",
             f"Best top-1: 31.00 % to 35.00 %, {BEYOND}"],
        ),
        (  # seeds explain as much
            {"a": (1600, (60, 75.9), SURE), "b": (3200, (60, 75.6), SURE)}, 80,
            ["b trained 2.00 times as many images per second as a.",
             "Best top-1: 75.90 % (a) and 75.60 % (b), more than the noise of 1000000 images, but "
             "another seed may change it as well."],
        ),
        (  # 3.8 points at 75 %: two samples of 1,000
            {"a": (1600, (60, 75), GOOD | {"val_images": 1000}), "b": (3200, (60, 72), GOOD)}, 80,
            ["b trained 2.00 times as many images per second as a.",
             "Best top-1: 75.00 % (a) and 72.00 % (b), a difference within the noise of 1000 "
             "validation images."],
        ),
        (  # a sweep, whose speeds differ by chance
            {"a": (1600, (60, 75.7), GOOD), "b": (1700, (60, 70.7), GOOD)}, 80,
            ["b trained 1.06 times as many images per second as a.",
             f"Best top-1: 75.70 % (a) and 70.70 % (b), {BEYOND}"],
        ),
        (  # the least accurate one is named
            {"a": (1600, (60, 75.7), GOOD), "b": (3200, (60, 70.7), GOOD),
             "c": (2400, (60, 65.7), GOOD)}, 80,
            ["Accuracy fell with speed: after epoch 2, top-1 is 75.70 % (a) and 65.70 % (c), more "
             "than seeds explain, so compare the times to the same accuracy.",
             "b and c trained 2.00 and 1.50 times as many images per second as a."],
        ),
        (  # guessing is right for 33 % of three classes
            {"a": (1600, (30, 39), THREE), "b": (1610, (30, 39), GOOD)}, 39,
            ["a and b trained equally fast: their speeds differ no more than those of epochs.",
             "Best top-1: 39.00 % (a) and 39.00 % (b), no difference."],
        ),
        (
            {"a": (300, (20,), GOOD), "b": (100, (20, 30), GOOD)}, 90,
            ["a and b trained equally fast: their speeds differ no more than those of epochs.",
             "Top-1 after epoch 1, the last of the shortest run: 20.00 % (a) and 20.00 % (b), no "
             "difference.",
             "Beware: the runs differ in length (1 to 2 epochs)."],
        ),
        (  # two processes on two cores
            {"a": (28, (30, 60), FEW),
             "b": (128, (30, 60), FEW | {"gpus": 2, "batch_per_gpu": 32})}, 60,
            ["The throughput efficiency of 229 % (b) cannot be that of scaling: "
             "something else slowed down a, "
             "such as other work on its machine; run it again.",
             "b trained 4.57 times as many images per second as a (229 % throughput efficiency).",
             "Both reached 60 % top-1: after 3.33 min (a) and 43.8 s (b).",
             "Best top-1: 60.00 % (a) and 60.00 % (b), no difference.",
             "Beware: these are CPU speeds, which say nothing about GPUs."],
        ),
    ],
    ids=["one", "within noise", "beyond noise", "little to say", "many", "commas",
         "none faster", "three", "seeds", "few images", "sweep", "lost", "chance", "one epoch",
         "impossible"],
)  # fmt: skip
def test_the_sentences(tmp_path, runs, target, expected):
    base = next(iter(runs.values()))[0]
    names = [tmp_path / name for name in runs]
    for name, (rate, top1, options) in zip(names, runs.values(), strict=True):
        write(name, epochs_of(rate, 256, top1), seconds=100 * base / rate, options=options)
    assert table(*names, "--target-top1", target)[2].sentences == expected


def test_speeds_that_differ_no_more_than_those_of_epochs_are_equal(tmp_path):
    for name, rates, top1 in (("a", (100, 60, 140, 100), 75), ("b", (100, 115, 115, 115), 60)):
        epochs = {
            x: {"Throughput/train": rate, "Top1/val": top1} for x, rate in enumerate(rates, 1)
        }
        write(tmp_path / name, epochs, options=GOOD)
    first, *_, last = table(tmp_path)[2].sentences
    assert first.startswith("a and b trained equally fast")
    assert last.startswith("Best top-1: 75.00 % (a) and 60.00 % (b)"), "accuracy fell with speed"


def test_the_best_top_1_is_that_of_the_better_weights(tmp_path):
    """As in summary.json and best.pt: of b, those of the averaged weights after its first epoch."""
    for name, averaged in (("a", ()), ("b", (80, 79))):
        epochs = epochs_of(1600, 256, (60, 70))
        for values, top1 in zip(epochs.values(), averaged, strict=False):
            values["Top1/ema"] = top1
        write(tmp_path / name, epochs, options=GOOD)
    comparison = table(tmp_path)[2]
    assert f"Best top-1: 70.00 % (a) and 80.00 % (b), {BEYOND}" in comparison.sentences
    head, rows = comparison.by_runs()  # the short table has both
    at = [head.index(title) for title in ("best top-1", "averaged")]
    assert [[row[column] for column in at] for row in rows] == [["70.00", "-"], ["70.00", "80.00"]]
    assert "It reached 80.00 % top-1 in epoch 1 (1.67 min)." in table(tmp_path / "b")[2].sentences


def test_where_the_time_goes_is_said_of_the_run_in_which_it_takes_most(tmp_path):
    """One process computes when it does not wait. FSDP's communication is part of computing."""
    runs = (("a", 1, 0.0, 0.3), ("b", 2, 0.3, 0.2), ("c", 2, math.nan, 0.0))
    for name, gpus, sends, waits in runs:
        computes = 0.8 if name == "c" else 0.8 - sends
        parts = {"Time/data": 0.2, "Time/compute": computes, "Time/communication": sends}
        epochs = {x: y | parts | {"IO/wait_share": waits} for x, y in epochs_of(gpus, 64).items()}
        write(tmp_path / name, epochs, options=GOOD | {"gpus": gpus})
    text = "Communication took 30 % of a step (b) and waiting for data took 30 % of the time (a)."
    cells, _, comparison = table(tmp_path)
    assert text in comparison.sentences
    shares = [cells[f"step_{part}_share"] for part in ("data", "compute", "communication")]
    assert shares == [["20 %", "20 %", "20 %"], ["80 %", "50 %", "-"], ["-", "30 %", "-"]]
    assert cells["data_wait_share"] == ["30 %", "20 %", "0 %"]
    assert "Waiting for data took 30 % of the time." in table(tmp_path / "a")[2].sentences


def test_runs_without_a_finished_epoch_compare_by_their_steps(tmp_path):
    """Up to the step that both have reached; a run of which nothing is known is left out."""
    for name, rate, last in (("a", 100, 400), ("b", 190, 200)):
        points = {
            x: {"Step/loss": 7 - x / 100, "Step/throughput": rate}
            for x in range(100, last + 1, 100)
        }
        write(tmp_path / name, points, options=GOOD | {"gpus": 1 + (name == "b")})
    write(tmp_path / "c", {}, options=GOOD)
    cells, notes, comparison = table(tmp_path)
    assert cells["images_per_s"] == ["100", "190"] and cells["step_loss"] == ["5.0000", "5.0000"]
    assert cells["scaling_efficiency"] == ["100 %", "95 %"]
    assert cells["epochs"] == ["0.40 (no whole one)", "0.20 (no whole one)"]
    rows = csv.DictReader(io.StringIO(comparison.as_csv()))
    assert [row["epochs"] for row in rows] == ["0.4", "0.2"], "numbers, for other programs"
    assert table(tmp_path / "a")[2].as_text(20).split()[0] == "a", "60 characters are no less"
    assert comparison.as_text(20).split()[:3] == ["run", "GPUs", "images/s"]
    assert comparison.sentences == [
        "a (0.40 epochs) and b (0.20 epochs) have not finished an epoch: speed and loss are those "
        "of their steps so far.",
        "b trained 1.90 times as many images per second as a (95 % throughput efficiency).",
    ]
    assert "c is left out" in note(notes, "left out")
    _, _, drawing = pictures.drawings(comparison)[0]
    ends = [line["x"][-1] for line in drawing["data"]]
    assert ends == [0.4, 0.2] * 2


def test_a_smaller_batch_per_gpu_at_an_equal_global_batch_is_no_difference(tmp_path):
    for name, gpus, rate in (("a", 1, 100), ("b", 2, 200), ("slow", 2, 150)):
        options = GOOD | {"gpus": gpus, "batch_per_gpu": 256 / gpus}
        write(tmp_path / name, epochs_of(rate, 256), options=options)
    notes = table(tmp_path)[1]
    assert notes == ["speed-up and throughput efficiency: images/s relative to a, at an "
                     "equal global batch (strong scaling)"]  # fmt: skip
    (_, measured), _ = pictures.scaling(table(tmp_path)[2]).lines
    assert measured == [(1, 100), (2, 200)], "of two runs on as many GPUs, the better one"
    write(
        tmp_path / "c",
        epochs_of(900, 1024),
        options=GOOD | {"gpus": 8, "batch_per_gpu": 128, "global_batch": 1024},
    )
    assert pictures.scaling(table(tmp_path)[2]) is None, "neither batch is equal"


def test_many_runs_are_rows_in_the_width_of_the_terminal(tmp_path):
    for i in range(12):
        options = GOOD | {"global_batch": 64 + i, "mode": ("nd", "ddp")[i % 2]}
        success = (None, True, False)[i % 3]
        write(tmp_path / f"run{i}", epochs_of(100 + i, 64), options=options, success=success)
        (tmp_path / f"run{i}/summary.json").write_text('{"gpu_hours": 1.5}')
    cells, _, comparison = table(tmp_path)
    assert cells["state"][:3] == ["not finished", "finished", "stopped"]
    assert cells["gpu_hours"][:3] == ["-", "1.5", "1.5"], "a run that trains has used more"
    head = re.split("  +", comparison.as_text(300).splitlines()[0])
    assert head[:6] == ["run", "batch", "mode", "images/s", "top-1 at 4", "to 75 %"]
    text = comparison.as_text(80)
    rows = text.splitlines()[:13]
    assert rows[0].split()[:4] == ["run", "batch", "mode", "images/s"], "what differs is first"
    assert max(map(len, rows)) <= 80 and "64  nd" in rows[1], "words are aligned left"
    assert [row.split()[0] for row in rows[1:]] == [f"run{i}" for i in range(12)]


def test_resumed_run(tmp_path):
    run = tmp_path / folder_name(2)
    write(run, epochs_of(100, 416, (10, 20, 90, 95)), seconds=3600)
    # Two days later, from the snapshot after 2 epochs.
    write(run, epochs_of(100, 416, (30, 40), first=3), began=BEGAN + 2 * 86400, seconds=1800)
    cells, notes, comparison = table(run)
    assert (cells["best_top1"], cells["epoch_h"], notes) == (["40.00"], ["1 h"], [])
    assert comparison.runs[0].hours == {1: 1.0, 2: 2.0, 3: 2.5, 4: 3.0}
    # Killed after one epoch, and resumed once more: what was lost stays lost.
    later = BEGAN + 4 * 86400
    write(run, epochs_of(100, 416, (25,), first=2), began=later, seconds=7200)
    cells, _, comparison = table(run)
    assert (cells["epochs"], cells["best_top1"]) == (["2"], ["25.00"])
    assert comparison.runs[0].hours == {1: 1.0, 2: 3.0}
    # Our runs resume within an epoch; older suites began it again.
    for options, hours in ((None, 1.5), ({"gpus": 2}, 2.5)):
        run = tmp_path / f"until_{hours}"
        write(run, {1: {"Top1/val": 10.0}, 1500: {"Step/loss": 1.0}}, BEGAN, 3600, options)
        write(run, {2: {"Top1/val": 20.0}}, BEGAN + 86400, 1800, options)
        assert table(run)[2].runs[0].hours == {1: 1.0, 2: hours}
    # Finished, tested for an hour, and continued.
    run, first = tmp_path / "longer", {1: {"Top1/val": 10.0}, 2: {"Top1/test": 10.0}}
    write(run, first, BEGAN, 3600, {"gpus": 2}, success=True)
    cut_off(run, 1, 1000)
    write(run, {2: {"Top1/val": 20.0}}, BEGAN + 86400, 1800, {"gpus": 2})
    assert table(run)[2].runs[0].hours == {1: 1.0, 2: 1.5}
    # Of a run that was stopped and continued on two days, and killed.
    run = tmp_path / "killed"
    options = {"gpus": 2, "command": "/home/me/imagenet_dp.py -b 9 /data"}
    for day, x, success in ((0, 1, False), (1, 2, False), (2, 3, None)):
        write(run, {x: {"Top1/val": 10.0}}, BEGAN + 86400 * day, 3600, options, success)
    cells, _, comparison = table(run)
    assert comparison.runs[0].hours == {1: 1.0, 2: 2.0, 3: 3.0}
    assert (cells["state"], cells["epoch_h"]) == (["not finished"], ["1 h"])
    assert origin(comparison.runs[0])["date"] == "2020-08-09", "of its first start"
    assert origin(comparison.runs[0])["command"] == "imagenet_dp.py -b 9 /data"


def test_damaged_file_is_read_up_to_the_damage(tmp_path):
    """And a run of which nothing can be read is left out."""
    points = {x: {"Top1/val": 10.0 * x} for x in (1, 2, 3)}
    start = write(tmp_path / "b", {x: points[x] for x in (1, 2)}).stat().st_size
    file = write(tmp_path / "a", points)
    data = bytearray(file.read_bytes())
    data[-5] ^= 64  # one bit of the value, before the checksum
    file.write_bytes(data)
    file.with_suffix(".tmp").write_bytes(data)
    write(tmp_path / "empty", {}).write_bytes(b"")
    cells, (damage, left_out), _ = table(tmp_path / "a", tmp_path / "empty")
    assert (cells["epochs"], cells["best_top1"]) == (["2"], ["20.00"])
    assert f"{file.name} is cut off or damaged at byte {start} of" in damage
    assert "empty is left out: it has no finished epoch, or other tags; events.out" in left_out
    assert left_out.endswith(" is empty")
    without_speeds = table(tmp_path / "a", tmp_path / "b")[2].sentences
    assert without_speeds[-1] == "Best top-1: 20.00 % (a) and 20.00 % (b), no difference."


def test_labels_and_order(tmp_path):
    for name in ("runs/run10", "runs/run9", "runs/resnet18_gpux16", "older/run9"):
        write(tmp_path / name, epochs_of(100, 64))
    (tmp_path / "links").mkdir()
    (tmp_path / "links/a").symlink_to(tmp_path / "older")
    (tmp_path / "links/up").symlink_to(tmp_path / "links")
    given = tmp_path / "runs", tmp_path / "links", tmp_path / "older/../runs"
    labels = ["16 GPUs", "runs/run9", "run10", "older/run9"]
    _, notes, comparison = table(*given)
    runs = comparison.runs
    assert [run.label for run in runs] == labels and notes == [], "of one known number of GPUs"
    assert {run.base for run in runs} == {runs[0]}, "not one whose GPUs are unknown"
    labels = ['a, "b"', "b", "c" * 30, "d"]
    comparison = table(*given, "--labels", *labels)[2]
    assert comparison.as_text().endswith(f"(4) d: {tmp_path}/links/a/run9")
    assert [row["label"] for row in csv.DictReader(io.StringIO(comparison.as_csv()))] == labels
    # Single files of one folder are runs of their own, in the order given.
    files = [write(tmp_path / "a", epochs_of(9, 9, (10, t)), BEGAN + t) for t in (30, 20)]
    runs = table(*files)[2].runs
    assert [run.best("Top1/val")[0] for run in runs] == [30, 20]
    assert [run.label for run in runs] == [f"a/{file.name}" for file in files]
    on_cpu = {"device": "cpu", "gpus": 2}
    write(tmp_path / "cpu/resnet18_gpux2", epochs_of(9, 9), options=on_cpu)
    assert table(tmp_path / "cpu")[2].runs[0].label == "2 processes", "there is no GPU"


def test_bad_input_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "good", {1: {"Top1/val": 10.0}})
    write(tmp_path / "x_gpux2_b4_cpu1_ddp", {1: {"Top1/val": 10.0}}, options={"arch": "x"})
    write(tmp_path / "b\udcff", {1: {"Top1/val": 10.0}})  # as a machine without UTF-8 wrote it
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for arguments, message in {
        "nowhere": "nowhere does not exist",
        "notes.txt": "notes.txt has no TensorBoard event file",
        "b\udcff": "the name b\udcff is not UTF-8: rename it",
        "good --labels a b": "2 labels for 1 runs (good); give one per run",
        "good --labels ''": "each run needs a label of its own",
        "good --labels ' '": "each run needs a label of its own",
        "good --out notes.txt": "cannot write notes.txt (File exists): choose another place with",
        "good --prefix a/b": "--prefix a/b is a part of file names: the folder is --out",
        "x_gpux2_b4_cpu1_ddp --results binary": "binary is not a text file",
        "--results good x_gpux2_b4_cpu1_ddp": "good is not a text file",
        "x_gpux2_b4_cpu1_ddp --results no/R.md": "there is no folder no for R.md",
    }.items():
        with pytest.raises((UserError, OSError), match=re.escape(message)):
            compare_runs.main(shlex.split(arguments))


# ---- axes

STEEP = [(x, 7.0 if x == 0 else 2.0 - x / 50) for x in range(51)]  # a loss: 7, then 1.98 to 1


@pytest.mark.parametrize(
    ("points", "how", "expected"),
    [
        (STEEP, {}, (0.9424, 2.0176)),  # from 1 to 1.96, and a margin
        (STEEP, {"zero": True}, (0.0, 7.36)),
        (STEEP[:20], {}, (1.2972, 7.3228)),  # short: all of it
        ([(x, -y) for x, y in STEEP], {}, (-2.0176, -0.9424)),
        ([(x, float(x)) for x in range(50)], {"unit": "s"}, (0.0, 51.94)),
        ([(0, 50.0), (1, 99.0)], {"unit": "%"}, (47.06, 100.588)),
        ([(0, 20.0), (1, 50.0)], {"unit": "%"}, (18.2, 51.8)),
        ([(0, 50.0), (1, 120.0)], {"unit": "%"}, (45.8, 124.2)),
        ([(1, 10.0), (2, 1000.0)], {"log": "xy"}, (10 / 1.1, 1100.0)),
        ([(1, 4.0), (2, 4.0)], {}, (3.8, 4.2)),
        ([(1, 0.0)], {}, (0.0, 1.0)),
    ],
)
def test_an_axis_shows_what_matters(points, how, expected):
    chart = page.Chart(**{"title": "t", "unit": "", "x": "epoch", "lines": [("a", points)]} | how)
    assert page.limits(chart) == pytest.approx(expected)


# ---- the section in a file of Markdown


def test_a_section_is_written_once_and_nothing_else_is_touched(tmp_path):
    file, before, after = tmp_path / "R.md", "# Results\n\nBy hand | <b>.  ", "\nMore by hand.  \n"
    file.write_text(before)
    tables.put(file, "compare_runs", "One", "first\n")
    file.write_text(file.read_text() + after)
    for title, section in (("One", "second\n\ntext"), ("Other", "third")):
        tables.put(file, "compare_runs", title, section)
    text = file.read_text()
    assert text.startswith(f"{before}\n\n<!--") and "first" not in text
    assert "second\n\ntext" in text.partition(after)[0]
    assert "third" in text.partition(after)[2]
    assert text.count("<!-- compare_runs begin one -->") == 1
    end = "<!-- compare_runs end one -->"
    assert tables.fence("a ``` b") == "````text\na ``` b\n````"
    for broken in (text.replace(end, ""), 2 * text, end + text.replace(end, "")):
        file.write_text(broken)
        with pytest.raises(UserError, match="correct it by hand"):
            tables.put(file, "compare_runs", "One", "other")
        assert file.read_text() == broken
