#!/usr/bin/env python3
"""Make the data sets OUT/train and OUT/val that training reads.

    python scripts/prepare_data.py sample data/sample
    python scripts/prepare_data.py imagenet data/imagenet --source ~/Downloads
    python scripts/prepare_data.py shards data/imagenet /nfs/imagenet

`shards`, `shrink` and `pack` copy a data set: into a few large files, with smaller images, or with
decoded ones. If a preparation is interrupted, run the same command again: it finishes the work.
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

from prepare import parquet, shards, shrink, sources
from prepare.folder import AGAIN, BATCH, fill
from prepare.pack import pack_folder, verify
from prepare.reading import check_apart, open_images, split_of
from prepare.split import split_folder

from utils.errors import UserError, report, tolerate_broken_pipe
from utils.extras import devkit, layouts
from utils.launch import usable_cores
from utils.option_types import number, positive, seed

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
    values = ", ".join(f"{key} {getattr(args, key)}" for key in keys if getattr(args, key))
    what = f"{args.command} ({values})" if values else args.command
    fill(args.out, what, ("train", "val"), open_source, args.workers)


def copy(args: argparse.Namespace) -> None:
    """`shards` and `shrink`: copy a data set into shards, shrink its images, or both at once."""
    source, out = check_apart(args.source, args.out)
    images = open_images(source)
    size = next(iter(images.values())).source.sample_sizes()[0]
    what, change = f"{args.command} (source {source}", None
    if args.command == "shrink":
        what += f", size {args.size}, quality {args.quality}"
        change = partial(shrink.shrink, size=args.size, quality=args.quality)
        size = shrink.expected_bytes(size, args.size)
    filler, chunk = {}, BATCH
    if args.shards:
        filler, chunk = {"filler": shards.fill_shards}, shards.images_per_shard(size, args.shards)
        names = [f"{name} {part.source.fingerprint()}" for name, part in images.items()]
        what += f", {', '.join(names)}, shards of {chunk} images"
        # Labels in shards are numbers, which must mean the same in all splits.
        classes = sorted(set().union(*(part.classes for part in images.values())))
        images = {name: part._replace(classes=classes) for name, part in images.items()}
    splits = {name: split_of(part, name, change, chunk) for name, part in images.items()}
    fill(out, f"{what})", splits, lambda _: splits, args.workers, **filler)


def convert_parquet(args: argparse.Namespace) -> None:
    """`parquet`: copy Hugging Face's files into shards or class folders."""
    source, out = check_apart(args.source, args.out)
    kind = "folders" if args.folders else f"shards of {args.size} MB"
    names = args.names.resolve() if args.names else None
    what = f"parquet (source {source}, names {names}, {kind})"
    filler = {} if args.folders else {"filler": shards.fill_shards}
    splits = parquet.open_parquet(source, names, args.size)
    fill(out, what, splits, lambda _: splits, args.workers, **filler)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str, summary: str, run: Callable[[argparse.Namespace], None] = fill_from
    ) -> Callable[..., Any]:
        command = commands.add_parser(name, help=summary, description=summary)
        command.set_defaults(run=run)
        if name == "split":
            command.add_argument("out", type=Path, metavar="DATA", help="the data set to change")
            return command.add_argument
        if name in ("shards", "shrink", "pack", "parquet"):
            text = "the data set to copy: class folders, tar files, or what `imagenet` reads"
            text = "the folder of the parquet files" if name == "parquet" else text
            command.add_argument("source", type=Path, metavar="DATA", help=text)
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

    text = "ImageNet 2012, or a part of it, from any layout in which it is published"
    option = add("imagenet", text)
    text = f"""folder of image-net.org's tar files, of Kaggle's {layouts.KAGGLE}/ or of its
        imagenet100, or of train/CLASS and a flat val/. {devkit.KAGGLE_CSV} or
        {devkit.DEVKIT} says the classes of validation images that lie flat. Files become hard
        links, or symbolic ones (required)"""
    option("--source", type=Path, metavar="DIR", required=True, help=text)

    text = "a copy of a data set as tar files, which network disks read faster; also for WebDataset"
    option = add("shards", text, copy)
    size = {"type": positive, "metavar": "MB"}
    text = "size of a file (default: %(default)s)"
    option("--size", dest="shards", default=shards.MEGABYTES, help=text, **size)

    text = "a copy of a data set with images reduced to a short side of at most N pixels"
    option = add("shrink", text, copy)
    text = """largest short side in pixels (default: %(default)s, for training crops of 224);
        smaller images and unreadable files are copied unchanged; all others become JPEG files of
        the same name, whatever its suffix"""
    option("--size", type=positive, default=256, metavar="N", help=text)
    text = "JPEG quality, 1 to 100 (default: %(default)s)"
    option("--quality", type=number(int, 1, 100), default=90, metavar="Q", help=text)
    text = "write tar files of this size, as `shards` does (default without MB: %(const)s)"
    option("--shards", nargs="?", const=shards.MEGABYTES, help=text, **size)

    text = "a copy of a data set as decoded and reduced pixels, in a few large files"
    option = add("pack", text, lambda a: pack_folder(a.source, a.out, a.size, a.workers))
    text = """largest short side in pixels (default: %(default)s, for training crops of 224, which
        takes 263 KB an image, 337 GB for ImageNet)"""
    option("--size", type=positive, default=256, metavar="N", help=text)

    text = "shards, or class folders, from the parquet files of Hugging Face's image data sets"
    option = add("parquet", text, convert_parquet)
    option("--size", default=shards.MEGABYTES, help="of a shard (default: %(default)s)", **size)
    option("--folders", action="store_true", help="write class folders, not shards")
    text = """names of the classes, one per line in the order of the labels (default: ImageNet's
        n01440764 and so on from the names of the images, else the names in the files)"""
    option("--names", type=Path, metavar="FILE", help=text)

    text = """move a part of DATA/train to DATA/test, for `--part test`: which images depends on
        their names alone, so that all nodes agree; another fraction moves images there or back"""
    option = add("split", text, lambda args: split_folder(args.out, args.test, args.seed))
    text = "share of the images of each class; 0 moves all back"
    option("--test", type=number(float, 0, 0.9), required=True, metavar="FRACTION", help=text)
    text = "another seed chooses other images (default: %(default)s)"
    option("--seed", type=seed, default=0, metavar="N", help=text)

    text = "read a whole pack and compare checksums"
    add("verify", text, lambda args: verify(args.out, args.workers))
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 2 after an error, 130 after Ctrl-C."""
    args = build_parser().parse_args(argv)
    try:
        args.run(args)
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
