"""The command line that the scripts share; each script adds the options of its own mode."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from utils import addons, launch, models, optim, preprocessing, stopping
from utils import option_types as types
from utils.errors import UserError

# On a slow disk, eight workers keep a core busy; thousands would take minutes to start.
CORES = launch.usable_cores()
MOST_WORKERS = max(64, 8 * CORES)
COMPILE = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


class Options(argparse.Namespace):
    """The values of a command line. They never change; derived values are kept elsewhere."""

    def __init__(self, **values: Any):
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"options do not change after parsing: {name}")

    def replaced(self, **values: Any) -> "Options":
        """A copy with other values."""
        return Options(**vars(self) | values)


def build_parser(description: str | None, batch: str) -> types.Parser:
    """The shared options. ``batch`` is the help text of ``--batch-size`` in this mode."""
    usage = "%(prog)s [options] [DATA]"  # a list of all would fill the first screen
    parser = types.Parser(
        usage=usage, description=description, formatter_class=types.Formatter, allow_abbrev=False
    )

    add = parser.add_argument_group("data").add_argument
    text = "folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG; $IMAGENET_DIR if set, else /data"
    default = os.environ.get("IMAGENET_DIR", "/data")
    add("data", nargs="?", default=default, metavar="DATA", help=text)
    text = "train on some of the class folders: the first N, those listed in FILE, or A, B and C"
    add("--classes", metavar="N|FILE|A,B,C", help=text)
    text = "side of the crop in pixels; default: that of the checkpoint or the weights, else 224"
    add("--image-size", type=types.pixels, metavar="PX", help=text)
    text = (
        "short side of a validation image before the centre crop, pixels; default: image size x "
        "256/224, or that of the checkpoint or the weights. Larger values crop more of the borders"
    )
    add("--val-resize-size", type=types.pixels, metavar="PX", help=text)
    add("-b", "--batch-size", "--b", type=types.positive, default=128, metavar="N", help=batch)
    text = "print the largest batch per GPU that fits into its memory, and exit"
    add("--find-batch", action="store_true", help=text)
    text = f"data loading workers per node, shared by its processes; at most {MOST_WORKERS} here"
    workers = types.number(int, 0, MOST_WORKERS)
    add("-j", "--workers", type=workers, default=CORES, metavar="N", help=text)
    text = "stop when more than N image files cannot be read"
    add("--max-bad-files", type=types.count, default=100, metavar="N", help=text)
    text = "time the training step alone, on synthetic batches that stay on the device"
    add("--dummy", action="store_true", help=text)

    add = parser.add_argument_group("augmentation").add_argument
    text = "smallest area of a training crop, as a fraction of the image"
    smallest = preprocessing.CROP_SCALE
    add("--crop-scale", type=types.fraction, default=smallest, metavar="S", help=text)
    text = "apply RandAugment, TrivialAugment, AutoAugment or AugMix to training crops"
    add("--auto-augment", choices=preprocessing.POLICIES, help=text)
    text = "probability of a grey box in a training crop"
    add("--random-erasing", type=types.fraction, default=0.0, metavar="P", help=text)
    text = "blend pairs of images, with mixing weights from Beta(A, A); 0.2 is common"
    add("--mixup", type=types.beta_shape, default=0.0, metavar="A", help=text)
    text = (
        "paste a box of one image into another, with areas from Beta(A, A); 1 is common. With "
        "--mixup, each pair gets one of the two at random"
    )
    add("--cutmix", type=types.beta_shape, default=0.0, metavar="A", help=text)
    text = "N different crops of each image in a global batch; 3 is common for transformers"
    add("--repeated-aug", type=types.number(int, 1, 1000), default=1, metavar="N", help=text)
    text = (
        "side of the training crops in pixels, by epoch. 160:192 is 160 for the first 70 %% of the "
        "epochs, 192 from 85 %% on, and grows in steps of 32 in between (less if a size is not a "
        "multiple). 96,128,160 gives each an equal part of the epochs. Evaluation uses --image-size"
    )
    add("--progressive", type=addons.progressive, metavar="SIZES", help=text)

    add = parser.add_argument_group("model").add_argument
    text = "any classification model of torchvision, or of timm if it is installed"
    add("-a", "--arch", default="resnet18", help=text)
    text = (
        "start from published weights, or from FILE: a checkpoint of this suite, torchvision or "
        "timm, or .safetensors. Images are resized and normalised as the weights expect. The "
        "classifier is new if the classes differ. If you omit FILE, put the option after DATA"
    )
    add("--pretrained", nargs="?", const=True, default=False, metavar="FILE", help=text)
    text = "train only the classifier; also freeze batch-norm statistics"
    add("--freeze", action="store_true", help=text)
    text = "stochastic depth: drop rate of the last block; default: the model's own"
    add("--drop-path", type=types.fraction, metavar="P", help=text)
    text = "zero the last batch norm of each ResNet block, so that blocks begin as the identity"
    add("--zero-init-gamma", action="store_true", help=text)
    text = "recompute activations in backward: less memory, one more forward pass, same result"
    add("--activation-checkpointing", action="store_true", help=text)
    text = "memory layout NHWC, which is faster for convolutions"
    add("--channels-last", action=argparse.BooleanOptionalAction, default=True, help=text)
    text = (
        "also evaluate an exponential moving average of the weights over about 1/(1-DECAY) steps; "
        "best.pt is the better of the two models. 0.9999 suits long runs, 0.998 short ones"
    )
    add("--ema", type=types.ema_decay, metavar="DECAY", help=text)

    add = parser.add_argument_group("training").add_argument
    text = (
        "read options from FILE, or from a recipe in scripts/recipes by its name (fast16); options "
        "on the command line take precedence"
    )
    add("--recipe", metavar="NAME|FILE", help=text)
    text = "global batch sizes for which the learning rate was tuned; warn about others"
    add("--batch-range", type=types.batch_range, metavar="LOW:HIGH", help=text)
    add("--epochs", type=types.epochs, default=90, metavar="N", help="total number of epochs")
    add("--start-epoch", type=types.epochs, metavar="N", help="start from this epoch")
    text = "muon uses Muon for matrices and convolutions inside the model, AdamW for the rest"
    add("--optimizer", choices=optim.NAMES, default="sgd", help=text)
    text = "learning rate after warm-up (default: 0.1); with adamw and muon 0.001"
    add("--lr", "--learning-rate", type=types.non_negative, help=text)
    text = "momentum of sgd and nesterov (default: 0.9); of muon 0.95"
    add("--momentum", type=types.fraction, help=text)
    text = "betas of adamw, and of the AdamW part of muon"
    add("--betas", type=types.betas, default="0.9,0.999", metavar="B1,B2", help=text)
    text = "weight decay (default: 0.0001); decoupled in adamw and muon (default: 0.05)"
    add("--wd", "--weight-decay", dest="weight_decay", type=types.non_negative, help=text)
    text = "weight decay of norms, biases and position embeddings; 0 is common; default: --wd"
    add("--wd-norm", type=types.non_negative, metavar="D", help=text)
    text = (
        "step: x0.1 every 30 epochs and once more at 80; constant: --lr in all epochs; cosine, "
        "linear: falling to 0 at the last epoch; onecycle: rising for 30 %% of the epochs, or for "
        "--warmup-epochs, then falling to 0"
    )
    add("--lr-schedule", choices=optim.SCHEDULES, default="step", help=text)
    text = "epochs of linear warm-up from 0"
    add("--warmup-epochs", type=types.non_negative, default=0.0, metavar="N", help=text)
    text = "scale --lr with the global batch: linear, lr x batch/256; sqrt, lr x (batch/256)^0.5"
    add("--lr-scaling", choices=("none", "linear", "sqrt"), default="none", help=text)
    add("--label-smoothing", type=types.fraction, default=0.0, metavar="E", help="0.1 is common")
    text = "accumulate the gradients of N batches for each step; the global batch grows N times"
    add("--accum-steps", type=types.positive, default=1, metavar="N", help=text)
    text = (
        "compile the training step with torch.compile (not evaluation). reduce-overhead uses CUDA "
        "graphs, for small batches. If you omit the mode, put the option after DATA"
    )
    add("--compile", nargs="?", const="default", choices=COMPILE, help=text)
    text = "clip the gradient norm to this limit; 0: off"
    add("--clip-grad", type=types.non_negative, default=0.0, metavar="NORM", help=text)
    add("--seed", type=types.seed, default=0, help="seed of weights, order and augmentation")

    add = parser.add_argument_group("run").add_argument
    text = "name of the run directory; default: date, host, arch, sizes"
    add("--name", type=types.run_name, help=text)
    add("--output-dir", default="runs", metavar="DIR", help="parent of run directories")
    text = (
        "resume from this snapshot, a file or URL; auto: from the snapshot of --name, here or in "
        "--store, if there is one. If you omit the value, put the option after DATA"
    )
    add("--resume", nargs="?", const="auto", metavar="FILE|URL|auto", help=text)
    text = "minutes between snapshots within an epoch; one is also taken after each epoch"
    add("--snapshot-minutes", type=types.non_negative, default=10.0, metavar="MIN", help=text)
    text = "evaluate the model of --resume or --pretrained on DATA/val and exit"
    add("-e", "--evaluate", action="store_true", help=text)
    text = "with --evaluate, evaluate on DATA/test instead"
    add("--part", choices=("val", "test"), default="val", help=text)
    text = (
        "side of the crop in evaluation, pixels; default: --image-size. Somewhat larger crops often"
        " score better (arXiv:1906.06423)"
    )
    add("--val-image-size", type=types.pixels, metavar="PX", help=text)
    text = "average the logits of each image and its mirror image in evaluation"
    add("--val-flip", action="store_true", help=text)
    text = "best.pt has the highest validation top-1, or the lowest validation loss"
    add("--best-by", choices=("top1", "loss"), default="top1", help=text)
    text = "stop when this validation top-1 is reached; 0.75 and 75 mean the same"
    add("--desired-acc", type=types.accuracy, metavar="A", help=text)
    text = "stop after this many hours, with a snapshot"
    add("--train-time", type=types.non_negative, metavar="HOURS", help=text)
    text = "steps between printed lines"
    add("-p", "--print-freq", type=types.positive, default=10, metavar="N", help=text)
    text = "write a trace of steps 5 to 8 into the run directory (Chrome, Perfetto, TensorBoard)"
    add("--profile", action="store_true", help=text)
    text = (
        "copy the best model and the last snapshot to URL/NAME/ in the background; s3://, gs://, "
        "az:// (with s3fs, gcsfs or adlfs installed) or a folder"
    )
    add("--store", metavar="URL|DIR", help=text)
    text = "also send curves, options and the first batch to Weights & Biases (pip install wandb)"
    add("--tracker", choices=tuple(addons.TRACKERS), help=text)
    url = stopping.SPOT_SERVICE
    text = f"stop with a snapshot when EC2 reclaims a node; URL of its metadata, if not {url}"
    add("--spot-notice", nargs="?", const=url, type=types.http, metavar="URL", help=text)
    return parser


def add_communication(parser: argparse.ArgumentParser) -> None:
    """Add the options of the gradient exchange, for DistributedDataParallel."""
    add = parser.add_argument_group("communication").add_argument
    text = (
        "format in which gradients are exchanged: fp32, fp16, bf16, int8, int4 or powersgd[:RANK] "
        "(RANK 4 if omitted); scripts/bench_network.py measures which is fast on your network"
    )
    add("--comm", type=addons.comm_method, default="fp32", metavar="METHOD", help=text)
    text = "size of the buckets in which gradients are exchanged; default: torch's (1, then 25)"
    add("--bucket-mb", type=types.non_negative, metavar="MIB", help=text)


def parse(parser: types.Parser, words: Sequence[str] | None = None, local: bool = True) -> Options:
    """Parse the command line, or ``words``. Raises: `UserError` for invalid combinations.

    Without ``local`` the options are for other machines: files that they name may be missing here.
    """
    words = sys.argv[1:] if words is None else words
    args = parser.parse_args(addons.expand_recipe(words, parser.option_names) or words)
    if args.data == parser.get_default("data") and _is_folder(args.pretrained):
        args.data, args.pretrained = args.pretrained, True  # the command line was --pretrained DATA
    models.check_name(args.arch)
    optim.set_defaults(args)
    for message in _contradictions(args, local):
        raise UserError(message, on_every_rank=True)
    args.preprocessing = addons.preprocessing_of_weights(args, local) or preprocessing.IMAGENET
    _resolve_sizes(args)
    args.epoch_sizes = addons.epoch_sizes(args)
    addons.check_options(args, local)
    args.memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
    return Options(**vars(args))


def _is_folder(value: Any) -> bool:
    return isinstance(value, str) and os.path.isdir(value)


def _contradictions(args: argparse.Namespace, local: bool) -> Iterator[str]:
    """Error messages for options that contradict each other, or cannot be used here."""
    if _is_folder(args.pretrained):
        yield f"--pretrained {args.pretrained} is a folder, not a file"
    if args.pretrained and args.zero_init_gamma:
        yield "--zero-init-gamma is for new weights: not with --pretrained"
    if args.optimizer == "nesterov" and not args.momentum:
        yield "--optimizer nesterov needs a --momentum"
    if getattr(args, "opt_level", None) == "O3" and args.optimizer in ("adamw", "muon"):
        text = "needs float32: --opt-level O2 keeps float32 masters, O3 does not"
        yield f"--optimizer {args.optimizer} {text}"
    if local and not addons.sources(args) and not os.path.isdir(args.data):
        text = "give DATA, or make a sample: python scripts/prepare_data.py sample data/sample"
        if _is_folder(args.resume):
            text = f"--resume read {args.resume} as its FILE; use --resume auto {args.resume}"
        yield f"data folder {args.data} is missing: {text}"
    if local and args.find_batch and not torch.cuda.is_available():
        yield "--find-batch measures the memory of GPUs, and there is none"
    if args.warmup_epochs and args.warmup_epochs > args.epochs:
        yield f"--warmup-epochs {args.warmup_epochs:g} is longer than --epochs {args.epochs}"
    if args.evaluate and not (args.resume or args.pretrained):
        text = "add --resume runs/NAME/best.pt, or --name NAME --resume auto, or --pretrained"
        yield f"--evaluate needs a trained model: {text}"
    if args.part != "val" and not args.evaluate:
        yield f"--part {args.part} is for --evaluate: add -e"
    if args.resume == "auto" and not args.name:
        yield "--resume auto needs --name, the run to continue"
    if args.profile and (addons.measures(args) or args.evaluate):
        yield "--profile traces training: leave out --dummy, --find-batch and --evaluate"


def _resolve_sizes(args: argparse.Namespace) -> None:
    """Set the sizes in ``args.preprocessing``, and the image size. Raises: `UserError`.

    ``args.defaulted_sizes`` names the sizes that a checkpoint may still change.
    """
    names = ("image_size", "val_resize_size", "val_image_size")
    sizes = {name: getattr(args, name) for name in names}
    args.defaulted_sizes = tuple(name for name, size in sizes.items() if size is None)
    args.preprocessing = args.preprocessing.resized(**sizes)
    args.given_preprocessing = args.preprocessing
    args.image_size = args.preprocessing.image_size
