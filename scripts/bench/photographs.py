"""A folder of JPEG files like ImageNet's, cut out of real photographs."""

import io
import json
import os
import random
import shutil
import zlib
from pathlib import Path

from PIL import Image

PACKAGES = {  # Debian or Ubuntu package: where its photographs are
    "lomiri-wallpapers-16.04": "usr/share/backgrounds/*_by_*.jpg",
    "mate-backgrounds": "usr/share/backgrounds/mate/nature/*.jpg",
}
VERSION = 3  # of the rules below; another version makes the images again
CLASSES = 10
CANDIDATES = 6
SHAPES = ((500, 375), (500, 333), (375, 500), (640, 480), (500, 500), (400, 300))  # width, height
KILOBYTES = (70, 170)  # ImageNet's mean is 110


def find(folder: Path | None = None) -> list[Path]:
    """Find the photographs in ``folder``; by default, those of the installed `PACKAGES`."""
    if folder is not None:
        return sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))
    return sorted(path for pattern in PACKAGES.values() for path in Path("/").glob(pattern))


def make(cache: Path, photographs: list[Path], images: int, seed: int = 0) -> Path:
    """Make a folder in ``cache`` with ``images`` JPEG files in train/CLASS/, unless it exists.

    Sizes are near 500 x 375 pixels and 110 KB; equal photographs and seeds give equal files. The
    folder is made under another name and renamed when it is complete. Returns: the folder.
    """
    recipe = {"photographs": [str(p) for p in photographs], "images": images, "seed": seed}
    text = json.dumps(recipe | {"version": VERSION})
    root = cache / f"photographs_{zlib.crc32(text.encode()):08x}"
    if root.is_dir():
        return root
    part = cache / f".{root.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    draws = [random.Random(seed << 32 | number) for number in range(images)]
    numbers: dict[Path, list[int]] = {}  # of the images of each photograph
    for number, draw in enumerate(draws):
        numbers.setdefault(draw.choice(photographs), []).append(number)
    for path in numbers:
        photograph = Image.open(path).convert("RGB")  # all together may not fit into memory
        for number in numbers[path]:
            file = part / f"train/class_{number % CLASSES}/{number:05}.JPEG"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(_image(photograph, draws[number]))
    (part / "recipe.json").write_text(text)
    os.replace(part, root)
    return root


def _image(photograph: Image.Image, draw: random.Random) -> bytes:
    shape = draw.choice(SHAPES)
    # Take the most detailed of several crops: wallpapers have more sky and blur than ImageNet.
    crops = [_crop(photograph, shape, draw) for _ in range(CANDIDATES)]
    image = max(crops, key=lambda crop: len(_jpeg(crop, 75)))
    target_bytes, data = draw.uniform(*KILOBYTES) * 1000, b""
    for quality in (75, 85, 90, 93, 95, 96, 97, 98):
        data = _jpeg(image, quality)
        if len(data) >= target_bytes:
            break
    return data


def _crop(photograph: Image.Image, shape: tuple[int, int], draw: random.Random) -> Image.Image:
    largest = min(photograph.width / shape[0], photograph.height / shape[1])
    zoom = min(largest, draw.uniform(1.0, 5.0))
    width, height = int(shape[0] * zoom), int(shape[1] * zoom)
    left = draw.randint(0, photograph.width - width)
    top = draw.randint(0, photograph.height - height)
    return photograph.resize(
        shape, Image.Resampling.BICUBIC, (left, top, left + width, top + height)
    )


def _jpeg(image: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, subsampling="4:2:0")
    return file.getvalue()
