"""Evaluate a run's best model. Write a page with its accuracy by class, mistakes and calibration.

    python scripts/model_results.py runs/my_run
    torchrun --nproc_per_node=4 scripts/model_results.py \\
        runs/my_run DATA --part test
    python scripts/model_results.py runs/a runs/b DATA
    python scripts/model_results.py runs/my_run --images photo.jpg another.png
    python scripts/model_results.py runs/my_run DATA --real real.json
    python scripts/model_results.py runs/my_run --export my_model

Writes results_PART.html, which needs no other file, and predictions_PART.csv with all predictions
into the run's folder (of two runs, one page and two CSV files into the second one's). DATA is the
training's data set, or another one with some of its classes in DATA/val/CLASS or DATA/CLASS. Folder
names say which. The model then chooses among these classes only, as is usual for ImageNet-A and -R.
"""

import json
import os
import re
import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils.start import launch

launch.prepare()  # before torch is imported, which takes seconds

from utils.data.options import CORES
from utils.model.options import add_amp
from utils.start.option_types import Formatter, Options, Parser, count, place, positive


def parser() -> ArgumentParser:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=Formatter, allow_abbrev=False)
    parser.usage = "%(prog)s RUN [RUN] [DATA] [options]"
    add = parser.add_argument
    text = "one or two run directories, and DATA (default: the data set of the first run)"
    add("places", nargs="+", type=Path, metavar="RUN [RUN] [DATA]", help=text)
    add("--part", choices=("val", "test"), default="val", help="evaluate on DATA/val or DATA/test")
    text = "print the five most likely classes of these image files, and show them on the page"
    text += "; a folder stands for the images in it"
    add("--images", nargs="+", type=place, default=[], metavar="FILE", help=text)
    text = "also score by the ReaL labels of ImageNet's validation images (Beyer et al. 2020)"
    add("--real", type=place, metavar="FILE", help=text)
    text = "if DATA has only some of the classes: choose among all classes of the model"
    add("--all-classes", action="store_true", help=text)
    add("--out", type=place, metavar="DIR", help="folder for the files; default: the run's")
    text = "write model.safetensors, config.json (as timm's) and README.md into DIR; no evaluation"
    add("--export", type=place, metavar="DIR", help=text)
    add("--onnx", action="store_true", help="with --export: also model.onnx")
    add("-b", "--batch-size", type=positive, default=64, metavar="N", help="images per process")
    text = "data loading workers of this node"
    add("-j", "--workers", type=count, default=CORES, metavar="N", help=text)
    add("--max-bad-files", type=count, default=100, metavar="N", help="unreadable images to allow")
    add_amp(parser)
    launch.add_options(parser)
    return parser


if __name__ == "__main__":
    parser().parse_intermixed_args()  # before torch is imported
    launch.print_first_line()

from compare import page
from results import export, figures, predictions
from results.predictions import Best, Predictions

import imagenet_ddp
from utils import options
from utils.data import wordnet
from utils.data.opening import has_classes
from utils.data.sources import SUFFIXES, is_hidden
from utils.run.console import Console
from utils.run.run_folder import OPTIONS
from utils.run.snapshots import BEST
from utils.start import errors
from utils.start.errors import UserError, printable
from utils.start.world import World, process_group


class ResultOptions(Options):
    """Those of the evaluation and of this command."""

    best: list[Path]  # files of the models
    evaluates: bool  # whether there are images to evaluate on
    images: list[Path]
    real: Path | None
    all_classes: bool
    out: Path  # folder for the files


def main() -> int:
    own = parser().parse_intermixed_args()
    second = own.places[1:2]
    is_second_run = any(place.is_file() or (place / BEST).is_file() for place in second)
    runs, rest = own.places[: 1 + is_second_run], own.places[1 + is_second_run :]
    best = [Best(run) for run in runs]
    if len(rest) > 1:
        text = f"{rest[0]} has no {BEST}: give one or two runs, then DATA"
        raise UserError(text, on_every_rank=True)
    if own.onnx and not own.export:
        raise UserError("--onnx is a part of --export DIR: give both", on_every_rank=True)
    if own.export and len(best) > 1:
        raise UserError("--export writes one model: give one run", on_every_rank=True)
    if own.export:
        with errors.writing(own.export, "--export"):
            files = export.export(best[0], own.export, own.onnx)
        print(f"{best[0].path} -> {', '.join(map(str, files))}")
        return 0
    if best[0].classes != best[-1].classes:
        raise UserError(f"{runs[0]} and {runs[1]} have different classes", on_every_rank=True)
    # Fail now, not after the evaluation.
    own.images = [file for place in own.images for file in image_files(place)]
    if own.real:
        figures.real_labels(own.real)
    out = own.out or best[-1].path.parent
    with errors.writing(out, "--out"):
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    data = rest[0] if rest else recorded_data(best[0], is_needed=not own.images)
    evaluates = bool(rest) or not own.images or (data is not None and data.is_dir())
    data = data if evaluates and data else out  # a folder that exists
    is_first = os.environ.get("RANK", "0") == "0"  # of torchrun's processes
    if is_first and evaluates and own.part == "val" and has_classes(data / "test"):
        print("note: DATA/val has chosen the best epoch; --part test evaluates on other images")
    # The options with which imagenet_ddp.py would evaluate, and this command's own options.
    words = ["-a", best[0].arch, "-e", "--resume", str(best[0].path), str(data)]
    mine = {name: value for name, value in vars(own).items() if name != "resume"}
    mine |= {"data": str(data), "out": out, "evaluates": evaluates}
    mine["best"] = [one.path for one in best]
    evaluation = options.parse(imagenet_ddp.parser(), words)
    return launch.run(worker, ResultOptions(**vars(evaluation) | mine))


