"""Decoding a part of a JPEG file: the very pixels of decoding it whole, or nothing."""

import contextlib
import io
import random
import sys
from types import SimpleNamespace
from unittest import mock

import build_region_decode
import numpy as np
import pytest
import torch
from PIL import Image

from utils.data import images as im
from utils.data import jpeg_rows, region_decode
from utils.data.dataset import ImageBatches, Reading
from utils.data.index import ImageIndex
from utils.errors import UserError
from utils.samplers import Batch
from utils.train import report

TURNED = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"
KINDS = {
    "4:2:0": {"subsampling": "4:2:0"},
    "4:4:4": {"subsampling": "4:4:4"},
    "4:2:2": {"subsampling": "4:2:2"},
    "progressive": {"progressive": True},
    "restart markers": {"restart_marker_blocks": 5},
    "low quality": {"quality": 10},
    "turned by EXIF": {"exif": TURNED},
}


def picture(width=173, height=131) -> Image.Image:
    """Noise over a gradient."""
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([x, y, x + y], -1) + np.random.default_rng(0).integers(
        0, 99, (height, width, 3)
    )
    return Image.fromarray((pixels % 256).astype(np.uint8))


def jpeg(image: Image.Image, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The library, built as the script does."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "header.c").write_text("#include <stdio.h>\n#include <jpeglib.h>\n")
    try:
        build_region_decode.run(["cc", "-fsyntax-only", str(folder / "header.c")])
    except UserError:
        pytest.skip("needs a C compiler and libjpeg's header")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", "cc -Wall -Wextra -Werror")
        build_region_decode.build(folder / "library.so")
    return folder / "library.so"


@pytest.fixture
def built(library, monkeypatch):
    monkeypatch.setattr(region_decode, "LIBRARY", library)


@pytest.fixture
def not_built(tmp_path, monkeypatch):
    monkeypatch.setattr(region_decode, "LIBRARY", tmp_path / "none.so")


@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if kind != "progressive"), "grey"])
@pytest.mark.parametrize("size", [(173, 131), (16, 300), (9, 9)])
def test_pixels_are_those_of_the_whole_image(library, kind, size):
    image = picture(*size)
    data = jpeg(image.convert("L")) if kind == "grey" else jpeg(image, **KINDS[kind])
    whole, draw = im.decode(data), random.Random(0)
    for _ in range(60):
        top, left = (draw.randrange(side) for side in whole.shape[1:])
        height, width = (
            draw.randint(1, side - at)
            for side, at in zip(whole.shape[1:], (top, left), strict=True)
        )
        pixels, column = region_decode.decode(data, (top, left, height, width), library)
        assert pixels.shape[1] == height
        part = pixels[:, :, left - column :][:, :, :width]
        assert torch.equal(part, whole[:, top : top + height, left : left + width])
        assert pixels.stride(0) == 1, "channels-last, as decode gives it"


def test_pixels_that_the_file_has_not_got_are_refused(library):
    data = jpeg(picture())
    assert region_decode.decode(data, (0, 0, 131, 173), library) is not None
    for box in ((1, 0, 131, 173), (0, 1, 131, 173), (200, 0, 1, 1), (2**31, 0, 2, 2)):
        assert region_decode.decode(data, box, library) is None


def test_damaged_files_are_what_they_are_to_whole_decoding(built):
    from test_jpeg_rows import damaged

    decoded = regions = 0
    for number in range(300):
        data, whole = damaged(number), None
        with jpeg_rows.silent_stderr(), contextlib.suppress(ValueError):
            whole = im.decode(data)
        if (frame := jpeg_rows.frame_of(data)) is None:
            continue
        box = top, left, height, width = (number % 3 * 25, number % 4 * 9, 20, 25)
        region = region_decode.decode(data, box)
        found = im.decode_part(data, frame, box, quietly=True)
        if found is not None:
            assert whole is not None
            pixels, (y, x, *_) = found
            part = pixels[:, y : y + height, x : x + width]
            assert torch.equal(part, whole[:, top : top + height, left : left + width])
            decoded += 1
            regions += region is not None
    assert decoded > 20
    assert 5 < regions < decoded, "some damage is seen, some makes another image of it"


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_with_and_without(built, tmp_path, workers):
    from torch.utils.data import DataLoader

    folder = tmp_path / "a"
    folder.mkdir()
    for number, options in enumerate(KINDS.values()):
        (folder / f"{number}.jpg").write_bytes(jpeg(picture(), **options))
    (folder / "7.jpg").write_bytes(jpeg(picture().convert("L")))
    (folder / "8.jpg").write_bytes(b"broken")
    index = ImageIndex(tmp_path, ["a"])
    batches = [Batch(epoch, np.arange(9)) for epoch in range(6)]
    seen = []
    for partly in (True, False):
        dataset = ImageBatches(index, 32, 0, train=True)
        dataset.partly = partly
        loader = DataLoader(
            dataset, batch_sampler=batches, num_workers=workers, collate_fn=lambda batch: batch
        )
        seen.append([(images, targets, reading.faults) for images, targets, reading in loader])
    for (images, targets, faults), (images2, targets2, faults2) in zip(*seen, strict=True):
        assert torch.equal(images, images2)
        assert torch.equal(targets, targets2)
        assert [image for image, _ in faults] == [image for image, _ in faults2] == [8]


