"""Sources of images: drawn textures, Fashion-MNIST, CIFAR-10 and ImageNet 2012.

torchvision reads the published archives and checks their MD5 sums. Each source is a function of the
unfinished splits.
"""

import io
import math
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from prepare.folder import Item, Split, in_batches
from prepare.reading import open_images, split_of

from utils.errors import UserError

FASHION_CLASSES = (
    *("0_tshirt_top", "1_trouser", "2_pullover", "3_dress", "4_coat"),
    *("5_sandal", "6_shirt", "7_sneaker", "8_bag", "9_ankle_boot"),
)
FASHION_FILES = tuple(
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)
DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")
CIFAR_ARCHIVE = "cifar-10-python.tar.gz"


@contextmanager
def _reading(what: object, advice: str = "") -> Iterator[None]:
    """Name what cannot be read: the readers of damaged archives raise nearly anything."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot read {what} ({reason}){advice}") from error


# ---- drawn textures


def _below(values: np.ndarray, share: float) -> np.ndarray:
    """True where the fractional part of ``values`` is below ``share``: bars with period 1."""
    return values - np.floor(values) < share


def _turns(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The angle of each point around the origin, in turns."""
    return np.arctan2(v, u) / math.tau


# Of the sample: where the lighter colour is, for coordinates in periods from near the middle. The
# class is the texture; colours, size, rotation, place and noise are random and do not depend on it.
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


def _image_size(rng: random.Random) -> tuple[int, int]:
    """Width and height in pixels, varied as ImageNet's: most are landscape, near 500 x 400."""
    long_side = rng.choice((500, 500, 500, rng.randint(400, 640)))
    short_side = round(long_side / rng.choice((1.0, 1.25, 4 / 3, 4 / 3, 1.5, 1.5)))
    return (short_side, long_side) if rng.random() < 0.2 else (long_side, short_side)


def draw(seed: int, split: str, class_name: str, number: int) -> bytes:
    """Draw one image: the bytes of a JPEG file in RGB, 400 to 640 pixels on the long side.

    ``class_name`` is one of `TEXTURES`. The same arguments give the same bytes with the same
    release of Pillow, so that an interrupted preparation ends as an uninterrupted one.
    """
    # random.Random hashes the text the same way in every process, unlike hash().
    rng = random.Random(f"{seed}/{split}/{class_name}/{number}")
    width, height = _image_size(rng)
    period, turn = rng.uniform(0.1, 0.22) * min(width, height), rng.uniform(0, math.tau)
    x = (np.arange(width) - rng.uniform(0.3, 0.7) * width) / period
    y = ((np.arange(height) - rng.uniform(0.3, 0.7) * height) / period)[:, None]
    sine, cosine = math.sin(turn), math.cos(turn)
    lighter = TEXTURES[class_name](x * cosine - y * sine, x * sine + y * cosine)
    dark, light = ([rng.uniform(low, low + 120) for _ in range(3)] for low in (10, 125))
    pixels = np.where(lighter[..., None], light, dark)
    # RandomState, as numpy promises that its numbers never change from one release to the next.
    noise = np.random.RandomState(rng.randrange(2**31)).standard_normal((height, width, 1))
    file = io.BytesIO()
    image = Image.fromarray((pixels + 7 * noise).clip(0, 255).astype(np.uint8))
    image.save(file, "JPEG", quality=rng.randint(75, 92))
    return file.getvalue()


def sample(classes: int, train: int, val: int, seed: int, missing: list[str]) -> dict[str, Split]:
    """Drawn images, ``train`` and ``val`` of each class. Raises: `UserError`: too many classes."""
    if classes > len(TEXTURES):
        raise UserError(f"--classes {classes} is too many: the sample has {len(TEXTURES)} classes")
    numbers = {"train": train, "val": val}

    def items(split: str) -> Iterator[Item]:
        for name in list(TEXTURES)[:classes]:
            for i in range(numbers[split]):
                place = f"{split}/{name}/{name}_{i:05d}.JPEG"
                yield Item(place, partial(draw, seed, split, name, i))

    return {s: Split(classes * numbers[s], in_batches(items(s))) for s in missing}


# ---- published data sets


def _png(pixels: np.ndarray) -> bytes:
    """A PNG file of a uint8 array: height x width (greyscale) or height x width x 3 (RGB)."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _small(kind: str, folder: str, source: Path | None, missing: list[str]) -> dict[str, Split]:
    """Splits of a data set of torchvision: from ``folder``, or a download without a source."""
    from torchvision import datasets

    def items(split: str, part: Any) -> Iterator[Item]:
        classes = FASHION_CLASSES if kind == "FashionMNIST" else part.classes
        with _reading(source):
            for i, (image, label) in enumerate(zip(part.data, part.targets, strict=True)):
                pixels = np.ascontiguousarray(image)
                yield Item(f"{split}/{classes[int(label)]}/{i:05d}.png", partial(_png, pixels))

    splits = {}
    for split in missing:
        with _reading(source or f"{kind} from the internet", "" if source else "; give --source"):
            part = getattr(datasets, kind)(folder, split == "train", download=source is None)
        splits[split] = Split(len(part), in_batches(items(split, part)))
    return splits


def fashion_mnist(source: Path | None, missing: list[str]) -> dict[str, Split]:
    """Fashion-MNIST: the four idx files, .gz or not, in ``source``; Debian's, or a download."""
    from torchvision.datasets.utils import extract_archive

    if source is None and DEBIAN_FASHION.is_dir():
        source = DEBIAN_FASHION
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder, "FashionMNIST", "raw")  # where torchvision looks for them
        raw.mkdir(parents=True)
        for name in FASHION_FILES if source else ():
            packed = source / f"{name}.gz"
            if (source / name).is_file():
                (raw / name).symlink_to(source / name)
            elif not packed.is_file():
                raise UserError(f"neither {name} nor {name}.gz is in {source}")
            else:
                with _reading(packed):
                    extract_archive(str(packed), str(raw))
        return _small("FashionMNIST", folder, source, missing)


def cifar10(source: Path | None, missing: list[str]) -> dict[str, Split]:
    """CIFAR-10: the archive, or the folder that it is in; without either, a download."""
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import extract_archive

    with tempfile.TemporaryDirectory() as folder:
        if source:
            path = source / CIFAR_ARCHIVE if source.is_dir() else source
            if not path.is_file():
                raise UserError(f"there is no {path}")
            _check_md5(path, CIFAR10.tgz_md5)
            with _reading(path):
                extract_archive(str(path), folder)
        return _small("CIFAR10", folder, source, missing)


def imagenet(source: Path, missing: list[str]) -> dict[str, Split]:
    """The images in ``source``, whatever training or `prepare.reading` can read: the archives of
    image-net.org, Kaggle's folders.

    The images are the original files, as links where they are files. Raises: `UserError` if there
    are none, or the classes of the validation images are not known.
    """
    images = open_images(source, missing)
    for split in missing:
        if split not in images:
            print(f"not prepared: {split}, of which {source} has no images")
    return {split: split_of(part, split) for split, part in images.items()}


def _check_md5(path: Path, wanted: str) -> None:
    from torchvision.datasets.utils import check_integrity

    print(f"checking the MD5 sum of {path}", flush=True)
    if not check_integrity(str(path), wanted):
        raise UserError(f"{path} is not the published file (its MD5 sum differs); get it again")
