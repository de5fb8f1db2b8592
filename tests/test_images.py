"""One image: decoding against Pillow, resizing and cropping against torchvision."""

import contextlib
import io
import random
import zlib

import numpy as np
import pytest
import torch
from batches import encode, picture
from PIL import Image, ImageOps
from torchvision.transforms import v2

from utils import images as im

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


def test_decode_scales_16_bits_down():
    """Pillow's convert("RGB") would clip them to white."""
    grey = np.random.default_rng(0).integers(0, 65536, (40, 60)).astype(np.uint16)
    for kind in ("PNG", "TIFF"):
        got = im.decode(encode(Image.fromarray(grey), kind)).numpy()
        assert got.shape == (3, 40, 60)
        assert abs(got.astype(int) - grey.astype(int) // 256).max() <= 1


JPEG, PNG, TIFF = ODD["jpeg"], ODD["png"], ODD["tiff"]


@pytest.mark.parametrize(
    "data",
    [b"", b"<html>404</html>", JPEG[:300], JPEG[: len(JPEG) // 2], PNG[:-400], TIFF[:1000]],
    ids=range(6),
)
def test_decode_rejects_incomplete_images(data):
    with pytest.raises(ValueError, match=r"\w+"):
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


@pytest.mark.parametrize("size", [(224, 224), (32, 32), (96, 160)])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_crop_and_resizing_is_torchvisions(size, mode):
    """Within a tenth of a grey level on average, over training crops, also mirrored ones."""
    image, draw, means = picture(), random.Random(0), []
    decoded, kind = im.decode(encode(image, "PNG")), v2.InterpolationMode(mode)
    boxes = [(0, 0, 375, 500), (374, 499, 1, 1)]
    for number, box in enumerate(boxes + [im.random_box(draw, 375, 500) for _ in range(20)]):
        expected = v2.functional.resized_crop(image, *box, list(size), kind, antialias=True)
        cut = im.Cut(box, size, (0, 0, *size), mirrored=number % 2 > 0)
        expected = ImageOps.mirror(expected) if cut.mirrored else expected
        source = decoded if number % 4 else decoded.contiguous()
        apart = np.abs(im.view(source, cut, mode).numpy() - np.asarray(expected, np.int16))
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
    cuts = [im.train_cut(shape, 224, draw, *smallest) for shape in shapes for _ in range(1000)]
    assert zlib.crc32(repr([(cut.box, cut.mirrored) for cut in cuts]).encode()) == checksum


@pytest.mark.parametrize("shape", [(3, 60_000), (60_000, 3), (1, 1)])
def test_views_of_extreme_images(shape):
    """Evaluation resizes their middle alone."""
    cut = im.eval_cut(shape, 224, 256)
    assert max(cut.size) <= 16 * 256
    top, left, height, width = cut.box
    assert abs(2 * top + height - shape[0]) <= 1 and abs(2 * left + width - shape[1]) <= 1
    image = torch.zeros((3, *shape), dtype=torch.uint8)
    for view in (cut, im.train_cut(shape, 224, random.Random(0))):
        assert im.view(image, view).shape == (224, 224, 3)
