"""scripts/bench_input.py: that it measures what it claims to; not how fast anything is."""

import json

import numpy as np
import pytest
from bench import photographs, worker_profile
from conftest import draw_image, python

from utils.data.dataset import ImageBatches
from utils.data.index import ImageIndex, class_folders
from utils.samplers import Batch

BENCH = "scripts/bench_input.py"


@pytest.fixture(scope="module")
def photograph(tmp_path_factory):
    """A folder with something that passes for a photograph."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("photographs")
    draw_image(folder / "small.JPEG", 1, "x")
    Image.open(folder / "small.JPEG").resize((1440, 1200)).save(folder / "large.jpg")
    (folder / "small.JPEG").unlink()
    return folder


@pytest.mark.long
def test_all_pipelines_are_measured_on_originals_and_shrunk(photograph, tmp_path):
    small = ("--rounds", "1", "--batches", "1", "--images", "20", "-j", "1")
    cache, result = tmp_path / "cache", tmp_path / "result.json"
    options = ("--photographs", photograph, "--cache", cache, "--json", result)
    done = python(BENCH, *small, *options)
    assert done.code == 0, done.err
    found = json.loads(result.read_text())
    assert found["images"]["originals"]["number"] == 20
    assert found["images"]["shrunk to 256"]["number"] == 20
    for part in ("one core", "workers"):
        rows = found[part]
        names = [row["pipeline"] for row in rows]
        assert {"pytorch/examples", "Apex example", "torchvision v2", "this suite"} <= set(names)
        kinds = {row["images"] for row in rows}
        assert kinds == {"originals", "shrunk to 256", "packed at 256"}
        assert len(names) == 2 * len(set(names)) + 1, "of a pack there is one way to read"
        assert rows[0]["ratio"] == 1
        for row in rows:
            assert len(row["rounds"]) == 1
            assert row["cpu_ms"] > 0
            assert f"{row['cpu_ms']:.2f}" in done.out
    assert found["index_load_s"] > 0
    assert found["machine"]["cores"] > 0


def test_a_profile_names_the_parts_and_leaves_no_trace(photograph, tmp_path):
    root = photographs.make(tmp_path, photographs.find(photograph), 10) / "train"
    images = ImageBatches(ImageIndex(root, class_folders(root)), 32, 0, train=True)
    images.regions, images.quietly = False, True
    before = [vars(place)[name] for place, name, _ in worker_profile.PARTS]
    parts = worker_profile.of(images, [Batch(0, np.arange(10)), Batch(1, np.arange(5))])
    assert {"read the file", "decode", "resize", "the rest"} <= set(parts)
    assert all(spent >= 0 for spent in parts.values())
    assert parts["decode"] > 0
    assert [vars(place)[name] for place, name, _ in worker_profile.PARTS] == before


def test_made_images_are_the_same_and_not_made_twice(photograph, tmp_path):
    found, contents = photographs.find(photograph), []
    for name in ("one", "other"):
        root = photographs.make(tmp_path / name, found, 12)
        files = sorted(root.rglob("*.JPEG"))
        contents.append([path.read_bytes() for path in files])
    assert contents[0] == contents[1]
    assert len(set(contents[0])) == 12
    before = [path.stat().st_mtime_ns for path in files]
    assert photographs.make(tmp_path / "other", found, 12) == root
    assert [path.stat().st_mtime_ns for path in files] == before
    assert photographs.make(tmp_path / "other", found, 5) != root


def test_without_photographs_it_says_what_to_install(tmp_path):
    done = python(BENCH, "--photographs", tmp_path, "--cache", tmp_path / "cache")
    assert done.code == 2
    assert "apt-get install" in done.sentence
    assert not (tmp_path / "cache").exists()
