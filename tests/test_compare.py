"""scripts/compare_runs.py: what it reads from event files of 2020, and its table."""

import math
import time

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
from torch.utils.tensorboard import SummaryWriter

from utils.errors import UserError
from utils.run.provenance import typical


@pytest.mark.parametrize("how", ["folder", "files", "nested"])
def test_six_runs_of_2020(tmp_path, how):
    root = write_hal(tmp_path / "runs", tensor=how == "nested")
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
    assert "weak scaling" in note(notes, "speed-up and efficiency")
    assert "nodes" in note(notes, "not recorded by all runs")


def with_values(epochs, **values):
    """``epochs`` with more values in the last of them."""
    return {**epochs, max(epochs): epochs[max(epochs)] | values}


def time_of_an_epoch(epochs, steps):
    return {x: one | {"Time/train": one["Time/train"] * steps} for x, one in epochs.items()}


def shares(count):
    """Accuracies as shares of 1; validation before any training is rightly at 0."""
    found = {0: {"Top1/val": 0.001}}
    for x, values in epochs_of(100, 64, [e / 30 for e in range(count)], first=1).items():
        found[x] = values | {"Top5/val": 0.97, "Top5/train": 0.96, "Top1/train": values["Top1/val"]}
    return found


MODEL = {x: {"Top1/val": y} for x, y in enumerate((10, 30, 50, 70), 1)}
AVERAGED = {x: one | {"Top1/ema": y} for (x, one), y in zip(MODEL.items(), (5, 55, 65, 60))}  # noqa: B905
DDP = {gpus: folder_name(gpus, 32, "ddp") for gpus in (1, 2, 4, 8)}
NAN, INF = math.nan, math.inf
RATES = {  # images/s of each epoch, and what is shown
    (NAN, NAN): "-",
    (50.0, NAN): "50",
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
             "b": (epochs_of(2000, 128, (10, 50, 40, 50, 60)), 1800)},
            ("--within", 2, "--target-top1", 0.5, "--gpus", 1, 2),
            {"epoch_h": "1 h,30 min", "hours": "4 h,2.5 h", "epochs_within": "2,4",
             "target_h": "3 h,1 h", "target_epochs": "3,2", "best_top1_epoch": "4,5",
             "best_top1_h": "4 h,2.5 h"},
            [r"not recorded by all runs: nodes.*--train-images", r"numbers of .* \(a: 4; b: 5\)"],
            id="times",
        ),
        pytest.param(  # by default what every run has reached
            {"a": (epochs_of(9, 64, (10, 50)), 3600), "b": (epochs_of(9, 64, (10, 60.5)), 1800)},
            (), {"epochs_within": "1,2", "target_h": "2 h,1 h"}, [], id="by default",
        ),
        pytest.param(  # no epoch is lost to the rounding of hours
            {"c": (epochs_of(1000, 64, range(6)), 57.7 / 6)}, (), {"epochs_within": "6"}, [],
            id="rounding",
        ),
        pytest.param(  # best.pt has the better of both weights
            {"a": (AVERAGED, 3600), "b": (MODEL, 3600)}, ("--target-top1", 55),
            {"best_top1": "70.00,70.00", "best_ema_top1": "65.00,-", "target_h": "2 h,4 h"}, [],
            id="averaged weights",
        ),
        pytest.param(
            {"a": (epochs_of(100, 64, (10, 30, 50, 40)), 100),
             "b": (with_values(epochs_of(100, 64, (10, 30, 50, 40)), **{"Loss/test": 2.5,
                   "Top1/test": 48.123, "Top5/test": 80.0}), 100)},
            (),
            {"best_loss": "2.6000,2.6000", "best_loss_epoch": "3,3", "best_loss_h": "5 min,5 min",
             "test_top1": "-,48.12", "test_top5": "-,80.00", "test_loss": "-,2.5000"}, [],
            id="loss and test",
        ),
        pytest.param(
            {DDP[gpus]: (epochs_of(rate, 32 * gpus), 100)
             for gpus, rate in ((8, 700), (2, 200), (4, 390))},
            (), {"gpus": "2,4,8", "speed_up": "1.00,1.95,3.50",
                 "scaling_efficiency": "100 %,98 %,88 %"}, [], id="base",
        ),
        pytest.param(
            {folder_name(1, 64, "ddp"): (epochs_of(100, 64), 100),
             DDP[2]: (epochs_of(180, 64), 100),
             folder_name(1, 64, "ddp", "vgg19_bn"): (epochs_of(120, 64), 100)},
            (), {"arch": "resnet50,vgg19_bn,resnet50", "nodes": "1,1,-",
                 "scaling_efficiency": "100 %,-,90 %"},
            ["speed-up and efficiency.*strong scaling",
             r"differs from its base .* in batch per gpu \(32, not 64\)",
             r"NOT COMPARABLE: 1 GPU vgg19_bn b64 differs from 1 GPU resnet50 b64 in arch "
             r"\(vgg19_bn, not resnet50\); it has no speed-up"],
            id="differences",
        ),
        pytest.param(  # throughput of one process; time of an epoch; neither fits
            {folder_name(4): (epochs_of(800, 208), 100),
             folder_name(8): (time_of_an_epoch(epochs_of(6000, 208 * 8), 770), 100),
             folder_name(16): (epochs_of(9000, 300), 100)},
            (), {"images_per_s": "3200,6000,9000", "step_ms": "260,277.3,33.33",
                 "steps_per_epoch": "-,770,-"},
            ["4 GPUs: .*that of one process, and is multiplied by 4",
             "8 GPUs: .*that of an epoch, and is divided by 770", "16 GPUs: .* 300 images.*wrong"],
            id="units",
        ),
        pytest.param(
            {"old": (epochs_of(100, 64, (10, 20), first=0), 100), "share": (shares(30), 100)},
            (), {"epochs": "2,30", "best_top1": "20.00,96.67", "best_top5": "60.00,97.00"},
            ["share: .* shares of 1", "old: .* from 0"], id="shares and epochs from 0",
        ),
        pytest.param(
            {**{str(i): (rated(rates), 100) for i, rates in enumerate(RATES)},
             "nan": ({1: {"Top1/val": NAN}}, 100)},
            (), {"images_per_s": ",".join([*RATES.values(), "-"]),
                 "best_top1": ",".join(["7.00"] * len(RATES) + ["-"])}, [], id="NaN",
        ),
        pytest.param(  # a file that was written anew, all points in a moment
            {"moment": (epochs_of(100, 640), 0.001)}, (), {"hours": "-"}, ["has no hours"],
            id="clocks",
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
    # An epoch is a time where there are others; as in summary.json.
    assert (typical({1: 50.0, 2: NAN}), typical({1: NAN})) == (50, None)


def test_a_file_whose_first_record_is_late(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        for x in (1, 2, 3, 4):
            writer.add_scalar("Top1/val", 10.0 * x, x, BEGAN + 3600 * x)
    assert table(tmp_path)[0]["hours"] == ["4 h"]


def test_resumed_run(tmp_path):
    run = tmp_path / folder_name(2)
    write(run, epochs_of(100, 416, (10, 20, 90, 95)), seconds=3600)
    # Two days later, from the snapshot after 2 epochs.
    write(run, epochs_of(100, 416, (30, 40), first=2), began=BEGAN + 2 * 86400, seconds=1800)
    cells, notes, both = table(run)
    assert cells["best_top1"] == ["40.00"]
    assert both.runs[0].hours == {1: 1.0, 2: 2.0, 3: 2.5, 4: 3.0}
    note(notes, "2 epochs were repeated")
    # Killed after one epoch, and resumed once more: what was lost stays lost.
    later = BEGAN + 4 * 86400
    write(run, epochs_of(100, 416, (25,), first=1), began=later, seconds=7200)
    cells, _, both = table(run)
    assert (cells["epochs"], cells["best_top1"]) == (["2"], ["25.00"])
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
    cells, notes, _ = table(tmp_path / "a")
    assert (cells["epochs"], cells["best_top1"]) == (["2"], ["20.00"])
    assert f"cut off or damaged at byte {start} of" in note(notes, file.name)
    assert cells["state"] == ["running"], "its last record may be being written"


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
    for name in ("runs/run10", "runs/run9", "runs/16_gpus", "older/run9"):
        write(tmp_path / name, epochs_of(100, 64))
    given = tmp_path / "runs", tmp_path / "older", tmp_path / "runs"
    labels = ["16_gpus", "runs/run9", "run10", "older/run9"]
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
        (["good", "nowhere"], "nowhere does not exist"),
        (["nothing"], "nothing holds no event file (they are named events.out.tfevents.*)"),
        (["notes.txt"], "notes.txt holds no event file (they are named events.out.tfevents.*)"),
        (["good", "--labels", "a", "b"], "2 labels for 1 runs (good); give one per run"),
        (["good", "--gpus", "1", "2"], "2 numbers of GPUs for 1 runs (good); give one per run"),
        (["empty"], "empty is left out: it has no finished epoch"),
    ],
)
def test_bad_input_is_a_user_error(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "good", {1: {"Top1/val": 10.0}})
    write(tmp_path / "empty", {}).write_bytes(b"")
    (tmp_path / "nothing" / "in here").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(UserError) as caught:
        table(*arguments)
    assert message in str(caught.value)


