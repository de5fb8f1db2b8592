"""What a model wants its images to be like: size, interpolation, mean and standard deviation."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from utils.errors import UserError

MEAN = (0.485, 0.456, 0.406)  # ImageNet's, per channel, for pixels in 0..1
STD = (0.229, 0.224, 0.225)
INTERPOLATIONS = ("bilinear", "bicubic")

Channels = tuple[float, float, float]


@dataclass(frozen=True)
class Preprocessing:
    """From an image file to a model's input; by default, ImageNet's usual way.

    Training crops are resized to ``image_size`` x ``image_size`` pixels. In evaluation the short
    side is resized to ``val_resize_size`` pixels, and a square of ``val_image_size`` (None: of
    ``image_size``) cut out of the centre. ``mean`` and
    ``std`` are per channel, RGB, for pixels in 0..1.
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
        self,
        image_size: int | None,
        val_resize_size: int | None,
        val_image_size: int | None = None,
    ) -> "Preprocessing":
        """The same with the sizes that somebody asks for.

        Without an own ``val_resize_size``, evaluation goes on looking at the same share of the
        image, and ``val_image_size`` keeps its ratio to ``image_size``. Raises: `UserError` when
        the crop is larger than what it is cut out of.
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
                alike=True,
            )
        return replace(self, image_size=size, val_resize_size=short, val_image_size=own)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
        }

    @classmethod
    def of(cls, saved: Any) -> "Preprocessing":
        """What `as_dict` gave; what is missing is ImageNet's. Raises: ValueError."""
        if not isinstance(saved, dict):
            raise ValueError(f"{saved!r:.60} is no dictionary")
        known = {key: value for key, value in saved.items() if value is not None}
        for key in ("mean", "std"):
            if key in known:
                known[key] = _channels(known[key], above=0.0 if key == "std" else -math.inf)
        for key in ("image_size", "val_resize_size", "val_image_size"):
            if type(size := known.get(key, 1)) is not int or size < 1:
                raise ValueError(f"{key} {size!r:.60}")
        if known.get("interpolation", "bilinear") not in INTERPOLATIONS:
            raise ValueError(f"interpolation {known['interpolation']!r:.60}")
        names = ("image_size", "val_resize_size", "val_image_size")
        sizes = [known.pop(name, None) for name in names]
        try:
            return cls(**known).resized(*sizes)
        except (TypeError, UserError) as fault:
            raise ValueError(str(fault)) from None

    def __str__(self) -> str:
        own = f"{self.val_image_size} from " if self.val_image_size else ""
        mean, std = (" ".join(f"{x:.3g}" for x in channels) for channels in (self.mean, self.std))
        return (
            f"{self.image_size} pixels (evaluation: {own}the centre of {self.val_resize_size}), "
            f"{self.interpolation}, mean {mean}, std {std}"
        )


IMAGENET = Preprocessing()


def _channels(values: Any, above: float) -> Channels:
    """Three finite numbers larger than ``above``."""
    if not isinstance(values, (list, tuple)) or len(values) != 3:
        raise ValueError(f"{values!r:.60} is not a number for each of three channels")
    if not all(isinstance(x, (int, float)) and above < x < math.inf for x in values):
        raise ValueError(f"{values!r:.60} as mean or standard deviation")
    return tuple(map(float, values))
