"""scripts/compare_runs.py: the files that it writes, and its pictures."""

import csv
import itertools
import math
import re
import shutil
import sys

import compare_runs
import matplotlib
import pytest
from browser import Page
from compare import page, palette, pictures
from compare.page import Chart
from conftest import ROOT, python
from event_files import HAL, SCRIPT, epochs_of, folder_name, table, write
from running import eventually

from utils.start.errors import UserError


@pytest.fixture(scope="module")
def hal(tmp_path_factory):
    """The folder of the six runs of 2020, drawn."""
    root = tmp_path_factory.mktemp("hal")
    for gpus, rate in HAL.items():
        write(root / "runs" / folder_name(gpus), epochs_of(rate, 208 * gpus), seconds=600)
    words = ("--formats", "svg,pdf", "--results", root / "R.md", "--title", "HAL & <others>")
    words += ("--train-images", 1281167, "--out", root / "my #1")
    done = python(SCRIPT, root / "runs", *words)
    assert (done.code, done.err) == (0, "")
    assert f"one picture of all: {root / 'my #1/overlay.png'}\n" in done.out
    return root


def test_which_files_are_written(hal):
    """Six runs of 2020: what is in their names is known, and no more."""
    curves = ("top1_train", "top1_val", "top5_train", "top5_val", "loss_train", "loss_val")
    drawn = {*curves, *(f"{name}_hours" for name in curves)}
    drawn |= {"training_throughput", "training_time", "scaling", "overlay"}
    files = {file.name for file in (hal / "my #1").iterdir()}
    texts = {"compare.md", "compare.csv", "compare.html"}
    kinds = ("png", "svg", "pdf")
    assert files == texts | {f"{name}.{kind}" for name in drawn for kind in kinds}
    with open(hal / "my #1" / "compare.csv") as file:
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
        assert file.read_bytes() == (hal / "my #1" / file.name.removeprefix("x_")).read_bytes()
    # Bars are as long as the medians, beside perfect scaling.
    rates, perfect = list(HAL.values()), [HAL[2] / 2 * gpus for gpus in HAL]
    lines = [[y for _, y in points] for _, points in pictures.scaling(comparison).lines]
    assert pictures.scaling(comparison).ticks == [4, 8, 16, 32, 64], "2 would touch 4"
    assert pictures.curves(comparison, "Throughput/train", "epochs").zero
    (axes,) = pictures.plan(comparison)["training_throughput"]().axes
    bars = [[bar.get_width() for bar in group] for group in axes.containers]
    assert bars == [pytest.approx(rates), pytest.approx(perfect)]
    assert lines == bars
    assert axes.texts[-1].get_text() == "32619  x 20.62  64 %"
    looks = list(palette.styles([run.label for run in comparison.runs]).values())
    assert [looks[i].colour for i in (0, -1)] == [palette.SEQUENCE[i] for i in (0, -1)]


def test_section_and_page(hal):
    section = (hal / "R.md").read_text()
    assert "## HAL &amp; &lt;others&gt;\n" in section
    assert (hal / "my #1" / "compare.md").read_text().strip() in section
    assert section.count("| 2020-08-09 |") == section.count(" GPUs: not recorded") == 6
    links = re.findall(r"!\[.*?\]\((\S*?)\)", section)
    assert links == [f"my%20%231/{name}.png" for name in ("top1_val", "training_throughput")]
    text = (hal / "my #1" / "compare.html").read_text()
    own = re.sub("(?s)<script>.*", "", text)  # without plotly's library
    assert not re.findall('src="|<link|href|url\\(|@import', own)
    rows = [" ".join(re.sub("<.*?>", " ", row).split()) for row in re.findall("<tr.*?</tr>", text)]
    assert "throughput efficiency 100 % 95 % 92 % 89 % 77 % 64 %" in rows
    assert "images/s relative to 2 GPUs, at an equal batch per GPU (weak scaling)" in text
    assert "\n- speed-up and throughput efficiency: images/s relative to 2 GPUs, at an" in section
    for sentence in table(hal / "runs")[2].sentences:
        assert sentence in text and sentence in section.partition("```")[0]


