"""Images, a small data set of noise and its batches, for the tests of the input path."""

import io

import numpy as np
import torch
from PIL import Image

from utils.data.batches import BadFiles, Batches, EvalBatches, TrainBatches
from utils.data.folder import open_folder
from utils.data.images import ImageBatches
from utils.data.samplers import Batch, TrainSampler
from utils.data.sources import Source

SIZE, SEED = 16, 3
TO = (torch.device("cpu"), torch.contiguous_format, torch.float32)


def noise_index(root, images=24, suffix="png", height=20, width=30) -> Source:
    """Noise in 3 classes, but the blue of every pixel of image i is 10 * i, however it is cropped.

    Image i is ``height`` + i pixels high.
    """
    source = np.random.default_rng(0)
    for i in range(images):
        pixels = source.integers(0, 256, (height + i, width, 3), np.uint8)
        pixels[..., 2] = 10 * i % 256
        path = root / f"class_{3 * i // images}" / f"{i:02}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return open_folder(root, ["class_0", "class_1", "class_2"])


def picture(width=500, height=375, seed=0) -> Image.Image:
    """Like a photograph: smooth shapes, some noise, all three channels different."""
    source = np.random.default_rng(seed)
    coarse = source.integers(0, 256, (max(2, height // 40), max(2, width // 40), 3), np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    noisy = np.asarray(smooth, np.int16) + source.integers(-12, 13, (height, width, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def encode(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    """An image file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def batches_of(index, sampler, workers=0, size=SIZE, to=TO, bad_files=0) -> Batches:
    """The batches of ``sampler``: training crops, or centre crops of an `EvalSampler`."""
    train = isinstance(sampler, TrainSampler)
    dataset = ImageBatches(index, size, SEED, train, resize=size)
    kind = TrainBatches if train else EvalBatches
    return kind(dataset, sampler, BadFiles(index, bad_files), to, workers)


def fetch(dataset, indices, epoch=0):
    """Images uint8 [n, s, s, 3], targets, and what reading them took."""
    return dataset.__getitems__(Batch(epoch, np.array(indices)))
