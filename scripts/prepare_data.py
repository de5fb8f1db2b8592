#!/usr/bin/env python3
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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils import launch

launch.prepare()  # before torch is imported, which takes seconds

from prepare import sources
from prepare.folder import AGAIN, fill
from prepare.pack import pack_folder, verify
from prepare.shrink import shrink_folder

from utils.errors import UserError, report, tolerate_broken_pipe
from utils.launch import usable_cores
from utils.option_types import number, positive

SOURCES = {
    "fashion-mnist": sources.fashion_mnist,
    "cifar10": sources.cifar10,
    "imagenet": sources.imagenet,
}


def fill_from(args: argparse.Namespace) -> None:
    """Fill OUT with drawn images or those of a published data set."""
    if args.command == "sample":
        keys = ("classes", "train", "val", "seed")
        open_source = partial(sources.sample, *(getattr(args, key) for key in keys))
    else:
        keys = ("source",)
        args.source = args.source and args.source.expanduser().resolve()
        open_source = partial(SOURCES[args.command], args.source)
    found = ", ".join(f"{key} {getattr(args, key)}" for key in keys if getattr(args, key))
    what = f"{args.command} ({found})" if found else args.command
    fill(args.out, what, ("train", "val"), open_source, args.workers)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, summary: str) -> Callable[..., Any]:
        command = commands.add_parser(name, help=summary, description=summary)
        if name in ("shrink", "pack"):
            command.add_argument("source", type=Path, metavar="SRC", help="the folder to copy")
        text = "the pack to read" if name == "verify" else "the folder to make"
        command.add_argument("out", type=Path, metavar="OUT", help=text)
        text, cores = "processes (default: one per usable core, here %(default)s)", usable_cores()
        command.add_argument("--workers", type=positive, default=cores, metavar="N", help=text)
        return command.add_argument

    text = "a small data set of drawn textures"
    option = add("sample", text)
    for flag, default, kind, text in (
        ("--classes", 10, positive, f"number of classes, at most {len(sources.TEXTURES)}"),
        ("--train", 100, positive, "training images per class"),
        ("--val", 20, positive, "validation images per class"),
        ("--seed", 0, int, "random seed of the images"),
    ):
        full = f"{text} (default: %(default)s)"
        option(flag, type=kind, default=default, metavar="N", help=full)

    text = "Fashion-MNIST: 70,000 greyscale images of clothes, 28 x 28 pixels"
    option = add("fashion-mnist", text)
    text = f"the four idx files, .gz or not (default: {sources.DEBIAN_FASHION}, else a download)"
    option("--source", type=Path, metavar="DIR", help=f"folder of {text}")

    archive = sources.CIFAR_ARCHIVE
    text = "CIFAR-10: 60,000 colour images, 32 x 32 pixels"
    option = add("cifar10", text)
    text = f"{archive}, or the folder that it is in (default: a download)"
    option("--source", type=Path, metavar="PATH", help=text)

    text = "ImageNet 2012: 1,281,167 training and 50,000 validation images of 1000 classes"
    option = add("imagenet", text)
    text = f"""folder of {" and ".join(sources.ARCHIVES.values())}, or of Kaggle's
        {sources.KAGGLE_IMAGES}/, with {sources.KAGGLE_CSV}, or else {sources.DEVKIT} (needs scipy),
        for the classes of the validation images (required)"""
    option("--source", type=Path, metavar="DIR", required=True, help=text)

    text = "a copy of an image folder with images reduced to a short side of at most N pixels"
    option = add("shrink", text)
    text = """largest short side in pixels (default: %(default)s, for training crops of 224);
        smaller images and unreadable files are copied unchanged; all others become JPEG files of
        the same name, whatever its suffix"""
    option("--size", type=positive, default=256, metavar="N", help=text)
    text = "JPEG quality, 1 to 100 (default: %(default)s)"
    option("--quality", type=number(int, 1, 100), default=90, metavar="Q", help=text)

    text = "a copy of an image folder as decoded and reduced pixels, in a few large files"
    option = add("pack", text)
    text = """largest short side in pixels (default: %(default)s, for training crops of 224, which
        takes 263 KB an image, 337 GB for ImageNet)"""
    option("--size", type=positive, default=256, metavar="N", help=text)

    add("verify", "read a whole pack and compare checksums")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 2 after an error, 130 after Ctrl-C."""
    args = build_parser().parse_args(argv)
    try:
        if args.command == "shrink":
            shrink_folder(args.source, args.out, args.size, args.quality, args.workers)
        elif args.command == "pack":
            pack_folder(args.source, args.out, args.size, args.workers)
        elif args.command == "verify":
            verify(args.out, args.workers)
        else:
            fill_from(args)
    except UserError as error:
        return report(error)
    except OSError as error:
        reason = error.strerror or error
        return report(UserError(f"{error.filename or args.out}: {reason}; then {AGAIN}"))
    except KeyboardInterrupt:
        text = f"interrupted; {AGAIN}"
        print(f"\n{text}" if sys.stderr.isatty() else text, file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    tolerate_broken_pipe()
    sys.exit(main())
