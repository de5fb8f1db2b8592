"""The data sets that come in archives: CIFAR-10 and ImageNet 2012.

Each `open_...` function checks what it can at once and returns a Plan, whose images are read only
on demand, so that those already written cost little. Archives may be damaged or hostile: nothing
but arrays is unpickled, and no path in a tar is ever followed.
"""

import csv
import io
import pickle
import re
import struct
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
from prepare.files import png_bytes, reading
from prepare.folder import Item, Plan

from utils.errors import UserError

CIFAR_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
CIFAR_BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "val": ["test_batch"]}
ARCHIVES = {"train": "ILSVRC2012_img_train.tar", "val": "ILSVRC2012_img_val.tar"}
KAGGLE_CSV, KAGGLE_IMAGES = "LOC_val_solution.csv", "ILSVRC/Data/CLS-LOC"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
WNID = re.compile(r"n\d{8}")
CLASS_TAR = re.compile(r"n\d{8}\.tar")
TRAIN_IMAGE = re.compile(r"n\d{8}_\d+\.JPEG")
VAL_IMAGE = re.compile(r"ILSVRC2012_val_\d{8}\.JPEG")


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles numpy arrays and plain containers, and refuses every other name.

    A pickle can call whatever its names resolve to; here only three harmless ones do.
    """

    def find_class(self, module: str, name: str) -> Any:
        """The function or class for a name in the pickle; raises UnpicklingError for most."""
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            # The published files give the flags as 0 and 1, which numpy warns about.
            return lambda kind, align=False, copy=False: np.dtype(kind, bool(align), bool(copy))
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no array needs")


def _cifar_batch(data: bytes) -> tuple[np.ndarray, list[int]]:
    """Reads a batch of CIFAR-10 from the bytes of its pickle.

    Returns the images (N x 32 x 32 x 3, uint8) and their labels (0 to 9). Raises ValueError,
    UnpicklingError or another error that `reading` translates if it is not such a pickle.
    """
    # latin1, as the files were pickled by Python 2, whose strings were bytes.
    batch = _ArrayUnpickler(io.BytesIO(data), encoding="latin1").load()
    pixels, labels = batch["data"], batch["labels"]
    if (
        not isinstance(pixels, np.ndarray)
        or pixels.dtype != np.uint8
        or pixels.shape[1:] != (3072,)
    ):
        raise ValueError("its images are not rows of 3072 bytes")
    if len(labels) != len(pixels) or not all(type(n) is int and 0 <= n <= 9 for n in labels):
        raise ValueError("its labels are not one number from 0 to 9 for each image")
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels


def open_cifar10(source: Path) -> Plan:
    """Opens CIFAR-10, cifar-10-python.tar.gz or the folder extracted from it.

    `source` may also be the folder that contains either. The images are 32 x 32 RGB PNG files; the
    test images become the split "val". Raises UserError if a batch is missing or damaged, or is a
    pickle of anything but arrays.
    """
    archive, inner = "cifar-10-python.tar.gz", "cifar-10-batches-py"
    names = {name for batches in CIFAR_BATCHES.values() for name in batches}
    for path in (source, source / inner, source / archive):
        if path.is_file() or (path / "data_batch_1").is_file():
            break
    else:
        raise UserError(f"neither {archive} nor the folder {inner} was found at {source}")
    pickles: dict[str, bytes] = {}
    if path.is_dir():
        pickles = {name: (path / name).read_bytes() for name in names if (path / name).is_file()}
    else:
        with reading(path), tarfile.open(path, "r:*") as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                if member.isfile() and name in names:
                    pickles[name] = tar.extractfile(member).read()
    for name in sorted(names - set(pickles)):
        raise UserError(f"{path} lacks {name}")
    batches = {}
    for name, data in pickles.items():
        with reading(f"{name} in {path}"):
            batches[name] = _cifar_batch(data)

    def items() -> Iterator[Item]:
        for split, split_batches in CIFAR_BATCHES.items():
            number = 0
            for name in split_batches:
                for image, label in zip(*batches[name], strict=True):
                    make = partial(png_bytes, np.ascontiguousarray(image))
                    yield Item(split, CIFAR_CLASSES[label], f"{number:05d}.png", make)
                    number += 1

    return Plan(items(), ("train", "val"), {"train": 50_000, "val": 10_000}, [f"reading {path}"])


def _mat_elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Type and content of each data element in a piece of a MAT version 5 file."""
    at = 0
    while at < len(data):
        kind, size = struct.unpack_from("<II", data, at)
        start = at + 8
        if kind > 0xFFFF:  # the short form: size, type and content within 8 bytes
            kind, size, start = kind & 0xFFFF, kind >> 16, at + 4
        body = data[start : start + size]
        if len(body) < size:
            raise EOFError("it is cut short")
        # Only compressed elements are not padded to a multiple of 8 bytes.
        at = start + size + (0 if kind == 15 else -(start + size - at) % 8)
        if kind == 15:
            yield from _mat_elements(zlib.decompress(body))
        else:
            yield kind, body


