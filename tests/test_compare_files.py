"""scripts/compare_runs.py: the files that it writes, and its pictures."""

import csv
import re
from xml.etree import ElementTree

import compare_runs
import pytest
from compare import pictures
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
    figures = [(f"{r}", f"{HAL_EFFICIENCY[g]} %") for g, r in HAL.items()]
    expected["scaling"] = [", ".join(pair) for pair in figures]
    expected["training_throughput"] = [f"{rate} x {rate / HAL[2]:.2f}" for rate in HAL.values()]
    expected["training_time"] = ["263 ms (10 min per epoch)", "ms per step"]
    missing = {name: [w for w in words if w not in texts[name]] for name, words in expected.items()}
    assert not any(missing.values()), missing


def test_bars_are_as_long_as_the_medians_beside_perfect_scaling(tmp_path):
    plan = pictures.plan(table(write_hal(tmp_path))[2])
    rates, perfect = list(HAL.values()), [HAL[2] / 2 * gpus for gpus in HAL]
    (axes,) = plan["scaling"][1]().axes
    lines = [list(one.get_ydata()) for one in axes.lines]
    (axes,) = plan["training_throughput"][1]().axes
    bars = [[bar.get_width() for bar in group] for group in axes.containers]
    assert lines == bars == [pytest.approx(rates), pytest.approx(perfect)]


def test_section_and_page(hal):
    section = (hal / "R.md").read_text()
    assert "## HAL &amp; &lt;others&gt;\n" in section
    assert (hal / "my out" / "compare.md").read_text().strip() in section
    assert section.count("| 2020-08-09 |") == 6
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

RISING = [80 * x / (x + 3) for x in range(30)]


@pytest.mark.parametrize(
    ("other", "seconds", "insets", "scale"),
    [
        ([y + 0.3 for y in RISING], 480, 1, "linear"),
        ([0.78 * y for y in RISING], 600, 0, "log"),  # far apart; and six times as long
        (RISING[:15], 100, 0, "linear"),  # alone at the end
    ],
)
def test_curves_that_lie_on_each_other_are_drawn_larger(tmp_path, other, seconds, insets, scale):
    """Hours that differ much are on a logarithmic axis. Nothing is outside the axes."""
    for name, top1, lasted in (("a", RISING, 100), ("b", other, seconds)):
        points = {x: {"Top1/val": y} for x, y in enumerate(top1, 1)}
        write(tmp_path / name, points, seconds=lasted)
    plan = pictures.plan(table(tmp_path)[2])
    (axes,) = plan["top1_val"][1]().axes
    assert len(axes.child_axes) == insets
    low, high = axes.get_ylim()
    assert 0 <= low < high <= 100
    (axes,) = plan["top1_val_hours"][1]().axes
    assert axes.get_xscale() == scale


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
    (legend,) = pictures.plan(both)["top1_val"][1]().legends
    assert [text.get_text() for text in legend.get_texts()] == labels
    ends = {"GPU/memory_gb": 12.0, "GPU/utilisation": 91.0, "IO/wait_share": 25.0}
    for tag, end in ends.items():
        assert pictures.line(both.runs[0], tag, "epochs") == dict.fromkeys((1, 2, 3, 4), end)
