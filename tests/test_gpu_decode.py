"""``--decode gpu``: its rules, on the CPU; and its pixels, where there is a GPU."""

import numpy as np
import pytest
import torch
from conftest import draw_folder
from PIL import Image

from utils.data import gpu_decode
from utils.data.dataset import ImageBatches
from utils.data.gpu_decode import RawBatches, whole_jpeg
from utils.data.index import ImageIndex
from utils.samplers import Batch

SIZE = 24


@pytest.fixture
def index(tmp_path):
    """15 JPEG files, one of them CMYK and one really a PNG."""
    root = draw_folder(tmp_path / "data", train=5, val=1) / "train"
    index = ImageIndex(root, ["class_0", "class_1", "class_2"])
    Image.open(index.path(2)).convert("CMYK").save(index.path(2), "JPEG")
    Image.open(index.path(3)).save(index.path(3), "PNG")
    return index


def both(index, train):
    """The batch of the CPU's path, and that of the other one, on the CPU."""
    batch = Batch(2, np.arange(len(index)))
    expected = ImageBatches(index, SIZE, 0, train).__getitems__(batch)
    dataset = RawBatches(index, SIZE, 0, train)
    images, targets, reading, raw = dataset.__getitems__(batch)
    faults = dataset.finish(images, targets, raw)
    return expected, (images, targets, reading.faults + faults, raw)


@pytest.mark.parametrize("train", [True, False])
def test_same_cuts_and_targets(index, train):
    expected, (images, targets, faults, raw) = both(index, train)
    assert torch.equal(images, expected[0])
    assert torch.equal(targets, expected[1])
    assert faults == []
    assert {file.image for file in raw.files} == set(range(15)) - {2, 3}, "CMYK and PNG: the CPU"


@pytest.mark.parametrize("train", [True, False])
def test_same_rule_for_bad_files(index, train):
    for image, size in ((0, 0), (5, 300), (9, 40)):
        with open(index.path(image), "r+b") as file:
            file.truncate(size)
    # An intact frame around rubbish: only a decoder finds out.
    data = bytearray(open(index.path(7), "rb").read())
    data[2:40] = b"\0" * 38
    open(index.path(7), "wb").write(data)
    expected, (images, targets, faults, _) = both(index, train)
    assert {image for image, _ in faults} == {0, 5, 7, 9}
    assert {image for image, _ in expected[2].faults} == {0, 5, 7, 9}
    assert torch.equal(images, expected[0])
    assert torch.equal(targets, expected[1])


@pytest.mark.parametrize("train", [True, False])
def test_file_that_the_decoder_refuses_is_left_to_the_cpu(index, train, monkeypatch):
    real = gpu_decode.decode_jpeg

    def fragile(data, mode, device):
        if isinstance(data, list) or len(data) % 2:
            raise RuntimeError("nvjpeg")
        return real(data, mode, device=device)

    monkeypatch.setattr(gpu_decode, "decode_jpeg", fragile)
    expected, (images, targets, faults, _) = both(index, train)
    assert torch.equal(images, expected[0])
    assert torch.equal(targets, expected[1])
    assert faults == []


def test_whole_jpeg_tells_the_size(index):
    data = open(index.path(0), "rb").read()
    assert whole_jpeg(data) == (40, 48)
    assert whole_jpeg(data + b"\0" * 5) == (40, 48), "padded, as cameras do"
    assert whole_jpeg(data[:-2]) is None
    assert whole_jpeg(b"") is None


@pytest.mark.cuda
@pytest.mark.parametrize("train", [True, False])
def test_pixels_on_the_gpu_are_near(index, train):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    batch = Batch(2, np.arange(len(index)))
    expected = ImageBatches(index, SIZE, 0, train).__getitems__(batch)[0]
    dataset = RawBatches(index, SIZE, 0, train)
    images, targets, _, raw = dataset.__getitems__(batch)
    images = images.cuda()
    assert dataset.finish(images, targets, raw) == []
    assert (images.cpu().float() - expected.float()).abs().mean() < 2
