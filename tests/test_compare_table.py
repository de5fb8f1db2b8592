"""scripts/compare_runs.py: what it reads from event files, and its table."""

import math
import time

import pytest
from compare import runs
from compare.table import shorten, text_table
from conftest import python
from event_files import (
    BEGAN,
    HAL,
    HAL_EFFICIENCY,
    SCRIPT,
    epochs_of,
    folder_name,
    note,
    table,
    write,
    write_hal,
)
from torch.utils.tensorboard import SummaryWriter

from utils.run.provenance import typical


@pytest.mark.parametrize("how", ["folder", "folders", "files", "nested"])
def test_six_runs_of_2020(tmp_path, how):
    root = write_hal(tmp_path / "runs", tensor=how == "nested")
    folders = [root / folder_name(gpus) for gpus in HAL]
    given = {
        "folder": [root],
        "folders": folders,
        "files": [next(folder.iterdir()) for folder in folders],
        "nested": [tmp_path],
    }[how]
    rows, notes, both = table(*given, "--train-images", 1281167)
    assert rows["gpus"] == [f"{gpus}" for gpus in HAL]
    assert rows["images_per_s"] == [f"{rate}" for rate in HAL.values()]
    assert rows["scaling_efficiency"] == [f"{share} %" for share in HAL_EFFICIENCY.values()]
    speed_ups = [run.speed_up for run in both.runs]
    assert speed_ups == pytest.approx([rate / HAL[2] for rate in HAL.values()], rel=1e-6)
    assert rows["global_batch"] == [str(208 * gpus) for gpus in HAL]
    assert rows["steps_per_epoch"] == ["3080", "1540", "770", "385", "193", "97"]
    alike = {"batch_per_gpu": "208", "arch": "resnet50", "mode": "O2", "lr": "0.1", "epochs": "4"}
    alike |= {"best_top1": "75.00", "nodes": "-"}  # nodes: not to be guessed
    assert {key: set(rows[key]) for key in alike} == {key: {cell} for key, cell in alike.items()}
    assert [run.label for run in both.runs] == [f"{gpus} GPUs" for gpus in HAL]
    assert "weak scaling" in note(notes, "speed-up and efficiency")
    assert "nodes" in note(notes, "not recorded by all runs")


def test_times(tmp_path):
    write(tmp_path / "a", epochs_of(1000, 64, (10, 30, 50, 70)), seconds=3600)
    write(tmp_path / "b", epochs_of(2000, 128, (10, 50, 40, 50, 60)), seconds=1800)
    rows, notes, _ = table(tmp_path, "--within", 2, "--target-top1", 0.5, "--gpus", 1, 2)
    expected = {"epoch_h": ["1 h", "30 min"], "hours": ["4 h", "2.5 h"]}
    expected |= {"epochs_within": ["2", "4"], "target_h": ["3 h", "1 h"]}
    expected |= {"target_epochs": ["3", "2"], "best_top1_epoch": ["4 (4 h)", "5 (2.5 h)"]}
    assert {key: rows[key] for key in expected} == expected
    assert "--train-images" in note(notes, "not recorded by all runs: nodes")
    assert "(a: 4; b: 5)" in note(notes, "numbers of epochs differ")
    # By default what every run has reached.
    _, _, both = table(tmp_path)
    assert (both.within, both.target) == (2.5, 60.0)
    rows, notes, both = table(tmp_path / "a", "--within", 4)
    assert rows["epochs_within"] == ["4"]
    assert not any("numbers of epochs" in one for one in notes)
    # No epoch is lost to the rounding of hours.
    write(tmp_path / "c", epochs_of(1000, 64, range(6)), seconds=57.7 / 6)
    rows, _, both = table(tmp_path / "c")
    assert rows["epochs_within"] == ["6"]
    assert next(row.title for row in both.rows if row.key == "epochs_within") == "epochs in 57.7 s"


def test_averaged_weights_count_for_the_time_to_an_accuracy(tmp_path):
    """As best.pt has the better ones; those of the model stay in a row of their own."""
    both = zip((10, 30, 50, 70), (5, 55, 65, 60), strict=True)
    points = {x: {"Top1/val": a, "Top1/ema": b} for x, (a, b) in enumerate(both, 1)}
    write(tmp_path / "a", points, seconds=3600)
    write(tmp_path / "b", {x: {"Top1/val": y["Top1/val"]} for x, y in points.items()}, seconds=3600)
    rows, notes, _ = table(tmp_path, "--target-top1", 55)
    assert rows["best_top1"] == ["70.00", "70.00"]
    assert rows["best_ema_top1"] == ["65.00", "-"]
    assert rows["target_h"] == ["2 h", "4 h"]
    assert not any("averaged" in one for one in notes), "the other run was not asked for them"


