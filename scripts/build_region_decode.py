#!/usr/bin/env python3
"""Build the library that decodes no more of a JPEG file than its crop shows (optional).

    python scripts/build_region_decode.py

Training reads image files faster with it (RESULTS.md, "The input path"), on any node that has it;
the batches are the same on all. It is one small file of C, utils/data/region_decode.c, and needs a
C compiler and libjpeg-turbo's header: on Debian and Ubuntu `apt install gcc libc6-dev libjpeg-dev`,
on Amazon Linux and Fedora `dnf install gcc libjpeg-turbo-devel`. CC=... names another compiler.
Before it is used, its pixels are compared with those of decoding whole images. quickstart.sh and
the other wrappers run this.
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

from utils.data import jpeg  # noqa: E402
from utils.errors import UserError, go_on_without_reader, report  # noqa: E402

FLAGS = ("-std=c99", "-O2", "-shared", "-fPIC")
PACKAGES = "apt install gcc libc6-dev libjpeg-dev, or dnf install gcc libjpeg-turbo-devel"
SAMPLINGS = ("4:4:4", "4:2:2", "4:2:0", "4:1:1", "grey")  # of colour, in the files compared
SIZES = ((173, 131), (16, 90), (64, 9), (320, 240))
BOXES = 20  # of each file


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--if-missing",
        action="store_true",
        help="do nothing where it is built of today's source; where it cannot be, print a note",
    )
    args = parser.parse_args(argv)
    if args.if_missing and jpeg.has_library():
        return 0
    try:
        boxes = build(jpeg.LIBRARY)
    except UserError as error:
        if not args.if_missing:
            return report(error)
        print(f"note: JPEG files are decoded whole, which is slower: {error}")
        return 0
    print(f"built {jpeg.LIBRARY} ({boxes} parts of images compared: the same pixels)")
    return 0


def build(library: Path) -> int:
    """Compile ``library``, and compare its pixels; a file that is there stays until it is good.

    Libraries of other sources are removed. Returns: how many parts of images were compared.
    Raises: `UserError`.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    try:
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build_") as folder:
            made = Path(folder) / library.name
            run([*compiler, *FLAGS, str(jpeg.SOURCE), "-o", str(made), "-ljpeg"])
            number = compare(made)
            for old in library.parent.glob("libregion_decode*.so"):
                old.unlink(missing_ok=True)
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
        what = next((line for line in done.stderr.splitlines() if "error" in line), "no reason")
        raise UserError(
            f"the compiler failed ({what.strip()}); it needs libjpeg-turbo's header: {PACKAGES}"
        )


def compare(library: Path) -> int:
    """How many parts of images were found equal to those of whole ones. Raises: `UserError`."""
    import torch  # takes seconds, which a library that is built already need not wait for

    from utils.data import images as im

    draw, boxes = random.Random(0), 0
    for sampling in SAMPLINGS:
        for size in SIZES:
            data = noise(sampling, size)
            whole = im.decode(data)
            for _ in range(BOXES):
                box = top, left, height, width = im.random_box(draw, *whole.shape[1:])
                found = jpeg.decode_region(data, box, library)
                if found is None:
                    raise UserError("the library does not decode here: is it another libjpeg?")
                pixels = torch.from_numpy(found[0]).permute(2, 0, 1)[:, :, left - found[1] :]
                part = whole[:, top : top + height, left : left + width]
                if not torch.equal(pixels[:, :, :width], part):
                    raise UserError(
                        f"libjpeg's pixels are not torchvision's here (colour {sampling}), so that "
                        "nodes would not train on the same batches: training goes on without it"
                    )
                boxes += 1
    return boxes


def noise(sampling: str, size: tuple[int, int]) -> bytes:
    """A file of noise with colour at the resolution ``sampling``; size: width, height."""
    import numpy as np
    from PIL import Image

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
