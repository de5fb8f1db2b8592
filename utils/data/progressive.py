"""Progressive resizing: small training images in the first epochs, larger ones in the last.

Small images are cheap, and a network that has seen them learns the rest from a few epochs of larger
ones (Howard's and others' entries in DAWNBench, 2018; ffcv-imagenet trains at 160 pixels, then at
192). The size is a function of the epoch alone, so that a resumed run, or one on another number of
processes, sees the same images. Evaluation is at ``--image-size``.
"""

import argparse
import math
from typing import Any

# From FROM to TO, as ffcv-imagenet's configurations of 16 and 32 epochs grow (start_ramp 11 and 23,
# end_ramp 13 and 27): https://github.com/libffcv/ffcv-imagenet/tree/main/rn50_configs
GROWS_FROM, GROWS_UNTIL = 0.7, 0.85  # shares of the epochs
COARSEST = 32  # pixels between two sizes, at most


def add_options(parser: argparse.ArgumentParser) -> None:
    """``--progressive``."""
    group = parser.add_argument_group("progressive resizing")
    group.add_argument(
        "--progressive",
        type=plan,
        metavar="SIZES",
        help="sides of the training crops, pixels. 160:192: 160 in the first 70 %% of the epochs, "
        "192 from 85 %% on, between them in steps of 32 (or less, if they are no multiples of it). "
        "96,128,160: as many equal parts of the epochs. Evaluation is at --image-size",
    )


def plan(text: str) -> str:
    """The type of ``--progressive``: the text itself, checked."""
    try:
        sizes = _numbers(text)
    except ValueError:
        sizes = []
    grows = ":" in text
    if not sizes or min(sizes) < 1 or (grows and (len(sizes) != 2 or sizes[0] >= sizes[1])):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither FROM:TO (160:192) nor a list of sizes (128,160,192)"
        )
    return text


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(":" if ":" in text else ",")]


def sizes(text: str, epochs: int) -> tuple[int, ...]:
    """The side of training images in each of ``epochs``, pixels."""
    wanted = _numbers(text)
    if ":" not in text:
        return tuple(wanted[epoch * len(wanted) // epochs] for epoch in range(epochs))
    low, high = wanted
    step = math.gcd(COARSEST, low, high)
    found = []
    for epoch in range(epochs):
        done = ((epoch + 0.5) / epochs - GROWS_FROM) / (GROWS_UNTIL - GROWS_FROM)
        side = low + (high - low) * min(1.0, max(0.0, done))
        found.append(step * math.floor(side / step + 0.5))
    return tuple(found)


def of(args: Any) -> tuple[int, ...]:
    """`sizes` of a run; () without ``--progressive``."""
    text = getattr(args, "progressive", None)
    return sizes(text, args.epochs) if text else ()


def largest(args: Any) -> int:
    """The side of a run's largest training images, pixels."""
    return max(of(args), default=args.image_size)


def in_words(found: tuple[int, ...]) -> str:
    """Which size comes when: "160 pixels in epochs 1 to 12, 192 in 13 to 16"."""
    parts, first = [], 0
    for epoch in range(1, len(found) + 1):
        if epoch == len(found) or found[epoch] != found[first]:
            unit = "" if parts else " pixels"
            when = f"epochs {first + 1} to {epoch}" if epoch > first + 1 else f"epoch {epoch}"
            parts.append(f"{found[first]}{unit} in {when}")
            first = epoch
    return ", ".join(parts)