def test_the_page_in_a_browser(hal):
    """Curves are read off by moving over them, zoomed by dragging, and hidden by keyboard."""
    with Page(hal / "my #1" / "compare.html") as page:
        assert page.run("document.querySelectorAll('h3')[0].innerText") == "Validation"
        chart = "document.querySelector('.chart')"
        assert page.run(f"{chart}.data.length") == 2 * len(HAL)
        page.run(f"{chart}.scrollIntoView()")
        box = f"(b => [b.x, b.y, b.width, b.height])({chart}.querySelector('.nsewdrag')"
        x, y, width, height = page.run(f"{box}.getBoundingClientRect())")

        def until(expression):
            assert eventually(lambda: page.run(expression)), expression

        # The third of four epochs, at 60 % on an axis from 20 to 75 %.
        low, high = page.run(f"{chart}._fullLayout.yaxis.range")
        page.mouse("Moved", x + 0.667 * width, y + height * (1 - (60 - low) / (high - low)))
        until(f"{chart}.querySelector('.hoverlayer').textContent.includes('60 % at 3')")
        page.mouse("Pressed", x + 0.4 * width, y + height / 2)
        page.mouse("Moved", x + 0.8 * width, y + height / 2)
        page.mouse("Released", x + 0.8 * width, y + height / 2)
        until(f"{chart}._fullLayout.xaxis.range[0] > 1.5")
        # By keyboard: the cursor begins at the last of four epochs.
        page.run(f"{chart}.focus()")
        for key in ("0", "ArrowUp", "ArrowLeft", "+"):
            page.key(key)
        until(f"{chart}.querySelector('.hoverlayer').textContent.includes('at 3')")
        until(f"(([a, b]) => 2 < a && b < 4)({chart}._fullLayout.xaxis.range)")
        page.key("0")
        until(f"{chart}._fullLayout.xaxis.range[0] <= 1")
        # A check box hides a run on all charts, also on those that are opened later.
        page.run("document.querySelector('[data-run=\"2 GPUs\"]').focus()")
        page.key(" ")
        hidden = "[...document.querySelectorAll('.chart')].filter(c => c.data)"
        hidden += ".every(c => c.data.some(l => l.meta.name === '2 GPUs' && l.visible === false))"
        until(hidden)
        page.run("document.querySelector('details .chart').closest('details').open = true")
        until("!!document.querySelector('details .chart').data")
        until(hidden)
        page.run("document.querySelector('#times').click()")
        title = "layout.xaxis.title.text"
        until(f"{chart}.{title}.includes('of training')")
        until(f"document.querySelector('details .chart').{title}.includes('of training')")
        # 40 minutes do not have 40 labels; each of four epochs has one.
        ticks = f"[...{chart}.querySelectorAll('.xtick')].map(tick => tick.textContent).join()"
        until(f"{ticks} === '10,15,20,25,30,35,40'")
        page.run("document.querySelector('#epochs').click()")
        until(f"{ticks} === '1,2,3,4'")
        assert not page.errors
        loaded = [url for url in page.requests if not url.startswith(("data:", "blob:"))]
        assert loaded == [(hal / "my #1" / "compare.html").as_uri()]
        # On a telephone no title is cut off.
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=320,
            height=600,
            deviceScaleFactor=1,
            mobile=True,
        )
        page.call("Page.reload")
        titles = "[...document.querySelectorAll('.chart .annotation-text')]"
        until(f"{titles}.some(t => t.textContent.includes('images/s, all processes'))")
        assert page.run(f"{titles}.every(t => t.getBoundingClientRect().right <= 304)")


def test_without_plotly_one_line_says_how_to_get_it(tmp_path, monkeypatch):
    write(tmp_path / "a", epochs_of(100, 64))
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.delitem(sys.modules, "plotly.offline", raising=False)
    with pytest.raises(UserError, match="pip install plotly"):
        compare_runs.main([str(tmp_path / "a")])


