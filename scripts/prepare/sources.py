"""Sources of images: drawn textures, Fashion-MNIST, CIFAR-10 and ImageNet 2012.

torchvision reads the published archives and checks their MD5 sums. Each source is a function of the
unfinished splits.
"""

import csv
import io
import math
import pickle
import random
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image
from prepare.folder import Item, Split

from utils.errors import UserError

FASHION_CLASSES = (
    *("0_tshirt_top", "1_trouser", "2_pullover", "3_dress", "4_coat"),
    *("5_sandal", "6_shirt", "7_sneaker", "8_bag", "9_ankle_boot"),
)
FASHION_FILES = tuple(
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)
CIFAR_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")
CIFAR_ARCHIVE, CIFAR_FOLDER = "cifar-10-python.tar.gz", "cifar-10-batches-py"
ARCHIVES = {"train": "ILSVRC2012_img_train.tar", "val": "ILSVRC2012_img_val.tar"}
KAGGLE_CSV, KAGGLE_IMAGES = "LOC_val_solution.csv", "ILSVRC/Data/CLS-LOC"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
SIZES = {
    "FashionMNIST": {"train": 60_000, "val": 10_000},
    "CIFAR10": {"train": 50_000, "val": 10_000},
    "ImageNet": {"train": 1_281_167, "val": 50_000},
}
_DAMAGE = (
    *(RuntimeError, OSError, EOFError, ValueError, LookupError, TypeError, AssertionError),
    *(zlib.error, tarfile.TarError, csv.Error, pickle.UnpicklingError),
)


@contextmanager
def _reading(what: object, advice: str = "") -> Iterator[None]:
    """Turn the errors of reading damaged data into a `UserError` that names it."""
    try:
        yield
    except UserError:
        raise
    except _DAMAGE as error:
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

    return {split: (classes * numbers[split], items(split)) for split in missing}


# ---- published data sets


