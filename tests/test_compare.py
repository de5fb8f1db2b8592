"""scripts/compare_runs.py: what it reads from event files of 2020, and its table."""

import math

import compare_runs
import pytest
from compare import runs
from compare import table as tables
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

from utils.errors import UserError


@pytest.mark.parametrize("how", ["folder", "files", "nested"])
def test_six_runs_of_2020(tmp_path, how):
    root = write_hal(tmp_path / "runs")
    files = [next((root / folder_name(gpus)).iterdir()) for gpus in HAL]
    given = {"folder": [root], "files": files, "nested": [tmp_path]}[how]
    cells, notes, both = table(*given, "--train-images", 1281167)
    expected = {"gpus": list(HAL), "images_per_s": list(HAL.values())}
    expected |= {"scaling_efficiency": [f"{share} %" for share in HAL_EFFICIENCY.values()]}
    expected |= {"global_batch": [208 * gpus for gpus in HAL]}
    expected |= {"steps_per_epoch": [3080, 1540, 770, 385, 193, 97]}
    alike = {"batch_per_gpu": 208, "arch": "resnet50", "mode": "O2", "lr": "0.1", "epochs": 4}
    alike |= {"best_top1": "75.00", "nodes": "-"}  # nodes: not to be guessed
    expected |= {key: [cell] * 6 for key, cell in alike.items()}
    assert {key: cells[key] for key in expected} == {k: [*map(str, v)] for k, v in expected.items()}
    assert both.values["speed_up"] == pytest.approx([rate / HAL[2] for rate in HAL.values()])
    assert [run.label for run in both.runs] == [f"{gpus} GPUs" for gpus in HAL]
    assert notes == [
        "speed-up and efficiency: images/s relative to 2 GPUs, at an equal batch per GPU "
        "(weak scaling)"
    ]


def with_test(epochs):
    found = {"Loss/test": 2.5, "Top1/test": 48.123, "Top5/test": 80.0}
    return {**epochs, max(epochs): epochs[max(epochs)] | found}


MODEL = {x: {"Top1/val": y} for x, y in enumerate((10, 30, 50, 70), 1)}
AVERAGED = {x: MODEL[x] | {"Top1/ema": y} for x, y in enumerate((5, 55, 65, 60), 1)}
DDP = {gpus: folder_name(gpus, 32, "ddp") for gpus in (1, 2, 4, 8)}
NAN, INF = math.nan, math.inf
RATES = {  # images/s of each epoch, and what is shown
    (NAN, NAN): "-",
    (50.0, NAN): "50",  # the first epoch counts if there is no other
    (50.0, 70.0): "70",
    (None, 50.0, 70.0): "60",  # nothing was measured in the first epoch
    (3.0, NAN, 5.0, 6.0): "5.5",
    (9.0, NAN, 10.0, INF): "10",
}
TOP1 = (NAN, 7.0, 5.0, INF)


def rated(rates):
    points = {x: {"Top1/val": top1} for x, top1 in enumerate(TOP1, 1)}
    for x, rate in enumerate(rates, 1):
        points[x] |= {} if rate is None else {"Throughput/train": rate}
    return points


