"""A folder of JPEG files like ImageNet's, cut out of real photographs."""

import io
import json
import os
import random
import shutil
from pathlib import Path

from PIL import Image

PACKAGES = {  # Debian and Ubuntu package: where its photographs lie
    "lomiri-wallpapers-16.04": "/usr/share/backgrounds/*_by_*.jpg",
    "mate-backgrounds": "/usr/share/backgrounds/mate/nature/*.jpg",
}
VERSION = 2  # of the rules below; another one makes the images anew
CLASSES = 10
SHAPES = ((500, 375), (500, 333), (375, 500), (640, 480), (500, 500), (400, 300))  # width, height
KILOBYTES = (70, 170)  # ImageNet's mean is 110


def find(folder: Path | None = None) -> list[Path]:
    """Photographs in ``folder``, or else those of `PACKAGES` that are installed."""
    if folder is not None:
        return sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))
    return sorted(
        path for pattern in PACKAGES.values() for path in Path("/").glob(pattern.lstrip("/"))
    )


def make(root: Path, photographs: list[Path], images: int, seed: int = 0) -> None:
    """Fill ``root/train/CLASS/`` with ``images`` JPEG files; nothing to do if that was done before.

    Sizes near 500 x 375 pixels and 110 KB; the same files for the same photographs and seed. It is
    made beside its place and renamed when it is whole.
    """
    recipe = {"photographs": [str(p) for p in photographs], "images": images, "seed": seed}
    recipe |= {"version": VERSION}
    stamp = root / "recipe.json"
    if stamp.is_file() and json.loads(stamp.read_text()) == recipe:
        return
    part = root.with_name(f".{root.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    opened = [Image.open(path).convert("RGB") for path in photographs]
    for number in range(images):
        folder = part / "train" / f"class_{number % CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        draw = random.Random(seed << 32 | number)
        (folder / f"{number:05}.JPEG").write_bytes(_cut(draw.choice(opened), draw))
    (part / "recipe.json").write_text(json.dumps(recipe))
    shutil.rmtree(root, ignore_errors=True)
    os.replace(part, root)


def _cut(photograph: Image.Image, draw: random.Random) -> bytes:
    width, height = draw.choice(SHAPES)
    largest = min(photograph.width / width, photograph.height / height)
    zoom = min(largest, draw.uniform(1.0, 1.7))
    w, h = int(width * zoom), int(height * zoom)
    left = draw.randint(0, photograph.width - w)
    top = draw.randint(0, photograph.height - h)
    image = photograph.resize((width, height), Image.BICUBIC, (left, top, left + w, top + h))
    wanted = draw.uniform(*KILOBYTES) * 1000
    for quality in (75, 85, 90, 93, 95, 96, 97, 98):
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality, subsampling="4:2:0")
        if file.tell() >= wanted:
            break
    return file.getvalue()
