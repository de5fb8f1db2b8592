"""Copies an image folder; its JPEG files get a restart marker behind each row of blocks.

The pixels stay what they are: jpegtran (libjpeg-turbo) writes the same coefficients anew, and what
it wrote is decoded and compared. Training then leaves out of such a file what lies above and below
a crop (utils/data/jpeg_rows.py). Better Huffman tables save more than the markers take. Other
formats, and files that cannot be decoded, are copied as they are.
"""

import shutil
import subprocess
from pathlib import Path

import numpy as np
from prepare.shrink import copy_folder, opened

from utils.data.jpeg_rows import JPEG_MAGIC, has_jpeg_ends
from utils.errors import UserError

COMMAND = ("jpegtran", "-copy", "none", "-optimize", "-restart", "1")


def with_restarts(data: bytes) -> bytes:
    """The same image with a restart marker behind each row of blocks.

    Returns:
        `data` itself for other formats, and where jpegtran warns of damage.

    Raises:
        ValueError: it cannot be decoded; says why.
    """
    with opened(data) as image:
        image.load()
        pixels = np.asarray(image)
    if not data.startswith(JPEG_MAGIC) or not has_jpeg_ends(data):
        return data
    done = subprocess.run(COMMAND, input=data, capture_output=True, check=False)
    if done.returncode:
        return data
    with opened(done.stdout) as image:
        same = np.array_equal(np.asarray(image), pixels)
    return done.stdout if same else data


def restart_folder(source: Path, out: Path, workers: int) -> None:
    """Writes the copy, with so many processes.

    Raises:
        UserError: there is no jpegtran; and whatever `shrink_folder` raises it for.
    """
    if shutil.which(COMMAND[0]) is None:
        raise UserError("jpegtran is missing: apt-get install libjpeg-turbo-progs")
    copy_folder(source, out, "restart", {}, with_restarts, workers)
