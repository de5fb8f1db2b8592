"""scripts/compare_runs.py: the files that it writes, and its pictures."""

import csv
import re

import compare_runs
import pytest
from browser import Page
from compare import pictures
from conftest import python
from event_files import HAL, SCRIPT, epochs_of, folder_name, table, write


@pytest.fixture(scope="module")
def hal(tmp_path_factory):
    """The folder of the six runs of 2020, drawn."""
    root = tmp_path_factory.mktemp("hal")
    for gpus, rate in HAL.items():
        write(root / "runs" / folder_name(gpus), epochs_of(rate, 208 * gpus), seconds=600)
    words = ("--formats", "svg,pdf", "--results", root / "R.md", "--title", "HAL & <others>")
    words += ("--train-images", 1281167, "--out", root / "my out")
    done = python(SCRIPT, root / "runs", *words)
    assert (done.code, done.err) == (0, "")
    return root


def test_which_files_are_written(hal):
    """Six runs of 2020: what is in their names is known, and no more."""
    curves = ("top1_train", "top1_val", "top5_train", "top5_val", "loss_train", "loss_val")
    drawn = {*curves, *(f"{name}_hours" for name in curves)}
    drawn |= {"training_throughput", "training_time", "scaling", "overlay"}
    files = {file.name for file in (hal / "my out").iterdir()}
    texts = {"compare.md", "compare.csv", "compare.html"}
    kinds = ("png", "svg", "pdf")
    assert files == texts | {f"{name}.{kind}" for name in drawn for kind in kinds}
    with open(hal / "my out" / "compare.csv") as file:
        lines = list(csv.DictReader(file))
    shares = [float(line["scaling_efficiency"]) for line in lines]
    assert shares == pytest.approx([r / HAL[2] * 2 / g for g, r in HAL.items()], rel=1e-6)
    steps = dict(zip(HAL, (3080, 1540, 770, 385, 193, 97), strict=True))
    names = ("label", "gpus", "arch", "mode", "global_batch", "steps_per_epoch")
    assert [[line[name] for name in names] for line in lines] == [
        [f"{n} GPUs", str(n), "resnet50", "O2", str(208 * n), str(steps[n])] for n in HAL
    ]
    assert "nodes" not in lines[0]  # nothing is known about them
    # Again, later: the same bytes.
    comparison, again = table(hal / "runs")[2], hal / "again"
    pictures.draw(comparison, again, "x_", only=("top1_val",), formats=("svg", "pdf"))
    assert {file.name for file in again.iterdir()} == {f"x_top1_val.{kind}" for kind in kinds}
    for file in again.iterdir():
        assert file.read_bytes() == (hal / "my out" / file.name.removeprefix("x_")).read_bytes()
    # Bars are as long as the medians, beside perfect scaling.
    rates, perfect = list(HAL.values()), [HAL[2] / 2 * gpus for gpus in HAL]
    lines = [[y for _, y in points] for _, points in pictures.scaling(comparison).lines]
    (axes,) = pictures.plan(comparison)["training_throughput"]().axes
    bars = [[bar.get_width() for bar in group] for group in axes.containers]
    assert bars == [pytest.approx(rates), pytest.approx(perfect)]
    assert lines == bars
    assert axes.texts[-1].get_text() == "32619  x 20.62  64 %"


def test_section_and_page(hal):
    section = (hal / "R.md").read_text()
    assert "## HAL &amp; &lt;others&gt;\n" in section
    assert (hal / "my out" / "compare.md").read_text().strip() in section
    assert section.count("| 2020-08-09 |") == 6
    links = re.findall(r"!\[.*?\]\((\S*?)\)", section)
    assert links == [f"my%20out/{name}.png" for name in ("top1_val", "training_throughput")]
    text = (hal / "my out" / "compare.html").read_text()
    assert not re.findall('src="|<link|href|url\\(|@import', text)
    rows = [" ".join(re.sub("<.*?>", " ", row).split()) for row in re.findall("<tr.*?</tr>", text)]
    assert "scaling efficiency 100 % 95 % 92 % 89 % 77 % 64 %" in rows
    assert "images/s relative to 2 GPUs, at an equal batch per GPU (weak scaling)" in text
    for sentence in table(hal / "runs")[2].sentences:
        assert sentence in text and sentence in section.partition("```")[0]