@pytest.mark.parametrize(
    ("written", "options", "expected", "said"),
    [
        pytest.param(
            {"a": (epochs_of(1000, 64, (10, 30, 50, 70)), 3600),
             "b": (epochs_of(2000, 128, (10, 50, 40, 60, 60)), 1800)},
            ("--within", 2, "--target-top1", 0.5, "--gpus", 1, 2),
            {"epoch_h": "1 h,30 min", "hours": "4 h,2.5 h", "epochs_within": "2,4",
             "target_h": "3 h,1 h", "target_epochs": "3,2", "best_top1_epoch": "4,4",
             "best_top1_h": "4 h,2 h", "scaling_efficiency": "100 %,100 %"}, [], id="times",
        ),
        pytest.param(  # not reached by one
            {"a": (epochs_of(9, 64, (10, 50)), 3600), "b": (epochs_of(9, 64, (10, 60.5)), 1800)},
            ("--target-top1", 60), {"target_h": "-,1 h", "target_epochs": "-,2"}, [],
            id="not reached",
        ),
        pytest.param(  # by default what every run has reached
            {"a": (epochs_of(9, 64, (10, 50)), 3600), "b": (epochs_of(9, 64, (10, 60.5)), 1800)},
            (), {"epochs_within": "1,2", "target_h": "2 h,1 h"}, [], id="by default",
        ),
        pytest.param(  # no epoch is lost to the rounding of hours
            {"c": (epochs_of(1000, 64, range(6)), 7.7)}, ("--within", 6 * 7.7 / 3600),
            {"epochs_within": "6"}, [], id="rounding",
        ),
        pytest.param(  # best.pt has the better of both weights
            {"a": (AVERAGED, 3600), "b": (MODEL, 3600)}, ("--target-top1", 55),
            {"best_top1": "70.00,70.00", "best_ema_top1": "65.00,-", "target_h": "2 h,4 h"}, [],
            id="averaged weights",
        ),
        pytest.param(
            {"a": (epochs_of(100, 64, (10, 30, 50, 40)), 100),
             "b": (with_test(epochs_of(100, 64, (10, 30, 50, 40))), 100)},
            (),
            {"best_loss": "2.6000,2.6000", "best_loss_epoch": "3,3", "best_loss_h": "5 min,5 min",
             "test_top1": "-,48.12", "test_top5": "-,80.00", "test_loss": "-,2.5000"}, [],
            id="loss and test",
        ),
        pytest.param(
            {DDP[gpus]: (epochs_of(rate, 32 * gpus), 100)
             for gpus, rate in ((8, 700), (2, 200), (4, 390))},
            (), {"gpus": "2,4,8", "speed_up": "1.00,1.95,3.50",
                 "scaling_efficiency": "100 %,98 %,88 %", "images_per_s_per_gpu": "100,97.5,87.5"},
            [], id="base",
        ),
        pytest.param(  # two groups, each with a base of its own; one run is like no other
            {folder_name(1, 64, "ddp"): (epochs_of(100, 64), 100),
             DDP[2]: (epochs_of(180, 64), 100),
             folder_name(1, 64, "nd", "vgg19_bn"): (epochs_of(120, 64), 100),
             folder_name(2, 64, "ddp", "vgg19_bn"): (epochs_of(200, 64), 100),
             folder_name(4, 64, "ddp", "alexnet"): (epochs_of(900, 64), 100)},
            (), {"arch": "resnet50,vgg19_bn,resnet50,vgg19_bn,alexnet", "nodes": "1,1,-,-,-",
                 "scaling_efficiency": "100 %,100 %,90 %,83 %,-"},
            ["relative to 1 GPU resnet50 ddp b64, at an equal global batch .strong scaling",
             "relative to 1 GPU vgg19_bn nd b64, at an equal batch per GPU .weak scaling",
             r"2 GPUs resnet50 ddp b32 differs from its base .* in batch per gpu \(32, not 64\)",
             r"NOT COMPARABLE: 1 GPU vgg19_bn .* in arch \(vgg19_bn, not resnet50\); its base is",
             r"NOT COMPARABLE: 4 GPUs alexnet .*; it has no speed-up"],
            id="differences",
        ),
        pytest.param(
            {"old": (epochs_of(100, 64, (10, 30, 20), first=0), 100),
             "new": (epochs_of(100, 64, (10, 30, 20)), 100),
             # Validation before any training is rightly at 0.
             "before": ({0: {"Top1/val": 0.1}} | epochs_of(100, 64, (10, 30, 20)), 100)},
            (), {"epochs": "3,3,3", "best_top1_epoch": "2,2,2"},
            ["old: its event files count epochs from 0; they are counted from 1 here"],
            id="epochs from 0",
        ),
        pytest.param(
            {**{str(i): (rated(rates), 100) for i, rates in enumerate(RATES)},
             "nan": ({1: {"Top1/val": NAN}}, 100)},
            (), {"images_per_s": ",".join([*RATES.values(), "-"]),
                 "best_top1": ",".join(["7.00"] * len(RATES) + ["-"])}, [], id="NaN",
        ),
    ],
)  # fmt: skip
def test_the_table(tmp_path, written, options, expected, said):
    for name, (epochs, seconds) in written.items():
        write(tmp_path / name, epochs, seconds=seconds)
    cells, notes, _ = table(tmp_path, *options)
    assert {key: ",".join(cells[key]) for key in expected} == expected
    for pattern in said:
        note(notes, pattern)


def test_resumed_run(tmp_path):
    run = tmp_path / folder_name(2)
    write(run, epochs_of(100, 416, (10, 20, 90, 95)), seconds=3600)
    # Two days later, from the snapshot after 2 epochs.
    write(run, epochs_of(100, 416, (30, 40), first=3), began=BEGAN + 2 * 86400, seconds=1800)
    cells, _, both = table(run)
    assert (cells["best_top1"], cells["epoch_h"]) == (["40.00"], ["1 h"])
    assert both.runs[0].hours == {1: 1.0, 2: 2.0, 3: 2.5, 4: 3.0}
    # Killed after one epoch, and resumed once more: what was lost stays lost.
    later = BEGAN + 4 * 86400
    write(run, epochs_of(100, 416, (25,), first=2), began=later, seconds=7200)
    cells, _, both = table(run)
    assert (cells["epochs"], cells["best_top1"]) == (["2"], ["25.00"])
    assert both.runs[0].hours == {1: 1.0, 2: 3.0}
    # Our runs resume within an epoch; older suites began it again.
    for options, hours in ((None, 1.5), ({"gpus": 2}, 2.5)):
        run = tmp_path / f"until_{hours}"
        write(run, {1: {"Top1/val": 10.0}, 1500: {"Step/loss": 1.0}}, BEGAN, 3600, options)
        write(run, {2: {"Top1/val": 20.0}}, BEGAN + 86400, 1800, options)
        assert table(run)[2].runs[0].hours == {1: 1.0, 2: hours}


