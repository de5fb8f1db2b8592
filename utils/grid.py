"""Draw the images of a batch in a grid with their classes. Always on: training adds its first batch
to the event file. scripts/show_images.py draws more.

Interface: `with_first_drawn`, through which `utils.epoch.train` passes the first epoch's batches.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from utils.data import wordnet
from utils.data.batches import Batches, MicroBatch
from utils.session import Session
from utils.start.errors import printable

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
        known: list[int] = targets.tolist()
        return [classes[target] if target >= 0 else "unreadable" for target in known]
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
    import matplotlib  # for its font; the import takes 0.2 s, and one process of a job draws

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


def of_batch(
    batches: Batches, images: Tensor, targets: Tensor, most: int, classes: Sequence[str]
) -> Image.Image:
    """Draw a batch's first images. They are normalised, [n, 3, size, size], and may be mixed.

    ``classes``: names for the captions.
    """
    count = max(1, min(len(images), most))
    tiles = list(pixels(images[:count], batches))
    columns = min(count, round((2 * count) ** 0.5))
    return sheet(tiles, captions(targets[:count], classes), columns)


def with_first_drawn(batches: Iterator[MicroBatch], session: Session) -> Iterator[MicroBatch]:
    """Yield ``batches`` of training; draw the first one into the run's event file."""
    for number, batch in enumerate(batches):
        if number == 0:
            most = min(MOST, MOST_PIXELS // batch.images[0, 0].numel())
            folders = session.train.dataset.source.classes
            classes = wordnet.words(folders, Path(session.args.data))
            image = of_batch(session.train, batch.images, batch.targets, most, classes)
            epoch, step, _ = batch.position
            # One position after the run's start, so that a rerun from there replaces the image.
            x = round(1000 * (epoch + step / session.train.sampler.steps_per_epoch)) + 1
            session.run.image(TAG, image, x)
        yield batch