def _mat_number(matrix: bytes) -> int:
    """The first number of a numeric array, which may be stored in any smaller type that fits."""
    kind, data = list(_mat_elements(matrix))[3]
    types = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8"}
    return int(np.frombuffer(data, types[kind])[0])


def _mat_text(matrix: bytes) -> str:
    """The text of a character array, which is stored as UTF-16 or UTF-8."""
    kind, data = list(_mat_elements(matrix))[3]
    return data.decode("utf-16-le" if kind in (4, 17) else "utf-8")


def _synset_wnids(mat: bytes) -> dict[int, str]:
    """Reads WordNet id by ILSVRC2012 id from the bytes of the development kit's meta.mat.

    This is a MAT version 5 file with a struct array `synsets`, of which only the fields
    ILSVRC2012_ID and WNID are read. Raises ValueError, struct.error, zlib.error or another error
    that `reading` translates if it is not.
    """
    if mat[124:128] != b"\x00\x01IM":
        raise ValueError("meta.mat is not a little-endian MAT file of version 5")
    for _, matrix in _mat_elements(mat[128:]):
        # Flags, dimensions, name, length of a field's name, names of the fields, values.
        _, _, (_, name), *rest = _mat_elements(matrix)
        if name != b"synsets":
            continue
        (_, length), (_, text), *values = rest
        width = struct.unpack("<i", length)[0]
        names = [text[i : i + width].rstrip(b"\0") for i in range(0, len(text), width)]
        number, wnid = names.index(b"ILSVRC2012_ID"), names.index(b"WNID")
        return {
            _mat_number(values[i + number][1]): _mat_text(values[i + wnid][1])
            for i in range(0, len(values), len(names))
        }
    raise ValueError("meta.mat has no synsets")


def _read_all(file: BinaryIO, what: object) -> bytes:
    """Reads the rest of a file, such as one of _tar_members; UserError if it is damaged."""
    with reading(what):
        return file.read()


def _tar_members(
    file: BinaryIO, what: object, pattern: re.Pattern[str]
) -> Iterator[tuple[str, BinaryIO]]:
    """Base name and open file of each file in an uncompressed tar.

    Nothing of a member's name but its last part is ever used.

    Args:
        file: the tar.
        what: its name for error messages.
        pattern: what the whole base name of every member must match.

    Raises:
        UserError: the tar is damaged or cut short, or has a member with any other name, with a
            path that leads out of the current folder, without content, or that is no regular file.
    """
    with reading(what), tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if member.isdir():
                continue
            if (
                not member.isfile()
                or member.size == 0
                or path.is_absolute()
                or ".." in path.parts
                or not pattern.fullmatch(path.name)
            ):
                raise UserError(f"{what} holds {member.name!r}, which does not belong there")
            yield path.name, tar.extractfile(member)
        # tarfile takes a damaged header for the end; the real end is a block of zeros.
        file.seek(tar.offset)
        if file.read(512) != bytes(512):
            raise UserError(f"{what} is damaged or cut short at byte {tar.offset}")


