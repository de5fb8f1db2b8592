"""Any image of Pillow's as RGB. Needs no torch, whose import takes seconds in each process."""

import numpy as np
from PIL import Image


def to_rgb(picture: Image.Image) -> Image.Image:
    """``picture`` as 8-bit RGB, alpha dropped; greys of 16 bits are scaled.

    Raises: whatever Pillow raises for a damaged file.
    """
    if picture.mode.startswith("I"):
        # 16 bits per pixel: Pillow's own conversion to RGB would clip instead of scale.
        wide = np.asarray(picture, dtype=np.int64)
        grey = (wide >> 8 if wide.max(initial=0) > 255 else wide).astype(np.uint8)
        picture = Image.fromarray(grey)
    return picture.convert("RGB")
