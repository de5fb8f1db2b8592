"""From image folders to batches on the device."""

import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from utils import images as im
from utils import processes
from utils.distributed import World, check_alike
from utils.errors import UserError
from utils.index import ImageIndex, check_same_classes, class_folders, select_classes
from utils.metrics import UNREADABLE
from utils.samplers import Batch, EvalSampler, TrainSampler

MEAN = (0.485, 0.456, 0.406)  # ImageNet's, per channel, for pixels in 0..1
STD = (0.229, 0.224, 0.225)


class ImageBatches(Dataset):
    """Whole batches of ``index``: training crops if ``train``, else centre crops.

    A batch is (images uint8 [n, size, size, 3], targets int64 [n], faults): ``faults`` lists
    (image, reason) for files that could not be read. In training such an image is replaced by the
    next readable one in the index, so that no other sample moves; in evaluation its target is
    `UNREADABLE`. Augmentation is a function of (seed, epoch, image): see `utils.samplers.Batch`.
    """

    def __init__(
        self,
        index: ImageIndex,
        size: int,
        seed: int,
        train: bool,
        crop_scale: float = im.CROP_SCALE,
        resize: int | None = None,
    ):
        self.index, self.size, self.seed, self.train = index, size, seed, train
        self.crop_scale, self.resize = crop_scale, resize

    def __len__(self) -> int:
        return len(self.index)

    def __getitems__(self, batch: Batch) -> tuple[Tensor, Tensor, list[tuple[int, str]]]:
        n = len(batch.indices)
        images = torch.zeros(n, self.size, self.size, 3, dtype=torch.uint8)
        targets = torch.full((n,), UNREADABLE, dtype=torch.int64)
        faults: list[tuple[int, str]] = []
        for row, wanted in enumerate(batch.indices.tolist()):
            draw = random.Random((self.seed << 72) | (batch.epoch << 48) | wanted)
            for step in range(len(self) if self.train else 1):
                found = (wanted + step) % len(self)
                try:
                    with open(self.index.path(found), "rb", buffering=0) as file:
                        image = im.decode(file.readall())
                except (OSError, ValueError) as fault:
                    faults.append((found, str(fault)))
                    continue
                images[row] = (
                    im.train_view(image, self.size, draw, self.crop_scale)
                    if self.train
                    else im.eval_view(image, self.size, self.resize)
                )
                targets[row] = int(self.index.targets[found])
                break
        return images, targets, faults


@dataclass
class BadFiles:
    """Unreadable files of one loader: each is named once; more than ``limit`` end the run."""

    index: ImageIndex
    limit: int
    log: Callable[[str], None] = print
    seen: set[int] = field(default_factory=set)

    def note(self, faults: list[tuple[int, str]]) -> None:
        """Name the new ones among ``faults``. Raises `UserError` past the limit."""
        for image, reason in faults:
            if image not in self.seen:
                self.seen.add(image)
                self.log(f"unreadable image {self.index.path(image)}: {reason}")
        if len(self.seen) > self.limit:
            raise UserError(
                f"more than {self.limit} image files could not be read (--max-bad-files), the last "
                f"one {self.index.path(image)}: check the disk and the copy of the data set"
            )


