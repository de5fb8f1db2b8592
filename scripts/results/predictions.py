"""Load a run's best model, and predict the images of a folder on any number of processes."""

import base64
import csv
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from utils.data import layouts
from utils.data.batches import EvalBatches
from utils.data.images import ImageBatches
from utils.data.loaders import part_batches
from utils.data.opening import class_folders, has_classes, has_part
from utils.data.preprocessing import Preprocessing
from utils.data.samplers import Batch
from utils.data.sources import Source
from utils.metrics import UNREADABLE
from utils.model import amp, blocks, models
from utils.run.snapshots import BEST
from utils.start.atomic import read_checkpoint
from utils.start.errors import UserError
from utils.start.option_types import Options
from utils.start.world import World, as_state_dict

NEEDED = ("state_dict", "arch", "classes", "preprocessing", "model_args")
TOP = 5
THUMBNAIL = 160  # pixels


class Best:
    """The best model of a run: its ``path``, and the ``content`` of the file."""

    def __init__(self, run: Path):
        """``run``: a run directory, or a file. Raises: `UserError`."""
        self.path = run if run.is_file() else run / BEST
        if not self.path.is_file():
            why = f"has no {BEST}" if run.exists() else "does not exist"
            text = f"{run} {why}: name a run directory in which an epoch has finished"
            raise UserError(text, on_every_rank=True)
        self.content = read_checkpoint(self.path)
        if missing := [name for name in NEEDED if name not in self.content]:
            text = f"{self.path} is no {BEST} of this suite: it has no {', '.join(missing)}"
            raise UserError(text, on_every_rank=True)
        self.arch: str = self.content["arch"]
        self.classes: list[str] = self.content["classes"]
        self.preprocessing = Preprocessing.from_dict(self.content["preprocessing"], self.path)

    def build(self) -> nn.Module:
        """The model with its weights, on the CPU, for evaluation. Raises: `UserError`."""
        model = models.create(self.arch, len(self.classes), self.preprocessing.image_size)
        blocks.scale_input_as(self.content, model)
        try:
            model.load_state_dict(as_state_dict(self.content["state_dict"], model.state_dict()))
        except RuntimeError as error:
            text = " ".join(str(error).split())[:250]
            raise UserError(f"{self.path} does not fit {self.arch} ({text})", True) from None
        return model.eval()


@dataclass
class Predictions:
    """A model's predictions for n images, most likely class first.

    ``targets`` int64 [n], ``top`` int64 [n, k] and ``probabilities`` float32 [n, k] (k: at most 5);
    ``losses`` float64 [n]: cross entropy. Class numbers are indices in ``classes``, the model's
    classes; ``present``: numbers of the folder's classes. ``indices`` int64 [n]: numbers of the
    images in ``dataset``.
    """

    classes: list[str]
    present: list[int]
    paths: list[str]
    targets: np.ndarray
    top: np.ndarray
    probabilities: np.ndarray
    losses: np.ndarray
    indices: np.ndarray
    dataset: ImageBatches
    unreadable: list[str] = field(default_factory=list)

    @property
    def hits(self) -> np.ndarray:
        """Whether each of the k classes is the true one: bool [n, k]."""
        return self.top == self.targets[:, None]

    @property
    def of_target(self) -> np.ndarray:
        """The probability of the true class: float64 [n]."""
        return np.exp(-self.losses)

    @property
    def root(self) -> Path:
        """The folder of the images."""
        return Path(self.dataset.source.root)

    def picture(self, row: int) -> str:
        """Return the image as the model sees it: a thumbnail, as a data URL."""
        pixels, *_ = self.dataset.__getitems__(Batch(0, self.indices[row : row + 1]))
        return data_url(pixels[0])


