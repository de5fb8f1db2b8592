#!/usr/bin/env python3
"""Make the data sets OUT/train and OUT/val that training reads.

    python scripts/prepare_data.py sample data/sample
    python scripts/prepare_data.py imagenet data/imagenet --source ~/Downloads
    python scripts/prepare_data.py shards data/imagenet /nfs/imagenet

Two commands copy a data set: `shards` into a few large files, and `shrink` with smaller images. If
a command is interrupted, run it again: it finishes the work.
"""

import argparse
import sys
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils.start import launch

launch.prepare()  # before torch is imported, which takes seconds

from prepare import parquet, shards, shrink, sources
from prepare.reading import check_apart, open_images
from prepare.split import split_folder
from prepare.writing import AGAIN, BATCH, SPLITS, fill

from utils.data import devkit, layouts
from utils.start.cores import usable_cores
from utils.start.errors import UserError, report, tolerate_broken_pipe
from utils.start.option_types import Formatter, Parser, number, place, positive, seed


def fill_from_source(args: argparse.Namespace) -> None:
    """Run `sample`, `fashion-mnist`, `cifar10` or `imagenet`."""
    keys = ("classes", "train", "val", "seed") if args.command == "sample" else ("source",)
    if source := getattr(args, "source", None):
        args.source = source.resolve()
    facts = {key: getattr(args, key) for key in keys}
    values = ", ".join(f"{key} {value}" for key, value in facts.items() if value)
    what = f"{args.command} ({values})" if values else args.command
    open_source = getattr(sources, args.command.replace("-", "_"))
    open_splits = partial(open_source, *facts.values())
    fill(args.out, what, ("train", "val"), open_splits, args.workers)


def copy(args: argparse.Namespace) -> None:
    """Run `shards` or `shrink`: copy a data set."""
    source, out = check_apart(args.source, args.out)
    images = open_images(source)
    what, change, write, chunk = f"{args.command} (source {source}", None, None, BATCH
    if args.command == "shrink":
        what += f", size {args.size}, quality {args.quality}"
        change = partial(shrink.shrink, size=args.size, quality=args.quality)
    if args.shards:
        fingerprints = ", ".join(
            f"{name} {part.source.fingerprint()}" for name, part in images.items()
        )
        size = next(iter(images.values())).source.sample_sizes()[0]
        if change:  # estimate: ImageNet's images have 27 KB at 256 pixels
            size = min(size, 27_000 * (args.size / 256) ** 2)
        write, chunk = shards.write_shards, shards.images_per_shard(size, args.shards)
        what += f", {fingerprints}, shards of {chunk} images"
        # Labels in shards are numbers, which must mean the same in all splits.
        classes = sorted(set().union(*(part.classes for part in images.values())))
        images = {name: part._replace(classes=classes) for name, part in images.items()}
    splits = {n: part.split(n, chunk)._replace(change=change) for n, part in images.items()}
    known = {name: part.images for name, part in splits.items()}
    fill(out, f"{what})", SPLITS, lambda _: splits, args.workers, write, known)


