#!/usr/bin/env python3
"""Build the library that decodes no more of a JPEG file than its crop shows (optional).

    python scripts/build_region_decode.py

Training reads image files faster with it (RESULTS.md, "The input path"), on any node that has it;
the batches are the same on all. It is one small file of C, utils/data/region_decode.c, and needs a
C compiler and libjpeg-turbo's header: on Debian and Ubuntu `apt install gcc libc6-dev libjpeg-dev`,
on Amazon Linux and Fedora `dnf install gcc libjpeg-turbo-devel`. CC=... names another compiler.
Before it is used, its pixels are compared with those of decoding whole images.
"""

import argparse
import io
import os
import random
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import utils.launch.installed  # noqa: E402, F401 (a missing package becomes one sentence)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

from utils.data import images as im  # noqa: E402
from utils.data import region_decode  # noqa: E402
from utils.errors import UserError, go_on_without_reader, report  # noqa: E402

SOURCE = Path(region_decode.__file__).with_suffix(".c")
FLAGS = ("-std=c99", "-O2", "-shared", "-fPIC")
PACKAGES = "apt install gcc libc6-dev libjpeg-dev, or dnf install gcc libjpeg-turbo-devel"
SAMPLINGS = ("4:4:4", "4:2:2", "4:2:0", "4:1:1", "grey")  # of colour, in the files compared
SIZES = ((173, 131), (16, 90), (64, 9), (320, 240))
BOXES = 20  # of each file


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    try:
        boxes = build(region_decode.LIBRARY)
    except UserError as error:
        return report(error)
    print(f"built {region_decode.LIBRARY} ({boxes} parts of images compared: the same pixels)")
    return 0


def build(library: Path) -> int:
    """Compile ``library``, and compare its pixels; a file that is there stays until it is good.

    Returns: how many parts of images were compared. Raises: `UserError`.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    try:
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build_") as folder:
            made = Path(folder) / library.name
            run([*compiler, *FLAGS, str(SOURCE), "-o", str(made), "-ljpeg"])
            number = compare(made)
            made.replace(library)
    except OSError as fault:
        raise UserError(f"cannot write into {library.parent}: {fault.strerror}") from None
    return number


def run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError:
        raise UserError(f"there is no C compiler {command[0]}: {PACKAGES}") from None
    if done.returncode:
        print(done.stderr, file=sys.stderr, end="")
        what = next((line for line in done.stderr.splitlines() if "error" in line), "see above")
        raise UserError(
            f"the compiler failed ({what.strip()}); it needs libjpeg-turbo's header: {PACKAGES}"
        )


def compare(library: Path) -> int:
    """How many parts of images were found equal to those of whole ones. Raises: `UserError`."""
    draw, boxes = random.Random(0), 0
    for sampling in SAMPLINGS:
        for size in SIZES:
            data = jpeg(sampling, size)
            whole = im.decode(data)
            for _ in range(BOXES):
                box = im.random_box(draw, *whole.shape[1:])
                top, left, height, width = box
                found = region_decode.decode(data, box, library)
                if found is None:
                    raise UserError("the library does not decode here: is it another libjpeg?")
                pixels = found[0][:, :, left - found[1] :][:, :, :width]
                if not torch.equal(pixels, whole[:, top : top + height, left : left + width]):
                    raise UserError(
                        f"libjpeg's pixels are not torchvision's here (colour {sampling}), so that "
                        "nodes would not train on the same batches: training goes on without it"
                    )
                boxes += 1
    return boxes


def jpeg(sampling: str, size: tuple[int, int]) -> bytes:
    """A file of noise with colour at the resolution ``sampling``; size: width, height."""
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    image, file = Image.fromarray(pixels), io.BytesIO()
    if sampling == "grey":
        image.convert("L").save(file, "JPEG")
    else:
        image.save(file, "JPEG", subsampling=sampling)
    return file.getvalue()


if __name__ == "__main__":
    go_on_without_reader()
    sys.exit(main())
