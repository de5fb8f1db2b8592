"""Make the image folders OUT/train/CLASS/ and OUT/val/CLASS/ that training reads.

    python scripts/prepare_data.py sample data/sample
    python scripts/prepare_data.py imagenet data/imagenet --source ~/Downloads

`shrink` copies an image folder with smaller images, `pack` with decoded ones. If a preparation is
interrupted, run the same command again: it finishes the work.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import utils.launch.installed  # noqa: F401 (a missing package becomes an error message)

from prepare import sources
from prepare.folder import fill
from prepare.pack import pack_folder, verify
from prepare.shrink import shrink_folder

from utils.errors import UserError, go_on_without_reader, report
from utils.launch.supervise import usable_cores
from utils.option_types import number, positive

SHRINK_SIZE = """largest short side in pixels (default: %(default)s, for training crops of 224);
    smaller images and unreadable files are copied unchanged; all others become JPEG files of the
    same name, whatever its suffix"""
PACK_SIZE = """largest short side in pixels (default: %(default)s, for training crops of 224, which
    takes 263 KB an image, 337 GB for ImageNet); the command prints the size before it begins"""


def _what(args: argparse.Namespace, *options: str) -> str:
    found = ", ".join(f"{key} {getattr(args, key)}" for key in options if getattr(args, key))
    return f"{args.command} ({found})" if found else args.command


def _sample(args: argparse.Namespace) -> None:
    options = ("classes", "train", "val", "seed")
    drawn = partial(sources.sample, *(getattr(args, key) for key in options))
    fill(args.out, _what(args, *options), ("train", "val"), drawn, args.workers)


def _source(args: argparse.Namespace) -> None:
    source = args.source = args.source and args.source.expanduser().resolve()
    images = {
        "fashion-mnist": partial(sources.fashion_mnist, source),
        "cifar10": partial(sources.cifar10, source),
        "imagenet": partial(sources.imagenet, source),
    }
    what = _what(args, "source")
    fill(args.out, what, ("train", "val"), images[args.command], args.workers)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line; each command sets ``run``, a function of the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable, summary: str, *examples: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=summary,
            description=summary,
            epilog="\n  ".join(("examples:", *(f"{parser.prog} {name} {e}" for e in examples))),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in ("shrink", "pack"):
            command.add_argument(
                "source", type=Path, metavar="SRC", help="the image folder to copy"
            )
        text = "the pack to read" if name == "verify" else "the folder to make"
        command.add_argument("out", type=Path, metavar="OUT", help=text)
        text = "processes (default: one per usable core, here %(default)s)"
        cores = usable_cores()
        command.add_argument("--workers", type=positive, default=cores, metavar="N", help=text)
        command.set_defaults(run=run)
        return command

    text = "a small data set of drawn textures"
    sample = add("sample", _sample, text, "data/sample", "data/big --train 1000")
    for flag, default, what in (
        ("--classes", 10, f"number of classes, at most {len(sources.TEXTURES)}"),
        ("--train", 100, "training images per class"),
        ("--val", 20, "validation images per class"),
    ):
        text = f"{what} (default: %(default)s)"
        sample.add_argument(flag, type=positive, default=default, metavar="N", help=text)
    text = "random seed of the images (default: %(default)s)"
    sample.add_argument("--seed", type=int, default=0, metavar="N", help=text)

    text = "Fashion-MNIST: 70,000 greyscale images of clothes, 28 x 28 pixels"
    fashion = add("fashion-mnist", _source, text, "data/fashion", "data/fashion --source idx/")
    text = (
        "folder of the four idx files, .gz or not "
        f"(default: {sources.DEBIAN_FASHION}, else a download)"
    )
    fashion.add_argument("--source", type=Path, metavar="DIR", help=text)

    text = "CIFAR-10: 60,000 colour images, 32 x 32 pixels"
    cifar = add("cifar10", _source, text, f"data/cifar --source {sources.CIFAR_ARCHIVE}")
    text = f"{sources.CIFAR_ARCHIVE} or the folder extracted from it (default: a download)"
    cifar.add_argument("--source", type=Path, metavar="PATH", help=text)

    text = "ImageNet 2012: 1,281,167 training and 50,000 validation images of 1000 classes"
    imagenet = add("imagenet", _source, text, "data/imagenet --source ~/Downloads")
    text = f"""folder of {" and ".join(sources.ARCHIVES.values())}, or of Kaggle's
        {sources.KAGGLE_IMAGES}/, with {sources.KAGGLE_CSV}, or else {sources.DEVKIT} (needs scipy),
        for the classes of the validation images (required)"""
    imagenet.add_argument("--source", type=Path, metavar="DIR", required=True, help=text)

    text = "a copy of an image folder with images reduced to a short side of at most N pixels"
    examples = ("data/imagenet data/imagenet256", "DATA SMALL --size 400 --quality 95")
    make = lambda a: shrink_folder(a.source, a.out, a.size, a.quality, a.workers)  # noqa: E731
    shrink = add("shrink", make, text, *examples)
    shrink.add_argument("--size", type=positive, default=256, metavar="N", help=SHRINK_SIZE)
    text = "JPEG quality, 1 to 100 (default: %(default)s)"
    shrink.add_argument("--quality", type=number(int, 1, 100), default=90, metavar="Q", help=text)

    text = "a copy of an image folder as decoded and reduced pixels, in a few large files"
    make = lambda a: pack_folder(a.source, a.out, a.size, a.workers)  # noqa: E731
    packing = add("pack", make, text, "data/imagenet /nvme/packed", "DATA PACKED --size 400")
    packing.add_argument("--size", type=positive, default=256, metavar="N", help=PACK_SIZE)

    check = lambda args: verify(args.out, args.workers)  # noqa: E731
    add("verify", check, "read a whole pack and compare checksums", "/nvme/packed")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 2 after an error, 130 after Ctrl-C."""
    args = build_parser().parse_args(argv)
    try:
        args.run(args)
    except UserError as error:
        return report(error)
    except OSError as error:
        return report(UserError(f"{error.filename or args.out}: {error.strerror or error}"))
    except KeyboardInterrupt:
        text = "interrupted; run the same command again to finish the work"
        print(f"\n{text}" if sys.stderr.isatty() else text, file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    go_on_without_reader()
    sys.exit(main())