def test_lowest_loss_and_figures_of_the_test_folder(tmp_path):
    epochs = epochs_of(100, 64, (10, 30, 50, 40))
    write(tmp_path / "a", epochs)
    epochs[3] |= {"Loss/test": 2.5, "Top1/test": 48.123, "Top5/test": 80.0}
    write(tmp_path / "b", epochs)
    rows, _, both = table(tmp_path)
    expected = {"best_loss": ["2.6000"] * 2, "best_loss_epoch": ["3 (5 min)"] * 2}
    expected |= {"test_top1": ["-", "48.12"], "test_top5": ["-", "80.00"]}
    expected |= {"test_loss": ["-", "2.5000"]}
    assert {key: rows[key] for key in expected} == expected
    assert both.runs[0].hours == both.runs[1].hours
    assert "test_top1" not in table(tmp_path / "a")[0], "no row of nothing"


def test_base_is_the_run_with_the_fewest_gpus(tmp_path):
    for gpus, rate in ((8, 700), (2, 200), (4, 390)):
        write(tmp_path / folder_name(gpus, 32, "ddp"), epochs_of(rate, 32 * gpus))
    typed = [tmp_path / folder_name(gpus, 32, "ddp") for gpus in (8, 2, 4)]
    rows, _, _ = table(*typed)
    assert rows["gpus"] == ["8", "2", "4"], "as they were typed"
    assert rows["speed_up"] == ["3.50", "1.00", "1.95"]
    assert rows["scaling_efficiency"] == ["88 %", "100 %", "98 %"]
    assert table(tmp_path)[0]["gpus"] == ["2", "4", "8"], "of a folder: by GPUs"


def test_runs_that_differ_in_more_than_size_are_named(tmp_path):
    write(tmp_path / folder_name(1, 64, "ddp"), epochs_of(100, 64))
    write(tmp_path / folder_name(2, 32, "ddp"), epochs_of(180, 64))
    write(tmp_path / folder_name(1, 64, "ddp", "vgg19_bn"), epochs_of(120, 64))
    rows, notes, _ = table(tmp_path)
    assert rows["arch"] == ["resnet50", "vgg19_bn", "resnet50"]
    assert rows["nodes"] == ["1", "1", "-"]
    assert rows["scaling_efficiency"] == ["100 %", "-", "90 %"]
    assert "strong scaling" in note(notes, "speed-up and efficiency")
    assert "batch per GPU (32, not 64)" in note(notes, "differs from its base")
    said = note(notes, "NOT COMPARABLE")
    assert "1 GPU vgg19_bn differs from 1 GPU resnet50 in arch (vgg19_bn, not resnet50)" in said


# ---- what older suites wrote


def test_throughput_of_one_process_and_time_of_an_epoch(tmp_path):
    write(tmp_path / folder_name(4), epochs_of(800, 208))
    by_epoch = epochs_of(6000, 208 * 8)
    for values in by_epoch.values():
        values["Time/train"] *= 770
    write(tmp_path / folder_name(8), by_epoch)
    write(tmp_path / folder_name(16), epochs_of(9000, 300))
    rows, notes, _ = table(tmp_path)
    assert rows["images_per_s"] == ["3200", "6000", "9000"]
    assert rows["step_ms"][:2] == ["260", "277.3"]
    assert rows["steps_per_epoch"] == ["-", "770", "-"]
    assert "multiplied by 4" in note(notes, "4 GPUs: its throughput is that of one process")
    assert "770 steps" in note(notes, "8 GPUs: its Time/train is that of an epoch")
    assert "300 images per step" in note(notes, "16 GPUs: .*wrong")


