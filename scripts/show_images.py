"""Draw the images of a training's first batch as its model sees them, with their classes.

    python scripts/show_images.py --auto-augment ra --mixup 0.2 data/sample
    python scripts/show_images.py --mode ddp -g 8 \\
        --recipe fast16 --original DATA
    python scripts/show_images.py --epochs 0,1,2 --progressive 160:192 DATA
    python scripts/show_images.py --val --image-size 64 data/sample

Takes the options of the training script, and loads images with the training's own code. It draws
the batch of the first step (with several processes, rank 0's), cropped, augmented and mixed. With
--resume, it draws the batch with which the run would continue. The caption of a mixed image has
the share of each class. A second picture, images_classes.png, shows the images of each class.
"""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils.start import launch

launch.prepare()  # before torch is imported, which takes seconds
if __name__ == "__main__":
    launch.print_first_line()

import numpy as np
import torch
from PIL import Image, ImageDraw
from results import class_sizes

from utils import grid, loop, options
from utils.data import wordnet
from utils.data.batches import Batches
from utils.data.images import decode
from utils.data.loaders import Loaders, build_loaders
from utils.data.samplers import Batch
from utils.run import store
from utils.run.console import Console
from utils.run.run_directory import checkpoint_file
from utils.start.atomic import read_checkpoint
from utils.start.errors import UserError, exit_with, printable, writing
from utils.start.option_types import Options, Parser, count, is_url, list_of, place, positive
from utils.start.world import World

BOX = "#ff2020"


class PictureOptions(Options):
    """Those of a training script and of this command."""

    val: bool
    original: bool
    show: int | None
    in_epochs: list[int] | None
    out: Path


def parse(words: list[str]) -> PictureOptions:
    """Parse the options of the picture and of the training. Raises: `UserError`."""
    first = Parser(add_help=False, allow_abbrev=False)
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
    add("--out", type=place, default=Path("images.png"), metavar="FILE", help="the picture")
    text = "draw the same images in several epochs, counted from 0, such as 0,1,2; before mixing"
    add("--in-epochs", type=list_of(count), metavar="LIST", help=text)
    # --epochs N is the length of the training; --epochs 0,1,2 is this command's list.
    for i, word in enumerate(words := list(words)):
        name, _, value = word.partition("=")
        if name == "--epochs" and "," in (value or "".join(words[i + 1 : i + 2])):
            words[i] = word.replace("--epochs", "--in-epochs", 1)
    args = PictureOptions(**vars(options.parse(parser, words)))
    if args.dummy:
        raise UserError("--dummy has no images: leave it out")
    if args.in_epochs and (args.val or args.evaluate):
        raise UserError("--epochs with a list draws training images: leave out --val and -e")
    if late := [epoch for epoch in args.in_epochs or () if epoch >= args.epochs]:
        text = f"epoch {late[0]} is not one of the {args.epochs} epochs, 0 to --epochs - 1"
        raise UserError(text)
    return args


def original(batches: Batches, index: int, epoch: int, side: int) -> tuple[np.ndarray, str]:
    """Draw the whole image of ``index`` in a `Batch`, with the box of its crop.

    Returns: uint8 [h, h, 3], as large as the drawn crop of ``side`` pixels; and the file name.
    """
    dataset, unreadable = batches.dataset, batches.bad.seen
    source, image = dataset.source, index
    while image in unreadable and dataset.train:  # training has used the next image instead
        image = (image + 1) % len(source)
    if image in unreadable:
        pixels = np.zeros((side, side, 3), np.uint8)
    else:
        pixels = decode(source.read(image)).permute(1, 2, 0).numpy()
    crop = dataset.crop(pixels.shape[:2], dataset.key(index, epoch), side)
    # The corners of the window, which is cut out of the resized box, in pixels of the image.
    y, x = crop.box[2] / crop.size[0], crop.box[3] / crop.size[1]
    top, left = crop.box[0] + crop.window[0] * y, crop.box[1] + crop.window[1] * x
    corners = left, top, left + crop.window[3] * x, top + crop.window[2] * y
    canvas = Image.new("RGB", [grid.magnified(side, side)] * 2, grid.PAPER)
    zoom = canvas.width / max(pixels.shape)
    size = [max(1, round(zoom * n)) for n in pixels.shape[1::-1]]
    canvas.paste(Image.fromarray(pixels).resize(size))
    ImageDraw.Draw(canvas).rectangle([zoom * n for n in corners], outline=BOX, width=2)
    return np.asarray(canvas), Path(source.path(image)).name