def _val_labels(source: Path) -> tuple[dict[str, str], str]:
    """WordNet id by file name of the validation images, and the name of the file it is from."""
    if (source / KAGGLE_CSV).is_file():
        with reading(source / KAGGLE_CSV), (source / KAGGLE_CSV).open(newline="") as file:
            rows = [(row["ImageId"], row["PredictionString"]) for row in csv.DictReader(file)]
            labels = {f"{image}.JPEG": boxes.split()[0] for image, boxes in rows}
        origin = KAGGLE_CSV
    elif (source / DEVKIT).is_file():
        origin, truth, meta = DEVKIT, "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
        with reading(source / DEVKIT), tarfile.open(source / DEVKIT, "r:*") as tar:
            files = {PurePosixPath(m.name).name: m for m in tar if m.isfile()}
            wnids = _synset_wnids(tar.extractfile(files[meta]).read())
            numbers = [int(line) for line in tar.extractfile(files[truth]).read().split()]
            labels = {
                f"ILSVRC2012_val_{i:08d}.JPEG": wnids[n] for i, n in enumerate(numbers, start=1)
            }
    else:
        raise UserError(
            f"the classes of the validation images are not known: neither {KAGGLE_CSV} "
            f"nor {DEVKIT} is in {source}"
        )
    if not labels or not all(WNID.fullmatch(wnid) for wnid in labels.values()):
        raise UserError(f"{source / origin} does not give a WordNet id for each image")
    return labels, origin


def _folder_images(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if not pattern.fullmatch(path.name) or not path.is_file() or path.stat().st_size == 0:
            raise UserError(f"{path} does not belong there")
        yield path.name, path


def _imagenet_train(source: Path) -> Iterator[Item]:
    """The training images in a tar of one tar per class, or in one folder per class."""
    if source.is_dir():
        for folder in sorted(path for path in source.iterdir() if path.is_dir()):
            if not WNID.fullmatch(folder.name):
                raise UserError(f"{folder} is not named like an ImageNet class")
            for name, path in _folder_images(folder, TRAIN_IMAGE):
                yield Item("train", folder.name, name, path)
        return
    with source.open("rb") as file:
        for tar_name, class_tar in _tar_members(file, source, CLASS_TAR):
            label, what = tar_name.removesuffix(".tar"), f"{tar_name} in {source}"
            for name, image in _tar_members(class_tar, what, TRAIN_IMAGE):
                yield Item("train", label, name, partial(_read_all, image, f"{name} in {what}"))


def _imagenet_val(source: Path, labels: dict[str, str]) -> Iterator[Item]:
    """The validation images in a flat tar or folder; empties `labels`, name by name."""
    with nullcontext() if source.is_dir() else source.open("rb") as file:
        tar = file and _tar_members(file, source, VAL_IMAGE)
        for name, image in tar or _folder_images(source, VAL_IMAGE):
            if name not in labels:
                raise UserError(f"{source} holds {name}, whose class is not known")
            content = partial(_read_all, image, source) if tar else image
            yield Item("val", labels.pop(name), name, content)
    if labels:
        raise UserError(f"{source} lacks {len(labels)} of the images, such as {min(labels)}")


def open_imagenet(source: Path, done: tuple[str, ...]) -> Plan:
    """Opens ImageNet 2012: the published archives, or Kaggle's folders, in `source`.

    The splits in `done` are left out. The images are the original files; those in Kaggle's folders
    are hard-linked where the file system allows it. Raises UserError if there is nothing to read or
    the classes of the validation images are not known; reading the plan's items raises it if an
    archive is damaged or holds anything that does not belong there.
    """
    found, notes = {}, []
    for split, archive in ARCHIVES.items():
        places = (source / archive, source / KAGGLE_IMAGES / split)
        place = next((path for path in places if path.exists()), None)
        if place:
            found[split] = place
        elif split not in done:
            notes.append(f"not prepared: {split}, as neither {archive} nor {places[1]} exists")
    if not found and not done:
        raise UserError(
            f"neither {' nor '.join(ARCHIVES.values())} nor the folder {KAGGLE_IMAGES} "
            f"is in {source}"
        )
    streams = []
    splits = tuple(split for split in found if split not in done)
    for split in splits:
        notes.append(f"reading {found[split]}")
        if split == "train":
            streams.append(_imagenet_train(found[split]))
        else:
            labels, origin = _val_labels(source)
            notes.append(f"the classes of the validation images are from {origin}")
            streams.append(_imagenet_val(found[split], labels))
    return Plan(chain(*streams), splits, {"train": 1_281_167, "val": 50_000}, notes)
