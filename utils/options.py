"""The command line that the scripts share; each script adds the options of its own mode."""

import argparse
import os
import sys

import torch

from utils import samplers
from utils.data import augment, images, mixing, preprocessing
from utils.errors import UserError
from utils.launch import supervise
from utils.model import ema, models, optim, schedules
from utils.option_types import (
    Formatter,
    Parser,
    accuracy,
    amount,
    batch_size,
    count,
    http,
    number,
    positive,
    recipe_names,
    refuse_gone,
    run_name,
    seed,
    share,
    with_recipe,
)
from utils.run import store
from utils.train import evaluation, largest_batch, stopping

# What earlier versions had, and what to use instead. Scripts of other command lines have their own.
GONE = {
    "--comm localsgd": "--comm powersgd sends as little, --accum-steps N sends N times less often",
    "--ema-every": "the average now moves at every step: leave it out",
    "--optimizer lamb": "use adamw or muon",
    "--optimizer lars": "use sgd, nesterov or muon",
}

# Eight wait for a slow disk while one core decodes; thousands would take minutes to start.
MOST_WORKERS = max(64, 8 * supervise.usable_cores())


def build_parser(description: str | None, batch: str) -> argparse.ArgumentParser:
    """The shared options. ``batch`` is the help text of ``--batch-size`` in this mode."""
    parser = Parser(description=description, formatter_class=Formatter, allow_abbrev=False)
    _add_data_options(parser, batch)
    _add_model_options(parser)
    _add_training_options(parser)
    largest_batch.add_options(parser)
    preprocessing.add_options(parser)
    _add_recipe_option(parser)
    _add_run_options(parser)
    _add_cloud_options(parser)
    samplers.add_options(parser)
    mixing.add_options(parser)
    ema.add_options(parser)
    evaluation.add_options(parser)
    return parser


def _add_recipe_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument_group("recipe").add_argument(
        "--recipe",
        metavar="NAME|FILE",
        help="take the options of a file, or of one in scripts/recipes: "
        f"{', '.join(recipe_names())}; options on the command line take precedence",
    )


def _add_data_options(parser: argparse.ArgumentParser, batch: str) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "data",
        nargs="?",
        metavar="DATA",
        default=os.environ.get("IMAGENET_DIR", "/data"),
        help="folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG; $IMAGENET_DIR, else /data",
    )
    group.add_argument(
        "--classes",
        metavar="N|FILE|A,B,C",
        help="train on some of the class folders: the first N, those listed in FILE, or a list",
    )
    group.add_argument(
        "--image-size",
        type=positive,
        metavar="PX",
        help="side of the crop, pixels; default: that of the checkpoint to --resume, else what "
        "--pretrained weights want, else 224",
    )
    group.add_argument(
        "--crop-scale",
        type=share,
        default=images.CROP_SCALE,
        metavar="S",
        help="training crops cover at least this share of the image; short trainings and small "
        "images want 0.25 to 0.5",
    )
    group.add_argument(
        "--val-resize-size",
        type=positive,
        metavar="PX",
        help="short side of a validation image before the centre crop; default: image size x "
        "256/224, or as checkpoint and weights want it. Equal to the image size, no border is cut "
        "off",
    )
    group.add_argument(
        "--auto-augment",
        choices=tuple(augment.POLICIES),
        help="RandAugment, TrivialAugment, AutoAugment or AugMix on training crops",
    )
    group.add_argument(
        "--random-erasing",
        type=share,
        default=0.0,
        metavar="P",
        help="probability of a grey box in a training crop",
    )
    group.add_argument(
        "-b",
        "--batch-size",
        "--b",
        type=batch_size,
        default=128,
        metavar="N|auto",
        help=f"{batch}; auto: as many as fit into memory, tried before the training",
    )
    group.add_argument(
        "-j",
        "--workers",
        type=number(int, 0, MOST_WORKERS),
        default=supervise.usable_cores(),
        metavar="N",
        help=f"data loading workers of this node, shared by its processes; at most {MOST_WORKERS} "
        "here: 8 per core, or 64",
    )
    group.add_argument(
        "--max-bad-files",
        type=count,
        default=100,
        metavar="N",
        help="stop when more image files than this cannot be read",
    )
    group.add_argument(
        "--dummy",
        action="store_true",
        help="no data: synthetic batches that live on the device, to time the training step alone",
    )


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "-a",
        "--arch",
        default="resnet18",
        help="any classification model of torchvision, or of timm when it is installed",
    )
    group.add_argument(
        "--channels-last",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="memory layout NHWC, which convolutions prefer",
    )
    models.add_options(group)


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument(
        "--epochs", type=count, default=90, metavar="N", help="total number of epochs"
    )
    group.add_argument("--start-epoch", type=count, metavar="N", help="start from this epoch")
    group.add_argument(
        "--lr",
        "--learning-rate",
        type=amount,
        help="learning rate after warm-up (default: 0.1); 0.001 for adamw and muon",
    )
    group.add_argument(
        "--momentum", type=share, help="of SGD, LARS and Muon (default: 0.9); 0.95 for muon"
    )
    group.add_argument(
        "--wd",
        "--weight-decay",
        dest="weight_decay",
        type=amount,
        help="SGD's and LARS' L2 penalty (default: 0.0001), or decoupled weight decay (0.05)",
    )
    optim.add_options(group)
    group.add_argument(
        "--lr-schedule",
        choices=("step", *schedules.TO_THE_END),
        default="step",
        help="step: x0.1 every 30 epochs and once more at 80; cosine, linear: to 0 at the last "
        "epoch; onecycle: up in 30 %% of the epochs, or in --warmup-epochs, then to 0",
    )
    group.add_argument(
        "--warmup-epochs", type=amount, default=0.0, metavar="N", help="linear warm-up from 0"
    )
    group.add_argument(
        "--lr-scaling",
        choices=("none", "linear", "sqrt"),
        default="none",
        help="scale --lr with the global batch: linear, lr x batch/256; sqrt, lr x (batch/256)^0.5",
    )
    group.add_argument(
        "--label-smoothing", type=share, default=0.0, metavar="E", help="0.1 is common"
    )
    group.add_argument(
        "--accum-steps",
        type=positive,
        default=1,
        metavar="N",
        help="batches accumulated for one step; the global batch grows by this factor",
    )
    group.add_argument(
        "--clip-grad", type=amount, default=0.0, metavar="NORM", help="gradient norm limit; 0: off"
    )
    group.add_argument(
        "--seed", type=seed, default=0, help="seed of weights, order and augmentation"
    )


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument(
        "--name", type=run_name, help="name of the run directory; default: date, host, arch, sizes"
    )
    group.add_argument(
        "--output-dir", default="runs", metavar="DIR", help="parent of run directories"
    )
    group.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        metavar="FILE|URL|auto",
        help="continue from this snapshot, a file or URL; auto (or no value, after DATA): "
        "from the snapshot of --name, here or in --store, if one exists",
    )
    group.add_argument(
        "--snapshot-minutes",
        type=amount,
        default=10.0,
        metavar="MIN",
        help="minutes between snapshots within an epoch; one is also taken after each epoch",
    )
    group.add_argument(
        "-e", "--evaluate", action="store_true", help="evaluate on DATA/val and exit"
    )
    group.add_argument(
        "--desired-acc",
        type=accuracy,
        metavar="A",
        help="stop when this validation top-1 is reached; 0.75 and 75 mean the same",
    )
    group.add_argument(
        "--train-time",
        type=amount,
        metavar="HOURS",
        help="stop after this many hours, with a snapshot",
    )
    group.add_argument(
        "-p",
        "--print-freq",
        type=positive,
        default=10,
        metavar="N",
        help="steps between printed lines",
    )
    group.add_argument(
        "--profile",
        action="store_true",
        help="write a trace of steps 5 to 8 into the run directory (Chrome, Perfetto, TensorBoard)",
    )