def test_errors_are_one_line(tmp_path):
    """Before a large library is loaded, where that is possible."""
    write(tmp_path / "good", {1: {"Top1/val": 10.0}})
    file = tmp_path / "matplotlib.py"
    file.write_text("raise SystemExit('imported')")
    done = python(SCRIPT, "nowhere", PYTHONPATH=str(tmp_path))
    assert (done.code, done.err) == (2, "error: nowhere does not exist\n")
    done = python(SCRIPT, tmp_path / "good", "--out", file)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "matplotlib.py" in done.sentence


# ---- the section in a file of Markdown


def test_nothing_else_is_touched(tmp_path):
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


@pytest.mark.parametrize(
    "harm",
    [
        lambda text, end: text.replace(end, ""),
        lambda text, end: 2 * text,
        lambda text, end: end + text.replace(end, ""),
    ],
    ids=["end is gone", "twice", "wrong order"],
)
def test_broken_markers_are_left_alone(tmp_path, harm):
    file = tmp_path / "R.md"
    tables.put(file, "compare_runs", "x", "text")
    text = harm(file.read_text(), "<!-- compare_runs end x -->")
    file.write_text(text)
    with pytest.raises(UserError, match="correct it by hand"):
        tables.put(file, "compare_runs", "x", "other")
    assert file.read_text() == text
