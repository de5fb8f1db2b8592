"""Build the batches of a run from its options: open DATA's parts, and give each its loader."""

from dataclasses import dataclass
from pathlib import Path

import torch

from utils.data import classes as choose
from utils.data.batches import BadFiles, EvalBatches, TrainBatches
from utils.data.dummy import Dummy
from utils.data.images import ImageBatches
from utils.data.opening import check_same_classes, class_folders, has_classes, has_part, open_source
from utils.data.preprocessing import Preprocessing
from utils.data.samplers import EvalSampler, TrainSampler, step_shape
from utils.data.sources import Source
from utils.start import agreement
from utils.start.errors import UserError, printable
from utils.start.option_types import Options
from utils.start.world import World, broadcast_from_rank0, first_on_node


@dataclass
class Loaders:
    """The batches of a run's parts; None for a part that is missing or not needed."""

    classes: list[str]
    dtype: torch.dtype  # of the images
    train: TrainBatches | None = None
    val: EvalBatches | None = None
    test: EvalBatches | None = None

    def use(self, how: Preprocessing) -> None:
        """`Batches.use` for all parts."""
        for part in (self.train, self.val, self.test):
            if part is not None:
                part.use(how)


def build_loaders(args: Options, world: World, dtype: torch.dtype) -> Loaders:
    """The batches of this rank, of DATA/train, DATA/val and, if present, DATA/test.

    ``dtype`` is that of the first layer. Raises: `UserError` for missing folders, classes that
    differ between train and val, too few images, or a data set that differs between nodes.
    """
    if args.dummy:
        parts = (args.part,) if args.evaluate else ("train", "val")
        sources: dict[str, Source] = {part: Dummy(part, args.classes) for part in parts}
    else:
        sources = _open_parts(args, world)
    loaders = Loaders(next(iter(sources.values())).classes, dtype)
    if "train" in sources:
        loaders.train = _train_batches(sources["train"], args, world, dtype)
    if "val" in sources:
        loaders.val = _eval_batches(sources["val"], args, world, dtype)
    if "test" in sources:
        loaders.test = _eval_batches(sources["test"], args, world, dtype)
    loaders.use(args.preprocessing)
    return loaders


def _open_parts(args: Options, world: World) -> dict[str, Source]:
    """The images of the parts of DATA that this run needs: train, val, test."""
    root, first = Path(args.data), "train"
    world.stage(f"reading the lists of images in {root}")
    # Opening a part is collective, so rank 0 decides, and a node without it reports that.
    has_test = broadcast_from_rank0(lambda: _has_test(root, args.evaluate), world)
    parts = ["train", "val", *["test"] * has_test]
    if args.evaluate:
        parts, first = [args.part], "train" if has_part(root / "train") else args.part

    def find_classes() -> list[str]:
        classes = choose.select(args.classes, class_folders(root / first))
        for part in parts:
            if part != first:
                check_same_classes(root, part, classes, subset=bool(args.classes))
        return classes

    # The first process of a node makes the index of tar files; the others read its cache.
    classes = first_on_node(find_classes, world)
    return {part: _open_part(part, classes, args, world) for part in parts}


def _has_test(root: Path, evaluate: bool) -> bool:
    """Whether the test part has classes. Notes a folder of test images without them."""
    if has_classes(root / "test"):
        return True
    if has_part(root / "test") and not evaluate:
        text = f"note: {root / 'test'} has no class folders: the best model is not tested on it"
        print(printable(text), flush=True)
    return False


def _open_part(part: str, classes: list[str], args: Options, world: World) -> Source:
    root = Path(args.data) / part
    # The first process of a node lists the folder; the others read its cache.
    source = first_on_node(lambda: open_source(root, classes, world.local_rank == 0), world)
    agreement.compare_data(f"the data set's {part} folder", source, world)
    return source


def part_batches(
    part: str, classes: list[str], args: Options, world: World, dtype: torch.dtype
) -> EvalBatches:
    """The batches of DATA/``part`` alone, for evaluation; see `build_loaders`."""
    return _eval_batches(_open_part(part, classes, args, world), args, world, dtype)


def _eval_batches(source: Source, args: Options, world: World, dtype: torch.dtype) -> EvalBatches:
    dataset = ImageBatches(source, args.image_size, args.seed, train=False)
    replica = (world.data_parallel_rank, world.data_parallel_size)
    sampler = EvalSampler(len(source), args.batch_size, replica)
    to = (world.device, args.memory_format, dtype)
    bad = BadFiles(source, args.max_bad_files)
    return EvalBatches(dataset, sampler, bad, to, _workers(args, world))


def _workers(args: Options, world: World) -> int:
    """Data loading workers of this process."""
    return -(-args.workers // world.local_size)


def _train_batches(source: Source, args: Options, world: World, dtype: torch.dtype) -> TrainBatches:
    """Raises: `UserError` if there are too few images for one step."""
    processes = world.data_parallel_size
    total, accum = step_shape(args, processes, len(source))
    if len(source) < 2 * processes * accum:
        is_split = args.global_batch and accum > 1
        remedy = "give a larger -b" if is_split else "use fewer, or more images"
        raise UserError(
            f"{len(source)} training images are too few for {processes} processes x "
            f"{accum} accumulation steps (at least 2 for each): {remedy}",
            on_every_rank=True,
        )
    if total < processes * accum:
        raise UserError(
            f"--global-batch {total} has too few images for {processes} processes x {accum} "
            f"micro-batches: give a larger {'-b' if accum > 1 else '--global-batch'}",
            on_every_rank=True,
        )
    dataset = ImageBatches(source, args.image_size, args.seed, True, args.crop_scale)
    replica = (world.data_parallel_rank, processes)
    sampler = TrainSampler(len(source), args.batch_size, replica, accum, args.seed, total)
    sampler.sizes = args.epoch_sizes
    to = (world.device, args.memory_format, dtype)
    bad = BadFiles(source, args.max_bad_files)
    batches = TrainBatches(dataset, sampler, bad, to, _workers(args, world))
    change_training_batches(batches, args, len(source.classes))
    return batches


def change_training_batches(batches: TrainBatches, args: Options, classes: int) -> None:
    """Apply the options that change training crops or whole batches."""
    if args.auto_augment or args.random_erasing:
        from utils.data import augment

        batches.dataset.augment = augment.build(args.auto_augment, args.random_erasing)
    if args.mixup or args.cutmix:
        from utils.data import mixing

        batches.mix = mixing.build((args.mixup, args.cutmix), batches.sampler, classes)
