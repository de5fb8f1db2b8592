"""One image: decoding against Pillow, resizing and cropping against torchvision."""

import contextlib
import importlib.util
import io
import random
import struct
import warnings
from zlib import compress, crc32

import numpy as np
import pytest
import torch
import torchvision.io
from batches import encode, picture
from PIL import Image, ImageOps
from torchvision.transforms import v2

from utils.data import images as im

TURNED = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"
SMALL = picture(90, 70)
ALPHA = Image.merge("RGBA", (*SMALL.split(), picture(90, 70, seed=1).convert("L")))
ODD = {
    "jpeg": encode(picture(120, 90), quality=90),
    "progressive": encode(picture(120, 90), progressive=True),
    "rotated": encode(picture(120, 90), exif=TURNED, comment="mine", icc_profile=b"not empty"),
    "grey": encode(SMALL.convert("L")),
    "cmyk": encode(SMALL.convert("CMYK")),
    "1x1": encode(picture(1, 1)),
    "wide": encode(picture(5000, 3)),
    "png": encode(SMALL, "PNG"),
    "bilevel png": encode(SMALL.convert("1"), "PNG"),
    "palette png": encode(SMALL.convert("P"), "PNG", transparency=3),
    "alpha": encode(ALPHA, "PNG"),
    "grey alpha": encode(ALPHA.convert("LA"), "PNG"),
    "film": encode(SMALL, "GIF", save_all=True, append_images=[picture(90, 70, seed=1)]),
    "webp alpha": encode(ALPHA, "WEBP", lossless=True, exact=True),
    "bmp": encode(SMALL, "BMP"),
    "tiff": encode(SMALL, "TIFF"),
}


@pytest.mark.parametrize("kind", ODD)
def test_decode_gives_what_pillow_gives(kind):
    """Whatever the file's name: only its bytes are looked at."""
    data = ODD[kind]
    expected = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    got = im.decode(data)
    assert got.dtype == torch.uint8
    np.testing.assert_array_equal(got.permute(1, 2, 0).numpy(), expected)
    assert got.permute(1, 2, 0).is_contiguous(), "channels last is what makes resizing fast"


PHOTOMETRIC, SAMPLE_FORMAT = 262, 339  # tags of TIFF


def tiff(values, tag=None, number=None):
    """A TIFF file of one channel; ``number`` replaces the value that Pillow gives a tag."""
    data = encode(Image.fromarray(values), "TIFF", tiffinfo={tag: number} if tag else {})
    if tag:
        at = data.index(struct.pack("<H", tag), struct.unpack_from("<I", data, 4)[0])
        data = data[: at + 8] + struct.pack("<H", number) + data[at + 10 :]
    return data


def rgb_png_of_16_bits(values):
    """A PNG file of 16 bits per channel, which Pillow cannot write. ``values``: [h, w, 3]."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", crc32(kind + body))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    head = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


GREY = np.random.default_rng(0).integers(0, 65536, (40, 60)).astype(np.uint16)
RGB = np.random.default_rng(1).integers(0, 65536, (40, 60, 3)).astype(np.uint16)
WIDE = {
    "png": (encode(Image.fromarray(GREY), "PNG"), GREY >> 8),
    "pgm": (b"P5 60 40 65535\n" + GREY.astype(">u2").tobytes(), GREY >> 8),
    "pgm of 10 bits": (b"P5 60 40 1023\n" + (GREY >> 6).astype(">u2").tobytes(), GREY >> 8),
    "tiff": (tiff(GREY), GREY >> 8),
    "tiff, white is 0": (tiff(GREY, PHOTOMETRIC, 0), (65535 - GREY) >> 8),
    "tiff of 32 bits": (tiff(GREY.astype(np.int32) << 16, SAMPLE_FORMAT, 1), GREY >> 8),
    "rgb png": (rgb_png_of_16_bits(RGB), (RGB >> 8).transpose(2, 0, 1)),
}
NO_RANGE = {
    "float tiff 0..1": tiff(np.linspace(0, 1, 2400, dtype=np.float32).reshape(40, 60)),
    "signed tiff": tiff(GREY, SAMPLE_FORMAT, 2),
    "signed tiff of 32 bits": tiff(GREY.astype(np.int32)),
    "12 bits in a tiff of 16": tiff(GREY >> 4),
    "8 bits in a png of 16": encode(Image.fromarray(GREY >> 8), "PNG"),
    "12 bits in an rgb png": rgb_png_of_16_bits(RGB >> 4),
    "float pfm": b"Pf\n60 40\n-1.0\n" + np.ones((40, 60), "<f4").tobytes(),
}


@pytest.mark.parametrize("kind", WIDE)
def test_wide_values_are_scaled_by_the_range_of_the_format(kind):
    """Pillow's convert("RGB") would clip most of them to white."""
    data, expected = WIDE[kind]
    got = im.decode(data).numpy().astype(int)
    assert got.shape == (3, 40, 60) and abs(got - expected.astype(int)).max() <= 1


@pytest.mark.parametrize("kind", NO_RANGE)
def test_a_file_without_a_known_range_is_unreadable(kind):
    with pytest.raises(ValueError, match="convert it to 8 bits per channel"):
        im.decode(NO_RANGE[kind])