def _png(pixels: np.ndarray) -> bytes:
    """A PNG file of a uint8 array: height x width (greyscale) or height x width x 3 (RGB)."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _small(
    kind: str, classes: tuple[str, ...], folder: str, source: Path | None, missing: list[str]
) -> dict[str, Split]:
    """Splits of a data set of torchvision: from ``folder``, or a download without a source."""
    from torchvision import datasets

    def items(split: str, part: Any) -> Iterator[Item]:
        with _reading(source):
            for i, (image, label) in enumerate(zip(part.data, part.targets, strict=True)):
                pixels = np.ascontiguousarray(image)
                yield Item(f"{split}/{classes[int(label)]}/{i:05d}.png", partial(_png, pixels))

    splits = {}
    for split in missing:
        with _reading(source or f"{kind} from the internet", "" if source else "; give --source"):
            part = getattr(datasets, kind)(folder, split == "train", download=source is None)
        splits[split] = SIZES[kind][split], items(split, part)
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
            path = next((p for p in (source / name, source / f"{name}.gz") if p.is_file()), None)
            if path is None:
                raise UserError(f"neither {name} nor {name}.gz is in {source}")
            if path.suffix:
                with _reading(path):
                    extract_archive(str(path), str(raw))
            else:
                (raw / name).symlink_to(path)
        return _small("FashionMNIST", FASHION_CLASSES, folder, source, missing)


def cifar10(source: Path | None, missing: list[str]) -> dict[str, Split]:
    """CIFAR-10: the archive, the folder extracted from it, or the folder of either."""
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import extract_archive

    with tempfile.TemporaryDirectory() as folder:
        if source:
            places = (source, source / CIFAR_ARCHIVE, source / CIFAR_FOLDER)
            found = (p for p in places if p.is_file() or (p / "data_batch_1").is_file())
            path = next(found, None)
            if path is None:
                raise UserError(f"neither {CIFAR_ARCHIVE} nor {CIFAR_FOLDER} was found at {source}")
            if path.is_dir():  # torchvision checks the MD5 sum of each batch
                Path(folder, CIFAR_FOLDER).symlink_to(path)
            else:
                _check_md5(path, CIFAR10.tgz_md5)
                with _reading(path):
                    extract_archive(str(path), folder)
        return _small("CIFAR10", CIFAR_CLASSES, folder, source, missing)


def imagenet(source: Path, missing: list[str]) -> dict[str, Split]:
    """ImageNet 2012: the published archives, or Kaggle's folders, in ``source``.

    The images are the original files; Kaggle's are hard-linked where the file system allows it.
    Raises: `UserError` if nothing is found, or the classes of the validation images are not known.
    """
    splits = {}
    for split in missing:
        archive, folder = source / ARCHIVES[split], source / KAGGLE_IMAGES / split
        path = next((path for path in (archive, folder) if path.exists()), None)
        if path is None:
            print(f"not prepared: {split}, as neither {archive} nor {folder} exists")
            continue
        print(f"reading {path}", flush=True)
        items = _train(path) if split == "train" else _val(path, _val_labels(source))
        splits[split] = SIZES["ImageNet"][split], items
    if not splits and len(missing) == len(ARCHIVES):
        raise UserError(
            f"neither {' nor '.join(ARCHIVES.values())} nor the folder {KAGGLE_IMAGES} "
            f"is in {source}"
        )
    return splits


def _check_md5(path: Path, wanted: str) -> None:
    from torchvision.datasets.utils import check_integrity

    print(f"checking the MD5 sum of {path}", flush=True)
    if not check_integrity(str(path), wanted):
        raise UserError(f"{path} is not the published file (its MD5 sum differs); get it again")


def _members(file: Any, what: object, suffix: str) -> Iterator[tuple[str, Any]]:
    """Last part of the name, and open file, of each file in an uncompressed tar."""
    with _reading(what), tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            name = PurePosixPath(member.name).name
            if member.isfile() and name.endswith(suffix):
                yield name, tar.extractfile(member)


def _archive(split: str, path: Path, suffix: str) -> Iterator[tuple[str, Any]]:
    """The members of a published archive, whose MD5 sum is checked first."""
    from torchvision.datasets.imagenet import ARCHIVE_META

    _check_md5(path, ARCHIVE_META[split][1])
    with path.open("rb") as file:
        yield from _members(file, path, suffix)


def _read(file: Any, what: object) -> bytes:
    with _reading(what):
        return file.read()


def _train(path: Path) -> Iterator[Item]:
    """The training images in a tar of one tar per class, or in one folder per class."""
    if path.is_dir():
        for image in sorted(path.glob("*/*.JPEG")):
            yield Item(f"train/{image.parent.name}/{image.name}", image)
        return
    for inner, content in _archive("train", path, ".tar"):
        what = f"{inner} in {path}"
        for name, image in _members(content, what, ".JPEG"):
            place = f"train/{inner.removesuffix('.tar')}/{name}"
            yield Item(place, partial(_read, image, what), in_turn=True)


def _val(path: Path, labels: dict[str, str]) -> Iterator[Item]:
    """The validation images in a tar or folder, each in the folder of its class."""
    left = dict(labels)

    def place(name: str) -> str:
        if name not in left:
            raise UserError(f"{path} holds {name}, whose class is not known")
        return f"val/{left.pop(name)}/{name}"

    if path.is_dir():
        for image in sorted(path.glob("*.JPEG")):
            yield Item(place(image.name), image)
    else:
        for name, image in _archive("val", path, ".JPEG"):
            yield Item(place(name), partial(_read, image, path), in_turn=True)
    if left:
        raise UserError(f"{path} lacks {len(left)} of the images, such as {min(left)}")


def _val_labels(source: Path) -> dict[str, str]:
    """The class (WordNet id) of each validation image, by file name."""
    if (source / KAGGLE_CSV).is_file():
        path = source / KAGGLE_CSV
        with _reading(path), path.open(newline="") as file:
            rows = csv.DictReader(file)
            labels = {f"{r['ImageId']}.JPEG": r["PredictionString"].split()[0] for r in rows}
    elif (source / DEVKIT).is_file():
        path = source / DEVKIT
        labels = _devkit_labels(path)
    else:
        raise UserError(
            f"the classes of the validation images are not known: neither {KAGGLE_CSV} "
            f"nor {DEVKIT} is in {source}"
        )
    print(f"the classes of the validation images are from {path.name}")
    return labels


def _devkit_labels(path: Path) -> dict[str, str]:
    from torchvision.datasets import imagenet as archives

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, DEVKIT).symlink_to(path.resolve())
        try:
            with _reading(path):
                archives.parse_devkit_archive(folder)
                wnids = archives.load_meta_file(folder)[1]
        except ImportError as error:
            raise UserError(
                f"reading {DEVKIT} needs scipy: pip install scipy, or put {KAGGLE_CSV} beside it"
            ) from error
    return {f"ILSVRC2012_val_{i:08d}.JPEG": wnid for i, wnid in enumerate(wnids, start=1)}
