"""``--progressive``: train on small images first, which is cheap, and on larger ones at the end.

Interface: `sizes` returns ``args.epoch_sizes``, the side of training images in each epoch.

The method is known from DAWNBench entries of 2018 (Howard and others); ffcv-imagenet trains at 160
pixels, then at 192. The size depends only on the epoch: a resumed run, or a run on another number
of processes, uses the same images.
"""

import argparse
import math
import re

# FROM:TO grows in this part of the epochs, as in ffcv-imagenet's configurations of 16 and 32 epochs
# (start_ramp 11 and 23, end_ramp 13 and 27; github.com/libffcv/ffcv-imagenet, rn50_configs).
GROWS_FROM, GROWS_UNTIL = 0.7, 0.85
COARSEST = 32  # largest difference between two consecutive sizes, pixels


def check(text: str) -> str:
    """Return ``text`` if it is a valid value of the option."""
    if re.fullmatch(r"0*[1-9]\d*(:\d+|(,0*[1-9]\d*)*)", text):
        numbers = _numbers(text)
        if ":" not in text or numbers[0] < numbers[1]:
            return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither FROM:TO (160:192) nor a list of sizes (128,160,192)"
    )


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(":" if ":" in text else ",")]


def sizes(text: str | None, epochs: int) -> tuple[int, ...]:
    """Return the side of training images, in pixels, for each of ``epochs`` epochs."""
    if not text:
        return ()
    numbers = _numbers(text)
    if ":" not in text:
        return tuple(numbers[epoch * len(numbers) // epochs] for epoch in range(epochs))
    low, high = numbers
    step = math.gcd(COARSEST, low, high)
    by_epoch = []
    for epoch in range(epochs):
        done = ((epoch + 0.5) / epochs - GROWS_FROM) / (GROWS_UNTIL - GROWS_FROM)
        side = low + (high - low) * min(1.0, max(0.0, done))
        by_epoch.append(step * math.floor(side / step + 0.5))
    by_epoch[-1:] = [high] * (epochs > 0)  # the middle of the last of three or fewer is too early
    return tuple(by_epoch)


def describe(by_epoch: tuple[int, ...]) -> str:
    """Return a line for the log, such as "160 pixels from epoch 1, 192 from epoch 13"."""
    grown = [(size, n) for n, size in enumerate(by_epoch) if n == 0 or size != by_epoch[n - 1]]
    text = ", ".join(f"{size} from epoch {n + 1}" for size, n in grown)
    return text.replace(" from", " pixels from", 1)
