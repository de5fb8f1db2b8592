"""Makes image folders OUT/train/CLASS/ and OUT/val/CLASS/, as torchvision's ImageFolder reads them.

Run `python scripts/prepare_data.py --help` for the data sets; `shrink` copies any image folder with
smaller images, `restart` with the same ones, `pack` with decoded ones. An interrupted preparation
continues when the same command is run again.
"""

import argparse
import gzip
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import utils.launch.installed  # noqa: F401 (a missing package becomes one sentence)

import numpy as np
from prepare import sample as sample_drawings
from prepare.archives import (
    ARCHIVES,
    DEVKIT,
    KAGGLE_CSV,
    KAGGLE_IMAGES,
    open_cifar10,
    open_imagenet,
)
from prepare.files import png_bytes, reading
from prepare.folder import SPLITS, Item, Plan, prepare
from prepare.pack import pack_folder, verify
from prepare.restart import restart_folder
from prepare.shrink import shrink_folder

from utils.errors import UserError, go_on_without_reader, report
from utils.launch.supervise import usable_cores
from utils.option_types import number, positive

FASHION_CLASSES = (
    *("0_tshirt_top", "1_trouser", "2_pullover", "3_dress", "4_coat"),
    *("5_sandal", "6_shirt", "7_sneaker", "8_bag", "9_ankle_boot"),
)
DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")
SIZE_HELP = """largest short side in pixels (default: %(default)s, for training crops of 224);
    smaller images, and those that cannot be read, are copied as they are, all others become JPEG
    files under the same name, whatever its suffix"""

PACK_HELP = """largest short side in pixels (default: %(default)s, for training crops of 224);
    takes 263 KB an image then, 337 GB for ImageNet, and says how much before it begins"""