def convert_parquet(args: argparse.Namespace) -> None:
    """Run `parquet`: copy Hugging Face's files into shards or class folders."""
    source, out = check_apart(args.source, args.out)
    kind = "folders" if args.folders else f"shards of {args.size} MB"
    names = args.names.resolve() if args.names else None
    splits = parquet.open_parquet(source, names, args.size)
    table = f"{names} ({zlib.crc32(names.read_bytes()):08x})" if names else None
    what = f"parquet (source {source}, names {table}, {kind})"
    write = None if args.folders else shards.write_shards
    fill(out, what, SPLITS, lambda _: splits, args.workers, write)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = Parser(description=__doc__, formatter_class=Formatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable, text: str, **places: str) -> Callable[..., None]:
        """Add a command; ``places``: help texts of its positional arguments."""
        text = " ".join(text.split())
        command = commands.add_parser(name, help=text, description=text, formatter_class=Formatter)
        command.set_defaults(run=run)
        for dest, help_text in places.items():
            metavar = "DATA" if dest == "source" or name == "split" else "OUT"
            command.add_argument(dest, type=place, metavar=metavar, help=help_text)

        def option(flag: str, text: str, default: Any = None, kind: Any = positive, **more) -> None:
            more = {"metavar": "N", "type": kind, "default": default, "help": text} | more
            command.add_argument(flag, **more)

        if name != "split":
            option("--workers", "processes, by default one per usable core", usable_cores())
        return option

    out = "the folder to make"
    data = "the data set to copy: class folders, tar files, or any layout that `imagenet` reads"

    option = add("sample", fill_from_source, "a small data set of drawn textures", out=out)
    option("--classes", f"number of classes, at most {len(sources.TEXTURES)}", 10)
    option("--train", "training images per class", 100)
    option("--val", "validation images per class", 20)
    option("--seed", "random seed of the images", 0, int)

    text = "Fashion-MNIST: 70,000 greyscale images of clothes, 28 x 28 pixels"
    option = add("fashion-mnist", fill_from_source, text, out=out)
    text = "folder of the four idx files, .gz or not; by default "
    text += f"{sources.DEBIAN_FASHION} if it exists, else a download"
    option("--source", text, None, place, metavar="DIR")

    text = "CIFAR-10: 60,000 colour images, 32 x 32 pixels"
    option = add("cifar10", fill_from_source, text, out=out)
    text = f"{sources.CIFAR_ARCHIVE}, or the folder that it is in; by default a download"
    option("--source", text, None, place, metavar="PATH")

    text = "ImageNet 2012, or a part of it, from any layout in which it is published"
    option = add("imagenet", fill_from_source, text, out=out)
    text = f"""folder of image-net.org's tar files, of Kaggle's {layouts.KAGGLE}/ or of its
        imagenet100, or of train/CLASS and a flat val/. A flat val/ needs {devkit.KAGGLE_CSV}
        or {devkit.DEVKIT}, which list the classes. Image files become hard links, or symbolic
        links (required)"""
    option("--source", text, None, place, metavar="DIR", required=True)

    text = "a copy of a data set as tar files, for network disks (few large files) and WebDataset"
    option = add("shards", copy, text, source=data, out=out)
    option("--size", "size of a file", shards.MEGABYTES, metavar="MB", dest="shards")

    text = "a copy of a data set with images reduced to a short side of at most N pixels"
    option = add("shrink", copy, text, source=data, out=out)
    text = """largest short side in pixels; the default is meant for training crops of 224.
        Smaller images and unreadable files are copied unchanged. All others become JPEG files,
        and keep their names and suffixes"""
    option("--size", text, 256)
    option("--quality", "JPEG quality, 1 to 100", 90, number(int, 1, 100), metavar="Q")
    text = "write tar files of this size, as `shards` does; MB defaults to %(const)s"
    option("--shards", text, metavar="MB", nargs="?", const=shards.MEGABYTES)

    text = "shards, or class folders, from the parquet files of Hugging Face's image data sets"
    option = add("parquet", convert_parquet, text, source="the folder of the files", out=out)
    option("--size", "size of a shard", shards.MEGABYTES, metavar="MB")
    text = """names of the classes, one per line in the order of the labels; by default those in
        the images' names, such as ImageNet's n01440764, else the names in the files"""
    option("--names", text, None, place, metavar="FILE")
    text = "write class folders, not shards"
    commands.choices["parquet"].add_argument("--folders", action="store_true", help=text)

    text = """divide your own images into DATA/train, DATA/val and DATA/test. DATA holds CLASS/NAME,
        train/CLASS/NAME, or images and a CSV file (name, class). Images are moved. The choice
        depends only on their names and --seed, so all nodes agree. Other fractions move images
        again"""
    option = add("split", split_folder, text, out="the folder to divide")
    fraction = {"kind": number(float, 0, 0.9), "metavar": "FRACTION"}
    option("--val", "fraction of each class's images to have in DATA/val", **fraction)
    option("--test", "fraction to have in DATA/test, for `--part test`; 0: none", **fraction)
    option(
        "--labels", "table of labels; by default the CSV file in DATA", None, place, metavar="CSV"
    )
    option("--seed", "seed of the choice; by default 0, or that of the last call", None, seed)
    text = "move all images back to where they were"
    commands.choices["split"].add_argument("--undo", action="store_true", help=text)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 2 after an error, 130 after Ctrl-C."""
    args = build_parser().parse_args(argv)
    try:
        args.run(args)
    except UserError as error:
        return report(error)
    except OSError as error:
        text = f"{error.filename or args.out}: {error.strerror or error}"
        return report(UserError(f"{text}; correct that, then {AGAIN}"))
    except KeyboardInterrupt:
        text = f"interrupted; {AGAIN}"
        print(f"\n{text}" if sys.stderr.isatty() else text, file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    tolerate_broken_pipe()
    sys.exit(main())