def test_runs_that_cannot_be_compared_have_no_common_charts(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.chdir(tmp_path)
    for name, arch in (("a", "resnet50"), ("b", "vgg19"), ("c", "resnet50")):
        write(tmp_path / name, epochs_of(100, 64), options={"arch": arch, "gpus": 1})
    out, more = tmp_path / "out", ["--out", str(tmp_path / "out"), "--prefix", "x_"]
    labels = ["--labels", "a", "b", "c of a longer name"]
    assert compare_runs.main([*(str(tmp_path / name) for name in "abc"), *more, *labels]) == 0
    said = capsys.readouterr().out
    sentences = said.partition("\n\n")[0]
    assert "\n- NOT COMPARABLE: b differs from a in model" in said
    assert 60 < max(map(len, sentences.splitlines())) <= 80, "no terminal here"
    page = (out / "x_compare.html").read_text()
    assert f"<pre>python {ROOT}/scripts/compare_runs.py {tmp_path}/a " in page
    assert '<div class="lead warning"><p>b cannot be compared with a' in page
    comparison = table(*(tmp_path / name for name in "abc"))[2]
    for _, _, drawing in pictures.drawings(comparison):
        assert {line["name"] for line in drawing["data"]} == {"a", "c"}
        colours = {line["name"]: line["line"]["color"] for line in drawing["data"]}
        axes = [one["domain"] for key, one in drawing["layout"].items() if key.startswith("yaxis")]
        assert (axes[0][1], axes[-1][0]) == (1.0, pytest.approx(0.0, abs=1e-9))
        for above, below in itertools.pairwise(axes):
            assert above[0] - below[1] > 0.03, "there is space for a title"
    # A run has one colour, on the page and in all pictures.
    plan = pictures.plan(comparison)
    bars, lines = plan["training_throughput"]().axes[0], plan["top1_val"]().axes[0].lines
    drawn = [matplotlib.colors.to_hex(bar.get_facecolor()) for bar in bars.containers[0]]
    assert [drawn[0], drawn[2]] == [line.get_color() for line in lines] == [*colours.values()]
    assert f"border-top-color: {colours['c']}" in page
    by_time = pictures.drawings(comparison)[0][2]["data"][0]["meta"]
    assert by_time["times"] == pytest.approx([100 * epoch / 60 for epoch in (1, 2, 3, 4)])
    assert by_time["axis"] == "minutes of training"
    assert compare_runs.main([str(tmp_path / "a"), *more, str(tmp_path / "b")]) == 0
    assert "data-chart" not in re.sub("(?s)<script.*", "", (out / "x_compare.html").read_text())


@pytest.mark.long
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
    # Pictures of an earlier comparison are removed, and no others.
    assert (out / "gpu.png").exists()
    for name in ("IO.png", "IO.pdf", "x_gpu.png", "my.png"):
        shutil.copy(out / "gpu.png", out / name)
    for name in ("scaling.png", "scaling.pdf"):
        (out / name).write_bytes(b"drawn by hand")
    assert compare_runs.main([str(tmp_path / "runs" / "c"), "--out", str(out)]) == 0
    kept = {"x_gpu.png", "my.png", "scaling.png", "scaling.pdf"}
    assert all((out / name).exists() for name in kept)
    assert not any((out / name).exists() for name in ("gpu.png", "IO.png", "IO.pdf"))
    assert compare_runs.main([str(word) for word in words]) == 0
    page = (out / "compare.html").read_text()
    assert "<script>alert" not in page
    markdown = (out / "compare.md").read_text().splitlines()
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in markdown} == {5}
    comparison = table(*words)[2]
    plan = pictures.plan(comparison)
    figure, by_time = (plan[name]() for name in ("top1_val", "top1_val_hours"))
    assert [text.get_text() for text in figure.axes[0].texts] == labels, "at the ends of the lines"
    assert by_time.axes[0].get_xscale() == "log"
    ends = {"GPU/memory_gb": 12.0, "GPU/utilisation": 91.0, "IO/wait_share": 25.0}
    for tag, end in ends.items():
        label, points = pictures.curves(comparison, tag, "epochs").lines[0]
        assert (label, points) == ("_x", [(x, end) for x in (1, 2, 3, 4)])
    lines = [line["meta"] for *_, one in pictures.drawings(comparison) for line in one["data"]]
    axes = {(line["axis"], line["log"]) for line in lines}
    assert axes == {("hours of training (logarithmic)", True)}, "also where the longest run is not"


