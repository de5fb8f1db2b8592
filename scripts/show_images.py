"""Draw the images of a training's first batch as its model sees them, with their classes.

    python scripts/show_images.py --auto-augment ra --mixup 0.2 data/sample
    python scripts/show_images.py --mode ddp -g 8 --recipe fast16 --original DATA
    python scripts/show_images.py --epochs 0,1,2 --progressive 160:192 DATA
    python scripts/show_images.py --val --image-size 64 data/sample

Takes the options of the training script, and loads images with the training's own code. It draws
the batch of the first step (with several processes, rank 0's), cropped, augmented and mixed. With
--resume, it draws the batch with which the run would continue. The caption of a mixed image has
the share of each class.
"""

import argparse
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils import launch

launch.prepare()  # before torch is imported, which takes seconds

import numpy as np
import torch
from PIL import Image, ImageDraw

from utils import loop, options
from utils.atomic import read_checkpoint
from utils.errors import UserError, exit_with
from utils.extras import grid
from utils.images import decode
from utils.loaders import Batches, build_loaders
from utils.option_types import count, list_of, positive
from utils.run_directory import Console, checkpoint_file
from utils.samplers import Batch
from utils.world import World

BOX = "#ff2020"


def parse(words: list[str]) -> options.Options:
    """Parse the options of the picture and of the training. Raises: `UserError`."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    text = "the training script whose options and batches to use: imagenet_MODE.py"
    mode = {"choices": ("nd", "dp", "ddp", "fsdp", "ddp_apex"), "default": "nd", "help": text}
    first.add_argument("--mode", **mode)
    parser = importlib.import_module(f"imagenet_{first.parse_known_args(words)[0].mode}").parser()
    parser.description = __doc__
    add = parser.add_argument_group("picture").add_argument
    add("--mode", **mode)
    add("--original", action="store_true", help="beside each crop, its image with the crop's box")
    add("--val", action="store_true", help="the first images of DATA/val as evaluation sees them")
    add("--show", type=positive, metavar="N", help="images to draw; default: 32 tiles in all")
    add("--out", type=Path, default=Path("images.png"), metavar="FILE", help="the picture")
    text = "draw the same images in several epochs, counted from 0, such as 0,1,2; before mixing"
    add("--in-epochs", type=list_of(count), metavar="LIST", help=text)
    # --epochs N is the length of the training; --epochs 0,1,2 is this command's list.
    for i, word in enumerate(words := list(words)):
        name, _, value = word.partition("=")
        if name == "--epochs" and "," in (value or "".join(words[i + 1 : i + 2])):
            words[i] = word.replace("--epochs", "--in-epochs", 1)
    args = options.parse(parser, words)
    if args.dummy:
        raise UserError("--dummy has no images: leave it out")
    if late := [epoch for epoch in args.in_epochs or () if epoch >= args.epochs]:
        text = f"epoch {late[0]} is not one of the {args.epochs} epochs, 0 to --epochs - 1"
        raise UserError(text)
    return args


def original(batches: Batches, index: int, epoch: int, side: int) -> tuple[np.ndarray, str]:
    """Draw the whole image of ``index`` in a `Batch`, with the box of its crop.

    Returns: uint8 [h, h, 3], as large as the drawn crop of ``side`` pixels; and the file name.
    """
    dataset, unreadable = batches.dataset, batches.bad.seen
    source, image = dataset.source, index % len(dataset.source)
    while image in unreadable and dataset.train:  # training has used the next image instead
        image = (image + 1) % len(source)
    if (shape := source.shape(image)) is not None:
        pixels = np.array(source.rows(image, 0, shape[0]))
    elif image in unreadable:
        pixels = np.zeros((side, side, 3), np.uint8)
    else:
        pixels = decode(source.read(image)).permute(1, 2, 0).numpy()
    cut = dataset.cut(pixels.shape[:2], dataset.key(index, epoch), side)
    # The corners of the window, which is cut out of the resized box, in pixels of the image.
    y, x = cut.box[2] / cut.size[0], cut.box[3] / cut.size[1]
    top, left = cut.box[0] + cut.window[0] * y, cut.box[1] + cut.window[1] * x
    corners = left, top, left + cut.window[3] * x, top + cut.window[2] * y
    canvas = Image.new("RGB", [grid.magnified(side, side)] * 2, grid.PAPER)
    zoom = canvas.width / max(pixels.shape)
    size = [max(1, round(zoom * n)) for n in pixels.shape[1::-1]]
    canvas.paste(Image.fromarray(pixels).resize(size))
    ImageDraw.Draw(canvas).rectangle([zoom * n for n in corners], outline=BOX, width=2)
    return np.asarray(canvas), Path(source.path(image)).name


def draw(args: options.Options) -> tuple[Image.Image, str]:
    """Draw the picture. Returns: it, and a line about it. Raises: `UserError`."""
    processes = 1
    if hasattr(args, "gpus"):  # the mode has several processes
        processes = (args.gpus or max(1, torch.cuda.device_count())) * (args.world_size or 1)

    class Rank0(World):
        """Rank 0 of a job with several processes; the others do not run."""

        slices = processes

    world = Rank0(torch.device("cpu"))
    Console(None, world)  # shows warnings, such as unreadable images
    args = loop.with_checkpoint_sizes(args, world).replaced(workers=0)
    loaders, epoch, step = build_loaders(args, world, torch.float32), args.start_epoch or 0, 0
    if args.val or args.evaluate:
        batches, epoch, what = getattr(loaders, args.part), 0, f"of DATA/{args.part}, as evaluated"
        images, targets = next(iter(batches))
    else:
        batches, path = loaders.train, checkpoint_file(args)
        saved = read_checkpoint(path, lazily=True).get("progress") if path else None
        if saved and args.start_epoch is None:
            epoch = saved["epoch"]
            step = saved["step"] * saved["global_batch"] // batches.sampler.global_batch
        images, targets = next(batches.rest(epoch, step))[:2]
        batches.sampler.start_at(epoch, step)
        what = f"of epoch {epoch}, step {step}"
    each = (1 + args.original) * len(args.in_epochs or [epoch])  # tiles per image
    number = min(len(images), args.show or max(4, grid.MOST // each))
    line = f"{number} of the {len(images)} images {what}"
    if not (args.original or args.in_epochs):
        return grid.of_batch(batches, images, targets, number), line
    crops, names = grid.pixels(images[:number], batches), grid.captions(targets, loaders.classes)
    tiles = []
    for row, index in enumerate(next(iter(batches.sampler)).indices[:number].tolist()):
        for e in args.in_epochs or [epoch]:
            crop, name = crops[row], names[row]
            if args.in_epochs:
                batches.sampler.start_at(e, 0)
                task = Batch(e, np.array([index]), batches.sampler.size)
                made, target, reading = batches.dataset.__getitems__(task)
                batches.bad.note(reading.unreadable)
                crop = made[0].numpy()
                name = f"epoch {e}: {grid.captions(target, loaders.classes)[0]}"
            tiles += [original(batches, index, e, len(crop))] if args.original else []
            tiles.append((crop, name))
    return grid.sheet(*zip(*tiles, strict=True), each * max(1, 8 // each)), line


def main() -> int:
    args = parse(sys.argv[1:])
    picture, line = draw(args)
    try:
        picture.save(args.out)
    except ValueError:
        raise UserError(f"--out {args.out}: give a file name that ends in .png") from None
    print(f"wrote {args.out}: {line}")
    return 0


if __name__ == "__main__":
    exit_with(main)
