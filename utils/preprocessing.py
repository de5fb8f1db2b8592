"""How images become a model's input: size, interpolation, mean and standard deviation."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from utils.errors import UserError

MEAN = (0.485, 0.456, 0.406)  # ImageNet's, per channel, for pixels in 0..1
STD = (0.229, 0.224, 0.225)
CROP_SCALE = 0.08  # smallest fraction of the image's area that a training crop covers
POLICIES = ("ra", "ta_wide", "aa", "augmix")  # of --auto-augment, see `utils.extras.augment`
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
            return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})
        except (AttributeError, TypeError) as error:
            text = f"{file} has unknown preprocessing: {saved!r:.200} ({error})"
            raise UserError(text, on_every_rank=True) from None

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


def nearest_interpolation(name: str) -> str:
    """``name`` if supported, else bicubic: the nearest to Lanczos, which a few timm models use."""
    return name if name in INTERPOLATIONS else "bicubic"
