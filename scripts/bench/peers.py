"""Pipelines of other packages, where these are installed: timm and NVIDIA's DALI."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from utils.data.index import ImageIndex
from utils.data.jpeg_rows import silent_stderr
from utils.samplers import Batch


def has_timm() -> bool:
    """True if timm is installed."""
    return find_spec("timm") is not None


def has_dali() -> bool:
    """True if DALI is installed."""
    return find_spec("nvidia") is not None and find_spec("nvidia.dali") is not None


def timm_parts(size: int) -> tuple[Callable[[Any], Any], Callable[[list[Any]], Any]]:
    """timm's transform of a picture for training without extra augmentation, and its collating.

    Those that its ``create_loader`` takes for a GPU, where normalisation follows on the device.
    """
    from timm.data import create_transform
    from timm.data.loader import fast_collate

    transform = create_transform(
        size, is_training=True, use_prefetcher=True, color_jitter=0.0, interpolation="bilinear"
    )
    return transform, fast_collate


class Dali:
    """DALI's decoder with random crops, its resize and its flip, all on the CPU.

    A pipeline of DALI's reads in its own order, whatever batches it is asked for. Its threads are
    of this process; they are started once for each number of them, which is not counted.
    """

    def __init__(self, index: ImageIndex, size: int):
        self.index, self.size = index, size
        self.built: dict[tuple[int, int], Any] = {}

    def __call__(self, batches: list[Batch], workers: int) -> Iterator[Any]:
        batch = len(batches[0].indices)
        pipeline = self._pipeline(batch, max(1, workers))
        for _ in batches:
            yield pipeline.run()

    def _pipeline(self, batch: int, threads: int) -> Any:
        if (batch, threads) not in self.built:
            from nvidia.dali import fn, pipeline_def, types

            @pipeline_def(batch_size=batch, num_threads=threads, device_id=None, seed=0)
            def crops() -> Any:
                number = range(len(self.index))
                data, targets = fn.readers.file(
                    files=[self.index.path(i) for i in number],
                    labels=[int(self.index.targets[i]) for i in number],
                    random_shuffle=True,
                    initial_fill=len(self.index),
                )
                images = fn.decoders.image_random_crop(
                    data,
                    device="cpu",
                    output_type=types.RGB,
                    random_area=[0.08, 1.0],
                    random_aspect_ratio=[3 / 4, 4 / 3],
                )
                images = fn.resize(images, size=[self.size, self.size], antialias=True)
                return fn.flip(images, horizontal=fn.random.coin_flip()), targets

            built = crops()
            with silent_stderr():  # it complains about each codec for GPUs that is not there
                built.build()
            for _ in range(4):  # until its queues are full
                built.run()
            self.built[batch, threads] = built
        return self.built[batch, threads]
