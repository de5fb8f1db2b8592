"""Where the time of a worker goes, part by part."""

import time
from collections.abc import Callable
from typing import Any

import torch

from utils.data import dataset, jpeg_rows, region_decode
from utils.data import images as im
from utils.data.dataset import ImageBatches
from utils.data.pack import Pack
from utils.samplers import Batch

# What is timed, under which name; a part's time is without that of the parts inside it.
PARTS = (
    (dataset, "_read_file", "read the file"),
    (Pack, "rows", "read the file"),
    (jpeg_rows, "frame_of", "find the size in its header"),
    (ImageBatches, "_cut", "draw the crop"),
    (region_decode, "decode", "decode"),
    (im, "decode", "decode"),
    (jpeg_rows, "between", "cut rows out of the file"),
    (im, "decode_part", "decode"),
    (im, "crop_and_resize", "resize"),
    (im, "view", "mirror, copy into the batch"),
    (ImageBatches, "fill", "the rest"),
)


def of(images: ImageBatches, batches: list[Batch]) -> dict[str, float]:
    """CPU microseconds per image of each part in making ``batches`` here."""
    spent: dict[str, float] = {}
    inside: list[float] = []  # of each part that is under way: the time of parts inside it

    def timed(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            inside.append(0.0)
            began = time.thread_time()
            try:
                return call(*args, **options)
            finally:
                seconds = time.thread_time() - began
                spent[name] = spent.get(name, 0.0) + seconds - inside.pop()
                if inside:
                    inside[-1] += seconds

        return wrapper

    before = [(place, attribute, getattr(place, attribute)) for place, attribute, _ in PARTS]
    out = torch.zeros(len(batches[0].indices), images.size, images.size, 3, dtype=torch.uint8)
    images.fill(out, batches[0])  # what is done once
    for place, attribute, name in PARTS:
        setattr(place, attribute, timed(getattr(place, attribute), name))
    try:
        for batch in batches:
            images.fill(out[: len(batch.indices)], batch)
    finally:
        for place, attribute, call in before:
            setattr(place, attribute, call)
    number = sum(len(batch.indices) for batch in batches)
    return {name: 1e6 * spent[name] / number for *_, name in PARTS if name in spent}


def print_table(title: str, parts: dict[str, float]) -> None:
    """A line for each part, and its share."""
    total = sum(parts.values())
    print(f"\n{title:42}{'us':>8}{'share':>8}")
    for name, spent in parts.items():
        print(f"{name:42}{spent:8.0f}{spent / total:8.0%}")
    print(f"{'all of an image':42}{total:8.0f}", flush=True)