@pytest.mark.parametrize("harm", ["cut in a header", "one bit"])
def test_damaged_file_is_read_up_to_the_damage(tmp_path, harm):
    points = {x: {"Top1/val": 10.0 * x} for x in (1, 2, 3)}
    start = write(tmp_path / "b", {x: points[x] for x in (1, 2)}).stat().st_size
    file = write(tmp_path / "a", points)
    data = bytearray(file.read_bytes())
    if harm == "one bit":
        data[-5] ^= 64  # in the value, before the checksum
    else:
        del data[start + 5 :]
    file.write_bytes(data)
    cells, notes, _ = table(tmp_path / "a")
    assert (cells["epochs"], cells["best_top1"]) == (["2"], ["20.00"])
    assert f"cut off or damaged at byte {start} of" in note(notes, file.name)


def test_empty_files_and_runs_without_curves_are_left_out(tmp_path):
    write_hal(tmp_path)
    write(tmp_path / "empty", {}).write_bytes(b"")
    write(tmp_path / "other", {1: {"accuracy": 1.0}})
    (tmp_path / "notes").mkdir()
    _, notes, both = table(tmp_path)
    assert len(both.runs) == 6
    assert "is empty" in note(notes, "empty is left out")
    note(notes, "other is left out: it has no finished epoch, or other tags")


# ---- names


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        (folder_name(16), {"gpus": 16, "batch_per_gpu": 208, "arch": "resnet50", "mode": "O2"}),
        (
            "Jan1_01-02-03_hal-login-2_wide_resnet50_2_gpux4_b32_cpu8_ddp",
            {"gpus": 4, "global_batch": 128, "arch": "wide_resnet50_2", "mode": "ddp"},
        ),
        (folder_name(4, 64, "dp"), {"gpus": 4, "global_batch": 64, "batch_per_gpu": 16}),
        ("two_nodes", {}),
    ],
)
def test_names_of_folders(name, facts):
    found = runs.from_name(name)
    assert found.items() >= facts.items()
    assert bool(found) == bool(facts)


def test_labels_and_order(tmp_path):
    for name in ("runs/run10", "runs/run9", "runs/resnet18_gpux16", "older/run9"):
        write(tmp_path / name, epochs_of(100, 64))
    given = tmp_path / "runs", tmp_path / "older", tmp_path / "runs"
    labels = ["16 GPUs", "runs/run9", "run10", "older/run9"]
    assert [run.label for run in table(*given)[2].runs] == labels
    both = table(*given, "--labels", "a", "b", "c" * 30, "d")[2]
    head, *_, last = both.as_text().splitlines()
    assert head.split() == ["(1)", "(2)", "(3)", "(4)"]
    assert last == f"(4) d: {tmp_path}/older/run9"
    # Single files of one folder are runs of their own, in the order given.
    files = [write(tmp_path / "a", epochs_of(9, 9, (10, t)), BEGAN + t) for t in (30, 20)]
    found = table(*files)[2].runs
    assert [run.best("Top1/val")[0] for run in found] == [30, 20]
    assert [run.label for run in found] == [f"a/{file.name}" for file in files]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "nothing holds no event file (they are named events.out.tfevents.*)"),
        (["notes.txt"], "notes.txt holds no event file"),
        (["good", "--labels", "a", "b"], "2 labels for 1 runs (good); give one per run"),
        (["good", "--gpus", "1", "2"], "2 numbers of GPUs for 1 runs (good); give one per run"),
        (["empty"], "empty is left out: it has no finished epoch"),
        (["good", "--out", "notes.txt"], "notes.txt"),
    ],
)
def test_bad_input_is_a_one_line_error(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "good", {1: {"Top1/val": 10.0}})
    write(tmp_path / "empty", {}).write_bytes(b"")
    (tmp_path / "nothing" / "in here").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("text")
    assert compare_runs.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


def test_no_large_library_is_loaded_before_an_error(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise SystemExit('imported')")
    done = python(SCRIPT, "nowhere", PYTHONPATH=str(tmp_path))
    assert (done.code, done.err) == (2, "error: nowhere does not exist\n")


# ---- the section in a file of Markdown


def test_a_section_is_written_once_and_nothing_else_is_touched(tmp_path):
    file, before, after = tmp_path / "R.md", "# Results\n\nBy hand | <b>.  ", "\nMore by hand.  \n"
    file.write_text(before)
    tables.put(file, "compare_runs", "One", "first\n")
    file.write_text(file.read_text() + after)
    for title, section in (("One", "second\n\ntext"), ("Other", "third")):
        tables.put(file, "compare_runs", title, section)
    found = file.read_text()
    assert found.startswith(before) and "first" not in found
    assert "second\n\ntext" in found.partition(after)[0]
    assert "third" in found.partition(after)[2]
    assert found.count("<!-- compare_runs begin one -->") == 1
    end = "<!-- compare_runs end one -->"
    for text in (found.replace(end, ""), 2 * found, end + found.replace(end, "")):
        file.write_text(text)
        with pytest.raises(UserError, match="correct it by hand"):
            tables.put(file, "compare_runs", "One", "other")
        assert file.read_text() == text
