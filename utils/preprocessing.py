"""How images become a model's input: size, interpolation, mean and standard deviation.

``--progressive`` trains on small images first, which are cheap, and on larger ones at the end
(Howard's and others' entries in DAWNBench, 2018; ffcv-imagenet trains at 160 pixels, then at 192).
The size is a function of the epoch alone: a resumed run, or one on another number of processes,
sees the same images.
"""

import argparse
import math
import re
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from utils.errors import UserError

MEAN = (0.485, 0.456, 0.406)  # ImageNet's, per channel, for pixels in 0..1
STD = (0.229, 0.224, 0.225)
CROP_SCALE = 0.08  # smallest share of the image's area that a training crop covers
POLICIES = ("ra", "ta_wide", "aa", "augmix")  # of --auto-augment, see `utils.extras.augment`
INTERPOLATIONS = ("bilinear", "bicubic")
SIZES = ("image_size", "val_resize_size", "val_image_size")
# From FROM to TO, as ffcv-imagenet's configurations of 16 and 32 epochs grow (start_ramp 11 and 23,
# end_ramp 13 and 27): https://github.com/libffcv/ffcv-imagenet/tree/main/rn50_configs
GROWS_FROM, GROWS_UNTIL = 0.7, 0.85  # shares of the epochs
COARSEST = 32  # pixels between two sizes, at most

Channels = tuple[float, float, float]


@dataclass(frozen=True)
class Preprocessing:
    """From an image file to a model's input; by default, ImageNet's usual way.

    Training crops are resized to ``image_size`` pixels. In evaluation the short side is resized to
    ``val_resize_size``, and a square of ``val_image_size`` (None: of ``image_size``) cut out of
    the centre. ``mean`` and ``std`` are per channel, RGB, for pixels in 0..1.
    """

    mean: Channels = MEAN
    std: Channels = STD
    interpolation: str = "bilinear"
    image_size: int = 224
    val_resize_size: int = 256
    val_image_size: int | None = None

    @property
    def crop(self) -> int:
        """Side of the crop in evaluation, pixels."""
        return self.val_image_size or self.image_size

    def resized(
        self, image_size: int | None, val_resize_size: int | None, val_image_size: int | None = None
    ) -> "Preprocessing":
        """The same with other sizes; None keeps the proportions.

        Raises: `UserError` when the crop is larger than the resized image.
        """
        size = image_size or self.image_size
        own = val_image_size
        if own is None and self.val_image_size is not None:
            own = round(size * self.val_image_size / self.image_size)
        crop = own or size
        short = val_resize_size or round(crop * self.val_resize_size / self.crop)
        if short < crop:
            name = "--val-image-size" if own else "--image-size"
            raise UserError(
                f"--val-resize-size {short} is smaller than the crop, {name} {crop}", alike=True
            )
        return replace(self, image_size=size, val_resize_size=short, val_image_size=own)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Any, file: object) -> "Preprocessing":
        """The inverse of `as_dict`, for what ``file`` holds. Raises: `UserError`."""
        try:
            return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})
        except (AttributeError, TypeError) as fault:
            text = f"{file} has unknown preprocessing: {saved!r:.200} ({fault})"
            raise UserError(text, alike=True) from None

    def __str__(self) -> str:
        own = f"{self.val_image_size} from " if self.val_image_size else ""
        mean, std = (" ".join(f"{x:.3g}" for x in channels) for channels in (self.mean, self.std))
        return (
            f"{self.image_size} pixels (evaluation: {own}the centre of {self.val_resize_size}), "
            f"{self.interpolation}, mean {mean}, std {std}"
        )


IMAGENET = Preprocessing()


def to_rgb(picture: Image.Image) -> Image.Image:
    """Any image as 8-bit RGB, alpha dropped. Raises: whatever Pillow raises for a damaged file."""
    if picture.mode.startswith("I"):
        # 16 bits per pixel: Pillow's own conversion to RGB would clip instead of scale.
        wide = np.asarray(picture, dtype=np.int64)
        grey = (wide >> 8 if wide.max(initial=0) > 255 else wide).astype(np.uint8)
        picture = Image.fromarray(grey)
    return picture.convert("RGB")


def progressive(text: str) -> str:
    """The type of ``--progressive``: the text, checked."""
    if re.fullmatch(r"0*[1-9]\d*(:\d+|(,0*[1-9]\d*)*)", text):
        sizes = _numbers(text)
        if ":" not in text or sizes[0] < sizes[1]:
            return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither FROM:TO (160:192) nor a list of sizes (128,160,192)"
    )


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(":" if ":" in text else ",")]


def progressive_sizes(text: str, epochs: int) -> tuple[int, ...]:
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


def training_sizes(args: Any) -> tuple[int, ...]:
    """The side of a run's training images in each epoch, pixels; () without ``--progressive``."""
    return progressive_sizes(args.progressive, args.epochs) if args.progressive else ()


def largest_size(args: Any) -> int:
    """The side of a run's largest training images, pixels."""
    return max(training_sizes(args), default=args.image_size)


def sizes_text(found: tuple[int, ...]) -> str:
    """Which size comes when: "160 pixels from epoch 1, 192 from epoch 13"."""
    grown = [(size, n) for n, size in enumerate(found) if n == 0 or size != found[n - 1]]
    text = ", ".join(f"{size} from epoch {n + 1}" for size, n in grown)
    return text.replace(" from", " pixels from", 1)
