"""scripts/bench_input.py: that it measures what it claims to; not how fast anything is."""

from argparse import Namespace

import bench_input
import pytest
from batches import noise_index
from conftest import python
from PIL import Image

BENCH = "scripts/bench_input.py"


def test_ratios_are_of_cpu_time_to_the_first_row_and_round_by_round(monkeypatch, tmp_path):
    """The second pipeline is three times as fast; a round that warms up is not counted."""
    index, played = noise_index(tmp_path, images=3), []

    def time_it(make, batches, workers):
        played.append((make, len(batches)))
        images = 64 * len(batches)
        slow = 10 if len(played) == 5 else 100 if len(played) <= 2 else 1
        return slow * images / make, 2 * images / make

    monkeypatch.setattr(bench_input, "time_it", time_it)
    rows = [
        {"names": (name, "x"), "make": speed, "index": index, "batches": 4}
        for name, speed in (("one", 100), ("other", 300))
    ]
    table = bench_input.compare(rows, Namespace(rounds=3, batches=4, workers=1))
    # After the first, all rounds take about as long.
    assert played == [(100, 4), (300, 4)] + 3 * [(100, 4), (300, 12)]
    assert table == [("one", "x", "50", "10.00", "1.00"), ("other", "x", "150", "3.33", "3.00")]


@pytest.mark.long
def test_one_row_per_pipeline_and_kind_of_images(tmp_path):
    small = ("--rounds", "1", "--batches", "1", "--images", "20", "-j", "1")
    Image.effect_noise((1440, 1200), 50).convert("RGB").save(tmp_path / "photograph.jpg")
    done = python(BENCH, *small, "--photographs", tmp_path, "--cache", tmp_path / "cache")
    assert done.code == 0, done.err
    lines = [line for line in done.out.splitlines() if line[:2] == "| "]
    names = [line.strip("| ").split(" | ")[:2] for line in lines]
    for kind in ("originals", "shrunk to 256"):
        usual = {"pytorch/examples", "torchvision v2", "this suite", "this suite, without its ring"}
        assert usual <= {name for name, images in names if images == kind}
    assert [name for name, images in names if images == "packed at 256"] == ["this suite"]


def test_without_photographs_it_says_what_to_install(tmp_path):
    done = python(BENCH, "--photographs", tmp_path, "--cache", tmp_path / "cache")
    assert done.code == 2 and "apt-get install" in done.sentence