def test_the_page_in_a_browser(hal):
    """Curves are read off by moving over them, and zoomed by dragging."""
    with Page(hal / "my out" / "compare.html") as page:
        chart = "[...document.querySelectorAll('.chart.epochs')][1]"
        title = page.run(f"{chart}.querySelector('figcaption').innerText")
        assert title == "Top-1 accuracy, validation (%)"
        box = f"(b => [b.x, b.y, b.width, b.height])({chart}.querySelector('svg')"
        page.run(f"{chart}.scrollIntoView()")
        x, y, width, height = page.run(f"{box}.getBoundingClientRect())")
        page.mouse("Moved", x + 0.66 * width, y + height / 2)
        tip = page.run(f"{chart}.querySelector('.tip').innerText").splitlines()
        assert tip == ["3 epochs finished", *(f"{gpus} GPUs: 60 %" for gpus in HAL)]
        lines = f"{chart}.querySelectorAll('polyline')[5].getAttribute('points').split(' ')"
        ends = page.run(lines)
        page.mouse("Pressed", x + 0.6 * width, y + height / 2)
        page.mouse("Moved", x + 0.8 * width, y + height / 2)
        page.mouse("Released", x + 0.8 * width, y + height / 2)
        zoomed = page.run(lines)
        assert float(zoomed[0].split(",")[0]) < 0 < float(ends[0].split(",")[0])
        page.run(f"{chart}.querySelector('button').click()")
        assert page.run(lines) == ends
        page.run(f"{chart}.querySelector('.legend li').click()")
        assert page.run(f"{chart}.querySelectorAll('polyline').length") == len(HAL) - 1
        for scheme in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            page.call("Emulation.setEmulatedMedia", features=[feature])
            colour = page.run("getComputedStyle(document.body).backgroundColor")
            assert (max(map(int, re.findall(r"\d+", colour))) < 60) == (scheme == "dark")
        assert not page.errors
        assert page.requests == [(hal / "my out" / "compare.html").as_uri()]


def test_pictures_of_the_hardware_and_labels_with_special_characters(tmp_path):
    for name, seconds in (("a", 100), ("b", 100), ("c", 900)):
        epochs = epochs_of(100, 64, (20, 70, 74, 75))
        for values in epochs.values() if name < "c" else ():
            values |= {"IO/wait_share": 0.25, "IO/read_mb_s": 80.0, "IO/files_s": 700.0}
            values |= {f"GPU/utilisation_rank{rank}": 90.0 + rank for rank in range(3)}
            values |= {f"GPU/memory_gb_rank{rank}": 10.0 + rank for rank in range(3)}
        write(tmp_path / "runs" / name, epochs, seconds=seconds)
    labels = ["_x", "$\\y$ |", "<script>alert(1)</script>"]
    words = [tmp_path / "runs", "--labels", *labels]
    assert compare_runs.main([str(word) for word in words]) == 0
    out = tmp_path / "runs" / "compare"  # the default
    page = (out / "compare.html").read_text()
    assert "<script>alert" not in page
    markdown = (out / "compare.md").read_text().splitlines()
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in markdown} == {5}
    comparison = table(*words)[2]
    plan = pictures.plan(comparison)
    figure, by_time = (plan[name]() for name in ("top1_val", "top1_val_hours"))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == labels
    assert by_time.axes[0].get_xscale() == "log"
    ends = {"GPU/memory_gb": 12.0, "GPU/utilisation": 91.0, "IO/wait_share": 25.0}
    for tag, end in ends.items():
        label, points = pictures.curves(comparison, tag, "epochs").lines[0]
        assert (label, points) == ("_x", [(x, end) for x in (1, 2, 3, 4)])


def test_by_default_a_comparison_lies_beside_the_runs(tmp_path, monkeypatch):
    file = write(tmp_path / "runs" / "a", epochs_of(100, 64))
    monkeypatch.chdir(tmp_path / "runs" / "a")
    for first in (file, file.parent, file.parent.parent, type(file)("."), type(file)("..")):
        assert compare_runs.beside(first) == tmp_path / "runs" / "compare"


def test_runs_of_one_epoch_are_drawn(tmp_path):
    write(tmp_path / "a", epochs_of(100, 64, (20,)))
    plan = pictures.plan(table(tmp_path / "a")[2])
    (axes,) = plan["top1_val_hours"]().axes
    assert axes.get_xlabel() == "minutes of training" and axes.get_xlim()[0] == 0
    (axes,) = plan["top1_val"]().axes
    low, high = axes.get_xlim()
    assert [x for x in axes.get_xticks() if low <= x <= high] == [1]
