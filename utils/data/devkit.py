"""The classes of ImageNet's 50,000 validation images, which come without class folders.

No option: used if DATA contains ILSVRC2012_img_val.tar, and by `scripts/prepare_data.py
imagenet`. Interface: `val_labels`.
"""

import csv
import struct
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from utils.start.errors import UserError

KAGGLE_CSV = "LOC_val_solution.csv"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
META = "data/meta.mat"
# MATLAB's level 5 format: type numbers of elements, and numpy's names for the numeric types.
# https://www.mathworks.com/help/pdf_doc/matlab/matfile_format.pdf
MATRIX, COMPRESSED = 14, 15
NUMBERS = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8"}
LARGEST = 1 << 28  # limit for meta.mat after decompression, bytes; the real file has a few million


def label_files(folder: Path) -> list[Path]:
    """Return the files in ``folder`` that `val_labels` can read, the preferred one first."""
    return [path for path in (folder / KAGGLE_CSV, folder / DEVKIT) if path.is_file()]


def val_labels(folder: Path) -> dict[str, str]:
    """Return the class (WordNet id) of each validation image, by file name.

    Read from Kaggle's table or from the devkit of image-net.org. Raises: `UserError`.
    """
    if not (files := label_files(folder)):
        text = "the classes of the validation images are not known"
        raise UserError(f"{text}: neither {KAGGLE_CSV} nor {DEVKIT} is in {folder}")
    try:
        if files[0].name == DEVKIT:
            return _of_devkit(files[0])
        with files[0].open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            return {f"{row['ImageId']}.JPEG": row["PredictionString"].split()[0] for row in rows}
    except Exception as error:  # damaged files cause many types of error
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise UserError(f"cannot read {files[0]} ({reason}); get the file again") from error


def _of_devkit(path: Path) -> dict[str, str]:
    content = {}
    with tarfile.open(path) as tar:
        for member in tar:
            for name in (TRUTH, META):
                if member.name.endswith(name) and (file := tar.extractfile(member)):
                    content[name] = file.read()
    if missing := {TRUTH, META} - content.keys():
        raise ValueError(f"{min(missing)} is missing")
    wnids = _synsets(content[META])
    numbers = map(int, content[TRUTH].split())
    return {f"ILSVRC2012_val_{i:08d}.JPEG": wnids[n] for i, n in enumerate(numbers, start=1)}


def _synsets(data: bytes) -> dict[int, str]:
    """Return the WordNet id of each ILSVRC2012_ID, from the array ``synsets`` in meta.mat."""
    for kind, array in _elements(data[128:]):  # skip the header
        if kind != MATRIX:
            continue
        # An array has flags, dimensions, name, width of a field name, field names, rows of values.
        _, _, name, width, names, *values = [content for _, content in _elements(array)]
        if name == b"synsets":
            size = int.from_bytes(width, "little")
            fields = [names[i : i + size].rstrip(b"\0") for i in range(0, len(names), size)]
            columns = [
                values[fields.index(field) :: len(fields)] for field in (b"ILSVRC2012_ID", b"WNID")
            ]
            synsets = {}
            for cells in zip(*columns, strict=True):
                # A cell has flags, dimensions and a name before its value.
                (dtype, number), (_, wnid) = (list(_elements(cell))[3] for cell in cells)
                wnid = wnid.replace(b"\0", b"").decode("ascii")  # one or two bytes per letter
                synsets[int(np.frombuffer(number, NUMBERS[dtype])[0])] = wnid
            return synsets
    raise ValueError(f"{META} has no array synsets")


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield type and content of each element of a level 5 file, or of an array in it."""
    offset = 0
    while offset + 8 <= len(data):
        kind, size = struct.unpack_from("<II", data, offset)
        start = offset + 8
        if kind >> 16:  # a short element stores up to four bytes in place of the size
            kind, size, start = kind & 0xFFFF, kind >> 16, offset + 4
        content = data[start : start + size]
        if kind == COMPRESSED:
            yield from _elements(zlib.decompressobj().decompress(content, LARGEST))
            offset = start + size
            continue
        yield kind, content
        offset = -(-(start + size) // 8) * 8
