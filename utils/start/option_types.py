"""Shared by all command lines: types of values, one-line errors, the layout of --help."""

import argparse
import difflib
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeGuard, TypeVar

from utils.start.errors import (
    BAD_INPUT,
    UserError,
    is_first_to_report,
    printable,
    tell_torchrun,
)

# How alike a mistyped option and the one that an error proposes must be; 1 is equal.
NEAR = 0.75
LONG_DASHES = "\u2013\u2014"


OptionsT = TypeVar("OptionsT", bound="Options")  # a command's own subclass stays one


class Options:
    """The values of a command line. They never change; derived values are kept elsewhere.

    Options that only some scripts have exist only there; those that shared code asks for have a
    value here for the others. No Namespace: of that, a type checker would accept any name.
    """

    # ---- data
    data: str  # folder with train/ and val/
    classes: str | None
    image_size: int
    val_resize_size: int | None
    val_image_size: int | None
    batch_size: int
    find_batch: bool
    workers: int  # of this node
    max_bad_files: int
    dummy: bool

    # ---- augmentation
    crop_scale: float
    auto_augment: str | None
    random_erasing: float
    mixup: float
    cutmix: float
    progressive: str | None

    # ---- model
    arch: str
    pretrained: bool | str  # a str is a file
    freeze: bool
    activation_checkpointing: bool
    channels_last: bool
    ema: float | None

    # ---- training
    recipe: str | None
    epochs: int
    start_epoch: int | None
    optimizer: str
    lr: float
    momentum: float
    betas: str
    weight_decay: float
    wd_norm: float | None
    lr_schedule: str
    warmup_epochs: float
    lr_scaling: str
    label_smoothing: float
    accum_steps: int
    global_batch: int | None  # images per step over all processes
    compile: str | None
    clip_grad: float
    seed: int

    # ---- run
    name: str | None
    output_dir: str
    resume: str | None
    snapshot_minutes: float
    evaluate: bool
    part: str
    best_by: str
    target_top1: float | None  # per cent
    train_time: float | None  # hours
    print_freq: int
    profile: bool
    audit: bool
    store: str | None
    tracker: str | None
    spot_notice: str | None

    # ---- mixed precision (all but imagenet_ddp_apex.py)
    amp: str

    # ---- several processes (ddp, fsdp, ddp_apex)
    nodes: int | None
    node_rank: int | None  # of this node
    gpus: int | None
    dist_url: str | None
    dist_backend: str | None
    dist_timeout: float  # seconds
    sync_bn: bool = False

    # ---- imagenet_ddp.py alone
    comm: str | None = None

    # ---- imagenet_fsdp.py alone
    reshard: str

    # ---- imagenet_ddp_apex.py alone
    opt_level: str = ""
    keep_batchnorm_fp32: str | None
    loss_scale: float | str | None
    amp_impl: str

    # ---- set by `utils.options.parse`
    preprocessing: Any  # `utils.data.preprocessing.Preprocessing`
    given_preprocessing: Any  # the same, before a checkpoint's sizes
    defaulted_sizes: tuple[str, ...] = ()
    epoch_sizes: tuple[int, ...]  # side of training images by epoch; () without --progressive
    memory_format: Any  # torch.memory_format

    def __init__(self, **values: Any):
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"options do not change after parsing: {name}")

    def replaced(self: OptionsT, **values: Any) -> OptionsT:
        """A copy with other values."""
        return type(self)(**vars(self) | values)


