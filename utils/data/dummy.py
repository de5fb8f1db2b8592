"""``--dummy``: synthetic images."""

import io

import numpy as np
from PIL import Image

from utils.data.sources import Source
from utils.start.errors import UserError

MOST_CLASSES = 1_000_000
DUMMY_IMAGES = {"train": 1_281_167, "val": 50_000, "test": 50_000}  # as many as ImageNet has
DUMMY_SHAPE = (375, 500)  # pixels; usual in ImageNet


class Dummy(Source):
    """``--dummy``: one synthetic JPEG image for all numbers, so that neither files nor a disk are
    needed, and decoding costs about as much as that of ImageNet. The classes have equal shares.

    ``choice``: the value of ``--classes``, a number (None: 1000). Raises: `UserError`.
    """

    def __init__(self, part: str, choice: str | None):
        if choice and not (choice.isdecimal() and 0 < int(choice) <= MOST_CLASSES):
            text = f"--dummy has no folders: give --classes a number, 1 to {MOST_CLASSES}"
            raise UserError(text, on_every_rank=True)
        classes = [str(number) for number in range(int(choice or 1000))]
        images = DUMMY_IMAGES[part]
        counts = np.bincount(np.arange(images) * len(classes) // images, minlength=len(classes))
        super().__init__("dummy", classes, paths=bytes(images), counts=counts.tolist())
        draw = np.random.default_rng(0)
        height, width = DUMMY_SHAPE
        coarse = Image.fromarray(draw.integers(0, 256, (12, 16, 3), np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
        noisy = smooth + draw.normal(0, 12, (height, width, 1))  # its file has about 100 kB
        file = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
        self.image = file.getvalue()

    def read(self, image: int) -> bytes:
        """The JPEG."""
        return self.image

    def stored(self, image: int) -> tuple[str, int, int | None]:
        """The size is that of the JPEG."""
        return self.root, 0, len(self.image)
