"""A JPEG file decoded down to a row: the very pixels of the whole, or nothing."""

import contextlib
import io
import os
import random

import numpy as np
import pytest
import torch
from PIL import Image
from test_region_decode import KINDS, jpeg, picture

from utils.data import images as im
from utils.data import jpeg_rows
from utils.data.dataset import ImageBatches
from utils.data.index import ImageIndex
from utils.data.ring import RingLoader
from utils.samplers import TrainSampler

MORE = {
    "grey": {},
    "optimised": {"optimize": True},
    "restart rows": {"restart_marker_rows": 1},
    "restart rows, 4:2:2": {"restart_marker_rows": 1, "subsampling": "4:2:2"},
    "restart rows, 4:4:4": {"restart_marker_rows": 1, "subsampling": "4:4:4"},
    "restart rows, grey": {"restart_marker_rows": 1},
}


def of_kind(kind, *size):
    image = picture(*size)
    return jpeg(image.convert("L") if "grey" in kind else image, **(KINDS | MORE)[kind])


def rows_of(data, frame, top, rows):
    """Rows without the library for regions, and which row of the image is their first."""
    found = im.decode_part(data, frame, (top, 3, rows, 4), regions=False, quietly=True)
    if found is None:
        return None
    part, (y, *columns) = found
    assert columns == [3, rows, 4]
    return part, top - y


@pytest.mark.parametrize("kind", [kind for kind in KINDS | MORE if kind != "progressive"])
@pytest.mark.parametrize("size", [(50, 131), (9, 48)])
def test_rows_are_those_of_the_whole_image(kind, size):
    data = of_kind(kind, *size)
    whole, frame = im.decode(data), jpeg_rows.frame_of(data)
    assert (frame.height, frame.width) == whole.shape[1:]
    skipped = 0
    for top in range(0, frame.height, 7):
        parts = 0
        for rows in range(1, frame.height - top + 1):
            found = rows_of(data, frame, top, rows)
            if found is not None:
                part, first = found
                assert torch.equal(part[:, top - first :][:, :rows], whole[:, top:][:, :rows])
                assert part.shape[1] < frame.height
                assert part.stride(0) == 1, "channels-last, as decode gives it"
                parts += 1
                skipped += first > 0
        assert parts > (frame.height - top) / 2 - (10 if top else 0)
    assert bool(skipped) == ("restart rows" in kind)


@pytest.mark.parametrize(
    "kind", ["progressive", "CMYK", "PNG", "cut", "no height", "text", "empty"]
)
def test_others_are_left_to_whole_decoding(kind):
    data = jpeg(picture())
    file = io.BytesIO()
    picture().save(file, "PNG")
    at = jpeg_rows.frame_of(data).at
    others = {
        "progressive": jpeg(picture(), progressive=True),
        "CMYK": jpeg(picture().convert("CMYK")),
        "PNG": file.getvalue(),
        "cut": data[:150],
        "no height": data[:at] + bytes(2) + data[at + 2 :],  # it follows behind the pixels
        "text": b"\xff\xd8 this is no image \xff\xd9",
        "empty": b"",
    }
    assert jpeg_rows.frame_of(others[kind]) is None


def test_a_file_without_its_end_is_left_to_whole_decoding():
    data = jpeg(picture())
    frame = jpeg_rows.frame_of(data)
    assert rows_of(data, frame, 0, 20) is not None
    assert rows_of(data[:-500], frame, 0, 20) is None
    assert rows_of(data, frame, 0, frame.height - 10) is None, "hardly anything to leave out"


def test_the_decoders_warning_is_not_shown(capfd):
    data = jpeg(picture())
    frame = jpeg_rows.frame_of(data)
    im._decode_jpeg(jpeg_rows.lowered(data, frame, 20))
    assert "extraneous bytes" in capfd.readouterr().err, "else there is nothing to silence"
    rows_of(data, frame, 0, 20)
    os.write(2, b"heard again")
    assert capfd.readouterr().err == "heard again"


def damaged(number):
    """A file with other, missing or more bytes behind its frame header."""
    draw, kinds = random.Random(number), list(KINDS | MORE)
    data = bytearray(of_kind(kinds[number % len(kinds)], 60, 90))
    for _ in range(1 + number % 4):
        at = draw.randrange(len(data) // 3, len(data) - 60)
        # With 0xFF there are markers, or what looks like them, in wrong places.
        codes = (0xFF, draw.randrange(256)) if number % 2 else (draw.randrange(255),)
        some = bytes(draw.choice(codes) for _ in range(draw.randrange(1, 9)))
        data[at : at + draw.choice((0, len(some), 20))] = some
    return bytes(data)


def test_damaged_files_are_what_they_are_to_whole_decoding():
    decoded = skipped = 0
    for number in range(200):
        data = damaged(number)
        whole = None
        with contextlib.suppress(ValueError), jpeg_rows.silent_stderr():
            whole = im.decode(data)
        frame = jpeg_rows.frame_of(data)
        top = number % 3 * 25
        found = frame and rows_of(data, frame, top, 20)
        if found is not None:
            part, first = found
            assert whole is not None
            assert torch.equal(part[:, top - first :][:, :20], whole[:, top:][:, :20])
            decoded += 1
            skipped += first > 0
    assert decoded > 5
    assert skipped > 5


def test_batches_are_those_of_whole_decoding(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    for number, kind in enumerate(KINDS | MORE):
        (folder / f"{number:02}.jpg").write_bytes(of_kind(kind, 120, 150))
    (folder / "10.jpg").write_bytes(b"broken")
    (folder / "11.jpg").write_bytes(of_kind("4:2:0", 120, 150)[:-3000])
    index = ImageIndex(tmp_path, ["a"])
    sampler = TrainSampler(12, 4, (0, 1), 1, 0)
    dataset = ImageBatches(index, 32, 0, train=True)
    dataset.partly = False
    loader = RingLoader(dataset, sampler, workers=2)  # whose workers stop early
    for epoch in range(3):
        sampler.start_at(epoch, 0)
        plain = [dataset.__getitems__(batch) for batch in sampler]
        for filled, (images, targets, reading) in zip(loader, plain, strict=True):
            assert torch.equal(loader.ring.images[filled.slot], images)
            assert np.array_equal(filled.targets, targets)
            assert filled.reading.faults == reading.faults
            loader.ring.free_after(filled.slot)


def test_a_pillow_image_of_the_same_file_has_the_same_rows():
    """Independent of torchvision's decoder: Pillow has a libjpeg of its own."""
    data = jpeg(picture())
    frame = jpeg_rows.frame_of(data)
    with Image.open(io.BytesIO(jpeg_rows.lowered(data, frame, 40))) as part:
        assert part.size == (frame.width, 40 + jpeg_rows.MARGIN)
        rows = np.asarray(part)[:40]
    assert np.array_equal(rows, np.asarray(Image.open(io.BytesIO(data)))[:40])