class Parser(argparse.ArgumentParser):
    """A wrong option is a one-line error; under torchrun, one process of a node prints it.

    With ``common`` options (task -> names), ``--help`` prints these alone, and ``--help-all`` all.
    """

    def __init__(self, **values: Any):
        super().__init__(**values)
        self.common: dict[str, tuple[str, ...]] = {}
        self._groups: dict[str, Any] = {}

    @property
    def option_names(self) -> list[str]:
        """All options that this parser knows."""
        return list(self._option_string_actions)

    def parse_known_args(self, args: Any = None, *more: Any, **named: Any) -> Any:
        """As argparse does. Errors are also an empty value, as of an unset shell variable, and a
        long dash, which word processors and some web pages make of two short ones."""
        for word in sys.argv[1:] if args is None else args:
            if (name := word.lstrip(f"{LONG_DASHES}-")) and word[0] in LONG_DASHES:
                typed = f"-{name}" if len(name) == 1 else f"--{name}"
                self.error(f"{word} begins with a long dash: type {typed}")
        parsed = super().parse_known_args(args, *more, **named)
        for action in self._actions:
            if getattr(parsed[0], action.dest, None) == "" != action.default:
                name = "/".join(action.option_strings) or action.metavar
                self.error(f"argument {name}: the value is empty (an unset shell variable?)")
        return parsed

    def group(self, title: str) -> Any:
        """The group of options with this title in the help, for ``add_argument``."""
        if title not in self._groups:
            self._groups[title] = self.add_argument_group(title)
        return self._groups[title]

    def error(self, message: str) -> NoReturn:
        """Exit with ``message``. Raises: `UserError`, unless this is a node's first process."""
        if unknown := re.match(r"unrecognized arguments: (?:[^-]\S* )*(--?[\w-]+)", message):
            message = f"unknown option {unknown[1]}"
            if near := self._nearest(unknown[1]):
                message += f": did you mean {near}?"
        message = message.replace("unrecognized arguments: ", "too many arguments: ")
        text = f"{printable(message)} (see --help)"
        if os.environ.get("LOCAL_RANK", "0") != "0" or not is_first_to_report():
            raise UserError(text, on_every_rank=True)
        text = f"error: {text}"
        tell_torchrun(text)
        self.exit(BAD_INPUT, f"{self.prog}: {text}\n")

    def _nearest(self, word: str) -> str | None:
        """The option that ``word`` begins, or that a slip of a finger turns into it."""
        typed = word.lstrip("-").replace("_", "-")
        known = {name.lstrip("-"): name for name in self.option_names if name.startswith("--")}
        whole = [name for name in known if len(typed) > 1 and name.startswith(f"{typed}-")]
        near = difflib.get_close_matches(typed, known, 1, NEAR)
        return next((known[name] for name in (*near, *whole)), None)

    def format_help(self) -> str:
        """The text of ``--help``."""
        if not self.common:
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        own = {name: action for action in self._actions for name in action.option_strings}
        own |= {action.dest: action for action in self._actions if not action.option_strings}
        for task, names in self.common.items():
            formatter.start_section(task)
            formatter.add_arguments([own[name] for name in names if name in own])
            formatter.end_section()
        return formatter.format_help() + self._other_groups()

    def _other_groups(self) -> str:
        groups = [group for group in self._action_groups if group._group_actions]
        titles = ", ".join(group.title or "" for group in groups[1:])
        text = f"--help-all prints all options: {titles}."
        return "\n" + "\n".join(textwrap.wrap(text, shutil.get_terminal_size().columns - 2)) + "\n"


class HelpAll(argparse.Action):
    """``--help-all``: print all options and exit."""

    def __init__(self, option_strings: Sequence[str], dest: str):
        super().__init__(option_strings, dest, nargs=0, help="print all options and exit")

    def __call__(self, parser: Any, *_: Any) -> None:
        parser.common = {}
        parser.print_help()
        parser.exit()