def data_url(pixels: Tensor) -> str:
    """Encode a JPEG thumbnail of ``pixels`` (uint8 [h, w, 3]) as a data URL."""
    picture, buffer = Image.fromarray(pixels.numpy()), io.BytesIO()
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    picture.save(buffer, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def open_part(best: Best, args: Options, world: World) -> EvalBatches:
    """Open the images of DATA/part, or of DATA itself if it holds class folders.

    If the folder has all of the model's classes, and others, only the model's are opened. Raises:
    `UserError` for classes that the model does not know.
    """
    data, part = Path(args.data), args.part
    if not has_part(data / part):  # a folder, or tar files
        if any(has_part(data / name) for name in ("train", "val", "test")):
            raise UserError(f"folder {data / part} is missing", on_every_rank=True)
        if not has_classes(data):
            why = layouts.advice(data)
            text = f"{data} has neither {part}/ nor class folders, nor {BEST}"
            raise UserError(f"{text}: {why}" if why else text, on_every_rank=True)
        part = "."
    names = class_folders(data / part)
    known = [name for name in names if name in set(best.classes)]
    if len(known) == len(best.classes):  # trained with --classes on some of these folders
        names = known
    if unknown := sorted(set(names) - set(best.classes)):
        text = f"{len(unknown)} of the {len(names)} classes in {data / part} are not among the "
        text += f"{len(best.classes)} of {best.path}: {', '.join(unknown[:3])}"
        raise UserError(text, on_every_rank=True)
    dtype = amp.autocast_dtype(args, world) or torch.float32
    batches = part_batches(part, names, args, world, dtype)
    batches.use(best.preprocessing)
    return batches


@torch.no_grad()
def predict(best: Best, args: Options, world: World, all_classes: bool) -> Predictions:
    """Predict every image of DATA/part once, distributed over all processes. All get the result.

    The model chooses among the folder's classes, or with ``all_classes`` among all. Raises:
    `UserError` if too many images are unreadable, or all, and the errors of `open_part`.
    """
    batches = open_part(best, args, world)
    model = best.build().to(memory_format=args.memory_format).to(world.device)
    source, bad, dtype = batches.dataset.source, batches.bad, batches.dtype
    present = [best.classes.index(name) for name in source.classes]
    number = torch.tensor(present, device=world.device)
    excluded = torch.full((len(best.classes),), not all_classes, device=world.device)
    excluded[number] = False
    rows: list[tuple[Tensor, ...]] = []
    for task, (images, targets) in zip(batches.sampler, batches, strict=True):
        with torch.autocast(world.device.type, dtype, enabled=dtype is not torch.float32):
            logits = model(images)
        scores = logits.float().masked_fill(excluded, -torch.inf).log_softmax(1)
        labels = number[targets.clamp(min=0)]
        own = scores.gather(1, labels[:, None])[:, 0]
        top, classes = scores.topk(min(TOP, len(best.classes if all_classes else present)))
        columns = (torch.from_numpy(task.indices).to(labels), labels, classes, top.exp(), own)
        rows.append(tuple(one[targets != UNREADABLE].cpu() for one in columns))
    bad.share(world)
    if bad.too_many:
        raise bad.error()
    arrays = [torch.cat(one).numpy() for one in zip(*rows, strict=True)] if rows else None
    parts = [one for one in world.gather(arrays) if one and len(one[0])]
    if not parts:
        raise UserError(f"none of the images in {source.root} could be read", on_every_rank=True)
    columns = [np.concatenate(one) for one in zip(*parts, strict=True)]
    order = np.argsort(columns[0])
    indices, targets, top, probabilities, own = (column[order] for column in columns)
    return Predictions(
        classes=best.classes,
        present=present,
        paths=[source.name(i) for i in indices.tolist()],
        targets=targets,
        top=top,
        probabilities=probabilities,
        losses=-own.astype(np.float64),
        indices=indices,
        dataset=batches.dataset,
        unreadable=[source.path(image) for image in sorted(bad.seen)],
    )


def write_csv(result: Predictions, path: Path, names: Mapping[str, str]) -> None:
    """Write a line for each image; the header names the columns. ``names``: those of the classes.

    Raises: OSError.
    """
    header = ["path", "true", "predicted", "probability", "probability_of_true", "loss"]
    count, shown = result.top.shape[1], [_cell(names[name]) for name in result.classes]
    header += [f"{name}{i}" for i in range(2, count + 1) for name in ("class", "probability")]
    with open(path, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        for i, (p, loss) in enumerate(zip(result.of_target, result.losses, strict=True)):
            ranked = []
            for label, likely in zip(result.top[i], result.probabilities[i], strict=True):
                ranked += [shown[label], f"{likely:.9g}"]
            row = [_cell(result.paths[i]), shown[result.targets[i]], *ranked[:2]]
            writer.writerow([*row, f"{p:.9g}", f"{loss:.9g}", *ranked[2:]])


def _cell(text: str) -> str:
    """A cell that no spreadsheet program takes for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


@torch.no_grad()
def of_files(best: Best, files: list[Path], world: World) -> list[dict[str, Any]]:
    """Predict image files. Returns for each: path, picture (data URL) and ``ranked``, a list of
    (class, probability); or path and ``error`` if the file cannot be read."""
    paths = b"".join(os.fsencode(file.absolute()) + b"\0" for file in files)
    p = best.preprocessing
    dataset = ImageBatches(Source("/", ["images"], paths, [len(files)]), p.crop, 0, train=False)
    dataset.resize, dataset.interpolation = p.val_resize_size, p.interpolation
    model, results = best.build().to(world.device), []
    mean, std = (torch.tensor(one)[:, None, None] for one in (p.mean, p.std))
    for number, file in enumerate(files):
        pixels, _, reading = dataset.__getitems__(Batch(0, np.array([number])))
        if reading.unreadable:
            results.append({"path": str(file), "error": reading.unreadable[0][1]})
            continue
        images = ((pixels.permute(0, 3, 1, 2) / 255 - mean) / std).to(world.device)
        likely = model(images).float().softmax(1)[0].topk(min(TOP, len(best.classes)))
        pairs = zip(likely.indices.tolist(), likely.values.tolist(), strict=True)
        ranked = [(best.classes[i], probability) for i, probability in pairs]
        results.append({"path": str(file), "ranked": ranked, "picture": data_url(pixels[0])})
    return results
