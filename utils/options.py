"""The command line that the scripts share; each script adds the options of its own mode.

Each room has its options beside what reads them: ``utils/data/options.py`` and so on. Nothing here
imports torch at its top, so that ``--help`` and wrong options are answered at once.
"""

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import utils.data.options
import utils.model.options
import utils.run.options
from utils.data import opening, preprocessing, progressive
from utils.run import recipes
from utils.start import errors, launch
from utils.start import option_types as types
from utils.start.errors import UserError
from utils.start.option_types import Options

# The groups of --help-all, in this order; `utils.start.launch` adds those of several processes.
GROUPS = ("data", "model", "training", "augmentation", "evaluation", "run", "speed")
# What most people need, by task: --help prints these alone, if the script has them.
COMMON = {
    "what to train": ("data", "-a", "--pretrained", "-b", "--epochs", "--lr", "--recipe"),
    "the run": ("--name", "--resume", "-e", "--train-time"),
    "speed": ("-j", "--amp", "--opt-level", "--find-batch"),
    "several GPUs and nodes": ("-g", "--nodes", "--node-rank", "--dist-url"),
}


def build_parser(description: str | None, batch: str) -> types.Parser:
    """The shared options. ``batch`` is the help text of ``--batch-size`` in this mode."""
    usage = "%(prog)s [options] [DATA]"  # a list of all would fill the first screen
    parser = types.Parser(
        usage=usage, description=description, formatter_class=types.Formatter, allow_abbrev=False
    )
    parser.common = COMMON
    parser.add_argument("--help-all", action=types.HelpAll, dest=argparse.SUPPRESS)
    for title in GROUPS:
        parser.group(title)
    utils.data.options.add_options(parser)
    utils.model.options.add_options(parser, batch)
    utils.run.options.add_options(parser)
    return parser


def check(parser: types.Parser) -> None:
    """Answer ``--help`` and report a wrong command line, before a script imports torch.

    Of DATA, check that it has the parts that are needed. `parse` reports the rest. Then print what
    is being started: the import takes seconds, or a minute.
    """
    errors.tolerate_broken_pipe()
    try:
        with _reported_to_other_nodes(parser):
            args = _read(parser, sys.argv[1:], local=True)
            if not args.dummy:
                parts = [args.part] if args.evaluate else ["train", "val"]
                opening.check_parts(Path(args.data), parts)
    except UserError as error:
        launch.exit_now(errors.report(error))
    launch.print_first_line()


def parse(parser: types.Parser, words: Sequence[str] | None = None, local: bool = True) -> Options:
    """Parse the command line, or ``words``. Raises: `UserError` for invalid combinations.

    Without ``local`` the options are for other machines: files that they name may be missing here.
    """
    if words is None:
        with _reported_to_other_nodes(parser):
            return parse(parser, sys.argv[1:], local)
    # Not at the top: a script imports this module, and calls `check`, before it imports torch.
    import torch

    from utils.model import models, pretrained_weights

    args = _read(parser, words, local)
    models.check_name(args.arch)
    if local and args.find_batch and not torch.cuda.is_available():
        text = "--find-batch measures the memory of GPUs, and there is none"
        raise UserError(text, on_every_rank=True)
    args.preprocessing = preprocessing.IMAGENET
    if args.pretrained:
        expected = pretrained_weights.expected_preprocessing(Options(**vars(args)), local)
        args.preprocessing = expected or preprocessing.IMAGENET
    _resolve_sizes(args)
    args.epoch_sizes = progressive.sizes(args.progressive, args.epochs)
    if args.store or types.is_url(args.resume):
        from utils.run import store

        store.check_options(args.store, args.resume)
    if args.tracker and local:
        from utils.run import tracker

        tracker.check()
    args.memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
    return Options(**vars(args))


@contextlib.contextmanager
def _reported_to_other_nodes(parser: types.Parser) -> Iterator[None]:
    """An error of this node alone, such as a missing file, also ends the others, which wait."""
    try:
        yield
    except UserError as error:
        if "LOCAL_RANK" in os.environ:
            from utils.start import meeting

            meeting.tell_others(error)
        elif "--nodes" in parser.option_names:
            launch.end_all_nodes(error)
        raise


def _read(parser: types.Parser, words: Sequence[str], local: bool) -> argparse.Namespace:
    """The part of `parse` that needs no torch."""
    args = parser.parse_args(recipes.expand(words, parser.option_names))
    if args.data == parser.get_default("data") and _is_folder(args.pretrained):
        args.data, args.pretrained = args.pretrained, True  # the command line was --pretrained DATA
    utils.model.options.set_defaults(args)
    for message in _contradictions(args, local):
        raise UserError(message, on_every_rank=True)
    return args


def _is_folder(value: Any) -> bool:
    return isinstance(value, str) and os.path.isdir(value)


def _contradictions(args: argparse.Namespace, local: bool) -> Iterator[str]:
    """Error messages for options that contradict each other, or cannot be used here."""
    if _is_folder(args.pretrained):
        yield f"--pretrained {args.pretrained} is a folder, not a file"
    if args.global_batch and args.accum_steps > 1:
        yield "--global-batch sets the accumulation steps itself: leave out --accum-steps"
    if args.optimizer == "nesterov" and not args.momentum:
        yield "--optimizer nesterov needs a --momentum"
    if getattr(args, "opt_level", None) == "O3" and args.optimizer == "adamw":
        text = "needs float32: --opt-level O2 keeps float32 masters, O3 does not"
        yield f"--optimizer {args.optimizer} {text}"
    if local and not args.dummy and os.path.isfile(args.data):
        text = f"{args.data} is a file: DATA is the folder that holds train and val, or their tar"
        yield f"{text} files (extract a zip file first)"
    if local and not args.dummy and not os.path.isdir(args.data):
        sample = errors.command("prepare_data.py", "sample", "data/sample")
        text = f"give DATA, or make a sample: {sample}"
        if _is_folder(args.resume):
            use = shlex.join(["--resume", "auto", args.resume])
            text = f"--resume read {args.resume} as its FILE; use {use}"
        yield f"data folder {args.data} is missing: {text}"
    if args.warmup_epochs and args.warmup_epochs > args.epochs:
        text = f"--warmup-epochs {args.warmup_epochs:g} is longer than --epochs {args.epochs}"
        yield f"{text}: give fewer (a --recipe may set them)"
    if args.start_epoch is not None and args.start_epoch >= args.epochs and not args.evaluate:
        text = f"--start-epoch {args.start_epoch} leaves none of --epochs {args.epochs}"
        yield f"{text}: counted from 0, the last one is {args.epochs - 1}"
    if args.evaluate and not (args.resume or args.pretrained):
        text = "add --resume runs/NAME/best.pt, or --name NAME --resume auto, or --pretrained"
        yield f"--evaluate needs a trained model: {text}"
    if args.part != "val" and not args.evaluate:
        yield f"--part {args.part} is for --evaluate: add -e"
    if args.resume == "auto" and not args.name:
        yield "--resume auto needs --name, the run to continue"
    if args.profile and (args.find_batch or args.evaluate):
        yield "--profile traces training: leave out --find-batch and --evaluate"
    if args.find_batch and args.evaluate:
        yield "--find-batch measures training: leave out --evaluate"


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