@pytest.mark.parametrize(
    ("label", "faster"), [("1 node", 101), ("1 node", 500), ("a label longer than others are", 101)]
)
def test_no_text_of_a_picture_is_cut_off_or_on_another_one(tmp_path, label, faster):
    """Nor on a bar, also of an efficiency above 100 %."""
    label = 8 * label if "longer" in label else label
    for name, rate in (("a", 100), ("b", faster)):
        options = {"gpus": 1 + (name == "b"), "nodes": 1}
        write(tmp_path / name, epochs_of(rate, 64), options=options)
    words = (tmp_path / "a", tmp_path / "b", "--labels", label, f"{label[:-1]}s")
    plan = pictures.plan(table(*words)[2])
    for name in ("overlay", "training_throughput", "training_time", "top1_val_hours"):
        with matplotlib.rc_context(pictures.MATPLOTLIB):
            figure = plan[name]()
            figure.draw_without_rendering()
        width, height = figure.bbox.size
        for axes in figure.axes:
            texts = [*axes.texts, *axes.get_yticklabels()]
            boxes = [text.get_window_extent() for text in texts]
            everything = axes.get_tightbbox()
            assert everything.x0 >= -1 and everything.x1 <= width + 1, name
            assert everything.y0 >= -1 and everything.y1 <= height + 1, name
            assert not [(a, b) for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)], name
            bars = [bar.get_window_extent() for bar in axes.patches if bar.get_fill()]
            assert not [text for text in boxes for bar in bars if text.overlaps(bar)], name
            assert all(bar.x1 <= axes.bbox.x1 for bar in bars), name
            assert axes.bbox.width > 0.35 * width / axes.get_gridspec().ncols, name


@pytest.mark.parametrize(("number", "named"), [(8, 8), (9, 0)])
def test_up_to_eight_lines_have_their_names_at_their_ends(number, named):
    looks = palette.styles([f"run {chr(97 + i)}" for i in range(number)])
    assert len(set(looks.values())) == number
    chart = Chart("t", "", "epoch", [(name, [(0, 1.0), (1, 2.0)]) for name in looks])
    names = page.drawing([(chart, None)], looks)["layout"]["annotations"][1:]
    assert len(names) == named
    figure = pictures.draw_charts([chart], looks)
    assert len(figure.axes[0].texts) == named and len(figure.legends) == (not named)


def test_runs_of_one_size_have_colours_of_their_own():
    assert len({*palette.styles(["nd 4", "ddp 4", "fsdp 4"]).values()}) == 3


def test_names_that_would_touch_each_other_move_apart_in_their_order():
    wanted = [5.0, 5.2, 5.1, 9.9, 9.8]
    places = palette.spread(wanted, 1.0, 0.0, 10.0)
    order = sorted(range(5), key=wanted.__getitem__)
    assert [places[i] for i in order] == pytest.approx([4.1, 5.1, 6.1, 9.0, 10.0])


@pytest.mark.parametrize(("last", "log"), [(0.2, ""), (0.05, "y"), (0.0, "")])
def test_losses_that_differ_by_more_than_50_times_get_a_logarithmic_axis(tmp_path, last, log):
    """But not 0, which has no place there. The name of a line is at its end on either axis."""
    epochs = {1: {"Loss/val": 5.0, "Top1/val": 1.0}, 2: {"Loss/val": last, "Top1/val": 99.0}}
    write(tmp_path / "a", epochs)
    charts = [pictures.curves(table(tmp_path)[2], f"{x}/val", "epochs") for x in ("Loss", "Top1")]
    assert [chart.log for chart in charts] == [log, ""]
    name = page.drawing([(charts[0], None)], {})["layout"]["annotations"][-1]
    assert name["y"] == pytest.approx(math.log10(last) if log else last)


def test_by_default_a_comparison_lies_beside_the_runs(tmp_path, monkeypatch):
    file = write(tmp_path / "runs" / "a", epochs_of(100, 64))
    monkeypatch.chdir(tmp_path / "runs" / "a")
    for first in (file, file.parent, file.parent.parent, type(file)("."), type(file)("..")):
        assert compare_runs.beside(first) == tmp_path / "runs" / "compare"
