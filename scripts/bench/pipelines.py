"""Three ways from JPEG files to batches of 224-pixel training crops.

Each is a dataset whose ``__getitems__`` makes a whole batch from a `Batch`, as `ImageBatches` does,
so that all three are driven, and their batches handed over by workers, in the same way.
"""

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, default_collate
from torchvision import transforms

from utils.data import region_decode
from utils.data.dataset import ImageBatches
from utils.data.index import ImageIndex
from utils.data.loaders import MEAN, STD
from utils.samplers import Batch

SIZE = 224


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

    def __getitems__(self, batch: Batch) -> list[torch.Tensor]:
        return default_collate([self._sample(int(i)) for i in batch.indices])

    def _sample(self, image: int) -> tuple[torch.Tensor, int]:
        with open(self.index.path(image), "rb") as file:
            picture = Image.open(file).convert("RGB")
        return self.transform(picture), int(self.index.targets[image])


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


def all_of(index: ImageIndex) -> dict[str, Dataset]:
    """The pipelines by name; the first is the one that the others are compared with."""
    if index.pack is not None:  # the others read image files
        return {"this suite": ImageBatches(index, SIZE, seed=0, train=True)}
    found = {
        "pytorch/examples": Usual(index),
        "Apex example": UsualUint8(index),
        "this suite": ImageBatches(index, SIZE, seed=0, train=True),
    }
    found["this suite"].regions = False
    if region_decode.available():
        found["with nvImageCodec"] = ImageBatches(index, SIZE, seed=0, train=True)
    return found
