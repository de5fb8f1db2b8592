"""Decoding a part of a JPEG file: the very pixels of decoding it whole, or nothing."""

import io
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image

from utils.data import images as im
from utils.data import region_decode
from utils.data.dataset import ImageBatches
from utils.data.index import ImageIndex
from utils.samplers import Batch

needs_library = pytest.mark.skipif(
    not region_decode.available(), reason="needs nvidia-nvimgcodec (tests/requirements.txt)"
)
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


@needs_library
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(173, 131), (16, 300), (9, 9)])
def test_pixels_are_those_of_the_whole_image(kind, size):
    data = jpeg(picture(*size), **KINDS[kind])
    whole, part = im.decode(data), region_decode.open_jpeg(data)
    assert part.shape == whole.shape[1:]
    parts = 0
    for seed in range(30):
        box = im.random_box(random.Random(seed), *part.shape)
        pixels = part.decode(box)
        if pixels is not None:
            top, left, height, width = box
            assert torch.equal(pixels, whole[:, top : top + height, left : left + width])
            assert pixels.stride(0) == 1, "channels-last, as decode gives it"
            parts += 1
    assert parts > 5


@needs_library
def test_large_box_is_left_to_whole_decoding():
    part = region_decode.open_jpeg(jpeg(picture()))
    assert part.decode((0, 0, 60, 173)) is None
    assert part.decode((0, 0, 50, 173)) is not None


@pytest.mark.parametrize("kind", ["grey", "CMYK", "PNG", "cut", "empty", "text"])
def test_others_are_left_to_whole_decoding(kind):
    data = jpeg(picture())
    file = io.BytesIO()
    picture().save(file, "PNG")
    others = {
        "grey": jpeg(picture().convert("L")),
        "CMYK": jpeg(picture().convert("CMYK")),
        "PNG": file.getvalue(),
        "cut": data[: len(data) // 2],
        "empty": b"",
        "text": b"\xff\xd8 this is no image \xff\xd9",
    }
    assert region_decode.open_jpeg(others[kind]) is None


@needs_library
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_with_and_without(tmp_path, workers):
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
    for regions in (True, False):
        dataset = ImageBatches(index, 32, 0, train=True)
        dataset.regions = regions
        loader = DataLoader(
            dataset, batch_sampler=batches, num_workers=workers, collate_fn=lambda batch: batch
        )
        seen.append([(images, targets, reading.faults) for images, targets, reading in loader])
    for (images, targets, faults), (images2, targets2, faults2) in zip(*seen, strict=True):
        assert torch.equal(images, images2)
        assert torch.equal(targets, targets2)
        assert [image for image, _ in faults] == [image for image, _ in faults2] == [8]


@needs_library
def test_library_says_nothing(tmp_path):
    """It complains about each codec for GPUs that is not there; nobody wants to read that."""
    (tmp_path / "x.jpg").write_bytes(jpeg(picture()))
    code = (
        "import sys; from utils.data import region_decode as r; "
        "print(r.open_jpeg(open(sys.argv[1], 'rb').read()).decode((1, 2, 30, 40)).shape)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x.jpg")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "torch.Size([3, 30, 40])"
    assert done.stderr == ""


def test_without_the_library_images_are_decoded_whole(monkeypatch):
    monkeypatch.setattr(region_decode, "find_spec", lambda name: None)
    monkeypatch.setattr(region_decode, "_made", {})
    assert not region_decode.available()
    assert region_decode.open_jpeg(jpeg(picture())) is None
