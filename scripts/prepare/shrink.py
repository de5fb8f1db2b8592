"""Reduce an image file to a short side of at most N pixels.

Training crops are 224 pixels wide, so most pixels of a large photograph are decoded but not used.
RESULTS.md compares the cost of reading the copy and the original. The smallest training crops,
which are enlarged, become softer.

Reduced images are JPEG files with the pixels of `PIL.Image.convert("RGB")`, without EXIF and other
metadata. They keep their names and suffixes, because the order of training depends on names, and
training recognises formats by content. All other files are copied byte for byte. So training treats
an image that cannot be decoded in the same way as in the original folder.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image, UnidentifiedImageError

from utils.data.preprocessing import to_rgb
from utils.start.errors import UserError

# After evaluation's resize to 256 and crop, bicubic images are closer to the originals than Lanczos
# images, and their files are smaller. In training crops both are equally close.
FILTER = Image.Resampling.BICUBIC
# A JPEG decoder halves an image cheaply, but blurs it. At this many times the final size the blur
# does not matter.
DRAFT_MARGIN = 2


def reduce(image: Image.Image, size: int) -> Image.Image | None:
    """Reduce an image that is opened but not loaded to a short side of ``size`` pixels, in RGB.
    Returns None if it is small enough already."""
    if min(image.size) <= size:
        return None

    def sides(width: float, height: float) -> tuple[int, int]:
        factor = min(1.0, size / min(width, height))
        return round(width * factor), round(height * factor)

    width, height = sides(*image.size)
    drafted = image.draft(None, (DRAFT_MARGIN * width, DRAFT_MARGIN * height))
    rgb = to_rgb(image)
    # A drafted image's last row and column may cover only a fraction of a pixel.
    box = drafted[1] if drafted else (0, 0, *rgb.size)
    return rgb.resize(sides(*box[2:]), FILTER, box)


@contextmanager
def opened(data: bytes) -> Iterator[Image.Image]:
    """Open an image file of any format that Pillow reads.

    Raises: ValueError with the reason if the image cannot be decoded, or the `with` block cannot
    encode it; `UserError` if memory runs out.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata, images near the size limit
            with Image.open(io.BytesIO(data)) as image:
                yield image
    except UnidentifiedImageError as error:
        raise ValueError("it is not an image, or of an unknown format") from error
    except MemoryError as error:
        raise UserError("out of memory; use fewer --workers") from error
    except Exception as error:  # damaged data makes the decoders raise nearly anything
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(reason or type(error).__name__) from error


def shrink(data: bytes, size: int, quality: int) -> bytes:
    """Reduce ``data``, an image file, to a JPEG file of ``quality`` (1 to 100). Returns ``data``
    itself if its short side has at most ``size`` pixels.

    Raises: ValueError if the image cannot be decoded, or is too large for a JPEG file.
    """
    with opened(data) as image:
        small = reduce(image, size)
        if small is None:
            image.load()
            return data
        small.info.clear()
        file = io.BytesIO()
        small.save(file, "JPEG", quality=quality)
        return file.getvalue()
