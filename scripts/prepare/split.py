"""Set a part of the training images aside for the final test: DATA/test.

Images are renamed from DATA/train/CLASS/NAME to DATA/test/CLASS/NAME. The choice depends only on
their names and the seed, so all nodes agree. An image is always in one of the two folders. After an
interruption the same command continues. With another fraction, it moves images in either direction.
"""

import argparse
import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from prepare.writing import AGAIN, images_by_class
from tqdm import tqdm

from utils import addons
from utils.atomic import remove_leftovers, save_atomically
from utils.errors import UserError

MARKER = ".split.json"


def split_folder(args: argparse.Namespace) -> None:
    """Move the fraction ``--test`` of each class's training images to DATA/test, at least one. It
    takes those with the smallest hashes of ``--seed`` and name. Raises: `UserError`."""
    data, fraction = args.out, args.test
    train, test = data / "train", data / "test"
    if not train.is_dir() or addons.source_kind(train):
        raise UserError(f"{train} has no class folders of images: split before you make shards")
    if test.is_symlink() or (
        test.exists() and not (test / MARKER).exists() and any(test.iterdir())
    ):
        text = f"{test} exists, and this command did not make it"
        raise UserError(f"{text}: remove it if it is a copy, or use it as the test part")

    def rank(path: str) -> bytes:
        return hashlib.sha256(f"{args.seed}/{path}".encode("utf-8", "surrogateescape")).digest()

    for folder in (train, test):
        remove_leftovers(folder, recursive=True)
    in_train, in_test = (
        {name: set(paths) for name, paths in images_by_class(folder)} for folder in (train, test)
    )
    moves, counts = [], [0, 0]
    for name in in_train | in_test:
        here, there = in_train.get(name, set()), in_test.get(name, set())
        if both := here & there:
            raise UserError(f"{min(both)} is in {train} and in {test}: remove one of them")
        count = max(1, round(fraction * len(here | there))) if fraction else 0
        to_test = set(sorted(here | there, key=rank)[:count])
        if len(to_test) == len(here | there):
            text = f"class {name} has only {count} images, so none would be left for training"
            raise UserError(f"--test {fraction}: {text}")
        moves += [(train / path, test / path) for path in sorted(to_test & here)]
        moves += [(test / path, train / path) for path in sorted(there - to_test)]
        counts = [counts[0] + len(here | there) - count, counts[1] + count]
    if not any(counts):
        raise UserError(f"{train} has no images in class folders")
    content = json.dumps({"test": fraction, "seed": args.seed}).encode()
    test.mkdir(exist_ok=True)
    save_atomically(lambda file: file.write(content), test / MARKER)
    for old, new in tqdm(moves, unit=" images", delay=1):
        _move(old, new)
    if not fraction:  # all images are back
        for name in (MARKER, ".index.npz"):
            (test / name).unlink(missing_ok=True)
        for folder, _, _ in os.walk(test, topdown=False):
            with suppress(OSError):  # it holds something else
                os.rmdir(folder)
    hint = "; `--test 0` moves them back" if fraction else ""
    print(f"{data}: train {counts[0]} images, test {counts[1]} images{hint}")


def _move(old: Path, new: Path) -> None:
    """Rename an image. At every moment one of the names exists. Raises: `UserError`."""
    new.parent.mkdir(parents=True, exist_ok=True)
    try:
        if old.is_symlink() and not os.path.isabs(os.readlink(old)):
            # A relative link would lead elsewhere from another folder.
            temporary = new.with_name(f".{os.urandom(8).hex()}.tmp")
            temporary.symlink_to(old.resolve())
            os.replace(temporary, new)
            old.unlink()
        else:
            os.rename(old, new)
    except OSError as error:
        raise UserError(f"cannot move {old} to {new} ({error.strerror}); then {AGAIN}") from error