def _add_cloud_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("spot instances and object stores")
    group.add_argument(
        "--store",
        metavar="URL|DIR",
        help="copy the best model and the last snapshot to URL/NAME/ in the background; s3://, "
        "gs://, az:// (with s3fs, gcsfs or adlfs installed) or a folder",
    )
    group.add_argument(
        "--spot-notice",
        nargs="?",
        const=stopping.SPOT_SERVICE,
        type=http,
        metavar="URL",
        help="stop with a snapshot when EC2 reclaims a node; URL of the metadata service, if not "
        f"{stopping.SPOT_SERVICE}; without a URL, after DATA",
    )


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line. Raises: `UserError` for options that do not fit together."""
    words = with_recipe(sys.argv[1:])
    refuse_gone(words, GONE)
    args = parser.parse_args(words)
    models.check_name(args.arch)
    models.resolve(args, parser.get_default("data"))
    optim.resolve(args)
    if not args.dummy and not os.path.isdir(args.data):
        raise UserError(
            f"data folder {args.data} is missing: give DATA, or make one with "
            "scripts/prepare_data.py",
            alike=True,
        )
    _resolve_preprocessing(args)
    largest_batch.check(args)
    if args.warmup_epochs and args.warmup_epochs > args.epochs:
        raise UserError(
            f"--warmup-epochs {args.warmup_epochs:g} is longer than --epochs {args.epochs}",
            alike=True,
        )
    store.check_options(args.store, args.resume)
    if args.resume == "auto" and not args.name:
        raise UserError("--resume auto needs --name, the run to continue", alike=True)
    if args.dummy:
        if args.classes and not args.classes.isdecimal():
            raise UserError("--dummy has no folders: give --classes a number", alike=True)
        args.dummy_classes = int(args.classes or 1000)
    if args.profile and (args.dummy or args.evaluate):
        raise UserError("--profile traces training: leave out --dummy and --evaluate", alike=True)
    args.memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
    return args


def _resolve_preprocessing(args: argparse.Namespace) -> None:
    """Set the sizes in ``args.preprocessing``, and the image size. Raises: `UserError`.

    ``args.untyped`` names the sizes that a checkpoint may still change.
    """
    names = ("image_size", "val_resize_size", "val_image_size")
    sizes = {name: getattr(args, name) for name in names}
    args.untyped = tuple(name for name, size in sizes.items() if size is None)
    args.preprocessing = args.preprocessing.resized(**sizes)
    args.image_size = args.preprocessing.image_size
