"""Input pipelines from JPEG files to batches of 224-pixel training crops.

Each is called with a list of batches and a number of workers, and yields the batches one by one.
With 0 workers one thread of this process makes them.
"""

import random
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import transforms
from torchvision.datasets.folder import pil_loader
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from utils import addons
from utils.folder import Source
from utils.images import ImageBatches, random_box
from utils.loaders import RingLoader
from utils.preprocessing import MEAN, STD
from utils.samplers import Batch

SIZE = 224
Pipeline = Callable[[list[Batch], int], Iterator[Any]]


class Usual(Dataset):
    """The pipeline of pytorch/examples: Pillow, float tensors, normalised in the worker."""

    def __init__(self, index: Source):
        self.index = index
        self.collate: Callable[[list[Any]], Any] = default_collate
        steps = [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip()]
        steps += [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
        self.transform: Callable[[Any], Any] = transforms.Compose(steps)

    def __len__(self) -> int:
        return len(self.index)

    def __getitems__(self, batch: Batch) -> Any:
        return self.collate([self._sample(int(i)) for i in batch.indices])

    def _sample(self, image: int) -> tuple[Any, int]:
        return self.transform(self._decode(self.index.path(image))), int(self.index.targets[image])

    def _decode(self, path: str) -> Any:
        return pil_loader(path)

    def __call__(self, batches: list[Batch], workers: int) -> Iterator[Any]:
        return plain_loader(self, batches, workers)


def plain_loader(dataset: Dataset, batches: list[Batch], workers: int) -> Iterator[Any]:
    """The batches of ``dataset`` by torch's DataLoader, handed over in shared memory."""
    return iter(DataLoader(dataset, batch_sampler=batches, num_workers=workers, collate_fn=_as_is))


def _as_is(batch: Any) -> Any:
    return batch


class V2Uint8(Usual):
    """torchvision's v2 transforms on uint8 tensors, normalised on the device."""

    def __init__(self, index: Source):
        super().__init__(index)
        crop = v2.RandomResizedCrop(SIZE, antialias=True)
        self.transform = v2.Compose([crop, v2.RandomHorizontalFlip()])

    def _decode(self, path: str) -> Any:
        return decode_image(path, ImageReadMode.RGB)


class Timm(Usual):
    """timm's transform and its collating for a GPU, where normalisation follows."""

    def __init__(self, index: Source):
        from timm.data import create_transform
        from timm.data.loader import fast_collate

        super().__init__(index)
        self.collate = fast_collate
        self.transform = create_transform(
            SIZE, is_training=True, use_prefetcher=True, color_jitter=0.0, interpolation="bilinear"
        )


class Dali:
    """DALI's decoder with random crops, its resize and its flip, all on the CPU.

    A pipeline of DALI's reads in its own order, and ignores the requested batches. Its threads
    belong to this process. They are started once, which is not timed.
    """

    def __init__(self, index: Source):
        self.index = index
        self.built: Any = None

    def __call__(self, batches: list[Batch], workers: int) -> Iterator[Any]:
        self.built = self.built or self._build(len(batches[0].indices), max(1, workers))
        for _ in batches:
            yield self.built.run()

    def _build(self, batch: int, threads: int) -> Any:
        from nvidia.dali import fn, pipeline_def, types

        @pipeline_def(batch_size=batch, num_threads=threads, device_id=None, seed=0)
        def crops() -> Any:
            files = [self.index.path(i) for i in range(len(self.index))]
            labels = self.index.targets.tolist()
            order = {"random_shuffle": True, "initial_fill": len(files)}
            data, targets = fn.readers.file(files=files, labels=labels, **order)
            box = {"random_area": [0.08, 1.0], "random_aspect_ratio": [3 / 4, 4 / 3]}
            images = fn.decoders.image_random_crop(data, device="cpu", output_type=types.RGB, **box)
            images = fn.resize(images, size=[SIZE, SIZE], antialias=True)
            return fn.flip(images, horizontal=fn.random.coin_flip()), targets

        built = crops()
        built.build()
        for _ in range(4):  # until its queues are full
            built.run()
        return built


class Spdl:
    """SPDL's threads, in which FFmpeg decodes, crops, resizes and flips."""

    def __init__(self, index: Source):
        self.index = index

    def __call__(self, batches: list[Batch], workers: int) -> Iterator[Any]:
        from spdl.pipeline import PipelineBuilder

        threads = max(1, workers)
        steps = PipelineBuilder().add_source(batches).pipe(self._batch, concurrency=threads)
        pipeline = steps.add_sink(2).build(num_threads=threads)
        with pipeline.auto_stop():
            yield from pipeline

    def _batch(self, batch: Batch) -> Any:
        import spdl.io

        frames = [self._frame(int(image)) for image in batch.indices]
        pixels = spdl.io.to_torch(spdl.io.convert_frames(frames))
        return pixels, self.index.targets[batch.indices]

    def _frame(self, image: int) -> Any:
        import spdl.io

        packets = spdl.io.demux_image(self.index.path(image))
        top, left, height, width = random_box(random, packets.height, packets.width)
        flip = "hflip," if random.random() < 0.5 else ""
        steps = f"crop={width}:{height}:{left}:{top}:exact=1,scale={SIZE}:{SIZE}:flags=bilinear"
        return spdl.io.decode_packets(packets, filter_desc=f"{steps},{flip}format=rgb24")


def has_spdl() -> bool:
    """Whether SPDL is installed, and the FFmpeg that it needs."""
    try:
        import spdl.io
        import spdl.pipeline

        return bool(spdl.io.demux_image) and hasattr(spdl.io.lib._libspdl, "make_demuxer")
    except (ImportError, AttributeError, RuntimeError):
        return False


class Fixed(list):
    """Batches, as a sampler gives them."""

    @property
    def largest(self) -> int:
        """Images in the largest batch."""
        return max(len(batch.indices) for batch in self)


class ThisSuite:
    """The input path of this repository, up to the slots of its ring or, without, a DataLoader."""

    def __init__(self, index: Source, regions: bool = False, ring: bool = True):
        decoder = addons.region_decoder() if regions else None
        self.dataset = ImageBatches(index, SIZE, 0, train=True, regions=decoder)
        self.ring = ring

    def __call__(self, batches: list[Batch], workers: int) -> Iterator[Any]:
        if not self.ring:
            yield from plain_loader(self.dataset, batches, workers)
            return
        yield from RingLoader(self.dataset, Fixed(batches), workers)


def all_of(index: Source) -> dict[str, Pipeline]:
    """The pipelines by name; ratios are to the first."""
    suite: dict[str, Pipeline] = {"this suite": ThisSuite(index)}
    if index.stores_pixels:  # the others read image files
        return suite
    if addons.region_decoder():
        suite["this suite, with region decode"] = ThisSuite(index, regions=True)
    suite["this suite, without its ring"] = ThisSuite(index, ring=False)
    peers: dict[str, Pipeline] = {"pytorch/examples": Usual(index)}
    peers["torchvision v2"] = V2Uint8(index)
    if find_spec("timm"):
        peers["timm"] = Timm(index)
    if find_spec("nvidia") and find_spec("nvidia.dali"):
        peers["DALI on the CPU"] = Dali(index)
    if has_spdl():
        peers["SPDL"] = Spdl(index)
    return peers | suite
