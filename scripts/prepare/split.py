"""Set a part of the training images aside for the final test: DATA/test.

Images are renamed from DATA/train/CLASS/NAME to DATA/test/CLASS/NAME. Which ones depends on their
names and the seed alone, so that all nodes agree. An image is always in one of the two folders;
an interrupted command continues, and another fraction moves images there or back.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from prepare.folder import AGAIN, images_by_class
from tqdm import tqdm

from utils import addons
from utils.atomic import remove_leftovers, save_atomically
from utils.errors import UserError

MARKER = ".split.json"


def chosen(names: list[str], fraction: float, seed: int) -> set[str]:
    """The share ``fraction`` of ``names``, rounded, but at least one: those with the smallest
    hashes."""
    count = max(1, round(fraction * len(names))) if fraction else 0

    def rank(name: str) -> bytes:
        return hashlib.sha256(f"{seed}/{name}".encode("utf-8", "surrogateescape")).digest()

    return set(sorted(names, key=rank)[:count])


def split_folder(data: Path, fraction: float, seed: int) -> None:
    """Have ``fraction`` of the training images of each class in DATA/test. Raises: `UserError`."""
    train, test = data / "train", data / "test"
    if not train.is_dir() or addons.source_kind(train):
        raise UserError(f"{train} is no folder of image files: split before you make shards")
    if test.is_symlink() or (
        test.exists() and not (test / MARKER).exists() and any(test.iterdir())
    ):
        text = f"{test} exists, and this command did not make it"
        raise UserError(f"{text}: remove it if it is a copy, or use it as the test part")
    for folder in (train, test):
        remove_leftovers(folder, recursive=True)
    before = {name: set(paths) for name, paths in images_by_class(train)}
    aside = {name: set(paths) for name, paths in images_by_class(test)}
    moves, counts = [], [0, 0]
    for name in before | aside:
        here, there = before.get(name, set()), aside.get(name, set())
        if both := here & there:
            raise UserError(f"{min(both)} is in {train} and in {test}: remove one of them")
        to_test = chosen(sorted(here | there), fraction, seed)
        if len(to_test) == len(here | there):
            text = f"class {name} has {len(to_test)} images, of which none would be left to train"
            raise UserError(f"--test {fraction}: {text}")
        moves += [(train / path, test / path) for path in sorted(to_test & here)]
        moves += [(test / path, train / path) for path in sorted(there - to_test)]
        counts = [counts[0] + len(here | there) - len(to_test), counts[1] + len(to_test)]
    if not any(counts):
        raise UserError(f"{train} has no images in class folders")
    content = json.dumps({"test": fraction, "seed": seed}).encode()
    test.mkdir(exist_ok=True)
    save_atomically(lambda file: file.write(content), test / MARKER)
    for old, new in tqdm(moves, unit=" images", delay=1):
        _move(old, new)
    if not fraction:
        _remove_empty(test)
    print(f"{data}: train {counts[0]} images, test {counts[1]} images; `--test 0` moves them back")


def _move(old: Path, new: Path) -> None:
    """Rename an image; one name always exists. Raises: `UserError` if a link would break."""
    new.parent.mkdir(parents=True, exist_ok=True)
    if old.is_symlink() and not os.path.isabs(os.readlink(old)):
        # Relative to another folder, the link would lead elsewhere.
        temporary = new.with_name(f".{os.urandom(8).hex()}.tmp")
        temporary.symlink_to(old.resolve())
        os.replace(temporary, new)
        old.unlink()
        return
    try:
        os.rename(old, new)
    except OSError as error:
        raise UserError(f"cannot move {old} to {new} ({error.strerror}); then {AGAIN}") from error


def _remove_empty(test: Path) -> None:
    """Remove the folder ``test``, whose images are all back."""
    for name in (MARKER, ".index.npz"):
        (test / name).unlink(missing_ok=True)
    for folder, _, _ in os.walk(test, topdown=False):
        with suppress(OSError):  # it holds something else
            os.rmdir(folder)
