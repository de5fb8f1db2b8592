"""scripts/compare_runs.py on event files that SummaryWriter wrote."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.util.tensor_util import make_tensor_proto
from torch.utils.tensorboard import SummaryWriter

SCRIPT = Path(__file__).parents[1] / "scripts" / "compare_runs.py"
FIRST, LAST = (0xF8, 0xD0, 0x60), (0x11, 0x14, 0x28)  # colours of the first and the last run
BELOW = slice(180, None)  # lines of pixels under the legend, which shows every run's colour
LOSS = [3.0, 2.0, 1.5, 1.2]


def compare(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script in ``cwd``; no run of it may end in a traceback."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def write_run(
    folder: Path,
    scalars: dict[str, Sequence[float]],
    first_step: int = 1,
    wall_time: float = 1000.0,
    new_style: bool = False,
) -> Path:
    """Write one event file with a point a step for each tag, and return its path."""
    before = set(folder.glob("*"))
    writer = SummaryWriter(str(folder))
    for tag, values in scalars.items():
        for step, value in enumerate(values, first_step):
            writer.add_scalar(tag, value, step, wall_time + step, new_style=new_style)
    writer.close()
    (file,) = set(folder.glob("*")) - before
    return file


def rows(stdout: str) -> list[list[str]]:
    """The cells of the table's lines below its head: label, epochs, best, last, speeds, ratio."""
    lines = stdout.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("run "))
    end = next(i for i, line in enumerate(lines) if line.startswith("(images/s"))
    return [re.split(r"\s{2,}", line.strip()) for line in lines[head + 1 : end]]


