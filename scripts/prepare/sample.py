"""Draws the images of the sample data set: shapes and textures that a small network can learn.

The class is what is drawn (a circle, stripes, ...); colours, background, clutter, position, size
and rotation are random and say nothing about it. A shape is always lighter than what is behind it,
which lets a network learn the classes from a hundred images of each.

Every random choice of an image depends on (seed, split, class, number) only, never on the images
drawn before it, so an interrupted preparation that is finished later writes the same bytes as an
uninterrupted one.
"""

import io
import math
import random
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from PIL import Image, ImageChops, ImageDraw

Polygon = list[tuple[float, float]]
Colour = tuple[int, int, int]

# Masks are drawn this many times too large and then reduced, for smooth edges.
OVERSAMPLE = 2
GRAIN_SIDE = 1024


def _arc(radius: float, centre: tuple[float, float], start: float, end: float) -> Polygon:
    """60 points of a circle's arc; angles in turns."""
    angles = (math.tau * (start + (end - start) * i / 59) for i in range(60))
    return [(centre[0] + radius * math.cos(a), centre[1] + radius * math.sin(a)) for a in angles]


def _spokes(points: int, inner: float) -> Polygon:
    """A star whose points lie on the unit circle and whose notches lie at radius `inner`."""
    radii = (1.0, inner)
    corners = range(2 * points)
    return [
        (
            radii[i % 2] * math.cos(math.pi * i / points),
            radii[i % 2] * math.sin(math.pi * i / points),
        )
        for i in corners
    ]


def _petals() -> Polygon:
    """The outline r = 0.65 + 0.35 cos(6 t) of a flower."""
    turns = [math.tau * i / 120 for i in range(120)]
    radii = [0.65 + 0.35 * math.cos(6 * t) for t in turns]
    return [(r * math.cos(t), r * math.sin(t)) for r, t in zip(radii, turns, strict=True)]


def _heart() -> Polygon:
    """The common heart curve, scaled into the unit circle."""
    turns = [math.tau * i / 80 for i in range(80)]
    return [
        (
            math.sin(t) ** 3 * 0.95,
            -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 17,
        )
        for t in turns
    ]


def _plus(arm: float) -> Polygon:
    """A plus sign whose arms are 2 * arm wide."""
    a, b = arm, 0.95
    return [(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a)] + [
        (a, b), (-a, b), (-a, a), (-b, a), (-b, -a), (-a, -a)
    ]  # fmt: skip


_CIRCLE = _arc(0.9, (0, 0), 0, 1)

# Each shape is a list of polygons within the unit circle: the first is filled, the others are
# holes in it.
SHAPES: dict[str, list[Polygon]] = {
    "circle": [_CIRCLE],
    "star": [_spokes(5, 0.4)],
    "triangle": [[(math.cos(math.tau * i / 3), math.sin(math.tau * i / 3)) for i in range(3)]],
    "cross": [_plus(0.27)],
    "ring": [_CIRCLE, _arc(0.5, (0, 0), 0, 1)],
    "crescent": [_CIRCLE, _arc(0.75, (0.45, 0), 0, 1)],
    "heart": [_heart()],
    "arrow": [
        [(1, 0), (0.1, 0.7), (0.1, 0.25), (-1, 0.25), (-1, -0.25), (0.1, -0.25), (0.1, -0.7)]
    ],
    "square": [[(-0.7, -0.7), (0.7, -0.7), (0.7, 0.7), (-0.7, 0.7)]],
    "flower": [_petals()],
}


def _below(values: np.ndarray, share: float) -> np.ndarray:
    """True where the fractional part of `values` is below `share`: bars with period 1."""
    return values - np.floor(values) < share


def _dots(u: np.ndarray, v: np.ndarray, share: float) -> np.ndarray:
    radius = 0.2 + 0.3 * share
    return (u - np.floor(u) - 0.5) ** 2 + (v - np.floor(v) - 0.5) ** 2 < radius**2


def _fold(v: np.ndarray) -> np.ndarray:
    """A triangle wave between 0 and 0.5 with period 1."""
    return np.abs(v - np.floor(v) - 0.5)