def draw(args: PictureOptions) -> tuple[Image.Image, str, Loaders]:
    """Draw the picture. Returns: it, a line about it, and its data. Raises: `UserError`."""
    processes = 1
    if hasattr(args, "gpus"):  # the mode has several processes
        processes = (args.gpus or max(1, torch.cuda.device_count())) * (args.nodes or 1)

    class Rank0(World):
        """Rank 0 of a job with several processes; the others do not run."""

        @property
        def data_parallel_size(self) -> int:
            return processes

    world = Rank0(torch.device("cpu"))
    Console(None, world)  # shows warnings, such as unreadable images
    if is_url(args.resume):
        args = args.replaced(resume=str(store.fetch(args.resume, None)))
    args = loop.with_checkpoint_sizes(args, world).replaced(workers=0)
    loaders, epoch, step = build_loaders(args, world, torch.float32), args.start_epoch or 0, 0
    train, path = loaders.train, checkpoint_file(args)
    if args.val or args.evaluate or train is None:
        batches, epoch, what = (
            evaluated(loaders, args.part),
            0,
            f"of DATA/{args.part}, as evaluated",
        )
        images, targets = next(iter(batches))
    else:
        batches = train
        saved = read_checkpoint(path, lazily=True).get("progress") if path else None
        if saved and args.start_epoch is None:
            epoch = saved["epoch"]
            step = saved["step"] * saved["global_batch"] // train.sampler.global_batch
            if step == train.sampler.steps_per_epoch:  # it was stopped in the evaluation
                epoch, step = epoch + 1, 0
        images, targets = next(train.rest(epoch, step))[:2]
        train.sampler.start_at(epoch, step)
        what = f"of epoch {epoch}, step {step}"
    classes = wordnet.words(loaders.classes, Path(args.data))
    each = (1 + args.original) * len(args.in_epochs or [epoch])  # tiles per image
    number = min(len(images), args.show or max(4, grid.MOST // each))
    line = f"{number} of the {len(images)} images {what}"
    if not (args.original or args.in_epochs):
        return grid.of_batch(batches, images, targets, number, classes), line, loaders
    crops, names = grid.pixels(images[:number], batches), grid.captions(targets, classes)
    tiles: list[tuple[np.ndarray, str]] = []
    for row, index in enumerate(next(iter(batches.sampler)).indices[:number].tolist()):
        for e in args.in_epochs or [epoch]:
            crop, name = crops[row], names[row]
            if args.in_epochs and train:
                train.sampler.start_at(e, 0)
                task = Batch(e, np.array([index]), train.sampler.size)
                made, target, reading = batches.dataset.__getitems__(task)
                batches.bad.note(reading.unreadable)
                crop = made[0].numpy()
                name = f"epoch {e}: {grid.captions(target, classes)[0]}"
            tiles += [original(batches, index, e, len(crop))] if args.original else []
            tiles.append((crop, name))
    pictures, texts = zip(*tiles, strict=True)
    return grid.sheet(pictures, texts, each * max(1, 8 // each)), line, loaders


def evaluated(loaders: Loaders, part: str) -> Batches:
    """The batches of DATA/``part`` as evaluation makes them. Raises: `UserError`."""
    if batches := {"val": loaders.val, "test": loaders.test}.get(part):
        return batches
    raise UserError(f"DATA/{part} is missing, or no part that is evaluated")


def draw_class_sizes(loaders: Loaders, data: Path, file: Path) -> str:
    """Draw the images per class of all parts that are loaded. Returns: a line about them."""
    loaded = {"train": loaders.train, "val": loaders.val, "test": loaders.test}
    targets = {part: one.dataset.source.targets for part, one in loaded.items() if one is not None}
    return class_sizes.draw(wordnet.words(loaders.classes, data), targets, file)


def main() -> int:
    args = parse(sys.argv[1:])
    picture, line, loaders = draw(args)
    try:
        sizes = args.out.with_stem(f"{args.out.stem}_classes")
        with writing(args.out, "--out"):
            picture.save(args.out)
            about_sizes = draw_class_sizes(loaders, Path(args.data), sizes)
    except ValueError:
        raise UserError(f"--out {args.out}: give a file name that ends in .png") from None
    print(f"wrote {args.out}: {line}")
    print(f"wrote {sizes}: {printable(about_sizes)}")
    return 0


if __name__ == "__main__":
    exit_with(main)
