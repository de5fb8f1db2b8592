"""Evaluate a run's best model, and write a page about it: accuracy by class, mistakes, calibration.

    python scripts/model_results.py runs/my_run
    torchrun --nproc_per_node=4 scripts/model_results.py runs/my_run DATA --part test
    python scripts/model_results.py runs/a runs/b DATA
    python scripts/model_results.py runs/my_run --images photo.jpg another.png
    python scripts/model_results.py runs/my_run imagenetv2-matched-frequency --real real.json
    python scripts/model_results.py runs/my_run --export my_model

Writes results_PART.html, one file without any other, and predictions_PART.csv with all predictions
into the run's folder (with two runs, into the second one's). DATA is that of the training, or
another set with some of its classes, matched by the names of their folders: DATA/val/CLASS, or
DATA/CLASS. Predictions are then among these classes, as for ImageNet-A and -R.
"""

import json
import re
import shlex
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils import launch

launch.prepare()  # before torch is imported, which takes seconds

from compare import page
from results import export, figures, predictions
from results.predictions import Best, Predictions

import imagenet_ddp
from utils import amp, options
from utils.errors import UserError, printable
from utils.option_types import Formatter, Parser, count, positive
from utils.run_directory import OPTIONS, Console
from utils.snapshots import BEST
from utils.world import World, process_group

MISTAKES = 24
TEMPLATE = Path(export.__file__).with_name("results.html")


def parser() -> ArgumentParser:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=Formatter, allow_abbrev=False)
    parser.usage = "%(prog)s RUN [RUN] [DATA] [options]"
    add = parser.add_argument
    text = "one or two run directories, and DATA (default: that of the first run's training)"
    add("places", nargs="+", type=Path, metavar="RUN [RUN] [DATA]", help=text)
    add("--part", choices=("val", "test"), default="val", help="evaluate on DATA/val or DATA/test")
    text = "print the five most likely classes of these image files, and show them on the page"
    add("--images", nargs="+", type=Path, default=[], metavar="FILE", help=text)
    text = "also score by the ReaL labels of ImageNet's validation images (Beyer et al. 2020)"
    add("--real", type=Path, metavar="FILE", help=text)
    text = "where DATA has some of the classes: predict among all that the model knows"
    add("--all-classes", action="store_true", help=text)
    add("--out", type=Path, metavar="DIR", help="folder of the page, in place of the run's")
    text = "write model.safetensors, config.json (as timm's) and README.md into DIR; no evaluation"
    add("--export", type=Path, metavar="DIR", help=text)
    add("--onnx", action="store_true", help="with --export: also model.onnx")
    add("-b", "--batch-size", type=positive, default=64, metavar="N", help="images per process")
    text = "data loading workers of this node"
    add("-j", "--workers", type=count, default=options.CORES, metavar="N", help=text)
    add("--max-bad-files", type=count, default=100, metavar="N", help="unreadable images to allow")
    amp.add_options(parser)
    launch.add_options(parser)
    return parser


def main() -> int:
    own = parser().parse_args()
    runs = [place for place in own.places[:2] if (place / BEST).is_file() or place.is_file()]
    runs = runs if runs[:1] == own.places[:1] else own.places[:1]
    best = [predictions.load(run) for run in runs]
    rest = own.places[len(runs) :]
    if len(rest) > 1:
        text = f"{rest[0]} has no {BEST}: give one or two runs, then DATA"
        raise UserError(text, on_every_rank=True)
    if own.export:
        files = export.export(best[0], own.export, own.onnx)
        print(f"{best[0].path} -> {', '.join(map(str, files))}")
        return 0
    if len(best) == 2 and best[0].classes != best[1].classes:
        raise UserError(f"{runs[0]} and {runs[1]} have different classes", on_every_rank=True)
    if own.real:
        figures.real_labels(own.real)  # now, not after the evaluation
    out = own.out or (runs[-1] if runs[-1].is_dir() else runs[-1].parent)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (probe := out / ".results.tmp").touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        text = f"cannot write into {out} ({error.strerror}): choose a folder with --out"
        raise UserError(text, on_every_rank=True) from None
    data = rest[0] if rest else recorded_data(runs[0])
    evaluates = bool(rest) or data.is_dir() or not own.images
    return launch.run(
        worker, training_options(own, best, data if evaluates else out, out, evaluates)
    )


def recorded_data(run: Path) -> Path:
    """DATA of the training. Raises: `UserError`."""
    file = (run if run.is_dir() else run.parent) / OPTIONS
    try:
        return Path(json.loads(file.read_text())["data"])
    except (OSError, ValueError, KeyError, TypeError):
        text = f"{file} does not say what {run} was trained on: give DATA"
        raise UserError(text, on_every_rank=True) from None


def training_options(
    own: Namespace, best: list[Best], data: Path, out: Path, evaluates: bool
) -> options.Options:
    """The options of an evaluation by imagenet_ddp.py, and this command's own beside them."""
    words = ["-a", best[0].content["arch"], "-e", "--resume", str(best[0].path), str(data)]
    base = options.parse(imagenet_ddp.parser(), words)
    mine = {name: value for name, value in vars(own).items() if name != "resume"}
    mine |= {"data": str(data), "out": out, "best": [one.path for one in best]}
    command = printable(shlex.join(["python", "scripts/model_results.py", *sys.argv[1:]]))
    return base.replaced(**mine, evaluates=evaluates, command=command)