def _turns(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The angle of each point around the origin, in turns."""
    return np.arctan2(v, u) / np.float32(math.tau)


# Each texture says where its first colour is, for coordinates measured in periods from a centre
# near the middle of the image, and for the share of the first colour (0.35 to 0.65).
TEXTURES: dict[str, Callable[[np.ndarray, np.ndarray, float], np.ndarray]] = {
    "stripes": lambda u, v, share: _below(u, share),
    "checker": lambda u, v, share: (np.floor(u) + np.floor(v)) % 2 < 1,
    "dots": _dots,
    "waves": lambda u, v, share: _below(u + 0.45 * np.sin(v * 2.2), share),
    "target": lambda u, v, share: _below(np.sqrt(u * u + v * v), share),
    "bricks": lambda u, v, share: (
        ~_below(v, 0.05 + 0.25 * share) & ~_below(u / 2 + np.floor(v) / 2, 0.02 + 0.12 * share)
    ),
    "zigzag": lambda u, v, share: _below(u + 2.4 * _fold(v / 2), share),
    "grid": lambda u, v, share: _below(u, 0.4 * share) | _below(v, 0.4 * share),
    "rays": lambda u, v, share: _below(_turns(u, v) * 14, share),
    "spiral": lambda u, v, share: _below(np.sqrt(u * u + v * v) + _turns(u, v), share),
}

# Shapes and textures take turns, so that any number of classes holds both kinds.
CLASS_NAMES: tuple[str, ...] = tuple(
    name for pair in zip(SHAPES, TEXTURES, strict=True) for name in pair
)


@lru_cache(maxsize=1)
def _grain() -> Image.Image:
    """A greyscale image of noise around 128 that every drawn image takes a piece of."""
    # RandomState, as numpy promises that its numbers never change from one release to the next.
    noise = np.random.RandomState(2012).standard_normal((GRAIN_SIDE, GRAIN_SIDE))
    return Image.fromarray(np.clip(128 + 7 * noise, 0, 255).astype(np.uint8))


def _colour(rng: random.Random) -> Colour:
    return (rng.randrange(256), rng.randrange(256), rng.randrange(256))


def _dark_and_light(rng: random.Random) -> tuple[Colour, Colour]:
    """Two random colours, the second of them clearly lighter."""
    while True:
        dark, light = _colour(rng), _colour(rng)
        # The usual weights of red, green and blue in brightness.
        if sum(w * (b - a) for w, a, b in zip((299, 587, 114), dark, light, strict=True)) > 70_000:
            return dark, light


def _jitter(rng: random.Random, colour: Colour, amount: int) -> Colour:
    r, g, b = (min(255, max(0, c + rng.randint(-amount, amount))) for c in colour)
    return (r, g, b)


def _patches(
    rng: random.Random, size: tuple[int, int], cells: int, colour: Colour, amount: int
) -> Image.Image:
    """An RGB image of soft patches around `colour`."""
    small = Image.new("RGB", (cells, cells))
    small.putdata([_jitter(rng, colour, amount) for _ in range(cells * cells)])
    return small.resize(size, Image.Resampling.BILINEAR)


def _image_size(rng: random.Random) -> tuple[int, int]:
    """Width and height in pixels, about as varied as ImageNet's: most landscape, near 500 x 400."""
    long_side = rng.choice((500, 500, 500, rng.randint(400, 640)))
    short_side = round(long_side / rng.choice((1.0, 1.25, 4 / 3, 4 / 3, 1.5, 1.5)))
    return (short_side, long_side) if rng.random() < 0.2 else (long_side, short_side)


def _blob(rng: random.Random, radius: float) -> Polygon:
    """An uneven polygon of 6 to 9 corners around the origin."""
    corners = rng.randint(6, 9)
    points = []
    for i in range(corners):
        turn = math.tau * (i + rng.uniform(-0.3, 0.3)) / corners
        length = radius * rng.uniform(0.55, 1.0)
        points.append((length * math.cos(turn), length * math.sin(turn)))
    return points


def _clutter(rng: random.Random, canvas: Image.Image, ground: Colour) -> None:
    """Draws blobs and lines, which belong to no class, in colours near the background's."""
    draw = ImageDraw.Draw(canvas)
    width, height = canvas.size
    for _ in range(rng.randint(0, 5)):
        x, y = rng.uniform(0, width), rng.uniform(0, height)
        blob = _blob(rng, rng.uniform(0.03, 0.12) * min(width, height))
        draw.polygon([(x + dx, y + dy) for dx, dy in blob], fill=_jitter(rng, ground, 70))
    for _ in range(rng.randint(0, 3)):
        ends = [(rng.uniform(0, width), rng.uniform(0, height)) for _ in range(2)]
        draw.line(ends, fill=_jitter(rng, ground, 70), width=rng.randint(1, 5))


def _draw_shape(
    rng: random.Random, canvas: Image.Image, polygons: list[Polygon], fill: Colour
) -> None:
    """Pastes one to three copies of a shape, the first one large, each turned and stretched."""
    width, height = canvas.size
    for copy in range(rng.choice((1, 1, 2, 3))):
        share = rng.uniform(0.3, 0.5) if copy == 0 else rng.uniform(0.12, 0.25)
        radius = share * min(width, height)
        side = math.ceil(2 * radius)
        turn, stretch = rng.uniform(0, math.tau), rng.uniform(0.75, 1.0)
        sine, cosine = math.sin(turn), math.cos(turn)
        mask = Image.new("L", (side * OVERSAMPLE, side * OVERSAMPLE))
        draw = ImageDraw.Draw(mask)
        for number, polygon in enumerate(polygons):
            corners = [
                (
                    OVERSAMPLE * radius * (1 + x * cosine - y * stretch * sine),
                    OVERSAMPLE * radius * (1 + x * sine + y * stretch * cosine),
                )
                for x, y in polygon
            ]
            draw.polygon(corners, fill=0 if number else 255)
        # A tenth of the shape may lie outside the image, as objects in photographs do.
        at = (
            round(rng.uniform(-0.1 * side, width - 0.9 * side)),
            round(rng.uniform(-0.1 * side, height - 0.9 * side)),
        )
        canvas.paste(_patches(rng, (side, side), 3, fill, 30), at, mask.reduce(OVERSAMPLE))


def _draw_texture(
    rng: random.Random,
    canvas: Image.Image,
    texture: Callable[[np.ndarray, np.ndarray, float], np.ndarray],
    colours: tuple[Colour, Colour],
) -> None:
    """Covers the image, or a large uneven part of it, with a texture of two colours."""
    width, height = canvas.size
    # Half the size and then enlarged: a quarter of the time, and soft edges.
    small = (width // 2, height // 2)
    period = rng.uniform(0.1, 0.22) * min(small)
    turn, share = rng.uniform(0, math.tau), rng.uniform(0.35, 0.65)
    x = (np.arange(small[0], dtype=np.float32) - rng.uniform(0.3, 0.7) * small[0]) / period
    y = (np.arange(small[1], dtype=np.float32) - rng.uniform(0.3, 0.7) * small[1])[:, None] / period
    sine, cosine = np.float32(math.sin(turn)), np.float32(math.cos(turn))
    first = texture(x * cosine - y * sine, x * sine + y * cosine, share)
    mask = Image.fromarray(first.astype(np.uint8) * 255).resize(
        canvas.size, Image.Resampling.BILINEAR
    )
    pattern = _patches(rng, canvas.size, 3, colours[0], 20)
    pattern.paste(colours[1], (0, 0, width, height), ImageChops.invert(mask))
    if rng.random() < 0.4:
        canvas.paste(pattern)
        return
    region = Image.new("L", canvas.size)
    cx, cy = rng.uniform(0.4, 0.6) * width, rng.uniform(0.4, 0.6) * height
    blob = _blob(rng, rng.uniform(0.9, 1.3))
    corners = [(cx + dx * width / 2, cy + dy * height / 2) for dx, dy in blob]
    ImageDraw.Draw(region).polygon(corners, fill=255)
    canvas.paste(pattern, (0, 0), region)


def draw(seed: int, split: str, class_name: str, number: int) -> bytes:
    """Draws one image of the sample data set.

    Args:
        seed: the seed of the whole data set.
        split: "train" or "val"; the same number gives different images in the two.
        class_name: one of CLASS_NAMES; KeyError for any other.
        number: the image's number within its split and class.

    Returns:
        a JPEG file's bytes: RGB, 400 to 640 pixels on the long side. The same arguments give the
        same bytes with the same release of Pillow.
    """
    # random.Random hashes the text the same way in every process, unlike hash().
    rng = random.Random(f"{seed}/{split}/{class_name}/{number}")
    size = _image_size(rng)
    ground, first = _dark_and_light(rng)
    canvas = _patches(rng, size, rng.randint(2, 9), ground, rng.randint(5, 40))
    _clutter(rng, canvas, ground)
    if class_name in SHAPES:
        _draw_shape(rng, canvas, SHAPES[class_name], first)
    else:
        dark, light = _dark_and_light(rng)
        _draw_texture(rng, canvas, TEXTURES[class_name], (light, dark))
    left, top = rng.randrange(GRAIN_SIDE - size[0]), rng.randrange(GRAIN_SIDE - size[1])
    grain = _grain().crop((left, top, left + size[0], top + size[1]))
    canvas = ImageChops.add(canvas, Image.merge("RGB", (grain,) * 3), 1, -128)
    file = io.BytesIO()
    canvas.save(file, "JPEG", quality=rng.randint(75, 92))
    return file.getvalue()
