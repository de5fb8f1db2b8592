"""scripts/compare_runs.py: the files that it writes, and its pictures."""

import csv
import re
from xml.etree import ElementTree

import compare_runs
import pytest
from compare import pictures
from compare.pictures import style
from conftest import python
from event_files import HAL, HAL_EFFICIENCY, SCRIPT, epochs_of, table, write, write_hal

CURVES = ("top1_train", "top1_val", "top5_train", "top5_val", "loss_train", "loss_val")
SPEED = ("training_throughput", "training_time", "scaling", "overlay")


@pytest.fixture(scope="module")
def hal(tmp_path_factory):
    """The folder of the six runs of 2020, drawn."""
    root = tmp_path_factory.mktemp("hal")
    write_hal(root / "runs", seconds=600)
    words = ("--formats", "svg,pdf", "--results", root / "R.md", "--title", "HAL & <others>")
    done = python(SCRIPT, root / "runs", "--out", root / "my out", *words)
    assert (done.code, done.err) == (0, "")
    return root


def test_which_files_are_written(hal):
    names = {*CURVES, *(f"{name}_hours" for name in CURVES), *SPEED}
    files = {file.name for file in (hal / "my out").iterdir()}
    texts = {"compare.md", "compare.csv", "compare.html"}
    kinds = ("png", "svg", "pdf")
    assert files == texts | {f"{name}.{kind}" for name in names for kind in kinds}
    with open(hal / "my out" / "compare.csv") as file:
        lines = list(csv.DictReader(file))
    shares = [float(line["scaling_efficiency"]) for line in lines]
    assert shares == pytest.approx([r / HAL[2] * 2 / g for g, r in HAL.items()], rel=1e-6)
    assert [line["nodes"] for line in lines] == [""] * 6
    # Again, later: the same bytes.
    both, again = table(hal / "runs")[2], hal / "again"
    pictures.draw(both, again, "x_", only=("top1_val",), formats=("svg", "pdf"))
    assert {file.name for file in again.iterdir()} == {f"x_top1_val.{kind}" for kind in kinds}
    for file in again.iterdir():
        assert file.read_bytes() == (hal / "my out" / file.name.removeprefix("x_")).read_bytes()


def test_pictures_have_names_units_and_figures_of_all_runs(hal):
    texts = {
        file.stem: " ".join(" ".join(ElementTree.parse(file).getroot().itertext()).split())
        for file in (hal / "my out").glob("*.svg")
    }
    runs = " ".join(f"{gpus} GPUs" for gpus in HAL)
    expected = {name: ["epochs finished", runs] for name in (*CURVES, "overlay")}
    expected |= {f"{name}_hours": ["hours of training", runs] for name in CURVES}
    expected["top1_val"] += ["Top-1 accuracy, validation", "%"]
    figures = [(f"{r}", f"{HAL_EFFICIENCY[g]} %") for g, r in HAL.items()]
    expected["scaling"] = [", ".join(pair) for pair in figures]
    expected["training_throughput"] = [f"{rate} x {rate / HAL[2]:.2f}" for rate in HAL.values()]
    expected["training_time"] = ["263 ms (10 min per epoch)", "ms per step"]
    missing = {name: [w for w in words if w not in texts[name]] for name, words in expected.items()}
    assert not any(missing.values()), missing
    assert texts["overlay"].count(" GPUs") == len(HAL), "one legend for four panels"


def test_bars_are_as_long_as_the_medians_beside_perfect_scaling(tmp_path):
    plan = pictures.plan(table(write_hal(tmp_path))[2])
    rates, perfect = list(HAL.values()), [HAL[2] / 2 * gpus for gpus in HAL]
    (axes,) = plan["scaling"][1]().axes
    lines = [list(one.get_ydata()) for one in axes.lines]
    (axes,) = plan["training_throughput"][1]().axes
    bars = [[bar.get_width() for bar in group] for group in axes.containers]
    assert axes.yaxis_inverted(), "the first run is on top"
    assert lines == bars == [pytest.approx(rates), pytest.approx(perfect)]


def test_section_and_page(hal):
    section = (hal / "R.md").read_text()
    assert "## HAL &amp; &lt;others&gt;\n" in section
    assert "python scripts/compare_runs.py" in section
    assert (hal / "my out" / "compare.md").read_text().strip() in section
    assert section.count("| 2020-08-09 |") == 6
    assert section.count("not recorded") >= 12, "commit and machine of old runs"
    links = re.findall(r"!\[.*?\]\((\S*?)\)", section)
    assert links == [f"my%20out/{name}.png" for name in ("top1_val", "training_throughput")]
    text = (hal / "my out" / "compare.html").read_text()
    sources = re.findall(r'src="([^"]*)"', text)
    assert {hal / "my out" / source for source in sources} == {*(hal / "my out").glob("*.png")}
    assert not re.findall("<script|<link|href|url\\(|@import", text)
    assert "<title>HAL &amp; &lt;others&gt;</title>" in text
    rows = [" ".join(re.sub("<.*?>", " ", row).split()) for row in re.findall("<tr.*?</tr>", text)]
    assert "scaling efficiency 100 % 95 % 92 % 89 % 77 % 64 %" in rows