def worker(args: options.Options) -> int:
    """One process of the job: predict its share; rank 0 writes the page."""
    with process_group(args) as world:
        Console(None, world)  # shows warnings, such as unreadable images
        best = [predictions.load(path) for path in args.best]
        results = []
        for one in best if args.evaluates else []:
            sizes = one.preprocessing
            own = args.replaced(preprocessing=sizes, image_size=sizes.image_size)
            results.append(predictions.predict(one, own, world))
        if world.is_main:
            write(args, best, results, world)
    return 0


def write(args: Any, best: list[Best], results: list[Predictions], world: World) -> None:
    """Print the results, and write page and predictions. Raises: `UserError`."""
    labels = [one.path.parent.name if one.path.name == BEST else one.path.name for one in best]
    if len(set(labels)) < len(labels):
        labels = [str(one.path.parent) for one in best]
    labels = [printable(label) for label in labels]
    part = "images"
    if results:
        root = Path(results[0].root).resolve()
        part = args.part if root.name == args.part else root.name
        part = re.sub(r"[^\w.-]", "_", part)[:100]
    shown = [
        one | {"label": label if len(best) > 1 else ""}
        for model, label in zip(best, labels, strict=True)
        for one in (predictions.of_files(model, args.images, world) if args.images else [])
    ]
    for one in shown:
        text = f"cannot be read: {one['error']}" if "error" in one else ""
        text = text or ", ".join(f"{name} {100 * p:.1f} %" for name, p in one["ranked"])
        label = f" ({one['label']})" if one["label"] else ""
        print(printable(f"{one['path']}{label}: {text}"))
    runs = [section(one, label, args) for one, label in zip(results, labels, strict=False)]
    try:
        for number, (one, run) in enumerate(zip(results, runs, strict=True), 1):
            csv = args.out / f"predictions_{part}{f'_{number}' if len(results) == 2 else ''}.csv"
            predictions.write_csv(one, csv)
            estimates = "  ".join(
                f"{name} {e.value:.4g} ({e.low:.4g} to {e.high:.4g})"
                for name, e in run["summary"].items()
            )
            print(f"{run['label']}: {run['images']} images  {estimates}")
            print(f"{run['label']}: expected calibration error {run['error']:.2f} %; {csv}")
        file = args.out / f"results_{part}{'_2_runs' if len(best) == 2 else ''}.html"
        file.write_text(render(args, results, runs, shown), encoding="utf-8")
    except OSError as error:
        text = f"cannot write into {args.out} ({error.strerror}): choose a folder with --out"
        raise UserError(text) from None
    print(f"page: {file}")


def section(result: Predictions, label: str, args: Any) -> dict[str, Any]:
    """The figures of one run, for the page."""
    error, curve = figures.calibration(result)
    summary = figures.summary(result)
    if args.real:
        summary["ReaL (%)"] = figures.real_accuracy(result, args.real)
    run = {"label": label, "summary": summary, "error": error, "curve": curve}
    run |= {"images": len(result.paths), "classes": figures.by_class(result), "cells": None}
    if len(result.present) <= figures.MOST_CLASSES and not args.all_classes:
        run |= figures.confusion_matrix(result)
    run["confusions"] = figures.frequent_confusions(result)
    run["mistakes"] = [
        {
            "path": result.paths[row],
            "picture": result.thumbnail(row),
            "predicted": result.classes[result.top[row, 0]],
            "true": result.classes[result.targets[row]],
            "probability": float(result.probabilities[row, 0]),
            "of_true": float(result.of_target[row]),
        }
        for row in figures.confident_mistakes(result, MISTAKES)
    ]
    return run


def render(args: Any, results: list[Predictions], runs: list[dict], shown: list[dict]) -> str:
    """The page. ``shown``: the predictions for single image files."""
    notes = []
    for one in results[:1]:
        notes.append(f"{len(one.paths)} images in {len(one.present)} classes of {one.root}")
        if len(one.present) < len(one.classes):
            among = "all of them" if args.all_classes else "those of this set"
            notes.append(f"the model knows {len(one.classes)} classes; it chooses among {among}")
        if bad := one.unreadable:
            more = f" and {len(bad) - 10} more" if len(bad) > 10 else ""
            notes.append(f"{len(bad)} images could not be read: {', '.join(bad[:10])}{more}")
    lines = [(run["label"], run["curve"]) for run in runs] + [("perfect", [(0, 0), (100, 100)])]
    title, axes = "Reliability", ("accuracy, %", "% confidence")
    chart = page.Chart(title, *axes, lines, zero=True, plain=("perfect",))
    return page.render(
        TEMPLATE,
        title=f"Results of {' and '.join(run['label'] for run in runs) or 'a model'}",
        notes=notes,
        runs=runs,
        predicted=shown,
        chart=chart,
        changes=figures.changes(*results) if len(results) == 2 else None,
        command=args.command,
    )


if __name__ == "__main__":
    launch.run_main(main)
