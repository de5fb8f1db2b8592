"""How images become a model's input: size, interpolation, mean and standard deviation."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from utils.start.errors import UserError

MEAN = (0.485, 0.456, 0.406)  # ImageNet's, per channel, for pixels in 0..1
STD = (0.229, 0.224, 0.225)
CROP_SCALE = 0.08  # smallest fraction of the image's area that a training crop covers
POLICIES = ("ra", "ta_wide", "aa", "augmix")  # of --auto-augment, see `utils.data.augment`
INTERPOLATIONS = ("bilinear", "bicubic")
SIZES = ("image_size", "val_resize_size", "val_image_size")

Channels = tuple[float, float, float]


@dataclass(frozen=True)
class Preprocessing:
    """How an image file becomes a model's input. The defaults are the usual ones for ImageNet.

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
        """A copy with other sizes; None keeps the proportions.

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
                f"--val-resize-size {short} is smaller than the crop, {name} {crop}",
                on_every_rank=True,
            )
        return replace(self, image_size=size, val_resize_size=short, val_image_size=own)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Any, file: object) -> "Preprocessing":
        """The inverse of `as_dict`; messages name ``file``. Raises: `UserError`."""
        try:
            values: dict[str, Any] = {
                name: tuple(one) if isinstance(one, list) else one for name, one in saved.items()
            }
            made = cls(**values)
            made._check()
            return made
        except (AttributeError, TypeError, ValueError) as error:
            text = f"{file} has unknown preprocessing: {saved!r:.200} ({error})"
            raise UserError(text, on_every_rank=True) from None

    def _check(self) -> None:
        """Raise ValueError or TypeError for a value that no image can be preprocessed with."""
        if not all(len(x) == 3 and all(map(math.isfinite, x)) for x in (self.mean, self.std)):
            raise ValueError("mean and std must have three numbers")
        if not all(self.std) or self.interpolation not in INTERPOLATIONS:
            raise ValueError("std must not be 0, interpolation be bilinear or bicubic")
        sizes = [getattr(self, name) for name in SIZES[: 2 + (self.val_image_size is not None)]]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ValueError("sizes must be numbers of pixels")

    def __str__(self) -> str:
        own = f"{self.val_image_size} from " if self.val_image_size else ""
        mean, std = (" ".join(f"{x:.3g}" for x in channels) for channels in (self.mean, self.std))
        return (
            f"{self.image_size} pixels (evaluation: {own}the centre of {self.val_resize_size}), "
            f"{self.interpolation}, mean {mean}, std {std}"
        )


IMAGENET = Preprocessing()


# Tags of a TIFF file, and values of the third.
BITS_PER_SAMPLE, PHOTOMETRIC, SAMPLE_FORMAT = 258, 262, 339
UNSIGNED, UNDEFINED, WHITE_IS_ZERO = 1, 4, 0
DARKEST = 16  # of 255; a picture of 16 bits that never reaches it probably holds fewer bits


def to_rgb(picture: Image.Image) -> Image.Image:
    """Any opened image file as 8-bit RGB, alpha dropped.

    Pixels of 12, 16 or 32 bits are scaled by the range that the format states, never by the values.
    Raises: ValueError if it states none (floating-point or signed values), or if the picture would
    be black, as one with 12-bit values in 16 bits; whatever Pillow raises for a damaged file.
    """
    tags = getattr(picture, "tag_v2", {})  # of a TIFF file
    grey = picture.mode.startswith("I")
    wide = grey or ";16" in str(getattr(picture, "tile", ""))  # Pillow keeps the higher 8 of 16
    stated = picture.mode != "I" or picture.format in ("PNG", "PPM", "TIFF")
    if picture.mode == "F" or {*tags.get(SAMPLE_FORMAT, ())} - {UNSIGNED, UNDEFINED} or not stated:
        text = "signed or floating-point values, and the file does not state which value is white"
        raise ValueError(f"{text}: convert it to 8 bits per channel")
    bits = max(tags.get(BITS_PER_SAMPLE, (16,)))
    if grey:
        values = np.asarray(picture)
        values = values.view(np.uint32) if values.dtype == np.int32 else values
        if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO:
            values = 2**bits - 1 - values
        picture = Image.fromarray((values >> (bits - 8)).astype(np.uint8))
    rgb = picture.convert("RGB")
    if wide and np.max(np.asarray(rgb), initial=0) < DARKEST:
        text = f"its values of {bits} bits are so small that it would be black"
        raise ValueError(f"{text}: convert it to 8 bits per channel")
    return rgb


def nearest_interpolation(name: str) -> str:
    """``name`` if supported, else bicubic: the nearest to Lanczos, which a few timm models use."""
    return name if name in INTERPOLATIONS else "bicubic"