class DocstringFormatter(argparse.HelpFormatter):
    """Wrap a docstring's sentences to the terminal. Its commands and tables keep their lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.strip("\n").split("\n\n")
        return "\n\n".join(
            textwrap.indent(part if "  " in part else textwrap.fill(part, width), indent)
            for part in parts
        )


class Formatter(argparse.ArgumentDefaultsHelpFormatter, DocstringFormatter):
    """As `DocstringFormatter`, with the defaults of options if there are any."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == []:
            return action.help
        return super()._get_help_string(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """-b, --batch-size N: the value once."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


def number(
    kind: type, low: float, high: float = math.inf, *, exclusive: bool = False
) -> Callable[[str], Any]:
    """The type of an option that takes a finite int or float (``kind``) from ``low`` to ``high``.

    With ``exclusive``, ``low`` itself is rejected.
    """
    limits = f"{'more than' if exclusive else 'at least'} {low}"
    limits += f" and at most {high:.12g}" if high < math.inf else ""

    def parse(text: str) -> Any:
        value = kind(text)
        if value == math.inf:
            raise ValueError
        if not low <= value <= high or (exclusive and value == low):
            raise argparse.ArgumentTypeError(f"{text} is not {limits}")
        return value

    parse.__name__ = "number" if kind is float else "whole number"
    return parse


def list_of(kind: Callable[[str], int]) -> Callable[[str], list[int]]:
    """The type of an option such as 1,2,4: sorted values of a ``kind``."""

    def parse(text: str) -> list[int]:
        return sorted(map(kind, text.split(",")))

    parse.__name__ = "list of numbers"
    return parse


def from_environment(name: str, kind: Callable[[str], Any], default: Any = None) -> Any:
    """The environment variable ``name``, parsed by ``kind``, a type of this module; or ``default``.

    Raises: `UserError` for a value that is not of this kind.
    """
    text = os.environ.get(name)
    try:
        return default if text is None else kind(text)
    except (argparse.ArgumentTypeError, ValueError) as error:
        reason = f"{text!r} is not a {kind.__name__}" if isinstance(error, ValueError) else error
        message = f"the environment variable {name}={text} is wrong: {reason}"
        raise UserError(message, on_every_rank=True) from None


def accuracy(text: str) -> float:
    """An accuracy in per cent. Up to 1 it is a fraction: 0.75 and 75 are the same, 1 is 100 %."""
    value = float(text)
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"{text} is neither a share (0.75) nor per cent (75)")
    return value * 100 if value <= 1 else value


def beta_shape(text: str) -> float:
    """Parameter A of Beta(A, A), or 0. Below 0.001 its random numbers would be NaN."""
    value = number(float, 0, 1000)(text)
    if 0 < value < 0.001:
        raise argparse.ArgumentTypeError(f"{text} is neither 0 nor 0.001 to 1000")
    return value


def betas(text: str) -> str:
    """Two numbers, at least 0 and below 1; kept as text, as options.json holds no lists."""
    values = [float(part) for part in text.split(",")]
    if len(values) != 2 or not all(0 <= value < 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text} is not two numbers below 1, such as 0.9,0.95")
    return text


def http(text: str) -> str:
    """The URL of a service."""
    if not text.startswith(("http://", "https://")):
        problem = f"{text} is not an http:// URL: to omit it, put the option after DATA"
        raise argparse.ArgumentTypeError(problem)
    return text


def is_url(text: str | None) -> TypeGuard[str]:
    return text is not None and "://" in text


def path(text: str) -> str:
    """A path, or a URL. ~ is the home folder, also after "=", where a shell leaves it as it is."""
    return os.path.expanduser(text)


def place(text: str) -> Path:
    """The same of a file or folder, as a `Path`."""
    return Path(path(text))


def run_name(text: str) -> str:
    """The name of a run, which names its folder and its objects in a store."""
    if not text or text in (".", "..") or "/" in text or not text.isprintable():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a plain name: the parent folder is --output-dir"
        )
    if len(text.encode(errors="surrogateescape")) > 200:  # file names have 255 bytes at most
        raise argparse.ArgumentTypeError(f"{text[:20]}... is longer than 200 bytes")
    return text


betas.__name__ = "pair of numbers"
beta_shape.__name__ = accuracy.__name__ = "number"
# Larger numbers would overflow or take all memory, with errors that do not name the option.
count, positive = number(int, 0, 2**31 - 1), number(int, 1, 2**31 - 1)
epochs, pixels = number(int, 0, 1_000_000), number(int, 1, 10_000)
fraction, non_negative = number(float, 0, 1), number(float, 0, 1e9)
ema_decay = number(float, 0, 0.9999999, exclusive=True)  # 1 would keep the first weights
seed = number(int, 0, 2**63 - 1)  # torch.manual_seed
port, seconds = number(int, 1, 65535), number(float, 1, 1_000_000)