def where(picture: Path, colour: tuple[int, int, int]) -> np.ndarray:
    """Height x width, bool: which pixels of the picture have exactly this colour."""
    return (np.asarray(Image.open(picture).convert("RGB")) == colour).all(axis=-1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two runs of 4 epochs with the same training loss; the folder, and what the script said."""
    folder = tmp_path_factory.mktemp("pair")
    base = {
        "Loss/train": LOSS,
        "Loss/val": [3.5, 2.5, 2.0, 1.8],
        "Top1/train": [8.0, 20.0, 28.0, 30.0],
        "Top1/val": [10.0, 30.0, 25.0, 20.0],
        "Top5/val": [20.0, 50.0, 45.0, 40.0],
        "Throughput/train": [900.0, 200.0, 300.0, 220.0],
        "Throughput/val": [7.0, 7.0, 7.0, 7.0],
        "Time/train": [9.0, 0.5, 0.25, 0.125],
        "Step/Loss/train": [99.0] * 6,
        "Lr": [0.1, 0.1, 0.01, 0.01],
    }
    fast = {tag: values for tag, values in base.items() if not tag.startswith("Top5")}
    fast["Throughput/train"] = [1.0, 440.0, 430.0, 5000.0]
    fast["Time/train"] = [9.0, 0.125, 0.125, 0.125]
    write_run(folder / "runs" / "base", base)
    write_run(folder / "runs" / "fast", fast)
    (folder / "runs" / "fast" / "summary.json").write_text(json.dumps({"world_size": 8}))
    return folder, compare("runs/base", "runs/fast", "--prefix", "demo_", cwd=folder)


def test_table(pair):
    done = pair[1]
    assert (done.returncode, done.stderr) == (0, "")
    assert rows(done.stdout) == [
        ["base", "4", "30.00 (2)", "20.00", "220", "0.25", "1.00"],
        ["fast (8 processes)", "4", "30.00 (2)", "20.00", "440", "0.125", "2.00"],
    ]


def test_pictures_drawn_and_not(pair):
    folder, done = pair
    names = "top1_train top1_val top5_val loss_train loss_val training_throughput training_time"
    expected = {f"demo_{name}.png" for name in [*names.split(), "overlay"]}
    assert {file.name for file in (folder / "figures").iterdir()} == expected
    said = done.stdout.splitlines()
    no_run = "demo_top5_train.png is not drawn: no Top5/train in base, fast (8 processes)"
    assert no_run in said
    one_run = "demo_top5_val.png is drawn without some runs: no Top5/val in fast (8 processes)"
    assert one_run in said
    assert sum(".png is " in line for line in said) == 2
    for file in (folder / "figures").iterdir():
        with Image.open(file) as image:
            assert image.width >= 1000
            assert not {"Software", "Creation Time", "date"} & set(image.info)
        assert where(file, FIRST).sum() > 1000, file
        assert (where(file, LAST)[BELOW].sum() > 300) == (file.name != "demo_top5_val.png"), file


def test_identical_curves_are_both_visible(pair):
    picture = pair[0] / "figures" / "demo_loss_train.png"
    pale, dark = where(picture, FIRST)[BELOW], where(picture, LAST)[BELOW]
    assert pale.sum() > 2000
    assert dark.sum() > 1000
    # Both over the whole length of the curve, not only where a mark is.
    across = pale.any(axis=0) & dark.any(axis=0)
    assert across.sum() > 0.5 * np.ptp(np.flatnonzero(pale.any(axis=0)))


def test_bars_are_as_long_as_the_medians(pair):
    def lengths(name: str) -> list[int]:
        picture = pair[0] / "figures" / f"demo_{name}.png"
        return [int(where(picture, colour).sum(axis=1).max()) for colour in (FIRST, LAST)]

    base, fast = lengths("training_throughput")
    assert fast / base == pytest.approx(2.0, abs=0.05)
    base, fast = lengths("training_time")
    assert fast / base == pytest.approx(0.5, abs=0.05)


def test_same_input_same_bytes(pair):
    folder, first = pair
    arguments = ("runs/base", "runs/fast", "--prefix", "demo_", "--out", "again")
    again = compare(*arguments, cwd=folder)
    assert rows(again.stdout) == rows(first.stdout)
    files = sorted((folder / "again").iterdir())
    assert len(files) == 8
    for file in files:
        assert file.read_bytes() == (folder / "figures" / file.name).read_bytes()


@pytest.mark.parametrize(
    ("first_step", "rates", "median"),
    [
        (1, [50.0], "50"),
        (1, [50.0, math.nan], "50"),
        (1, [50.0, 70.0], "70"),
        (2, [50.0, 70.0], "60"),  # nothing was measured in the first epoch
    ],
)
def test_first_epoch_is_set_aside_where_there_are_more(tmp_path, first_step, rates, median):
    write_run(tmp_path / "a", {"Throughput/train": rates}, first_step)
    epochs = str(first_step + len(rates) - 1)
    assert rows(compare("a", cwd=tmp_path).stdout) == [["a", epochs, "-", "-", median, "-", "1.00"]]


def test_curve_of_one_epoch_is_visible(tmp_path):
    write_run(tmp_path / "one", {"Top1/val": [3.0]})
    done = compare("one", cwd=tmp_path)
    assert rows(done.stdout) == [["one", "1", "3.00 (1)", "3.00", "-", "-", "-"]]
    assert where(tmp_path / "figures" / "top1_val.png", LAST)[BELOW].sum() > 50


def test_later_point_of_a_step_counts(tmp_path):
    # The file written first, whose name sorts first, holds the later points.
    late = write_run(tmp_path / "a", {"Top1/val": [40.0, 41.0]}, first_step=2, wall_time=2000)
    early = write_run(tmp_path / "a", {"Top1/val": [10.0, 90.0, 80.0]})
    assert late.name < early.name
    write_run(tmp_path / "b", {"Top1/val": [10.0, 90.0, 80.0]})
    write_run(tmp_path / "b", {"Top1/val": [40.0, 41.0]}, first_step=2, wall_time=2000)
    cells = rows(compare("a", "b", cwd=tmp_path).stdout)
    assert [row[1:4] for row in cells] == [["3", "41.00 (3)", "41.00"]] * 2


def test_single_event_file(tmp_path):
    write_run(tmp_path / "a", {"Top1/val": [10.0, 20.0]})
    second = write_run(tmp_path / "a", {"Top1/val": [30.0]}, first_step=3)
    done = compare(second, cwd=tmp_path)
    assert rows(done.stdout) == [["a", "3", "30.00 (3)", "30.00", "-", "-", "-"]]


@pytest.mark.parametrize("new_style", [False, True])
def test_both_ways_of_writing_a_scalar(tmp_path, new_style):
    write_run(tmp_path / "a", {"Top1/val": [12.5, 25.0]}, new_style=new_style)
    assert rows(compare("a", cwd=tmp_path).stdout)[0][:4] == ["a", "2", "25.00 (2)", "25.00"]


def test_event_of_several_values(tmp_path):
    writer = SummaryWriter(str(tmp_path / "a"))
    values = [
        Summary.Value(tag="Top1/val", simple_value=5.0),
        Summary.Value(tag="text", tensor=make_tensor_proto("no number")),
        Summary.Value(tag="Top1/train", simple_value=6.0),
    ]
    writer._get_file_writer().add_summary(Summary(value=values), 7)
    writer.add_scalar("another tag", 1.0, 100)
    writer.close()
    done = compare("a", cwd=tmp_path)
    assert rows(done.stdout) == [["a", "7", "5.00 (7)", "5.00", "-", "-", "-"]]
    assert (tmp_path / "figures" / "top1_train.png").exists()


def test_epochs_counted_from_0(tmp_path):
    write_run(tmp_path / "old", {"Loss/train": [2.0, 1.0], "Top1/val": [9.0, 8.0]}, first_step=0)
    # Validation before any training is at 0 rightly.
    write_run(tmp_path / "new", {"Top1/val": [1.0, 9.0, 8.0]}, first_step=0)
    write_run(tmp_path / "new", {"Loss/train": [2.0, 1.0]})
    done = compare("old", "new", cwd=tmp_path)
    assert [row[1:4] for row in rows(done.stdout)] == [["2", "9.00 (1)", "8.00"]] * 2
    assert [line for line in done.stdout.splitlines() if "from 0" in line] == [
        "old: its event files count epochs from 0; they are counted from 1 here"
    ]


def test_not_a_number(tmp_path):
    accuracy = [math.nan, 7.0, 5.0, math.nan]
    scalars = {"Top1/val": accuracy, "Throughput/train": [9.0, math.nan, 10.0]}
    write_run(tmp_path / "a", scalars)
    done = compare("a", cwd=tmp_path)
    assert rows(done.stdout) == [["a", "4", "7.00 (2)", "nan", "10", "-", "1.00"]]


@pytest.mark.parametrize("harm", ["cut in a header", "cut in a record", "one bit", "zeros"])
def test_damaged_file_is_read_up_to_the_damage(tmp_path, harm):
    file = write_run(tmp_path / "a", {"Top1/val": [10.0, 20.0, 30.0]})
    data = bytearray(file.read_bytes())
    start = end = 0
    while end < len(data):
        start, end = end, end + 16 + int.from_bytes(data[end : end + 8], "little")
    if harm == "one bit":
        data[end - 5] ^= 64  # in the value, before the checksum
    elif harm == "zeros":  # what some file systems leave of a file after a crash
        data[start:] = bytes(end - start)
    else:
        del data[start + 5 if harm == "cut in a header" else end - 1 :]
    file.write_bytes(data)
    done = compare("a", cwd=tmp_path)
    assert done.returncode == 0
    assert rows(done.stdout)[0][1:4] == ["2", "20.00 (2)", "20.00"]
    assert re.fullmatch(
        rf"warning: .*tfevents.* is cut off or damaged at byte {start} .*\n", done.stderr
    )


def test_empty_file(tmp_path):
    file = write_run(tmp_path / "a", {"Top1/val": [10.0]})
    file.write_bytes(b"")
    write_run(tmp_path / "b", {"Throughput/train": [10.0]})
    done = compare("a", "b", cwd=tmp_path)
    assert done.returncode == 0
    assert rows(done.stdout) == [["a", *"------"], ["b", "1", "-", "-", "10", "-", "-"]]
    assert re.fullmatch(r"warning: .*tfevents.* is empty\n", done.stderr)
    drawn = {"training_throughput.png", "overlay.png"}
    assert {picture.name for picture in (tmp_path / "figures").iterdir()} == drawn


def test_folder_of_runs_and_labels(tmp_path):
    for name in ("b", "a"):
        write_run(tmp_path / "runs" / name, {"Top1/val": [10.0]})
    write_run(tmp_path / "older" / "a", {"Top1/val": [20.0]})
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "a" / "events.out.tfevents.1.tmp").write_bytes(b"half rewritten")
    (tmp_path / "runs" / "a" / "summary.json").write_text('{"world_size": 1}')
    (tmp_path / "runs" / "b" / "summary.json").write_text("no JSON")
    cells = rows(compare("runs", "older/a", cwd=tmp_path).stdout)
    labels = ["runs/a (1 process)", "b", "older/a"]
    assert [row[0] for row in cells] == labels
    assert [row[3] for row in cells] == ["10.00", "10.00", "20.00"]
    labels = ["_x", "$\\y$", "z z"]  # signs with a meaning of their own in matplotlib
    done = compare("runs", "older/a", "--labels", *labels, cwd=tmp_path)
    assert [row[0] for row in rows(done.stdout)] == labels
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["good", "nowhere"], "nowhere does not exist"),
        (["nothing"], "nothing holds no event file (they are named events.out.tfevents.*)"),
        (["notes.txt"], "notes.txt holds no event file (they are named events.out.tfevents.*)"),
        (["good", "--labels", "a", "b"], "2 labels for 1 runs; give one label a run"),
    ],
)
def test_wrong_input_is_one_sentence(tmp_path, arguments, sentence):
    write_run(tmp_path / "good", {"Top1/val": [10.0]})
    (tmp_path / "nothing" / "in here").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("text")
    # Nobody should wait for a large library in order to be told of a typing error.
    (tmp_path / "matplotlib.py").write_text("raise SystemExit('imported')")
    done = compare(*arguments, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {sentence}\n")
    assert not (tmp_path / "figures").exists()


def test_folder_for_pictures_is_a_file(tmp_path):
    write_run(tmp_path / "good", {"Top1/val": [10.0]})
    (tmp_path / "taken").write_text("")
    done = compare("good", "--out", "taken", cwd=tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(r"error: .*'taken'\n", done.stderr)
