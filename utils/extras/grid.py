"""Draw the images of a batch in a grid with their classes. Always on: training adds its first
batch to the event file. scripts/show_images.py draws more.

Interface: `draw_first_batch` replaces `utils.loaders.Batches.mix` for one batch, and passes the
grid to `utils.tensorboard.EventFile.add` and to the functions in `Run.pictures`. Without this file,
TensorBoard shows no images.
"""

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor

from utils.errors import printable
from utils.loaders import Batches
from utils.session import Session

MOST = 32  # maximum number of images in a grid
MOST_PIXELS = 4_000_000  # maximum for all images of a grid; drawing them takes about 0.1 s
LEAST = 96  # minimum width of a tile in pixels; smaller images are magnified to fit a caption
GAP, LINE = 8, 15  # pixels: the gap between tiles, the height of a line of text
PAPER, INK = "#ffffff", "#1a1c1e"
TAG = "Images/train"


def pixels(images: Tensor, batches: Batches) -> np.ndarray:
    """Undo the normalisation of ``batches``: [n, 3, h, w] to uint8 [n, h, w, 3]."""
    scale, shift = (one[:3, None, None].cpu() for one in (batches.scale, batches.shift))
    values = (images.detach().float().cpu() - shift) / scale
    return values.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()


def captions(targets: Tensor, classes: Sequence[str]) -> list[str]:
    """Return each image's class; of mixed images (targets float [n, classes]), a line per class."""
    if not targets.is_floating_point():
        return [classes[target] if target >= 0 else "unreadable" for target in targets.tolist()]
    shares, largest = (x.tolist() for x in targets.cpu().topk(min(2, len(classes)), dim=1))
    return [
        "\n".join(f"{x:.0%} {classes[i]}" for x, i in zip(*pair, strict=True) if x > 0.005)
        for pair in zip(shares, largest, strict=True)
    ]


def magnified(side: int, width: int) -> int:
    """Return the drawn length in pixels of a ``side`` of a tile that is ``width`` pixels wide."""
    return side * -(-LEAST // width)


def sheet(tiles: Sequence[np.ndarray], texts: Sequence[str], columns: int) -> Image.Image:
    """Draw ``tiles`` (uint8 [h, w, 3]) in rows of ``columns`` tiles, with a text below each.

    Tiles narrower than `LEAST` are magnified by a whole number. Texts wider than the widest tile
    are truncated.
    """
    sizes = [[magnified(side, tile.shape[1]) for side in tile.shape[1::-1]] for tile in tiles]
    wide, high = (max(sides) for sides in zip(*sizes, strict=True))
    lines = max(text.count("\n") + 1 for text in texts)
    column, row = wide + GAP, high + LINE * lines + GAP
    page = Image.new("RGB", (columns * column + GAP, -(-len(tiles) // columns) * row + GAP), PAPER)
    pen = ImageDraw.Draw(page)
    font = ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", 11)
    for number, (tile, text) in enumerate(zip(tiles, texts, strict=True)):
        x, y = GAP + number % columns * column, GAP + number // columns * row
        image = Image.fromarray(tile).resize(sizes[number], Image.Resampling.NEAREST)
        page.paste(image, (x, y))
        for i, line in enumerate(text.split("\n")):
            name = printable(line[:wide])
            while font.getlength(name) > wide:
                name = name[:-2] + "…"
            pen.text((x, y + high + i * LINE), name, INK, font)
    return page


def of_batch(batches: Batches, images: Tensor, targets: Tensor, most: int = MOST) -> Image.Image:
    """Draw a batch's first images. They are normalised, [n, 3, size, size], and may be mixed."""
    count = max(1, min(len(images), most))
    tiles = pixels(images[:count], batches)
    columns = min(count, round((2 * count) ** 0.5))
    return sheet(tiles, captions(targets[:count], batches.dataset.source.classes), columns)


def draw_first_batch(session: Session) -> None:
    """Make the next training batch appear in the event file and in ``session.run.pictures``."""
    batches, mix, run = session.train, session.train.mix, session.run

    def draw(images: Tensor, targets: Tensor, place: Any) -> tuple[Tensor, Tensor, Tensor]:
        batches.mix = mix
        mixed = mix(images, targets, place) if mix else (images, targets, targets)
        epoch, step, _ = place
        # One position after the run's start, so that a rerun from there replaces the image.
        x = round(1000 * (epoch + step / batches.sampler.steps_per_epoch)) + 1
        image = of_batch(batches, *mixed[:2], min(MOST, MOST_PIXELS // images[0, 0].numel()))
        buffer = io.BytesIO()
        image.save(buffer, "PNG", compress_level=1)  # ten times as fast as the default
        size = dict(zip(("width", "height"), image.size, strict=True))
        png = Summary.Image(**size, colorspace=3, encoded_image_string=buffer.getvalue())
        run.events.add([Summary(value=[Summary.Value(tag=TAG, image=png)])], x)
        for show in run.pictures:
            show(TAG, image, x)
        return mixed

    batches.mix = draw