# ---- single pictures


def draw(root, *runs, name="top1_val"):
    """The axes of a picture of ``runs``: (top-1 of each epoch, seconds an epoch) each."""
    for i, (top1, seconds) in enumerate(runs):
        epochs = {x: {"Top1/val": y} for x, y in enumerate(top1, 1)}
        write(root / f"run{i}", epochs, seconds=seconds)
    (axes,) = pictures.plan(table(root)[2])[name][1]().axes
    return axes


RISING = [80 * x / (x + 3) for x in range(30)]


@pytest.mark.parametrize(("seconds", "scale"), [(600, "log"), (480, "linear")])
def test_hours_that_differ_much_are_on_a_logarithmic_axis(tmp_path, seconds, scale):
    axes = draw(tmp_path, (RISING, seconds), (RISING, 100), name="top1_val_hours")
    assert axes.get_xscale() == scale
    assert ("(logarithmic)" in axes.get_xlabel()) == (scale == "log")
    low, high = axes.get_xlim()
    assert sum(low <= tick <= high for tick in axes.get_xticks()) >= 4


def test_per_cent_end_at_100_and_empty_panels_are_left_out(tmp_path):
    runs = (([0.0, 90.0, 100.0], 100),)
    axes = draw(tmp_path, *runs)
    assert axes.get_ylim() == (0, 100)
    assert not axes.lines[0].get_clip_on(), "the line at 100 would be half as wide"
    assert draw(tmp_path, *runs, name="overlay").get_title() == "Top-1 accuracy, validation"


@pytest.mark.parametrize(
    ("other", "insets"),
    [
        ([y + 0.3 for y in RISING], 1),
        ([0.78 * y for y in RISING], 0),  # far apart
        ([y - 60 * (x == 14) for x, y in enumerate(RISING)], 0),  # in its place
        (RISING[:15], 0),  # alone at the end
    ],
)
def test_a_plateau_where_curves_lie_on_each_other_is_drawn_larger(tmp_path, other, insets):
    found = draw(tmp_path, (RISING, 100), (other, 100)).child_axes
    assert len(found) == insets
    for low, high in (axes.get_ylim() for axes in found):
        assert 50 < low < high < low + 20


def test_many_runs_stay_distinct():
    for count in (2, 8, 9, 24):
        looks = [style(i, count) for i in range(count)]
        kinds = [(one["color"], str(one["linestyle"]), one["marker"]) for one in looks]
        for i, one in enumerate(kinds):
            for other in kinds[:i]:  # of one colour: another line and another mark
                assert one[0] != other[0] or (one[1] != other[1] and one[2] != other[2])


def test_identical_curves_are_both_visible(tmp_path):
    below, above = draw(tmp_path, (RISING, 100), (RISING, 100)).lines
    assert below.get_linewidth() > 2 * above.get_linewidth()
    assert below.get_color() != above.get_color()


def test_pictures_of_the_hardware_and_labels_with_special_characters(tmp_path, capsys):
    for name in ("a", "b", "c"):
        epochs = epochs_of(100, 64)
        for values in epochs.values() if name < "c" else ():
            values |= {"IO/wait_share": 0.25, "IO/read_mb_s": 80.0, "IO/files_s": 700.0}
            values |= {f"GPU/utilisation_rank{rank}": 90.0 + rank for rank in range(3)}
            values |= {f"GPU/memory_gb_rank{rank}": 10.0 + rank for rank in range(3)}
        write(tmp_path / "runs" / name, epochs)
    labels = ["_x", "$\\y$ |", "<script>alert(1)</script>"]
    words = [tmp_path / "runs", "--out", tmp_path, "--labels", *labels]
    assert compare_runs.main([str(word) for word in words]) == 0
    assert "and 17 pictures" in capsys.readouterr().out
    page = (tmp_path / "compare.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    markdown = (tmp_path / "compare.md").read_text().splitlines()
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in markdown} == {5}
    both = table(*words)[2]
    figures = {name: make() for name, (_, make) in pictures.plan(both).items()}
    (legend,) = figures["top1_val"].legends
    assert [text.get_text() for text in legend.get_texts()] == labels
    assert [axes.get_title() for name in ("IO", "gpu") for axes in figures[name].axes] == [
        "Waiting for data", "Reading, all processes", "Files read, all processes",
        "GPU utilisation, mean of all GPUs", "GPU memory, fullest GPU",
    ]  # fmt: skip
    (axes,) = figures["training_throughput"].axes
    assert [text.get_text() for text in axes.texts] == ["100  x 1.00"] * 3, "known figures alone"
    ends = {"GPU/memory_gb": 12.0, "GPU/utilisation": 91.0, "IO/wait_share": 25.0}
    for tag, end in ends.items():
        assert pictures.line(both.runs[0], tag, "epochs") == dict.fromkeys((1, 2, 3, 4), end)