def recorded_data(best: Best, is_needed: bool) -> Path | None:
    """Return the DATA of the training; None if unknown. Raises: `UserError` if it ``is_needed``."""
    file = best.path.parent / OPTIONS
    try:
        return Path(json.loads(file.read_text())["data"])
    except (OSError, ValueError, KeyError, TypeError):
        if not is_needed:
            return None
        text = f"{file} does not say what {best.path} was trained on: give DATA"
        raise UserError(text, on_every_rank=True) from None


def worker(args: ResultOptions) -> int:
    """One process of the job: predict its share; rank 0 writes the page."""
    with process_group(args) as world:
        Console(None, world)  # shows warnings, such as unreadable images
        best = list(map(Best, args.best))
        results = []
        for one in best if args.evaluates else []:
            own = args.replaced(image_size=one.preprocessing.image_size)
            results.append(predictions.predict(one, own, world, args.all_classes))
        if world.is_main:
            with errors.writing(args.out, "--out"):
                write(args, best, results, world)
    return 0


def image_files(place: Path) -> list[Path]:
    """The file ``place``, or the images in the folder ``place``, by name. Raises: `UserError`."""
    if not place.is_dir():
        if not place.exists():
            raise UserError(f"--images {place} is missing", on_every_rank=True)
        return [place]
    files = [file for file in sorted(place.iterdir()) if file.name.lower().endswith(SUFFIXES)]
    if files := [file for file in files if not is_hidden(file.name)]:
        return files
    raise UserError(f"--images {place}: no image is in this folder itself", on_every_rank=True)


def write(args: ResultOptions, best: list[Best], results: list[Predictions], world: World) -> None:
    """Print the results, and write page and predictions. Raises: `UserError`, OSError."""
    paths = [Path(os.path.abspath(one.path)) for one in best]  # "." has no name
    labels = [path.parent.name if path.name == BEST else path.name for path in paths]
    if len(set(labels)) < len(labels):
        labels = [str(path.parent) for path in paths]
    labels = list(map(printable, labels))
    part = re.sub(r"[^\w.-]", "_", results[0].root.resolve().name)[:100] if results else "images"
    names = wordnet.find(best[0].classes, Path(args.data))
    shown, runs = [], []
    for model, label in zip(best, labels, strict=True) if args.images else ():
        for one in predictions.of_files(model, args.images, world):
            shown.append({"label": label if len(best) > 1 else "", **one})
            likely = [f"{names[name]} {100 * p:.1f} %" for name, p in one.get("ranked", ())]
            text = ", ".join(likely) or f"cannot be read: {one['error']}"
            name = f"{one['path']} ({label})" if len(best) > 1 else one["path"]
            print(printable(f"{name}: {text}"))
    for number, (one, label) in enumerate(zip(results, labels, strict=False), 1):
        csv = args.out / f"predictions_{part}{f'_{number}' if len(results) == 2 else ''}.csv"
        predictions.write_csv(one, csv, names)
        summary, (error, curve) = figures.summary(one), figures.calibration(one)
        if args.real:
            summary["ReaL (%)"] = figures.real_accuracy(one, args.real)
        runs.append({"label": label, "result": one, "summary": summary, "error": error})
        runs[-1] |= {"curve": curve, "classes": figures.by_class(one)}
        print(f"{label}: {len(one.paths)} images; in brackets: 95 % intervals")
        for name, (x, low, high) in summary.items():
            print(f"  {name:24} {x:.4g} ({low:.4g} to {high:.4g})")
        print(f"  {'calibration error (%)':24} {error:.4g}\n  all predictions: {csv}")
    file = args.out / f"results_{part}{'_2_runs' if len(best) == 2 else ''}.html"
    html = page.render(
        Path(figures.__file__).with_name("results.html"),
        title=f"Results of {' and '.join(labels) if results else 'a model'}",
        runs=runs,
        predicted=shown,
        drawing=figures.reliability({run["label"]: run["curve"] for run in runs}),
        labels=labels,
        models=[figures.about(one) for one in best],
        changes=figures.changes(*results) if len(results) == 2 else None,
        figures=figures,
        name_of=names.get,
        all_classes=args.all_classes,
        command=printable(errors.command("model_results.py", *sys.argv[1:])),
    )
    file.write_text(html, encoding="utf-8")
    print(f"page: {file}")
    if unreadable := sum("error" in one for one in shown):
        raise UserError(f"{unreadable} of {len(shown)} images cannot be read: see above", True)


if __name__ == "__main__":
    launch.run_main(main)
