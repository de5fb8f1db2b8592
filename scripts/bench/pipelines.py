"""Input pipelines from JPEG files to batches of 224-pixel training crops.

Each pipeline is a function of a list of batches and a number of workers. It yields the batches one
by one. With 0 workers one thread of this process makes them.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import transforms
from torchvision.datasets.folder import pil_loader
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from utils.data import region_decode
from utils.data.images import ImageBatches, random_box
from utils.data.preprocessing import MEAN, STD
from utils.data.ring import RingLoader
from utils.data.samplers import Batch
from utils.data.sources import Source

SIZE = 224
Pipeline = Callable[[list[Batch], int], Iterator[Any]]


def all_of(source: Source) -> dict[str, Pipeline]:
    """Return the pipelines of this suite and of installed packages; ratios refer to the first."""
    suite: dict[str, Pipeline] = {"this suite": this_suite(source)}
    peers = {"pytorch/examples": examples(source), "torchvision v2": torchvision_v2(source)}
    if find_spec("timm"):
        peers["timm"] = timm(source)
    if find_spec("nvidia") and find_spec("nvidia.dali"):
        peers["DALI on the CPU"] = dali(source)
    if has_spdl():
        peers["SPDL"] = partial(spdl, source)
    if region_decode.has_library():
        suite["this suite, with region decode"] = this_suite(source, regions=True)
    whole = ImageBatches(source, SIZE, 0, train=True, regions=False)
    suite["this suite, without its ring"] = data_loader(whole)
    return peers | suite


@dataclass
class Requests:
    """A sampler of these batches."""

    batches: list[Batch]

    @property
    def largest(self) -> int:
        return max(len(batch.indices) for batch in self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def this_suite(source: Source, regions: bool = False) -> Pipeline:
    """This suite's input path, up to the slots of its ring buffer."""
    dataset = ImageBatches(source, SIZE, 0, train=True, regions=regions)
    return lambda batches, workers: iter(RingLoader(dataset, Requests(batches), workers))


def data_loader(dataset: Dataset) -> Pipeline:
    """torch's DataLoader, which passes batches on in shared memory."""

    def batches_of(batches: list[Batch], workers: int) -> Iterator[Any]:
        requests: list[Any] = [*batches]  # not lists of indices: they go to __getitems__
        loader = DataLoader(dataset, batch_sampler=requests, num_workers=workers, collate_fn=_as_is)
        return iter(loader)

    return batches_of


def _as_is(batch: Any) -> Any:
    return batch


class OneByOne(Dataset):
    """Decodes and transforms each image by itself, then collates the batch."""

    def __init__(self, source: Source, decode: Any, transform: Any, collate: Any = default_collate):
        self.source, self.decode, self.transform = source, decode, transform
        self.collate = collate

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, batch: Batch) -> Any:
        return self.collate([self._sample(int(image)) for image in batch.indices])

    def _sample(self, image: int) -> tuple[Any, int]:
        pixels = self.transform(self.decode(self.source.path(image)))
        return pixels, int(self.source.targets[image])


def examples(source: Source) -> Pipeline:
    """pytorch/examples: Pillow, float tensors, normalised in the worker."""
    steps = [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip()]
    steps += [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    return data_loader(OneByOne(source, pil_loader, transforms.Compose(steps)))


def torchvision_v2(source: Source) -> Pipeline:
    """torchvision's v2 transforms on uint8 tensors, normalised on the device."""
    steps = [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()]
    decode = partial(decode_image, mode=ImageReadMode.RGB)
    return data_loader(OneByOne(source, decode, v2.Compose(steps)))


def timm(source: Source) -> Pipeline:
    """timm's transform and its collating for a GPU, where normalisation follows."""
    from timm.data import create_transform
    from timm.data.loader import fast_collate

    options = {"use_prefetcher": True, "color_jitter": 0.0, "interpolation": "bilinear"}
    transform = create_transform(SIZE, is_training=True, **options)
    return data_loader(OneByOne(source, pil_loader, transform, fast_collate))


def dali(source: Source) -> Pipeline:
    """DALI's decoder with random crops, its resize and its flip, all on the CPU.

    A DALI pipeline reads in its own order, and ignores the requested batches. Its threads belong to
    this process. They start once, and the start is not timed.
    """
    from nvidia.dali import fn, pipeline_def, types

    @cache
    def build(batch: int, threads: int) -> Any:
        @pipeline_def(batch_size=batch, num_threads=threads, device_id=None, seed=0)
        def crops() -> Any:
            files = [source.path(i) for i in range(len(source))]
            order = {"random_shuffle": True, "initial_fill": len(files)}
            data, targets = fn.readers.file(files=files, labels=source.targets.tolist(), **order)
            box = {"random_area": [0.08, 1.0], "random_aspect_ratio": [3 / 4, 4 / 3]}
            images = fn.decoders.image_random_crop(data, device="cpu", output_type=types.RGB, **box)
            images = fn.resize(images, size=[SIZE, SIZE], antialias=True)
            return fn.flip(images, horizontal=fn.random.coin_flip()), targets

        pipeline = crops()
        pipeline.build()
        for _ in range(4):  # fill its queues
            pipeline.run()
        return pipeline

    def batches_of(batches: list[Batch], workers: int) -> Iterator[Any]:
        pipeline = build(len(batches[0].indices), max(1, workers))
        for _ in batches:
            yield pipeline.run()

    return batches_of


def has_spdl() -> bool:
    """Whether SPDL and the FFmpeg libraries that it needs are installed."""
    try:
        import spdl.io
        import spdl.pipeline

        return hasattr(spdl.io.lib._libspdl, "make_demuxer")  # loads FFmpeg
    except (ImportError, AttributeError, RuntimeError):
        return False


def spdl(source: Source, batches: list[Batch], workers: int) -> Iterator[Any]:
    """SPDL's threads, in which FFmpeg decodes, crops, resizes and flips."""
    import spdl.io as io
    from spdl.pipeline import PipelineBuilder

    draw = random.Random()

    def frame(image: int) -> Any:
        packets = io.demux_image(source.path(image))
        top, left, height, width = random_box(draw, packets.height, packets.width)
        flip = "hflip," if draw.random() < 0.5 else ""
        steps = f"crop={width}:{height}:{left}:{top}:exact=1,scale={SIZE}:{SIZE}:flags=bilinear"
        return io.decode_packets(packets, filter_desc=f"{steps},{flip}format=rgb24")

    def make(batch: Batch) -> Any:
        frames = [frame(int(image)) for image in batch.indices]
        return io.to_torch(io.convert_frames(frames)), source.targets[batch.indices]

    threads = max(1, workers)
    steps = PipelineBuilder().add_source(batches).pipe(make, concurrency=threads).add_sink(2)
    pipeline = steps.build(num_threads=threads)
    with pipeline.auto_stop():
        yield from pipeline