def imported_again():
    """The module that decodes images, as a program would get it now."""
    spec = importlib.util.spec_from_file_location("images_again", im.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_torchvisions_announcement_is_no_error():
    """With PYTHONWARNINGS=error, every worker would end at its first image."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(imported_again().decode(ODD["jpeg"]), im.decode(ODD["jpeg"]))


def test_without_torchvisions_decoder_pillow_gives_the_same_pixels(monkeypatch):
    """torchvision 0.29 announces that it will be removed."""
    monkeypatch.delattr(torchvision.io, "decode_image")
    without = imported_again()
    assert without.decode_image is None
    for kind in ("jpeg", "progressive", "grey", "cmyk", "rotated"):
        assert torch.equal(without.decode(ODD[kind]), im.decode(ODD[kind]))


def test_decode_rejects_incomplete_images():
    jpeg = ODD["jpeg"]
    for data in (jpeg[:300], jpeg[: len(jpeg) // 2], ODD["png"][:-400], ODD["tiff"][:1000]):
        with pytest.raises(ValueError, match=r"\w+"):
            im.decode(data)
    for data, message in ((b"", "empty"), (b"<html>404</html>", "not an image")):
        with pytest.raises(ValueError, match=message):
            im.decode(data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP"])
def test_decode_survives_damaged_files(kind):
    """A crash in a library would end all tests, or a loader worker."""
    data = encode(SMALL, kind)
    for number in range(40):
        source, spoilt = random.Random(number), bytearray(data)
        for _ in range(1 + number % 3):
            spoilt[source.randrange(20, len(spoilt))] ^= source.randrange(1, 256)
        with contextlib.suppress(ValueError):
            assert im.decode(bytes(spoilt)).shape[0] == 3


@pytest.mark.parametrize("size", [(224, 224), (96, 160)])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_crop_and_resizing_is_torchvisions(size, mode):
    """Within a tenth of a grey level on average, over training crops, also mirrored ones."""
    image, draw, means = picture(), random.Random(0), []
    decoded, kind = im.decode(encode(image, "PNG")), v2.InterpolationMode(mode)
    boxes = [(0, 0, 375, 500), (374, 499, 1, 1)]
    for number, box in enumerate(boxes + [im.random_box(draw, 375, 500) for _ in range(20)]):
        expected = v2.functional.resized_crop(image, *box, list(size), kind, antialias=True)
        crop = im.Crop(box, size, (0, 0, *size), mirrored=number % 2 > 0)
        expected = ImageOps.mirror(expected) if crop.mirrored else expected
        source = decoded if number % 4 else decoded.contiguous()
        apart = np.abs(im.resized_crop(source, crop, mode).numpy() - np.asarray(expected, np.int16))
        assert (apart > 1).mean() < 1e-4, "no more than another rounding"
        assert apart.max() <= (1 if mode == "bilinear" else 2)  # of two passes, and one overshoots
        means.append(apart.mean())
    assert max(means) < 0.3 and np.mean(means) < 0.1


@pytest.mark.parametrize(("smallest", "checksum"), [((), 2201022641), ((0.35,), 1064679953)])
def test_crops_are_those_of_earlier_runs(smallest, checksum):
    """Golden: at this commit their areas, ratios and places had the exact distributions.

    Tiny and very long images hold few boxes, or none.
    """
    draw, shapes = random.Random(2), [(300, 900), (1, 1), (3, 2), (2, 5000), (5000, 2)]
    crops = [im.train_crop(shape, 224, draw, *smallest) for shape in shapes for _ in range(1000)]
    assert crc32(repr([(crop.box, crop.mirrored) for crop in crops]).encode()) == checksum


@pytest.mark.parametrize("short", [232, 255, 256])
@pytest.mark.parametrize("shape", [(375, 500), (500, 375), (301, 301)])
def test_evaluation_shows_what_torchvision_shows(shape, short):
    """Published weights were measured so, also where an odd number of rows is left out."""
    places = np.arange(np.prod(shape), dtype=np.int32).reshape(1, *shape)
    crop = im.eval_crop(shape, 224, short)
    resize = v2.Resize(short, v2.InterpolationMode.NEAREST)
    resized = resize(torch.from_numpy(places))
    assert tuple(resized.shape[1:]) == crop.size
    top, left, height, width = crop.window
    expected = v2.functional.center_crop(resized, [224, 224])
    assert torch.equal(resized[:, top : top + height, left : left + width], expected)


@pytest.mark.parametrize("shape", [(3, 60_000), (60_000, 3), (1, 1)])
def test_views_of_extreme_images(shape):
    """Evaluation resizes their middle alone."""
    crop = im.eval_crop(shape, 224, 256)
    assert max(crop.size) <= 16 * 256
    top, left, height, width = crop.box
    assert abs(2 * top + height - shape[0]) <= 1 and abs(2 * left + width - shape[1]) <= 1
    image = torch.zeros((3, *shape), dtype=torch.uint8)
    for one in (crop, im.train_crop(shape, 224, random.Random(0))):
        assert im.resized_crop(image, one).shape == (224, 224, 3)