class Batches:
    """Batches on the device; ``waited`` counts the seconds that the caller stood still for them.

    Iterating gives (images, targets): float [n, 3, size, size], normalised, and int64 [n].
    """

    def __init__(
        self,
        dataset: ImageBatches,
        sampler: TrainSampler | EvalSampler,
        bad: BadFiles,
        place: tuple[torch.device, torch.memory_format],
        workers: int,
    ):
        self.sampler, self.bad, self.waited = sampler, bad, 0.0
        self.device, self.layout = place
        cuda = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if cuda else None
        scale = torch.tensor([1 / (255 * s) for s in STD])
        shift = torch.tensor([-m / s for m, s in zip(MEAN, STD, strict=True)])
        self.scale = scale.view(1, 3, 1, 1).to(self.device)
        self.shift = shift.view(1, 3, 1, 1).to(self.device)
        self.loader = DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=workers,
            collate_fn=_as_it_is,
            pin_memory=cuda,
            worker_init_fn=_quiet_worker,
            # A process that was itself spawned would spawn its workers: each would import torch
            # anew, for seconds in which a Ctrl-C could still end it.
            multiprocessing_context="fork" if workers else None,
            persistent_workers=workers > 0,
        )

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        before = time.perf_counter()
        for images, targets, faults in self.loader:
            self.waited += time.perf_counter() - before
            if faults:
                self.bad.note(faults)
            yield self._upload(images, targets)
            before = time.perf_counter()

    def _upload(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if self.stream is None:
            return self._normalise(images), targets
        # On a stream of its own the copy runs while the device still computes the last step.
        with torch.cuda.stream(self.stream):
            images = self._normalise(images.to(self.device, non_blocking=True))
            targets = targets.to(self.device, non_blocking=True)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        images.record_stream(current)
        targets.record_stream(current)
        return images, targets

    def _normalise(self, images: Tensor) -> Tensor:
        """uint8 [n, s, s, 3] to (x / 255 - MEAN) / STD as float32 [n, 3, s, s], in one kernel."""
        out = torch.addcmul(self.shift, images.permute(0, 3, 1, 2), self.scale)
        return out.contiguous(memory_format=self.layout)


def _as_it_is(batch: Any) -> Any:
    return batch


def _quiet_worker(_: int) -> None:
    # Ctrl-C and a scheduler's SIGTERM reach the whole process group; only the training process
    # decides what to do, and it needs its workers until the snapshot is written.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    processes.die_with_parent()


@dataclass
class Loaders:
    """The batches of a run; None where there is no such part, or no use for it."""

    classes: list[str]
    train: Batches | None = None
    val: Batches | None = None
    test: Batches | None = None


def build_loaders(args: Any, world: World) -> Loaders:
    """Index DATA/train, DATA/val and, if present, DATA/test; make their loaders for this rank.

    Raises: `UserError` for missing folders, classes that differ between train and val, too few
    images, or a data set that differs between nodes.
    """
    if args.dummy:
        return Loaders([str(number) for number in range(args.dummy_classes)])
    root = Path(args.data)
    evaluate_only = args.evaluate and not (root / "train").is_dir()
    folders = class_folders(root / ("val" if evaluate_only else "train"))
    classes = select_classes(args.classes, folders)
    parts = ["val"] + (["test"] if (root / "test").is_dir() else [])
    for part in parts:
        check_same_classes(root, part, classes, subset=bool(args.classes))

    workers = -(-args.workers // world.local_size)
    ranks = (world.rank, world.size)

    def batches(part: str, train: bool) -> Batches:
        index = ImageIndex(root / part, classes)
        check_alike(f"the data set {root / part}", index.fingerprint(), world)
        sampler: TrainSampler | EvalSampler
        if train:
            if len(index) < 2 * world.size * args.accum_steps:
                raise UserError(
                    f"{len(index)} training images are too few for {world.size} processes x "
                    f"{args.accum_steps} accumulation steps (at least 2 each)",
                    alike=True,
                )
            sampler = TrainSampler(len(index), args.batch_size, ranks, args.accum_steps, args.seed)
        else:
            sampler = EvalSampler(len(index), args.batch_size, ranks)
        dataset = ImageBatches(
            index, args.image_size, args.seed, train, args.crop_scale, args.val_resize_size
        )
        bad = BadFiles(index, args.max_bad_files)
        return Batches(dataset, sampler, bad, (world.device, args.memory_format), workers)

    return Loaders(
        classes,
        train=None if args.evaluate else batches("train", train=True),
        val=batches("val", train=False),
        test=batches("test", train=False) if "test" in parts else None,
    )
