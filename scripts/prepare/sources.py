"""Sources of images: drawn textures, Fashion-MNIST, CIFAR-10 and ImageNet 2012.

Each source is a function that opens the unfinished splits.
"""

import gzip
import io
import math
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from prepare.reading import open_images
from prepare.writing import BATCH, Item, Lazy, Split

from utils.start.errors import UserError

FASHION_CLASSES = (
    *("0_tshirt_top", "1_trouser", "2_pullover", "3_dress", "4_coat"),
    *("5_sandal", "6_shirt", "7_sneaker", "8_bag", "9_ankle_boot"),
)
DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")
CIFAR_ARCHIVE = "cifar-10-python.tar.gz"


# ---- drawn textures


def _below(values: np.ndarray, share: float) -> np.ndarray:
    """Return whether the fractional part of ``values`` is below ``share``: bars with period 1."""
    return values - np.floor(values) < share


def _turns(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The angle of each point around the origin, in turns."""
    return np.arctan2(v, u) / math.tau


# The classes of the sample. A function returns where the lighter colour is; its coordinates count
# periods from a point near the middle. Colours, size, rotation, place and noise are random.
TEXTURES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "bricks": lambda u, v: ~_below(v, 0.15) & ~_below(u / 2 + np.floor(v) / 2, 0.07),
    "checker": lambda u, v: (np.floor(u) + np.floor(v)) % 2 < 1,
    "dots": lambda u, v: (u % 1 - 0.5) ** 2 + (v % 1 - 0.5) ** 2 < 0.1,
    "grid": lambda u, v: _below(u, 0.2) | _below(v, 0.2),
    "rays": lambda u, v: _below(_turns(u, v) * 14, 0.5),
    "spiral": lambda u, v: _below(np.hypot(u, v) + _turns(u, v), 0.5),
    "stripes": lambda u, v: _below(u, 0.5),
    "target": lambda u, v: _below(np.hypot(u, v), 0.5),
    "waves": lambda u, v: _below(u + 0.45 * np.sin(2.2 * v), 0.5),
    "zigzag": lambda u, v: _below(u + 2.4 * np.abs(v / 2 % 1 - 0.5), 0.5),
}


def draw(seed: int, split: str, class_name: str, number: int) -> bytes:
    """Draw one image: the bytes of a JPEG file in RGB, 400 to 640 pixels on the long side.

    ``class_name`` is one of `TEXTURES`. The same arguments give the same bytes with the same
    release of Pillow, so that an interrupted preparation ends as an uninterrupted one.
    """
    # random.Random hashes the text the same way in every process, unlike hash().
    rng = random.Random(f"{seed}/{split}/{class_name}/{number}")
    # ImageNet's sizes: most images are landscape, near 500 x 400.
    long_side = rng.choice((500, 500, 500, rng.randint(400, 640)))
    short_side = round(long_side / rng.choice((1.0, 1.25, 4 / 3, 4 / 3, 1.5, 1.5)))
    upright = rng.random() < 0.2
    width, height = (short_side, long_side) if upright else (long_side, short_side)
    period, turn = rng.uniform(0.1, 0.22) * min(width, height), rng.uniform(0, math.tau)
    x = (np.arange(width) - rng.uniform(0.3, 0.7) * width) / period
    y = ((np.arange(height) - rng.uniform(0.3, 0.7) * height) / period)[:, None]
    sine, cosine = math.sin(turn), math.cos(turn)
    lighter = TEXTURES[class_name](x * cosine - y * sine, x * sine + y * cosine)
    dark, light = ([rng.uniform(low, low + 120) for _ in range(3)] for low in (10, 125))
    pixels = np.where(lighter[..., None], light, dark)
    # RandomState, because numpy promises that its numbers never change between releases.
    noise = np.random.RandomState(rng.randrange(2**31)).standard_normal((height, width, 1))
    file = io.BytesIO()
    image = Image.fromarray((pixels + 7 * noise).clip(0, 255).astype(np.uint8))
    image.save(file, "JPEG", quality=rng.randint(75, 92))
    return file.getvalue()


def _split(items: list[Item]) -> Split:
    return Split(len(items), Lazy(len(items), BATCH, items.__getitem__), ())


def sample(
    classes: int, train: int, val: int, seed: int, missing: Sequence[str]
) -> dict[str, Split]:
    """Draw ``train`` and ``val`` images per class. Raises: `UserError` for too many classes."""
    if classes > len(TEXTURES):
        raise UserError(f"--classes {classes} is too many: the sample has {len(TEXTURES)} classes")
    return {
        part: _split(
            [
                Item(f"{part}/{name}/{name}_{i:05d}.JPEG", partial(draw, seed, part, name, i))
                for name in list(TEXTURES)[:classes]
                for i in range(train if part == "train" else val)
            ]
        )
        for part in missing
    }


# ---- published data sets


# How to get a data set on a machine that cannot download it.
BY_HAND = {
    "fashion": "download the four .gz files of github.com/zalandoresearch/fashion-mnist (folder "
    "data/fashion) on another machine, put them into a folder, and give --source FOLDER",
    "cifar10": "download cifar-10-python.tar.gz from www.cs.toronto.edu/~kriz/cifar.html on "
    "another machine, and give --source FILE",
}


@contextmanager
def _reading(what: object, advice: str = "get it again") -> Iterator[None]:
    """Report any error as `UserError`: the readers of damaged archives raise nearly anything."""
    try:
        yield
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot read {what} ({reason}): {advice}") from error


def _png(pixels: np.ndarray) -> bytes:
    """Encode a uint8 array as PNG: height x width (greyscale) or height x width x 3 (RGB)."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _pngs(part: str, pixels: np.ndarray, labels: Iterable[int], classes: Sequence[str]) -> Split:
    """Make a split of PNG files from uint8 ``pixels`` [n, height, width] or [..., 3]."""
    return _split(
        [
            Item(f"{part}/{classes[label]}/{i:05d}.png", partial(_png, image))
            for i, (image, label) in enumerate(zip(pixels, labels, strict=True))
        ]
    )


def _idx(folder: Path, name: str) -> np.ndarray:
    """Read the uint8 array in an idx file, ``.gz`` or not. Raises: `UserError`."""
    paths = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
    if not paths:
        raise UserError(f"neither {name} nor {name}.gz is in {folder}")
    with _reading(paths[0]):
        data = paths[0].read_bytes()
        data = gzip.decompress(data) if paths[0].suffix == ".gz" else data
        shape = np.frombuffer(data, ">u4", count=data[3], offset=4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)


def fashion_mnist(source: Path | None, missing: Sequence[str]) -> dict[str, Split]:
    """Open Fashion-MNIST: idx files in ``source``, else Debian's package, else a download."""
    from torchvision.datasets import FashionMNIST

    if source is None and DEBIAN_FASHION.is_dir():
        source = DEBIAN_FASHION
    splits = {}
    with tempfile.TemporaryDirectory() as folder:
        if source is None:
            with _reading("Fashion-MNIST from the internet", BY_HAND["fashion"]):
                FashionMNIST(folder, download=True)
            source = Path(folder, "FashionMNIST", "raw")
        for part in missing:
            prefix = "train" if part == "train" else "t10k"
            pixels = _idx(source, f"{prefix}-images-idx3-ubyte")
            labels = _idx(source, f"{prefix}-labels-idx1-ubyte")
            with _reading(source):
                splits[part] = _pngs(part, pixels, labels, FASHION_CLASSES)
    return splits


def cifar10(source: Path | None, missing: Sequence[str]) -> dict[str, Split]:
    """Open CIFAR-10. ``source``: the archive, or its folder; without it, download the archive.

    torchvision unpickles the content, which can run code, so only the published archive is opened.
    """
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import check_integrity

    splits = {}
    with tempfile.TemporaryDirectory() as folder:
        if source:
            path = source / CIFAR_ARCHIVE if source.is_dir() else source
            if not path.is_file():
                raise UserError(f"{path} does not exist")
            if not check_integrity(str(path), CIFAR10.tgz_md5):
                text = f"{path} is not the published file (its MD5 sum differs)"
                raise UserError(f"{text}: get it again")
            Path(folder, CIFAR_ARCHIVE).symlink_to(path)
        advice = "get it again" if source else BY_HAND["cifar10"]
        for part in missing:
            with _reading(source or "CIFAR-10 from the internet", advice):
                data = CIFAR10(folder, part == "train", download=True)
                splits[part] = _pngs(part, data.data, data.targets, data.classes)
    return splits


def imagenet(source: Path, missing: Sequence[str]) -> dict[str, Split]:
    """Open the images in ``source``, in any layout that training or `prepare.reading` can read:
    the archives of image-net.org, Kaggle's folders.

    Image files become links; other images are copied unchanged. Raises: `UserError` if there are
    none, or the classes of the validation images are unknown.
    """
    images = open_images(source, missing)
    for split in missing:
        if split not in images:
            print(f"left out: {split}, because {source} has no images of it")
    return {split: part.split(split) for split, part in images.items()}