def test_accuracy_as_a_share_and_epochs_counted_from_0(tmp_path):
    epochs = epochs_of(100, 64, [e / 30 for e in range(30)], first=1)
    for values in epochs.values():
        values |= {"Top5/val": 0.97, "Top5/train": 0.96, "Top1/train": values["Top1/val"]}
    # Validation before any training is rightly at 0.
    write(tmp_path / "share", {0: {"Top1/val": 0.001}} | epochs)
    write(tmp_path / "old", epochs_of(100, 64, (10, 20), first=0))
    rows, notes, both = table(tmp_path)
    assert rows["epochs"] == ["2", "30"]
    assert (rows["best_top1"][1], rows["best_top5"][1]) == ("96.67", "97.00")
    assert list(both.runs[1].scalars["Top1/val"]) == list(range(31))
    assert note(notes, "shares of 1").startswith("share: ")
    assert note(notes, "from 0").startswith("old: ")


def test_clocks_that_cannot_be_right(tmp_path):
    """A file that was written anew, all points in a moment; and one whose first record is late."""
    write(tmp_path / "moment", epochs_of(100, 640), seconds=0.001)
    with SummaryWriter(str(tmp_path / "later")) as writer:
        for x in (1, 2, 3, 4):
            writer.add_scalar("Top1/val", 10.0 * x, x, BEGAN + 3600 * x)
    rows, notes, _ = table(tmp_path / "moment", tmp_path / "later")
    assert rows["hours"] == ["-", "4 h"]
    note(notes, "moment: .*no hours")
    note(notes, "later: the beginning of its training is not recorded")


# ---- runs that were interrupted, and files that are damaged


def test_resumed_run(tmp_path):
    run = tmp_path / folder_name(2)
    write(run, epochs_of(100, 416, (10, 20, 90, 95)), seconds=3600)
    # Two days later, from the snapshot after 2 epochs.
    write(run, epochs_of(100, 416, (30, 40), first=2), began=BEGAN + 2 * 86400, seconds=1800)
    rows, notes, both = table(run)
    assert rows["best_top1"] == ["40.00"]
    assert both.runs[0].hours == {1: 1.0, 2: 2.0, 3: 2.5, 4: 3.0}
    note(notes, "2 of the epochs in its earlier event files were repeated")
    # Killed after one epoch, and resumed once more: what was lost stays lost.
    later = BEGAN + 4 * 86400
    write(run, epochs_of(100, 416, (25,), first=1), began=later, seconds=7200)
    rows, _, both = table(run)
    assert (rows["epochs"], rows["best_top1"]) == (["2"], ["25.00"])
    assert both.runs[0].hours == {1: 1.0, 2: 3.0}


@pytest.mark.parametrize("harm", ["cut in a header", "cut in a record", "one bit", "zeros"])
def test_damaged_file_is_read_up_to_the_damage(tmp_path, harm):
    points = {x: {"Top1/val": 10.0 * x} for x in (1, 2, 3)}
    start = write(tmp_path / "b", {x: points[x] for x in (1, 2)}).stat().st_size
    file = write(tmp_path / "a", points, began=time.time() - 420)
    data = bytearray(file.read_bytes())
    if harm == "one bit":
        data[-5] ^= 64  # in the value, before the checksum
    elif harm == "zeros":  # what some file systems leave of a file after a crash
        data[start:] = bytes(len(data) - start)
    else:
        del data[start + 5 if harm == "cut in a header" else len(data) - 1 :]
    file.write_bytes(data)
    rows, notes, _ = table(tmp_path / "a")
    assert (rows["epochs"], rows["best_top1"]) == (["2"], ["20.00"])
    assert f"cut off or damaged at byte {start} of" in note(notes, file.name)
    assert rows["state"] == ["running"], "its last record may be being written"


def test_empty_files_and_runs_without_curves_are_left_out(tmp_path):
    write_hal(tmp_path / "runs")
    write(tmp_path / "runs" / "empty", {}).write_bytes(b"")
    write(tmp_path / "runs" / "other", {1: {"accuracy": 1.0}})
    (tmp_path / "runs" / "notes").mkdir()
    _, notes, both = table(tmp_path / "runs")
    assert len(both.runs) == 6
    assert "is empty" in note(notes, "empty is left out")
    assert "other tags" in note(notes, "other is left out")


