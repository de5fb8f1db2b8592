"""scripts/compare_runs.py: pictures, page, and the section in RESULTS.md."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from compare.drawing import spread
from conftest import ROOT, python
from event_files import HAL, SCRIPT, epochs_of, write, write_hal
from PIL import Image

PALE, DARK = (0xF0, 0xB0, 0x30), (0x15, 0x18, 0x2C)  # colours of the first and the last run
CURVES = ("top1_train", "top1_val", "top5_train", "top5_val", "loss_train", "loss_val")
SPEED = ("training_throughput", "training_time", "scaling", "overlay")


def where(picture, colour):
    """Height x width, bool: which pixels of the picture have exactly this colour."""
    return (np.asarray(Image.open(picture).convert("RGB")) == colour).all(axis=-1)


@pytest.fixture(scope="module")
def hal(tmp_path_factory):
    """The six runs of 2020, drawn; the folder, and what the script said."""
    root = tmp_path_factory.mktemp("hal")
    write_hal(root / "runs", seconds=600)
    done = python(SCRIPT, root / "runs", "--out", root / "out", "--title", "HAL & <others>")
    assert (done.code, done.err) == (0, "")
    return root, done.out


def test_which_pictures_are_drawn(hal):
    root, said = hal
    names = {*CURVES, *(f"{name}_hours" for name in CURVES), *SPEED}
    files = {file.name for file in (root / "out").iterdir()}
    tables = {"compare.md", "compare.csv", "compare.html"}
    assert files == tables | {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert len(re.findall("(IO|gpu) is not drawn: no .* in 2 GPUs, 4 GPUs", said)) == 2
    for file in (root / "out").glob("*.png"):
        with Image.open(file) as image:
            assert image.width >= 900
            assert not {"Software", "Creation Time", "date"} & set(image.info)
        assert where(file, PALE).sum() > 100, file
        assert where(file, DARK).sum() > 100, file


def test_svg_has_names_and_units(hal):
    texts = {
        file.stem: " ".join(ElementTree.parse(file).getroot().itertext())
        for file in (hal[0] / "out").glob("*.svg")
    }
    for name in CURVES:
        assert "epochs finished" in texts[name]
        assert "hours of training" in texts[f"{name}_hours"]
        assert all(f"{gpus} GPUs" in texts[name] for gpus in HAL)
    assert "top-1 accuracy (%)" in texts["top1_val"]
    assert "images/s" in texts["training_throughput"]
    assert "ms per step" in texts["training_time"]
    for share in ("95 %", "92 %", "89 %", "77 %", "64 %"):
        assert share in texts["training_throughput"]
        assert share in texts["scaling"]


def test_names_do_not_lie_on_each_other(hal):
    # All curves end at the same value.
    svg = (hal[0] / "out" / "top1_val.svg").read_text()
    found = re.findall(
        r"translate\(([\d.]+) ([\d.]+)\)[^<]*>\d+ GPUs<|y=\"([\d.]+)\"[^<]*>\d+ GPUs<", svg
    )
    heights = sorted(float(one[1] or one[2]) for one in found)
    assert len(heights) == 6
    assert min(np.diff(heights)) >= 13  # points, the size of the letters


@pytest.mark.parametrize(
    ("heights", "places"),
    [
        ([0.5, 0.5, 0.5], [0.4, 0.5, 0.6]),
        ([0.0, 0.01, 0.9], [0.0, 0.1, 0.9]),
        ([0.2, 0.95, 1.0], [0.2, 0.9, 1.0]),
        ([0.3, 0.35, 0.5], [0.275, 0.375, 0.5]),
    ],
)
def test_names_are_moved_no_further_than_needed(heights, places):
    assert spread(heights, 0.1) == pytest.approx(places)


def test_bars_are_as_long_as_the_medians(hal):
    picture = hal[0] / "out" / "training_throughput.png"
    pale, dark = (int(where(picture, c).sum(axis=1).max()) for c in (PALE, DARK))
    assert dark / pale == pytest.approx(HAL[64] / HAL[2], rel=0.08)


def test_identical_curves_are_both_visible(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / name, {x: {"Loss/train": 3.0 / x} for x in range(1, 12)})
    python(SCRIPT, tmp_path, "--out", tmp_path / "out")
    picture = tmp_path / "out" / "loss_train.png"
    width = np.asarray(Image.open(picture)).shape[1]
    pale, dark = (where(picture, colour)[:, : 2 * width // 3] for colour in (PALE, DARK))
    # Both over the whole length of the curve, not only where a mark is.
    across = pale.any(axis=0) & dark.any(axis=0)
    assert across.sum() > 0.5 * np.ptp(np.flatnonzero(pale.any(axis=0)))


def test_same_input_same_bytes(hal):
    root, _ = hal
    python(SCRIPT, root / "runs", "--out", root / "again", "--title", "HAL & <others>")
    files = [file for file in (root / "again").iterdir() if file.suffix in (".png", ".svg", ".md")]
    assert len(files) == 33
    for file in files:
        assert file.read_bytes() == (root / "out" / file.name).read_bytes(), file


def test_io_and_gpu_pictures_and_strange_labels(tmp_path):
    for i, name in enumerate(("a", "b", "c")):
        epochs = epochs_of(100, 64, first=1)
        for values in epochs.values():
            if i < 2:
                values |= {"IO/wait_share": 0.25, "IO/read_mb_s": 80.0}
                values |= {f"GPU/utilisation_rank{rank}": 90.0 + rank for rank in range(3)}
                values |= {f"GPU/memory_gb_rank{rank}": 10.0 + rank for rank in range(3)}
            if i == 0:
                del values["Top5/val"]
        write(tmp_path / "runs" / name, epochs)
    labels = ["_x", "$\\y$ |", "<script>alert(1)</script>"]  # signs that mean something elsewhere
    done = python(SCRIPT, tmp_path / "runs", "--out", tmp_path / "o", "--labels", *labels)
    assert (done.code, done.err) == (0, "")
    assert "IO is drawn without some runs: no IO/wait_share or IO/read_mb_s in <script>" in done.out
    assert "top5_val is drawn without some runs: no Top5/val in _x" in done.out
    assert (tmp_path / "o" / "IO.png").exists()
    assert (tmp_path / "o" / "gpu.svg").exists()
    csv = (tmp_path / "o" / "compare.csv").read_text().splitlines()
    line = dict(zip(csv[0].split(","), csv[1].split(","), strict=True))
    assert (line["gpu_utilisation"], line["gpu_memory_gb"]) == ("91", "12")
    assert line["data_wait_share"] == "0.25"
    page = (tmp_path / "o" / "compare.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    table = (tmp_path / "o" / "compare.md").read_text().splitlines()
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in table} == {5}


class Page(HTMLParser):
    """What is in a page: its tags with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


def test_page_is_whole(hal):
    text = (hal[0] / "out" / "compare.html").read_text()
    page = Page(text)
    count = [tag for tag, _ in page.tags].count
    assert (count("svg"), count("figure"), count("script"), count("link")) == (16, 16, 0, 0)
    ids = [found["id"] for _, found in page.tags if "id" in found]
    assert len(ids) == len(set(ids)), "names of the pictures' parts"
    # Nothing from outside: all references lead to a place in the page.
    for _, found in page.tags:
        for key in ("href", "src", "xlink:href"):
            if key in found:
                assert found[key].startswith("#"), found
                assert found[key][1:] in ids, found
    for target in re.findall(r"url\(#([^)]*)\)", text):
        assert target in ids, target
    assert not re.findall(r"(?:url\((?!#)|@import)", text)
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text
    assert "<title>HAL &amp; &lt;others&gt;</title>" in text
    assert all(colour not in text.split("</style>")[1] for colour in ("#f0b030", "#1a1c1e"))


def test_wrong_options_are_reported_before_a_large_library_is_loaded(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise SystemExit('imported')")
    done = subprocess.run(
        [sys.executable, ROOT / SCRIPT, "nowhere"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, "error: nowhere does not exist\n")