def test_nothing_is_said_of_damaged_files(library, capfd):
    data = jpeg(picture())
    assert region_decode.decode(data[:2000], (0, 0, 131, 173), library) is None
    assert region_decode.decode(b"\xff\xd8 this is no image", (0, 0, 1, 1), library) is None
    assert capfd.readouterr() == ("", "")


def test_without_the_library_images_are_decoded_otherwise(not_built):
    data = jpeg(picture())
    assert not region_decode.available()
    assert region_decode.decode(data, (0, 0, 9, 9)) is None
    pixels, box = im.decode_part(data, jpeg_rows.frame_of(data), (0, 5, 9, 9), quietly=True)
    assert (pixels.shape[2], box) == (173, (0, 5, 9, 9))


def test_a_library_of_another_machine_is_as_none(tmp_path):
    (tmp_path / "other.so").write_bytes(b"\x7fELF" + bytes(100))
    assert region_decode.decode(jpeg(picture()), (0, 0, 9, 9), tmp_path / "other.so") is None


def test_it_is_built_where_training_finds_it(library, not_built, capsys):
    assert build_region_decode.main([]) == 0
    assert f"built {region_decode.LIBRARY} (400 parts" in capsys.readouterr().out
    assert region_decode.available()


def test_other_pixels_are_not_taken(library, not_built, tmp_path, monkeypatch, capsys):
    """As of a libjpeg that upsamples colour in another way."""
    other = tmp_path / "other.c"
    text = build_region_decode.SOURCE.read_text()
    other.write_text(text.replace("jpeg_start", "jpeg.do_fancy_upsampling = 0;\n    jpeg_start", 1))
    monkeypatch.setattr(build_region_decode, "SOURCE", other)
    region_decode.LIBRARY.write_bytes(library.read_bytes())
    assert build_region_decode.main([]) == 2
    assert "are not torchvision's here (colour 4:2:2)" in capsys.readouterr().err
    assert region_decode.LIBRARY.read_bytes() == library.read_bytes(), "the good one stays"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["none.so", "other.c"]


@pytest.mark.parametrize(
    ("compiler", "sentence"),
    [
        ("no-such-cc", "error: there is no C compiler no-such-cc: apt install gcc"),
        (f"{sys.executable} -c 1/0", "it needs libjpeg-turbo's header: apt install gcc"),
    ],
)
def test_what_is_missing_is_said(not_built, monkeypatch, capsys, compiler, sentence):
    monkeypatch.setenv("CC", compiler)
    assert build_region_decode.main([]) == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]
    assert not region_decode.LIBRARY.exists()


@pytest.mark.parametrize(
    ("name", "read_seconds", "told"),
    [("x.JPEG", 0.1, True), ("x.JPEG", 0.9, False), ("x.png", 0.1, False)],
)
def test_a_run_that_waits_for_decoding_is_told(not_built, caplog, name, read_seconds, told):
    index = mock.MagicMock(pack=None, path=lambda image: name)
    reading = Reading(files=10, bytes=800_000, read_seconds=read_seconds, seconds=1.0)
    session = SimpleNamespace(
        train=SimpleNamespace(reading=reading, bad=SimpleNamespace(index=index)),
        world=SimpleNamespace(device=torch.device("cpu")),
        args=SimpleNamespace(workers=1),
    )
    with caplog.at_level("INFO"):
        report.input_path(session, {"IO/wait_share": 0.05})
        assert not caplog.text
        report.input_path(session, {"IO/wait_share": 0.5})
    assert ("build_region_decode.py" in caplog.text) == told
    assert "scripts/prepare_data.py shrink" in caplog.text