def _download(data_set: str, folder: Path, advice: str) -> Path:
    """Downloads a data set as torchvision does, and returns where its files are."""
    try:
        from torchvision import datasets

        getattr(datasets, data_set)(folder, download=True)
    except (ImportError, OSError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot download {data_set} ({reason}); {advice}") from error
    return folder / "FashionMNIST" / "raw" if data_set == "FashionMNIST" else folder


def _idx(folder: Path, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Reads the idx file `name` or `name`.gz in `folder`.

    Args:
        folder: where the file lies.
        name: the file's name without .gz.
        shape: of one of its entries: (height, width) for images, () for labels.

    Returns:
        the entries, N x shape, uint8.

    Raises:
        UserError: the file is missing, is no idx file of that shape, or is not as long as its
            header says.
    """
    path = folder / name
    if not path.is_file():
        path = folder / f"{name}.gz"
    if not path.is_file():
        raise UserError(f"neither {name} nor {name}.gz is in {folder}")
    with reading(path):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    words = 2 + len(shape)
    # The magic number: two zero bytes, 8 for unsigned bytes, the number of dimensions.
    if len(data) < 4 * words or data[:4] != bytes((0, 0, 8, 1 + len(shape))):
        raise UserError(f"{path} does not begin like an idx file of {1 + len(shape)} dimensions")
    count, *sizes = struct.unpack(f">{words - 1}I", data[4 : 4 * words])
    if tuple(sizes) != shape:
        raise UserError(f"{path} holds images of {sizes} pixels instead of {list(shape)}")
    if len(data) != 4 * words + count * int(np.prod(shape)):
        raise UserError(f"{path} says it has {count} entries, but its length does not match")
    return np.frombuffer(data, np.uint8, offset=4 * words).reshape(count, *shape)


def open_fashion_mnist(source: Path) -> Plan:
    """Opens Fashion-MNIST, the four idx files in `source`.

    The images are 28 x 28 greyscale PNG files; the test images become the split "val". Raises
    UserError if a file is missing, damaged, or does not match the others.
    """
    arrays = {}
    for split, prefix in (("train", "train"), ("val", "t10k")):
        images = _idx(source, f"{prefix}-images-idx3-ubyte", (28, 28))
        labels = _idx(source, f"{prefix}-labels-idx1-ubyte", ())
        if len(images) != len(labels) or len(labels) == 0 or labels.max() > 9:
            raise UserError(
                f"the {prefix} files in {source} do not match each other: {len(images)} images, "
                f"{len(labels)} labels up to {labels.max(initial=0)}"
            )
        arrays[split] = images, labels

    def items() -> Iterator[Item]:
        for split, (images, labels) in arrays.items():
            for i, (image, label) in enumerate(zip(images, labels, strict=True)):
                make = partial(png_bytes, image)
                yield Item(split, FASHION_CLASSES[label], f"{i:05d}.png", make)

    notes = [f"reading the idx files in {source}"]
    return Plan(items(), ("train", "val"), {"train": 60_000, "val": 10_000}, notes)


def open_sample(classes: int, train: int, val: int, seed: int) -> Plan:
    """Plans the drawn images of prepare/sample.py: `train` and `val` images per class.

    Raises UserError if more classes are asked for than it can draw.
    """
    names = sample_drawings.CLASS_NAMES
    if classes > len(names):
        raise UserError(f"--classes {classes} is too many: the sample has {len(names)} classes")
    numbers = {"train": train, "val": val}
    items = (
        Item(
            split,
            name,
            f"{name}_{number:05d}.JPEG",
            partial(sample_drawings.draw, seed, split, name, number),
        )
        for split in SPLITS
        for name in names[:classes]
        for number in range(numbers[split])
    )
    return Plan(items, SPLITS, {split: classes * numbers[split] for split in SPLITS}, [])


def _run_sample(args: argparse.Namespace) -> None:
    options = {key: getattr(args, key) for key in ("classes", "train", "val", "seed")}
    prepare(args.out, "sample", options, lambda done: open_sample(**options))


def _run_source(args: argparse.Namespace) -> None:
    source = args.source and args.source.expanduser().resolve()
    downloads = args.out / ".download"

    def open_source(done: tuple[str, ...]) -> Plan:
        if args.command == "imagenet":
            return open_imagenet(source, done)
        if args.command == "cifar10":
            return open_cifar10(source or _download("CIFAR10", downloads, "give --source"))
        if source or DEBIAN_FASHION.is_dir():
            return open_fashion_mnist(source or DEBIAN_FASHION)
        advice = "install the Debian package dataset-fashion-mnist, or give --source"
        return open_fashion_mnist(_download("FashionMNIST", downloads, advice))

    prepare(args.out, args.command, {"source": str(source) if source else None}, open_source)
    shutil.rmtree(downloads, ignore_errors=True)


def _run_shrink(args: argparse.Namespace) -> None:
    shrink_folder(args.source, args.out, args.size, args.quality, args.workers)


def _run_restart(args: argparse.Namespace) -> None:
    restart_folder(args.source, args.out, args.workers)


def _run_pack(args: argparse.Namespace) -> None:
    pack_folder(args.source, args.out, args.size, args.workers)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line; each sub-command sets `run`, which is given the arguments."""
    parser = argparse.ArgumentParser(
        prog="prepare_data.py",
        description="Makes the folders OUT/train/CLASS/ and OUT/val/CLASS/ of images. When it is "
        "interrupted, running the same command again finishes the work.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str, run: Callable, summary: str, *examples: str, source: str | None = None
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=summary,
            description=summary,
            epilog="\n  ".join(("examples:", *(f"{parser.prog} {name} {e}" for e in examples))),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if source:
            command.add_argument("source", type=Path, metavar="SRC", help=source)
        text = "the pack to read" if name == "verify" else "the folder to make"
        command.add_argument("out", type=Path, metavar="OUT", help=text)
        command.set_defaults(run=run)
        return command

    text = "a small data set of drawn shapes and textures"
    sample = add("sample", _run_sample, text, "data/sample", "data/big --classes 20 --train 1000")
    for flag, default, what in (
        ("--classes", 10, f"number of classes, at most {len(sample_drawings.CLASS_NAMES)}"),
        ("--train", 100, "training images per class"),
        ("--val", 20, "validation images per class"),
    ):
        text = f"{what} (default: %(default)s)"
        sample.add_argument(flag, type=positive, default=default, metavar="N", help=text)
    text = "random seed: another number gives other images (default: %(default)s)"
    sample.add_argument("--seed", type=int, default=0, metavar="N", help=text)

    text = "Fashion-MNIST: 70,000 greyscale images of clothes, 28 x 28 pixels"
    fashion = add("fashion-mnist", _run_source, text, "data/fashion", "data/fashion --source idx/")
    text = f"folder of the four idx files, .gz or not (default: {DEBIAN_FASHION}, else a download)"
    fashion.add_argument("--source", type=Path, metavar="DIR", help=text)

    text = "CIFAR-10: 60,000 colour images, 32 x 32 pixels"
    cifar = add("cifar10", _run_source, text, "data/cifar --source cifar-10-python.tar.gz")
    text = "cifar-10-python.tar.gz or the folder extracted from it (default: a download)"
    cifar.add_argument("--source", type=Path, metavar="PATH", help=text)

    text = "ImageNet 2012: 1,281,167 training and 50,000 validation images of 1000 classes"
    imagenet = add("imagenet", _run_source, text, "data/imagenet --source ~/Downloads")
    text = f"""folder of {" and ".join(ARCHIVES.values())}, or of Kaggle's {KAGGLE_IMAGES}/, with
        {KAGGLE_CSV} or else {DEVKIT} for the classes of the validation images (required)"""
    imagenet.add_argument("--source", type=Path, metavar="DIR", required=True, help=text)

    text = "a copy of an image folder, its images reduced to a short side of at most N pixels"
    examples = ("data/imagenet data/imagenet256", "DATA SMALL --size 400 --quality 95")
    shrink = add("shrink", _run_shrink, text, *examples, source="the image folder to copy")
    shrink.add_argument("--size", type=positive, default=256, metavar="N", help=SIZE_HELP)
    text = "JPEG quality, 1 to 100 (default: %(default)s)"
    shrink.add_argument("--quality", type=number(int, 1, 100), default=90, metavar="Q", help=text)

    text = "a copy of an image folder, same pixels, of whose JPEG files training decodes less"
    examples = ("data/imagenet data/faster",)
    restart = add("restart", _run_restart, text, *examples, source="the image folder to copy")

    text = "the pixels of an image folder, decoded and reduced, in a few large files"
    examples = ("data/imagenet /nvme/packed", "DATA PACKED --size 400")
    packing = add("pack", _run_pack, text, *examples, source="the image folder to pack")
    packing.add_argument("--size", type=positive, default=256, metavar="N", help=PACK_HELP)

    text = "reads a whole pack, and compares checksums"
    check = add("verify", lambda args: verify(args.out, args.workers), text, "/nvme/packed")
    text = "processes (default: one per usable core, here %(default)s)"
    for one in (shrink, restart, packing, check):
        one.add_argument("--workers", type=positive, default=usable_cores(), metavar="N", help=text)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one sub-command and returns the exit code: 0, 2 after an error, 130 after Ctrl-C."""
    args = build_parser().parse_args(argv)
    try:
        args.run(args)
    except UserError as error:
        return report(error)
    except OSError as error:
        return report(UserError(f"{error.filename or args.out}: {error.strerror or error}"))
    except KeyboardInterrupt:
        text = "interrupted; running the same command again finishes the work"
        print(f"\n{text}" if sys.stderr.isatty() else text, file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    go_on_without_reader()
    sys.exit(main())
