"""`scripts/prepare_data.py restart`: the same pixels, with a restart marker behind each row."""

import io
import shutil
import sys

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image
from test_region_decode import jpeg, picture

from utils.data import jpeg_rows
from utils.errors import UserError

sys.path.append(str(ROOT / "scripts"))
from prepare import restart

needs_jpegtran = pytest.mark.skipif(
    shutil.which("jpegtran") is None, reason="needs jpegtran (libjpeg-turbo-progs)"
)


def pixels(data):
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image)


@needs_jpegtran
def test_a_copied_folder_has_the_same_pixels_and_less_to_decode(tmp_path):
    folder = tmp_path / "data" / "train" / "a"
    folder.mkdir(parents=True)
    png = io.BytesIO()
    picture().save(png, "PNG")
    files = {
        "0.jpg": jpeg(picture()),
        "1.jpg": jpeg(picture(), progressive=True),
        "2.jpg": jpeg(picture().convert("L")),
        "3.jpg": jpeg(picture(), subsampling="4:2:2"),
        "4.jpg": png.getvalue(),
        "5.jpg": jpeg(picture())[:-900],
        "6.jpg": b"no image",
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    restart.restart_folder(tmp_path / "data", tmp_path / "out", workers=1)
    for name, data in files.items():
        made = (tmp_path / "out" / "train" / "a" / name).read_bytes()
        if name > "4":
            assert made == data, "copied as it is"
            continue
        assert np.array_equal(pixels(made), pixels(data))
        part, first = jpeg_rows.between(made, jpeg_rows.frame_of(made), 60, 20)
        assert first > 40
        assert len(part) < len(made) / 2
    noted = (tmp_path / "out" / ".unreadable.txt").read_text().split()
    assert sorted(noted) == ["train/a/5.jpg", "train/a/6.jpg"]


def test_without_jpegtran_there_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="jpegtran is missing: apt-get install"):
        restart.restart_folder(tmp_path, tmp_path / "out", workers=1)