def test_first_epoch_is_set_aside_where_there_are_more_and_nan_is_no_value(tmp_path):
    nan, inf = math.nan, math.inf
    cases = {
        (nan, nan): "-",
        (50.0, nan): "50",
        (50.0, 70.0): "70",
        (None, 50.0, 70.0): "60",  # nothing was measured in the first epoch
        (3.0, nan, 5.0, 6.0): "5.5",
        (9.0, nan, 10.0, inf): "10",
    }
    for i, rates in enumerate(cases):
        points = {x: {"Top1/val": a} for x, a in enumerate((nan, 7.0, 5.0, inf), 1)}
        for x, rate in enumerate(rates, 1):
            points[x] |= {} if rate is None else {"Throughput/train": rate}
        write(tmp_path / str(i), points)
    write(tmp_path / "nan", {1: {"Top1/val": nan}})
    rows, _, _ = table(tmp_path)
    assert rows["images_per_s"] == [*cases.values(), "-"]
    assert rows["best_top1"] == ["7.00"] * len(cases) + ["-"]
    assert (typical({1: 50.0, 2: nan}), typical({1: nan})) == (50, None)  # as in summary.json


# ---- names


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        (folder_name(16), {"gpus": 16, "batch_per_gpu": 208, "arch": "resnet50", "mode": "O2"}),
        (
            "Jan1_01-02-03_hal-login-2_wide_resnet50_2_gpux4_b32_cpu8_ddp",
            {"gpus": 4, "global_batch": 128, "arch": "wide_resnet50_2", "mode": "ddp"},
        ),
        ("resnet18_gpux1_b64", {"nodes": 1, "batch_per_gpu": 64, "arch": "resnet18"}),
        ("vgg19-4_nodes", {"nodes": 4}),
        ("two_nodes", {}),
    ],
)
def test_names_of_folders(name, facts):
    found = runs.from_name(name)
    assert found.items() >= facts.items()
    assert bool(found) == bool(facts)


def test_labels_and_order(tmp_path):
    for name in ("run10", "run9", "16_gpus"):
        write(tmp_path / "runs" / name, epochs_of(100, 64))
    write(tmp_path / "older" / "run9", epochs_of(100, 64))
    both = tmp_path / "runs", tmp_path / "older"
    labels = ["16_gpus", "runs/run9", "run10", "older/run9"]
    assert [run.label for run in table(*both)[2].runs] == labels
    assert [run.label for run in table(*both, "--labels", *"abcd")[2].runs] == list("abcd")
    # Single files of one folder are runs of their own.
    best = (20.0, 30.0)
    files = [write(tmp_path / "a", epochs_of(9, 9, (10, top1)), BEGAN + top1) for top1 in best]
    found = table(*files)[2].runs
    assert [run.best("Top1/val")[0] for run in found] == [*best]
    assert [run.label for run in found] == [f"a/{file.name}" for file in files]


@pytest.mark.parametrize(
    ("labels", "short"),
    [
        (["1 node", "2 nodes"], ["1 node", "2 nodes"]),
        (["the_same_long_name_1", "the_same_long_name_22"], ["…1", "…22"]),
        (["a" * 8 + "b" + "c" * 8, "f" * 20], ["1: aaaaa…", "2: fffff…"]),
    ],
)
def test_short_labels_stay_different(labels, short):
    assert shorten(labels, 10) == short


def test_columns_that_do_not_fit_come_below():
    text = text_table(["", "a", "bbb"], [["one", 1, 2.5], ["three", "-", 4]], width=12)
    expected = "       a\none    1\nthree  -\n\n       bbb\none    2.5\nthree    4"
    assert text == expected


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["good", "nowhere"], "nowhere does not exist"),
        (["nothing"], "nothing holds no event file (they are named events.out.tfevents.*)"),
        (["notes.txt"], "notes.txt holds no event file (they are named events.out.tfevents.*)"),
        (["good", "--labels", "a", "b"], "2 labels for 1 runs (good); give one per run"),
        (["good", "--gpus", "1", "2"], "2 numbers of GPUs for 1 runs (good); give one per run"),
        (["empty"], "empty is left out: it has none of the curves"),
        (["good", "--out", "notes.txt"], "notes.txt"),
    ],
)
def test_bad_input_is_a_one_line_error(tmp_path, arguments, sentence):
    write(tmp_path / "good", {1: {"Top1/val": 10.0}})
    write(tmp_path / "empty", {}).write_bytes(b"")
    (tmp_path / "nothing" / "in here").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("text")
    names = ("good", "nowhere", "nothing", "notes.txt", "empty")
    typed = [tmp_path / word if word in names else word for word in arguments]
    done = python(SCRIPT, *typed, *(() if "--out" in typed else ("--out", tmp_path / "out")))
    assert done.code == 2
    assert sentence in done.sentence
    assert not (tmp_path / "out").exists()
