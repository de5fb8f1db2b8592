#!/usr/bin/env python3
"""Build the optional library that decodes only the cropped part of JPEG files.

    python scripts/build_region_decode.py
    CC=clang python scripts/build_region_decode.py

Nodes with this library read image files faster (RESULTS.md, "The input path"). The batches do not
change, so some nodes may have it and others not. quickstart.sh and the other wrappers run this
command.

The library is one small C file, utils/data/region_decode.c. It needs a C compiler and the header
of libjpeg-turbo. Debian and Ubuntu: `apt install gcc libc6-dev libjpeg-dev`. Amazon Linux and
Fedora: `dnf install gcc libjpeg-turbo-devel`. This command installs the library only if it decodes
the same pixels as torchvision, which decodes whole images.
"""

import io
import itertools
import os
import random
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils.start import launch

launch.prepare()  # before torch is imported, which takes seconds

from utils.data import region_decode
from utils.start.errors import UserError, report, tolerate_broken_pipe
from utils.start.option_types import DocstringFormatter, Parser

FLAGS = ("-std=c99", "-O2", "-shared", "-fPIC")
PACKAGES = "apt install gcc libc6-dev libjpeg-dev, or dnf install gcc libjpeg-turbo-devel"
SAMPLINGS = ("4:4:4", "4:2:2", "4:2:0", "4:1:1", "grey")  # chroma subsampling of the test files
SIZES = ((173, 131), (16, 90), (64, 9), (320, 240))
BOXES = 20  # random crops of each test file


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=DocstringFormatter)
    text = "do nothing if the library is up to date; print a note if it cannot be built"
    parser.add_argument("--if-missing", action="store_true", help=text)
    args = parser.parse_args(argv)
    if args.if_missing and region_decode.has_library():
        return 0
    try:
        crops = build(region_decode.LIBRARY)
    except (UserError, OSError) as error:
        if not args.if_missing:
            return report(error)
        print(f"note: JPEG files are decoded whole, which is slower: {error}")
        return 0
    print(f"built {region_decode.LIBRARY} ({crops} crops compared with whole decoding: equal)")
    return 0


def build(library: Path) -> int:
    """Compile ``library`` and compare its pixels before it replaces an existing file.

    Removes libraries built from other versions of the source. Returns: the number of crops
    compared. Raises: `UserError`, OSError.
    """
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build_") as folder:
        new = Path(folder) / library.name
        compile_source(str(region_decode.SOURCE), "-o", str(new), "-ljpeg")
        crops = compare(new)
        for old in library.parent.glob("libregion_decode*.so"):
            old.unlink(missing_ok=True)
        new.replace(library)
    return crops


def compile_source(*words: str) -> None:
    """Run the compiler. Raises: `UserError`."""
    command = [*shlex.split(os.environ.get("CC", "cc")), *FLAGS, *words]
    try:
        pipes = {"capture_output": True, "text": True, "errors": "replace"}
        done = subprocess.run(command, **pipes, check=False)
    except OSError:
        raise UserError(f"there is no C compiler {command[0]}: {PACKAGES}") from None
    if done.returncode:
        what = next((line for line in done.stderr.splitlines() if "error" in line), "no reason")
        raise UserError(
            f"the compiler failed ({what.strip()}); it needs libjpeg-turbo's header: {PACKAGES}"
        )


def compare(library: Path) -> int:
    """Compare crops with those of whole images. Returns: their number. Raises: `UserError`."""
    import numpy as np  # not at the top: these imports take seconds, and --if-missing rarely builds
    import torch
    from PIL import Image

    from utils.data import images

    draw, crops = random.Random(0), 0
    for sampling, (wide, high) in itertools.product(SAMPLINGS, SIZES):
        shape, how = (high, wide, 3), {"subsampling": sampling}
        if sampling == "grey":
            shape, how = (high, wide), {}
        noise, file = np.random.default_rng(0).integers(0, 256, shape, np.uint8), io.BytesIO()
        Image.fromarray(noise).save(file, "JPEG", **how)
        whole = images.decode(file.getvalue())
        for _ in range(BOXES):
            box = top, left, height, width = images.random_box(draw, high, wide)
            decoded = region_decode.decode_region(file.getvalue(), box, library)
            if decoded is None:
                raise UserError("it cannot decode: is the header of another libjpeg version?")
            pixels = torch.from_numpy(decoded[0]).permute(2, 0, 1)[:, :, left - decoded[1] :]
            part = whole[:, top : top + height, left : left + width]
            if not torch.equal(pixels[:, :, :width], part):
                raise UserError(
                    f"libjpeg's pixels differ from torchvision's (colour {sampling}), so it is "
                    "not used: all nodes must train on the same batches"
                )
            crops += 1
    return crops


if __name__ == "__main__":
    tolerate_broken_pipe()
    sys.exit(main())
