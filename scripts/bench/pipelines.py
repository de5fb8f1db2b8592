"""Ways from JPEG files to batches of 224-pixel training crops.

Each is called with the batches to make and a number of workers, and gives them one by one: with 0
workers they are made by one thread of this process.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from bench import peers
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import transforms
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from utils.data import region_decode
from utils.data.dataset import ImageBatches
from utils.data.index import ImageIndex
from utils.data.preprocessing import MEAN, STD
from utils.data.ring import RingLoader
from utils.samplers import Batch

SIZE = 224
Pipeline = Callable[[list[Batch], int], Iterator[Any]]


class Usual(Dataset):
    """What pytorch/examples does: Pillow, float tensors, normalised in the worker, collated."""

    def __init__(self, index: ImageIndex):
        self.index = index
        self.transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(SIZE),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def __len__(self) -> int:
        return len(self.index)

    def __getitems__(self, batch: Batch) -> Any:
        return default_collate([self._sample(int(i)) for i in batch.indices])

    def _sample(self, image: int) -> tuple[Any, int]:
        with open(self.index.path(image), "rb") as file:
            picture = Image.open(file).convert("RGB")
        return self.transform(picture), int(self.index.targets[image])

    def __call__(self, batches: list[Batch], workers: int) -> Iterator[Any]:
        return iter(
            DataLoader(
                self, batch_sampler=batches, num_workers=workers, collate_fn=lambda batch: batch
            )
        )


class UsualUint8(Usual):
    """What the Apex example does: the same crops, collated as uint8, normalised on the device."""

    def __init__(self, index: ImageIndex):
        super().__init__(index)
        self.transform = transforms.Compose(self.transform.transforms[:2])

    def __getitems__(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        samples = [self._sample(int(i)) for i in batch.indices]
        images = torch.empty(len(samples), 3, SIZE, SIZE, dtype=torch.uint8)
        for row, (picture, _) in enumerate(samples):
            images[row] = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        return images, torch.tensor([target for _, target in samples])


class V2Uint8(Usual):
    """torchvision's v2 transforms on uint8 tensors, normalised on the device."""

    def __init__(self, index: ImageIndex):
        super().__init__(index)
        self.transform = v2.Compose(
            [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()]
        )

    def _sample(self, image: int) -> tuple[torch.Tensor, int]:
        pixels = decode_image(self.index.path(image), ImageReadMode.RGB)
        return self.transform(pixels), int(self.index.targets[image])


class Timm(Usual):
    """What timm's loader does: its transform and its collating, normalised on the device."""

    def __init__(self, index: ImageIndex):
        super().__init__(index)
        self.transform, self.collate = peers.timm_parts(SIZE)

    def __getitems__(self, batch: Batch) -> Any:
        return self.collate([self._sample(int(i)) for i in batch.indices])


class Fixed(list):
    """Batches, as a sampler gives them."""

    @property
    def largest(self) -> int:
        """Images in the largest batch."""
        return max(len(batch.indices) for batch in self)


class ThisSuite:
    """The input path of this repository, up to the slots of its ring."""

    def __init__(self, index: ImageIndex, regions: bool):
        self.dataset = ImageBatches(index, SIZE, seed=0, train=True)
        self.dataset.regions = regions
        self.dataset.quietly = True  # in this process, too, as it has no other threads

    def __call__(self, batches: list[Batch], workers: int) -> Iterator[Any]:
        loader = RingLoader(self.dataset, Fixed(batches), workers)
        for filled in loader:
            yield filled
            loader.ring.free_after(filled.slot)


def all_of(index: ImageIndex) -> dict[str, Pipeline]:
    """The pipelines by name; the first is the one that the others are compared with."""
    if index.pack is not None:  # the others read image files
        return of_this_suite(index)
    found: dict[str, Pipeline] = {
        "pytorch/examples": Usual(index),
        "Apex example": UsualUint8(index),
        "torchvision v2": V2Uint8(index),
    }
    if peers.has_timm():
        found["timm"] = Timm(index)
    if peers.has_dali():
        found["DALI on the CPU"] = peers.Dali(index, SIZE)
    return found | of_this_suite(index)


def of_this_suite(index: ImageIndex) -> dict[str, ThisSuite]:
    """This suite's, without and, if it was built, with region decode."""
    found = {"this suite": ThisSuite(index, regions=False)}
    if index.pack is None and region_decode.available():
        found["with region decode"] = ThisSuite(index, regions=True)
    return found
