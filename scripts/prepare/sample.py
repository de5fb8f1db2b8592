"""Draw the images of the sample data set: ten textures that a small network learns to tell apart.

The class is the texture; colours, size, rotation, place and noise are random and say nothing about
it. Every random choice of an image depends on (seed, split, class, number) alone, so an interrupted
preparation that is finished later has the same bytes as an uninterrupted one.
"""

import io
import math
import random
from collections.abc import Callable

import numpy as np
from PIL import Image


def _below(values: np.ndarray, share: float) -> np.ndarray:
    """True where the fractional part of ``values`` is below ``share``: bars with period 1."""
    return values - np.floor(values) < share


def _turns(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The angle of each point around the origin, in turns."""
    return np.arctan2(v, u) / math.tau


# Where the lighter colour is, for coordinates measured in periods from near the middle.
TEXTURES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "bricks": lambda u, v: ~_below(v, 0.15) & ~_below(u / 2 + np.floor(v) / 2, 0.07),
    "checker": lambda u, v: (np.floor(u) + np.floor(v)) % 2 < 1,
    "dots": lambda u, v: (u % 1 - 0.5) ** 2 + (v % 1 - 0.5) ** 2 < 0.1,
    "grid": lambda u, v: _below(u, 0.2) | _below(v, 0.2),
    "rays": lambda u, v: _below(_turns(u, v) * 14, 0.5),
    "spiral": lambda u, v: _below(np.hypot(u, v) + _turns(u, v), 0.5),
    "stripes": lambda u, v: _below(u, 0.5),
    "target": lambda u, v: _below(np.hypot(u, v), 0.5),
    "waves": lambda u, v: _below(u + 0.45 * np.sin(2.2 * v), 0.5),
    "zigzag": lambda u, v: _below(u + 2.4 * np.abs(v / 2 % 1 - 0.5), 0.5),
}


def _image_size(rng: random.Random) -> tuple[int, int]:
    """Width and height in pixels, about as varied as ImageNet's: most landscape, near 500 x 400."""
    long_side = rng.choice((500, 500, 500, rng.randint(400, 640)))
    short_side = round(long_side / rng.choice((1.0, 1.25, 4 / 3, 4 / 3, 1.5, 1.5)))
    return (short_side, long_side) if rng.random() < 0.2 else (long_side, short_side)


def draw(seed: int, split: str, class_name: str, number: int) -> bytes:
    """Draw one image of the sample data set.

    Args:
        seed: of the whole data set.
        split: "train" or "val"; the same number gives different images in the two.
        class_name: one of `TEXTURES`; KeyError for any other.
        number: of the image within its split and class.

    Returns: a JPEG file's bytes: RGB, 400 to 640 pixels on the long side. The same arguments give
    the same bytes with the same release of Pillow.
    """
    # random.Random hashes the text the same way in every process, unlike hash().
    rng = random.Random(f"{seed}/{split}/{class_name}/{number}")
    width, height = _image_size(rng)
    period, turn = rng.uniform(0.1, 0.22) * min(width, height), rng.uniform(0, math.tau)
    x = (np.arange(width) - rng.uniform(0.3, 0.7) * width) / period
    y = ((np.arange(height) - rng.uniform(0.3, 0.7) * height) / period)[:, None]
    sine, cosine = math.sin(turn), math.cos(turn)
    lighter = TEXTURES[class_name](x * cosine - y * sine, x * sine + y * cosine)
    dark, light = ([rng.uniform(low, low + 120) for _ in range(3)] for low in (10, 125))
    pixels = np.where(lighter[..., None], light, dark)
    # RandomState, as numpy promises that its numbers never change from one release to the next.
    noise = np.random.RandomState(rng.randrange(2**31)).standard_normal((height, width, 1))
    file = io.BytesIO()
    image = Image.fromarray((pixels + 7 * noise).clip(0, 255).astype(np.uint8))
    image.save(file, "JPEG", quality=rng.randint(75, 92))
    return file.getvalue()
